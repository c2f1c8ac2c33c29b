"""Which tokens stand where: packing, mixing, and schedules over steps; integer arithmetic, no reading."""

from styrax.data.plan.line import Line
from styrax.data.plan.mixture import Mixture
from styrax.data.plan.segments import Batch, Pack, Plan, Segments, fill
from styrax.data.plan.timeline import Timeline

__all__ = ["Batch", "Line", "Mixture", "Pack", "Plan", "Segments", "Timeline", "fill"]
