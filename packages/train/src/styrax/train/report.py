"""The report of one run or of several: one self-contained HTML file, and its numbers as JSON."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from styrax.train.charts import PARTS, Line, bar, chart, colour
from styrax.train.display import clock
from styrax.train.goodput import LABELS, total
from styrax.train.rundir import RunDir, write_atomic

NA = "n/a"

CURVES = (
    ("training loss", "nats per token", "loss"),
    ("held-out loss", "nats per token", "held_out_loss"),
    ("held-out text", "bits per byte", "held_out_bits_per_byte"),
    ("learning rate", "", "learning_rate"),
    ("gradient norm", "before clipping", "grad_norm"),
    ("throughput", "tokens per second", "tokens_per_second"),
)
"""Title, unit and key of each curve; keys that end in ``/NAME`` have a curve of their own."""

SPEEDS = (
    "tokens_per_second", "rows_per_second", "step_seconds", "step_seconds_p90", "mfu_causal", "mfu_full",
    "device_bytes", "host_bytes",
)  # fmt: skip


def summarise(run: RunDir) -> dict[str, Any]:
    """The numbers of a run, read from its files; what is not known, or is no finite number, is None."""
    metrics, events = run.read_metrics(), run.read_events()
    last = metrics[-1] if metrics else {}
    saved, fast = run.read_summary(), last_speeds(events)
    held_out = {}
    for line in metrics:
        held_out |= {key: value for key, value in line.items() if key.startswith("held_out_")}
    starts = [e for e in events if e["event"] == "start"]
    facts = starts[-1] if starts else {}
    spent = total(events)[0]
    flops = facts.get("flops_per_token")
    summary = {
        "run": str(run.path),
        "step": last.get("step"),
        "loss": last.get("loss"),
        "held_out_loss": None,
        "held_out_bits_per_byte": None,
        **held_out,
        "gzip_bits_per_byte": saved.get("gzip_bits_per_byte"),
        "bigram_bits_per_byte": saved.get("bigram_bits_per_byte"),
        "parameters": saved.get("parameters"),
        "tokens_seen": saved.get("tokens_seen"),
        **{key: fast.get(key) for key in SPEEDS},
        "flops_per_token": flops if isinstance(flops, dict) else None,
        "device_kind": facts.get("device_kind"),
        "devices": facts.get("devices"),
        "peak_flops": facts.get("peak_flops"),
        "compile_seconds": compile_seconds(events),
        "starts": len(starts),
        "rollbacks": sum(e["event"] == "rollback" for e in events),
        "seconds": {part: ns / 1e9 for part, ns in spent.items()} if sum(spent.values()) else None,
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}


def last_speeds(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest of each number of :data:`SPEEDS`, of a start that ended, or of one that was killed.

    >>> last_speeds([{"event": "throughput", "tokens_per_second": 5.0}, {"event": "end", "host_bytes": 7}])
    {'tokens_per_second': 5.0, 'host_bytes': 7}
    """
    found: dict[str, Any] = {}
    for event in events:
        if event["event"] in ("throughput", "end"):
            found |= {key: event[key] for key in SPEEDS if event.get(key) is not None}
    return found


def compile_seconds(events: Sequence[Mapping[str, Any]]) -> float | None:
    """What the newest start that compiled spent on it; a start of a finished run compiles nothing.

    >>> compile_seconds([{"event": "start"}, {"event": "compile", "seconds": 2.5}, {"event": "start"}])
    2.5
    """
    total, started = None, True
    for event in events:
        if event["event"] == "start":
            started = True
        elif event["event"] == "compile" and isinstance(event.get("seconds"), (int, float)):
            total, started = event["seconds"] + (0 if started or total is None else total), False
    return total


