import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from styrax.core import UserError
from styrax.models import decoding
from styrax.models.arch import Arch, Delta
from styrax.models.decoding import Runner
from styrax.models.generate import generate, generate_batch
from styrax.models.moe_config import MoE
from styrax.models.sampling import Sampling

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


def test_other_options_of_sampling(model):
    best = list(generate(model, [1, 2], max_tokens=6, temperature=0))
    assert best == list(generate(model, [1, 2], max_tokens=6, temperature=9.0, min_p=1.0))
    fresh = list(generate(model, [1, 2], max_tokens=20, temperature=0, presence_penalty=1e9))
    assert len(set(fresh)) == 20
    with pytest.raises(UserError, match=r"unexpected keyword argument 'topp'"):
        generate(model, [1], max_tokens=1, topp=0.5)
    with pytest.raises(UserError) as caught:
        generate(model, [1], max_tokens=1, temperature=-1.0, top_p=0.0, min_p=2.0)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["temperature", "min_p"]


# ------------------------------------------------------------------------------------------------------- batches

PROMPTS = [[3], [1, 2, 3, 4, 5], [7] * 11, [22, 0, 5]]


def ids(texts):
    return [list(text.ids) for text in texts]


@pytest.mark.parametrize("policy", ["f32", "bf16"])
def test_a_batch_is_its_texts_alone(build, policy):
    model = build(policy, max_len=32, num_layers=1)
    runner = Runner(model)
    mixed = [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.8, top_k=9), Sampling(repetition_penalty=1.3)]
    budgets, seeds = [9, 4, 12, 1], [3, 0, 7, 2**32 - 1]
    together = generate_batch(runner, PROMPTS, max_tokens=budgets, sampling=mixed, seed=seeds)
    assert [len(text.ids) for text in together] == budgets
    for row, text in enumerate(together):
        given = dict(vars(mixed[row]))
        alone = generate(runner, PROMPTS[row], max_tokens=budgets[row], seed=seeds[row], **given)
        assert list(text.ids) == list(alone)
        (single,) = generate_batch(
            runner, [PROMPTS[row]], max_tokens=budgets[row], sampling=mixed[row], seed=seeds[row]
        )
        assert single == text
    shuffled = generate_batch(runner, PROMPTS[::-1], max_tokens=budgets[::-1], sampling=mixed[::-1], seed=seeds[::-1])
    assert shuffled == together[::-1]


def test_a_batch_against_a_loop_without_a_cache(build, run):
    model = build(max_len=64)
    texts = generate_batch(model, PROMPTS, max_tokens=10, sampling=Sampling(temperature=0.0))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        context = list(prompt)
        for token in text.ids:
            assert token == greedy(run, model, context)
            context.append(token)
        assert len(context) == len(prompt) + 10
    assert {text.reason for text in texts} == {"length"}


def test_penalties_against_a_loop_without_a_cache(build, run):
    model = build(max_len=64)
    penalties = {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.3}
    settings = Sampling(temperature=0.0, **penalties)
    for prompt, text in zip(PROMPTS, generate_batch(model, PROMPTS, max_tokens=12, sampling=settings), strict=True):
        context = list(prompt)
        for token in text.ids:
            row = np.zeros((1, 64), np.int32)
            row[0, : len(context)] = context
            logits = np.asarray(run(model, row)[0, len(context) - 1], np.float64)
            counts = np.bincount(context[len(prompt) :], minlength=VOCAB)
            seen = np.isin(np.arange(VOCAB), context)
            logits = np.where(seen, np.where(logits > 0, logits / 1.7, logits * 1.7), logits)
            logits = logits - 0.6 * (counts > 0) - 0.3 * counts
            assert token == logits.argmax()
            context.append(token)


def test_rows_beyond_the_window_see_what_they_see_alone(model):
    """One row is full while others are not, twice."""
    prompts = [list(range(12)), [1], [2, 3, 4] * 9]
    best = Sampling(temperature=0.0)
    together = generate_batch(model, prompts, max_tokens=[30, 14, 3], sampling=best)
    for prompt, text in zip(prompts, together, strict=True):
        assert list(text.ids) == list(generate(model, prompt, max_tokens=len(text.ids), temperature=0))


