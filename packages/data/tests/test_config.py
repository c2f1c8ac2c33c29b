import dataclasses
import errno
import os
import subprocess
import sys
import typing
from pathlib import Path

import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.protocols import Tokenizer
from styrax.data import ByteTokenizer, MixtureConfig, TokensConfig, TokenStore, build_store
from styrax.data import cache as cache_module
from styrax.data.cache import default_cache_dir
from styrax.data.config import SourceConfig


@pytest.fixture
def corpus(tmp_path, documents):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, text in documents.items():
        (folder / name.replace("/", "-")).write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture
def config(corpus):
    return TokensConfig(sources=(str(corpus),), tokenizer="bpe:300", seq_len=32, batch_size=4, held_out=0.1)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def stores(cache):
    return sorted(cache.glob("data/*"))


def test_the_dataset_has_all_that_training_needs(config, cache, documents):
    events = []
    data = config.build(seed=3, cache_dir=cache, progress=lambda *event: events.append(event))
    assert {label for label, _, _ in events} == {"check sources", "train tokenizer", "tokenize"}
    assert data.vocab_size == data.tokenizer.vocab_size == len(data.token_bytes) == 300
    assert data.token_bytes.dtype == np.int32
    assert data.token_bytes[[data.tokenizer.eos_id, data.tokenizer.pad_id]].tolist() == [0, 0]
    assert isinstance(data.tokenizer, Tokenizer)
    assert data.batch(0)["tokens"].shape == (4, 32)
    assert len(data.store) == len(documents)
    assert data.seed == 3
    text = data.tokenizer.decode(data.batch(0)["targets"].ravel().tolist())
    assert "the" in text or "cat" in text
    assert data.held_out_text()


def test_the_store_is_built_once(config, cache, monkeypatch):
    first = config.build(seed=0, cache_dir=cache)
    monkeypatch.setattr(cache_module, "merge", None)
    monkeypatch.setattr(cache_module, "make_tokenizer", None)
    events = []
    other = dataclasses.replace(config, seq_len=16, batch_size=2, held_out=0.2)
    second = other.build(seed=1, cache_dir=cache, progress=lambda *event: events.append(event))
    assert second.store.path == first.store.path
    assert {label for label, _, _ in events} == {"check sources"}


@pytest.mark.parametrize(
    "change", [{"tokenizer": "byte"}, {"split_on": "\n"}, {"max_bytes": 2000}, {"tokenizer": "bpe:290"}]
)
def test_other_settings_make_another_store(config, cache, change):
    config.build(seed=0, cache_dir=cache)
    dataclasses.replace(config, **change).build(seed=0, cache_dir=cache)
    assert len(stores(cache)) == 2


def test_a_changed_file_makes_another_store(config, cache, corpus):
    first = config.build(seed=0, cache_dir=cache)
    file = corpus / "doc-000"
    stat = file.stat()
    content = file.read_bytes()
    file.write_bytes(content[::-1] if content[::-1].isascii() else b"x" * len(content))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the content tells
    second = config.build(seed=0, cache_dir=cache)
    assert second.store.path != first.store.path
    file.write_bytes(content)
    assert config.build(seed=0, cache_dir=cache).store.path == first.store.path


def test_another_place_makes_the_same_store(config, cache, corpus, tmp_path):
    first = config.build(seed=0, cache_dir=cache)
    (tmp_path / "elsewhere").mkdir()
    corpus.rename(tmp_path / "elsewhere" / "corpus")
    moved = dataclasses.replace(config, sources=(str(tmp_path / "elsewhere" / "corpus"),))
    assert moved.build(seed=0, cache_dir=cache).store.path == first.store.path


def test_a_damaged_store_in_the_cache_is_built_anew(config, cache):
    data = config.build(seed=0, cache_dir=cache)
    (data.store.path / "tokens-00000.bin").write_bytes(b"")
    again = config.build(seed=0, cache_dir=cache)
    again.store.verify()
    assert again.fingerprint == data.fingerprint
    assert len(stores(cache)) == 1


