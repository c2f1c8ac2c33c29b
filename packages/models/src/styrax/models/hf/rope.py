"""Rotary positions as config.json spells them: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from styrax.core import UserError
from styrax.models.rope_config import Llama3, LongRope, Rope, Yarn

_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_ALSO = {"su": "longrope", "none": "default", None: "default"}


def read_rope(table: Mapping[str, Any], theta: float, layer: str | None = None, fraction: float = 1.0) -> Rope:
    """Read rotary positions, in the spelling of transformers 5 or the older one.

    Args:
        table: All of config.json.
        theta: Base, where it is not said.
        layer: The type of layer whose positions are wanted, where there are several.
        fraction: Part of a head that is rotated, where it is not said.

    Raises:
        UserError: The kind is unknown, or values do not fit together.

    Example:
        >>> read_rope({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4).factor
        2.0
        >>> read_rope({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e4).theta
        1000000.0
    """
    given = dict(table.get("rope_parameters") or {})
    if layer is not None and isinstance(given.get(layer), Mapping):
        given = dict(given[layer])
    scaling = dict(given or table.get("rope_scaling") or {})
    name = scaling.get("rope_type", scaling.get("type"))
    kind = _ALSO.get(name, name)
    if kind not in _KINDS:
        raise UserError(f"rope_type {name!r} in config.json is not known; known are {', '.join(_KINDS)}")
    longest = table.get("max_position_embeddings")
    fields: dict[str, Any] = {
        "kind": kind,
        "theta": float(scaling.get("rope_theta") or table.get("rope_theta") or theta),
        "fraction": float(scaling.get("partial_rotary_factor") or table.get("partial_rotary_factor") or fraction),
    }
    original = table.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    if kind == "dynamic":
        fields["original_max_len"] = longest
    elif kind in ("llama3", "yarn", "longrope"):
        fields["original_max_len"] = original or longest
    if kind not in ("default",):
        factor = scaling.get("factor")
        if factor is None and kind in ("yarn", "longrope") and longest:
            factor = longest / fields["original_max_len"]
        fields["factor"] = factor if factor is None else float(factor)
    if kind in ("yarn", "longrope"):
        fields["attention_factor"] = scaling.get("attention_factor")
    if kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
        said = {each: scaling[each] for each in names if scaling.get(each) not in (None, 0)}
        fields["yarn"] = Yarn(**{"truncate": scaling.get("truncate", True)} | said)
    elif kind == "llama3":
        names = ("low_freq_factor", "high_freq_factor")
        fields["llama3"] = Llama3(**{each: float(scaling[each]) for each in names if each in scaling})
    elif kind == "longrope":
        short, long = (tuple(map(float, scaling[f"{each}_factor"])) for each in ("short", "long"))
        fields["longrope"] = LongRope(short_factor=short, long_factor=long)
    try:
        return Rope(**fields)
    except ValueError as error:
        raise UserError(f"the rotary positions in config.json do not fit together:\n{error}") from error


def write_rope(rope: Rope) -> dict[str, Any]:
    """Write what `read_rope` reads, as `rope_parameters`.

    Args:
        rope: Of the model or of one type of layer.

    Example:
        >>> write_rope(Rope(theta=1e6))
        {'rope_type': 'default', 'rope_theta': 1000000.0}
    """
    written: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.fraction != 1:
        written["partial_rotary_factor"] = rope.fraction
    if rope.factor is not None:
        written["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        written["original_max_position_embeddings"] = rope.original_max_len
    if rope.attention_factor is not None:
        written["attention_factor"] = rope.attention_factor
    if rope.yarn is not None:
        names = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim")
        written |= {each: value for each in names if (value := getattr(rope.yarn, each)) is not None}
    if rope.llama3 is not None:
        written |= {each: getattr(rope.llama3, each) for each in ("low_freq_factor", "high_freq_factor")}
    if rope.longrope is not None:
        written |= {f"{each}_factor": list(getattr(rope.longrope, f"{each}_factor")) for each in ("short", "long")}
    return written


def both_spellings(rope: Rope) -> dict[str, Any]:
    """Write `rope_parameters`, and the keys that readers before transformers 5 know.

    Args:
        rope: Of the whole model.

    Example:
        >>> sorted(both_spellings(Rope(kind="linear", factor=2.0)))
        ['rope_parameters', 'rope_scaling', 'rope_theta']
    """
    written = write_rope(rope)
    scaling = {name: value for name, value in written.items() if name not in ("rope_theta", "partial_rotary_factor")}
    found: dict[str, Any] = {"rope_parameters": written, "rope_theta": rope.theta}
    found["rope_scaling"] = None if rope.kind == "default" else {**scaling, "type": rope.kind}
    return found | ({} if rope.fraction == 1 else {"partial_rotary_factor": rope.fraction})
