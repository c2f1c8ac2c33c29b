"""An encoder, or two, from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flax import nnx

from styrax.core import Policy, UserError, rules_in_force, tree
from styrax.core.errors import nearest
from styrax.core.mesh import shardings
from styrax.models.hf.load import common_dtype, kept_dtype, place, read_json
from styrax.models.hf.plan import fit, stacked
from styrax.models.hf.sentence import read_pool
from styrax.models.hf.tensors import Tensor, Tensors, open_tensors
from styrax.models.registry import ENCODERS, TOWERS
from styrax.models.towers_config import TowersConfig

if TYPE_CHECKING:
    from os import PathLike

    from jax.sharding import Mesh

    from styrax.models.encoder import Encoder
    from styrax.models.encoder_config import EncoderConfig
    from styrax.models.families.encoders import EncoderFamily, TowersFamily
    from styrax.models.towers import Towers


def encoder_from_pretrained(
    folder: str | PathLike[str],
    *,
    tower: Literal["image", "text"] | None = None,
    mesh: Mesh | None = None,
    rules: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    compute: str | None = None,
    **changes: Any,
) -> Encoder | Towers:
    """Load an encoder from a Hugging Face folder: `config.json` and safetensors.

    As `from_pretrained`, neither transformers nor much memory is needed, and no pickle is ever read. A folder of
    sentence-transformers says how to pool; heads for other ends, such as for masked words, are left out.

    Args:
        folder: On this machine.
        tower: Of a model that compares pictures and texts: which encoder to load; `None` loads both.
        mesh: Where the parameters go; `None` puts all on the default device.
        rules: Logical axis -> mesh axes, for the mesh; `None` means those in force, see `styrax.core.use_rules`.
        dtype: Of the parameters, such as "bf16"; `None` keeps each tensor's own.
        compute: Of the computation; `None` means that of the parameters, or of most of them.
        changes: Fields of the `EncoderConfig` to change, such as `remat` or `pool`; of both if there are two.

    Returns:
        The model, its results in float32.

    Raises:
        UserError: The folder has no config.json that is known, or the tensors do not fit it, in name, shape or
            number; all are listed.
    """
    folder = Path(folder)
    table = read_json(folder / "config.json")
    name = table.get("model_type")
    if name not in (*ENCODERS, *TOWERS):
        known = sorted([*ENCODERS, *TOWERS])
        near = nearest(str(name), known)
        raise UserError(
            f"model_type {name!r} in config.json is no encoder that is known{near}; known are {', '.join(known)}"
        )
    if tower is not None and (name not in TOWERS or tower not in TOWERS[name].towers):
        allowed = "image, text or none" if name in TOWERS else "none"
        raise UserError(f"tower: expected {allowed} for a {name} model, got {tower!r}")
    with open_tensors(folder) as tensors:
        param = Policy(param=dtype).param if dtype is not None else common_dtype(tensors)
        policy = Policy(param=param, compute=compute or param)
        load = _Loader(folder, tensors, policy, keep=dtype is None, mesh=mesh, rules=rules or rules_in_force())
        if name in ENCODERS:
            family = ENCODERS[name]
            found = {family.bare(each): tensor for each, tensor in tensors.items()}
            config = _changed(load.config(family, table, found), changes)
            return load.model(config, load.encoder(family, config, found))
        return load.towers(TOWERS[name], table, tower, changes)


class _Loader:
    """What all parts of one folder share."""

    def __init__(
        self, folder: Path, tensors: Tensors, policy: Policy, *, keep: bool, mesh: Mesh | None, rules: Mapping[str, Any]
    ) -> None:
        self.folder, self.tensors, self.policy, self.keep = folder, tensors, policy, keep
        self.mesh, self.rules = mesh, rules

    def config(self, family: EncoderFamily, table: Mapping[str, Any], found: Mapping[str, Tensor]) -> EncoderConfig:
        """Read the config, and how a sentence encoder pools."""
        try:
            config = family.read(table, found.keys())
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"config.json of a {family.model_type} model: {error}") from error
        pool = read_pool(self.folder) if family.sentences else None
        return config if pool is None else _changed(config, {"pool": pool})

    def encoder(self, family: EncoderFamily, config: EncoderConfig, found: Mapping[str, Tensor]) -> dict[str, Any]:
        """Make the parameters of one encoder, by path."""
        kept = {name: tensor for name, tensor in found.items() if not family.ignores(name, config)}
        return self._made(family.rules(config), config, config, kept)

    def towers(
        self, family: TowersFamily, table: Mapping[str, Any], tower: str | None, changes: Mapping[str, Any]
    ) -> Any:
        """Make one or both of two encoders."""
        configs, made, rest = {}, {}, dict(self.tensors)
        for each, own in family.towers.items():
            found = {own.bare(path): rest.pop(path) for path in list(rest) if path.startswith(own.prefix)}
            if tower in (None, each):
                configs[each] = _changed(self.config(own, table.get(family.tables[each]) or {}, found), changes)
                made[each] = self.encoder(own, configs[each], found)
        if tower is not None:
            return self.model(configs[tower], made[tower])
        try:
            config = TowersConfig(**configs)
        except ValueError as error:
            raise UserError(f"config.json of a {family.model_type} model: {error}") from error
        flat = {f"{each}/{path}": leaf for each, leaves in made.items() for path, leaf in leaves.items()}
        shared = self._made(family.rules, config.text, config, rest, of={rule.ours[0] for rule in family.rules})
        return self.model(config, flat | shared)

    def model(self, config: Any, made: Mapping[str, Any]) -> Any:
        """Put parameters into a model."""
        return tree.unflatten(self._empty(config), made)

    def _empty(self, config: Any) -> Any:
        return nnx.eval_shape(lambda: config.build(rngs=nnx.Rngs(0), policy=self.policy))

    def _made(self, rules: Any, layers: Any, config: Any, found: Any, of: set[str] | None = None) -> dict[str, Any]:
        empty = self._empty(config)
        wanted = {path: leaf for path, leaf in tree.flatten(empty).items() if of is None or path in of}
        sources = fit(rules, layers, wanted, found, where=str(self.folder))
        places: Mapping[str, Any] = {}
        if self.mesh is not None:
            places = tree.flatten(shardings(empty, config.logical_axes(), self.rules, self.mesh))
        made = {}
        for path, leaf in wanted.items():
            kept = kept_dtype(found, sources[path]) if self.keep else leaf.dtype
            made[path] = place(found, sources[path], leaf.shape, kept, places.get(path), stacked=stacked(path))
        return made


def _changed(config: EncoderConfig, changes: Mapping[str, Any]) -> EncoderConfig:
    try:
        return type(config)(**{**vars(config), **changes})
    except (TypeError, ValueError) as error:
        raise UserError(f"encoder_from_pretrained: {error}") from error
