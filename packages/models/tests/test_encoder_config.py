import subprocess
import sys

import pytest

from styrax.core.config import build
from styrax.models import EncoderConfig, TowersConfig
from styrax.models.encoder_config import Image, Pool, Text


def test_import_costs_no_jax():
    code = (
        "import sys; from styrax.models import EncoderConfig, TowersConfig; "
        "EncoderConfig(); TowersConfig(); sys.exit(bool({'jax', 'flax', 'numpy'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("kind", "fields", "messages"),
    [
        (EncoderConfig, {"embed_dim": 10, "num_heads": 4, "dropout": 1.0}, ["embed_dim: expected a mul", "dropout: "]),
        (EncoderConfig, {"num_layers": 0, "placement": "post"}, ["num_layers: expected", "placement: expected"]),
        (Image, {"height": 30, "width": 17}, ["height: expected a multiple of patch = 16, got 30", "width: expected"]),
        (Pool, {"dense": "tanh", "normalise": True}, ["dense: expected", "normalise: expected"]),
        (Pool, {"by": "cls", "dim": 3}, ["dim: expected none without a projection"]),
        (TowersConfig, {"image": EncoderConfig(embed_dim=96)}, ["image.input: ", "image.pool.by: ", "of width 96"]),
    ],
)
def test_all_problems_of_a_config_are_listed(kind, fields, messages):
    with pytest.raises(ValueError) as caught:
        kind(**fields)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(messages)
    assert all(message in line for message, line in zip(messages, lines, strict=True))


@pytest.mark.parametrize("kind", [EncoderConfig, Pool, Image, Text, TowersConfig])
def test_every_field_is_described(kind):
    assert all(f"{name}: " in kind.__doc__ for name in kind.__dataclass_fields__)
    assert len(kind.__dataclass_fields__) <= 15


def test_from_plain_values():
    table = {"input": {"kind": "image", "patch": 32}, "pool": {"by": "map"}, "num_layers": 1}
    config = build(EncoderConfig, table)
    assert (config.input, config.pool.by) == (Image(patch=32), "map")
