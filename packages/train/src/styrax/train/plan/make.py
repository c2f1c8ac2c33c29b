"""A plan: what one step of a run needs on given devices, predicted and compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from styrax.core import UserError
from styrax.core.config import Resolved
from styrax.core.mesh import MeshConfig
from styrax.core.precision import Policy
from styrax.train.compose import make_model, make_tx
from styrax.train.config import batch_misfits
from styrax.train.loss import next_token_loss
from styrax.train.plan.advice import Facts, advice, split_share
from styrax.train.plan.collectives import Collective, collectives
from styrax.train.plan.estimate import journey, roofline
from styrax.train.plan.flops import flops_per_token
from styrax.train.plan.predict import exchanges, gaps_of, libtpu_version, predict
from styrax.train.plan.program import Compiled, Program, compile_program, program_of
from styrax.train.plan.result import Plan
from styrax.train.plan.shape import widths_of
from styrax.train.plan.stages import stages_of
from styrax.train.plan.topology import CPU, Topology, find
from styrax.train.plan.topology import parse as parse_topology
from styrax.train.shardings import batch_shards

__all__ = ["Case", "Plan", "Verdict", "assess", "case_of", "compile_case", "plan", "plan_step"]

if TYPE_CHECKING:
    import optax

    from styrax.train.step import Loss, Metrics


def plan(
    resolved: Resolved,
    *,
    topology: Topology | str,
    slices: int = 1,
    vocab_size: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    compile: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a run of ``styrax train``: its own step, compiled for devices that need not exist.

    Args:
        resolved: The configuration.
        topology: Such as "v5p:4x4x4".
        slices: How many of them; without ``mesh.dcn`` the axis ``data`` goes over them.
        vocab_size: For data that cannot tell it before they are there.
        tokens: Of the whole run, for its days and cost.
        price: Of a chip for an hour.
        compile: Also ask the compiler; a minute or more for large models.
        progress: Told what is being done.

    Raises:
        UserError: The mesh does not fit the devices or the batch, the data cannot be planned, libtpu is missing.
    """
    where = parse_topology(topology, slices=slices) if isinstance(topology, str) else topology
    progress("tracing the step")
    case = case_of(resolved, where, vocab_size=vocab_size, compile=compile)
    return assess(case, compile_case(case, progress) if compile else Verdict(), tokens=tokens, price=price)


