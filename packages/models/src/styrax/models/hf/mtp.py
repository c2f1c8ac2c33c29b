"""Multi-token prediction in a Hugging Face folder: whether a family has a place for it, and whether a folder has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from styrax.core import UserError
from styrax.models.hf.plan import Source, further

if TYPE_CHECKING:
    from styrax.models.config import DecoderConfig
    from styrax.models.families.common import Family
    from styrax.models.hf.rules import Rule
    from styrax.models.hf.tensors import Tensor, Tensors

_WITHOUT = "load the model without mtp"
#: Bytes that are compared at once.
_PIECE = 2**26


def with_modules(config: DecoderConfig, modules: int) -> DecoderConfig:
    """Change how many modules predict further tokens.

    Args:
        config: Of the model.
        modules: How many.
    """
    head = replace(config.arch.head, mtp=modules)
    return replace(config, arch=replace(config.arch, head=head))


def misfits(family: Family, config: DecoderConfig) -> list[str]:
    """List why a family's files cannot hold the modules that a config asks for.

    Args:
        family: Whose files.
        config: Of the model.

    Example:
        >>> from styrax.models import DecoderConfig
        >>> from styrax.models.registry import FAMILIES
        >>> misfits(FAMILIES["llama"], with_modules(DecoderConfig(), 1))
        ['arch.head.mtp = 1: the files of llama have no place for multi-token prediction']
    """
    count, words = config.arch.head.mtp, family.mtp
    if not count:
        return []
    name = f"arch.head.mtp = {count}"
    if words is None:
        return [f"{name}: the files of {family.model_type} have no place for multi-token prediction"]
    problems = []
    if words.most is not None and count > words.most:
        problems.append(f"{name}: the files of {family.model_type} have place for {words.most}")
    last, sparse = config.kinds[-1], config.arch.moe is not None
    if (last.mixer, last.sparse) != (words.mixer, sparse):
        problems.append(
            f"{name}: its block is like the last layer, {_kind(last.mixer, last.sparse)}; in files of "
            f"{family.model_type} it is {_kind(words.mixer, sparse)}"
        )
    return problems


def _kind(mixer: str, sparse: bool) -> str:
    return f"{mixer} {'with' if sparse else 'without'} experts"


def asked(config: DecoderConfig, family: Family, table: Mapping[str, Any]) -> DecoderConfig:
    """Give the config with as many modules as config.json says.

    Args:
        config: What config.json says beside.
        family: Whose it is.
        table: All of it, or the part that the family reads. Where it does not say how many, it is 1, for Qwen3-Next.

    Raises:
        UserError: There is none, or the family has no place for so many.
    """
    words = family.mtp
    said = None if words is None else table.get(words.count)
    if words is not None and said == 0:
        raise UserError(f"mtp: config.json says {words.count} = 0, so there is none to load; {_WITHOUT}")
    try:
        new = with_modules(config, 1 if said is None else said)
    except ValueError as error:
        raise UserError(f"mtp: config.json of a {family.model_type} model: {error}") from error
    if problems := misfits(family, new):
        raise UserError("\n".join(f"mtp: {text}; {_WITHOUT}" for text in problems))
    return new


def check_there(config: DecoderConfig, family: Family, tensors: Tensors) -> None:
    """See that a folder can have the modules and has any, for a clearer error than a list of all their tensors.

    Args:
        config: Of the model, with the modules.
        family: Whose folder.
        tensors: Of the folder.

    Raises:
        UserError: It has none.
    """
    if problems := misfits(family, config):
        raise UserError("\n".join(problems))
    if config.arch.head.mtp and not further(config, tensors):
        name = next(rule.theirs for rule in family.rules(config) if rule.ours[0].startswith("mtp/"))
        raise UserError(f"mtp: {tensors.folder} has no tensors of multi-token prediction, such as {name}; {_WITHOUT}")


def check_copies(copies: Sequence[Rule], sources: Mapping[str, list[Source]], tensors: Tensors) -> None:
    """See that the modules have no embedding and no head of their own, for here they use the model's.

    Args:
        copies: Of the family; those that are not there are passed over.
        sources: Of the parameters.
        tensors: Of the folder.

    Raises:
        UserError: Some are not what they should repeat; all are listed.
    """
    problems = []
    for copy in copies:
        source = sources[copy.ours[0]][0]
        name, original = (source.rename.get(each, each) for each in (copy.theirs, source.rule.theirs))
        if name in tensors and not _equal(tensors[name], tensors[original]):
            problems.append(f"{name} is not {original}")
    if problems:
        raise UserError(
            f"mtp: {tensors.folder}: a module has an embedding or a head of its own, which cannot be loaded, for here "
            f"all use the model's: {', '.join(problems)}; {_WITHOUT}"
        )


def _equal(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    rows = max(1, _PIECE * one.shape[0] // max(1, one.nbytes))
    places = [slice(at, at + rows) for at in range(0, one.shape[0], rows)]
    same = all(one.read(place).tobytes() == other.read(place).tobytes() for place in places)
    one.drop()
    other.drop()
    return same
