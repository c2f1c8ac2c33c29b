"""A run that is evaluated on several held-out sets, which its configuration names."""

import json

import numpy as np
import pytest
from flax import nnx
from support import TINY, lines

from styrax.core import UsageError
from styrax.core.cli import main
from styrax.core.config import read_config
from styrax.train.compose import load_model
from styrax.train.config import SCHEMA
from styrax.train.rundir import RunDir

TEXTS = {
    "books": {"one": "It was a dark night.", "two": "She said nothing at all.", "three": "Rain."},
    "code": {"one": "def f(x):\n    return x\n", "two": "f(3) + 1"},
}


def problems(*overrides):
    with pytest.raises(UsageError) as caught:
        SCHEMA.resolve({}, overrides).check()
    return str(caught.value).splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    """A run of four steps over the corpus, with two sets; each document has a row of its own."""
    folder = tmp_path_factory.mktemp("sets")
    for name, texts in TEXTS.items():
        (folder / name).mkdir()
        for title, text in texts.items():
            (folder / name / f"{title}.txt").write_text(text)
    keys = {**TINY, "data.sources": json.dumps([str(corpus)]), "data.pack": '"none"', "data.batch_size": 8}
    keys |= {f"evaluate.{name}.sources": json.dumps([str(folder / name)]) for name in TEXTS}
    keys |= {"model.dropout": 0, "train.steps": 4, "train.eval_every": 2, "checkpoint.every": 2}
    (folder / "run.toml").write_text("".join(f"{key} = {value}\n" for key, value in keys.items()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STYRAX_CACHE", str(folder / "cache"))
        assert main(["train", str(folder / "run.toml"), "--run", str(folder / "run")]) == 0
    return folder


def numpy_loss(model, texts):
    """Sum of the cross-entropies in float64 over documents, and the number of targets."""
    ids = [[256, *text.encode(), 256] for text in texts]  # the byte tokenizer's one special id begins and ends each
    rows = np.zeros((len(ids), 32), np.int32)
    for row, each in zip(rows, ids):
        row[: len(each) - 1] = each[:-1]  # what follows is padding, and seen by nobody
    logits = np.asarray(nnx.jit(lambda model, rows: model(rows))(model, rows), np.float64)
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total = -sum(log_p[row, np.arange(len(each) - 1), each[1:]].sum() for row, each in enumerate(ids))
    return total, sum(len(each) - 1 for each in ids)


def test_each_set_has_the_loss_of_its_own_text(folder):
    logged = lines(folder / "run")
    resolved = read_config(SCHEMA, str(folder / "run" / "config.toml"))
    model, step = load_model(resolved, folder / "run" / "checkpoints", 258)
    assert step == 4
    for name, texts in TEXTS.items():
        total, count = numpy_loss(model, texts.values())
        size = sum(len(text.encode()) for text in texts.values())
        assert logged[3][f"held_out_loss/{name}"] == pytest.approx(total / count, rel=1e-5)
        assert logged[3][f"held_out_bits_per_byte/{name}"] == pytest.approx(total / np.log(2) / size, rel=1e-5)
    assert logged[3]["held_out_loss/books"] != pytest.approx(logged[3]["held_out_loss/code"], rel=1e-3)
    for name in ("", "/books", "/code"):  # every two steps, the run's own among them
        assert [line["step"] for line in logged if f"held_out_loss{name}" in line] == [2, 4]
    page = (folder / "run" / "report.html").read_text()
    assert "held-out loss, books" in page and "held-out text, code" in page and "held-out loss<" in page


def again(folder, *overrides):
    return main(["train", str(folder / "run.toml"), "--run", str(folder / "run"), "train.steps=6", *overrides])


def test_a_changed_set_is_told_when_the_run_is_resumed(folder, monkeypatch, capsys):
    monkeypatch.setenv("STYRAX_CACHE", str(folder / "cache"))
    assert again(folder, "evaluate.code.held_out=0.5", "evaluate.more.store=x") == 1
    said = capsys.readouterr().err
    assert "evaluate.code.held_out: the run has 1.0, asked for 0.5" in said
    assert "evaluate.more.store: the run has None, asked for 'x'" in said
    assert "evaluate.more.seq_len" not in said  # what it has from the data is no difference of its own
    path = folder / "code" / "two.txt"
    before = path.read_text()
    path.write_text("f(4) + 1")
    try:
        assert again(folder) == 1
    finally:
        path.write_text(before)
    said = capsys.readouterr().err
    assert "the held-out text is not that with which the run" in said
    assert "evaluate.code: the run has the fingerprint" in said and "evaluate.books" not in said
    assert len(lines(folder / "run")) == 4


def test_a_set_is_read_as_the_run_is():
    found = problems(
        "data.tokenizer=byte", "data.seq_len=[[0, 64], [5, 128]]", "evaluate.a.kind=tokns", "evaluate.b.seq_len=64",
        "evaluate.b.tokenizer='bpe:300'", "evaluate.c.source=x", "evaluate.d=3", 'evaluate."e f".store=x',
    )  # fmt: skip
    assert [line.partition(";")[0].partition("(")[0].strip() for line in found] == [
        "evaluate.a.kind: no data part named 'tokns'",
        "evaluate.c.source: unknown key",
        "evaluate.d: expected table, got 3",
        'evaluate."e f": expected a name of letters, digits, _ and -',
    ]
    found = problems(
        "data.tokenizer=byte", "data.seq_len=[[0, 64], [5, 128]]", "evaluate.b.seq_len=64",
        "evaluate.b.tokenizer='bpe:300'", "evaluate.c.store=x", "data.held_out=1.0",
    )  # fmt: skip
    assert [line.partition(";")[0] for line in found] == [
        "data.held_out = 1 leaves nothing to train on",
        "evaluate.b.seq_len: 64, and data.seq_len is 128",
        "evaluate.b.tokenizer: 'bpe:300', and data.tokenizer is 'byte'",
    ]


def test_sets_that_cannot_be_made_are_told_together(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STYRAX_CACHE", str(folder / "cache"))
    other = tmp_path / "other"
    words = ["data", "build", str(folder / "books"), "--out", str(other), "--tokenizer", "bpe:300"]
    assert main(words) == 0
    capsys.readouterr()
    code = main(
        ["train", str(folder / "run.toml"), "--run", str(tmp_path / "run"), f"evaluate.bpe.store={other}",
         "evaluate.none.kind=tokens", "evaluate.random.kind=synthetic"]
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == 1
    assert f"evaluate.bpe: the store {other} was made with another tokenizer than the run's: it has" in said
    assert "expected 258 and byte-1" in said
    assert "evaluate.none: the set has neither sources nor a store" in said
    assert "evaluate.random: data of kind='synthetic' as set up here hold out nothing to evaluate on" in said
    assert not RunDir(tmp_path / "run").exists


def test_a_configuration_with_sets_is_written_as_it_was_read():
    tree = {
        "data": {"tokenizer": "byte", "seq_len": 64, "sources": ["a"]},
        "evaluate": {"x": {"store": "s", "held_out": 0.1, "pack": "none"}, "y": {"kind": "mixture", "prefetch": 3}},
    }
    resolved = SCHEMA.resolve(tree)
    assert resolved.diff() == tree
    assert SCHEMA.resolve(resolved.to_dict()) == SCHEMA.resolve(resolved.diff()) == resolved
    assert resolved["evaluate"]["x"].seq_len == resolved["evaluate"]["y"].seq_len == 64
    assert (resolved["evaluate"]["x"].held_out, resolved["evaluate"]["y"].held_out) == (0.1, 1.0)
    assert "evaluate" not in SCHEMA.resolve({}).to_dict()
