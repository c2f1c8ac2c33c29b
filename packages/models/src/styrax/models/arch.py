"""What the blocks of a decoder are made of; importing it costs no jax.

Every difference between model families is a value here. `DecoderConfig` says how large a model is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from styrax.core.config import NonNegative, NonNegativeFloat, Positive, PositiveFloat, check
from styrax.models.moe_config import MoE
from styrax.models.rope_config import Rope

Mixer = Literal["attn", "local", "latent", "delta"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, kw_only=True)
class Norm:
    r"""A normalisation: $y = s\,(x - \mu) / \sqrt{\sigma^2 + \epsilon} + b$, or without $\mu$ if "rms".

    Attributes:
        kind: "rms" divides by the root mean square, "layer" also subtracts the mean.
        eps: $\epsilon$.
        scale: Learn $s$; without it $s = 1$.
        bias: Learn $b$; without it $b = 0$.
        offset: The parameter is $s - 1$, initially 0, and not $s$, initially 1.
        late_cast: Multiply by $s$ in float32 and cast the product, not the normalised value. The two differ in
            bfloat16 only.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Norm(kind="layer", bias=True).eps
        1e-05
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: PositiveFloat = 1e-5
    scale: bool = True
    bias: bool = False
    offset: bool = False
    late_cast: bool = False

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    r"""Queries that grow with their position $p$: they are multiplied by $1 + a \ln(1 + \lfloor (p + 1) / f \rfloor)$.

    Attributes:
        scale: $a$.
        floor: $f$.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.
    """

    scale: PositiveFloat = 0.1
    floor: PositiveFloat = 8192.0

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Attn:
    r"""Grouped-query attention, $\mathrm{softmax}(\mathrm{mask}(t \tanh(c\, q k^\top / t)))\, v$.

    Attributes:
        num_kv_heads: Key and value heads; none means the model's.
        head_dim: Width of a head; none means the model's.
        qkv_bias: Add a learned bias to queries, keys and values.
        out_bias: And to the output.
        qk_norm: Normalise queries and keys: "head" over each head and before the rotation, "flat" over all heads
            at once, "l2" over each head, after the rotation and without parameters.
        v_norm: Divide values by their root mean square, over each head.
        tied_values: Values are the keys as projected, before these are normalised and rotated.
        softcap: $t$; none means no cap. It comes before the mask.
        sinks: Each head has a learned score that takes its share of the softmax and gives nothing.
        gated: Multiply the result by the sigmoid of a projection of the input.
        window: A token sees so many tokens, itself included; none means all before it.
        chunk: A token sees those before it in its own chunk of so many; none means no chunks.
        clip: Limit queries, keys and values to plus or minus this.
        rope: Rotary positions of this kind of layer; none means the model's.
        tuning: Let queries grow with their position; none means not.

    Raises:
        ValueError: A value is of the wrong type or out of its limits, or both `window` and `chunk` are given.

    Example:
        >>> Attn(window=512, qk_norm="head").window
        512
    """

    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "flat", "l2"] = "none"
    v_norm: bool = False
    tied_values: bool = False
    softcap: PositiveFloat | None = None
    sinks: bool = False
    gated: bool = False
    window: Positive | None = None
    chunk: Positive | None = None
    clip: PositiveFloat | None = None
    rope: Rope | None = None
    tuning: Tuning | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"chunk: expected none beside window = {self.window}, got {self.chunk}")


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose keys and values come from one narrow latent per token.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    Attributes:
        kv_rank: Width of the latent that keys and values are made from.
        q_rank: Width of the latent that queries are made from; none makes them from the input.
        nope_dim: Width of a head's part that is not rotated.
        rope_dim: Width of a head's part that is rotated; the keys of all heads share one.
        v_dim: Width of a head's values.
        bias: Add a learned bias to the projections into the latents and to the output.
        norm_eps: Added to the mean square in the norms of the latents.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Latent(kv_rank=512).rope_dim
        64
    """

    kv_rank: Positive = 512
    q_rank: Positive | None = None
    nope_dim: Positive = 128
    rope_dim: Positive = 64
    v_dim: Positive = 128
    bias: bool = False
    norm_eps: PositiveFloat = 1e-6

    def __post_init__(self) -> None:
        check(self)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim: expected an even number, got {self.rope_dim}")


@dataclass(frozen=True, kw_only=True)
class Delta:
    """A gated delta rule: a recurrence whose state is a matrix per head.

    Source: Yang et al., "Gated Delta Networks" (2024), equation 10.

    Attributes:
        num_k_heads: Query and key heads, a divisor of `num_v_heads`.
        num_v_heads: Value heads, each with a state.
        k_dim: Width of a key.
        v_dim: Width of a value.
        conv: Tokens that the causal convolution before the recurrence looks at, the current one included.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> Delta(num_k_heads=2, num_v_heads=4).conv
        4
    """

    num_k_heads: Positive = 16
    num_v_heads: Positive = 32
    k_dim: Positive = 128
    v_dim: Positive = 128
    conv: Positive = 4

    def __post_init__(self) -> None:
        check(self)
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_k_heads: expected a divisor of num_v_heads = {self.num_v_heads}, got {self.num_k_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class MLP:
    r"""The MLP of a dense block: $(a(x W_g) \odot x W_u)\, W_d$, or $a(x W_u)\, W_d$ if it has no gate.

    Attributes:
        activation: $a$.
        gated: Whether there is $W_g$.
        bias: Add learned biases to all products.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> MLP(activation="gelu_tanh", gated=False, bias=True).activation
        'gelu_tanh'
    """

    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Last layers that make no keys and values, but use those of an earlier layer.

    A layer uses what the last layer of its own kind makes, of those that come before all that share.

    Source: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention" (2024), section 2.

    Attributes:
        layers: How many.
        mlp_mult: Width of their dense MLPs, in that of the other layers.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Sharing(layers=20, mlp_mult=2).layers
        20
    """

    layers: Positive
    mlp_mult: Positive = 1

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """A small embedding of each token for each layer, which goes into the residual stream through a gate.

    Attributes:
        dim: Its width.
        vocab_size: Rows of its table; none means those of the model's embedding.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> PerLayer(dim=128).vocab_size is None
        True
    """

    dim: Positive = 256
    vocab_size: Positive | None = None

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Head:
    r"""What makes logits of the last activations, and what else is predicted from them.

    Attributes:
        bias: Add a learned bias to the logits.
        softcap: Limit logits to plus or minus $t$ by $t \tanh(z / t)$; none means not.
        mtp: How many tokens beyond the next one training also predicts, each by one more block (multi-token
            prediction); generation does without them.
        mtp_coef: Of the mean of their cross-entropies in the objective.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> Head(softcap=30.0).mtp
        0
    """

    bias: bool = False
    softcap: PositiveFloat | None = None
    mtp: NonNegative = 0
    mtp_coef: NonNegativeFloat = 0.3

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Arch:
    """How the blocks are made and in which order they come.

    The defaults are a pre-norm block of RMSNorm, grouped-query attention and SwiGLU.

    Attributes:
        norm: Every normalisation of the residual stream and of queries and keys.
        placement: Normalise what enters attention and MLP ("pre"), what leaves them ("post"), or "both".
        parallel: Attention and MLP read the same normalised input, and their results are added together.
        attn: Attention of the layers called "attn".
        local: Attention of the layers called "local".
        latent: Attention of the layers called "latent".
        delta: Recurrence of the layers called "delta".
        layers: Names of the layers, one each, or one cycle of them, repeated until there are enough.
        mlp: MLP of the dense layers.
        moe: Experts of the sparse layers; none means that there are none.
        sparse: Which layers are sparse, one value each, or one cycle.
        learned_positions: Add a learned vector for each position, up to the model's `max_len`.
        head: What becomes of the last activations.
        sharing: Last layers that use the keys and values of earlier ones; none means that there are none.
        per_layer: Embeddings of its own for each layer; none means that there are none.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> Arch(local=Attn(window=512), layers=("local", "attn")).layers
        ('local', 'attn')
    """

    norm: Norm = field(default_factory=Norm)
    placement: Literal["pre", "post", "both"] = "pre"
    parallel: bool = False
    attn: Attn = field(default_factory=Attn)
    local: Attn | None = None
    latent: Latent | None = None
    delta: Delta | None = None
    layers: tuple[Mixer, ...] = ("attn",)
    mlp: MLP = field(default_factory=MLP)
    moe: MoE | None = None
    sparse: tuple[bool, ...] = (True,)
    learned_positions: bool = False
    head: Head = field(default_factory=Head)
    sharing: Sharing | None = None
    per_layer: PerLayer | None = None

    def __post_init__(self) -> None:
        check(self)
        problems = [
            f"layers: has {name!r}, but {name} says nothing; give it, or leave it out"
            for name in dict.fromkeys(self.layers)
            if getattr(self, name) is None
        ]
        problems += [] if self.layers else ["layers: expected at least one name, got none"]
        problems += [] if self.sparse else ["sparse: expected at least one value, got none"]
        if self.parallel and self.placement != "pre":
            problems.append(f'placement: expected "pre" for parallel blocks, got {self.placement!r}')
        if self.head.mtp and (self.sharing is not None or self.per_layer is not None):
            problems.append(f"head.mtp: expected 0 beside sharing and per_layer, got {self.head.mtp}")
        if self.parallel and self.moe is not None and self.moe.beside_mlp:
            problems.append("moe.beside_mlp: expected false for parallel blocks, got true")
        if self.head.mtp and self.per_layer is not None:
            problems.append(f"head.mtp: expected 0 with per_layer, which has nothing for it, got {self.head.mtp}")
        if problems:
            raise ValueError("\n".join(problems))
