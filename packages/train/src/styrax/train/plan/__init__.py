"""What a run needs, said before anything is allocated and without the hardware."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.train.plan.chips import CHIPS, Chip, chip_of, peak_flops
    from styrax.train.plan.make import plan, plan_step
    from styrax.train.plan.result import Plan
    from styrax.train.plan.topology import Topology

__all__ = ["CHIPS", "Chip", "Plan", "Topology", "chip_of", "peak_flops", "plan", "plan_step"]
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CHIPS": "chips",
        "Chip": "chips",
        "Plan": "result",
        "Topology": "topology",
        "chip_of": "chips",
        "peak_flops": "chips",
        "plan": "make",
        "plan_step": "make",
    },
)
