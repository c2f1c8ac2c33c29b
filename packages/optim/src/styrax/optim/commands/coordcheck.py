"""`styrax optim coordcheck`: whether the activations of a model move alike at every width (or depth)."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from styrax.core import Policy, UsageError, UserError, registry

if TYPE_CHECKING:
    from styrax.optim.coordinates import Coordinates, Trial

HELP = "check that activations move alike at every width: muP, CompleteP, u-muP or no transfer"

TRANSFERS = ("mup", "completep", "umup", "none")
HEAD_DIM = 32
VOCAB = 256
BATCH = (2, 33)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--transfer", choices=TRANSFERS, default="mup", help="the rules to check (default: mup)")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--widths", type=_sizes, default=[64, 128, 256, 512], help=f"multiples of {HEAD_DIM}; the least is the base"
    )
    sizes.add_argument("--depths", type=_sizes, help="compare depths instead, at the width --base-width")
    parser.add_argument("--base-width", type=int, metavar="N", help="width of the base model (default: the least)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="blocks, when widths are compared")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="updates by AdamW (default: 4)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="take the mean over so many")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="at the base (default: 1e-3; umup: 0.0625)")
    parser.add_argument("--model", default="decoder", metavar="KIND", help="which model (default: decoder)")
    parser.add_argument("--out", metavar="FILE", help="the picture (default: coords.png if matplotlib is installed)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Train the models and say which activations are flat."""
    kind = registry.resolve("styrax.models", args.model)
    drawable = importlib.util.find_spec("matplotlib") is not None
    if args.out and not drawable:
        raise UserError(
            f'--out {args.out}: a picture needs matplotlib; pip install "styrax-optim[plot]", or leave --out away'
        )
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {Path(args.out).parent}")
    make, sizes, axis = _plan(args, kind)

    from rich.console import Console

    from styrax.optim.coordinates import coordinate_check

    with Console(stderr=True).status("coordinate check") as status:

        def progress(size: str) -> None:
            status.update(f"{axis} {size} of {', '.join(map(str, sizes))}: {args.steps} steps")

        found = coordinate_check(make, sizes, steps=args.steps, seeds=range(args.seeds), progress=progress)
    picture = args.out or ("coords.png" if drawable else None)
    if args.json:
        print(json.dumps(_report(args, found, axis, picture)))
    else:
        _show(args, found, axis, picture)
    if picture:
        found.plot(picture, axis=axis)
    return 0


