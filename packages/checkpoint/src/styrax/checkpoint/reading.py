"""Reading from a folder of checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from styrax.checkpoint import plan, processes, restore
from styrax.checkpoint.config import CheckpointConfig
from styrax.checkpoint.errors import CheckpointError, Damaged
from styrax.checkpoint.manifest import FILE, Manifest, leaf_name, list_incomplete, list_steps, read_manifest, step_name
from styrax.checkpoint.policy import Cast, Policy
from styrax.checkpoint.verify import Stamp, verify

_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `Store.resume` found.

    Attributes:
        step: The step of the checkpoint.
        items: Item -> value; modules and iterators are those that were handed over.
        metrics: What was saved with it.
        passed_over: Newer steps that are damaged -> how.
        kept: Leaves that were not in it, and are as they were handed over, or as `on_missing` made them.
        left: Leaves that are in it and were not asked for.
    """

    step: int
    items: Mapping[str, Any]
    metrics: Mapping[str, float]
    passed_over: Mapping[int, list[str]] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.items[name]


class Reader:
    """What can be done with a folder of checkpoints without changing it, while another process saves there.

    Several processes on one folder make the same calls in the same order, and find the same or fail together.

    Args:
        directory: The folder.
        config: How to verify; the defaults if not given.

    Attributes:
        directory: The folder.
        skipped: Steps that `latest` or `resume` passed over, and why.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig | None = None) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self.skipped: dict[int, list[str]] = {}
        self._config = config or CheckpointConfig()
        self._trusted: dict[Path, Stamp] = {}

    def wait(self) -> None:
        """Return when nothing is being written."""

    def talk(self) -> processes.Channel | None:
        """Give the conversation with the other processes; `None` if they can only ask over the devices."""
        return None

    def restore(
        self,
        step: int,
        like: Mapping[str, Any],
        *,
        only: str | Iterable[str] | None = None,
        on_missing: Any = "error",
        on_extra: Any = "error",
        cast: Cast = "exact",
    ) -> dict[str, Any]:
        """Restore items of a step, exactly as they were saved unless something else is allowed.

        Args:
            step: Which checkpoint.
            like: Item -> what to restore it as. `None` gives the item as it was saved, with numpy arrays, and
                other nodes than dictionaries, lists and tuples as dictionaries of their fields. Otherwise a
                tree with the same paths: `jax.ShapeDtypeStruct` or a `jax.Array` for a `jax.Array` with that
                sharding (default device if it has none), a numpy array or scalar for such a one, a Python
                scalar for a Python scalar; an `nnx` module for another one like it; an iterator, which is put
                where it was. The leaves' values are not looked at.
            only: Patterns over `item/path` (see `styrax.core.tree.match`); a leaf that fits none of them is not read:
                it keeps its value in `like`, or is left out where that is `None`.
            on_missing: What to do with a leaf that is not in the checkpoint: `error`, `keep` its value in `like`, or
                a function that makes one of path and leaf; or pattern -> one of these.
            on_extra: What to do with a leaf that is in the checkpoint and not in `like`: `error` or `drop` it; or
                pattern -> one of these.
            cast: `exact`: dtypes must be equal; `widen`: any that keeps every value; `any`: values are rounded.

        Returns:
            The items in `like`, with the containers of `like`.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or it differs from `like` in an item,
                path, shape, dtype or kind where that is not allowed; all differences are listed.
        """
        self.wait()
        options = {"only": only, "on_missing": on_missing, "on_extra": on_extra, "cast": cast}
        found, _ = self._fetch(step, like, options)
        return restore.settle(found, like, in_place=False)

    def resume(
        self,
        items: Mapping[str, Any] | None = None,
        /,
        *,
        only: str | Iterable[str] | None = None,
        on_missing: Any = "error",
        on_extra: Any = "error",
        cast: Cast = "exact",
        **named: Any,
    ) -> Resumed | None:
        """Go on from the newest checkpoint that verifies, with everything that the run is.

        `store.resume(model=model, optimizer=optimizer, data=iterator, rng=key)` changes modules and iterators in
        place, when all has been read and fits; other items come back in `items`, those that are plain JSON also
        unasked.

        Args:
            items: Item -> what to restore it as, see `restore`; or by name.
            only: See `restore`.
            on_missing: See `restore`.
            on_extra: See `restore`; an item in the checkpoint that is not asked for is such a leaf, too, so that
                nothing is forgotten.
            cast: See `restore`.
            named: More items.

        Returns:
            What was found, or `None` when there is no checkpoint.

        Raises:
            CheckpointError: See `restore` and `latest`.
        """
        like = {**(items or {}), **named}
        self.wait()
        passed: dict[int, list[str]] = {}
        options = {"only": only, "on_missing": on_missing, "on_extra": on_extra, "cast": cast}
        while True:
            step = self._newest_after(passed)
            if step is None:
                return None
            try:
                asked = {**self._unasked(step, like, options), **like}
                found, planned = self._fetch(step, asked, options)
            except Damaged as error:
                self._pass_over(step, [str(error)], error, passed)
                continue
            settled = restore.settle(found, asked, in_place=True)
            return Resumed(
                step=step,
                items=settled,
                metrics=planned.manifest.metrics,
                passed_over=passed,
                kept=planned.kept,
                left=(*planned.left, *_dropped(planned.manifest, asked)),
            )

    def steps(self) -> list[int]:
        """List the complete checkpoints on disk, in order."""
        return list_steps(self.directory)

    def latest(self, *, verified: bool = True) -> int | None:
        """Give the newest step that can be resumed from.

        Args:
            verified: Verify all files of it, and when they are damaged, go to the next older step with a
                warning and an entry in `skipped` (or raise, with `on_corrupt="error"`). If false, give the
                newest one unread.

        Returns:
            The step, or `None` when there is none.

        Raises:
            CheckpointError: A checkpoint is damaged, with `on_corrupt="error"`; or there are only damaged ones.
        """
        if not verified:
            return self._shared(max(self.steps(), default=None))
        passed: dict[int, list[str]] = {}
        while True:
            step = self._newest_after(passed)
            if step is None:
                return None
            problems = self._verified(step)
            if not problems:
                return step
            self._pass_over(step, problems, self._damaged(step, problems), passed)

    def verify(self, step: int) -> list[str]:
        """Compare every file of a step with its manifest by size and digest.

        Returns:
            One text for each damaged file, with the leaf or item that it holds; empty if all is well.
        """
        self._listed(step)
        return verify(self.directory / step_name(step))

    def manifest(self, step: int) -> Manifest:
        """Read what a step holds: items, leaves, shapes, dtypes, digests, files."""
        self._listed(step)
        try:
            return read_manifest(self.directory / step_name(step))
        except CheckpointError as error:
            raise self._damaged(step, [str(error)]) from error

    def _fetch(self, step: int, like: Mapping[str, Any], options: dict[str, Any]) -> tuple[dict[str, Any], plan.Plan]:
        """Read what is wanted of a step, on all processes or on none."""
        before = self._identity(step)
        for _ in range(_ATTEMPTS):
            error, result = None, None
            try:
                planned = plan.plan(self.manifest(step), like, self.directory, **options)
                result = self._read(step, planned), planned
            except Exception as raised:  # a function of `on_missing` may raise anything, and the others must hear of it
                error = raised
            after = self._identity(step)
            if before == after:
                self._agree(error)
                assert result is not None
                return result
            before = after  # its writer put a new one in its place meanwhile: what was read may be a mix
        error = CheckpointError(f"step {step} in {self.directory} is being replaced all the time; try again")
        self._agree(error)
        raise error

    def _read(self, step: int, planned: plan.Plan) -> dict[str, Any]:
        checkpoint, mode = self.directory / step_name(step), self._config.verify
        by_digest = mode != "size"
        # Arrays that can be compared when they are read need no second look at their files.
        sizes = mode == "size" or restore.digests_suffice(planned)
        problems = verify(
            checkpoint,
            mode="size" if sizes else "checksum",
            items=planned.like,
            trusted=self._trusted,
            documents=True,
            manifest=planned.manifest,
        )
        if problems:
            raise self._damaged(step, problems)
        index, count = processes.place()
        try:
            return restore.read(
                checkpoint, planned, timeout=self._config.timeout, verify=by_digest, index=index, count=count
            )
        except Damaged as error:
            raise self._damaged(step, verify(checkpoint) or [str(error)]) from error
        except CheckpointError:
            raise
        except Exception as error:  # what Orbax and TensorStore say to damaged files is of many kinds
            problems = verify(checkpoint)
            if not problems:  # no damage then, and no reason to take an older one
                raise CheckpointError(
                    f"step {step} in {self.directory} cannot be read, though its files are what was saved: "
                    f"{type(error).__name__}: {error}"
                ) from error
            raise self._damaged(step, problems) from error

    def _identity(self, step: int) -> tuple[int, int] | None:
        try:
            stat = (self.directory / step_name(step) / FILE).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns

    def _unasked(self, step: int, like: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Give the items that a resume returns without being asked: plain JSON.

        Raises:
            CheckpointError: There are others that `on_extra` does not drop.
        """
        items = self.manifest(step).items
        others = [name for name in items if name not in like]
        drop = Policy(options["on_extra"], "on_extra", ("drop",))
        lost = [name for name in others if items[name].kind != "json" and drop(name) == "error"]
        if lost:
            raise CheckpointError(
                f"step {step} in {self.directory} has items that were not asked for: {', '.join(map(repr, lost))}; "
                "resume with them, or drop them by on_extra={'NAME': 'drop'}"
            )
        return {name: None for name in others if items[name].kind == "json"}

    def _newest_after(self, passed: Mapping[int, Any]) -> int | None:
        """Give the newest step that was not passed over, whole or not.

        Raises:
            CheckpointError: All were.
        """
        # Without its manifest a checkpoint is damaged too: starting over without a word would replace it.
        steps = [*self.steps(), *list_incomplete(self.directory)]
        step = self._shared(max((step for step in steps if step not in passed), default=None))
        if step is None and passed:
            raise CheckpointError(
                f"all {len(passed)} checkpoints in {self.directory} are damaged, so there is none to resume from; "
                "`styrax checkpoint verify` says how. Restore the folder from a copy, or start in another one"
            )
        return step

    def _verified(self, step: int) -> list[str]:
        """Verify a step, the work shared by all processes; gives what all of them found."""
        checkpoint = self.directory / step_name(step)
        mode: Literal["size", "checksum"] = "size" if self._config.verify == "size" else "checksum"
        talk = self.talk()
        if talk is None:
            return verify(checkpoint, mode=mode, trusted=self._trusted)
        mine = verify(checkpoint, mode=mode, trusted=self._trusted, part=(talk.index, talk.count))
        return sorted({text for found in talk.gather("\0".join(mine)) for text in found.split("\0") if text})

    def _pass_over(self, step: int, problems: list[str], error: CheckpointError, passed: dict[int, list[str]]) -> None:
        if self._config.on_corrupt == "error":
            raise error
        passed[step] = problems
        if self.skipped.get(step) != problems:
            self.skipped[step] = problems
            warnings.warn(f"{error}; taking the next older one", stacklevel=4)

    def _agree(self, error: Exception | None) -> None:
        talk = self.talk()
        if talk is None:
            processes.agree(error)
        else:
            talk.agree(error)

    def _shared(self, step: int | None) -> int | None:
        """Give what process 0 says."""
        talk, given = self.talk(), -1 if step is None else step
        found = processes.share(given) if talk is None else int(talk.share(str(given)))
        return None if found < 0 else found

    def _damaged(self, step: int, problems: list[str]) -> Damaged:
        head = f"the checkpoint of step {step} in {self.directory} is damaged:"
        return Damaged("\n  ".join([head, *problems]))

    def _listed(self, step: int) -> None:
        steps = self.steps()
        if step not in [*steps, *list_incomplete(self.directory)]:
            there = f"there are {', '.join(map(str, steps))}" if steps else "there are none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}: {there}")


def _dropped(manifest: Manifest, asked: Mapping[str, Any]) -> list[str]:
    """List the leaves of the items that were not asked for; an iterator is one."""
    return [
        path
        for name, item in manifest.items.items()
        if name not in asked
        for path in ([leaf_name(name, leaf.path) for leaf in item.leaves] or [name])
    ]
