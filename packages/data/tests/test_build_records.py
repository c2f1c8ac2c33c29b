"""What becomes of records in a build: malformed ones, filters, duplicates, texts to keep out, names."""

import argparse
import functools
import json
import shlex
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from styrax.core import UsageError, UserError
from styrax.data import ByteTokenizer, Quarantine, Records, TokenStore, build_store, train_bpe
from styrax.data import command as data_command
from styrax.data.build.filters import load_filter
from styrax.data.build.merge import UniqueNames, repeated
from styrax.data.hashing import hash64


def rows(count, **changes):
    """JSON lines, some of them replaced."""
    lines = [json.dumps({"text": f"text {i}", "n": i}) for i in range(count)]
    for index, line in changes.items():
        lines[int(index[1:])] = line
    return "\n".join(lines) + "\n"


def build(tmp_path, *sources, name="s", **options):
    return build_store(list(sources), tmp_path / name, **{"tokenizer": "byte", "workers": 1, **options})


def contents(store):
    return dict(zip(store.ids, map(store.text, range(len(store))), strict=True))


BAD = {"_3": "{'text': 'x'}", "_5": '{"txt": "x"}', "_7": '{"text": 5}', "_8": '{"txt": "y"}', "_9": '{"text": ""}'}


def test_the_first_malformed_record_is_an_error(tmp_path):
    (tmp_path / "x.jsonl").write_text(rows(20, **BAD))
    with pytest.raises(UserError, match=r"x\.jsonl, line 4, is not JSON: .*; repair it.*on_error=Quarantine"):
        build(tmp_path, tmp_path / "x.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl"]


