"""The decoder's configuration; importing it costs no jax."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from styrax.core import Policy
from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, check
from styrax.models import layout
from styrax.models.arch import Arch, Attn
from styrax.models.attention import AUTO, check_name
from styrax.models.rope_config import Rope
from styrax.models.sharding import LogicalAxes, decoder_axes

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import AbstractMesh, Mesh

    from styrax.models.decoder import Decoder
    from styrax.models.pipeline import Schedule

_MLP_MULTIPLE = 64


@dataclass(frozen=True, kw_only=True)
class Scales:
    r"""Constant factors in a model's forward pass and in its initial values; the defaults change nothing.

    A factor of 1 costs nothing: no product is compiled.

    Attributes:
        embed_scale: Factor of the embedding, as it enters the first block.
        attn_scale: Factor of the products of query and key; none means `head_dim ** -0.5`.
        residual_mult: Factor of what attention and MLP add to the residual stream.
        block_scale: Multiply what leaves a block by a number of its own, initially 1. It belongs to the model, but
            no gradient trains it.
        logit_mult: Factor of the logits, in the policy's output dtype.
        init_std: Initial standard deviation of the embedding, the head and, before the next two, the kernels.
        hidden_init_mult: Factor of it for the kernels of the blocks.
        residual_init_mult: One more for those two kernels of a block that write to the residual stream; none means
            `(2 * num_layers) ** -0.5`.
        z_loss: Of the term of the loss that keeps the normaliser of the logits near 1; 0 leaves it out.

    Raises:
        ValueError: A factor is not above 0; all are listed.

    Example:
        >>> DecoderConfig(scales=Scales(logit_mult=0.25)).scales.logit_mult
        0.25
    """

    embed_scale: PositiveFloat = 1.0
    attn_scale: PositiveFloat | None = None
    residual_mult: PositiveFloat = 1.0
    block_scale: bool = False
    logit_mult: PositiveFloat = 1.0
    init_std: PositiveFloat = 0.02
    hidden_init_mult: PositiveFloat = 1.0
    residual_init_mult: PositiveFloat | None = None
    z_loss: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a model is computed; the results are the same.

    Attributes:
        attention: What computes softmax attention: one of `styrax.models.attention.names`, or "auto", the fastest for
            the platform that can.
        microbatches: On a mesh with an axis `stage`, into how many parts a pipeline cuts the rows of each device; 0
            takes the most that divide them, up to four for each stage.
        repeats: How often a pipeline goes round its stages, each holding as many runs of layers: more of it makes
            the pipeline wait less, and send more.
        schedule: "gpipe" sends all microbatches forward, and then all back. "1f1b" goes back through one after it has
            sent another forward: its memory does not grow with their number, and it computes more; see
            `styrax.models.pipeline_1f1b`. Several repeats need the first.
        recompute_stages: Keep of each microbatch only what enters a stage, and in the backward pass compute the stage
            once more. "1f1b" always does.

    Raises:
        ValueError: A value is of the wrong type or out of its limits, values do not fit together, or there is no such
            attention.

    Example:
        >>> Runtime(attention="splash").microbatches
        0
    """

    attention: str = AUTO
    microbatches: NonNegative = 0
    repeats: Positive = 1
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    recompute_stages: bool = False

    def __post_init__(self) -> None:
        problems = []
        for look in (lambda: check(self), lambda: check_name(self.attention), self._check_repeats):
            try:
                look()
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise ValueError("\n".join(problems))

    def _check_repeats(self) -> None:
        if self.schedule == "1f1b" and self.repeats != 1:
            raise ValueError(
                f'repeats: expected 1 with schedule = "1f1b", which does not interleave runs of layers, got '
                f'{self.repeats}; take schedule = "gpipe" to go round more often'
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder; by default pre-norm: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Attributes:
        kind: Selects this model.
        num_layers: Blocks of attention and MLP.
        embed_dim: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of `num_heads`; none means as many as query heads.
        head_dim: Width of a head; none means `embed_dim / num_heads`.
        mlp_dim: Hidden width of the MLP; none means 8/3 of `embed_dim`, rounded to a multiple of 64.
        tied: Use the transposed embedding as the output head.
        rope: Rotary positions.
        dropout: Probability of dropping an element of the embedding and of each residual branch, below 1.
        remat: Recompute each block in the backward pass ("block"), all of it but its matrix products ("dots"), or
            keep its activations ("none"); "auto" recomputes, except on a CPU.
        scan: Loop over the layers with `jax.lax.scan` ("on") or unroll them ("off"); "auto" is off on a CPU, unless
            blocks are recomputed. Parameters and results are the same.
        runtime: Which attention computes it, and how a pipeline is filled.
        max_len: Longest context, in tokens, that generation looks back on.
        scales: Constant factors in the forward pass and the initial values.
        arch: What the blocks are made of.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> config = DecoderConfig(embed_dim=384, num_heads=6, num_kv_heads=2)
        >>> config.kv_heads, config.head_width, config.mlp_width
        (2, 64, 1024)
    """

    kind: Literal["decoder"] = "decoder"
    num_layers: Positive = 6
    embed_dim: Positive = 384
    num_heads: Positive = 6
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    mlp_dim: Positive | None = None
    tied: bool = True
    rope: Rope = field(default_factory=Rope)
    dropout: Fraction = 0.0
    remat: Literal["none", "block", "dots", "auto"] = "auto"
    scan: Literal["auto", "on", "off"] = "auto"
    runtime: Runtime = field(default_factory=Runtime)
    max_len: Positive = 1024
    scales: Scales = field(default_factory=Scales)
    arch: Arch = field(default_factory=Arch)

    def __post_init__(self) -> None:
        check(self)
        problems = self._misfits()
        if self.dropout == 1:
            problems.append(f"dropout: expected 0 <= dropout < 1, got {self.dropout}")
        if problems:
            raise ValueError("\n".join(problems))

    def _misfits(self) -> list[str]:
        problems = []
        if self.head_dim is None and self.embed_dim % self.num_heads:
            problems.append(
                f"embed_dim: expected a multiple of num_heads = {self.num_heads} when head_dim is not given, "
                f"got {self.embed_dim}"
            )
        for name in dict.fromkeys(self.arch.layers):
            part = getattr(self.arch, name)
            if isinstance(part, Attn):
                problems += self._heads_misfits(name, part)
            elif name == "latent":
                problems += [f"rope.{text}" for text in self.rope.misfits(part.rope_dim)]
        for name in ("layers", "sparse"):
            given = len(getattr(self.arch, name))
            if given > self.num_layers:
                problems.append(f"arch.{name}: expected at most num_layers = {self.num_layers} values, got {given}")
        return list(dict.fromkeys(problems + self._sharing_misfits()))

    def _sharing_misfits(self) -> list[str]:
        if self.arch.sharing is None:
            return []
        own = self.num_layers - self.arch.sharing.layers
        if own < 1:
            return [
                f"arch.sharing.layers: expected less than num_layers = {self.num_layers}, "
                f"got {self.arch.sharing.layers}"
            ]
        mixers = [self.arch.layers[layer % len(self.arch.layers)] for layer in range(self.num_layers)]
        problems = [
            f"arch.sharing: layers of {name} have no keys and values of another layer to use; expected attn and local"
            for name in dict.fromkeys(mixers[own:])
            if name not in ("attn", "local")
        ]
        return problems + [
            f"arch.sharing.layers: of the {own} layers before those that share, none is of the kind {name}"
            for name in dict.fromkeys(mixers[own:])
            if name not in mixers[:own]
        ]

    def _heads_misfits(self, name: str, part: Attn) -> list[str]:
        problems = []
        if self.num_heads % self.kv_heads_of(part):
            own = "num_kv_heads" if part.num_kv_heads is None else f"arch.{name}.num_kv_heads"
            problems.append(f"{own}: expected a divisor of num_heads = {self.num_heads}, got {self.kv_heads_of(part)}")
        if self.head_dim is None and part.head_dim is None and self.embed_dim % self.num_heads:
            return problems
        own = "rope" if part.rope is None else f"arch.{name}.rope"
        source = "head_dim" if part.head_dim is None else f"arch.{name}.head_dim"
        source = "embed_dim / num_heads" if self.head_dim is None and part.head_dim is None else source
        rope, width = self.rope_of(part), self.head_width_of(part)
        if width % 2 and rope.rotated(width) == width:
            return [*problems, f"{source}: expected an even number (rotary positions), got {width}"]
        return problems + [f"{own}.{text}" for text in rope.misfits(width)]

    def kv_heads_of(self, part: Attn) -> int:
        """Key and value heads of one kind of attention layer."""
        return part.num_kv_heads or self.kv_heads

    def head_width_of(self, part: Attn) -> int:
        """Width of a head of one kind of attention layer."""
        return part.head_dim or self.head_width

    def mlp_width_of(self, kind: layout.Kind) -> int:
        """Hidden width of the dense MLP of one kind of layer."""
        sharing = self.arch.sharing if kind.role == "shared" else None
        return self.mlp_width * (1 if sharing is None else sharing.mlp_mult)

    def rope_of(self, part: Attn) -> Rope:
        """Rotary positions of one kind of attention layer."""
        return part.rope or self.rope

    @property
    def kinds(self) -> tuple[layout.Kind, ...]:
        """What each layer is, with the cycles of `arch` filled in.

        >>> from styrax.models.arch import Attn
        >>> config = DecoderConfig(num_layers=3, arch=Arch(local=Attn(window=8), layers=("local", "attn")))
        >>> [kind.mixer for kind in config.kinds]
        ['local', 'attn', 'local']
        """
        arch, count = self.arch, self.num_layers
        mixers = tuple(arch.layers[layer % len(arch.layers)] for layer in range(count))
        sparse = tuple(arch.moe is not None and arch.sparse[layer % len(arch.sparse)] for layer in range(count))
        roles = layout.roles(mixers, 0 if arch.sharing is None else arch.sharing.layers)
        return tuple(layout.Kind(*each) for each in zip(mixers, sparse, roles, strict=True))

    @property
    def plan(self) -> tuple[tuple[layout.Stack, ...], tuple[layout.Segment, ...]]:
        """Which layers share a stack of parameters, and in which runs the stacks are gone through."""
        return _plan(self.kinds)

    @property
    def uniform(self) -> bool:
        """Whether all layers are equal, so that there is one stack."""
        return len(set(self.kinds)) == 1

    @property
    def kv_heads(self) -> int:
        """Key and value heads, with the default filled in."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """Width of a head, with the default filled in."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with the default filled in."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        return max(1, round(self.embed_dim * 8 / 3 / _MLP_MULTIPLE)) * _MLP_MULTIPLE

    def build(self, *, vocab_size: int, rngs: nnx.Rngs, policy: Policy | None = None) -> Decoder:
        """Make the model with fresh parameters; works under `jax.jit` and `nnx.eval_shape`.

        Args:
            vocab_size: Token ids are in `[0, vocab_size)`.
            rngs: Gives one `params` key.
            policy: Dtypes of parameters, computation and logits; none means float32 for all.
        """
        from styrax.models.decoder import Decoder

        return Decoder(self, vocab_size=vocab_size, rngs=rngs, policy=policy or Policy())

    def logical_axes(self) -> LogicalAxes:
        """Name the axes of every parameter, by path."""
        return decoder_axes(self)

    def pipeline(self, *, rows: int, mesh: Mesh | AbstractMesh) -> Schedule | None:
        """Tell how a pipeline over stages is filled; `None` on a mesh without stages.

        Args:
            rows: Of a batch, or of the part of it that is computed at once.
            mesh: With an axis that layers are split over by the rules in force, such as `stage`.

        Raises:
            UserError: Layers or rows do not divide; all problems are listed.
        """
        from styrax.models.layers.meshes import Here
        from styrax.models.pipeline import schedule, stages_of

        here = Here(mesh, dict(mesh.shape))
        return schedule(self.runtime, self.plan[1], rows, here) if stages_of(here) else None

    def train_flops_per_token(self, *, vocab_size: int, length: int) -> dict[str, float]:
        """Count the arithmetic of training on a token, by the two conventions in use; see `styrax.models.cost`.

        Args:
            vocab_size: Rows of the embedding.
            length: Tokens per document.

        Returns:
            `causal` counts the pairs of tokens that see one another; `full` counts as many keys for each query as the
            last one has, which is what `12 * layers * width * length` in other projects' figures stands for.

        >>> config = DecoderConfig(num_layers=1, embed_dim=64, num_heads=1, mlp_dim=64)
        >>> config.train_flops_per_token(vocab_size=100, length=15)  # 35,072 numbers in products
        {'causal': 216576.0, 'full': 221952.0}
        """
        from styrax.models.cost import cost_of

        cost = cost_of(self, vocab_size=vocab_size)
        more = 0
        for each in (cost, cost.further):
            if each is not None:
                more += each.attention_flops_per_pair * (length - 1)
                more += sum(flops * (min(most, length) - 1) for most, flops in each.window_flops_per_pair)
        # A lone token sees itself; the backward pass costs twice the forward pass.
        return {"causal": float(cost.train_flops(length)), "full": float(cost.train_flops(1) + 3 * more)}


@functools.lru_cache(maxsize=64)
def _plan(kinds: tuple[layout.Kind, ...]) -> tuple[tuple[layout.Stack, ...], tuple[layout.Segment, ...]]:
    return layout.plan(kinds)
