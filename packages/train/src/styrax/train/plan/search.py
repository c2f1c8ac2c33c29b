"""Meshes, recomputation and batches, tried by prediction and ranked; the best is then compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from styrax.core import UserError
from styrax.core.config import Resolved
from styrax.core.mesh import MeshConfig
from styrax.train.config import rows_misfit
from styrax.train.plan.make import assess, case_of, plan
from styrax.train.plan.program import Program
from styrax.train.plan.topology import Topology
from styrax.train.shardings import batch_shards


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run, and what was predicted of it.

    Attributes:
        axes: Mesh axis -> devices along it.
        remat: What the model recomputes; None if it has no such setting.
        rows: Rows of a batch.
        tokens: Tokens of a batch.
        total_bytes: What a device needs.
        seconds: The least time of a step; None for devices whose peak is not known.
        fits: Whether it goes into a device's memory; None if that is not known.
        overrides: What to write after ``styrax train NAME``.
        compiled: Whether the numbers are the compiler's.
    """

    axes: Mapping[str, int]
    remat: str | None
    rows: int
    tokens: int
    total_bytes: int | None
    seconds: float | None
    fits: bool | None
    overrides: tuple[str, ...]
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Found:
    """A ranking.

    Attributes:
        topology: The devices.
        ranking: Those that fit first, by the least time of a token, then those of the batch asked for, then by bytes.
        notes: What was left out, and why.
    """

    topology: str
    ranking: tuple[Candidate, ...]
    notes: tuple[str, ...]

    @property
    def best(self) -> Candidate | None:
        """The first, unless it does not fit."""
        first = self.ranking[0] if self.ranking else None
        return None if first is None or first.fits is False else first

    def to_dict(self) -> dict[str, Any]:
        """Give it as JSON values."""
        return {
            "topology": self.topology,
            "ranking": [dataclasses.asdict(each) for each in self.ranking],
            "best": None if self.best is None else list(self.best.overrides),
            "notes": list(self.notes),
        }


MOST_TENSOR = 8
"""More ways of tensor parallelism are not tried: the exchanges within each block then take longest."""


def search(
    resolved: Resolved,
    *,
    topology: Topology,
    vocab_size: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    compile: bool = True,
    progress: Callable[[str], None] = lambda text: None,
    most: int = 12,
) -> Found:
    """Predict every sensible way, and compile the best.

    Args:
        resolved: Of which model, data and the rest are taken.
        topology: The devices.
        vocab_size: For data that cannot tell it.
        tokens: Not used in a ranking.
        price: Likewise.
        compile: Compile the best, and the next best while the compiler finds that it does not fit.
        progress: Told what is being done.
        most: Length of the ranking.
    """
    found: list[Candidate] = []
    refused: list[str] = []
    meshes = list(_meshes(resolved["mesh"], topology.devices, topology.slices))
    progress(f"predicting {len(meshes)} meshes")
    for axes in meshes:
        try:
            found += _on_mesh(resolved, axes, topology, vocab_size)
        except (UserError, ValueError) as error:
            refused.append(str(error).splitlines()[-1].strip())
    if not found:
        raise UserError("no way to run was found: " + "; ".join(dict.fromkeys(refused)))
    size = getattr(resolved["data"], "batch_size", None)
    rows = size if isinstance(size, int) else None
    ranking = sorted(found, key=lambda each: _order(each, rows))[:most]
    notes = [f"{len(refused)} of {len(meshes)} meshes do not divide, such as: {refused[0]}"] if refused else []
    if all(each.seconds is None for each in found):
        notes.append(f"the peak of {topology.kind} is not known, so the ranking is by bytes")
    for place in range(min(3, len(ranking)) if compile and ranking[0].fits is not False else 0):
        each = ranking[place]
        made = plan(_changed(resolved, each), topology=topology, vocab_size=vocab_size, progress=progress)
        ranking[place] = dataclasses.replace(
            each, total_bytes=made.total_bytes, seconds=made.roofline.seconds, fits=made.fits, compiled=True
        )
        if made.fits is not False:
            break
    ranking.sort(key=lambda each: (each.fits is False, not each.compiled and compile, _order(each, rows)))
    return Found(topology=str(topology), ranking=tuple(ranking), notes=tuple(notes))


