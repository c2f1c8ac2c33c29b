"""`styrax checkpoint doctor`: one report on a folder of checkpoints."""

from __future__ import annotations

import argparse
from collections import Counter

from styrax.checkpoint.commands.arguments import add_json, print_json, stay_off_devices
from styrax.checkpoint.commands.selection import Progress
from styrax.checkpoint.doctor import examine
from styrax.checkpoint.locate import find

HELP = "say whether the next save will work and what a restart would find; exit code 1 if there is a problem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("directory", metavar="DIR", help="a run, or the folder of its checkpoints")
    parser.add_argument("--deep", action="store_true", help="read everything, and compare digests too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    directory = find(args.directory).directory
    stay_off_devices()
    progress = Progress(None, None, "doctor", "files")
    try:
        findings = examine(directory, deep=args.deep, progress=progress)
    finally:
        progress.close()
    counts = Counter(finding.severity for finding in findings)
    if args.json:
        print_json({"directory": directory, "findings": findings, "problems": counts["problem"]})
        return 1 if counts["problem"] else 0
    print(directory)
    for finding in findings:
        print(f"  {finding.severity:<7}  {finding.subject:<11}  {finding.text}")
        if finding.cure:
            print(f"{'':24}{finding.cure}")
    print(f"{counts['problem']} problems, {counts['note']} notes")
    return 1 if counts["problem"] else 0
