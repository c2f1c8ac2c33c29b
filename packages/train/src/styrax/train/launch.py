"""Several processes of one command on this machine: started together, heard together, ended together."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from styrax.core import UserError, registry
from styrax.core.distributed import VARIABLES, reserved_port
from styrax.train.keeper import Keeper

GRACE = 10.0
"""Seconds that the others have to end by themselves when one has failed; they may have something to say too."""

SAVING = 60.0
"""Seconds that they have when one was interrupted, which then has saved; the others are about to end too."""

KEPT = 15
"""Last lines of a process that are shown again when it has failed."""

FORCE = "--xla_force_host_platform_device_count"


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        code: Exit status of the process that failed first, as a shell gives it; 0 if none did.
        first: Its number; None if none failed.
        lines: The last of what it wrote to stderr.
    """

    code: int
    first: int | None
    lines: list[str]


def command_line(words: Sequence[str]) -> list[str]:
    """What to run: a command of styrax by its name, or any program.

    >>> command_line(["python", "train.py"])[1:]
    ['train.py']

    Raises:
        UserError: There is no such program.
    """
    if not words:
        raise UserError("say what to start, after two dashes: styrax launch -n 2 -- train quickstart")
    if words[0] in registry.names("styrax.commands"):
        host = "import sys; from styrax.core.cli import main; sys.exit(main())"
        return [sys.executable, "-c", host, *words]
    program = shutil.which(words[0])
    if program is None:
        raise UserError(
            f"no command of styrax and no program is named {words[0]!r}; expected such as: "
            "styrax launch -n 2 -- train quickstart"
        )
    return [program, *words[1:]]


