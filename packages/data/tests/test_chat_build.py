"""Stores of instruction data, read back through LMData, and the command that makes them."""

import argparse
import gzip
import json

import numpy as np
import pytest

pytest.importorskip("jinja2")

from styrax.core import UserError
from styrax.core.errors import UsageError
from styrax.data import ByteTokenizer, LMData, TokenStore, train_bpe
from styrax.data.build import Quarantine
from styrax.data.chat import ChatEncoder, ChatTemplate, build_chat_store, build_preference_store
from styrax.data.chat.command import add_chat_arguments, run_chat


def conversation(i, turns=2):
    words = ["né", "日本", "<|im_end|>", "two words", "{{ x }}"]
    return [
        {"role": role, "content": f"{words[(i + turn) % 5]} {i}.{turn}{role[0]}"}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]


RECORDS = [{"name": f"n{i}", "messages": conversation(i, 1 + i % 3)} for i in range(12)]
WRONG = [
    {"messages": conversation(0)[:1]},
    {"text": "x"},
    {"messages": [{"role": "user"}]},
    {"messages": conversation(1)[:1]},
]


@pytest.mark.parametrize("pack", ["none", "concat", "best_fit"])
def test_the_loss_is_on_what_the_assistant_says(tmp_path, pack):
    store = build_chat_store(RECORDS, tmp_path / "s", ByteTokenizer(), id="name")
    assert store.ids == [record["name"] for record in RECORDS]
    data = LMData(store, seq_len=store.num_tokens, batch_size=1, pack=pack, held_out=0, max_epochs=1)
    said = []
    for batch in data.loader():
        for number in range(1, batch["segment_ids"].max() + 1):
            here = batch["segment_ids"] == number
            targets, loss, tokens = (batch[name][here] for name in ("targets", "loss_mask", "tokens"))
            assert tokens[0] == 256 and (tokens[1:] == targets[:-1]).all(), "one begin token"
            assert targets[-1] == 256 and loss[-1] == 1 and (targets[:-1] < 256).all(), (
                "one end token, and it carries loss"
            )
            said.append(bytes(targets[:-1][loss[:-1] == 1].tolist()).decode())
    expected = [
        "".join(f"{m['content']}<|im_end|>" for m in r["messages"] if m["role"] == "assistant") for r in RECORDS
    ]
    assert sorted(said) == sorted(expected)


