"""An encoder, or two, into a Hugging Face folder that transformers and sentence-transformers read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from styrax.core import UserError, tree
from styrax.core.errors import nearest
from styrax.models.encoder_config import EncoderConfig, Pool
from styrax.models.hf.plan import layer_paths, placed
from styrax.models.hf.save import differences, maker, verify_folder
from styrax.models.hf.sentence import MODULES, POOLING, is_sentence_pool, write_modules, write_pooling
from styrax.models.hf.writing import write_tensors
from styrax.models.registry import ENCODERS, TOWERS
from styrax.models.towers_config import TowersConfig

if TYPE_CHECKING:
    from os import PathLike

    from styrax.models.encoder import Encoder
    from styrax.models.families.encoders import EncoderFamily
    from styrax.models.hf.rules import Rule
    from styrax.models.towers import Towers

#: What config.json does not say: how a model is run, and how it began.
_NOT_SAID = ("dropout", "remat", "scan")
_ALL = "all of it"


class _Placed(NamedTuple):
    """A rule, the name in the file of the tensor that it makes, and the paths and layers of its parts."""

    rule: Rule
    name: str
    spots: list[tuple[str, int | None]]


def save_encoder(
    model: Encoder | Towers,
    folder: str | PathLike[str],
    *,
    family: str | None = None,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    verify: bool = True,
) -> None:
    """Write config.json and safetensors, one tensor at a time, and read them again to see that they are right.

    An encoder that only pools, without a projection of its own, also gets the files by which sentence-transformers
    knows how; these are written last.

    Args:
        model: Whose family config.json can name.
        folder: What to make.
        family: Which of the families it is, such as "bert"; `None` takes the first that can say all of it.
        dtype: Of the tensors, such as "bfloat16"; `None` keeps that of each parameter.
        shard_bytes: Tensors fill a file up to so many bytes.
        extra: More of config.json, such as `pad_token_id`; it goes before what we write.
        files: Name -> content of what else belongs there, such as the tokenizer's.
        overwrite: Put it in the place of a model's folder that is there.
        verify: Compare what was written with the model, bit by bit.

    Raises:
        UserError: No family, or not the one that is named, has this architecture; the folder is there or cannot be
            written; or what was written is not what is in memory.
    """
    parameters = tree.flatten(model)
    kept = {path: np.dtype(dtype) if dtype else np.dtype(leaf.dtype) for path, leaf in parameters.items()}
    pooling: dict[str, bytes] = {}
    if isinstance(model.config, TowersConfig):
        table, found = _towers(model.config, family)
    else:
        chosen, pool = find_encoder_family(model.config, family), model.config.pool
        table = {"model_type": chosen.model_type, **chosen.write(model.config)}
        found = _placed(chosen, model.config, chosen.full)
        if chosen.sentences and is_sentence_pool(pool):
            pooling = {MODULES: write_modules(pool), POOLING: write_pooling(pool, model.config.embed_dim)}

    def part(path: str, index: int | None) -> Callable[[], np.ndarray]:
        return lambda: np.asarray(parameters[path] if index is None else parameters[path][index]).astype(kept[path])

    def tensors() -> Iterator[Any]:
        for rule, name, spots in found:
            shapes = [tuple(parameters[path].shape)[0 if index is None else 1 :] for path, index in spots]
            yield name, rule.shape(shapes), kept[spots[0][0]], maker(rule, [part(*spot) for spot in spots], 0)

    widest = max(kept.values(), key=lambda each: sum(parameters[path].nbytes for path in kept if kept[path] == each))
    table = {**(extra or {}), **table, "dtype": widest.name, "torch_dtype": widest.name}
    more = {"config.json": (json.dumps(table, indent=2, sort_keys=True) + "\n").encode(), **(files or {})}
    more |= {name: text for name, text in pooling.items() if name == MODULES}
    write_tensors(folder, tensors(), shard_bytes=shard_bytes, files=more, overwrite=overwrite)
    if verify:
        verify_folder(folder, tensors())
    if pooling:
        (Path(folder) / POOLING).mkdir()
        (Path(folder) / POOLING / "config.json").write_bytes(pooling[POOLING])


def find_encoder_family(config: EncoderConfig, name: str | None = None) -> EncoderFamily:
    """Find a family whose config.json says all that a config says.

    Args:
        config: Of the model.
        name: Which to take; `None` takes the first that fits.

    Raises:
        UserError: None fits, or the one that is named does not; what it cannot say is listed.

    Example:
        >>> from styrax.models.encoder_config import Image
        >>> find_encoder_family(EncoderConfig(input=Image(class_token=True))).model_type
        'vit'
    """
    if name is not None and name not in ENCODERS:
        raise UserError(
            f"family: {name!r} is not known{nearest(name, ENCODERS)}; known are {', '.join(sorted(ENCODERS))}"
        )
    order = [name] if name else sorted(ENCODERS)
    lost = {each: _lost(ENCODERS[each], config) for each in order}
    for each, wrong in lost.items():
        if not wrong:
            return ENCODERS[each]
    best = min(lost, key=lambda each: (lost[each][0].startswith(_ALL), len(lost[each])))
    who = f"a {name} model cannot" if name else "no known family can"
    raise UserError(
        f"config.json of {who} say all of this encoder; {best!r} would lose: {'; '.join(lost[best])}. Save it as a "
        "checkpoint, or change the model"
    )


def _lost(family: EncoderFamily, config: EncoderConfig) -> list[str]:
    """List what a family's config.json cannot say, and the parameters that its tensors are not."""
    config = replace(config, mlp_dim=config.mlp_width, **{key: getattr(EncoderConfig(), key) for key in _NOT_SAID})
    if family.sentences and is_sentence_pool(config.pool):
        config = replace(config, pool=Pool())
    try:
        rules = family.rules(config)
        again = family.read(family.write(config), {rule.theirs for rule in rules})
    except Exception as error:  # a family may not even have the words for parts of other families
        return [f"{_ALL} ({type(error).__name__}: {error})"]
    own = {path.replace("layers/0/", "layers/") for rule in rules for path in rule.ours}
    own = {path for path in own if not path.split("/")[1:2] or not path.split("/")[1].isdigit()}
    return differences(config, again) + [f"parameters {path}" for path in sorted(own ^ set(config.logical_axes()))]


def _placed(
    family: EncoderFamily, config: EncoderConfig, named: Callable[[str, EncoderConfig], str], ours: str = ""
) -> list[_Placed]:
    layers, found = layer_paths(cast("Any", config)), []
    for rule in family.rules(config):
        spots = [placed(path, layers) for path in rule.ours]
        found.append(_Placed(rule, named(rule.theirs, config), [(ours + path, index) for path, index in spots]))
    return found


def _towers(whole: TowersConfig, name: str | None) -> tuple[dict[str, Any], list[_Placed]]:
    name = next(iter(TOWERS)) if name is None else name
    if name not in TOWERS:
        raise UserError(f"family: {name!r} is not known{nearest(name, TOWERS)}; known are {', '.join(sorted(TOWERS))}")
    chosen = TOWERS[name]
    table: dict[str, Any] = {"model_type": name, "architectures": [chosen.architecture]}
    found = [_Placed(rule, rule.theirs, [(path, None) for path in rule.ours]) for rule in chosen.rules]
    for tower, family in chosen.towers.items():
        config = getattr(whole, tower)
        find_encoder_family(config, family.model_type)
        table[chosen.tables[tower]] = {"model_type": family.model_type, **family.write(config)}
        found += _placed(family, config, lambda theirs, _, prefix=family.prefix: prefix + theirs, f"{tower}/")
    return table, found
