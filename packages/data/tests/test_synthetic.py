import numpy as np
import pytest

from styrax.core import UserError
from styrax.core.testing import check_iterator
from styrax.data import LMData, MixtureConfig, TokensConfig, build_store
from styrax.data.config import SourceConfig
from styrax.data.synthetic import SyntheticConfig

CONFIG = SyntheticConfig(vocab_size=50, seq_len=12, batch_size=4, document_len=5)


def test_a_loader_resumes_exactly():
    check_iterator(lambda: CONFIG.build(seed=1).loader(prefetch=0))


def test_batches_are_a_function_of_seed_and_step():
    a, b = CONFIG.build(seed=1), CONFIG.build(seed=1)
    for name, array in a.batch(7).items():
        np.testing.assert_array_equal(array, b.batch(7)[name])
    assert (a.batch(7)["targets"] != a.batch(8)["targets"]).any()
    assert (a.batch(7)["targets"] != CONFIG.build(seed=2).batch(7)["targets"]).any()
    assert a.fingerprint == b.fingerprint != CONFIG.build(seed=2).fingerprint


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 4), slice(2, 2)])
def test_rows_are_those_of_the_whole_batch(rows):
    data = CONFIG.build(seed=3)
    whole, part = data.batch(2), data.batch(2, rows)
    for name in whole:
        np.testing.assert_array_equal(part[name], whole[name][rows])


def test_arrays_are_as_announced_and_keep_the_contract_of_documents():
    data = CONFIG.build(seed=0)
    batch = data.batch(0)
    (spec,) = data.specs
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == spec == data.spec(5)
    assert batch["segment_ids"].tolist() == [[1] * 5 + [2] * 5 + [3] * 2] * 4
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]] * 4
    inside = batch["positions"][:, 1:] > 0
    assert (batch["tokens"][:, 1:] == batch["targets"][:, :-1])[inside].all()
    assert not batch["tokens"][batch["positions"] == 0].any()


def test_all_ids_are_as_likely():
    targets = SyntheticConfig(vocab_size=8, seq_len=500, batch_size=16).build(seed=0).batch(0)["targets"]
    counts = np.bincount(targets.ravel(), minlength=8)
    # Eight standard deviations of a count of 8,000 draws of probability 1/8.
    assert len(counts) == 8
    assert np.abs(counts - 1000).max() < 8 * np.sqrt(8000 / 8 * 7 / 8)


def test_other_settings_are_refused_on_resume():
    state = CONFIG.build(seed=1).loader(prefetch=0).get_state()
    with pytest.raises(UserError, match="seed: saved with 1, now 2"):
        CONFIG.build(seed=2).loader(prefetch=0).set_state(state)
    with pytest.raises(UserError, match="step -1"):
        CONFIG.build(seed=1).batch(-1)


def test_there_is_no_text():
    data = CONFIG.build(seed=0)
    assert (data.tokenizer, data.token_bytes, list(data.held_out())) == (None, None, [])
    with pytest.raises(UserError, match="random tokens"):
        CONFIG.load_tokenizer(None)  # pyright: ignore[reportArgumentType]


def test_shapes_are_those_that_the_data_announce(tmp_path, documents):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in documents.items():
        (folder / name.replace("/", "-")).write_text(text, encoding="utf-8", newline="")
    schedule = {"seq_len": ((0, 16), (3, 32)), "batch_size": ((0, 8), (2, 4), (3, 2))}
    for options in ({"seq_len": 16, "batch_size": 2}, schedule):
        config = TokensConfig(sources=(str(folder),), tokenizer="byte", **options)
        data = config.build(seed=0, cache_dir=tmp_path / "cache")
        assert isinstance(data, LMData)
        assert config.shapes() == (data.vocab_size, list(data.specs))
    mixture = MixtureConfig(sources={"a": SourceConfig(sources=(str(folder),))}, seq_len=16, batch_size=2)
    assert mixture.shapes() == (258, list(mixture.build(seed=0, cache_dir=tmp_path / "cache").specs))


def test_the_vocabulary_is_known_without_text(tmp_path, documents):
    assert TokensConfig(tokenizer="bpe:300").shapes()[0] == 300
    assert TokensConfig(tokenizer="byte", sources=("nowhere",)).shapes()[0] == 258
    assert TokensConfig(store="s3://bucket/store").shapes()[0] is None
    assert MixtureConfig(sources={"a": SourceConfig(store="s3://bucket/store")}).shapes()[0] is None
    text = tmp_path / "a.txt"
    text.write_text("the cat sat on the mat " * 20)
    store = build_store([str(text)], tmp_path / "store", tokenizer="bpe:270")
    assert TokensConfig(store=str(tmp_path / "store")).shapes()[0] == store.tokenizer.vocab_size
    tokenizer = tmp_path / "tokenizer.json"
    store.tokenizer.save(tokenizer)
    assert TokensConfig(tokenizer=str(tokenizer)).shapes()[0] == store.tokenizer.vocab_size
    with pytest.raises(UserError):
        TokensConfig(store=str(tmp_path / "missing")).shapes()
