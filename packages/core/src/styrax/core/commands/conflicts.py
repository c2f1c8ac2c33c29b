"""Which installed versions do not fit each other, by what each distribution declares."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distributions, requires, version

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

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
        name = canonicalize_name(distribution.metadata["Name"] or "")
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


def _unmet(name: str, own: str, line: str, versions: Mapping[str, str], whole: bool) -> list[str]:
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return []
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return []
    wanted = canonicalize_name(requirement.name)
    limits = requirement.specifier
    text = f"{wanted}{_in_order(limits)}"
    have = versions.get(wanted)
    if have is None:
        try:
            have = version(wanted) if whole else None
        except PackageNotFoundError:
            return [f'{name} {own} needs {text}, which is not installed: pip install "{text}"']
    try:
        if have is None or limits.contains(Version(have), prereleases=True):
            return []
    except InvalidVersion:
        return []
    return [f'{name} {own} needs {text}, but {have} is installed: pip install "{text}"']


def _in_order(limits: SpecifierSet) -> str:
    """Write a range, lower bounds first."""
    return ",".join(sorted(map(str, limits), key=lambda limit: (not limit.startswith(">"), limit)))
