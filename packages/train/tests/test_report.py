"""The page of one run and of several, read as a browser would: without a network."""

import json
import re

import pytest
from report_pages import Page, make

from styrax.train.charts import Line as Curve
from styrax.train.charts import bar, chart, limits
from styrax.train.report import rows, summarise, write_comparison, write_report
from styrax.train.rundir import RunDir, write_atomic


def test_the_page_of_a_run_needs_nothing_else(tmp_path):
    run = make(tmp_path / "one & only")
    summary = write_report(run, changed="[train]", next_commands=["styrax report x"])
    text = run.report.read_text()
    page = Page(text)
    assert page.addresses == [] and not {"script", "link", "img", "iframe"} & set(page.names)
    assert "url(" not in text and "@import" not in text
    assert "one & only" in page.text and "<b>late</b>" in page.text and "early" in page.text
    for title in ("training loss", "held-out loss", "learning rate", "gradient norm", "throughput"):
        assert title in page.text
    assert "prefers-color-scheme: dark" in text
    assert "compiling 3s (30.0%)" in page.text and "in all 10s" in page.text
    assert summary["seconds"]["step"] == 6.0 and summary["host_bytes"] == 2**31
    assert run.picture.read_bytes().startswith(b"\x89PNG")


def test_numbers_say_both_conventions_and_no_guess(tmp_path):
    run = make(tmp_path / "run")
    shown = dict(rows(summarise(run)))
    assert shown["FLOPs a token, causal attention"] == "6e+09 (all pairs: 7e+09)"
    assert shown["model FLOPs utilisation, causal attention"] == "n/a (no peak known of toy <chip>)"
    assert shown["a step, median"] == "500.0 ms" and shown["training steps' share of the time"] == "60.0%"
    run.add_event("start", peak_flops=1e15, device_kind="known", flops_per_token={"causal": 1.0, "full": 2.0})
    run.add_event("end", mfu_causal=0.4, mfu_full=0.5)
    shown = dict(rows(summarise(run)))
    assert shown["model FLOPs utilisation, causal attention"] == "40.0% (all pairs: 50.0%) of 1,000 TFLOP/s a device"


def test_equal_runs_differ_in_nothing(tmp_path):
    runs = [make(tmp_path / name) for name in "ab"]
    out = tmp_path / "page.html"
    write_comparison(runs, out, configs=[{"a": 1}, {"a": 1}], summaries=[summarise(run) for run in runs])
    assert "All keys are equal." in Page(out.read_text()).text


def test_named_held_out_sets_have_rows_and_curves(tmp_path):
    run = make(tmp_path / "run")
    line = {"step": 9, "loss": 1.0, "held_out_loss/code": 1.25, "held_out_bits_per_byte/code": 0.5}
    run.metrics.write_text("".join(json.dumps({**line, "step": step}) + "\n" for step in (1, 2)))
    write_report(run)
    assert "held-out loss, code" in Page(run.report.read_text()).text
    shown = dict(rows(summarise(run)))
    assert shown["held-out loss, code"] == "1.2500 nats per token"
    assert shown["held-out text, code"] == "0.5000 bits per byte" and "held-out loss" not in shown


def test_a_curve_keeps_its_spike_and_the_axis_its_scale():
    points = [(step, 1.0 + 0.001 * (step % 7)) for step in range(5000)]
    points[2500] = (2500, 1e9)
    low, high = limits([y for _, y in points])
    assert low < 1.0 and 1.006 <= high < 2
    drawn = chart("loss", "", [Curve("run", points, "#123456")])
    path = next(re.finditer(r'points="([^"]+)"', drawn)).group(1).split()
    assert len(path) <= 302
    assert min(float(point.split(",")[1]) for point in path) >= 0
    assert chart("loss", "", [Curve("run", [(1, float("nan"))], "#123456")]) == ""


def test_a_bar_is_its_whole():
    widths = re.findall(r"width:([\d.]+)%", bar({"step": 3.0, "lost": 1.0, "down": 0.0}, {"step": "a", "lost": "b"}))
    assert [float(width) for width in widths] == [75.0, 25.0]
    assert bar({"step": 0.0}, {"step": "a"}) == ""


@pytest.mark.parametrize("events", ["", '{"event": "goodput", "time": 1.0, "nanoseconds": 3}\n'])
def test_a_run_that_left_no_account_has_none(tmp_path, events):
    run = RunDir(tmp_path / "run")
    run.create()
    write_atomic(run.config, "")
    run.events.write_text(events)
    write_report(run)
    assert summarise(run)["seconds"] is None
    assert "Where the time went n/a" in Page(run.report.read_text()).text
