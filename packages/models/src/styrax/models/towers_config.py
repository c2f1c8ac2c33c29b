"""Two encoders whose vectors are compared: pictures and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from styrax.core import Policy
from styrax.core.config import check
from styrax.models.encoder_config import EncoderConfig, Image, Pool, Text

if TYPE_CHECKING:
    from flax import nnx

    from styrax.models.sharding import LogicalAxes
    from styrax.models.towers import Towers


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """An encoder of pictures and one of texts, trained so that what belongs together has similar vectors.

    Attributes:
        kind: Selects this model.
        image: The encoder of pictures; it pools.
        text: The encoder of texts, whose vectors are as wide.

    Raises:
        ValueError: Values do not fit together; all problems are listed.

    Example:
        >>> TowersConfig().image.pool.by
        'map'
    """

    kind: Literal["towers"] = "towers"
    image: EncoderConfig = field(default_factory=lambda: EncoderConfig(input=Image(), pool=Pool(by="map")))
    text: EncoderConfig = field(
        default_factory=lambda: EncoderConfig(input=Text(max_len=64), pool=Pool(by="last", dense="linear"))
    )

    def __post_init__(self) -> None:
        check(self)
        problems, widths = [], []
        for name, kind in (("image", Image), ("text", Text)):
            tower = getattr(self, name)
            if not isinstance(tower.input, kind):
                problems.append(f"{name}.input: expected {kind.__name__}, got {type(tower.input).__name__}")
            if tower.pool.by == "none":
                problems.append(f'{name}.pool.by: expected a way to pool, got "none"')
            widths.append(tower.pool.dim or tower.embed_dim)
        if widths[0] != widths[1]:
            problems.append(f"text: expected vectors of width {widths[0]}, as image has, got {widths[1]}")
        if problems:
            raise ValueError("\n".join(problems))

    def build(self, *, rngs: nnx.Rngs, policy: Policy | None = None) -> Towers:
        """Make the model with fresh parameters; works under `jax.jit` and `nnx.eval_shape`.

        Args:
            rngs: Gives two `params` keys.
            policy: Dtypes of parameters, computation and results; none means float32 for all.
        """
        from styrax.models.towers import Towers

        return Towers(self, rngs=rngs, policy=policy or Policy())

    def logical_axes(self) -> LogicalAxes:
        """Name the axes of every parameter, by path."""
        towers = {"image": self.image, "text": self.text}
        axes = {f"{name}/{path}": each for name, tower in towers.items() for path, each in tower.logical_axes().items()}
        return {**axes, "logit_scale": (None,), "logit_bias": (None,)}
