import argparse
import dataclasses
import json

import numpy as np
import pytest

from styrax.core import UsageError, UserError
from styrax.data import ByteTokenizer, LMData, Mixture, TokenStore, command, write_store


@pytest.fixture
def corpus(tmp_path, documents):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in documents.items():
        (folder / name.replace("/", "-")).write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture
def run(capsys):
    def run(*words):
        parser = argparse.ArgumentParser("styrax data")
        command.add_arguments(parser)
        assert command.run(parser.parse_args([str(word) for word in words])) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def built(run, corpus, tmp_path):
    report = json.loads(run("build", corpus, "--out", tmp_path / "s", "--tokenizer", "byte", "--json"))
    return tmp_path / "s", report


def test_build(built, corpus, documents, run, tmp_path):
    out, report = built
    assert report["documents"] == len(documents)
    assert report["bytes"] == sum(len(text.encode()) for text in documents.values())
    assert report["tokens"] == report["bytes"] + len(documents)
    assert report["fingerprint"] == TokenStore(out).fingerprint
    with pytest.raises(UserError, match="--overwrite"):
        run("build", corpus, "--out", out)
    text = run("build", corpus, "--out", out, "--tokenizer", "bpe:300", "--overwrite", "--split-on", "\n")
    assert "documents" in text
    assert TokenStore(out).tokenizer.vocab_size == 300


def test_the_command_in_an_error_rebuilds_the_store(built, run):
    import shlex

    out, report = built
    (out / "tokens-00000.bin").write_bytes(b"")
    with pytest.raises(UserError) as caught:
        TokenStore(out)
    words = shlex.split(str(caught.value).split("`")[1])
    assert words[:2] == ["styrax", "data"]
    run(*words[2:])
    assert TokenStore(out).fingerprint == report["fingerprint"]


def test_inspect_a_document(built, run, documents):
    out, _ = built
    text = list(documents.values())[3]
    report = json.loads(run("inspect", out, "--doc", 3, "--json"))
    assert report["text"] == text
    assert report["tokens"] == [*text.encode(), 256]
    shown = run("inspect", out, "--doc", 3)
    assert shown.startswith("document 3: corpus/doc-003, ")
    assert shown.endswith(text + "\n")
    with pytest.raises(UsageError, match="--doc 99: expected 0 to 39"):
        run("inspect", out, "--doc", 99)


def test_inspect_a_step(built, run):
    out, _ = built
    settings = ("--seq-len", 64, "--batch-size", 2, "--seed", 5)
    report = json.loads(run("inspect", out, "--step", 3, "--json", *settings))
    data = LMData(out, seq_len=64, batch_size=2, seed=5)
    assert [row["row"] for row in report["rows"]] == [0, 1]
    for row in report["rows"]:
        spans = data.provenance(3, row["row"])
        assert [segment["document"] for segment in row["segments"]] == [span.document for span in spans]
        targets = data.batch(3)["targets"][row["row"]]
        whole = b"".join(data.tokenizer.decode_bytes(targets[s.column : s.column + s.length]) for s in spans)
        assert "".join(segment["text"] for segment in row["segments"]) == whole.decode(errors="replace") or (
            "\ufffd" in str(row)
        )
    shown = run("inspect", out, "--step", 3, "--row", 1, *settings)
    assert shown.startswith("step 3, row 1\n  columns 0-")
    assert "row 0" not in shown


