"""Conformance suites: run one against your own part to know that it can take a styrax part's place."""

from typing import TYPE_CHECKING

from styrax.core.lazy import lazy_exports

if TYPE_CHECKING:
    from styrax.core.testing.checkpointer import Outcome, check_checkpointer, outcome_table, report_checkpointer
    from styrax.core.testing.decoder import check_decoder
    from styrax.core.testing.iterator import check_iterator
    from styrax.core.testing.optimizer import check_optimizer

__all__ = [
    "Outcome",
    "check_checkpointer",
    "check_decoder",
    "check_iterator",
    "check_optimizer",
    "outcome_table",
    "report_checkpointer",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Outcome": "checkpointer",
        "check_checkpointer": "checkpointer",
        "check_decoder": "decoder",
        "check_iterator": "iterator",
        "check_optimizer": "optimizer",
        "outcome_table": "checkpointer",
        "report_checkpointer": "checkpointer",
    },
)
