"""The report of a run: one self-contained HTML file, and its numbers as JSON."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from styrax.train.display import clock
from styrax.train.rundir import RunDir, write_atomic

NA = "n/a"


def summarise(run: RunDir) -> dict[str, Any]:
    """The numbers of a run, read from its files; what is not known, or is no finite number, is None."""
    metrics, events = run.read_metrics(), run.read_events()
    held_out = [m for m in metrics if "held_out_loss" in m]
    last = metrics[-1] if metrics else {}
    saved = run.read_summary()
    rates = [e["tokens_per_second"] for e in events if e["event"] == "end" and e.get("tokens_per_second")]
    summary = {
        "run": str(run.path),
        "step": last.get("step"),
        "loss": last.get("loss"),
        "held_out_loss": held_out[-1]["held_out_loss"] if held_out else None,
        "held_out_bits_per_byte": held_out[-1].get("held_out_bits_per_byte") if held_out else None,
        "gzip_bits_per_byte": saved.get("gzip_bits_per_byte"),
        "bigram_bits_per_byte": saved.get("bigram_bits_per_byte"),
        "parameters": saved.get("parameters"),
        "tokens_seen": saved.get("tokens_seen"),
        "tokens_per_second": rates[-1] if rates else None,
        "compile_seconds": compile_seconds(events),
        "starts": sum(e["event"] == "start" for e in events),
    }
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}


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
    run: RunDir, *, changed: str = "", next_commands: Sequence[str] = (), summary: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write ``loss.png`` and ``report.html``.

    Args:
        run: The run.
        summary: Of :func:`summarise`, where it is known already.
        changed: TOML of what differs from the defaults.
        next_commands: Command lines to try next.

    Returns:
        The numbers of :func:`summarise`.
    """
    summary = dict(summary) if summary is not None else summarise(run)
    picture = draw(run, summary)
    write_atomic(run.picture, picture)
    samples = sorted(run.samples.glob("*.txt")) if run.samples.is_dir() else []
    page = Template(files("styrax.train").joinpath("report.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(run.path.name),
        rows="".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in rows(summary)),
        picture=base64.b64encode(picture).decode(),
        sample=html.escape(samples[-1].read_text(encoding="utf-8", errors="replace")) if samples else NA,
        changed=html.escape(changed or "nothing"),
        commands=html.escape("\n".join(next_commands)),
        versions="".join(
            f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>"
            for k, v in run.last_start().items()
        ),
    )
    write_atomic(run.report, page)
    return summary


def rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as (label, value) for people; unknown is ``n/a``."""

    def show(key: str, form: str) -> str:
        value = summary.get(key)
        if value is None and key == "loss" and summary.get("step"):
            return "not finite"  # every logged step has one
        return NA if value is None else form.format(value)

    return [
        ("steps", show("step", "{:,}")),
        ("parameters", show("parameters", "{:,}")),
        ("tokens seen", show("tokens_seen", "{:,}")),
        ("training loss, last step", show("loss", "{:.4f} nats per token")),
        ("held-out loss", show("held_out_loss", "{:.4f} nats per token")),
        ("held-out text, this run", show("held_out_bits_per_byte", "{:.4f} bits per byte")),
        (
            "held-out text, bigram model of the tokens seen",
            show("bigram_bits_per_byte", "{:.4f} bits per byte"),
        ),
        ("held-out text, gzip -9", show("gzip_bits_per_byte", "{:.4f} bits per byte")),
        ("throughput", show("tokens_per_second", "{:,.0f} tokens per second")),
        ("compiling, last time", clock(summary.get("compile_seconds") or 0)),
        ("starts", show("starts", "{}")),
    ]
