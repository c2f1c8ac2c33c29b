"""A plan as tables for people; what is not known is n/a."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from styrax.train.plan.result import Plan
    from styrax.train.plan.search import Found

NA = "n/a"


def amount(value: float | None) -> str:
    """Bytes for people, in powers of ten.

    >>> amount(1508985344), amount(512), amount(None)
    ('1.509 GB', '512 B', 'n/a')
    """
    if value is None:
        return NA
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3f} {unit}"
    return f"{value:.0f} B"


def number(value: float | None) -> str:
    """A large number for people.

    >>> number(1.336e13), number(4), number(None)
    ('1.336e+13', '4', 'n/a')
    """
    return NA if value is None else f"{value:.4g}"


def duration(value: float | None) -> str:
    """Seconds for people.

    >>> duration(0.0473), duration(7200.0), duration(None)
    ('47.3 ms', '2.00 h', 'n/a')
    """
    if value is None:
        return NA
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if value >= size * (1 if unit in ("s", "ms") else 2):
            return f"{value / size:.3g} {unit}" if unit in ("s", "ms") else f"{value / size:.2f} {unit}"
    return f"{value * 1e6:.3g} us"


def show(plan: Plan, *, name: str, console: Console | None = None) -> None:
    """Print all of a plan."""
    console = console or Console(soft_wrap=True)
    for label, value in _head(plan, name):
        console.print(f"{label:<12}{value}", highlight=False, markup=False, soft_wrap=True)
    console.print(_bytes(plan))
    console.print(_work(plan))
    if plan.collectives is not None:
        console.print(_exchanged(plan))
    if plan.run is not None:
        console.print(_run(plan))
    for label, value in _end(plan):
        console.print(f"{label:<12}{value}", highlight=False, markup=False, soft_wrap=True)


def summary(plan: Plan) -> str:
    """The bytes of a device by group, as plain text for an error.

    >>> summary.__name__
    'summary'
    """
    lines = [f"  {group:<14}{amount(value):>12}" for group, value in plan.predicted.groups.items()]
    lines.append(f"  {'in all':<14}{amount(plan.predicted.total_bytes):>12}")
    return "\n".join(lines)


def _head(plan: Plan, name: str) -> list[tuple[str, str]]:
    slices = f" x {plan.topology.slices} slices" if plan.topology.slices > 1 else ""
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    across = "".join(f", {axis} {ways} ways across slices" for axis, ways in plan.dcn.items())
    micro = f", in {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    return [
        ("plan", name),
        ("devices", f"{plan.topology}{slices}: {plan.topology.chips:,} chips, {plan.topology.devices:,} devices"),
        ("mesh", axes + across),
        ("model", f"{plan.parameters:,} parameters, {number(plan.flops_per_token)} FLOPs a token"),
        ("batch", f"{plan.rows:,} rows, {plan.tokens:,} tokens{micro}"),
    ]


def _bytes(plan: Plan) -> Table:
    table = Table(title="bytes of a device", title_justify="left")
    table.add_column("group")
    table.add_column("predicted", justify="right")
    table.add_column("compiled", justify="right")
    for group, value in plan.predicted.groups.items():
        table.add_row(group, amount(value), "")
    compiled = plan.compiled
    table.add_section()
    for label, field in (
        ("arguments", "argument_bytes"),
        ("outputs", "output_bytes"),
        ("temporaries in all", "temp_bytes"),
    ):
        table.add_row(label, amount(getattr(plan.predicted, field)), amount(getattr(compiled, field, None)))
    table.add_row("in all", amount(plan.predicted.total_bytes), amount(compiled.total_bytes if compiled else None))
    table.add_row("a device has", amount(plan.hbm_bytes), amount(plan.hbm_bytes))
    return table


def _work(plan: Plan) -> Table:
    table = Table(title="a step of a device", title_justify="left")
    table.add_column("")
    table.add_column("predicted", justify="right")
    table.add_column("compiled, loops once", justify="right")
    compiled: Any = plan.compiled
    table.add_row("FLOPs", number(plan.predicted.flops), number(getattr(compiled, "flops", None)))
    table.add_row(
        "bytes accessed", amount(plan.predicted.bytes_accessed), amount(getattr(compiled, "bytes_accessed", None))
    )
    table.add_row("seconds", duration(plan.roofline.seconds), duration(getattr(compiled, "seconds", None)))
    for part in ("compute", "memory", "network", "slices"):
        table.add_row(f"  {part}", duration(getattr(plan.roofline, part)), "")
    if plan.roofline.bound:
        table.add_row("  bound by", plan.roofline.bound, "")
    return table


def _exchanged(plan: Plan) -> Table:
    table = Table(title="what a device exchanges in a step", title_justify="left")
    for column in ("kind", "over", "times", "bytes", "sends"):
        table.add_column(column, justify="left" if column in ("kind", "over") else "right")
    for each in plan.collectives or ():
        kind = f"{each.kind} (a gather)" if each.gathers else each.kind
        over = each.axes or f"{each.group} devices"
        table.add_row(kind, over, number(each.count), amount(each.bytes), amount(each.wire_bytes))
    if not plan.collectives:
        table.add_row("nothing", "", "", "", "")
    return table


def _run(plan: Plan) -> Table:
    run = plan.run
    assert run is not None
    table = Table(title=f"{number(run.tokens)} tokens", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("steps", f"{run.steps:,}")
    table.add_row("at best, by the roofline", NA if run.days is None else f"{run.days:.2f} days")
    table.add_row("at half of the peak", NA if run.days_at_half is None else f"{run.days_at_half:.2f} days")
    table.add_row("chip hours, at half of the peak", NA if run.chip_hours is None else f"{run.chip_hours:,.0f}")
    table.add_row("cost, at half of the peak", NA if run.cost is None else f"{run.cost:,.0f}")
    return table


def _end(plan: Plan) -> list[tuple[str, str]]:
    compiled = plan.compiled
    said = "not compiled" if compiled is None else f"compiled in {compiled.compile_seconds:.0f} s"
    lines = [("compiler", plan.failure or said)]
    lines.append(("fits", {True: "yes", False: "no", None: NA}[plan.fits]))
    lines += [("note", note) for note in plan.notes]
    return lines + [("try" if place else "why", text) for place, text in enumerate(plan.advice)]


def show_search(found: Found, *, name: str, console: Console | None = None) -> None:
    """Print a ranking."""
    console = console or Console(soft_wrap=True)
    console.print(f"{'search':<12}{name} on {found.topology}", highlight=False, markup=False)
    table = Table(title="by predicted time of a token, those that fit first", title_justify="left")
    for column in ("", "mesh", "remat", "rows", "a device needs", "step", "tokens/s", "fits"):
        table.add_column(column, justify="left" if column in ("mesh", "remat", "fits") else "right")
    for place, each in enumerate(found.ranking, 1):
        axes = ", ".join(f"{axis}={size}" for axis, size in each.axes.items())
        rate = None if not each.seconds else each.tokens / each.seconds
        table.add_row(
            str(place), axes, each.remat or NA, f"{each.rows:,}", amount(each.total_bytes), duration(each.seconds),
            number(rate), {True: "yes", False: "no", None: NA}[each.fits],
        )  # fmt: skip
    console.print(table)
    for note in found.notes:
        console.print(f"{'note':<12}{note}", highlight=False, markup=False, soft_wrap=True)
    if found.best is not None:
        console.print(f"{'use':<12}{' '.join(found.best.overrides)}", highlight=False, markup=False, soft_wrap=True)