def test_a_file_that_changes_meanwhile(config, cache, corpus):
    def progress(label, done, total):
        if label == "train tokenizer":
            (corpus / "doc-003").write_text("other")

    with pytest.raises(UserError, match="doc-003 changed while the store was being built"):
        config.build(seed=0, cache_dir=cache, progress=progress)
    assert stores(cache) == []


def test_two_processes_at_once(config, cache, corpus, python_env):
    code = f"""
import time
from pathlib import Path
from styrax.data import TokensConfig
config = TokensConfig(sources=({str(corpus)!r},), tokenizer="bpe:300", held_out=0.1)
go = Path({str(corpus.parent / "go")!r})
def progress(label, done, total):
    if label == "tokenize":
        print("ready", flush=True)
        while not go.exists():
            time.sleep(0.01)
data = config.build(seed=0, cache_dir=Path({str(cache)!r}), progress=progress)
data.store.verify()
print(data.fingerprint, flush=True)
"""
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=python_env) for _ in range(2)]
    try:
        # Both stand in the middle of the same build.
        assert [process.stdout.readline() for process in both] == ["ready\n", "ready\n"]
        (corpus.parent / "go").touch()
        found = {process.communicate(timeout=60)[0] for process in both}
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert [process.returncode for process in both] == [0, 0]
    assert len(found) == 1
    assert len(stores(cache)) == 1
    assert not [path for path in (cache / "data").iterdir() if path.name.startswith(".")]


def test_an_existing_store(corpus, tmp_path):
    built = build_store([corpus], tmp_path / "s", tokenizer="byte")
    data = TokensConfig(store=str(tmp_path / "s"), held_out=0.1).build(seed=0)
    assert data.store.fingerprint == built.fingerprint
    assert data.vocab_size == 258


def test_neither_or_both():
    with pytest.raises(UserError, match=r"neither sources nor a store; set sources = \[\"corpus"):
        TokensConfig().build(seed=0)
    with pytest.raises(ValueError, match="both set") as caught:
        TokensConfig(sources=("a",), store="b", split_on="", tokenizer="bpee:4096")
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "sources",
        "split_on",
        "tokenizer",
    ]
    with pytest.raises(UserError, match=r"held_out = 1.0: expected 0 or more, and less than 1"):
        TokensConfig(sources=("python:stdlib",), tokenizer="byte", max_bytes=1000, held_out=1.0).build(seed=0)


