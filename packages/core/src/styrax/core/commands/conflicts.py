"""Which installed versions do not fit each other, by what each distribution declares."""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires, version

_UPSTREAM = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "msgspec",
    "chex",
    "libtpu",
)
_ACCELERATORS = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


def installed() -> dict[str, str]:
    """Give the versions of the styrax distributions, then of what they build on."""
    found = {}
    for distribution in distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name == "styrax" or name.startswith("styrax-") or _ACCELERATORS.fullmatch(name):
            found.setdefault(name, distribution.version)
    for name in _UPSTREAM:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    ours = {name: found[name] for name in sorted(found) if name.startswith("styrax")}
    return ours | {name: found[name] for name in sorted(found) if name not in ours}


def conflicts(
    versions: Mapping[str, str] | None = None, requirements: Mapping[str, list[str]] | None = None
) -> list[str]:
    """List the declared requirements, among the installed distributions, that are not met.

    Args:
        versions: Distribution -> version; `installed()` by default.
        requirements: Distribution -> its requirement lines; from its metadata by default.

    Returns:
        One sentence each; empty when everything fits.

    Example:
        >>> conflicts({"styrax-core": "0.1", "jax": "0.9.1"}, {"styrax-core": ["jax>=0.10.2"]})
        ['styrax-core 0.1 needs jax>=0.10.2, but 0.9.1 is installed: pip install "jax>=0.10.2"']
    """
    versions = installed() if versions is None else versions
    found = []
    for name, own in versions.items():
        lines = requirements.get(name, []) if requirements is not None else requires(name) or []
        for line in lines:
            found += _unmet(name, own, line, versions, whole=requirements is None)
    for name, own in versions.items():
        if _ACCELERATORS.fullmatch(name) and "jaxlib" in versions and own != versions["jaxlib"]:
            library = versions["jaxlib"]
            found.append(f"{name} {own} and jaxlib {library} differ: pip install {name}=={library}")
    return found


def satisfies(installed: str, specifiers: str) -> bool:
    """Tell whether a version is in a range, by its release numbers.

    Example:
        >>> satisfies("0.10.2", ">=0.10,<0.11"), satisfies("1.2.3", "~=1.2"), satisfies("1.0", "!=1.0.*")
        (True, True, False)
    """
    have = _release(installed)
    for operator, text in re.findall(r"(===?|!=|~=|<=|>=|<|>)\s*([^,\s]+)", specifiers):
        want = _release(text)
        size = max(len(have), len(want))
        left, right = (numbers + (0,) * (size - len(numbers)) for numbers in (have, want))
        prefix = have[: len(want)] == want
        equal = prefix if text.endswith(".*") else left == right
        met = {
            "==": equal,
            "===": installed == text,
            "!=": not equal,
            "~=": left >= right and have[: len(want) - 1] == want[:-1],
            "<=": left <= right,
            ">=": left >= right,
            "<": left < right,
            ">": left > right,
        }[operator]
        if not met:
            return False
    return True


def _unmet(name: str, own: str, line: str, versions: Mapping[str, str], whole: bool) -> list[str]:
    requirement, _, marker = line.partition(";")
    match = re.match(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)\)?", requirement)
    if match is None or not _applies(marker):
        return []
    wanted = re.sub(r"[-_.]+", "-", match[1]).lower()
    limits = match[2].strip()
    have = versions.get(wanted)
    if have is None:
        try:
            have = version(wanted) if whole else None
        except PackageNotFoundError:
            text = f'{name} {own} needs {wanted}{limits}, which is not installed: pip install "{wanted}{limits}"'
            return [text]
    if have is None or satisfies(have, limits):
        return []
    text = f"{name} {own} needs {wanted}{limits}, but {have} is installed"
    return [f'{text}: pip install "{wanted}{limits}"']


def _applies(marker: str) -> bool:
    """Tell whether a marker is sure to hold: only a range of Python versions can be told apart here."""
    if not marker.strip():
        return True
    match = re.fullmatch(r"\s*python_version\s*([<>=!~]+)\s*['\"]([\d.]+)['\"]\s*", marker)
    running = ".".join(map(str, sys.version_info[:2]))
    return match is not None and satisfies(running, f"{match[1]}{match[2]}")


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", text)
    return tuple(int(number) for number in match[1].split(".")) if match else ()
