"""The arguments that name a model and its optimizer, and what they stand for."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from styrax.core.config import find_schema, read_config


class Chosen(NamedTuple):
    """A model and its optimizer.

    Attributes:
        recipe: The optimizer's recipe.
        params: The parameters as `jax.ShapeDtypeStruct`s, with shardings if a mesh was named.
        steps: Of the whole run.
    """

    recipe: Any
    params: Any
    steps: int


def positive(text: str) -> int:
    """Read an integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer, 1 or more, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("config", nargs="?", default="quickstart", help="a recipe or a TOML file (default: quickstart)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as optim={kind='muon'}")
    parser.add_argument(
        "--vocab-size", type=positive, default=32_768, metavar="N", help="tokens of the vocabulary (default: 32768)"
    )
    parser.add_argument(
        "--devices", type=positive, metavar="N", help="spread over the mesh of the config, on so many devices"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def chosen(args: argparse.Namespace) -> Chosen:
    """Read the configuration and trace the model; nothing is allocated.

    Raises:
        UserError: The configuration is wrong, a part is not installed, or the mesh does not fit.
    """
    if "=" in args.config:
        args.overrides, args.config = [args.config, *args.overrides], "quickstart"
    sections = read_config(find_schema("train"), args.config, args.overrides).check().sections
    import jax
    from flax import nnx

    from styrax.core.mesh import DEFAULT_RULES, shardings
    from styrax.core.precision import Policy

    policy = Policy.parse(sections["train"].precision)
    model = sections["model"]
    made = nnx.eval_shape(lambda: model.build(vocab_size=args.vocab_size, rngs=nnx.Rngs(0), policy=policy))
    params = nnx.to_pure_dict(nnx.state(made, nnx.Param))
    if args.devices:
        mesh = sections["mesh"].abstract(args.devices)
        where = shardings(params, model.logical_axes(), DEFAULT_RULES, mesh)
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, where)
    return Chosen(sections["optim"], params, sections["train"].steps)
