"""From a resolved configuration to the objects that ``fit`` takes; names become parts through entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from styrax.core import UserError
from styrax.core.config import Resolved
from styrax.core.precision import Policy


class Parts(NamedTuple):
    """The objects of a run.

    Attributes:
        make_model: ``nnx.Rngs -> nnx.Module``.
        tx: The optax transformation.
        metrics: Reads scalars from the optimizer's state.
        eval_params: Gives the weights to evaluate from the optimizer's state and the parameters; None if the
            optimizer's recipe does not say.
        dataset: Batches by step, tokenizer, held-out text.
        mesh: Device mesh, or None for one device.
        logical_axes: Path pattern of a parameter to its logical axes.
        held_out: What :func:`make_held_out` gives; None if it was not made.
    """

    make_model: Callable[[Any], Any]
    tx: Any
    metrics: Callable[[Any], Any]
    eval_params: Callable[[Any, Any], Any] | None
    dataset: Any
    mesh: Any
    logical_axes: Any
    held_out: Any = None


def make_dataset(resolved: Resolved, progress: Callable[[str, int, int | None], None] | None = None) -> Any:
    """Build (or reuse) the data of a run."""
    sections = resolved.sections
    return sections["data"].build(seed=sections["train"].seed, progress=progress)


def make_held_out(
    resolved: Resolved, dataset: Any, progress: Callable[[str, int, int | None], None] | None = None
) -> Any:
    """What a run is evaluated on: the held-out batches of its data, and of each set of ``[evaluate]``.

    A kind of data that has ``evaluation(tokenizer, progress=)`` is given the run's tokenizer; another's own held-out
    batches are taken.

    Returns:
        Batches; by name where there are sets, those of the run's data under the empty one.

    Raises:
        UserError: Sets without text, or with other tokens than the run's, a line or more each.
    """
    own, problems = dataset.held_out(), []
    found: dict[str, Any] = {"": own} if len(own) else {}
    for name, config in resolved.sections["evaluate"].items():
        try:
            if dataset.tokenizer is None:
                raise UserError("the run's data have no tokenizer, so it cannot be told what its ids would mean")
            if hasattr(config, "evaluation"):
                found[name] = config.evaluation(dataset.tokenizer, progress=progress)
            else:
                found[name] = config.build(seed=resolved.sections["train"].seed, progress=progress).held_out()
        except UserError as error:
            problems += [f"evaluate.{name}: {line}" for line in str(error).splitlines()]
        else:
            if not len(found[name]):
                kind = resolved.kinds.get(f"evaluate.{name}")
                problems.append(
                    f"evaluate.{name}: data of kind={kind!r} as set up here hold out nothing to evaluate on"
                )
    if problems:
        raise UserError("\n".join(problems))
    return found if resolved.sections["evaluate"] else own


def make_model(resolved: Resolved, vocab_size: int) -> Callable[[Any], Any]:
    """A function of ``nnx.Rngs`` that makes the model."""
    sections = resolved.sections
    policy = Policy.parse(sections["train"].precision)
    return lambda rngs: sections["model"].build(vocab_size=vocab_size, rngs=rngs, policy=policy)


def make_mesh(resolved: Resolved) -> Any:
    """The device mesh; None for one device, whose mesh is checked all the same.

    Raises:
        UserError: The mesh is not of as many devices as there are, or its batch axes do not divide data.batch_size.
    """
    import jax

    from styrax.core.slices import slices_of
    from styrax.train.config import batch_misfits
    from styrax.train.shardings import batch_shards

    config = resolved.sections["mesh"]
    if len(jax.devices()) == 1:
        config.sizes(1)
        return None
    mesh = config.over_slices(max(1, len(slices_of(jax.devices())))).build()
    if problems := batch_misfits(resolved.sections, batch_shards(mesh)):
        raise UserError("\n".join(problems))
    return mesh


def compose(resolved: Resolved, dataset: Any) -> Parts:
    """Make every part but the checkpointer, which needs the folder of the run."""
    sections = resolved.sections
    model = make_model(resolved, dataset.vocab_size)
    optim = sections["optim"]
    tx, derive = make_tx(resolved, model), getattr(optim, "eval_params", None)
    return Parts(model, tx, optim.metrics, derive, dataset, make_mesh(resolved), sections["model"].logical_axes())


def fit_options(resolved: Resolved, parts: Parts) -> dict[str, Any]:
    """What :func:`styrax.train.fit` is told of a run by its configuration, beside the model, optimizer and data."""
    config, dataset = resolved.sections["train"], parts.dataset
    return {
        "seed": config.seed,
        "accumulate": config.accumulate,
        "metrics": parts.metrics,
        "eval_params": parts.eval_params,
        "mesh": parts.mesh,
        "logical_axes": parts.logical_axes,
        "save_every": resolved.sections["checkpoint"].every,
        "log_every": config.log_every,
        "held_out": make_held_out(resolved, dataset) if parts.held_out is None else parts.held_out,
        "token_bytes": dataset.token_bytes,
        "eval_every": config.eval_every or None,
        "spike": config.spike,
        "initial": make_initial(resolved),
    }


def make_initial(resolved: Resolved) -> Callable[[Any, Any], Any] | None:
    """What loads the weights to begin with, for a model that names some; None if they are drawn."""
    load = getattr(resolved.sections["model"], "load", None)
    policy = Policy.parse(resolved.sections["train"].precision)
    return None if load is None else lambda mesh, rules: load(mesh=mesh, rules=rules, policy=policy)


def make_hooks(resolved: Resolved) -> list[Any]:
    """The hooks that every process of a run has, as they measure together: those of ``train.watch``."""
    from styrax.train.watch import Watch

    config = resolved.sections["train"].watch
    if not (config.parameters or config.activations):
        return []
    return [Watch(*config.parameters, activations=config.activations, every=config.every)]


def make_tx(resolved: Resolved, model: Callable[[Any], Any]) -> Any:
    """The optax transformation for the parameters of a model, which need not exist."""
    from flax import nnx

    from styrax.train.step import split_model

    abstract = split_model(nnx.eval_shape(lambda: model(nnx.Rngs(0))))[1]
    return resolved.sections["optim"].build(abstract, steps=resolved.sections["train"].steps)


def load_model(resolved: Resolved, checkpoints: Path, vocab_size: int) -> tuple[Any, int]:
    """The model of a run's newest checkpoint, with the weights to evaluate.

    The optimizer's state is read only where they are derived from it.

    Returns:
        ``(module, step)``.
    """
    import jax
    from flax import nnx

    from styrax.train.step import split_model

    model = make_model(resolved, vocab_size)
    abstract = nnx.eval_shape(lambda: model(nnx.Rngs(0)))
    graphdef, params, variables = split_model(abstract)
    with resolved.sections["checkpoint"].build(checkpoints, read_only=True) as checkpointer:
        step = checkpointer.latest()
        if step is None:
            raise UserError(
                f"{checkpoints.parent} holds no complete checkpoint yet; let the run reach its first save "
                "(checkpoint.every), or resume it with styrax train"
            )
        like = {"params": params, "variables": variables}
        optim = resolved.sections["optim"]
        if derived := getattr(optim, "derives_weights", False):
            tx = optim.build(params, steps=resolved.sections["train"].steps)
            like["opt_state"] = jax.eval_shape(tx.init, params)
        items = checkpointer.restore(step, like)
    weights = optim.eval_params(items["opt_state"], items["params"]) if derived else items["params"]
    return nnx.merge(graphdef, weights, items["variables"]), step


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids that a model continues: a document's first input, as in training, then the text."""
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return [begin, *tokenizer.encode(text)]
