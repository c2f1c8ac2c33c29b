"""Several token stores, and how much each gives over the course of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from styrax.core.errors import UserError, nearest
from styrax.data.plan.timeline import quantise, ramp

if TYPE_CHECKING:
    import numpy as np

    from styrax.data.store import TokenStore

Weights = Mapping[str, float]


class Mixture:
    """Sources by name, with weights that may change with the step.

    A weight is a source's share of the rows. Weights need not sum to one, may be zero, and hold from their step on;
    with `interpolate="linear"` they change evenly from one point to the next (in at most 4,096 stairs). To change a
    run's mixture, append a point at the step that it has reached, or later: the sources go on where they are, and no
    row is repeated or left out.

    Args:
        sources: Stores, or their folders or URLs, by name. All must have been made by the same tokenizer.
        weights: One weight each, or pairs of a step and weights, the first at step 0; equal by default. A source that
            is not named has weight zero.
        interpolate: `hold` each point's weights until the next, or go there in a `linear` ramp.
        max_epochs: How often a source may be read at most: a number for all, or by name. A source at its limit gives
            its share to the others; when all are, the data end.

    Raises:
        UserError: Unknown names, weights that are not numbers of 0 or more, different tokenizers; all in one message.

    Example:
        >>> import tempfile
        >>> from styrax.data import ByteTokenizer, LMData, write_store
        >>> folder = tempfile.mkdtemp()
        >>> stores = {name: write_store(f"{folder}/{name}", {name: name * 90}, ByteTokenizer()) for name in ("a", "b")}
        >>> mixture = Mixture(stores, [(0, {"a": 3, "b": 1}), (100, {"b": 1})])
        >>> data = LMData(mixture, seq_len=8, batch_size=4, held_out=0)
        >>> [data.sources_of(step) for step in (0, 100)]
        [['a', 'b', 'a', 'a'], ['b', 'b', 'b', 'b']]
    """

    def __init__(
        self,
        sources: Mapping[str, TokenStore | str | Path],
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        *,
        interpolate: Literal["hold", "linear"] = "hold",
        max_epochs: float | Mapping[str, float] | None = None,
    ):
        from styrax.data.store.remote import open_store

        problems: list[str] = []
        if not sources:
            problems.append("a mixture needs a source or more, got none")
        if interpolate not in ("hold", "linear"):
            problems.append(f"interpolate = {interpolate!r}: expected 'hold' or 'linear'")
        self.names = list(sources)
        self.points = self._parse(weights, problems)
        self.interpolate = interpolate
        self.max_epochs = self._limits(max_epochs, problems)
        if problems:
            raise UserError("\n".join(problems))
        self.stores: list[Any] = [
            open_store(store) if isinstance(store, (str, Path)) else store for store in sources.values()
        ]
        makers = {
            name: store.meta["tokenizer"]["fingerprint"] for name, store in zip(self.names, self.stores, strict=True)
        }
        if len(set(makers.values())) > 1:
            found = "".join(f"\n  - {name}: {maker}" for name, maker in makers.items())
            raise UserError(
                f"the sources of a mixture were made by different tokenizers:{found}\n"
                "build them with one: `styrax data build IN... --out DIR --tokenizer FILE`"
            )

    def __repr__(self) -> str:
        return f"Mixture({self.names}, {self.points}, {self.interpolate!r})"

    @property
    def settings(self) -> dict[str, Any]:
        """What the mixture is, in JSON."""
        return {
            "sources": {name: store.fingerprint for name, store in zip(self.names, self.stores, strict=True)},
            "weights": [[step, dict(weights)] for step, weights in self.points],
            "interpolate": self.interpolate,
            "max_epochs": self.max_epochs,
        }

    def schedule(self) -> list[tuple[int, np.ndarray]]:
        """List the integer weights, each with the step from which they hold."""
        points = [(step, quantise(weights, self.names)) for step, weights in self.points]
        if self.interpolate == "hold":
            return points
        stairs = [stair for low, high in pairwise(points) for stair in ramp(low, high)]
        return [*stairs, points[-1]]

    def _parse(self, weights: Any, problems: list[str]) -> list[tuple[int, dict[str, float]]]:
        if weights is None:
            weights = dict.fromkeys(self.names, 1.0)
        if isinstance(weights, Mapping):
            weights = [(0, weights)]
        points: list[tuple[int, dict[str, float]]] = []
        try:
            for step, named in weights:
                points.append((int(step), {name: float(value) for name, value in dict(named).items()}))
        except (TypeError, ValueError):
            problems.append(
                f"weights = {weights!r}: expected a mapping from source to number, or pairs [step, mapping]"
            )
            return [(0, {})]
        steps = [step for step, _ in points]
        if steps[:1] != [0] or steps != sorted(set(steps)):
            problems.append(f"weights: expected rising steps that begin with 0, got {steps}")
        for step, named in points:
            unknown = [name for name in named if name not in self.names]
            problems += [f"weights at step {step}: no source {name!r}{nearest(name, self.names)}" for name in unknown]
            if not unknown:
                try:
                    quantise(named, self.names)
                except UserError as error:
                    problems.append(f"weights at step {step}: {error}")
        return points

    def _limits(self, limits: Any, problems: list[str]) -> dict[str, float]:
        if limits is None:
            return {}
        if not isinstance(limits, Mapping):
            limits = dict.fromkeys(self.names, limits)
        for name, value in limits.items():
            if name not in self.names:
                problems.append(f"max_epochs: no source {name!r}{nearest(name, self.names)}")
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                problems.append(f"max_epochs of {name!r} = {value!r}: expected a number above 0")
        return {name: float(value) for name, value in limits.items()} if not problems else {}
