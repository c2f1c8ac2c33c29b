"""What a plan says, and its JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from styrax.train.plan.collectives import Collective
from styrax.train.plan.estimate import Journey, Roofline
from styrax.train.plan.predict import Predicted
from styrax.train.plan.program import Compiled
from styrax.train.plan.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run needs. All bytes and arithmetic are of one device; None is what is not known.

    Attributes:
        topology: The devices.
        device_kind: What JAX calls them.
        mesh: Mesh axis -> devices along it.
        dcn: Mesh axis -> ways of it across slices.
        rows: Rows of a batch.
        tokens: Tokens of a batch.
        accumulate: Micro-batches a step.
        parameters: Numbers in all parameters of the whole model.
        flops_per_token: Of a training step of the model, without recomputation.
        predicted: Without compiling.
        compiled: What the compiler says; None if it was not asked, or failed.
        failure: Why it failed: mostly that the program does not fit.
        collectives: What devices exchange; None if it was not compiled.
        roofline: The least time of a step.
        run: Days and cost; None if no number of tokens was given.
        hbm_bytes: Memory of a device.
        fits: Whether what is needed goes into it.
        advice: What to change if it does not.
        notes: What was assumed.
    """

    topology: Topology
    device_kind: str
    mesh: Mapping[str, int]
    dcn: Mapping[str, int]
    rows: int
    tokens: int
    accumulate: int
    parameters: int
    flops_per_token: float | None
    predicted: Predicted
    compiled: Compiled | None
    failure: str | None
    collectives: tuple[Collective, ...] | None
    roofline: Roofline
    run: Journey | None
    hbm_bytes: int | None
    fits: bool | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int | None:
        """What a device needs: as the compiler says, or else as predicted."""
        said = None if self.compiled is None else self.compiled.total_bytes
        return self.predicted.total_bytes if said is None else said

    def to_dict(self) -> dict[str, Any]:
        """Give all of it as JSON values."""
        predicted = {
            **{name: getattr(self.predicted, name) for name in _COMPARED},
            "total_bytes": self.predicted.total_bytes,
            "bytes": self.predicted.groups,
        }
        compiled = None
        if self.compiled is not None:
            compiled = {
                **{name: getattr(self.compiled, name) for name in _COMPARED},
                "alias_bytes": self.compiled.alias_bytes,
                "code_bytes": self.compiled.code_bytes,
                "total_bytes": self.compiled.total_bytes,
                "compile_seconds": round(self.compiled.compile_seconds, 3),
            }
        exchanged = None if self.collectives is None else [dataclasses.asdict(each) for each in self.collectives]
        return {
            "topology": str(self.topology),
            "slices": self.topology.slices,
            "chips": self.topology.chips,
            "devices": self.topology.devices,
            "device_kind": self.device_kind,
            "mesh": dict(self.mesh),
            "dcn": dict(self.dcn),
            "rows": self.rows,
            "tokens": self.tokens,
            "accumulate": self.accumulate,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "hbm_bytes": self.hbm_bytes,
            "fits": self.fits,
            "predicted": predicted,
            "compiled": compiled,
            "failure": self.failure,
            "collectives": exchanged,
            "roofline": {
                **dataclasses.asdict(self.roofline),
                "seconds": self.roofline.seconds,
                "bound": self.roofline.bound,
            },
            "run": None if self.run is None else dataclasses.asdict(self.run),
            "advice": list(self.advice),
            "notes": list(self.notes),
        }


_COMPARED = ("argument_bytes", "output_bytes", "temp_bytes", "flops", "bytes_accessed", "seconds")
