"""Runs to report on, and a reader of the pages that reports are."""

import json
from html.parser import HTMLParser

from styrax.train.rundir import RunDir, write_atomic


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what is looked for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.names, self.addresses, self.lines = [], [], [], [], 0
        self.feed(text)
        assert self.open == []
        self.text = " ".join(" ".join(self.text).split())

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]
        self.lines += tag == "polyline"
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "br", "hr"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def make(path, *, steps=8, lr=0.1, rate=100.0, **versions):
    run = RunDir(path)
    run.create()
    write_atomic(run.config, f"[train]\nsteps = {steps}\n[optim]\nlearning_rate = {lr}\n")
    write_atomic(run.versions, json.dumps([{"python": "3.12", **versions}]))
    lines = [{"step": s, "loss": 3.0 / s, "learning_rate": lr, "grad_norm": 1.0} for s in range(1, steps + 1)]
    lines[-1] |= {"held_out_loss": 2.0, "held_out_bits_per_byte": 1.5}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.add_event("start", step=0, device_kind="toy <chip>", devices=2, flops_per_token={"causal": 6e9, "full": 7e9})
    for step in (2, 4):
        run.add_event("throughput", step=step, tokens_per_second=rate, step_seconds=0.5)
    run.add_event("end", step=steps, tokens_per_second=rate, host_bytes=2**31)
    run.add_event("goodput", step=steps, nanoseconds={"step": 6 * 10**9, "compile": 3 * 10**9, "data": 10**9})
    run.save_sample(4, "early")
    run.save_sample(steps, "<b>late</b>")
    return run