def test_stats(built, run):
    out, report = built
    stats = json.loads(run("stats", out, "--json", "--seq-len", 64, "--batch-size", 2, "--held-out", 0.1))
    source = stats["sources"]["data"]
    assert source["documents"] == report["documents"] == sum(source["histogram"].values())
    lengths = TokenStore(out).docs["tokens"]
    for span, count in source["histogram"].items():
        low, high = map(int, span.split("-"))
        assert count == sum(low <= length <= high for length in lengths)
    assert source["longer_than_a_row"] == sum(length > 64 for length in lengths)
    assert source["duplicate_documents"] == 0
    data = LMData(out, seq_len=64, batch_size=2, held_out=0.1)
    one = LMData(out, seq_len=64, batch_size=1, held_out=0.1)
    masks = [one.batch(step)["loss_mask"] for step in range(one.num_rows)]
    assert stats["pad_fraction"] == pytest.approx(1 - np.mean(masks, dtype=np.float64))
    assert stats["rows_per_epoch"] == data.num_rows
    assert stats["held_out_batches"] == len(data.held_out())
    shown = run("stats", out)
    for part in ("pad fraction", "lengths", "█"):
        assert part in shown


def test_duplicates_are_counted(run, tmp_path):
    store = write_store(tmp_path / "twice", {"a": "one", "b": "two", "c": "one"}, ByteTokenizer())
    source = json.loads(run("stats", store.path, "--json"))["sources"]["data"]
    assert (source["duplicate_documents"], source["duplicate_tokens"]) == (1, 4)


def test_the_data_of_a_configuration(built, run, tmp_path):
    out, _ = built
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        train.seed = 5
        [data]
        kind = "mixture"
        seq_len = 64
        batch_size = 2
        weights = {{ one = 1, two = 3 }}
        sources.one.store = "{out}"
        sources.two.store = "{out}"
        [model]
        whatever = 1
        """
    )
    mixture = Mixture({"one": out, "two": out}, {"one": 1, "two": 3})
    data = LMData(mixture, seq_len=64, batch_size=2, seed=5)
    spans = json.loads(run("provenance", "--config", config, "--step", 3, "--row", 1, "--json"))
    assert spans == [dataclasses.asdict(span) for span in data.provenance(3, 1)]
    assert set(json.loads(run("stats", "--config", config, "--json"))["sources"]) == {"one", "two"}
    assert "two: corpus/doc-" in run("inspect", "--config", config, "--step", 3)
    assert run("inspect", "--config", config, "--source", "two", "--id", "corpus/doc-003").startswith("document 3:")
    assert "corpus/doc-" in run("provenance", out, "--step", 0, "--row", 0)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["stats"], "one of them"),
        (["stats", "OUT", "--config", "x.toml"], "one of them"),
        (["stats", "--config", "x.toml", "--seq-len", 3, "--seed", 1], "--seq-len, --seed: the configuration says"),
        (["inspect", "OUT", "--row", 1], "give --step N too"),
        (["inspect", "OUT", "--id", "corpus/doc-03"], "no document 'corpus/doc-03'"),
        (["inspect", "OUT", "--source", "x"], "expected one of data"),
        (["stats", "--config", "nowhere.toml"], "no file nowhere.toml"),
    ],
)
def test_wrong_use_is_named(built, run, words, part):
    out, _ = built
    with pytest.raises(UserError, match=part):
        run(*[out if word == "OUT" else word for word in words])


def test_merge_and_diff(built, run, documents, tmp_path):
    out, report = built
    more = write_store(tmp_path / "more", {"new": "another"}, ByteTokenizer())
    merged = json.loads(run("merge", out, more.path, "--out", tmp_path / "all", "--json"))
    assert merged["documents"] == report["documents"] + 1
    same = json.loads(run("diff", out, out, "--json"))
    assert same["same"]
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["diff", str(out), str(tmp_path / "all")])) == 1


def test_verify(built, run):
    out, _ = built
    assert "verified" in run("verify", out)
    content = bytearray((out / "tokens-00000.bin").read_bytes())
    content[7] ^= 1
    (out / "tokens-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"expected sha256|damaged"):
        run("verify", out)


def test_progress_shows_throughput(capsys):
    from styrax.data.progress import bars

    with bars() as progress:
        progress("train tokenizer", 0, None)
        progress("tokenize", 5, 10)
        progress("tokenize", 10, 10)
    assert "tokenize" in capsys.readouterr().err