def test_malformed_records_go_to_a_quarantine(tmp_path):
    (tmp_path / "x.jsonl").write_text(rows(20, **BAD))
    store = build(tmp_path, tmp_path / "x.jsonl", on_error=Quarantine(max_fraction=0.2))
    kept = [i for i in range(20) if f"_{i}" not in BAD]
    assert contents(store) == {f"x.jsonl@{i}": f"text {i}" for i in kept}
    assert store.meta["report"] == {
        "documents": 20,
        "kept": 15,
        "dropped": {"empty": 1, "refused: no text": 2, "refused: not JSON": 1, "refused: text is no string": 1},
    }
    lines = [json.loads(line) for line in (store.path / "quarantine-00000.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"x.jsonl@{i}" for i in (3, 5, 7, 8)]
    assert lines[1] == {
        "id": "x.jsonl@5",
        "reason": "no text: has no field 'text' (did you mean 'txt'?); its fields: txt",
        "excerpt": '{"txt": "x"}\n',
    }
    store.verify()
    # What was refused does not change what the store is.
    (tmp_path / "x.jsonl").write_text(rows(20, _9='{"text": ""}', **{key: "" for key in BAD if key != "_9"}))
    assert build(tmp_path, tmp_path / "x.jsonl", name="t").fingerprint == store.fingerprint


def test_the_budget_is_over_the_whole_build(tmp_path):
    (tmp_path / "a.jsonl").write_text(rows(20, **BAD))
    (tmp_path / "b.jsonl").write_text(rows(80))
    sources = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    with pytest.raises(UserError) as caught:
        build(tmp_path, *sources, on_error=Quarantine(max_fraction=0.03))
    message = str(caught.value).splitlines()
    assert message[:4] == [
        "4 of 100 records cannot be used; expected at most 0.03 of them (3):",
        "  - no text: 2",
        "      a.jsonl@5 has no field 'text' (did you mean 'txt'?); its fields: txt",
        "      a.jsonl@8 has no field 'text' (did you mean 'txt'?); its fields: txt",
    ]
    assert "  - not JSON: 1" in message
    # A larger budget goes on from what was done.
    assert (tmp_path / ".s.parts").is_dir()
    store = build(tmp_path, *sources, on_error=Quarantine(max_fraction=0.04))
    assert store.meta["build"]["on_error"] == {"max_fraction": 0.04}
    assert not (tmp_path / ".s.parts").exists()


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_budget_is_a_share(share):
    with pytest.raises(UserError, match=r"max_fraction = .*expected a share between 0 and 1"):
        Quarantine(max_fraction=share)


def test_text_files_that_are_not_text(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_bytes(b"\xff" if name == "b" else name.encode())
    files = f"{tmp_path}/*.txt"
    with pytest.raises(UserError, match=r"b\.txt is not UTF-8 at byte offset 0"):
        build(tmp_path, files)
    store = build(tmp_path, files, on_error=Quarantine(0.5))
    assert store.meta["report"]["dropped"] == {"refused: not UTF-8": 1}
    store = build(tmp_path, files, errors="skip", overwrite=True)
    assert contents(store) == {f"{tmp_path.name}/a.txt": "a", f"{tmp_path.name}/c.txt": "c"}
    assert store.meta["report"] == {"documents": 3, "kept": 2, "dropped": {"not UTF-8": 1}}
    assert "quarantine-00000.jsonl" not in store.meta["files"]


def even(record):
    return record["n"] % 2 == 0


def shout(record):
    return record["text"].upper()


def mark(record, *, sign):
    return {**record, "text": record["text"] + sign * record["n"]}


def test_filters_keep_change_and_drop(tmp_path):
    (tmp_path / "x.jsonl").write_text(rows(6))
    filters = [even, shout, functools.partial(mark, sign="!"), lambda record: record["n"] != 4 or None]
    store = build(tmp_path, tmp_path / "x.jsonl", filters=filters)
    assert contents(store) == {"x.jsonl@0": "TEXT 0", "x.jsonl@2": "TEXT 2!!"}
    name = f"{__name__}:even"
    assert store.meta["build"]["filters"][0] == name
    assert store.meta["report"]["dropped"][f"filter {name}"] == 3
    assert sum(store.meta["report"]["dropped"].values()) == 4
    assert store.meta["report"]["changed"] == {f"{__name__}:shout": 3, f"{__name__}:mark": 2}


def test_filters_see_texts_and_tables_alike(tmp_path):
    (tmp_path / "a.csv").write_text("content,n\nfrom csv,1\n")
    (tmp_path / "b.txt").write_text("from txt")
    seen = []

    def look(record):
        seen.append(dict(record))
        return np.True_

    build(tmp_path, tmp_path / "a.csv", tmp_path / "b.txt", filters=[look], text="content")
    assert seen == [
        {"content": "from csv", "n": "1", "id": "a.csv@0", "text": "from csv"},
        {"id": "b.txt", "text": "from txt"},
    ]


def fail(record):
    return record["missing"]


def number(record):
    return 7


def spoil(record):
    return "\ud800"


def overwrite(record):
    record["text"] = "other"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (fail, r"fail failed on record 'x\.jsonl@0': KeyError: 'missing'"),
        (overwrite, r"overwrite failed on record 'x\.jsonl@0': TypeError"),
        (number, r"number answered int '7' for record 'x\.jsonl@0'; expected True, False, None, a text"),
        (spoil, "spoil answered str"),
        (lambda record: {"text": "no id"}, "answered dict"),
    ],
)
def test_a_filter_that_fails_names_the_record(tmp_path, function, message):
    (tmp_path / "x.jsonl").write_text(rows(3))
    with pytest.raises(UserError, match=message):
        build(tmp_path, tmp_path / "x.jsonl", filters=[function], on_error=Quarantine(1.0))


def test_filters_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_filters.py").write_text("def short(record): return len(record['text']) < 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert load_filter("my_filters:short")({"text": "abc"})
    for name, message in {
        "my_filters": "expected module:function",
        "my_filters:shirt": r"has no function 'shirt' \(did you mean 'short'\?\)",
        "no_such_module_here:f": "No module named",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_filter(name)


def test_a_build_with_another_filter_takes_up_nothing(tmp_path, monkeypatch):
    (tmp_path / "x.jsonl").write_text(rows(6))
    (tmp_path / "y.jsonl").write_text("no JSON")
    monkeypatch.setattr("styrax.data.build.units.GROUP_BYTES", 10)

    def with_filter(code):
        space = {"__name__": "some_module"}
        exec(code, space)
        return space["f"]

    first, other = with_filter("def f(r): return r['n'] > 1"), with_filter("def f(r): return r['n'] > 2")
    sources = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    with pytest.raises(UserError, match="1 finished parts are kept"):
        build(tmp_path, *sources, filters=[first])
    (tmp_path / "y.jsonl").write_text(rows(1))
    assert len(build(tmp_path, *sources, filters=[other])) == 3


def test_exact_duplicates_the_first_wins(tmp_path, monkeypatch):
    monkeypatch.setattr("styrax.data.build.units.GROUP_BYTES", 100)
    texts = [f"text {i * i % 23}" for i in range(60)]
    store = build(tmp_path, Records(texts), dedup="exact")
    expected = dict.fromkeys(texts)
    assert list(contents(store).values()) == list(expected)
    assert store.ids == [f"records@{texts.index(text)}" for text in expected]
    assert store.meta["report"] == {
        "documents": 60,
        "kept": len(expected),
        "dropped": {"duplicate": 60 - len(expected)},
    }
    assert len(build(tmp_path, Records(texts), name="t")) == 60
    store.verify()


class SameStart:
    """Documents are near when they begin alike."""

    def __init__(self, chars):
        self.settings = {"chars": chars}

    def signatures(self, texts):
        found = [text.encode()[: self.settings["chars"]] for text in texts]
        return np.array([list(start.ljust(self.settings["chars"])) for start in found], np.uint8)

    def duplicates(self, signatures):
        seen, rows = set(), [row.tobytes() for row in signatures]
        return np.array([row in seen or bool(seen.add(row)) for row in rows])


class Words:
    """Documents that hold a word are out."""

    def __init__(self, *words):
        self.settings = {"words": words}

    def hits(self, text):
        return [word for word in self.settings["words"] if word in text]


def test_near_duplicates_and_texts_to_keep_out(tmp_path, monkeypatch):
    monkeypatch.setattr("styrax.data.build.units.GROUP_BYTES", 30)
    texts = ["abc 1", "abd 2", "abc 3 secret", "abe", "xyz secret hidden", "abd", "abe"]
    store = build(tmp_path, Records(texts), dedup=SameStart(3), decontaminate=Words("secret", "hidden"))
    assert list(contents(store).values()) == ["abc 1", "abd 2", "abe"]
    assert store.meta["report"] == {
        "documents": 7,
        "kept": 3,
        "dropped": {"contaminated": 2, "near duplicate": 2},
        "contaminated": {"secret": 2, "hidden": 1},
    }
    assert store.meta["build"]["dedup"] == {"chars": 3}
    assert store.meta["build"]["decontaminate"] == {"words": ["secret", "hidden"]}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_what_was_there_before(hashes):
    high, low = (np.array([pair[i] for pair in hashes], np.uint64) for i in (0, 1))
    assert repeated(high, low).tolist() == [pair in hashes[:i] for i, pair in enumerate(hashes)]


@given(st.lists(st.sampled_from(["a", "b", "a@2", "a@3", "a@2@2", "c"]), max_size=20), st.integers(1, 20))
def test_names_become_unique_in_any_cut(names, cut):
    hashes = np.array([hash64("split", name) for name in names], np.uint64)
    whole, cuts = UniqueNames(hashes), UniqueNames(hashes)
    found, found_hashes = whole.of(names, hashes)
    assert len(set(found)) == len(names)
    assert found_hashes.tolist() == [hash64("split", name) for name in found]
    pieces = [cuts.of(names[i : i + cut], hashes[i : i + cut])[0] for i in range(0, len(names), cut)]
    assert [name for piece in pieces for name in piece] == found
    for index, name in enumerate(names):
        again = names[:index].count(name)
        assert found[index] == name if again == 0 else found[index].startswith(f"{name}@")


def test_records_with_one_id_are_told_apart(tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": t, "u": "same"}) + "\n" for t in "abc"))
    store = build(tmp_path, tmp_path / "x.jsonl", id="u")
    assert store.ids == ["same", "same@2", "same@3"]
    assert store.docs["id_hash"].tolist() == [hash64("split", name) for name in store.ids]


def test_sources_of_every_kind(tmp_path):
    (tmp_path / "x.txt").write_text("a text")
    assert contents(build(tmp_path, tmp_path / "x.txt", Records(["r"]), name="a")) == {
        "x.txt": "a text",
        "records@0": "r",
    }
    for number, source in enumerate([tmp_path / "x.txt", {"a": "b"}, Records(["t"])]):
        assert len(build_store(source, tmp_path / f"s{number}", tokenizer="byte")) == 1
    with pytest.raises(UserError, match=r"Records\(\.\.\.\) around iterables(.|\n)*source 1 is a tuple"):
        build(tmp_path, tmp_path / "x.txt", ("a", "b"))
    with pytest.raises(UserError, match=r"an iterator; expected Records\(\.\.\.\)"):
        build_store(iter(["t"]), tmp_path / "none", tokenizer="byte")
    with pytest.raises(UserError, match="hold no text"):
        build_store(Records(iter([])), tmp_path / "none", tokenizer="byte")


def test_settings_that_are_wrong(tmp_path):
    with pytest.raises(UserError) as caught:
        build(tmp_path, "x", errors="no", split_on="", on_error="quarantine", dedup="fuzzy", workers=0, max_bytes=0)
    names = ["errors", "split_on", "on_error", "dedup", "workers", "max_bytes"]
    assert [line.split()[0] for line in str(caught.value).splitlines()] == names


def test_a_tokenizer_is_trained_on_records_too(tmp_path):
    texts = [f"some words {i}" for i in range(50)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    store = build(tmp_path, tmp_path / "x.jsonl", tokenizer="bpe:280")
    assert store.tokenizer.fingerprint == train_bpe(texts, 280).fingerprint
    assert build(tmp_path, Records(texts), name="t", tokenizer="bpe:280").tokenizer.fingerprint == (
        store.tokenizer.fingerprint
    )
    with pytest.raises(UserError, match="can be read but once"):
        build(tmp_path, Records(iter(texts)), name="u", tokenizer="bpe:280")


def test_a_lossy_tokenizer_is_refused(tmp_path):
    class Lossy(ByteTokenizer):
        def encode_batch(self, texts):
            return [row[:-1] for row in super().encode_batch(texts)]

    with pytest.raises(UserError, match="'records@0' has 2 bytes, but its tokens stand for 1"):
        build(tmp_path, Records(["hi"]), tokenizer=Lossy())


def command(*words):
    parser = argparse.ArgumentParser("styrax data")
    data_command.add_arguments(parser)
    assert data_command.run(parser.parse_args([str(word) for word in words])) == 0


def test_the_command_says_all_that_the_function_does(tmp_path, monkeypatch, capsys):
    (tmp_path / "some_filters.py").write_text("def early(record): return record['n'] < 15\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    lines = [json.dumps({"body": f"text {i % 12}", "n": i, "u": f"u{i}"}) for i in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join([*lines, "broken"]))
    (tmp_path / "held.txt").write_text("text 3")
    options = ["--text", "body", "--id", "u", "--filter", "some_filters:early", "--on-error", "quarantine"]
    options += ["--max-bad", "0.25", "--tokenizer", "byte", "--dedup", "exact", "--workers", 1]
    command("build", "x.jsonl", "--out", "s", *options, "--json")
    shown = json.loads(capsys.readouterr().out)
    store = TokenStore("s")
    assert shown["fingerprint"] == store.fingerprint
    assert store.ids == [f"u{i}" for i in range(12)]
    assert store.meta["report"]["dropped"] == {"duplicate": 3, "filter some_filters:early": 5, "refused: not JSON": 1}
    # The command that an error of a damaged store names makes the same store again.
    (tmp_path / "s" / "ids-00000.jsonl").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        TokenStore("s")
    words = shlex.split(str(caught.value).split("`")[1])
    command(*words[2:], "--json")
    assert TokenStore("s").meta == store.meta
    # What the command cannot say is not said.
    command("build", "x.jsonl", "--out", "t", *options, "--decontaminate", "held.txt")
    assert "u3" not in TokenStore("t").ids
    assert "command" not in TokenStore("t").meta["build"]
