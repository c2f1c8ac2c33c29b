"""A model into a Hugging Face folder that transformers and vLLM read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core import UserError, tree
from styrax.core.errors import nearest
from styrax.models.config import DecoderConfig, Scales
from styrax.models.families.common import Family
from styrax.models.hf.mtp import misfits, with_modules
from styrax.models.hf.plan import layer_paths, placed
from styrax.models.hf.rules import Rule
from styrax.models.hf.tensors import open_tensors
from styrax.models.hf.writing import write_tensors
from styrax.models.moe_config import MoE
from styrax.models.registry import FAMILIES

if TYPE_CHECKING:
    from os import PathLike

    from styrax.models.decoder import Decoder

#: What config.json does not say: how a model is run, and how it began.
_NOT_SAID = ("dropout", "remat", "scan", "runtime")
_ALL = "all of it"


def save_pretrained(
    model: Decoder,
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

    A process that is killed leaves no folder under the name that is not whole.

    Args:
        model: Whose family config.json can name.
        folder: What to make.
        family: Which of the families it is, such as "llama"; `None` takes the first that can say all of it.
        dtype: Of the tensors, such as "bfloat16"; `None` keeps that of each parameter.
        shard_bytes: Tensors fill a file up to so many bytes.
        extra: More of config.json, such as `bos_token_id`; it goes before what we write.
        files: Name -> content of what else belongs there, such as the tokenizer's.
        overwrite: Put it in the place of a model's folder that is there.
        verify: Compare what was written with the model, bit by bit.

    Raises:
        UserError: No family, or not the one that is named, has this architecture; the folder is there or cannot be
            written; or what was written is not what is in memory.
    """
    chosen = find_family(model.config, model.vocab_size, family)
    rules, parameters = chosen.rules(model.config) + chosen.copies(model.config), tree.flatten(model)
    layers = layer_paths(model.config)
    kept = {path: np.dtype(dtype) if dtype else np.dtype(leaf.dtype) for path, leaf in parameters.items()}

    def part(path: str) -> Callable[[], np.ndarray]:
        full, index = placed(path, layers)
        return lambda: np.asarray(parameters[full] if index is None else parameters[full][index]).astype(kept[full])

    def tensors() -> Any:
        for rule in rules:
            spots = [placed(path, layers) for path in rule.ours]
            shapes = [tuple(parameters[path].shape)[0 if index is None else 1 :] for path, index in spots]
            made = [part(path) for path in rule.ours]
            for number, name in enumerate(rule.names()):
                yield name, rule.shape(shapes), kept[spots[0][0]], maker(rule, made, number)

    widest = max(kept.values(), key=lambda each: sum(parameters[path].nbytes for path in kept if kept[path] == each))
    table = {"dtype": widest.name, "torch_dtype": widest.name}
    table = {**(extra or {}), **chosen.to_hf(model.config, vocab_size=model.vocab_size), **table}
    text = json.dumps(table, indent=2, sort_keys=True) + "\n"
    more = {"config.json": text.encode(), **(files or {})}
    write_tensors(folder, tensors(), shard_bytes=shard_bytes, files=more, overwrite=overwrite)
    if verify:
        verify_folder(folder, tensors())


def find_family(config: DecoderConfig, vocab_size: int, name: str | None = None) -> Family:
    """Find a family whose config.json says all that a config says.

    Args:
        config: Of the model.
        vocab_size: Rows of the embedding.
        name: Which to take; `None` takes the first that fits.

    Raises:
        UserError: None fits, or the one that is named does not; what it cannot say is listed.

    Example:
        >>> find_family(DecoderConfig(), 100).model_type
        'llama'
    """
    if name is not None and name not in FAMILIES:
        raise UserError(
            f"family: {name!r} is not known{nearest(name, FAMILIES)}; known are {', '.join(sorted(FAMILIES))}"
        )
    order = [name] if name else ["llama", *sorted(FAMILIES.keys() - {"llama"})]
    lost: dict[str, list[str]] = {each: _lost(FAMILIES[each], config, vocab_size) for each in order}
    for each, differences in lost.items():
        if not differences:
            return FAMILIES[each]
    best = min(lost, key=lambda each: (lost[each][0].startswith(_ALL), len(lost[each])))
    change = "change the model"
    if misfits(FAMILIES[best], config):
        change += ", such as with drop_mtp, which leaves multi-token prediction out"
    raise UserError(
        f"config.json of {'a ' + name if name else 'no known family'}{' model' if name else ''} can say all of this "
        f"model; {best!r} would lose: {'; '.join(lost[best])}. Save it as a checkpoint, or {change}"
    )


