"""A batch of texts that grow by a token at a time: parameters as flat arrays, two compiled steps, and a cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from styrax.models.cache import as_bits, as_numbers
from styrax.models.layers.fence import on_cpu
from styrax.models.layers.product import by_trial, product, seconds
from styrax.models.sampling import Sampling, draw, gather

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

    from styrax.models.cache import KVCache
    from styrax.models.decoder import Decoder

_SMALLEST_BUCKET = 32


class Runner:
    """A model made ready to generate: its blocks cut apart, and all parameters in one flat list.

    Making one copies the parameters of the blocks, and casts what is multiplied to the compute dtype; keep it for more
    calls than one. It holds the parameters that the model had, whatever happens to the model later.

    Args:
        model: The decoder.

    Attributes:
        config: Of the model.
        vocab_size: Token ids are in `[0, vocab_size)`.

    Example:
        >>> from flax import nnx
        >>> from styrax.models import DecoderConfig
        >>> model = DecoderConfig(num_layers=1, embed_dim=16, num_heads=2).build(vocab_size=5, rngs=nnx.Rngs(0))
        >>> logits, cache = Runner(model).prefill(np.array([[1, 2, 0]]), np.array([2]), capacity=8)
        >>> logits.shape, cache.lengths.tolist()
        ((1, 5), [2])
    """

    def __init__(self, model: Decoder) -> None:
        self.config, self.vocab_size = model.config, model.vocab_size
        # A flat list, since to look into a module costs more than a step of a small model.
        found, treedef = jax.tree_util.tree_flatten_with_path((model, model.blocks(cached=True)))
        slow = on_cpu() and jnp.dtype(model.policy.compute_dtype).itemsize < 4
        paths = [jax.tree_util.keystr(path, simple=True, separator="/").split("/") for path, _ in found]
        forms = tuple(_form(path, leaf, slow) for path, (_, leaf) in zip(paths, found, strict=True))
        self._treedef, self._forms, self._turned = treedef, forms, False
        self._leaves = []
        for path, (_, leaf), form in zip(paths, found, forms, strict=True):
            if form != "unused":
                self._leaves.append(leaf.astype(model.policy.compute_dtype) if _is_factor(path) else leaf)
        self._prefill, self._decode = self._steps()
        self._fewest = 2 if slow and _two_rows_are_faster(model.policy.compute_dtype) else 1

    def prefill(
        self, tokens: Int[np.ndarray, "batch seq"], lengths: Int[np.ndarray, " batch"], *, capacity: int
    ) -> tuple[Float[Array, "batch vocab"], KVCache]:
        """Read the beginning of each row.

        Args:
            tokens: Each row padded on the right.
            lengths: Tokens of each row; 0 for a row that is none.
            capacity: Slots of the cache.

        Returns:
            Logits of the next tokens, and the cache for `decode`; see `styrax.models.cache.as_bits`.
        """
        self._turn(len(tokens) == 1)
        return self._prefill(self._leaves, tokens, lengths, capacity=capacity)

    def decode(
        self, tokens: Int[Array, " batch"], live: Bool[np.ndarray, " batch"], cache: KVCache
    ) -> tuple[Float[Array, "batch vocab"], KVCache]:
        """Read one more token of each row.

        Args:
            tokens: One for each row.
            live: Rows that go on; of the others nothing is kept.
            cache: Its memory is used again.

        Returns:
            Logits of the next tokens, and the cache.
        """
        self._turn(len(tokens) == 1)
        return self._decode(self._leaves, tokens, live, cache)

    def rows(self, wanted: int) -> int:
        """Round the number of rows up, so that few are compiled for."""
        return max(self._fewest, 1 << (wanted - 1).bit_length())

    def _turn(self, turned: bool) -> None:
        """Turn kernels round, one after another, if a lone row wants them so and more rows do not, or back."""
        if turned == self._turned or "turned" not in self._forms:
            return
        kept = [form for form in self._forms if form != "unused"]
        for number, form in enumerate(kept):
            if form == "turned":
                self._leaves[number] = self._leaves[number].T
        self._turned = turned
        self._prefill, self._decode = self._steps()

    def _steps(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        plain = {"turned": "plain"} if not self._turned else {}
        return _compiled(self._treedef, tuple(plain.get(form, form) for form in self._forms))


def _is_factor(path: Sequence[str]) -> bool:
    """Tell whether a leaf takes part in a product in the compute dtype; it is cast once, and not for each token."""
    return not {"kernel", "embedding"}.isdisjoint(path) and "router" not in path


def _form(path: Sequence[str], leaf: Array, slow: bool) -> str:
    """Say how a leaf of a model and its blocks is kept for a lone row: "plain", "turned", or "unused"."""
    if list(path[:2]) == ["0", "layers"]:
        return "unused"  # the blocks once more; nothing looks at them there
    # A product of a row of 16 bits is up to ten times faster on a CPU where the numbers of an output lie together.
    return "turned" if slow and leaf.ndim == 2 and "kernel" in path else "plain"


@functools.lru_cache(maxsize=4)
def _two_rows_are_faster(dtype: Any) -> bool:
    """Try whether a product of one row takes longer than that of two: it may, by a factor of 25, or the other way."""
    # Twice as fast, so that a busy machine does not decide; a row more also costs attention and the head.
    with by_trial():
        return 2 * seconds(product, 2, dtype, turned=False) < seconds(product, 1, dtype, turned=True)


@functools.lru_cache(maxsize=32)
def _compiled(treedef: Any, forms: tuple[str, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Make the steps of all models that differ in nothing but the values of their parameters.

    Args:
        treedef: Of a model and its blocks.
        forms: How each leaf is kept.
    """

    def whole(leaves: list[Array]) -> tuple[Decoder, Any]:
        rest = iter(leaves)
        kept = {"unused": lambda: None, "plain": lambda: next(rest), "turned": lambda: next(rest).T}
        return jax.tree.unflatten(treedef, [kept[form]() for form in forms])

    @by_trial()
    def prefill(leaves: list[Array], tokens: Array, lengths: Array, *, capacity: int) -> tuple[Array, Any]:
        model, blocks = whole(leaves)
        real = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype("int32")
        cache = model.init_cache(len(tokens), capacity)
        x, after, _ = model.hidden(blocks, tokens, segment_ids=real, cache=cache)
        assert after is not None
        last = jnp.maximum(lengths - 1, 0)[:, None, None]
        return model.logits(jnp.take_along_axis(x, last, axis=1))[:, 0], as_bits(after)

    @by_trial()
    def decode(leaves: list[Array], tokens: Array, live: Array, cache: KVCache) -> tuple[Array, Any]:
        model, blocks = whole(leaves)
        cache, real = as_numbers(cache, model.policy.compute_dtype), live[:, None].astype("int32")
        x, after, _ = model.hidden(blocks, tokens[:, None], segment_ids=real, cache=cache)
        assert after is not None
        return model.logits(x)[:, 0], as_bits(after)

    return jax.jit(prefill, static_argnames="capacity"), jax.jit(decode, donate_argnames="cache")