def test_seeds(model):
    same = generate_batch(model, [[1, 2]] * 3, max_tokens=8)
    assert same[0] == same[1] == same[2]
    others = generate_batch(model, [[1, 2]] * 3, max_tokens=8, seed=[0, 1, 2])
    assert len({text.ids for text in others}) == 3
    assert others[0] == same[0]


def test_stops_of_a_batch(model):
    def decode(tokens):
        return "".join(chr(97 + token) for token in tokens)

    plain = ids(generate_batch(model, PROMPTS, max_tokens=12, seed=[1, 2, 3, 4]))
    stop = plain[1][4]
    stopped = generate_batch(model, PROMPTS, max_tokens=12, seed=[1, 2, 3, 4], stop_ids=[stop])
    for text, whole in zip(stopped, plain, strict=True):
        end = whole.index(stop) if stop in whole else 12
        assert list(text.ids) == whole[:end]
        assert text.reason == ("stop_id" if stop in whole else "length")
        assert text.text is None
    string = decode(plain[2][3:5])
    stopped = generate_batch(
        model, PROMPTS, max_tokens=12, seed=[1, 2, 3, 4], decode=decode, stop_strings=[string, "no such"]
    )
    for text, whole in zip(stopped, plain, strict=True):
        assert text.text == decode(whole).split(string)[0]
        assert text.reason == ("stop_string" if string in decode(whole) else "length")
        assert list(text.ids) == whole[: len(text.text) + (2 if text.reason == "stop_string" else 0)]


def test_nothing_to_do(model):
    assert generate_batch(model, [], max_tokens=3) == []
    none, some = generate_batch(model, [[1], [2]], max_tokens=[0, 2], decode=str)
    assert (none.ids, none.text, none.reason) == ((), "", "length")
    assert len(some.ids) == 2
    assert ids(generate_batch(model, [[], [4]], max_tokens=2, bos_id=3)) == ids(
        generate_batch(model, [[3], [4]], max_tokens=2)
    )


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ({"prompts": "ab"}, ["prompts: expected a sequence of sequences of token ids, got text"]),
        ({"prompts": [1, 2]}, ["prompts[0]: expected token ids", "prompts[1]: expected token ids"]),
        ({"prompts": [[1], []]}, ["prompts[1] is empty: give at least one token, or bos_id"]),
        ({"max_tokens": [1, 2, 3]}, ["max_tokens: expected one value, or one for each of 2 prompts, got 3"]),
        ({"max_tokens": [1, -2], "seed": 2**40}, ["max_tokens[1]: expected integer >= 0", "seed: expected integer"]),
        ({"sampling": [{}, {}]}, ["sampling: expected Sampling(...), got dict"]),
        ({"stop_strings": ["a"]}, ["stop_strings: need decode"]),
        ({"stop_strings": [""], "decode": str}, ["stop_strings: expected texts of a character or more, got ['']"]),
        ({"stop_ids": "a"}, ["stop_ids: expected token ids"]),
    ],
)
def test_wrong_arguments_of_a_batch(model, arguments, messages):
    with pytest.raises(UserError) as caught:
        generate_batch(model, **{"prompts": [[1], [2]], "max_tokens": 1, **arguments})
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(line.startswith(message) for line, message in zip(lines, messages, strict=True))


def test_few_shapes_are_compiled(build):
    """Once per power of two of rows, of prompt length and of whole length; settings do not count."""
    runner = Runner(build(num_layers=1, max_len=256))
    prefill, decode = runner._prefill, runner._decode
    for rows, length, budget in ((3, 40, 10), (4, 60, 4), (3, 33, 20)):
        generate_batch(runner, [[1] * length] * rows, max_tokens=budget, sampling=Sampling(top_k=rows))
        list(generate(runner, [1] * length, max_tokens=budget, top_k=2))
    assert (prefill._cache_size(), decode._cache_size()) == (2, 2)
    generate_batch(build(num_layers=1, max_len=256, seed=1), [[1] * 50] * 4, max_tokens=3)  # other parameters
    assert (prefill._cache_size(), decode._cache_size()) == (2, 2)
    generate_batch(runner, [[1] * 65] * 4, max_tokens=3)
    assert (prefill._cache_size(), decode._cache_size()) == (3, 3)