def case_of(resolved: Resolved, topology: Topology, *, vocab_size: int | None = None, compile: bool = True) -> Case:
    """Trace a run's step; see `plan`."""
    sections, notes = resolved.sections, []
    vocab_size, spec = shapes(sections["data"], vocab_size, notes)
    wanted: MeshConfig = sections["mesh"]
    arranged = wanted.over_slices(topology.slices)
    if arranged is not wanted:
        ways = ", ".join(f"{name}={size}" for name, size in arranged.axes.items())
        notes.append(
            f"mesh.dcn says nothing of the {topology.slices} slices, so data goes over them: axes {ways}, "
            f"dcn data={topology.slices}"
        )
    mesh = _mesh(arranged, topology, compile)
    if problems := batch_misfits(sections, batch_shards(mesh)):
        raise UserError("\n".join(problems))
    model, config = make_model(resolved, vocab_size), sections["model"]
    program = program_of(
        model,
        make_tx(resolved, model),
        spec,
        mesh=mesh,
        logical_axes=config.logical_axes(),
        accumulate=sections["train"].accumulate,
        metrics=sections["optim"].metrics,
        seed=sections["train"].seed,
    )
    ask = getattr(config, "pipeline", None)
    if ask is not None and (filled := ask(rows=program.rows // program.accumulate, mesh=mesh)) is not None:
        notes.append(f"pipeline: {filled}")
    return Case(
        program=program,
        topology=topology,
        dcn=arranged.dcn,
        config=config,
        vocab_size=vocab_size,
        compute_bytes=Policy.parse(sections["train"].precision).compute_dtype.itemsize,
        flops_per_token=flops_per_token(config, vocab_size, model, next_token_loss, spec, program.tokens),
        notes=tuple(notes),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """A traced step, on its devices, with what is known of its model.

    Attributes:
        program: The step.
        topology: The devices.
        dcn: Mesh axis -> ways of it across slices.
        config: The model's configuration; None if there is none.
        vocab_size: Logits a token; None if that is not known.
        compute_bytes: Of a number of the dtype that the model computes in.
        flops_per_token: Of a training step of the model, without recomputation.
        notes: What was assumed.
    """

    program: Program
    topology: Topology
    dcn: Mapping[str, int]
    config: Any
    vocab_size: int | None
    compute_bytes: int
    flops_per_token: float | None
    notes: tuple[str, ...]


def plan_step(
    model: nnx.Module | Callable[[nnx.Rngs], nnx.Module],
    tx: optax.GradientTransformation,
    batch: Mapping[str, tuple[tuple[int, ...], Any]],
    loss: Loss = next_token_loss,
    *,
    mesh: Any,
    topology: Topology,
    dcn: Mapping[str, int] | None = None,
    logical_axes: Mapping[str, tuple[str | None, ...]] | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    accumulate: int = 1,
    metrics: Metrics | None = None,
    config: Any = None,
    vocab_size: int | None = None,
    compute_bytes: int = 4,
    tokens: float | None = None,
    price: float | None = None,
    compile: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a step of your own model, as ``fit`` would compile it with the same arguments.

    Args:
        model: As for ``fit``, and so on to ``metrics``.
        tx: As there.
        batch: Name -> shape of the whole array and its dtype.
        loss: As there.
        mesh: Of the topology's devices, or abstract if nothing is compiled.
        topology: The devices.
        dcn: Mesh axis -> ways of it across slices.
        logical_axes: As there.
        rules: As there.
        accumulate: As there.
        metrics: As there.
        config: The model's configuration, if it is a decoder's; without one, activations and temporaries are None.
        vocab_size: Logits a token, for that.
        compute_bytes: Of a number of the dtype that the model computes in.
        tokens: Of the whole run, for its days and cost.
        price: Of a chip for an hour.
        compile: Also ask the compiler.
        progress: Told what is being done.
    """
    progress("tracing the step")
    program = program_of(
        model, tx, batch, loss, mesh=mesh, logical_axes=logical_axes, rules=rules, accumulate=accumulate,
        metrics=metrics,
    )  # fmt: skip
    case = Case(
        program=program,
        topology=topology,
        dcn=dcn or {},
        config=config,
        vocab_size=vocab_size,
        compute_bytes=compute_bytes,
        flops_per_token=flops_per_token(config, vocab_size, model, loss, batch, program.tokens),
        notes=(),
    )
    return assess(case, compile_case(case, progress) if compile else Verdict(), tokens=tokens, price=price)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of compiling; all None if it was not tried.

    Attributes:
        compiled: What the compiler says.
        exchanged: What devices exchange.
        failure: Why it failed: there is no room.
    """

    compiled: Compiled | None = None
    exchanged: tuple[Collective, ...] | None = None
    failure: str | None = None


def compile_case(case: Case, progress: Callable[[str], None] = lambda text: None) -> Verdict:
    """Compile a traced step for its devices."""
    slices = f" x {case.topology.slices}" if case.topology.slices > 1 else ""
    progress(f"compiling for {case.topology}{slices}")
    try:
        compiled, text = compile_program(case.program)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Verdict(failure=exhausted(str(error)))
    return Verdict(compiled=compiled, exchanged=collectives(text, dict(case.program.mesh.shape), case.dcn))


def assess(
    case: Case,
    verdict: Verdict = Verdict(),
    *,
    tokens: float | None = None,
    price: float | None = None,
    remat: str | None = None,
) -> Plan:
    """Put a plan together; cheap.

    Args:
        case: The traced step.
        verdict: What came of compiling it.
        tokens: Of the whole run.
        price: Of a chip for an hour.
        remat: Predict for this setting of the model instead of its own.
    """
    said, exchanged, failure = verdict.compiled, verdict.exchanged, verdict.failure
    program, topology, chip = case.program, case.topology, case.topology.chip
    sizes, c = dict(program.mesh.shape), case.compute_bytes
    platform = CPU if topology.kind == CPU else "tpu"
    params = program.state.params
    widths = (
        None if case.config is None else widths_of(case.config, params, case.vocab_size, sizes, platform, program.rules)
    )
    if widths is not None and remat is not None:
        widths = dataclasses.replace(widths, remat=remat)
    gaps = gaps_of(topology.kind, libtpu_version())
    stages = None if widths is None else stages_of(case.config, program)
    predicted = predict(
        program, widths, compute_bytes=c, flops_per_token=case.flops_per_token, stages=stages, gaps=gaps
    )
    foreseen, notes = exchanges(program, widths, compute_bytes=c, stages=stages), list(case.notes)
    if exchanged is not None and _sent(exchanged) < _sent(foreseen) / 2:
        notes.append(
            f"in the compiled program {_sent(exchanged):,} bytes are seen to be sent, and its parameters and gradients "
            f"need {_sent(foreseen):,}: some exchanges have a form that is not read, and the time is of those foreseen"
        )
    seen = foreseen if exchanged is None or len(notes) > len(case.notes) else exchanged
    least = roofline(
        chip,
        flops=predicted.flops,
        bytes_accessed=predicted.bytes_accessed,
        exchanged=seen,
        across=tuple(name for name, ways in case.dcn.items() if ways > 1),
    )
    hbm = None if chip is None else chip.hbm_bytes // chip.devices
    facts = Facts(
        groups=predicted.groups,
        total=predicted.total_bytes if said is None else said.total_bytes,
        hbm_bytes=hbm,
        rows=program.rows,
        accumulate=program.accumulate,
        shards=program.shards,
        devices=program.mesh.size,
        remat=None if widths is None else widths.remat,
        axes=sizes,
        split=split_share(params),
    )
    return Plan(
        topology=topology,
        device_kind=CPU if chip is None else chip.device_kind,
        mesh=sizes,
        dcn=dict(case.dcn),
        rows=program.rows,
        tokens=program.tokens,
        accumulate=program.accumulate,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        flops_per_token=case.flops_per_token,
        predicted=dataclasses.replace(predicted, seconds=least.seconds),
        compiled=said,
        failure=failure,
        collectives=exchanged,
        roofline=least,
        run=None
        if tokens is None
        else journey(
            tokens=tokens,
            tokens_per_step=program.tokens,
            step_seconds=least.seconds,
            flops_per_token=case.flops_per_token,
            peak=None if chip is None else chip.flops,
            chips=topology.chips,
            price=price,
        ),
        hbm_bytes=hbm,
        fits=False if failure is not None else facts.fits,
        advice=advice(facts, failed=failure is not None),
        notes=tuple(notes),
    )


def _sent(exchanged: Sequence[Collective] | None) -> int:
    return round(sum(each.wire_bytes or 0 for each in exchanged or ()))


def shapes(data: Any, vocab_size: int | None, notes: list[str]) -> tuple[int, Mapping[str, Any]]:
    """The vocabulary and the largest batch of a data section, with nothing read.

    Raises:
        UserError: The section cannot tell.
    """
    ask = getattr(data, "shapes", None)
    if ask is None:
        raise UserError(
            f"data.kind={getattr(data, 'kind', type(data).__name__)!r} cannot be planned: its configuration has no "
            "method shapes(), which tells the vocabulary and the shapes of batches. Plan with data.kind=synthetic"
        )
    known, specs = ask()
    vocab_size = known if vocab_size is None else vocab_size
    if vocab_size is None:
        raise UserError("the size of the vocabulary is not known before the data are there; give it: --vocab N")
    largest = max(specs, key=lambda spec: max(math.prod(shape) for shape, _ in spec.values()))
    if len(specs) > 1:
        size = "x".join(map(str, next(iter(largest.values()))[0]))
        notes.append(f"the data give {len(specs)} shapes of batch; this is planned for the largest, {size}")
    return vocab_size, largest


def exhausted(text: str) -> str:
    """The lines of a compiler's message that say how much is lacking.

    >>> exhausted("RESOURCE_EXHAUSTED: Ran out of memory. Used 120G of 95G hbm. Exceeded by 25G.\\n\\nTotal hbm usage")
    'Ran out of memory. Used 120G of 95G hbm. Exceeded by 25G.'
    """
    lines = [line.strip() for line in text.replace("RESOURCE_EXHAUSTED:", "").splitlines() if line.strip()]
    return lines[0] if lines else "out of memory"


def _mesh(config: MeshConfig, topology: Topology, compile: bool) -> Any:
    if config.slices > 1 and config.slices != topology.slices:
        raise UserError(
            f"mesh.dcn is for {config.slices} slices, and the plan is for {topology.slices}; give --slices "
            f"{config.slices}, or change mesh.dcn"
        )
    if not compile and topology.kind != CPU:
        return config.abstract(topology.devices)
    return config.build(find(topology))
