"""``styrax generate``: continue a prompt with a run's newest checkpoint."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from styrax.core import UsageError
from styrax.core.config import NonNegative, NonNegativeFloat, Seed, find_schema, mistakes, read_config
from styrax.train.interrupts import Interrupts
from styrax.train.rundir import RunDir

HELP = "stream text from a run"

CUT = "before the text ended"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N", help="most tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the stream")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and what the model adds to it; a signal ends the text."""
    with Interrupts(command=True) as interrupts, interrupts.stopping(CUT):
        return _generate(args, interrupts)


def _generate(args: argparse.Namespace, interrupts: Interrupts) -> int:
    folder = RunDir(args.run_dir)
    folder.require()
    problems = mistakes(
        {
            "--max-tokens": (NonNegative, args.max_tokens),
            "--temperature": (NonNegativeFloat, args.temperature),
            "--seed": (Seed, args.seed),
        }
    )
    try:
        args.prompt.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no text arrive as lone surrogates
        problems.append(f"--prompt {args.prompt!r} is not UTF-8 text; write it in UTF-8")
    if problems:
        raise UsageError("\n".join(problems))
    resolved = read_config(find_schema("train"), str(folder.config), [])
    tokenizer = resolved.sections["data"].load_tokenizer(folder.tokenizer)

    from styrax.train.compose import load_model, prompt_ids

    model, step = load_model(resolved, folder.checkpoints, tokenizer.vocab_size)
    ids = model.generate(
        prompt_ids(tokenizer, args.prompt),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop_ids=(tokenizer.eos_id,),
    )
    pieces = []
    if not args.json:
        sys.stdout.write(args.prompt)
    for piece in tokenizer.decode_stream(ids):
        interrupts.check(CUT)
        pieces.append(piece)
        if not args.json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    if args.json:
        print(json.dumps({"run": str(folder.path), "step": step, "prompt": args.prompt, "text": "".join(pieces)}))
    else:
        sys.stdout.write("\n")
    return 0