class Batch:
    """Texts that grow together, each as if it were alone.

    Args:
        runner: Of the model.
        prompts: Token ids, one or more for each row.
        budgets: How many tokens each row may get.
        sampling: How they are drawn, for each row.
        seeds: One for each row.

    Attributes:
        live: Which rows go on; set a row to false to end it.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        sampling: Sequence[Sampling],
        seeds: Sequence[int],
    ) -> None:
        self.live = np.array([budget > 0 for budget in budgets], bool)
        window, vocab = runner.config.max_len, runner.vocab_size
        self._runner = runner
        self._contexts = [list(prompt[-window:]) for prompt in prompts]
        needed = [len(context) + budget for context, budget in zip(self._contexts, budgets, strict=True)]
        self._capacity = bucket(max(needed), window)
        self._rows = runner.rows(len(prompts))
        spare = self._rows - len(prompts)
        self._positions = np.array([*map(len, prompts), *[0] * spare], np.int32)
        # Its memory stays where the steps are; to hand over nine arrays a step would cost more than drawing.
        settings, self._work = gather([*sampling, *[Sampling(temperature=0.0)] * spare], [*seeds, *[0] * spare], vocab)
        self._settings = jax.tree.map(jnp.asarray, settings)
        self._prompt = self._counts = None
        if self._work.penalised:
            said = np.zeros((self._rows, vocab), bool)
            for row, prompt in zip(said, prompts):
                row[list(prompt)] = True
            self._prompt, self._counts = jnp.asarray(said), jnp.zeros(said.shape, "int32")
        self._tokens: Any = None
        self._cache: Any = None

    def step(self) -> list[int]:
        """Give the next token of each row; that of a row that has ended means nothing."""
        if self._cache is None:
            logits, self._cache = self._read()
        else:
            live = np.zeros(self._rows, bool)
            live[: len(self.live)] = self.live
            logits, self._cache = self._runner.decode(self._tokens, live, self._cache)
        self._tokens, self._counts = draw(
            logits, self._positions.copy(), self._settings, self._prompt, self._counts, work=self._work
        )
        self._positions += 1
        found = np.asarray(self._tokens)[: len(self._contexts)].tolist()
        full = False
        for context, token, live in zip(self._contexts, found, self.live, strict=True):
            if live:
                context.append(token)
                if len(context) > self._capacity:
                    del context[: -max(1, self._capacity // 2)]
                    full = True
        if full:  # places in a window count from its first token, so what is left is read again
            self._cache = None
        return found

    def _read(self) -> tuple[Any, Any]:
        lengths = np.zeros(self._rows, np.int32)
        lengths[: len(self._contexts)] = [len(context) for context in self._contexts]
        tokens = np.zeros((self._rows, bucket(int(lengths.max()), self._capacity)), np.int32)
        for row, context in zip(tokens, self._contexts):
            row[: len(context)] = context
        return self._runner.prefill(tokens, lengths, capacity=self._capacity)


def bucket(length: int, limit: int) -> int:
    """Round a length up to a power of two, 32 or more, so that few lengths are compiled for.

    Args:
        length: Tokens.
        limit: The most there can be.

    Example:
        >>> bucket(33, 1000), bucket(900, 1000)
        (64, 1000)
    """
    return min(limit, max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()))
