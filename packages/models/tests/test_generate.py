import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.models import generate

VOCAB = 23


@pytest.fixture(scope="module")
def model(build):
    return build(max_len=16)


def greedy(run, model, context):
    """Take the most likely next token, without a cache; the row is padded so that it compiles once."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(context)] = context
    return int(jnp.argmax(run(model, row)[0, len(context) - 1]))


def test_greedy_is_the_argmax_of_the_whole_context(build, run):
    model = build(max_len=64)
    for prompt in ([3], [1, 2, 3, 4, 5], list(np.arange(33) % VOCAB)):
        context = list(prompt)
        for token in generate(model, prompt, max_tokens=12, temperature=0):
            assert token == greedy(run, model, context)
            context.append(token)
        assert len(context) == len(prompt) + 12


def test_greedy_beyond_the_window_sees_the_last_tokens(model, run):
    prompt = list(np.random.default_rng(0).integers(0, VOCAB, 40))
    context = prompt[-16:]
    for token in generate(model, prompt, max_tokens=30, temperature=0):
        assert token == greedy(run, model, context)
        context.append(token)
        if len(context) > 16:
            context = context[-8:]


def test_a_seed_is_a_text(model):
    texts = {tuple(generate(model, [1, 2], max_tokens=8, seed=seed)) for seed in (0, 1, 2, 3)}
    assert len(texts) == 4
    one = list(generate(model, [1, 2], max_tokens=8, seed=3))
    assert one == list(model.generate([1, 2], max_tokens=8, seed=3))
    assert one[:5] == list(generate(model, np.array([1, 2]), max_tokens=5, seed=3))  # other buckets, same text


def test_a_text_can_be_continued(model):
    """The key of a token depends on its position only."""
    text = list(generate(model, [1, 2], max_tokens=9, seed=1))
    assert text[4:] == list(generate(model, [1, 2, *text[:4]], max_tokens=5, seed=1))


def test_draws_from_the_distribution(build, run):
    model = build(num_layers=1)
    logits = np.asarray(run(model, np.array([[4]], np.int32)))[0, 0]
    drawn = [next(generate(model, [4], max_tokens=1, temperature=4.0, seed=seed)) for seed in range(600)]
    expected = np.exp(logits / 4.0) / np.exp(logits / 4.0).sum()
    counts = np.bincount(drawn, minlength=VOCAB)
    chi2 = ((counts - 600 * expected) ** 2 / (600 * expected)).sum()
    assert chi2 < 60  # 22 degrees of freedom: p < 2e-5


def test_top_k(model, run):
    best = list(generate(model, [1, 2], max_tokens=6, temperature=0))
    assert best == list(generate(model, [1, 2], max_tokens=6, temperature=9.0, top_k=1))
    top = np.argsort(np.asarray(run(model, np.array([[4]], np.int32)))[0, 0])[-3:]
    drawn = {next(generate(model, [4], max_tokens=1, temperature=9.0, top_k=3, seed=seed)) for seed in range(60)}
    assert drawn == set(top.tolist())
    assert list(generate(model, [1], max_tokens=4, top_k=999)) == list(generate(model, [1], max_tokens=4))


def test_a_tiny_temperature_is_greedy(model):
    best = list(generate(model, [1, 2], max_tokens=6, temperature=0))
    assert best == list(generate(model, [1, 2], max_tokens=6, temperature=1e-30))


def test_stops(model):
    text = list(generate(model, [1, 2], max_tokens=8, seed=1))
    stop = text[3]
    assert list(generate(model, [1, 2], max_tokens=8, seed=1, stop_ids=[stop])) == text[: text.index(stop)]
    assert list(generate(model, [1, 2], max_tokens=0)) == []


def test_tokens_come_one_by_one(model):
    stream = generate(model, [1, 2], max_tokens=10**9)
    assert all(isinstance(token, int) for token in itertools.islice(stream, 3))


def test_an_empty_prompt_needs_a_first_token(model):
    with pytest.raises(UserError, match="the prompt is empty: give at least one token, or bos_id"):
        generate(model, [], max_tokens=1)
    assert list(generate(model, [], max_tokens=3, bos_id=7)) == list(generate(model, [7], max_tokens=3))
    assert list(generate(model, [1], max_tokens=3, bos_id=7)) == list(generate(model, [1], max_tokens=3))


def test_all_wrong_arguments_are_reported_at_the_call(model):
    with pytest.raises(UserError) as caught:
        generate(model, [1, -2, 50], max_tokens=-1, temperature=float("nan"), top_k=0, seed=-1)
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt_ids", "max_tokens", "temperature", "seed", "top_k"]
    assert "expected ids in [0, 23), got -2, 50" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ({"prompt_ids": "ab"}, ["prompt_ids: expected token ids, a sequence of integers, got text; encode it"]),
        ({"prompt_ids": 3, "bos_id": 1}, ["prompt_ids: expected token ids, a sequence of integers, got int"]),
        ({"prompt_ids": [1.5]}, ["prompt_ids: expected token ids, a sequence of integers, got list ('float'"]),
        ({"prompt_ids": [], "bos_id": 99}, ["prompt_ids: expected ids in [0, 23), got 99"]),
        (
            {"stop_ids": "\n", "max_tokens": 2.5},
            ["stop_ids: expected token ids", "max_tokens: expected integer >= 0"],
        ),
        ({"seed": 2**63}, ["seed: expected integer >= 0, <= 4294967295, got an integer of 64 bits"]),
        ({"seed": 2**32}, ["seed: expected integer >= 0, <= 4294967295, got 4294967296"]),  # JAX would take it for 0
        (
            {"temperature": "hot", "top_k": 1.0},
            ["temperature: expected number >= 0.0", "top_k: expected integer"],
        ),
    ],
)
def test_arguments_of_another_kind_are_explained(model, arguments, messages):
    with pytest.raises(UserError) as caught:
        generate(model, **{"prompt_ids": [1], "max_tokens": 1, **arguments})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(message) for line, message in zip(lines, messages, strict=True))


def test_lengths_in_a_bucket_compile_once(model):
    from styrax.models.generate import _decode, _prefill

    list(generate(model, [1] * 3, max_tokens=4))
    sizes = _prefill._cache_size(), _decode._cache_size()
    for length in (1, 5, 9):
        list(generate(model, [1] * length, max_tokens=6, temperature=0.5, seed=length))
    assert (_prefill._cache_size(), _decode._cache_size()) == sizes