def _on_mesh(resolved: Resolved, axes: dict[str, int], topology: Topology, vocab_size: int | None) -> list[Candidate]:
    """Predict all ways to run on one mesh, tracing the step once."""
    sections, dcn = dict(resolved.sections), {"data": topology.slices} if topology.slices > 1 else {}
    sections["mesh"] = MeshConfig(axes=axes, dcn=dcn)
    size = getattr(resolved["data"], "batch_size", None)
    rows = sorted({size * times // 4 for times in (2, 4, 8)} - {0}) if isinstance(size, int) else [None]
    shards = batch_shards(MeshConfig(axes=axes).abstract(topology.devices))
    accumulate = resolved["train"].accumulate
    rows = [each for each in rows if each is None or rows_misfit(each, accumulate, shards) is None]
    if not rows:
        raise UserError(f"a batch of {size} rows does not divide over {shards} devices")
    if rows[0] is not None:
        sections["data"] = dataclasses.replace(sections["data"], batch_size=rows[0])
    case = case_of(dataclasses.replace(resolved, sections=sections), topology, vocab_size=vocab_size, compile=False)
    found = []
    for batch in rows:
        sized = case if batch is None else dataclasses.replace(case, program=_of_rows(case.program, batch))
        for remat in ("none", "dots", "block") if hasattr(resolved["model"], "remat") else (None,):
            made = assess(sized, remat=remat)
            overrides = [f"mesh.axes={_inline(axes)}", *([f"mesh.dcn={_inline(dcn)}"] if dcn else [])]
            overrides += [] if remat is None else [f"model.remat={remat}"]
            overrides += [] if batch is None else [f"data.batch_size={batch}"]
            found.append(
                Candidate(
                    axes=made.mesh,
                    remat=remat,
                    rows=made.rows,
                    tokens=made.tokens,
                    total_bytes=made.total_bytes,
                    seconds=made.roofline.seconds,
                    fits=made.fits,
                    overrides=tuple(overrides),
                )
            )
    return found


def _of_rows(program: Program, rows: int) -> Program:
    """The program with a batch of so many rows, to predict with."""
    import jax

    batch = {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=leaf.sharding)
        for name, leaf in program.batch.items()
    }
    return dataclasses.replace(program, batch=batch)


def _changed(resolved: Resolved, each: Candidate) -> Resolved:
    """The configuration of a candidate."""
    return resolved.schema.resolve(resolved.to_dict(), each.overrides)


def _order(each: Candidate, rows: int | None) -> tuple[Any, ...]:
    """By time of a token, of which three digits count; then the batch that was asked for, then bytes."""
    rate = float("inf") if each.seconds is None else float(f"{each.seconds / each.tokens:.3g}")
    size = float("inf") if each.total_bytes is None else each.total_bytes
    return (each.fits is False, rate, rows is not None and each.rows != rows, size, each.overrides)


def _meshes(config: MeshConfig, devices: int, slices: int) -> Iterator[dict[str, int]]:
    """Give ways to arrange the devices of each slice; an expert axis stays as it is.

    >>> list(_meshes(MeshConfig(), 2, 1)), list(_meshes(MeshConfig(), 2, 2))
    ([{'data': 2}, {'fsdp': 2}, {'tensor': 2}], [{'data': 2}])
    """
    experts = config.axes.get("expert", 1)
    outer = slices if slices > 1 else 1
    each = devices // outer // experts if experts > 0 else 0
    for tensor in (n for n in (1, 2, 4, 8) if n <= MOST_TENSOR and each % n == 0):
        rest = each // tensor
        for fsdp in sorted({1, rest, *(n for n in (2, 4, 8, 16, 32, 64) if rest % n == 0)}):
            axes = {"data": outer * (rest // fsdp), "fsdp": fsdp, "expert": experts, "tensor": tensor}
            axes = {name: size for name, size in axes.items() if size > 1}
            yield axes or {"data": 1}


def _inline(table: Mapping[str, int]) -> str:
    return "{" + ",".join(f"{name}={size}" for name, size in table.items()) + "}"
