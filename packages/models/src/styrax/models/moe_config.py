"""A mixture of experts; importing it costs no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from styrax.core.config import NonNegativeFloat, Positive, PositiveFloat, check
from styrax.models.sharding import LogicalAxes


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Choose groups of experts first, and then experts of these groups only.

    Expert `e` is in group `e // (num_experts / num)`.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.2.2, for "max"; "DeepSeek-V3" (2024), its published code,
    for "top2".

    Attributes:
        num: How many groups there are, a divisor of the number of experts.
        kept: How many of them a token may choose experts from.
        score: What groups are compared by: their best expert ("max") or the sum of their two best ("top2").

    Raises:
        ValueError: Values do not fit together; all problems are listed.
    """

    num: Positive
    kept: Positive
    score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        check(self)
        if self.kept > self.num:
            raise ValueError(f"kept: expected at most num = {self.num}, got {self.kept}")


@dataclass(frozen=True, kw_only=True)
class Routing:
    r"""How a token chooses its experts and weighs what they answer.

    Attributes:
        score: Scores are the softmax of the logits over all experts, or the sigmoid of each.
        renormalise: Divide the weights of the chosen by their sum. With one expert per token that makes every
            weight 1, so that only a balance loss trains the router.
        scale: Factor of the weights, after that.
        bias: Add a learned bias to the logits.
        correction: Add a number per expert to the scores when experts are chosen, and not in the weights. It
            belongs to the model, but no gradient trains it.
        correction_rate: After a step of training, add so much to the correction of experts that fewer tokens than
            the mean went to, and take so much from the others; see `Decoder.end_step`. 0 leaves them as they are.
        groups: Choose among groups first; none means not.
        norm_eps: Divide the router's input by its root mean square, with this under the root, and multiply it by
            a learned vector and $d^{-1/2}$; none means not.
        expert_scale: Multiply the weights by a learned number per expert, at the end.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: PositiveFloat = 1.0
    bias: bool = False
    correction: bool = False
    correction_rate: NonNegativeFloat = 0.0
    groups: Groups | None = None
    norm_eps: PositiveFloat | None = None
    expert_scale: bool = False

    def __post_init__(self) -> None:
        check(self)
        if self.correction_rate and not self.correction:
            raise ValueError(f"correction_rate: expected 0 without correction, got {self.correction_rate}")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """An MLP that every token goes through beside its experts; several shared experts are one wide one.

    Attributes:
        dim: Hidden width.
        gated: Multiply its answer by the sigmoid of a projection of the token.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.
    """

    dim: Positive
    gated: bool = False

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Clamped:
    r"""In place of an activation: $(u + 1)\, g\, \sigma(\alpha g)$, with $g \le c$ and $-c \le u \le c$.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.2, and its published code.

    Attributes:
        limit: $c$.
        slope: $\alpha$.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.
    """

    limit: PositiveFloat = 7.0
    slope: PositiveFloat = 1.702

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class MoE:
    r"""Many gated MLPs, the experts, of which each token goes through a few.

    $y = \sum_{e} w_e\, (a(x W_{g,e}) \odot x W_{u,e})\, W_{d,e}$ over the experts that a token $x$ chose.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2.

    Attributes:
        num_experts: How many there are.
        experts_per_token: How many a token chooses.
        expert_dim: Hidden width of each.
        routing: How they are chosen and weighed.
        activation: $a$.
        clamped: What stands in for the activation; none means nothing.
        expert_bias: Add learned biases to the products of the experts.
        input_scaled: The weights multiply what goes into the experts, not what comes out.
        shared: An MLP for every token; none means that there is none.
        beside_mlp: The layer has its dense MLP too. Both read the same residual stream and are added together; what
            enters and what leaves the experts, and what leaves the MLP, have norms of their own, and the router
            reads the stream itself.
        dispatch: How tokens come to experts. "dropless" computes every choice; "capacity" gives every expert the
            same number of places, and a choice that finds none left adds nothing; "dense" computes all experts for
            all tokens, which costs `num_experts / experts_per_token` times as much and suits tiny models.
        capacity_factor: With "capacity", places in relation to an even load.
        balance_coef: Of the term of the loss that keeps experts evenly used.
        z_coef: Of the term that keeps the router's logits small.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> MoE(num_experts=8, experts_per_token=2, expert_dim=64).routing.score
        'softmax'
        >>> MoE(num_experts=8, experts_per_token=6, routing=Routing(groups=Groups(num=4, kept=2)))
        Traceback (most recent call last):
        ValueError: routing.groups: keeps 2 groups of 2 experts, expected at least experts_per_token = 6 in them
    """

    num_experts: Positive = 8
    experts_per_token: Positive = 2
    expert_dim: Positive = 256
    routing: Routing = field(default_factory=Routing)
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"] = "silu"
    clamped: Clamped | None = None
    expert_bias: bool = False
    input_scaled: bool = False
    shared: Shared | None = None
    beside_mlp: bool = False
    dispatch: Literal["dropless", "capacity", "dense"] = "dropless"
    capacity_factor: PositiveFloat = 1.25
    balance_coef: NonNegativeFloat = 0.01
    z_coef: NonNegativeFloat = 0.001

    def __post_init__(self) -> None:
        check(self)
        problems, groups = [], self.routing.groups
        if self.experts_per_token > self.num_experts:
            problems.append(
                f"experts_per_token: expected at most num_experts = {self.num_experts}, got {self.experts_per_token}"
            )
        if groups is not None and self.num_experts % groups.num:
            problems.append(
                f"routing.groups.num: expected a divisor of num_experts = {self.num_experts}, got {groups.num}"
            )
        elif groups is not None:
            size = self.num_experts // groups.num
            if groups.kept * size < self.experts_per_token:
                problems.append(
                    f"routing.groups: keeps {groups.kept} groups of {size} experts, expected at least "
                    f"experts_per_token = {self.experts_per_token} in them"
                )
            if groups.score == "top2" and size < 2:
                problems.append(f'routing.groups.score: expected groups of 2 experts or more with "top2", got {size}')
        if problems:
            raise ValueError("\n".join(problems))

    def logical_axes(self) -> LogicalAxes:
        """Name the axes of every parameter of `styrax.models.layers.moe.Mixture`, by path.

        Example:
            >>> MoE().logical_axes()["experts/gate/kernel"]
            ('expert', 'embed', 'mlp')
        """
        axes: dict[str, tuple[str | None, ...]] = {"router/kernel": ("embed", None)}
        routing = self.routing
        axes |= {"router/bias": (None,)} if routing.bias else {}
        axes |= {"router/correction": (None,)} if routing.correction else {}
        axes |= {"router/load": (None,)} if routing.correction_rate else {}
        axes |= {"router/scale": (None,)} if routing.norm_eps is not None else {}
        axes |= {"router/expert_scale": (None,)} if routing.expert_scale else {}
        for name, kernel in {"gate": ("embed", "mlp"), "up": ("embed", "mlp"), "down": ("mlp", "embed")}.items():
            axes[f"experts/{name}/kernel"] = ("expert", *kernel)
            if self.expert_bias:
                axes[f"experts/{name}/bias"] = ("expert", kernel[1] if name != "down" else None)
            if self.shared is not None:
                axes[f"shared/{name}/kernel"] = kernel
        if self.shared is not None and self.shared.gated:
            axes["shared_gate/kernel"] = ("embed", None)
        return axes