def _lost(family: Family, config: DecoderConfig, vocab_size: int) -> list[str]:
    """List what a family's config.json cannot say."""
    try:
        again = family.read(family.to_hf(config, vocab_size=vocab_size))
    except Exception as error:  # a family may not even have the words for parts of other families
        return [f"{_ALL} ({type(error).__name__}: {error})"]
    modules = config.arch.head.mtp  # which config.json says, if there is any place for them
    return misfits(family, config) + differences(_plain(config), _plain(with_modules(again, modules)))


def _plain(config: DecoderConfig) -> DecoderConfig:
    """Fill in defaults, and leave out what config.json does not say."""
    usual = DecoderConfig()
    said = ("embed_scale", "attn_scale", "residual_mult", "block_scale", "logit_mult")
    scales = replace(Scales(), **{name: getattr(config.scales, name) for name in said})
    latent, moe = "latent" in config.arch.layers, config.arch.moe
    head = replace(config.arch.head, mtp_coef=usual.arch.head.mtp_coef)
    config = replace(config, arch=replace(config.arch, head=head))
    if moe is not None:
        kept = MoE()
        unsaid = {name: getattr(kept, name) for name in ("dispatch", "capacity_factor", "balance_coef", "z_coef")}
        routing = replace(moe.routing, correction_rate=0.0)
        config = replace(config, arch=replace(config.arch, moe=replace(moe, **unsaid, routing=routing)))
    return replace(
        config,
        **{name: getattr(usual, name) for name in _NOT_SAID},
        num_kv_heads=None if latent else config.kv_heads,
        head_dim=None if latent and config.embed_dim % config.num_heads == 0 else config.head_width,
        mlp_dim=config.mlp_width,
        scales=scales,
    )


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """List the fields in which two configs differ, as the first has them.

    Args:
        ours: A config, or a value in one.
        theirs: Another.
        path: Where they are.
    """
    if type(ours) is not type(theirs) or not hasattr(ours, "__dataclass_fields__"):
        close = isinstance(ours, float) and isinstance(theirs, float) and abs(ours - theirs) <= 1e-6 * abs(ours)
        return [] if ours == theirs or close else [f"{path} = {ours!r}"]
    names = ours.__dataclass_fields__
    return [
        text
        for name in names
        for text in differences(getattr(ours, name), getattr(theirs, name), f"{path}.{name}".lstrip("."))
    ]


def maker(rule: Rule, parts: list[Callable[[], np.ndarray]], number: int) -> Callable[[], np.ndarray]:
    """Make a tensor of theirs when it is asked for.

    Args:
        rule: Whose tensor.
        parts: Give the parameters.
        number: Of the expert.
    """
    return lambda: rule.save([make() for make in parts], number)


def verify_folder(folder: str | PathLike[str], tensors: Any) -> None:
    """Compare a folder with what was to be written, bit by bit.

    Args:
        folder: What was written.
        tensors: As for `write_tensors`.

    Raises:
        UserError: Some are not the same; all are named.
    """
    with open_tensors(folder) as written:
        wrong, names = [], set()
        for name, _, _, make in tensors:
            names.add(name)
            found = written.get(name)
            same = found is not None and found.read().tobytes() == make().tobytes()
            wrong += [] if same else [name]
        wrong += sorted(set(written) - names)
    if wrong:
        raise UserError(f"{folder}: these tensors are not what was written, is the disk failing? {', '.join(wrong)}")
