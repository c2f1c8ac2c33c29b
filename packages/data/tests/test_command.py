import argparse
import json

import numpy as np
import pytest

from styrax.core import UsageError, UserError
from styrax.data import LMData, TokenStore, command


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
    assert stats["documents"] == report["documents"]
    data = LMData(out, seq_len=64, batch_size=2, held_out=0.1)
    one = LMData(out, seq_len=64, batch_size=1, held_out=0.1)
    masks = [one.batch(step)["loss_mask"] for step in range(one.num_rows)]
    assert stats["pad_fraction"] == pytest.approx(1 - np.mean(masks, dtype=np.float64))
    assert stats["rows_per_epoch"] == data.num_rows
    assert stats["held_out_batches"] == len(data.held_out())
    assert "pad fraction" in run("stats", out)


def test_verify(built, run):
    out, _ = built
    assert "verified" in run("verify", out)
    content = bytearray((out / "tokens-00000.bin").read_bytes())
    content[7] ^= 1
    (out / "tokens-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match="expected sha256"):
        run("verify", out)


def test_progress_shows_throughput(capsys):
    from styrax.data.progress import bars

    with bars() as progress:
        progress("train tokenizer", 0, None)
        progress("tokenize", 5, 10)
        progress("tokenize", 10, 10)
    assert "tokenize" in capsys.readouterr().err
