"""The coordinate check: whether the activations of a model move by the same amounts at every width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import optax

from styrax.core.config import Positive, mistakes
from styrax.core.errors import UserError, nearest
from styrax.optim.columns import columns

if TYPE_CHECKING:
    from jaxtyping import Float

TOLERANCE = 0.15
"""Largest size of a slope that counts as flat."""


class Trial(NamedTuple):
    """One model to train for a few steps.

    Attributes:
        params: Initial parameters.
        optimizer: An optax transformation.
        loss_and_activations: Takes parameters and the batch; gives the loss and name -> activation, of the same names
            at every width.
        batch: What it is trained on in every step; the same data at every width.
    """

    params: Any
    optimizer: optax.GradientTransformation
    loss_and_activations: Callable[[Any, Any], tuple[Any, Mapping[str, Any]]]
    batch: Any


class Coordinate(NamedTuple):
    """How one activation stands at one width after some steps, as the mean over seeds.

    Attributes:
        name: Of the activation.
        width: Of the model.
        step: Steps taken.
        size: Mean absolute value, `mean |x_t|`.
        change: Mean absolute change since the beginning, `mean |x_t - x_0|`.
    """

    name: str
    width: int
    step: int
    size: float
    change: float


class Coordinates(tuple[Coordinate, ...]):
    """The rows of a coordinate check; prints as a table."""

    __slots__ = ()

    @property
    def names(self) -> list[str]:
        """The activations."""
        return list(dict.fromkeys(row.name for row in self))

    @property
    def widths(self) -> list[int]:
        """The widths, ascending."""
        return sorted({row.width for row in self})

    @property
    def steps(self) -> int:
        """Steps taken."""
        return max(row.step for row in self)

    def slope(self, name: str, step: int | None = None) -> float:
        """Give the exponent `p` of the change of an activation, `mean |x_t - x_0| ~ width^p`, by least squares.

        0 is what a transfer is for; 0.5 or 1 is what a parametrisation without one shows.

        Args:
            name: Of the activation.
            step: Steps taken; `None` for all.

        Returns:
            The slope over the logarithms; NaN where an activation never moved or is not finite.

        Raises:
            UserError: There is no such activation or step.
        """
        step = self.steps if step is None else step
        if name not in self.names or not 1 <= step <= self.steps:
            raise UserError(
                f"slope: expected an activation of {', '.join(self.names)} and a step from 1 to {self.steps}, "
                f"got {name!r}{nearest(name, self.names)} and {step}"
            )
        points = {row.width: row.change for row in self if (row.name, row.step) == (name, step)}
        if not all(0 < change < math.inf for change in points.values()):
            return math.nan
        return float(np.polyfit(np.log(list(points)), np.log(list(points.values())), 1)[0])

    def flat(self, name: str, tolerance: float = TOLERANCE) -> bool:
        """Tell whether the change of an activation after the last step is the same at every width.

        Args:
            name: Of the activation.
            tolerance: Largest size of the slope that counts as flat. With widths from 64 to 512, 0.15 is a factor of
                1.4 between the ends.
        """
        return abs(self.slope(name)) <= tolerance

    def __str__(self) -> str:
        """Lay out the table of widths."""
        return self.table()

    def table(self, *, axis: str = "width") -> str:
        """Lay out the change after the last step, a line an activation and a column a width.

        Args:
            axis: What the widths are called.
        """
        last = {(row.name, row.width): row.change for row in self if row.step == self.steps}
        rows = []
        for name in self.names:
            changes = [f"{last[name, width]:.3g}" for width in self.widths]
            rows.append([name, *changes, f"{self.slope(name):+.2f}", "flat" if self.flat(name) else "NOT flat"])
        head = ["activation", *map(str, self.widths), "slope", ""]
        return f"mean |x_{self.steps} - x_0| by {axis}\n" + columns(head, rows)

    def plot(self, path: str | Path, *, axis: str = "width") -> None:
        """Draw the change over the width, on logarithmic axes: a panel an activation, a line a step.

        Args:
            path: Where the picture goes; the suffix says its kind, such as `.png`, `.pdf` or `.svg`.
            axis: What the widths are called.

        Raises:
            UserError: matplotlib is not installed, or cannot write such a file.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UserError(
                'a picture of the coordinate check needs matplotlib; pip install "styrax-optim[plot]"'
            ) from error

        columns = min(4, len(self.names))
        rows = -(-len(self.names) // columns)
        figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flat
        for panel, name in zip(panels, self.names):
            for step in range(1, self.steps + 1):
                points = [(row.width, row.change) for row in self if (row.name, row.step) == (name, step)]
                shade = 0.25 + 0.75 * step / self.steps
                panel.plot(*zip(*points), "o-", color="#2a6f97", alpha=shade, markersize=3, label=f"step {step}")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_xticks(self.widths, [str(width) for width in self.widths])
            panel.minorticks_off()
            panel.set_title(f"{name}: {self.slope(name):+.2f}", fontsize=9)
            # A decade or more, so that a flat line looks flat.
            low, high = panel.get_ylim()
            middle, reach = math.sqrt(low * high), max(math.sqrt(high / low), 10**0.75)
            panel.set_ylim(middle / reach, middle * reach)
        for panel in [*panels][len(self.names) :]:
            panel.set_visible(False)
        figure.supxlabel(axis, fontsize=9)
        figure.supylabel("mean |x_t - x_0|", fontsize=9)
        handles, labels = next(iter(figure.axes)).get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=self.steps, frameon=False, fontsize=8)
        try:
            figure.savefig(path, dpi=120)
        except (ValueError, OSError) as error:
            raise UserError(f"cannot write the picture {path}: {error}") from error


