"""The encoder's configuration; importing it costs no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from styrax.core import Policy
from styrax.core.config import Fraction, NonNegative, Positive, check
from styrax.models import layout
from styrax.models.arch import Norm
from styrax.models.encoder_sharding import encoder_axes

if TYPE_CHECKING:
    from flax import nnx

    from styrax.models.encoder import Encoder
    from styrax.models.sharding import LogicalAxes

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"]


@dataclass(frozen=True, kw_only=True)
class Text:
    """Token ids.

    Attributes:
        kind: Selects this input.
        vocab_size: Token ids are in `[0, vocab_size)`.
        max_len: Learned positions: the longest document, in tokens.
        num_types: Learned token types, such as first and second sentence; 0 means none.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Text(vocab_size=100).max_len
        512
    """

    kind: Literal["text"] = "text"
    vocab_size: Positive = 30_522
    max_len: Positive = 512
    num_types: NonNegative = 0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Image:
    """Pictures of one size, cut into square patches, each of which is a token.

    Attributes:
        kind: Selects this input.
        height: In pixels, a multiple of `patch`.
        width: In pixels, a multiple of `patch`.
        patch: Side of a patch.
        channels: Values of a pixel.
        class_token: Put a learned token before the patches.
        patch_bias: Add a learned bias to the projection of patches.

    Raises:
        ValueError: A value is of the wrong type or out of its limits, or the patches do not fit; all are listed.

    Example:
        >>> Image(height=32, width=64, patch=16, class_token=True).tokens
        9
    """

    kind: Literal["image"] = "image"
    height: Positive = 224
    width: Positive = 224
    patch: Positive = 16
    channels: Positive = 3
    class_token: bool = False
    patch_bias: bool = True

    def __post_init__(self) -> None:
        check(self)
        problems = [
            f"{name}: expected a multiple of patch = {self.patch}, got {getattr(self, name)}"
            for name in ("height", "width")
            if getattr(self, name) % self.patch
        ]
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def tokens(self) -> int:
        """How many tokens a picture is, the class token included."""
        return self.height // self.patch * (self.width // self.patch) + self.class_token


@dataclass(frozen=True, kw_only=True)
class Pool:
    r"""How the tokens of a document or picture become one vector, and what is done with it.

    Attributes:
        by: The first token ("cls"), the last ("last"), the mean over all of them ("mean"), attention of a learned
            query with an MLP behind it ("map"), or no vector ("none").
        dense: A projection of that vector, as it is ("linear") or through the hyperbolic tangent ("tanh").
        dim: Width of the projection; none means the model's.
        normalise: Divide by the length, so that products are cosines.
        num_classes: Classes that a last projection gives logits for, of every token if there is no vector; 0 means
            no logits.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> Pool(by="mean", normalise=True).dense
        'none'
    """

    by: Literal["none", "cls", "last", "mean", "map"] = "none"
    dense: Literal["none", "linear", "tanh"] = "none"
    dim: Positive | None = None
    normalise: bool = False
    num_classes: NonNegative = 0

    def __post_init__(self) -> None:
        check(self)
        problems = []
        if self.by == "none" and self.dense != "none":
            problems.append(f'dense: expected "none" when there is no vector (by = "none"), got {self.dense!r}')
        if self.by == "none" and self.normalise:
            problems.append('normalise: expected false when there is no vector (by = "none"), got true')
        if self.dense == "none" and self.dim is not None:
            problems.append(f'dim: expected none without a projection (dense = "none"), got {self.dim}')
        if problems:
            raise ValueError("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A bidirectional encoder of text or pictures; by default pre-norm, with LayerNorm, biases and GELU.

    Attributes:
        kind: Selects this model.
        input: What it reads: `Text` or `Image`.
        num_layers: Blocks of attention and MLP.
        embed_dim: Width of the residual stream.
        num_heads: Attention heads, a divisor of `embed_dim`.
        mlp_dim: Hidden width of the MLP; none means 4 times `embed_dim`.
        activation: Of the MLP.
        norm: Every normalisation.
        placement: Normalise what enters attention and MLP, and once more at the end ("pre"), or the sum that each of
            them is added to ("sum", as the first transformers did).
        embed_norm: Normalise what enters the first block.
        qkv_bias: Add a learned bias to queries, keys and values; everything else has one.
        pool: What becomes of the last tokens.
        dropout: Probability of dropping an element of the embedding and of each residual branch, below 1.
        remat: Recompute each block in the backward pass ("block"), all of it but its matrix products ("dots"), or
            keep its activations ("none"); "auto" recomputes, except on a CPU.
        scan: Loop over the layers with `jax.lax.scan` ("on") or unroll them ("off"); "auto" is off on a CPU, unless
            blocks are recomputed. Parameters and results are the same.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> EncoderConfig(input=Image(), embed_dim=192, num_heads=3).mlp_width
        768
    """

    kind: Literal["encoder"] = "encoder"
    input: Text | Image = field(default_factory=Text)
    num_layers: Positive = 6
    embed_dim: Positive = 384
    num_heads: Positive = 6
    mlp_dim: Positive | None = None
    activation: Activation = "gelu"
    norm: Norm = field(default_factory=lambda: Norm(kind="layer", bias=True, eps=1e-6))
    placement: Literal["pre", "sum"] = "pre"
    embed_norm: bool = False
    qkv_bias: bool = True
    pool: Pool = field(default_factory=Pool)
    dropout: Fraction = 0.0
    remat: Literal["none", "block", "dots", "auto"] = "auto"
    scan: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        check(self)
        problems = []
        if self.embed_dim % self.num_heads:
            problems.append(f"embed_dim: expected a multiple of num_heads = {self.num_heads}, got {self.embed_dim}")
        if self.dropout == 1:
            problems.append(f"dropout: expected 0 <= dropout < 1, got {self.dropout}")
        if problems:
            raise ValueError("\n".join(problems))

    @property
    def mlp_width(self) -> int:
        """Hidden width of the MLP, with the default filled in."""
        return 4 * self.embed_dim if self.mlp_dim is None else self.mlp_dim

    @property
    def plan(self) -> tuple[tuple[layout.Stack, ...], tuple[layout.Segment, ...]]:
        """The layers as one stack, and the one run that goes through it."""
        return layout.plan((layout.Kind("attn", False),) * self.num_layers)

    @property
    def uniform(self) -> bool:
        """Whether all layers are equal, which they are."""
        return True

    @property
    def tied(self) -> bool:
        """Whether the embedding is an output head too, which it is not."""
        return False

    def build(self, *, rngs: nnx.Rngs, policy: Policy | None = None) -> Encoder:
        """Make the model with fresh parameters; works under `jax.jit` and `nnx.eval_shape`.

        Args:
            rngs: Gives one `params` key.
            policy: Dtypes of parameters, computation and results; none means float32 for all.
        """
        from styrax.models.encoder import Encoder

        return Encoder(self, rngs=rngs, policy=policy or Policy())

    def logical_axes(self) -> LogicalAxes:
        """Name the axes of every parameter, by path."""
        return encoder_axes(self)