def test_a_cache_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"cannot write .*file/cache/data"):
        config.build(seed=0, cache_dir=tmp_path / "file" / "cache")


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("STYRAX_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert default_cache_dir() == Path("/one")
    monkeypatch.delenv("STYRAX_CACHE")
    assert default_cache_dir() == Path("/two/styrax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "styrax"


def test_prefetch_and_caps_reach_the_dataset(config, cache):
    data = dataclasses.replace(config, prefetch=0, max_held_out_batches=1).build(seed=0, cache_dir=cache)
    assert data.loader()._prefetch == 0
    assert data.loader(prefetch=5)._prefetch == 5
    assert len(data.held_out()) == 1


def test_every_field_is_described():
    fields = [field.name for field in dataclasses.fields(TokensConfig)]
    assert len(fields) <= 15
    assert all(f"\n        {name}: " in TokensConfig.__doc__ for name in fields)
    assert typing.get_type_hints(TokensConfig)["kind"] == typing.Literal["tokens"]


def test_a_quickstart_subset_of_the_standard_library(cache):
    config = TokensConfig(sources=("python:stdlib",), tokenizer="byte", max_bytes=300_000)
    data = config.build(seed=0, cache_dir=cache)
    assert 100_000 < data.store.num_bytes <= 300_000
    assert 0 < len(data.held_out_documents) < len(data.train_documents)


def test_the_import_and_a_batch_bring_in_nothing_heavy(run_python, cache, corpus):
    code = f"""
        import sys
        from pathlib import Path
        from styrax import data
        names = dir(data)
        assert set(data.__all__) <= set(names)
        assert not {{"numpy", "jax"}} & set(sys.modules)
        config = data.TokensConfig(sources=({str(corpus)!r},), tokenizer="byte", held_out=0.1)
        assert "numpy" not in sys.modules
        built = config.build(seed=0, cache_dir=Path({str(cache)!r}))
        batch = built.batch(0)
        with built.loader() as loader:
            next(loader)
        built.held_out_text(), built.provenance(0, 0), built.tokenizer.decode([104, 105])
        import styrax.data.command
        heavy = {{"jax", "jaxlib", "flax", "grain", "tokenizers", "rich", "absl"}} & set(sys.modules)
        assert not heavy, heavy
        for name in data.__all__:
            getattr(data, name)
        heavy = {{"jax", "flax", "grain", "tokenizers", "rich"}} & set(sys.modules)
        assert not heavy, heavy
    """
    run_python(code)


def test_a_full_disk_in_the_cache(config, cache, monkeypatch):
    def refuse(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("styrax.data.build.writer.sync_file", refuse)
    with pytest.raises(UserError, match=r"No space left on device .* MB free.*free some space"):
        config.build(seed=0, cache_dir=cache)
    assert list((cache / "data").iterdir()) == []
    monkeypatch.undo()
    assert isinstance(config.build(seed=0, cache_dir=cache).store, TokenStore)


def targets(batches):
    return np.concatenate([batch["targets"][batch["loss_mask"] > 0] for batch in batches])


@pytest.mark.parametrize("pack", ["concat", "best_fit", "none"])
def test_a_set_to_evaluate_on_has_all_of_its_documents(config, cache, documents, pack):
    data = config.build(seed=0, cache_dir=cache)
    whole = dataclasses.replace(config, held_out=1.0, max_held_out_batches=None, pack=pack, tokenizer="byte")
    batches = whole.evaluation(data.tokenizer, cache_dir=cache)
    size = sum(len(data.tokenizer.encode(text)) + 1 for text in documents.values())
    assert len(targets(batches)) == size
    decoded = sorted(data.tokenizer.decode_bytes(targets(batches).tolist()))
    assert decoded == sorted("".join(documents.values()).encode())
    assert all(batch["tokens"].shape == (4, 32) for batch in batches)
    assert len(dataclasses.replace(whole, max_held_out_batches=1).evaluation(data.tokenizer, cache_dir=cache)) == 1


def test_a_share_is_that_which_training_leaves_out(config, cache):
    data = config.build(seed=0, cache_dir=cache)
    batches = config.evaluation(data.tokenizer, cache_dir=cache)
    assert np.array_equal(targets(batches), targets(data.held_out()))
    assert batches.fingerprint == data.held_out().fingerprint


def test_a_mixture_is_evaluated_as_all_of_its_sources(config, corpus, cache, tmp_path, documents):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "text").write_text("abc")
    sources = {"a": SourceConfig(sources=(str(corpus),)), "b": SourceConfig(sources=(str(tmp_path / "more"),))}
    mixture = MixtureConfig(sources=sources, seq_len=32, batch_size=4, held_out=1.0, max_held_out_batches=None)
    batches = mixture.evaluation(ByteTokenizer(), cache_dir=cache)
    text = "".join(documents.values()).encode() + b"abc"
    assert sorted(id for id in targets(batches).tolist() if id < 256) == sorted(text)
    before = batches.fingerprint
    (tmp_path / "more" / "text").write_text("abd")
    assert mixture.evaluation(ByteTokenizer(), cache_dir=cache).fingerprint != before


def test_a_store_of_other_tokens_is_no_set(config, corpus, tmp_path):
    build_store([corpus], tmp_path / "s", tokenizer="bpe:300")
    with pytest.raises(UserError, match=r"made with another tokenizer than the run's: it has 300 ids .* expected 258"):
        TokensConfig(store=str(tmp_path / "s"), held_out=1.0).evaluation(ByteTokenizer())
    with pytest.raises(UserError, match=r"the set has neither sources nor a store"):
        TokensConfig().evaluation(ByteTokenizer())
    with pytest.raises(UserError, match=r"the set has no sources"):
        MixtureConfig().evaluation(ByteTokenizer())
