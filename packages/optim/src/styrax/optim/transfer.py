"""Transfer of hyperparameters from a small model to a large one: muP, CompleteP and u-muP as numbers by path.

Each says, for every parameter, what multiplies the learning rate, the weight decay, Adam's epsilon and the initial
standard deviation, and what constant factors the model's forward pass has. They are for Adam and its relatives. That
the best learning rate is then the same for all widths (or depths) is what the papers measured; what can be checked in
a minute is that the activations of every width move alike: `styrax.optim.coordinate_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from styrax.core import UserError, nearest
from styrax.core.config import Positive, PositiveFloat, check
from styrax.core.tree import flatten
from styrax.optim.roles import shape_of
from styrax.optim.specs import ParamSpec, need_axes

BLOCKS: tuple[str, ...] = ("layers",)
"""Names of the path segments below which a parameter belongs to a residual block."""


class Multipliers(NamedTuple):
    """What one parameter's settings are multiplied by.

    Attributes:
        lr: The learning rate: the `k` of `styrax.optim.adamw`, which multiplies the decay too.
        decay: The weight decay `d`, before the learning rate: in all, a step shrinks a weight by `k * lr * decay * d`.
        eps: Adam's epsilon.
        init: The initial standard deviation.
    """

    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0
    init: float = 1.0


class Forward(NamedTuple):
    """Constant factors in the forward pass; 1 where the usual model is right.

    Attributes:
        residual: Of what attention and MLP add to the residual stream.
        logits: Of the logits.
        attention: Of the products of query and key, in place of `head_dim ** -0.5`.
        embedding: Of the embedding.
    """

    residual: float
    logits: float
    attention: float
    embedding: float


@dataclass(frozen=True, kw_only=True)
class MuP:
    """Maximal update parametrisation: activations move alike at every width.

    With `m = width / base_width`,

        role      learning rate   decay   eps   initial deviation
        matrix    1 / m           1       1     m^(-1/2)
        others    1               1       1     1

    and factors of 1 at the residual branches, `alpha_out / m` at the logits, `1 / head_dim` in attention and `alpha_in`
    at the embedding. A matrix is one with inputs and outputs that grow with the width; what reads inputs of a fixed
    size must have the role `embed`, and what makes outputs of a fixed size `head`. As the learning rate multiplies the
    decay, matrices of a wide model decay less: `CompleteP` keeps the product.

    Attributes:
        kind: Which transfer this is.
        width: Width of this model.
        base_width: Width of the model whose learning rate and initial deviation these are.
        alpha_out: Factor of the logits, tuned at the base.
        alpha_in: Factor of the embedding, tuned at the base.

    Source: Yang et al. 2022, arXiv 2203.03466, table 8; with the base model's values as the constants, as in Dey et
        al., "The Practitioner's Guide to the Maximal Update Parameterization" (EleutherAI/nanoGPT-mup).

    Example:
        >>> import numpy as np
        >>> from styrax.optim.specs import specs
        >>> params = {"embed": {"kernel": np.ones((3, 8))}, "up": {"kernel": np.ones((8, 8))}}
        >>> for path, each in MuP(width=8, base_width=2).by_path(params, specs(params)).items():
        ...     print(path, each)
        embed/kernel Multipliers(lr=1.0, decay=1.0, eps=1.0, init=1.0)
        up/kernel Multipliers(lr=0.25, decay=1.0, eps=1.0, init=0.5)
    """

    kind: Literal["mup"] = "mup"
    width: Positive
    base_width: Positive
    alpha_out: PositiveFloat = 1.0
    alpha_in: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)

    def by_path(
        self, params: Any, specs: Mapping[str, ParamSpec], *, blocks: Collection[str] = BLOCKS
    ) -> dict[str, Multipliers]:
        """Give every parameter its multipliers.

        Args:
            params: Tree of arrays, or of anything with a shape.
            specs: Path -> description, from `styrax.optim.specs`; more names than parameters are fine.
            blocks: Names of the path segments below which a parameter belongs to a residual block.

        Raises:
            UserError: A parameter has no description; all are listed.
        """
        m = self.width / self.base_width
        hidden = Multipliers(lr=1 / m, init=m**-0.5)
        return _each(params, specs, blocks, lambda spec, shape, inside: hidden if _is_matrix(spec) else Multipliers())

    def forward(self, head_dim: int) -> Forward:
        """Give the factors of the forward pass of a model whose heads have this width."""
        return Forward(1.0, self.alpha_out * self.base_width / self.width, 1 / head_dim, self.alpha_in)


@dataclass(frozen=True, kw_only=True)
class CompleteP:
    """MuP, and the same for depth: activations move alike at every width and every depth.

    With `m = width / base_width`, `l = depth / base_depth` and `a = alpha`,

        role      where      learning rate    decay   eps          initial deviation
        matrix    block      l^(a-1) / m      m       l^(-a) / m   m^(-1/2)
        others    block      l^(a-1)          1       l^(-a) / m   1
        matrix    elsewhere  1 / m            m       1 / m        m^(-1/2)
        others    elsewhere  1                1       1 / m        1

    and factors of `l^(-a)` at the residual branches, `alpha_out / m` at the logits, `1 / head_dim` in attention and
    `alpha_in` at the embedding. For `alpha = 1` the learning rate times the decay of a matrix is that of the base. The
    epsilon goes with the size of the gradient. The initial values must not depend on the depth: a model that starts its
    residual branches at `1 / sqrt(2 depth)` should take that of the base depth.

    Attributes:
        kind: Which transfer this is.
        width: Width of this model.
        base_width: Width of the model whose settings these are.
        depth: Number of blocks of this model.
        base_depth: Number of blocks of the model whose settings these are.
        alpha: Exponent of the depth, from 0.5 to 1; 1 is what the paper recommends.
        alpha_out: Factor of the logits, tuned at the base.
        alpha_in: Factor of the embedding, tuned at the base.

    Source: Dey et al. 2025, arXiv 2505.01618, table 1 (EleutherAI/nanoGPT-mup, branch completep, which uses the
        epsilon of the blocks for all parameters).

    Example:
        >>> transfer = CompleteP(width=512, base_width=128, depth=16, base_depth=4)
        >>> transfer.forward(head_dim=64)
        Forward(residual=0.25, logits=0.25, attention=0.015625, embedding=1.0)
    """

    kind: Literal["completep"] = "completep"
    width: Positive
    base_width: Positive
    depth: Positive
    base_depth: Positive
    alpha: PositiveFloat = 1.0
    alpha_out: PositiveFloat = 1.0
    alpha_in: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if not 0.5 <= self.alpha <= 1:
            raise UserError(f"alpha: expected a number from 0.5 to 1, got {self.alpha}")

    def by_path(
        self, params: Any, specs: Mapping[str, ParamSpec], *, blocks: Collection[str] = BLOCKS
    ) -> dict[str, Multipliers]:
        """Give every parameter its multipliers; see `MuP.by_path`."""
        wider, deeper = self.width / self.base_width, self.depth / self.base_depth

        def of(spec: ParamSpec, shape: tuple[int, ...], inside: bool) -> Multipliers:
            depth = deeper ** (self.alpha - 1) if inside else 1.0
            eps = deeper**-self.alpha / wider if inside else 1 / wider
            if _is_matrix(spec):
                return Multipliers(depth / wider, wider, eps, wider**-0.5)
            return Multipliers(depth, 1.0, eps, 1.0)

        return _each(params, specs, blocks, of)

    def forward(self, head_dim: int) -> Forward:
        """Give the factors of the forward pass of a model whose heads have this width."""
        residual = (self.depth / self.base_depth) ** -self.alpha
        return Forward(residual, self.alpha_out * self.base_width / self.width, 1 / head_dim, self.alpha_in)


@dataclass(frozen=True, kw_only=True)
class UMuP:
    """Unit-scaled muP: no base model, every weight starts with deviation 1 and the learning rate is of order 1.

    With `f` the fan-in of a matrix and `n` the number of blocks, where `weights = "unit"`,

        role            learning rate, times n^(-1/2) in a block    decay
        matrix          f^(-1/2)                                    1 / learning rate
        embed           width^(-1/2)                                the same
        head, others    1                                           the same

    with initial deviation 1 for all. The layers of the model must then scale what they compute: a matrix by
    `f^(-1/2)`, the head by `1 / f`, as those of graphcore's `unit_scaling` do. An ordinary model is trained in the
    same way if these factors move into the weights (Adam divides by the size of the gradient, so both the learning
    rate and the initial deviation are multiplied by them): `weights = "plain"` gives a matrix

        learning rate n^(-1/2) / f,     initial deviation f^(-1/2) of one that is 1.

    The factors of the forward pass, for such a model, are `n^(-1/2)` at the residual branches, `1 / width` at the
    logits and `1 / head_dim` in attention. The decay is that of the base learning rate for all parameters; for a decay
    that does not depend on it either, give the optimizer `decay / learning_rate`. The rule for embeddings is one of
    experience, and lets them move by `width^(-1/2)`, which a coordinate check shows. A table that is embedding and head
    at once has no right learning rate here.

    Attributes:
        kind: Which transfer this is.
        width: Width of this model.
        depth: Number of blocks `n`.
        weights: Whether weights start with deviation 1 and the layers scale (`unit`), or the weights (`plain`).

    Source: Blake et al. 2024, arXiv 2407.17465, tables 1 and 2 and appendix G; graphcore-research/unit-scaling,
        `unit_scaling/optim.py`.

    Example:
        >>> import numpy as np
        >>> from styrax.optim.specs import specs
        >>> params = {"layers": {"up": {"kernel": np.ones((4, 16, 64))}}}
        >>> UMuP(width=16, depth=4).by_path(params, specs(params))["layers/up/kernel"]
        Multipliers(lr=0.125, decay=8.0, eps=1.0, init=1.0)
    """

    kind: Literal["umup"] = "umup"
    width: Positive
    depth: Positive
    weights: Literal["unit", "plain"] = "unit"

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)

    def by_path(
        self, params: Any, specs: Mapping[str, ParamSpec], *, blocks: Collection[str] = BLOCKS
    ) -> dict[str, Multipliers]:
        """Give every parameter its multipliers; see `MuP.by_path`.

        Raises:
            UserError: A parameter has no description, or is a matrix whose axes nobody gave; all are listed.
        """

        def of(spec: ParamSpec, shape: tuple[int, ...], inside: bool) -> Multipliers:
            depth = self.depth**-0.5 if inside else 1.0
            scale = 1.0
            if _is_matrix(spec):
                scale = spec.fan_in(shape) ** -0.5
            elif spec.role == "embed":
                scale = self.width**-0.5
            moved = scale if _is_matrix(spec) and self.weights == "plain" else 1.0
            lr = depth * scale * moved
            return Multipliers(lr, 1 / lr, 1.0, moved)

        need_axes(specs, [path for path in flatten(params) if path in specs and _is_matrix(specs[path])], "u-muP")
        return _each(params, specs, blocks, of)

    def forward(self, head_dim: int) -> Forward:
        """Give the factors of the forward pass of a model with plain weights whose heads have this width."""
        return Forward(self.depth**-0.5, 1 / self.width, 1 / head_dim, 1.0)


Transfer = MuP | CompleteP | UMuP


def _is_matrix(spec: ParamSpec) -> bool:
    return spec.role == "matrix"


def _each(
    params: Any,
    specs: Mapping[str, ParamSpec],
    blocks: Collection[str],
    of: Callable[[ParamSpec, tuple[int, ...], bool], Multipliers],
) -> dict[str, Multipliers]:
    leaves = flatten(params)
    if missing := [path for path in leaves if path not in specs]:
        lines = [f"  {path!r}{nearest(path, specs)}" for path in missing]
        raise UserError("\n".join(["transfer: specs has nothing for:", *lines, "make it by styrax.optim.specs"]))
    return {
        path: of(specs[path], shape_of(leaf), bool({*path.split("/")} & {*blocks})) for path, leaf in leaves.items()
    }
