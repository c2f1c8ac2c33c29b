"""Draws against distributions computed in numpy float64, and text that is never split."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from styrax.core import UserError
from styrax.models.sampling import Sampling, draw, gather
from styrax.models.text import TextStream, stream_text

VOCAB, DRAWS = 12, 6000
LOGITS = np.random.default_rng(5).normal(size=VOCAB) * 2
PROMPT, TEXT = [1, 4, 4], [2, 4, 7, 7, 7]


def expected(logits, sampling, prompt=(), text=()):
    """The definition, token by token."""
    logits = [float(z) for z in logits]
    for token in range(len(logits)):
        if token in prompt or token in text:
            r = sampling.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        if token in text:
            logits[token] -= sampling.presence_penalty
        logits[token] -= sampling.frequency_penalty * list(text).count(token)
    chances = {token: np.exp((z - max(logits)) / sampling.temperature) for token, z in enumerate(logits)}
    ranked = sorted(chances, key=lambda token: -chances[token])
    kept = ranked[: sampling.top_k or len(ranked)]
    total, mass, nucleus = sum(chances[token] for token in kept), 0.0, []
    for token in kept:
        if mass < sampling.top_p:
            nucleus.append(token)
        mass += chances[token] / total
    kept = [token for token in nucleus if chances[token] >= sampling.min_p * chances[ranked[0]]]
    out = np.zeros(len(logits))
    for token in kept:
        out[token] = chances[token] / sum(chances[each] for each in kept)
    return out


def drawn(sampling, logits=LOGITS, draws=DRAWS, prompt=(), text=(), work=None):
    vocab = len(logits)
    rows, found = gather([sampling] * draws, range(draws), vocab)
    said, counts = None, None
    if sampling.penalised:
        said = np.tile(np.isin(np.arange(vocab), prompt), (draws, 1))
        counts = jnp.asarray(np.tile(np.bincount(text, minlength=vocab).astype(np.int32), (draws, 1)))
    logits = np.tile(np.asarray(logits, np.float32), (draws, 1))
    tokens, counts = draw(logits, np.full(draws, 9, np.int32), rows, said, counts, work=work or found)
    return np.asarray(tokens), counts


def chi_square(tokens, chances):
    observed, likely = np.bincount(tokens, minlength=len(chances)), len(tokens) * chances
    assert not observed[chances == 0].any()
    keep = likely > 5
    rest, left = observed[~keep].sum(), likely[~keep].sum()
    terms = ((observed - likely) ** 2 / np.maximum(likely, 1e-9))[keep]
    tail = (rest - left) ** 2 / left if left > 0 else 0.0
    return terms.sum() + tail, max(1, keep.sum() - 1)


def fits(tokens, chances):
    """Whether chi-square is below its mean by six of its standard deviations."""
    value, freedom = chi_square(tokens, chances)
    return value < freedom + 6 * (2 * freedom) ** 0.5


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 7, "top_p": 0.85},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.95, "min_p": 0.12},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.1},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "top_p": 0.9},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distribution(options):
    sampling = Sampling(**options)
    tokens, _ = drawn(sampling, prompt=PROMPT, text=TEXT)
    assert fits(tokens, expected(LOGITS, sampling, PROMPT, TEXT))
    for left_out in options:  # each option on its own can be told from its absence
        others = {name: value for name, value in options.items() if name != left_out}
        without = expected(LOGITS, Sampling(**others), PROMPT, TEXT)
        if np.abs(without - expected(LOGITS, sampling, PROMPT, TEXT)).max() > 0.03:
            support = without > 0
            assert not support[tokens].all() or not fits(tokens, without)


def test_rows_of_one_call_have_their_own_settings():
    each = [Sampling(**options) for options in OPTIONS] + [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_k=3),
    ]
    rows, work = gather(each, range(len(each)), VOCAB)
    said = np.tile(np.isin(np.arange(VOCAB), PROMPT), (len(each), 1))
    text = np.bincount(TEXT, minlength=VOCAB).astype(np.int32)
    logits, at = np.tile(LOGITS.astype(np.float32), (len(each), 1)), np.arange(len(each), dtype=np.int32)
    together, counts = draw(logits, at, rows, said, jnp.asarray(np.tile(text, (len(each), 1))), work=work)
    for row, sampling in enumerate(each):
        one, own = gather([sampling], [row], VOCAB)
        beside = (said[:1], jnp.asarray(text[None])) if sampling.penalised else ()
        alone, _ = draw(logits[:1], at[row : row + 1], one, *beside, work=own)
        assert int(alone[0]) == int(together[row])
        assert (np.asarray(counts[row]) - text).tolist() == np.eye(VOCAB, dtype=int)[int(alone[0])].tolist()


def test_keys_are_of_seed_and_position():
    rows, work = gather([Sampling(temperature=4.0)] * 400, [0] * 200 + [*range(200)], VOCAB)
    logits = np.tile(LOGITS.astype(np.float32), (400, 1))
    tokens, _ = draw(logits, np.array([*range(200), *[0] * 200], np.int32), rows, work=work)
    by_place, by_seed = np.split(np.asarray(tokens), 2)
    assert by_place[0] == by_seed[0]
    assert len(set(by_place.tolist())) > 6 and len(set(by_seed.tolist())) > 6
    assert 5 < (by_place == by_seed).sum() < 60  # as if independent


@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.5}, {"top_p": 0.9999}, {"min_p": 0.3}, {"top_k": 50}, {"top_k": 2000}, {"top_k": 2000, "top_p": 0.4}],
    ids=str,
)
def test_large_vocabularies(options):
    """What is kept of 3000 tokens; without top_k it is 1024 of them at most, and shares are of all."""
    sampling = Sampling(temperature=2.0, **options)
    logits = np.random.default_rng(0).normal(size=3000).astype(np.float32) * 4
    tokens, _ = drawn(sampling, logits, draws=256)
    chances = expected(logits, sampling)
    cut = np.sort(chances)[-1024] if "top_k" not in options else 0
    allowed = (chances > 0) & (chances >= cut)
    assert allowed[tokens].all()
    likely = np.argsort(-chances)
    half = likely[: np.searchsorted(np.cumsum(chances[likely]), 0.5) + 1]
    share = chances[half].sum() / chances[allowed].sum()
    assert abs(np.isin(tokens, half).mean() - share) < 6 * (share * (1 - share) / 256) ** 0.5


def test_flat_logits_keep_all_and_ties_go_to_the_first():
    flat = np.zeros(VOCAB)
    assert set(drawn(Sampling(min_p=1.0), flat, 400)[0].tolist()) == set(range(VOCAB))
    assert set(drawn(Sampling(top_p=1 / VOCAB), flat, 50)[0].tolist()) == {0}
    assert set(drawn(Sampling(top_k=1), flat, 50)[0].tolist()) == {0}


def test_wrong_settings_are_reported_together():
    with pytest.raises(ValueError) as caught:
        Sampling(top_p=1.5, min_p=-0.1, repetition_penalty=0.0, top_k=0)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "top_k", "top_p", "min_p", "repetition_penalty",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="presence_penalty: expected number, got inf: numbers must be finite"):
        Sampling(presence_penalty=float("inf"))
    with pytest.raises(ValueError, match=r"top_p: expected above 0, got 0\.0; temperature = 0 takes"):
        Sampling(top_p=0.0)


# ---------------------------------------------------------------------------------------------------------- text


def decode(ids):
    return bytes(ids).decode(errors="replace")


@given(st.text(st.characters(exclude_characters="\ufffd")), st.lists(st.integers(0, 255), max_size=8))
def test_characters_are_whole(text, before):
    stream = TextStream(decode, before=before)
    pieces = [stream.push(byte) for byte in text.encode()]
    rest = stream.finish()
    if decode([*before, *text.encode()]) == decode(before) + text:
        assert rest == ""
        assert "".join(pieces) == text
        at = 0
        for end, piece in enumerate(pieces, 1):  # each character comes with its last byte
            at += len(piece)
            assert text[:at] == text.encode()[:end].decode(errors="ignore")


@given(st.lists(st.sampled_from([*b"ab", 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF])))
@settings(max_examples=300)
def test_nothing_is_lost_of_bytes_that_are_no_text(raw):
    assert "".join(stream_text(raw, decode)) == decode(raw)


@given(st.text("abé€😀"), st.lists(st.text("abé€😀", min_size=1, max_size=3), max_size=3), st.integers(1, 5))
@settings(max_examples=300)
def test_stop_strings(text, stops, size):
    """Whatever the tokens are, the text ends before the stop string that is complete first."""
    raw = text.encode()
    tokens = [raw[at : at + size] for at in range(0, len(raw), size)]
    stream = TextStream(lambda ids: b"".join(ids).decode(errors="replace"), stop=stops)
    got = []
    for token in tokens:
        got.append(stream.push(token))
        shown = "".join(got)
        assert not any(stop in shown for stop in stops)
    got = "".join(got) + stream.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    assert got == (text[: min(ends)[1]] if ends else text)
    assert stream.stopped == (min(ends)[2] if ends else None)
    if ends:
        assert stream.push(b"more") == stream.finish() == ""


def test_what_comes_before_decides_how_a_token_looks():
    words = ["▁he", "llo", "▁world", "▁you"]

    def sentencepiece(ids):  # drops the space at the beginning of a text
        return "".join(words[token] for token in ids).replace("▁", " ").removeprefix(" ")

    assert list(stream_text([2, 3], sentencepiece)) == ["world", " you"]
    assert list(stream_text([2, 3], sentencepiece, before=[0, 1])) == [" world", " you"]
    assert list(stream_text([0, 1, 2, 3], sentencepiece)) == ["he", "llo", " world", " you"]


def test_a_stop_string_asks_for_no_more_tokens():
    asked = iter(b"one. two. three.")
    assert "".join(stream_text(asked, decode, stop=["."])) == "one"
    assert bytes(asked) == b" two. three."
    with pytest.raises(UserError, match="stop: expected texts of a character or more"):
        stream_text(b"a", decode, stop=[""])
