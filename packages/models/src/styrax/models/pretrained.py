"""A model that begins with the weights of a Hugging Face folder; importing it costs no jax."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from styrax.core import Policy, UserError
from styrax.core.config import Fraction, check
from styrax.models.config import DecoderConfig, Runtime
from styrax.models.sharding import LogicalAxes

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import AbstractMesh, Mesh

    from styrax.models.decoder import Decoder
    from styrax.models.pipeline import Schedule


@dataclass(frozen=True, kw_only=True)
class PretrainedConfig:
    """A decoder as a folder of Hugging Face has it, to go on training it or to fine-tune it.

    What `config.json` says is the model; the fields here say how it is computed and what of it is trained. The data
    need its tokenizer: `data.tokenizer = "FOLDER/tokenizer.json"`.

    Attributes:
        kind: Selects this model.
        folder: `config.json` and safetensors. `model.from = "FOLDER"` says both this and the kind.
        mtp: Have the modules of the folder for multi-token prediction too, and train them.
        freeze: Patterns of the parameters that are not trained, such as `embed/**`.
        dropout: As for a decoder.
        remat: As for a decoder.
        scan: As for a decoder.
        runtime: As for a decoder.

    Raises:
        ValueError: A value is of the wrong type or out of its limits; all are listed.

    Example:
        >>> PretrainedConfig(folder="SmolLM2-135M", freeze=("embed/**",)).dropout
        0.0
    """

    kind: Literal["pretrained"] = "pretrained"
    folder: str = field(default="", metadata={"spelling": "from"})
    mtp: bool = False
    freeze: tuple[str, ...] = ()
    dropout: Fraction = 0.0
    remat: Literal["none", "block", "dots", "auto"] = "auto"
    scan: Literal["auto", "on", "off"] = "auto"
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        check(self)

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder of the folder.

        Raises:
            UserError: There is no folder, or no config.json that is known, or none with what `mtp` asks for.
        """
        changes = {name: getattr(self, name) for name in ("dropout", "remat", "scan", "runtime")}
        return replace(_read(self.folder, self.mtp)[0], **changes)

    def build(self, *, vocab_size: int, rngs: nnx.Rngs, policy: Policy | None = None) -> Decoder:
        """Make the model with fresh parameters; those of the folder come from `load`.

        Args:
            vocab_size: Of the data; the folder's may be larger, and is what the model has.
            rngs: Gives one `params` key.
            policy: Dtypes of parameters, computation and logits; none means float32 for all.

        Raises:
            UserError: The data have ids that the model does not know.
        """
        from styrax.models.surgery import freeze

        own = _read(self.folder)[1]
        if vocab_size > own:
            raise UserError(
                f"the data have {vocab_size} tokens, and the model in {self.folder} knows {own}; use its tokenizer: "
                f'data.tokenizer = "{Path(self.folder) / "tokenizer.json"}"'
            )
        made = self.decoder.build(vocab_size=own, rngs=rngs, policy=policy)
        return freeze(made, *self.freeze) if self.freeze else made

    def load(
        self, *, mesh: Any = None, rules: Mapping[str, tuple[str, ...]] | None = None, policy: Policy | None = None
    ) -> Decoder:
        """Load the model with the folder's weights, straight into their shards.

        Args:
            mesh: Where they go; none means the default device.
            rules: Logical axis -> mesh axes; none means those in force.
            policy: Dtypes of parameters, computation and logits; none means float32 for all.
        """
        from styrax.models.hf.load import from_pretrained
        from styrax.models.surgery import freeze

        policy = policy or Policy()
        changes = {name: getattr(self, name) for name in ("dropout", "remat", "scan", "runtime")}
        dtypes = {"dtype": policy.param_dtype.name, "compute": policy.compute_dtype.name}
        given: dict[str, Any] = {"rules": rules, "mtp": self.mtp, **dtypes, **changes}
        made = from_pretrained(self.folder, mesh=mesh, **given)
        return freeze(made, *self.freeze) if self.freeze else made

    def pipeline(self, *, rows: int, mesh: Mesh | AbstractMesh) -> Schedule | None:
        """Tell how a pipeline over stages is filled; as for a decoder."""
        return self.decoder.pipeline(rows=rows, mesh=mesh)

    def logical_axes(self) -> LogicalAxes:
        """Name the axes of every parameter, by path."""
        return self.decoder.logical_axes()

    def train_flops_per_token(self, *, vocab_size: int, length: int) -> dict[str, float]:
        """Count the arithmetic of a training step; see `DecoderConfig.train_flops_per_token`.

        Args:
            vocab_size: Not looked at: the folder knows.
            length: Tokens in a row.
        """
        del vocab_size
        return self.decoder.train_flops_per_token(vocab_size=_read(self.folder)[1], length=length)


@functools.lru_cache(maxsize=8)
def _read(folder: str, mtp: bool = False) -> tuple[DecoderConfig, int]:
    from styrax.models.hf.load import read_json
    from styrax.models.hf.mtp import asked
    from styrax.models.registry import family_of, read_table

    if not folder:
        raise UserError("model.from: expected the folder of a model, with config.json and safetensors, got none")
    table = read_json(Path(folder) / "config.json")
    family, inner = family_of(table)
    config = read_table(table)
    return asked(config, family, inner) if mtp else config, inner["vocab_size"]