def test_documents_are_what_the_encoder_makes_whatever_the_source(tmp_path):
    tokenizer = train_bpe([json.dumps(RECORDS, ensure_ascii=False)] * 3, 300)
    encoder = ChatEncoder(tokenizer)
    (tmp_path / "in").mkdir()
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    (tmp_path / "in/a.jsonl").write_text("\ufeff" + "\n".join(lines[:5]) + "\n\n", encoding="utf-8")
    with gzip.open(tmp_path / "in/b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines[5:]))
    tokenizer.save(tmp_path / "tokenizer.json")
    seen = []
    stores = {
        "iterable": build_chat_store(iter(RECORDS), tmp_path / "1", tokenizer, id="name"),
        "folder": build_chat_store(
            tmp_path / "in", tmp_path / "2", str(tmp_path / "tokenizer.json"), id="name",
            progress=lambda label, done, total: seen.append((done, total)),
        ),
        "files": build_chat_store(
            [tmp_path / "in/a.jsonl", str(tmp_path / "in/*.gz")], tmp_path / "3", tokenizer, id="name"
        ),
    }  # fmt: skip
    assert len({store.fingerprint for store in stores.values()}) == 1
    for index, record in enumerate(RECORDS):
        chat, doc = encoder.encode(record), stores["folder"].docs[index]
        place = slice(doc["start"], doc["start"] + doc["tokens"])
        np.testing.assert_array_equal(stores["folder"].tokens[place], chat.ids)
        np.testing.assert_array_equal(stores["folder"].mask[place], chat.mask)
        assert doc["bytes"] == chat.size == len(stores["folder"].text(index).encode())
    total = sum(path.stat().st_size for path in (tmp_path / "in").iterdir())
    assert seen[-1] == (total, total)
    numbered = build_chat_store(tmp_path / "in", tmp_path / "4", tokenizer)
    assert numbered.ids[4:6] == ["in/a.jsonl@4", "in/b.jsonl.gz@0"]
    assert build_chat_store(RECORDS, tmp_path / "5", tokenizer).ids[3] == "records@3"
    meta = numbered.meta["build"]
    assert meta["kind"] == "chat" and meta["train_on"] == "assistant"
    assert ChatTemplate(meta["template"]["text"]).render(conversation(0)) == ChatTemplate.load("chatml").render(
        conversation(0)
    )
    report = numbered.meta["report"]
    assert report["loss_tokens"] == int(numbered.mask.sum()) and report["longest"] == int(numbered.docs["tokens"].max())
    numbered.verify()


def test_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # Columns are fixed: messages without tool calls have null there.
    records = [{"messages": [{**m, "tool_calls": None} for m in r["messages"]]} for r in RECORDS]
    records[0]["messages"].append({"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]})
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    template = "{% for m in messages %}{{ m.content or '' }}"
    template += "{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}"
    store = build_chat_store(tmp_path / "a.parquet", tmp_path / "s", "byte", template=template)
    assert store.text(0).endswith('a[{"name": "f"}]')
    assert store.text(1) == "".join(m["content"] for m in RECORDS[1]["messages"])


def test_one_bad_record_is_an_error_that_names_it(tmp_path):
    for record, message in zip(
        WRONG,
        [
            r"^records@12 has no token that carries loss: the assistant says nothing in its messages \(user\); repair",
            r"^records@12 has the fields 'text'; expected 'messages', .* or let the build refuse such records",
            r"^records@12 has in messages\[0\] a content that is null",
        ],
    ):
        with pytest.raises(UserError, match=message):
            build_chat_store([*RECORDS, record], tmp_path / "s", ByteTokenizer())
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "a.jsonl").write_text('{"messages": [\n' + json.dumps(WRONG[0]))
    with pytest.raises(UserError, match=r"a.jsonl, line 1, is not JSON"):
        build_chat_store(tmp_path / "a.jsonl", tmp_path / "s", ByteTokenizer())
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(WRONG[0]))
    with pytest.raises(UserError, match=r"a.jsonl, line 2, has no token that carries loss"):
        build_chat_store(tmp_path / "a.jsonl", tmp_path / "s", ByteTokenizer())
    with pytest.raises(UserError, match=r"records@0 has no id in 'key': got None; its fields: name, messages"):
        build_chat_store(RECORDS, tmp_path / "s", ByteTokenizer(), id="key")
    with pytest.raises(UserError, match="two documents have the id 'n0'"):
        build_chat_store([*RECORDS, RECORDS[0]], tmp_path / "s", ByteTokenizer(), id="name")


def test_bad_records_go_to_a_quarantine_with_a_budget(tmp_path):
    mixed = [*RECORDS[:6], *WRONG, *RECORDS[6:]]
    store = build_chat_store(mixed, tmp_path / "s", ByteTokenizer(), on_error=Quarantine(max_fraction=0.25))
    whole = build_chat_store(RECORDS, tmp_path / "t", ByteTokenizer())
    np.testing.assert_array_equal(store.tokens, whole.tokens)
    np.testing.assert_array_equal(store.mask, whole.mask)
    report = store.meta["report"]
    assert (report["documents"], report["kept"]) == (16, 12)
    assert report["dropped"] == {"refused: bad message": 1, "refused: no loss": 2, "refused: unknown shape": 1}
    entries = [json.loads(line) for line in (tmp_path / "s/quarantine-00000.jsonl").read_text().splitlines()]
    assert {entry["id"] for entry in entries} == {f"records@{i}" for i in range(6, 10)}
    with pytest.raises(UserError, match=r"4 of 16 records cannot be used; expected at most 0.2 of them"):
        build_chat_store(mixed, tmp_path / "u", ByteTokenizer(), on_error=Quarantine(max_fraction=0.2))
    assert not (tmp_path / "u").exists()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            {"messages": []},
            "expected names of files or an iterable of records, got a mapping with 'messages'; put one record",
        ),
        (3, "expected names of files or an iterable of records, got 3"),
        (["a.txt"], "cannot read the text sources"),
        (["a.jsonl", {"messages": []}], "expected names of files or records, got both"),
        ([], "nothing was built"),
        (__file__, r"read from .jsonl \(also .gz, .zst\) and .parquet files, got .*test_chat_build.py"),
    ],
)
def test_sources_are_checked(tmp_path, records, message):
    with pytest.raises(UserError, match=message):
        build_chat_store(records, tmp_path / "s", "byte")