def environment(
    base: Mapping[str, str], port: int, number: int, count: int, devices: int | None = None
) -> dict[str, str]:
    """The variables of one process.

    Args:
        base: Those of this process.
        port: Of the coordinator, on this machine.
        number: Which process.
        count: How many there are.
        devices: How many devices each has: so many CPU devices, or the accelerators from ``number * devices`` on.

    >>> made = environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --a"}, 7, 1, 2, devices=3)
    >>> made["STYRAX_COORDINATOR"], made["JAX_NUM_CPU_DEVICES"], made["JAX_LOCAL_DEVICE_IDS"], made["XLA_FLAGS"]
    ('127.0.0.1:7', '3', '3,4,5', '--a')
    """
    values = {"coordinator": f"127.0.0.1:{port}", "num_processes": str(count), "process_id": str(number)}
    made = {**base, **{VARIABLES[name]: value for name, value in values.items()}, "PYTHONUNBUFFERED": "1"}
    if devices is not None:
        made["JAX_NUM_CPU_DEVICES"] = str(devices)
        made["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(number * devices + i) for i in range(devices))
        # An older way to say the same, which jax does not take together with the other one.
        flags = [flag for flag in base.get("XLA_FLAGS", "").split() if not flag.startswith(FORCE)]
        if "XLA_FLAGS" in base:
            made["XLA_FLAGS"] = " ".join(flags)
    return made


def launch(words: Sequence[str], count: int, *, devices: int | None = None, prefix: bool = True) -> Ended:
    """Start processes of a command and wait for their end.

    Each has its own process group. SIGINT and SIGTERM to this process go to all of them. When one fails the others
    have a few seconds to end too, and are then killed, with whatever they have started.

    When this process is gone, by SIGKILL too, each process group gets SIGTERM, as by a preemption: runs of styrax save
    and end. Who is still there a minute later is killed. That holds for any program, on Linux and macOS, and for what
    it has started, unless that has a session of its own; see :class:`styrax.train.keeper.Keeper`.

    Args:
        words: What follows ``--`` on the command line.
        count: How many processes.
        devices: Devices of each; None leaves that to jax, which is right with one process.
        prefix: Write the number of the process before each line.

    Raises:
        UserError: The command cannot be started.
    """
    line = command_line(words)
    with reserved_port() as port, contextlib.ExitStack() as stack:
        keeper = stack.enter_context(Keeper(SAVING))
        children: list[Child] = []
        stack.callback(lambda: [child.kill() for child in children])
        for number in range(count):
            made = environment(os.environ, port, number, count, devices)
            children.append(Child(number, line, made, keeper, prefix=prefix and count > 1))
        stack.enter_context(_forwarding(children))
        for child in children:
            child.follow()
        return _wait(children)


def _wait(children: Sequence[Child]) -> Ended:
    first: Child | None = None
    deadline = None
    while [child for child in children if child.running()]:  # each is looked at
        if first is None:
            failed = [child for child in children if child.code not in (None, 0)]
            if failed:
                first = min(failed, key=lambda child: _guilt(child.code or 0))
                deadline = time.monotonic() + (SAVING if first.code == 130 else GRACE)
        if deadline is not None and time.monotonic() > deadline:
            for child in children:
                child.kill()
            deadline = None
        time.sleep(0.05)
    for child in children:
        child.finish()
    failed = [child for child in children if child.code]
    if first is None and failed:
        first = min(failed, key=lambda child: _guilt(child.code or 0))
    if first is None:
        return Ended(0, None, [])
    return Ended(first.code or 0, first.number, list(first.last))


def _guilt(code: int) -> int:
    """Of several that have ended since the last look: who was killed is the cause, who was aborted by jax is not.

    >>> sorted([1, 134, 137], key=_guilt)
    [137, 1, 134]
    """
    return 2 if code == 128 + signal.SIGABRT else 0 if code > 128 else 1


class Child:
    """One process of the job.

    Args:
        number: Which.
        line: Program and arguments.
        variables: Its environment.
        keeper: Is told of its process group.
        prefix: Write its number before each line that it writes.

    Attributes:
        code: Exit status as a shell gives it, 128 and the signal's number if one ended it; None while it runs.
        last: The last lines that it wrote to stderr.
    """

    def __init__(
        self, number: int, line: Sequence[str], variables: Mapping[str, str], keeper: Keeper, *, prefix: bool
    ) -> None:
        self.number: int = number
        self.code: int | None = None
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT)
        self._prefix = f"[{number}] " if prefix else ""
        self._process: Any = subprocess.Popen(
            list(line), env=dict(variables), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._keeper = keeper
        keeper.watch(self._process.pid, [self._process.stdout.fileno(), self._process.stderr.fileno()])
        self._threads = [
            threading.Thread(target=self._copy, args=(self._process.stdout, sys.stdout, None), daemon=True),
            threading.Thread(target=self._copy, args=(self._process.stderr, sys.stderr, self.last), daemon=True),
        ]

    def follow(self) -> None:
        """Begin to pass on what it writes."""
        for thread in self._threads:
            thread.start()

    def running(self) -> bool:
        """Look whether it still runs."""
        if self.code is None and (code := self._process.poll()) is not None:
            self.code = 128 - code if code < 0 else code
            self._keeper.forget(self._process.pid)
        return self.code is None

    def send(self, number: int) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it, and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.running()

    def finish(self) -> None:
        """Pass on the rest of what it wrote."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout=5.0)

    def _copy(self, source: IO[str], target: IO[str], keep: collections.deque[str] | None) -> None:
        for line in source:
            text = line if line.endswith("\n") else line + "\n"
            if keep is not None:
                keep.append(text.rstrip("\n"))
            with contextlib.suppress(OSError, ValueError):  # who reads may be gone; the children go on
                target.write(self._prefix + text)
                target.flush()


@contextlib.contextmanager
def _forwarding(children: Sequence[Child]) -> Iterator[None]:
    """Pass signals on; only the main thread of a program hears any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: object) -> None:
        for child in children:
            if child.code is None:
                child.send(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def meaning(code: int) -> str:
    """An exit status in words.

    >>> meaning(137), meaning(1)
    ('was ended by SIGKILL', 'ended with status 1')
    """
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"ended with status {code}"


def template(name: str, words: Sequence[str], count: int) -> str:
    """A file for a scheduler, with the command and the number of processes filled in.

    Args:
        name: ``slurm``, ``jobset`` or ``skypilot``.
        words: The command; one of styrax's by its name, or a program.
        count: How many processes, one a machine.
    """
    import shlex
    from importlib import resources

    names = {each.name.partition(".")[0]: each for each in resources.files("styrax.train.templates").iterdir()}
    own = not words or words[0] in registry.names("styrax.commands")
    line = shlex.join((["styrax"] if own else []) + list(words or ["train", "my.toml", "--run", "/shared/runs/my"]))
    text = names[name].read_text(encoding="utf-8")
    filled = {"COMMAND": line, "PROCESSES": str(count), "COMMAND_JSON": line.replace("\\", "\\\\").replace('"', '\\"')}
    return re.sub(r"@([A-Z_]+)@", lambda found: filled[found[1]], text)
