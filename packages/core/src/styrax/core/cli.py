"""The `styrax` command: hosts the commands that installed distributions offer."""

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from styrax.core import registry
from styrax.core.errors import UsageError, UserError, nearest

GROUP = "styrax.commands"

DONE, FAILED, WRONG_USE, INTERRUPTED = 0, 1, 2, 130

#: What a user can act on, and how.
_SYSTEM_ERRORS = {
    errno.ENOSPC: "free some space or choose another folder",
    errno.EDQUOT: "free some of your quota or choose another folder",
    errno.EACCES: "check who owns it and its permissions",
    errno.EROFS: "choose a folder that can be written",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "check the path",
    errno.EISDIR: "name a file, not a folder",
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s with the nearest right word."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - its overloads are one here
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Refuse an unknown option where it is met, so that a subcommand answers for its own."""
        namespace, extra = super().parse_known_args(args, namespace)
        unknown = [item for item in extra if item.startswith("-")]
        if unknown:
            known = re.findall(r"--[\w-]+", self.format_help())
            near = nearest(unknown[0].partition("=")[0], known)
            self.error(f"no option {', '.join(unknown)}{near}")
        return namespace, extra

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and leaving."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            message += nearest(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        raise UsageError(f"{message}\n{self.format_usage().strip()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments; `sys.argv[1:]` by default.

    Returns:
        0 done, 1 failed, 2 wrong use, 130 interrupted.
    """
    try:
        return _answered(argv)
    except KeyboardInterrupt:  # one more, while the first was told
        return INTERRUPTED


def _answered(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as leaving:  # argparse, after --help
        if isinstance(leaving.code, str):
            return _say(leaving.code, FAILED)
        return leaving.code or DONE
    except KeyboardInterrupt as interrupt:
        if argv is None:  # one more, while the interpreter ends, would kill the process with another status
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _say(str(interrupt) or "interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_output()
        return FAILED
    except UserError as error:
        return _say(str(error), error.exit_code)
    except OSError as error:
        if error.errno in _SYSTEM_ERRORS:
            _drop_output()
            where = f": {error.filename}" if error.filename else ""
            return _say(f"{error.strerror}{where}; {_SYSTEM_ERRORS[error.errno]}", FAILED)
        return _bug(arguments)
    except Exception:
        return _bug(arguments)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        return DONE if arguments else WRONG_USE
    if arguments[0] in ("-V", "--version"):
        print(f"styrax {_version()}")
        return DONE
    name, *rest = arguments
    commands = registry.names(GROUP)
    if name not in commands:
        what = "option" if name.startswith("-") else "command"
        raise UsageError(
            f"no {what} {name!r}{nearest(name, [*commands, '--help', '--version'])}; "
            f"the commands are {', '.join(commands)}"
        )
    module = _load(name)
    parser = Parser(prog=f"styrax {name}", description=module.HELP)
    module.add_arguments(parser)
    return int(module.run(_parse(parser, rest)) or DONE)


def _parse(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    args, extra = parser.parse_known_args(arguments)
    # argparse takes positionals in one go, so overrides after an option are left over: they belong here.
    if hasattr(args, "overrides"):
        args.overrides = [*args.overrides, *(item for item in extra if "=" in item)]
        extra = [item for item in extra if "=" not in item]
    if extra:
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    return args


def _load(name: str) -> Any:
    module = registry.resolve(GROUP, name)
    lacking = [part for part in ("HELP", "add_arguments", "run") if not hasattr(module, part)]
    if lacking:
        where = registry.origin(registry.find(GROUP, name))
        raise UserError(f"{name!r} in {GROUP} is unavailable: {where} lacks {', '.join(lacking)}")
    return module


def _help() -> str:
    names = registry.names(GROUP)
    width = max(map(len, names), default=0)
    lines = ["usage: styrax COMMAND ...", "", "commands:"]
    for name in names:
        try:
            text = _load(name).HELP
        except UserError as error:
            text = str(error).removeprefix(f"{name!r} in {GROUP} is ")
        lines.append(f"  {name:<{width}}  {text}")
    lines += ["", "options:", "  -h, --help     this text, or a command's after its name"]
    return "\n".join([*lines, "  -V, --version  the version"])


def _version() -> str:
    with contextlib.suppress(PackageNotFoundError):
        return f"{version('styrax')} (core {version('styrax-core')})"
    with contextlib.suppress(PackageNotFoundError):
        return f"core {version('styrax-core')}"
    return "(not installed)"


def _drop_output() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        # It has no reader, or no room: point it elsewhere, or Python would complain once more at exit.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_streams() -> None:
    """Stand in for those that the shell closed (`>&-`), or the next file to be opened would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", encoding="utf-8", closefd=False))


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Show a warning as one line that is meant for a user, or with STYRAX_DEBUG as Python would."""
    text = f"warning: {' '.join(str(message).split())}\n"
    if os.environ.get("STYRAX_DEBUG"):
        text = warnings.formatwarning(message, category, filename, lineno, line)
    with contextlib.suppress(OSError):
        (file or sys.stderr).write(text)


def _say(message: str, code: int) -> int:
    if os.environ.get("STYRAX_DEBUG") and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        print(f"error: {message}".replace("\n", "\n       "), file=sys.stderr)
    return code


def _bug(arguments: list[str]) -> int:
    traceback.print_exc()
    try:
        owner = registry.origin(registry.find(GROUP, arguments[0]))
    except (UserError, IndexError):
        owner = "styrax-core"
    error = sys.exc_info()[1]
    print(
        f"error: {type(error).__name__}: {error}\n"
        f"  This is a bug in {owner}, not a mistake of yours; please report it with the text above.",
        file=sys.stderr,
    )
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