def test_settings_are_checked(tmp_path):
    with pytest.raises(UserError, match="on_error = 'quarantine': expected 'raise' or Quarantine"):
        build_chat_store(RECORDS, tmp_path / "s", "byte", on_error="quarantine")
    with pytest.raises(UserError, match="tokenizer 'bpe:4096': expected the tokenizer of the model"):
        build_chat_store(RECORDS, tmp_path / "s", "bpe:4096")
    build_chat_store(RECORDS, tmp_path / "s", "byte")
    with pytest.raises(UserError, match="already exists"):
        build_chat_store(RECORDS, tmp_path / "s", "byte")
    build_chat_store(RECORDS[:3], tmp_path / "s", "byte", overwrite=True)
    assert len(TokenStore(tmp_path / "s")) == 3


def test_pairs_are_two_documents(tmp_path):
    pairs = [
        {
            "id": 7,
            "prompt": r["messages"][:1],
            "chosen": r["messages"][1:2],
            "rejected": [{"role": "assistant", "content": "no"}],
        }
        for r in RECORDS[:1]
    ]
    store = build_preference_store(pairs, tmp_path / "s", ByteTokenizer(), id="id")
    assert store.ids == ["7#chosen", "7#rejected"]
    question, answer = (m["content"] for m in RECORDS[0]["messages"])
    for index, said in enumerate((answer, "no")):
        doc = store.docs[index]
        mask = store.mask[doc["start"] : doc["start"] + doc["tokens"]]
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>\n"
        assert store.text(index) == text
        assert bytes(store[index][:-1][mask[:-1] == 1].tolist()).decode() == f"{said}<|im_end|>"
    with pytest.raises(UserError, match="records@0 has the same messages"):
        build_preference_store([{"chosen": pairs[0]["chosen"], "rejected": pairs[0]["chosen"]}], tmp_path / "t", "byte")
    half = {**pairs[0], "rejected": [{"role": "user", "content": "?"}]}
    refused = build_preference_store([half, *pairs], tmp_path / "u", "byte", on_error=Quarantine(0.5))
    assert refused.ids == ["records@1#chosen", "records@1#rejected"]


def test_the_command(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    add_chat_arguments(parser)
    lines = [*map(json.dumps, RECORDS), json.dumps(WRONG[0])]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    words = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "s"), "--tokenizer", "byte", "--template", "chatml"]
    with pytest.raises(UserError, match="line 13, has no token that carries loss"):
        run_chat(parser.parse_args(words))
    more = ["--on-error", "quarantine", "--max-bad", "0.1", "--train-on", "last"]
    assert run_chat(parser.parse_args([*words, *more, "--json"])) == 0
    shown = json.loads(capsys.readouterr().out)
    store = TokenStore(tmp_path / "s")
    assert shown["kept"] == shown["documents"] == 12 and shown["records"] == 13
    assert shown["dropped"] == {"refused: no loss": 1} and shown["loss_tokens"] == int(store.mask.sum())
    last = build_chat_store(RECORDS, tmp_path / "t", "byte", train_on="last")
    np.testing.assert_array_equal(store.mask, last.mask)
    assert run_chat(parser.parse_args([*words, *more, "--overwrite"])) == 0
    assert "refused: no loss: 1" in capsys.readouterr().out
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}))
    words = [str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "p"), "--tokenizer", "byte", "--preference"]
    assert run_chat(parser.parse_args(words)) == 0
    assert TokenStore(tmp_path / "p").ids == ["p.jsonl@0#chosen", "p.jsonl@0#rejected"]
    with pytest.raises(UsageError, match="--train-on last"):
        run_chat(parser.parse_args([*words, "--train-on", "last"]))
