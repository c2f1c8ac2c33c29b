"""The recipes of algorithms for matrices, each with an AdamW for everything else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.config import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Seed, check
from styrax.core.errors import UserError
from styrax.optim.recipe import Recipe
from styrax.optim.recipe_parts import Treatment
from styrax.optim.schedules import amount

if TYPE_CHECKING:
    from styrax.optim.guard import FusedTransformation


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The AdamW that a recipe for matrices has for everything else.

    Attributes:
        learning_rate: Peak; absent for that of the matrices.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
    """

    learning_rate: NonNegativeFloat | None = None
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-8

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)
        if problems := [f"{name} must be below 1, got 1.0" for name in ("b1", "b2") if getattr(self, name) == 1]:
            raise ValueError("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class MatrixRecipe(Recipe):
    """What the recipes for matrices share.

    Attributes:
        adam: The AdamW for what is no matrix.
    """

    adam: Rest = field(default_factory=Rest)

    def shared(self, treatment: Treatment) -> dict[str, Any]:
        """Give the arguments that all of them take."""
        adam: dict[str, Any] = {"b1": self.adam.b1, "b2": self.adam.b2, "eps": treatment.epsilon(self.adam.eps)}
        if self.adam.learning_rate is not None:
            adam["learning_rate"] = self.adam.learning_rate
        return {"specs": treatment.specs, "adam": adam, **treatment.common}

    def epsilon(self, treatment: Treatment, eps: float) -> float:
        """Give the epsilon of the matrices, which are computed in batches and so must have one.

        Raises:
            UserError: The transfer gives them several.
        """
        found = {treatment.eps.get(path, 1.0) for path, spec in treatment.specs.items() if spec.role == "matrix"}
        if len(found) > 1:
            raise UserError(
                f"{self.kind}: extras.transfer multiplies epsilon by {sorted(found)}, each for other matrices, but it "
                "has one for all; give those outside of the blocks a group with another optimizer"
            )
        return eps * next(iter(found), 1.0)


@dataclass(frozen=True, kw_only=True)
class Products:
    """The matrix products that make the singular values one; see `styrax.optim.orthogonalize`.

    Attributes:
        iteration: Which polynomials, from fewest digits right to most.
        form: `gram` needs fewer products for matrices that are far from square.
        dtype: Of the products.
    """

    iteration: Literal["standard", "dion", "polar_express", "refined"] = "standard"
    form: Literal["plain", "gram"] = "plain"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        """Check the values."""
        check(self)


@dataclass(frozen=True, kw_only=True)
class Muon(MatrixRecipe):
    """Muon: momentum with all its singular values made one, see `styrax.optim.muon`.

    Attributes:
        learning_rate: Peak learning rate; with `scale = "rms"` that of AdamW, with `"original"` about 0.02.
        momentum: Decay of the momentum.
        momentum_warmup: Over how many steps the momentum rises to that from 0.85: an integer is a number of steps, a
            number with a point a fraction of all; 0 for none.
        nesterov: Look one step ahead.
        scale: Length of a step: `rms` is that of AdamW, `spectral` transfers over widths, `original` is the authors'.
        products: How the singular values are made one.
        normalize: Decay of the mean square of each output's step, by which it is divided (NorMuon); absent for Muon.
    """

    kind: Literal["muon"] = "muon"
    transferable = 'it is for Adam and its relatives; with scale = "spectral" Muon needs none over widths'
    adam: Rest = field(default_factory=lambda: Rest(eps=1e-10))
    momentum: Fraction = 0.95
    momentum_warmup: NonNegative | Fraction = 0
    nesterov: bool = True
    scale: Literal["original", "spectral", "rms"] = "rms"
    products: Products = field(default_factory=Products)
    normalize: Fraction | None = None

    below_one = ("momentum",)

    def problems(self) -> list[str]:
        """Say what does not fit together."""
        return super().problems() + (["normalize must be below 1, got 1.0"] if self.normalize == 1 else [])

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.muon import MomentumWarmup, muon

        momentum: Any = self.momentum
        if steps := amount(self.momentum_warmup, treatment.steps):
            momentum = MomentumWarmup(start=min(0.85, self.momentum), end=self.momentum, steps=steps)
        return muon(
            self.learning_rate,
            momentum=momentum,
            nesterov=self.nesterov,
            scale=self.scale,
            iteration=self.products.iteration,
            form=self.products.form,
            dtype=self.products.dtype,
            normalize=self.normalize is not None,
            b2=0.95 if self.normalize is None else self.normalize,
            **self.shared(treatment),
        )


@dataclass(frozen=True, kw_only=True)
class NorMuon(Muon):
    """NorMuon: Muon whose outputs all have steps of the same length.

    Attributes:
        normalize: Decay of the mean square of each output's step, by which it is divided.
    """

    kind: Literal["normuon"] = "normuon"  # pyright: ignore[reportIncompatibleVariableOverride]
    normalize: Fraction | None = 0.95


@dataclass(frozen=True, kw_only=True)
class Soap(MatrixRecipe):
    """SOAP: Adam in the eigenbases of the gradient's covariances, see `styrax.optim.soap`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment and, unless `shampoo_beta` is given, of the covariances.
        shampoo_beta: Decay of the covariances; absent for `b2`.
        eps: Added to the root of the second moment.
        frequency: Steps from one new basis to the next.
        max_precond_dim: Longest side that is rotated.
    """

    kind: Literal["soap"] = "soap"
    b1: Fraction = 0.95
    b2: Fraction = 0.95
    shampoo_beta: Fraction | None = None
    eps: PositiveFloat = 1e-8
    frequency: Positive = 10
    max_precond_dim: Positive = 10_000

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.soap import soap

        return soap(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            shampoo_beta=self.shampoo_beta,
            eps=self.epsilon(treatment, self.eps),
            frequency=self.frequency,
            max_precond_dim=self.max_precond_dim,
            **self.shared(treatment),
        )


@dataclass(frozen=True, kw_only=True)
class Shampoo(MatrixRecipe):
    """Shampoo: gradients divided by the roots of their covariances, steps as long as Adam's; `styrax.optim.shampoo`.

    Attributes:
        b1: Decay of the first moment.
        b2: Decay of the second moment and of the covariances.
        eps: Added to the eigenvalues.
        graft_eps: Added to the root of the second moment that gives the length of a step.
        frequency: Steps from one computation of the roots to the next.
        max_precond_dim: Longest side that has a covariance.
    """

    kind: Literal["shampoo"] = "shampoo"
    b1: Fraction = 0.95
    b2: Fraction = 0.95
    eps: PositiveFloat = 1e-12
    graft_eps: PositiveFloat = 1e-8
    frequency: Positive = 10
    max_precond_dim: Positive = 8192

    below_one = ("b1", "b2")

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.shampoo import shampoo

        return shampoo(
            self.learning_rate,
            b1=self.b1,
            b2=self.b2,
            eps=self.eps * self.epsilon(treatment, 1.0) ** 2,  # of squared gradients
            adam_eps=self.epsilon(treatment, self.graft_eps),
            frequency=self.frequency,
            max_precond_dim=self.max_precond_dim,
            **self.shared(treatment),
        )


@dataclass(frozen=True, kw_only=True)
class Kron(MatrixRecipe):
    """PSGD with Kronecker factors: a preconditioner that is fitted and never inverted, see `styrax.optim.kron`.

    Attributes:
        b1: Decay of the first moment.
        precond_lr: How far a fit of the factors goes.
        max_size_triangular: Longest side that has a triangular factor; longer ones have a diagonal.
        seed: Of the noise that the factors are fitted to.
    """

    kind: Literal["kron"] = "kron"
    transferable = "it is for Adam and its relatives; leave it out"
    learning_rate: NonNegativeFloat = 3e-4
    b1: Fraction = 0.9
    precond_lr: PositiveFloat = 0.1
    max_size_triangular: Positive = 8192
    seed: Seed = 0

    below_one = ("b1",)

    def make(self, treatment: Treatment) -> FusedTransformation:
        """Make the algorithm."""
        from styrax.optim.kron import kron

        return kron(
            self.learning_rate,
            b1=self.b1,
            precond_lr=self.precond_lr,
            max_size_triangular=self.max_size_triangular,
            seed=self.seed,
            **self.shared(treatment),
        )
