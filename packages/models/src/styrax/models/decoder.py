"""The decoder: embedding, a stack of blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError
from styrax.models.cache import KVCache
from styrax.models.generate import generate
from styrax.models.layers.attention import Attention, Scope, document_mask
from styrax.models.layers.dropout import dropout
from styrax.models.layers.embed import Embed
from styrax.models.layers.fence import fence, on_cpu, rows
from styrax.models.layers.linear import Linear
from styrax.models.layers.mlp import SwiGLU
from styrax.models.layers.norm import RMSNorm
from styrax.models.layers.rope import rotation
from styrax.models.stack import run_stack, stack, unstack

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Key

    from styrax.core import Policy
    from styrax.models.config import DecoderConfig


class Block(nnx.Module):
    r"""$x \leftarrow x + m\, \mathrm{attn}(\mathrm{norm}(x))$, then $x + m\, \mathrm{mlp}(\mathrm{norm}(x))$.

    $m$ is the config's `scales.residual_mult`, by default 1.
    """

    def __init__(self, config: DecoderConfig, policy: Policy, key: Key[Array, ""]):
        attn, mlp = jax.random.split(key)
        scales = config.scales
        hidden, residual = scales.init_std * scales.hidden_init_mult, scales.residual_init_mult
        # What is added to the residual stream 2L times starts smaller, so that the sum does not grow with L.
        writes = hidden / (2 * config.num_layers) ** 0.5 if residual is None else hidden * residual
        std = {"std": hidden, "residual_std": writes}
        self.attn_norm = RMSNorm(config.embed_dim, eps=config.norm_eps, policy=policy)
        self.attn = Attention(
            config.embed_dim,
            heads=config.num_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_width,
            scale=scales.attn_scale,
            policy=policy,
            key=attn,
            **std,
        )
        self.mlp_norm = RMSNorm(config.embed_dim, eps=config.norm_eps, policy=policy)
        self.mlp = SwiGLU(config.embed_dim, config.mlp_width, policy=policy, key=mlp, **std)
        self.dropout = config.dropout
        self.residual_mult = scales.residual_mult

    def __call__(
        self,
        x: Float[Array, "... embed"],
        cache: KVCache | None,
        *,
        scope: Scope,
        layer: int | Int[Array, ""],
        key: Key[Array, ""] | None,
    ) -> tuple[Float[Array, "... embed"], KVCache | None]:
        """Run the block.

        Args:
            x: The residual stream.
            cache: Keys and values of earlier calls.
            scope: What all blocks share.
            layer: The block's number.
            key: For dropout, the same for all blocks; `None` drops nothing.
        """
        attn_key, mlp_key = (None, None) if key is None else jax.random.split(jax.random.fold_in(key, layer))
        out, cache = self.attn(self.attn_norm(x), scope, layer, cache)
        x = fence(x + _times(self.residual_mult, dropout(out, self.dropout, attn_key)))
        out = self.mlp(self.mlp_norm(x))
        return fence(x + _times(self.residual_mult, dropout(out, self.dropout, mlp_key))), cache


class Decoder(nnx.Module):
    r"""A decoder language model.

    Kernels and the embedding start as $N(0, 0.02^2)$, the two that write to the residual stream as
    $N(0, 0.02^2 / 2L)$, norms as 1, unless the config's `scales` say otherwise. All state is `nnx.Param`; the
    parameters of the blocks are stacked, `[layers, ...]`, whatever runs them.

    Attributes:
        embed: The token embedding.
        layers: The blocks, as one `Block` with a leading axis on every array.
        final_norm: Before the head.
        head: The output head of an untied model.
        config: What it was built from.
        vocab_size: Token ids are in `[0, vocab_size)`.
        policy: Dtypes of parameters, computation and logits.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> config = DecoderConfig(num_layers=2, embed_dim=32, num_heads=2)
        >>> model = config.build(vocab_size=10, rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 3), int)).shape
        (1, 3, 10)
    """

    def __init__(self, config: DecoderConfig, *, vocab_size: int, rngs: nnx.Rngs, policy: Policy):
        if vocab_size < 1:
            raise UserError(f"vocab_size: expected 1 or more, got {vocab_size}")
        embed, layers, head = jax.random.split(rngs.params(), 3)
        dim, std = config.embed_dim, config.scales.init_std
        self.embed = Embed(vocab_size, dim, std=std, policy=policy, key=embed)
        self.layers = stack(lambda key: Block(config, policy, key), config.num_layers, layers)
        self.final_norm = RMSNorm(dim, eps=config.norm_eps, policy=policy)
        if not config.tied:
            self.head = Linear(dim, vocab_size, std=std, policy=policy, key=head)
        self.config = config
        self.vocab_size = vocab_size
        self.policy = policy

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "batch seq vocab"] | tuple[Float[Array, "batch seq vocab"], KVCache]:
        """Predict the token after each token.

        Args:
            tokens: An id outside `[0, vocab_size)` makes its row's logits NaN.
            positions: For the rotary angles; `None` counts from 0 in each row, or goes on from the cache.
                Only differences within a document matter.
            segment_ids: The document of each token, from 1, and 0 at padding, whose logits mean nothing; a
                token sees the tokens up to itself with its own id. With a cache a row is one document, and
                ids only tell padding, which takes no slot.
            cache: Tokens seen before, from `init_cache` or an earlier call.
            rngs: Turns dropout on; gives one `dropout` key.

        Returns:
            Logits in the policy's output dtype; with a cache, the logits and the new cache.

        Raises:
            UserError: Shapes do not fit, or the cache has no room. Inside `jax.jit` room is known only up to
                the cache's whole length; beyond it, a row's logits are NaN.
        """
        x, new = self.hidden(
            self.blocks(), tokens, positions=positions, segment_ids=segment_ids, cache=cache, rngs=rngs
        )
        logits = self.logits(x)
        return logits if new is None else (logits, new)

    def blocks(self) -> Block | tuple[Block, ...]:
        """Give the blocks as the config's `scan` wants them: the stack itself, or cut into single blocks."""
        scan = self.config.scan == "on" or (self.config.scan == "auto" and not on_cpu())
        return self.layers if scan else unstack(self.layers)

    def hidden(
        self,
        blocks: Block | tuple[Block, ...],
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], KVCache | None]:
        """Compute what the head takes, for a caller that wants the logits of some positions only.

        Args:
            blocks: From `blocks`; in a loop of calls, cut once.
            tokens: And all the others: as for the model itself.
        """
        _check_shapes(tokens, positions=positions, segment_ids=segment_ids)
        seq = tokens.shape[1]
        slots = None if cache is None else cache.slots(tokens, segment_ids)
        if positions is None:
            positions = jnp.arange(seq)[None] if slots is None else slots
        scope = Scope(
            rotation(positions, self.config.head_width, self.config.rope_theta),
            document_mask(seq, segment_ids) if cache is None or slots is None else cache.mask(slots),
            slots,
        )
        key = rngs.dropout() if rngs is not None and self.config.dropout else None

        def step(block: Block, layer: int | Int[Array, ""], carry: tuple) -> tuple:
            return block(*carry, scope=scope, layer=layer, key=key)

        x = _times(self.config.scales.embed_scale, self.embed(tokens))
        if segment_ids is not None:  # whatever stands at padding, even an id that is none, reaches nobody
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
        embed_key = None if key is None else jax.random.fold_in(key, self.config.num_layers)
        x = rows(dropout(x, self.config.dropout, embed_key))
        remat = cache is None and self._remat()
        x, cache = run_stack(step, blocks, (x, cache), num_layers=self.config.num_layers, remat=remat)
        x = self.final_norm(x).reshape(*tokens.shape, -1)
        if cache is not None and slots is not None:
            cache = cache.advance(slots)
            x = jnp.where(cache.lengths[:, None, None] > cache.capacity, jnp.nan, x)
        return x, cache

    def logits(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Apply the head.

        Args:
            x: From `hidden`.

        Returns:
            The product in the compute dtype, cast to the policy's output dtype, and there multiplied by the
            config's `scales.logit_mult`.
        """
        flat = rows(x)
        out = self.embed.attend(flat) if self.config.tied else self.head(flat)
        out = out.reshape(*x.shape[:-1], self.vocab_size).astype(self.policy.output_dtype)
        return _times(self.config.scales.logit_mult, out)

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Make an empty cache.

        Args:
            batch: Rows.
            length: Tokens that a row has room for.
        """
        if batch < 1 or length < 1:
            raise UserError(f"init_cache: expected batch and length of 1 or more, got {batch} and {length}")
        config = self.config
        shape = (config.num_layers, batch, config.kv_heads, length, config.head_width)
        empty = jnp.zeros(shape, self.policy.compute_dtype)
        return KVCache(empty, jnp.zeros_like(empty), jnp.zeros(batch, "int32"))

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        bos_id: int | None = None,
    ) -> Iterator[int]:
        """Continue a prompt; see `styrax.models.generate`."""
        return generate(
            self,
            prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop_ids=stop_ids,
            bos_id=bos_id,
        )

    def _remat(self) -> bool:
        if self.config.remat != "auto":
            return self.config.remat == "block"
        # On a CPU, time runs out before memory does, and recomputing takes a fifth of a step.
        return not on_cpu()


def _times(factor: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x if factor == 1 else factor * x


def _check_shapes(tokens: Int[Array, "batch seq"], **others: Int[Array, "batch seq"] | None) -> None:
    problems = []
    if tokens.ndim != 2 or not tokens.size:
        problems.append(f"tokens: expected [batch, seq], neither of them 0, got {list(tokens.shape)}")
    for name, array in {"tokens": tokens, **others}.items():
        if array is None:
            continue
        if not jnp.issubdtype(array.dtype, jnp.integer):
            problems.append(f"{name}: expected an integer dtype, got {array.dtype}")
        if tokens.ndim == 2 and array.shape != tokens.shape:
            problems.append(f"{name}: expected the shape of tokens, {list(tokens.shape)}, got {list(array.shape)}")
    if problems:
        raise UserError("\n".join(problems))