def _sizes(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers with commas between, got {text!r}") from None


def _plan(args: argparse.Namespace, kind: Any) -> tuple[Callable[[int, int], Trial], list[int], str]:
    """Give what makes a model of each size, the sizes, and what they are."""
    sizes = args.depths or args.widths
    base = args.base_width or (64 if args.depths else min(sizes))
    widths = [base, *([] if args.depths else sizes)]
    problems = [
        f"--{name} {value}: expected 1 or more"
        for name, value in (("layers", args.layers), ("seeds", args.seeds))
        if value < 1
    ]
    if args.steps < 2:  # the head starts at 0, so that the first step moves nothing below it
        problems.append(f"--steps {args.steps}: expected 2 or more")
    problems += [
        f"width {width}: expected a multiple of {HEAD_DIM}, the width of a head"
        for width in dict.fromkeys(widths)
        if width < 1 or width % HEAD_DIM
    ]
    problems += [f"depth {depth}: expected 1 or more" for depth in args.depths or () if depth < 1]
    if len({*sizes}) < max(2, len(sizes)):
        problems.append(f"sizes {sizes}: expected two or more, all different")
    if args.learning_rate is not None and not args.learning_rate > 0:
        problems.append(f"--learning-rate {args.learning_rate}: expected a number above 0")
    if problems:
        raise UsageError("\n".join(problems))

    def make(size: int, seed: int) -> Trial:
        width, depth = (base, size) if args.depths else (size, args.layers)
        base_depth = min(args.depths) if args.depths else args.layers
        return trial(
            kind,
            transfer(args.transfer, width=width, base_width=base, depth=depth, base_depth=base_depth),
            width=width,
            depth=depth,
            base_depth=base_depth,
            seed=seed,
            learning_rate=_rate(args),
            every_block=not args.depths,
        )

    return make, sizes, "depth" if args.depths else "width"


def transfer(name: str, *, width: int, base_width: int, depth: int, base_depth: int) -> Any:
    """Make a transfer by its name, for an ordinary model; `None` for none."""
    from styrax.optim.transfer import CompleteP, MuP, UMuP

    if name == "mup":
        return MuP(width=width, base_width=base_width)
    if name == "completep":
        return CompleteP(width=width, base_width=base_width, depth=depth, base_depth=base_depth)
    return UMuP(width=width, depth=depth, weights="plain") if name == "umup" else None


def trial(
    kind: Any,
    rules: Any,
    *,
    width: int,
    depth: int,
    base_depth: int,
    seed: int,
    learning_rate: float,
    every_block: bool = True,
) -> Trial:
    """Make a model of one size with its optimizer, on random tokens of which some are frequent, as in text.

    The head starts at 0 (Yang et al. 2022, appendix D.2): the random logits of another fall with the root of the width,
    and the change of the residual stream would show through them with a slope that no learning rate makes.

    Args:
        kind: A config class of a model with `scales`, whose models have `blocks()`, `hidden(blocks, tokens)` and
            `logits(x)`, such as the decoder of styrax-models.
        rules: From `transfer`.
        width: Of the residual stream.
        depth: Number of blocks.
        base_depth: The number from which CompleteP takes the initial values.
        seed: Of the initial values; the tokens are always the same.
        learning_rate: At the base.
        every_block: Record the residual stream after every block; otherwise at half and at full depth.

    Raises:
        UserError: The model lacks what this needs.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from styrax.core.tree import flatten, unflatten
    from styrax.optim.adamw import adamw
    from styrax.optim.coordinates import Trial
    from styrax.optim.specs import specs

    config = _config(kind, rules, width, depth, base_depth)
    model = config.build(vocab_size=VOCAB, rngs=nnx.Rngs(seed), policy=Policy())
    if lacking := [part for part in ("blocks", "hidden", "logits") if not hasattr(model, part)]:
        raise UserError(f"coordcheck: the model {type(model).__name__} lacks {', '.join(lacking)}")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    found = specs(params)
    settings: dict[str, Any] = {}
    first = {path: 0.0 if spec.role == "head" else 1.0 for path, spec in found.items()}
    if rules is not None:
        by_path = rules.by_path(params, found)
        settings["lr_multipliers"] = {path: each.lr for path, each in by_path.items()}
        settings["eps"] = {path: 1e-8 * each.eps for path, each in by_path.items()}
        first = {path: first[path] * each.init for path, each in by_path.items()}
    params = unflatten(params, {path: first[path] * leaf for path, leaf in flatten(params).items()})
    kept = (
        {n: f"block {n}" for n in range(1, depth + 1)}
        if every_block
        else {-(-depth // 2): "half the blocks", depth: "all blocks"}
    )

    def loss_and_activations(params: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
        model: Any = nnx.merge(graphdef, params, rest)
        seen: dict[str, Any] = {}
        blocks = tuple(_Recorded(block, n, seen, kept) for n, block in enumerate(model.blocks(), 1))
        logits = model.logits(model.hidden(blocks, tokens[:, :-1])[0])
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -chosen.mean(), {**seen, "logits": logits}

    tokens = jax.random.categorical(jax.random.key(1), -jnp.log(jnp.arange(1.0, VOCAB + 1)), shape=BATCH)
    optimizer = adamw(learning_rate, weight_decay=0.0, **settings)
    return Trial(params, optimizer, loss_and_activations, tokens)


class _Recorded:
    """A block that leaves its input or output behind; made inside the traced function, so it costs training nothing."""

    def __init__(self, block: Any, number: int, seen: dict[str, Any], kept: dict[int, str]):
        self.block, self.number, self.seen, self.kept = block, number, seen, kept

    def __call__(self, x: Any, *rest: Any, **named: Any) -> Any:
        if self.number == 1:
            self.seen["embedding"] = x
        out = self.block(x, *rest, **named)
        if self.number in self.kept:
            self.seen[self.kept[self.number]] = out[0]
        return out


def _config(kind: Any, rules: Any, width: int, depth: int, base_depth: int) -> Any:
    wanted = {
        "num_layers": depth,
        "embed_dim": width,
        "num_heads": width // HEAD_DIM,
        "mlp_dim": 4 * width,  # a rounded width would show as a slope
        "tied": False,
        "scan": "off",
        "remat": "none",
    }
    fields = {field.name for field in dataclasses.fields(kind)}
    if lacking := [name for name in ("num_layers", "embed_dim", "num_heads", "scales") if name not in fields]:
        raise UserError(f"coordcheck: {kind.__name__} has no {', '.join(lacking)}; it takes models like the decoder")
    config = kind(**{name: value for name, value in wanted.items() if name in fields})
    if rules is None:
        return config
    forward = rules.forward(head_dim=HEAD_DIM)
    scales = {
        "embed_scale": forward.embedding,
        "attn_scale": forward.attention,
        "residual_mult": forward.residual,
        "logit_mult": forward.logits,
    }
    if rules.kind == "completep":
        scales["residual_init_mult"] = (2 * base_depth) ** -0.5
    elif rules.kind == "umup":
        scales |= {"init_std": 1.0, "residual_init_mult": 1.0}
    return dataclasses.replace(config, scales=dataclasses.replace(config.scales, **scales))


def _rate(args: argparse.Namespace) -> float:
    return args.learning_rate or (0.0625 if args.transfer == "umup" else 1e-3)


def _report(args: argparse.Namespace, found: Coordinates, axis: str, picture: str | None) -> dict[str, Any]:
    activations = {
        name: {
            "slope": found.slope(name),
            "flat": found.flat(name),
            "rows": [
                {axis: row.width, "step": row.step, "size": row.size, "change": row.change}
                for row in found
                if row.name == name
            ],
        }
        for name in found.names
    }
    settings = {"transfer": args.transfer, "axis": axis, "learning_rate": _rate(args), "steps": args.steps}
    return {**settings, "picture": picture, "activations": activations}


def _show(args: argparse.Namespace, found: Coordinates, axis: str, picture: str | None) -> None:
    print(f"transfer {args.transfer}, over {axis}, AdamW at {_rate(args):g}")
    print(found.table(axis=axis))
    slopes = {name: found.slope(name) for name in found.names if not found.flat(name)}
    for meaning, names in {
        f"move more the larger the {axis}": [name for name, slope in slopes.items() if slope > 0],
        f"move less the larger the {axis}": [name for name, slope in slopes.items() if slope < 0],
        "never moved or are not finite": [name for name, slope in slopes.items() if slope != slope],
    }.items():
        if names:
            print(f"{meaning}: {', '.join(names)}")
    if not slopes:
        print(f"all flat: these activations move alike at every {axis}")
    elif args.transfer == "umup" and [*slopes] == ["embedding"]:
        print("as it should be: the rule of u-muP for embeddings lets them move by width^(-1/2)")
    if picture:
        print(f"picture: {picture}")