@pytest.mark.parametrize("faster", [False, True])
def test_a_lone_row_of_bfloat16_is_padded_where_that_is_faster(build, monkeypatch, faster):
    assert isinstance(decoding._two_rows_are_faster(jnp.bfloat16), bool)
    monkeypatch.setattr(decoding, "_two_rows_are_faster", lambda dtype: faster)
    model = build("bf16", num_layers=1, max_len=32, tied=False)
    runner = Runner(model)
    assert runner.rows(1) == 1 + faster
    (text,) = generate_batch(runner, [[1, 2, 3]], max_tokens=4, seed=5)
    assert list(text.ids) == list(generate(model, [1, 2, 3], max_tokens=4, seed=5))
    # And kernels lie as a product of one row of 16 bits wants them, or as others do: that of k is [24, 12].
    shapes = [leaf.shape for leaf in runner._leaves]
    assert ((12, 24) in shapes, (24, 12) in shapes) == (not faster, faster)
    texts = generate_batch(runner, [[1, 2, 3], [4]], max_tokens=4, seed=5)
    assert texts[0] == text
    shapes = [leaf.shape for leaf in runner._leaves]
    assert ((12, 24) in shapes, (24, 12) in shapes) == (False, True)
    assert generate_batch(runner, [[1, 2, 3]], max_tokens=4, seed=5) == [text]
    exact = Runner(build(num_layers=1))
    generate_batch(exact, [[1, 2, 3]], max_tokens=1)
    assert (24, 12) in [leaf.shape for leaf in exact._leaves]
    assert Runner(build(num_layers=1)).rows(1) == 1
    assert [Runner(build()).rows(wanted) for wanted in (2, 3, 8, 9)] == [2, 4, 8, 16]


def test_a_runner_keeps_its_parameters(build):
    model = build(max_len=64)
    runner = Runner(model)
    before = list(generate(runner, [1, 2], max_tokens=5, temperature=0))
    model.embed.embedding.set_value(-model.embed.embedding[...])
    assert list(generate(runner, [1, 2], max_tokens=5, temperature=0)) == before
    assert list(generate(model, [1, 2], max_tokens=5, temperature=0)) != before


@pytest.mark.parametrize("scan", ["on", "off"])
def test_a_runner_holds_each_parameter_once(build, scan):
    model = build(scan=scan, tied=False, max_len=32)
    runner = Runner(model)
    assert sum(leaf.size for leaf in runner._leaves) == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert list(generate(runner, [1, 2], max_tokens=3)) == list(generate(build(tied=False), [1, 2], max_tokens=3))


def test_a_runner_casts_once_what_is_multiplied(build, run):
    """A step that casted would read the wide parameters for each token; norms stay as they are."""
    model = build("bf16", num_layers=1, max_len=32)
    runner = Runner(model)
    by_rank = [{str(leaf.dtype) for leaf in runner._leaves if (leaf.ndim > 1) == matrix} for matrix in (True, False)]
    assert by_rank == [{"bfloat16"}, {"float32"}]
    logits, _ = runner.prefill(np.array([[1, 2, 3, 0]]), np.array([3]), capacity=4)
    np.testing.assert_allclose(logits[0], run(model, np.array([[1, 2, 3]]))[0, 2], atol=0.02 * np.abs(logits).max())


def test_experts_and_a_recurrence_generate_what_they_compute(build, run):
    arch = Arch(
        delta=Delta(num_k_heads=2, num_v_heads=2, k_dim=4, v_dim=4),
        layers=("delta", "attn"),
        moe=MoE(num_experts=4, experts_per_token=2, expert_dim=8),
        sparse=(False, True),
    )
    model = build(arch=arch, max_len=32)
    prompts, best = [[3, 1], [5, 6, 7, 8]], Sampling(temperature=0.0)
    for prompt, text in zip(prompts, generate_batch(model, prompts, max_tokens=[6, 3], sampling=best), strict=True):
        context = list(prompt)
        for token in text.ids:
            row = np.zeros((1, 16), np.int32)
            row[0, : len(context)] = context
            real = (np.arange(16) < len(context)).astype(np.int32)[None]
            assert token == int(jnp.argmax(run(model, row, segment_ids=real)[0, len(context) - 1]))
            context.append(token)