def coordinate_check(
    make: Callable[[int, int], Trial],
    widths: Sequence[int],
    *,
    steps: int = 4,
    seeds: Sequence[int] = (0,),
    progress: Callable[[str], Any] | None = None,
) -> Coordinates:
    """Train a model of each width for a few steps and record how far its activations move.

    With the right parametrisation, `mean |x_t - x_0|` of every activation is the same at every width, from the first
    step on; without it, some grow with a power of the width, and a learning rate that is right for a narrow model is
    too large for a wide one. It is a check of an implementation, and says nothing about which learning rate is best.

    Args:
        make: Takes a width and a seed; gives the model, its optimizer and the batch. The width may stand for any
            measure of size, such as the depth.
        widths: Two or more, different.
        steps: Updates, 1 or more.
        seeds: What is recorded is the mean over them.
        progress: Called with a line of text before each model.

    Returns:
        A row for each activation, width and step, from step 0.

    Raises:
        UserError: Widths, steps or seeds are not such, or the widths record activations of different names.

    Source: Yang et al. 2022, arXiv 2203.03466, appendix D.1 (and figure 5).

    Example:
        >>> import jax.numpy as jnp
        >>> from styrax.optim import adamw, specs
        >>> from styrax.optim.transfer import MuP
        >>> x = jnp.sin(jnp.arange(40.0)).reshape(8, 5)
        >>> def make(width, seed):
        ...     keys = jax.random.split(jax.random.key(seed), 3)
        ...     shapes = {"embed": (5, width), "up": (width, width), "head": (width, 3)}
        ...     params = {n: {"kernel": jax.random.normal(k, s) / 4} for (n, s), k in zip(shapes.items(), keys)}
        ...     transfer = MuP(width=width, base_width=16)
        ...     by_path = transfer.by_path(params, specs(params))
        ...     params["up"]["kernel"] *= by_path["up/kernel"].init
        ...     def loss_and_activations(params, x):
        ...         hidden = jnp.tanh(jnp.tanh(x @ params["embed"]["kernel"]) @ params["up"]["kernel"])
        ...         out = transfer.forward(head_dim=1).logits * (hidden @ params["head"]["kernel"])
        ...         return jnp.mean((out - 1.0) ** 2), {"hidden": hidden, "out": out}
        ...     rates = {path: each.lr for path, each in by_path.items()}
        ...     return Trial(params, adamw(1e-3, lr_multipliers=rates), loss_and_activations, x)
        >>> found = coordinate_check(make, [32, 128], steps=2)
        >>> [(name, found.flat(name)) for name in found.names]
        [('hidden', True), ('out', True)]
    """
    _check(widths, steps, seeds)
    sums: dict[tuple[str, int, int], np.ndarray] = {}
    expected: list[str] = []
    for width in sorted(widths):
        for seed in seeds:
            if progress is not None:
                progress(f"{width}, seed {seed}" if len(seeds) > 1 else str(width))
            for step, found in enumerate(_train(make(width, seed), steps)):
                expected = expected or list(found)
                if found.keys() != set(expected):
                    raise UserError(
                        f"coordinate check: expected activations of the same names at every width; "
                        f"{min(widths)} has {', '.join(expected)}; {width} has {', '.join(found)}"
                    )
                for name, pair in found.items():
                    key = name, width, step
                    sums[key] = sums.get(key, 0.0) + pair
    order = sorted(sums, key=lambda key: (expected.index(key[0]), *key[1:]))
    return Coordinates(Coordinate(*key, *map(float, sums[key] / len(seeds))) for key in order)


def _check(widths: Sequence[int], steps: int, seeds: Sequence[int]) -> None:
    problems = mistakes({"widths": (tuple[Positive, ...], tuple(widths)), "steps": (Positive, steps)})
    if not problems and (len(widths) < 2 or len({*widths}) < len(widths)):
        problems.append(f"widths: expected two or more, all different, got {[*widths]}")
    if not len(seeds):
        problems.append("seeds: expected one or more, got none")
    if problems:
        raise UserError("\n  ".join(["coordinate check:", *problems]))


def _train(trial: Trial, steps: int) -> list[dict[str, Float[np.ndarray, " 2"]]]:
    """Give, for each step from 0, the size and the change of each activation."""

    names: list[str] = []  # jax sorts the keys of a dictionary; the model's own order reads better

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value_and_grad = jax.value_and_grad(loss_and_activations, has_aux=True)
        (_, activations), grads = value_and_grad(params, batch)
        updates, state = trial.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, activations

    def loss_and_activations(params: Any, batch: Any) -> Any:
        loss, activations = trial.loss_and_activations(params, batch)
        names[:] = activations
        return loss, dict(activations)

    params, state = trial.params, trial.optimizer.init(trial.params)
    found, first = [], {}
    for _ in range(steps + 1):
        params, state, activations = step(params, state, trial.batch)
        now = {name: np.asarray(activations[name], np.float64) for name in names}
        first = first or now
        found.append({name: np.array([np.abs(x).mean(), np.abs(x - first[name]).mean()]) for name, x in now.items()})
    return found
