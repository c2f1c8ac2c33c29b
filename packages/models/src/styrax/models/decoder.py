"""The decoder: embedding, stacks of blocks, a norm and a head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from styrax.core import UserError
from styrax.models import objective, pipeline
from styrax.models.activations import activations
from styrax.models.arch import Attn, Latent
from styrax.models.block import Block, times
from styrax.models.cache import KVCache, empty_cache
from styrax.models.generate import generate
from styrax.models.layers.attention import Reach, Scope
from styrax.models.layers.dropout import dropout, of_layer, of_rows
from styrax.models.layers.embed import Embed
from styrax.models.layers.fence import fence, rows
from styrax.models.layers.linear import Linear
from styrax.models.layers.mask import Mask, document_mask, document_positions
from styrax.models.layers.meshes import Here, mesh_of
from styrax.models.layers.norm import Norm
from styrax.models.layers.per_layer import PerLayerEmbed
from styrax.models.layers.product import product
from styrax.models.layers.rope import rotation
from styrax.models.mtp import MTP
from styrax.models.stack import Step, Turn, in_order, remat_of, run_scanned, run_unrolled, scans, stack

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from styrax.core import Policy
    from styrax.models.config import DecoderConfig
    from styrax.models.losses import LossTerm


class Hidden(NamedTuple):
    """What the blocks leave.

    Attributes:
        x: `[batch, seq, embed]`, normalised: what the head takes.
        cache: With this call's tokens; `None` without a cache.
        reports: For each stack of layers with experts, what its router reports, stacked; see
            `styrax.models.layers.moe`.
    """

    x: Float[Array, "batch seq embed"]
    cache: KVCache | None
    reports: tuple[Any, ...]


class Decoder(nnx.Module):
    r"""A decoder language model.

    Kernels and the embedding start as $N(0, 0.02^2)$, the two that write to the residual stream as
    $N(0, 0.02^2 / 2L)$, norms as 1, unless the config's `scales` say otherwise. All state is `nnx.Param`; the
    parameters of the blocks are stacked, `[layers, ...]`, whatever runs them.

    Attributes:
        embed: The token embedding.
        layers: The blocks, as one `Block` with a leading axis on every array; if they are of several kinds, a list
            of such stacks, in the order of the config's `plan`.
        positions: The learned positions, if there are any.
        per_layer: Makes the embeddings that layers have of their own, if there are any.
        final_norm: Before the head.
        head: The output head of an untied model.
        mtp: What predicts tokens beyond the next one, stacked like blocks, if the config asks for it.
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
        stacks, _ = config.plan
        if config.uniform:
            self.layers = stack(lambda key: Block(config, stacks[0].kind, policy, key), config.num_layers, layers)
        else:
            keys = jax.random.split(layers, len(stacks))
            self.layers = nnx.List(
                stack(lambda key, kind=each.kind: Block(config, kind, policy, key), len(each.layers), key)
                for each, key in zip(stacks, keys, strict=True)
            )
        if config.arch.per_layer is not None:
            self.per_layer = PerLayerEmbed(
                dim,
                config.num_layers,
                config.arch.per_layer,
                vocab_size=vocab_size,
                norm=config.arch.norm,
                init_std=std,
                std=std * config.scales.hidden_init_mult,
                policy=policy,
                key=jax.random.fold_in(embed, 2),
            )
        if config.arch.learned_positions:
            places = jax.random.fold_in(embed, 1)
            self.positions = Embed(config.max_len, dim, std=std, policy=policy, key=places)
        self.final_norm = Norm(dim, config.arch.norm, policy=policy)
        if config.arch.head.bias:
            self.head_bias = nnx.Param(jnp.zeros(vocab_size, policy.param_dtype))
        if not config.tied:
            self.head = Linear(dim, vocab_size, std=std, policy=policy, key=head)
        if config.arch.head.mtp:
            further = jax.random.fold_in(layers, 1)
            self.mtp = stack(lambda key: MTP(config, policy, key), config.arch.head.mtp, further)
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
        row_ids: Int[Array, " batch"] | None = None,
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
            row_ids: As for `losses`.

        Returns:
            Logits in the policy's output dtype; with a cache, the logits and the new cache.

        Raises:
            UserError: Shapes do not fit, or the cache has no room. Inside `jax.jit` room is known only up to
                the cache's whole length; beyond it, a row's logits are NaN.
        """
        given: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids, "rngs": rngs, "row_ids": row_ids}
        x, new, _ = self.hidden(self.blocks(cached=cache is not None), tokens, cache=cache, **given)
        logits = self.logits(x)
        return logits if new is None else (logits, new)

    def blocks(self, *, cached: bool = False) -> tuple[Block, ...]:
        """Give the blocks as the config's `scan` wants them: the stacks themselves, or cut into single blocks.

        Args:
            cached: They are for calls with a cache.
        """
        looped = scans(self.config.scan, self._remat(cached), self.embed.embedding[...])
        return self._stacks() if looped else in_order(self.config.plan[0], self._stacks())

    def _remat(self, cached: bool) -> Any:
        return not cached and remat_of(self.config.remat, self.embed.embedding[...])

    def _stacks(self) -> tuple[Block, ...]:
        return (self.layers,) if isinstance(self.layers, Block) else tuple(self.layers)

    def hidden(
        self,
        blocks: Sequence[Any],
        tokens: Int[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        cache: KVCache | None = None,
        rngs: nnx.Rngs | None = None,
        row_ids: Int[Array, " batch"] | None = None,
        watch: Any = None,
    ) -> Hidden:
        """Compute what the head takes, for a caller that wants the logits of some positions only.

        Args:
            blocks: From `blocks`; in a loop of calls, cut once.
            tokens: And all the others: as for the model itself.
            row_ids: As for `losses`.
            watch: As in `Scope`.
        """
        _check_shapes(tokens, positions=positions, segment_ids=segment_ids)
        config = self.config
        scope = self.scope(tokens, positions, segment_ids, cache)._replace(watch=watch)
        key = None
        if rngs is not None and config.dropout:
            key = of_rows(rngs.dropout(), jnp.arange(len(tokens)) if row_ids is None else row_ids)

        def step_in(scope: Scope, key: Any = key) -> Step:
            def step(block: Any, turn: Turn, x: Any, part: Any) -> tuple[Any, Any, Any, Any]:
                seen, at = scope._replace(lent=turn.lent), {"layer": turn.layer, "index": turn.place}
                return block(x, part, scope=seen, key=key, own=turn.own, **at)

            return step

        x = times(config.scales.embed_scale, self.embed(tokens))
        per_layer = None if config.arch.per_layer is None else self.per_layer(tokens, x)
        if config.arch.learned_positions:
            x = x + self.positions(scope.positions)
        if segment_ids is not None:  # whatever stands at padding, even an id that is none, reaches nobody
            x = jnp.where((segment_ids != 0)[..., None], x, 0)
            if per_layer is not None:
                per_layer = jnp.where((segment_ids != 0)[..., None, None], per_layer, 0)
        embed_key = None if key is None else of_layer(key, config.num_layers)
        x = rows(dropout(x, config.dropout, embed_key))
        if per_layer is not None:
            per_layer = jnp.moveaxis(per_layer, 2, 0).reshape(config.num_layers, *x.shape[:-1], -1)
        stacks, segments = config.plan
        parts = (None,) * len(stacks) if cache is None else cache.parts
        remat = self._remat(cache is not None)
        here, step = mesh_of(self.embed.embedding[...]), step_in(scope)
        if cache is None and pipeline.stages_of(here):
            x, reports = self._pipelined(step_in, x.reshape(*tokens.shape, -1), (positions, segment_ids, key), here)
        elif scans(config.scan, remat, self.embed.embedding[...]):
            x, parts, reports = run_scanned(step, segments, blocks, x, parts, remat=remat, rows=per_layer)
        else:
            x, parts, reports = run_unrolled(step, stacks, blocks, x, parts, remat=remat, rows=per_layer)
        x = self.final_norm(x).reshape(*tokens.shape, -1)
        if cache is not None and scope.slots is not None:
            cache = replace(cache, parts=parts).advance(scope.slots)
            x = jnp.where(cache.lengths[:, None, None] > cache.capacity, jnp.nan, x)
        return Hidden(x, cache, tuple(each for each in reports if each is not None))

    def _pipelined(self, step_in: Any, x: Array, given: tuple[Any, ...], here: Here) -> tuple[Array, tuple[Any, ...]]:
        config, segments = self.config, self.config.plan[1]
        if config.arch.per_layer is not None or config.arch.sharing is not None:
            raise UserError("a pipeline cannot run layers that share keys or have embeddings each")
        plan = pipeline.schedule(config.runtime, segments, len(x), here)
        remat = remat_of(config.remat, self.embed.embedding[...])

        def make_step(given: Any) -> Step:
            tokens = jnp.zeros((len(x) // plan.microbatches, x.shape[1]), "int32")
            return step_in(self.scope(tokens, given[0], given[1], None), given[2])

        shared: dict[str, Any] = {"plan": plan, "here": here, "remat": remat}
        shared["recompute_stages"] = config.runtime.recompute_stages
        return pipeline.run_pipelined(make_step, segments[0], self._stacks(), x, given, **shared)

    def scope(self, tokens: Array, positions: Array | None, segment_ids: Array | None, cache: KVCache | None) -> Scope:
        """Make what all blocks share; what differs between kinds of attention, once for each kind."""
        config, seq = self.config, tokens.shape[1]
        slots = None if cache is None else cache.slots(tokens, segment_ids)
        place = document_positions(seq, segment_ids) if slots is None else slots
        positions = place if positions is None else positions
        mask = document_mask(seq, segment_ids) if cache is None or slots is None else cache.mask(slots)
        ropes, reach = {}, {}
        for name in dict.fromkeys(config.arch.layers):
            part = getattr(config.arch, name)
            near: Mask = mask
            if isinstance(part, Attn):
                width, rope = config.head_width_of(part), config.rope_of(part)
                # Beyond a window it is places in the row that count: within one document they differ alike.
                reached = {"window": part.window, "chunk": part.chunk}
                if cache is None or slots is None:
                    near = mask.within(place, place, **reached)
                else:
                    near = cache.mask(slots, **reached)
            elif isinstance(part, Latent):
                width, rope = part.rope_dim, config.rope
            else:
                continue
            if (rope, width) not in ropes:
                ropes[rope, width] = rotation(positions, width, rope)
            reach[name] = Reach(near, ropes[rope, width])
        real = None if segment_ids is None else segment_ids != 0
        return Scope(reach, positions, place, real, slots, attention=config.runtime.attention)

    def logits(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Apply the head.

        Args:
            x: From `hidden`.

        Returns:
            The product in the compute dtype, cast to the policy's output dtype, and there multiplied by the
            config's `scales.logit_mult` and limited to its `arch.head.softcap`.
        """
        return self.head_of(self.head_params(), x)

    def losses(
        self,
        tokens: Int[Array, "batch seq"],
        targets: Int[Array, "batch seq"],
        mask: Float[Array, "batch seq"],
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        rngs: nnx.Rngs | None = None,
        row_ids: Int[Array, " batch"] | None = None,
    ) -> dict[str, LossTerm]:
        """Compute every part of the training objective as a sum and what it is divided by; see `losses.next_token`.

        Of large vocabularies, logits are made piece by piece, and never all kept.

        Args:
            tokens: And `positions`, `segment_ids`, `rngs`: as for the model itself.
            targets: The token after each.
            mask: What counts.
            row_ids: Numbers of the rows in a whole batch, of which these are a part: by them, and not by where it
                stands, a row draws its dropout. `None` counts from 0.

        Returns:
            `loss`, the cross-entropy in nats; `z_loss` if `scales.z_loss` asks for it; `mtp_1` and so on, those of
            the tokens after the next one, if `arch.head.mtp` does; and of experts what
            `styrax.models.losses.routers` lists.
        """
        return objective.losses(
            self, tokens, targets, mask, positions=positions, segment_ids=segment_ids, rngs=rngs, row_ids=row_ids
        )

    def activations(self, tokens: Int[Array, "batch seq"], **given: Any) -> dict[str, dict[str, Array]]:
        """Measure what each layer makes of tokens; see `styrax.models.activations`."""
        return activations(self, tokens, **given)

    def end_step(self) -> None:
        """Finish a step of training: move what follows from counts of the whole batch and not from a gradient.

        These are the corrections of routers, by the load that `losses` has added up since the last call. The step of
        `styrax-train` calls this after each update; so has a loop of your own, if `correction_rate` is not 0.
        """
        objective.end_step(self)

    def head_params(self) -> dict[str, Array]:
        """Give what turns the last activations into logits, apart from the model, for a piece-by-piece loss."""
        params = {"kernel": self.embed.embedding[...] if self.config.tied else self.head.kernel[...]}
        return params | ({"bias": self.head_bias[...]} if self.config.arch.head.bias else {})

    def head_of(self, params: dict[str, Array], x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
        """Apply the head with parameters that are given; see `logits`.

        Args:
            params: From `head_params`.
            x: From `hidden`.
        """
        flat, kernel = rows(x), params["kernel"].astype(self.policy.compute_dtype)
        out = product(flat, kernel, turned=True) if self.config.tied else fence(product(flat, kernel))
        if self.config.arch.head.bias:
            out = out + params["bias"].astype(out.dtype)
        out = out.reshape(*x.shape[:-1], self.vocab_size).astype(self.policy.output_dtype)
        out = times(self.config.scales.logit_mult, out)
        cap = self.config.arch.head.softcap
        return out if cap is None else cap * jnp.tanh(out / cap)

    def init_cache(self, batch: int, length: int) -> KVCache:
        """Make an empty cache.

        Args:
            batch: Rows.
            length: Tokens that a row has room for.
        """
        return empty_cache(self.config, batch, length, self.policy.compute_dtype)

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
        **sampling: Any,
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
            **sampling,
        )


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
