"""A pure training step, a short readable loop around it, and the commands that compose the libraries."""

from typing import TYPE_CHECKING

from styrax.core import lazy_exports

if TYPE_CHECKING:
    from styrax.train.config import SCHEMA, Spike, TrainConfig
    from styrax.train.evaluate import HeldOut, evaluator
    from styrax.train.goodput import Goodput
    from styrax.train.hooks import Hook, StopFile
    from styrax.train.loop import FitResult, fit
    from styrax.train.loss import Term, next_token_loss
    from styrax.train.rundir import RunDir
    from styrax.train.step import TrainState, init_state, make_step
    from styrax.train.watch import Watch
    from styrax.train.watchdog import Watchdog

__all__ = [
    "SCHEMA",
    "FitResult",
    "Goodput",
    "HeldOut",
    "Hook",
    "RunDir",
    "Spike",
    "StopFile",
    "Term",
    "TrainConfig",
    "TrainState",
    "Watch",
    "Watchdog",
    "evaluator",
    "fit",
    "init_state",
    "make_step",
    "next_token_loss",
]
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "SCHEMA": "config",
        "FitResult": "loop",
        "Goodput": "goodput",
        "HeldOut": "evaluate",
        "Hook": "hooks",
        "RunDir": "rundir",
        "Spike": "config",
        "StopFile": "hooks",
        "Term": "loss",
        "TrainConfig": "config",
        "TrainState": "step",
        "Watch": "watch",
        "Watchdog": "watchdog",
        "evaluator": "evaluate",
        "fit": "loop",
        "init_state": "step",
        "make_step": "step",
        "next_token_loss": "loss",
    },
)
