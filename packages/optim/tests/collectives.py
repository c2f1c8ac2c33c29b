"""What a compiled program sends between devices."""

import math
import re

NAMES = "all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%\S+ = (.*?) ({NAMES})(?:-start)?\(", re.MULTILINE)
BYTES = {"f32": 4, "bf16": 2, "pred": 1, "s32": 4, "u32": 4}


def collectives(text):
    """Give the name and the bytes of the result, on one device, of every collective in a program's text."""
    found = []
    for kind, name in COLLECTIVE.findall(text):
        sizes = [
            BYTES[d] * math.prod(int(n) for n in dims.split(",") if n)
            for d, dims in re.findall(r"([a-z]+\d+|pred)\[([\d,]*)\]", kind)
        ]
        found.append((name, sum(sizes)))
    return found
