"""Metrics for Weights & Biases; offline unless the user has set it up."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from styrax.core import UserError

INSTALL = "wandb is not installed: pip install 'styrax-train[wandb]'"


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """Metrics for Weights & Biases, in the folder ``wandb`` of the run, to be sent by ``wandb sync``.

    They are sent at once if ``WANDB_MODE`` says so, or if it is not set and ``WANDB_API_KEY`` is. Project and entity
    are those of wandb's own variables, ``WANDB_PROJECT`` and ``WANDB_ENTITY``.
    """

    @staticmethod
    def missing() -> str | None:
        """What to install, if anything."""
        return None if importlib.util.find_spec("wandb") else INSTALL

    def build(self, directory: str | os.PathLike[str]) -> Wandb:
        """Write in ``directory``."""
        return Wandb(directory)


class Wandb:
    """A tracker that hands each step to wandb.

    All starts of a run have one id, kept in ``wandb.json`` of its folder. wandb takes no step back: when a run resumes
    before its last logged step, the lines up to there stay as they are, and those of the steps that are done again are
    dropped here. They are equal to the ones that are kept, unless the run was rolled back from a spike;
    then metrics.jsonl has the true ones.

    Args:
        directory: Folder of the run.
        module: What stands for wandb; None imports it.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(self, directory: str | os.PathLike[str], *, module: Any = None) -> None:
        if module is None:
            try:
                import wandb as module  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                raise UserError(f"{INSTALL} ({error})") from error
        self._module, self._directory = module, Path(directory)
        self._note = self._directory / "wandb.json"
        self._run: Any = None
        self._config: Mapping[str, Any] = {}
        self._logged, self._id = self._read()

    def configure(self, config: Mapping[str, Any]) -> None:
        """Keep the run's configuration with it."""
        self._config = config

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Hand over a step, unless it was handed over before."""
        if step <= self._logged:
            return
        if self._run is None:
            self._run = self._start()
        self._run.log(dict(metrics), step=step)
        self._logged = step

    def flush(self) -> None:
        """Note how far the record goes; wandb itself writes in a process of its own."""
        if self._run is not None:
            self._keep()

    def truncate(self, step: int) -> None:
        """Say so if wandb has later steps: it cannot forget them."""
        if self._logged > step:
            warnings.warn(
                f"wandb keeps the lines of steps {step + 1} to {self._logged}, which the run does again; see "
                "metrics.jsonl for those that count",
                stacklevel=2,
            )

    def close(self) -> None:
        """Finish the start; closing twice is allowed."""
        if self._run is not None:
            self._keep()
            self._run.finish()
            self._run = None

    def _start(self) -> Any:
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        return self._module.init(
            dir=str(self._directory),
            id=self._id,
            name=self._directory.absolute().name,
            project=os.environ.get("WANDB_PROJECT") or "styrax",
            config=dict(self._config),
            mode=mode,
            resume=None if mode == "offline" else "allow",
        )

    def _read(self) -> tuple[int, str]:
        try:
            note = json.loads(self._note.read_text(encoding="utf-8"))
            return int(note["step"]), str(note["id"])
        except (OSError, ValueError, KeyError, TypeError):
            seed = os.urandom(16)
            return 0, hashlib.sha256(seed).hexdigest()[:8]

    def _keep(self) -> None:
        partial = self._note.with_name(f".{self._note.name}.partial")
        partial.write_text(json.dumps({"id": self._id, "step": self._logged}), encoding="utf-8")
        partial.replace(self._note)
