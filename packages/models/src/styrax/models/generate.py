"""Text from a model: one token of one text at a time, or a batch of texts at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from styrax.core import UserError
from styrax.core.config import NonNegative, NonNegativeFloat, Positive, Seed, mistakes
from styrax.models.decoding import Batch, Runner
from styrax.models.sampling import Sampling
from styrax.models.text import TextStream

if TYPE_CHECKING:
    from styrax.models.decoder import Decoder


def generate(
    model: Decoder | Runner,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bos_id: int | None = None,
    **sampling: Any,
) -> Iterator[int]:
    r"""Continue a prompt, giving each token as soon as it is decoded.

    Token $t$ of the text is drawn from $\mathrm{softmax}(z / \tau)$ with the key `fold_in(key(seed), t)`, so a
    text depends on the parameters, the prompt and the arguments, and on nothing that ran before.

    The model looks back on at most `config.max_len` tokens. Of a longer prompt the last ones count; when the
    window is full, its older half is dropped and the rest is read again.

    Compiles once per power of two of prompt length and of whole length, not per length.

    Args:
        model: The decoder, or a `Runner` of it, which spares the preparation of each call.
        prompt_ids: What to continue.
        max_tokens: Stop after so many; 0 gives none.
        temperature: $\tau$; 0 takes the most likely token.
        top_k: Draw from the so many most likely tokens only.
        seed: Chooses the text among those possible; in [0, 2**32).
        stop_ids: Tokens that end the text; they are not given.
        bos_id: Stands for an empty prompt.
        sampling: Other fields of `Sampling`, such as `top_p`.

    Returns:
        An iterator of token ids.

    Raises:
        UserError: At the call, not at the first token: an argument is out of range, or the prompt is empty
            and there is no `bos_id`; all problems are listed.

    Example:
        >>> from flax import nnx
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> len(list(generate(model, [1, 2], max_tokens=3)))
        3
    """
    prompt, problems = _prompt("prompt_ids", prompt_ids, bos_id, model.vocab_size)
    stop, more = _ids("stop_ids", stop_ids)
    limits = {
        "max_tokens": (NonNegative, max_tokens),
        "temperature": (NonNegativeFloat, temperature),
        "seed": (Seed, seed),
    }
    problems += [*more, *mistakes(limits if top_k is None else {**limits, "top_k": (Positive, top_k)})]
    settings, more = _settings({"temperature": temperature, "top_k": top_k, **sampling})
    problems += [line for line in more if line.split(":")[0] not in ("temperature", "top_k")]
    if problems or settings is None:
        raise UserError("\n".join(problems or more))
    return _tokens(model, prompt, max_tokens, settings, seed, set(stop))


@dataclass(frozen=True)
class Completion:
    """One text.

    Attributes:
        ids: Its tokens, without the prompt and without a stop id; with the tokens of a stop string.
        text: What they say, up to a stop string; `None` if there was no `decode`.
        reason: What ended it: "length", "stop_id" or "stop_string".
    """

    ids: tuple[int, ...]
    text: str | None
    reason: Literal["length", "stop_id", "stop_string"]


def generate_batch(
    model: Decoder | Runner,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int | Sequence[int],
    sampling: Sampling | Sequence[Sampling] | None = None,
    seed: int | Sequence[int] = 0,
    stop_ids: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
    bos_id: int | None = None,
) -> list[Completion]:
    """Continue several prompts at once, each as `generate` would alone.

    What comes of a prompt does not depend on the others, but for rounding. Equal prompts with equal seeds give equal
    texts: for several texts of one prompt give several seeds.

    Args:
        model: The decoder, or a `Runner` of it.
        prompts: What to continue; lengths may differ.
        max_tokens: End a text after so many; of all, or of each.
        sampling: How tokens are drawn; for all, or for each; `None` means `Sampling()`.
        seed: In [0, 2**32); of all, or of each.
        stop_ids: Tokens that end a text.
        stop_strings: Texts that end a text before them, wherever they begin within a token; they need `decode`.
        decode: Token ids -> text, such as a tokenizer's `decode`.
        bos_id: Stands for an empty prompt.

    Returns:
        One text for each prompt, in order.

    Raises:
        UserError: An argument is out of range; all problems are listed.

    Example:
        >>> from flax import nnx
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> [len(text.ids) for text in generate_batch(model, [[1, 2], [3]], max_tokens=[3, 4])]
        [3, 4]
    """
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts: expected a sequence of sequences of token ids, got text; encode it first")
    rows, problems = [], []
    for number, prompt in enumerate(prompts):
        row, more = _prompt(f"prompts[{number}]", prompt, bos_id, model.vocab_size)
        rows.append(row)
        problems += more
    budgets = _each("max_tokens", max_tokens, NonNegative, len(rows), problems)
    seeds = _each("seed", seed, Seed, len(rows), problems)
    settings = _each("sampling", Sampling() if sampling is None else sampling, Sampling, len(rows), problems)
    stop, more = _ids("stop_ids", stop_ids)
    problems += more
    strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not all(isinstance(each, str) and each for each in strings):
        problems.append(f"stop_strings: expected texts of a character or more, got {list(strings)}")
    if strings and decode is None:
        problems.append("stop_strings: need decode, to see what the tokens say; give the tokenizer's")
    if problems:
        raise UserError("\n".join(problems))
    if not rows:
        return []
    texts = [_Text(row, budget, set(stop), strings, decode) for row, budget in zip(rows, budgets, strict=True)]
    batch = Batch(_runner(model), rows, budgets, settings, seeds)
    while batch.live.any():
        for number, token in enumerate(batch.step()):
            if batch.live[number]:
                batch.live[number] = texts[number].add(token)
    return [text.done() for text in texts]


class _Text:
    """A row of a batch, as its tokens come."""

    def __init__(
        self,
        prompt: list[int],
        budget: int,
        stop_ids: set[int],
        stop_strings: Sequence[str],
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.reason: Literal["length", "stop_id", "stop_string"] = "length"
        self.budget, self.stop_ids = budget, stop_ids
        self.stream = None if decode is None else TextStream(decode, before=prompt, stop=stop_strings)

    def add(self, token: int) -> bool:
        """Take a token, and say whether the text goes on."""
        if token in self.stop_ids:
            self.reason = "stop_id"
            return False
        self.ids.append(token)
        if self.stream is not None:
            self.pieces.append(self.stream.push(token))
            if self.stream.stopped is not None:
                self.reason = "stop_string"
                return False
        return len(self.ids) < self.budget

    def done(self) -> Completion:
        """Give the whole."""
        if self.stream is not None:
            self.pieces.append(self.stream.finish())
            if self.stream.stopped is not None:
                self.reason = "stop_string"
        return Completion(tuple(self.ids), None if self.stream is None else "".join(self.pieces), self.reason)


def _tokens(
    model: Decoder | Runner, prompt: list[int], max_tokens: int, sampling: Sampling, seed: int, stop_ids: set[int]
) -> Iterator[int]:
    if not max_tokens:
        return
    batch = Batch(_runner(model), [prompt], [max_tokens], [sampling], [seed])
    for _ in range(max_tokens):
        (token,) = batch.step()
        if token in stop_ids:
            return
        yield token


def _runner(model: Decoder | Runner) -> Runner:
    return model if isinstance(model, Runner) else Runner(model)


def _prompt(name: str, given: Any, bos_id: int | None, vocab_size: int) -> tuple[list[int], list[str]]:
    prompt, problems = _ids(name, given)
    if problems:
        return prompt, problems
    if not prompt:
        if bos_id is None:
            which = "the prompt" if name == "prompt_ids" else name
            return prompt, [f"{which} is empty: give at least one token, or bos_id"]
        prompt = [bos_id]
    outside = sorted({token for token in prompt if not 0 <= token < vocab_size})
    if not outside:
        return prompt, []
    shown = ", ".join(map(str, outside[:5])) + (", ..." if len(outside) > 5 else "")
    return prompt, [f"{name}: expected ids in [0, {vocab_size}), got {shown}; is it another tokenizer's?"]


def _ids(name: str, given: Any) -> tuple[list[int], list[str]]:
    expected = f"{name}: expected token ids, a sequence of integers"
    if isinstance(given, (str, bytes)):
        return [], [f"{expected}, got text; encode it with the tokenizer of the model first"]
    try:
        return [operator.index(token) for token in given], []
    except TypeError as error:
        return [], [f"{expected}, got {type(given).__name__} ({error})"]


def _settings(fields: dict[str, Any]) -> tuple[Sampling | None, list[str]]:
    try:
        return Sampling(**fields), []
    except (ValueError, TypeError) as error:
        return None, str(error).splitlines()


def _each(name: str, given: Any, kind: Any, count: int, problems: list[str]) -> list[Any]:
    """Give one value for each row, and note what is wrong with them."""
    single = isinstance(given, str) or not hasattr(given, "__len__")
    values = [given] * count if single else list(given)
    if len(values) != count:
        problems.append(f"{name}: expected one value, or one for each of {count} prompts, got {len(values)}")
    elif kind is Sampling:
        wrong = [value for value in values if not isinstance(value, Sampling)]
        problems += [f"{name}: expected Sampling(...), got {type(wrong[0]).__name__}"] if wrong else []
    else:
        named = {name: values[0]} if single and values else {f"{name}[{row}]": each for row, each in enumerate(values)}
        problems += mistakes({key: (kind, value) for key, value in named.items()})
    return values