def draw(run: RunDir, summary: Mapping[str, Any]) -> bytes:
    """The loss curve as PNG: training loss in nats a token, held-out bits per byte beside the baselines."""
    from matplotlib.figure import Figure

    metrics = run.read_metrics()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    losses = [(m["step"], m["loss"]) for m in metrics if isinstance(m.get("loss"), (int, float))]
    left.plot([step for step, _ in losses], [loss for _, loss in losses], linewidth=0.8, color="#2a6f97")
    left.set(xlabel="step", ylabel="nats per token", title="training loss")
    points = [m for m in metrics if m.get("held_out_bits_per_byte") is not None]
    if points:
        right.plot(
            [m["step"] for m in points],
            [m["held_out_bits_per_byte"] for m in points],
            "o-",
            color="#2a6f97",
            label="run",
        )
    for name, style in (("gzip", ":"), ("bigram", "--")):
        value = summary.get(f"{name}_bits_per_byte")
        if value is not None:
            right.axhline(value, linestyle=style, color="#777777", label="gzip -9" if name == "gzip" else name)
    right.set(xlabel="step", ylabel="bits per byte", title="held-out text")
    if right.get_legend_handles_labels()[0]:
        right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_report(
    run: RunDir,
    *,
    changed: str = "",
    next_commands: Sequence[str] = (),
    summary: Mapping[str, Any] | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Write ``loss.png`` and ``report.html`` of a run, or the page alone to another file.

    Args:
        run: The run.
        summary: Of :func:`summarise`, where it is known already.
        changed: TOML of what differs from the defaults.
        next_commands: Command lines to try next.
        out: The page; None for the run's ``report.html``.

    Returns:
        The numbers of :func:`summarise`.
    """
    summary = dict(summary) if summary is not None else summarise(run)
    if out is None:
        write_atomic(run.picture, draw(run, summary))
    differences = f"<h2>Configuration that differs from the defaults</h2><pre>{html.escape(changed or 'nothing')}</pre>"
    lines = html.escape("\n".join(next_commands))
    write_atomic(
        out or run.report,
        page(
            [run],
            [summary],
            differences=differences,
            commands=f"<h2>Try next</h2><pre>{lines}</pre>" if next_commands else "",
            versions="<h2>Versions of the last start</h2>" + _table([], run.last_start().items()),
        ),
    )
    return summary


def write_comparison(
    runs: Sequence[RunDir], out: Path, *, configs: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]
) -> None:
    """Write a page with several runs over one another.

    Args:
        runs: The runs.
        out: The file.
        configs: The configuration of each, as dotted keys.
        summaries: Of :func:`summarise`.
    """
    names = labels(runs)
    keys = [key for key in dict.fromkeys(key for config in configs for key in config) if _differ(key, configs)]
    starts = [run.last_start() for run in runs]
    several = [key for key in dict.fromkeys(key for start in starts for key in start) if _differ(key, starts)]
    shown = [[key, *(_plain(config.get(key)) for config in configs)] for key in keys]
    differences = "<h2>Configuration that differs</h2>" + (
        _table(["", *names], shown) if keys else "<p>All keys are equal.</p>"
    )
    versions = "<h2>Versions that differ</h2>" + (
        _table(["", *names], [[key, *(_plain(start.get(key)) for start in starts)] for key in several])
        if several
        else "<p>All are equal.</p>"
    )
    write_atomic(out, page(runs, summaries, differences=differences, commands="", versions=versions))


def page(
    runs: Sequence[RunDir], summaries: Sequence[Mapping[str, Any]], *, differences: str, commands: str, versions: str
) -> str:
    """Put a page together; the last arguments are HTML."""
    names = labels(runs)
    numbers = [[label, *(dict(rows(each)).get(label, NA) for each in summaries)] for label in every_label(summaries)]
    keys = "".join(
        f'<span class="of"><span class="key" style="background:{colour(i)}"></span>{html.escape(name)}</span> '
        for i, name in enumerate(names)
    )
    template = Template(files("styrax.train").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=html.escape(", ".join(names)),
        legend=f'<p class="legend">{keys}</p>' if len(runs) > 1 else "",
        numbers=_rows(["", *names] if len(runs) > 1 else [], numbers),
        curves=curves(runs, names, summaries) or f"<p>{NA}</p>",
        goodput=goodput(names, summaries),
        samples="<h2>Samples</h2>" + "".join(samples(run, name, len(runs) > 1) for run, name in zip(runs, names)),
        differences=differences,
        commands=commands,
        versions=versions,
    )


def labels(runs: Sequence[RunDir]) -> list[str]:
    """Short names that tell runs apart: that of the folder, or its path where several have the same.

    >>> labels([RunDir("a/x"), RunDir("b/x"), RunDir("b/y")])
    ['a/x', 'b/x', 'y']
    """
    names = [run.path.absolute().name for run in runs]
    return [str(run.path) if names.count(name) > 1 else name for run, name in zip(runs, names)]


def curves(runs: Sequence[RunDir], names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> str:
    """The curves of all runs, one chart for each quantity that any of them has."""
    records = [
        [*run.read_metrics(), *(e for e in run.read_events() if e["event"] in ("throughput", "end"))] for run in runs
    ]
    drawn = []
    for title, unit, key in CURVES:
        found = [k for lines in records for line in lines for k in line if k == key or k.startswith(f"{key}/")]
        for each in dict.fromkeys(found):
            name = each.partition("/")[2]
            lines = [Line(n, _points(r, each), colour(i)) for i, (n, r) in enumerate(zip(names, records))]
            if key == "held_out_bits_per_byte" and len(runs) == 1:
                for other, level in (("gzip -9", "gzip"), ("bigram model", "bigram")):
                    value = summaries[0].get(f"{level}_bits_per_byte")
                    lines += [] if value is None else [Line(other, [(1, value)], "#8d99a6", dashed=True)]
                unit = "bits per byte; dashed: gzip -9 and a bigram model"
            drawn.append(chart(f"{title}, {name}" if name else title, unit, lines))
    return "".join(drawn)


def goodput(names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each run, and what its parts are."""
    known = [(name, each["seconds"]) for name, each in zip(names, summaries) if each.get("seconds")]
    if not known:
        return f"<p>{NA}</p>"
    used = [part for part in PARTS if any(seconds.get(part) for _, seconds in known)]
    keys = "".join(
        f'<span class="of"><span class="key" style="background:{PARTS[part]}"></span>{LABELS[part]}</span> '
        for part in used
    )
    bars = "".join(
        (f"<h3>{html.escape(name)}</h3>" if len(names) > 1 else "") + bar(seconds, LABELS) for name, seconds in known
    )
    table = [
        [LABELS[part], *(f"{clock(s.get(part, 0))} ({s.get(part, 0) / sum(s.values()):.1%})" for _, s in known)]
        for part in used
    ]
    table.append(["in all", *(clock(sum(s.values())) for _, s in known)])
    note = (
        '<p class="note">The parts add up to the wall time of all starts and the time between them. '
        "Time of the device is found where the host waits for it, mostly in the steps.</p>"
    )
    head = ["", *(name for name, _ in known)] if len(names) > 1 else []
    return f'{bars}<p class="legend">{keys}</p>{_table(head, table)}{note}'


def samples(run: RunDir, name: str, several: bool) -> str:
    """The newest sample of a run, and those before it folded away."""
    found = sorted(run.read_samples().items(), reverse=True)
    head = f"<h3>{html.escape(name)}</h3>" if several else ""
    if not found:
        return f"{head}<pre>{NA}</pre>"
    (step, text), *older = found
    out = f'{head}<p class="note">step {step:,}</p><pre>{html.escape(text)}</pre>'
    if older:
        shown = "".join(f'<p class="note">step {s:,}</p><pre>{html.escape(t)}</pre>' for s, t in older)
        out += f"<details><summary>{len(older)} before it</summary>{shown}</details>"
    return out


def every_label(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The labels of all summaries, in the order of :func:`rows`."""
    return list(dict.fromkeys(label for each in summaries for label, _ in rows(each)))


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as (label, value) for people; unknown is ``n/a``."""

    def show(key: str, form: str, factor: float = 1) -> str:
        value = summary.get(key)
        if value is None and key == "loss" and summary.get("step"):
            return "not finite"  # every logged step has one
        return NA if value is None else form.format(value * factor if factor != 1 else value)

    sets = [
        (f"held-out {'loss' if kind == 'loss' else 'text'}, {name}", show(key, form))
        for key in summary
        for kind, form in (("loss", "{:.4f} nats per token"), ("bits_per_byte", "{:.4f} bits per byte"))
        for start, _, name in [key.partition("/")]
        if name and start == f"held_out_{kind}"
    ]
    flops, seconds = summary.get("flops_per_token") or {}, summary.get("seconds") or {}
    arithmetic = f"{flops['causal']:.3g} (all pairs: {flops['full']:.3g})" if len(flops) == 2 else NA
    used = NA
    if summary.get("mfu_causal") is not None and summary.get("mfu_full") is not None:
        peak = f"{summary['peak_flops'] / 1e12:,.0f} TFLOP/s" if summary.get("peak_flops") else NA
        used = f"{summary['mfu_causal']:.1%} (all pairs: {summary['mfu_full']:.1%}) of {peak} a device"
    elif summary.get("device_kind"):
        used = f"{NA} (no peak known of {summary['device_kind']})" if not summary.get("peak_flops") else NA
    whole = sum(seconds.values())
    return [
        ("steps", show("step", "{:,}")),
        ("parameters", show("parameters", "{:,}")),
        ("tokens seen", show("tokens_seen", "{:,}")),
        ("training loss, last step", show("loss", "{:.4f} nats per token")),
        *([] if sets and summary.get("held_out_loss") is None else [
            ("held-out loss", show("held_out_loss", "{:.4f} nats per token")),
            ("held-out text, this run", show("held_out_bits_per_byte", "{:.4f} bits per byte")),
        ]),
        *sets,
        ("held-out text, bigram model of the tokens seen", show("bigram_bits_per_byte", "{:.4f} bits per byte")),
        ("held-out text, gzip -9", show("gzip_bits_per_byte", "{:.4f} bits per byte")),
        ("throughput", show("tokens_per_second", "{:,.0f} tokens per second")),
        ("rows a second", show("rows_per_second", "{:,.1f}")),
        ("a step, median", show("step_seconds", "{:,.1f} ms", 1000)),
        ("a step, nine in ten within", show("step_seconds_p90", "{:,.1f} ms", 1000)),
        ("FLOPs a token, causal attention", arithmetic),
        ("model FLOPs utilisation, causal attention", used),
        ("device memory, most in use", show("device_bytes", "{:,.2f} GiB", 2**-30)),
        ("host memory, most in use", show("host_bytes", "{:,.2f} GiB", 2**-30)),
        ("training steps' share of the time", f"{seconds['step'] / whole:.1%}" if whole else NA),
        ("compiling, last time", clock(summary.get("compile_seconds") or 0)),
        ("starts", show("starts", "{}")),
        ("rollbacks", show("rollbacks", "{}")),
    ]  # fmt: skip


def _points(records: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    found = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float)) and "step" in r]
    return sorted(found, key=lambda point: point[0])


def _differ(key: str, each: Sequence[Mapping[str, Any]]) -> bool:
    return any(one.get(key) != each[0].get(key) for one in each)


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _rows(head: Sequence[str], body: Any) -> str:
    first = "".join(f"<th>{html.escape(str(cell))}</th>" for cell in head)
    rest = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in body)
    return (f"<tr>{first}</tr>" if first else "") + rest


def _table(head: Sequence[str], body: Any) -> str:
    return f'<div class="wide"><table>{_rows(head, body)}</table></div>'
