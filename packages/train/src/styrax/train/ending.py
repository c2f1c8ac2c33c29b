"""What follows the last step: the sample, the comparison with baselines, the report, and what to try next."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from styrax.core import UserError
from styrax.core.config import Resolved
from styrax.train.baselines import Bigram, counted_pairs, gzip_bits_per_byte
from styrax.train.compose import prompt_ids
from styrax.train.display import EventLog
from styrax.train.interrupts import ENDED, Interrupts
from styrax.train.loop import FitResult, count_parameters
from styrax.train.report import rows, write_report
from styrax.train.rundir import RunDir, write_atomic


def finish(
    console: Console, folder: RunDir, resolved: Resolved, dataset: Any, result: FitResult, interrupts: Interrupts,
    log: EventLog,
) -> dict[str, Any]:  # fmt: skip
    """Take the sample, compare with the baselines, write the report, and say what to try next."""
    config = resolved.sections["train"]
    summary: dict[str, Any] = {"parameters": count_parameters(result.state.params)}
    if config.baselines and dataset.tokenizer is not None:
        summary |= baselines(dataset, taken(result.step, result.skipped), interrupts)
    write_atomic(folder.summary, json.dumps(summary, indent=1, allow_nan=False))
    if config.sample_prompt:
        console.rule("sample")
        with log.during("sample"):
            text = take_sample(result.model, dataset.tokenizer, config, console, interrupts)
        folder.save_sample(result.step, text)
    log.account()
    commands = [
        *(
            []
            if dataset.tokenizer is None
            else [shlex.join(["styrax", "generate", str(folder.path), "--prompt", "class "])]
        ),
        shlex.join(["styrax", "train", "--run", str(folder.path), f"train.steps={2 * config.steps}"]),
        "styrax explain train",
    ]
    summary = write_report(folder, changed=resolved.to_toml(all=False), next_commands=commands)
    console.rule("result")
    for label, value in rows(summary):
        console.print(f"{label:<50}{value}", highlight=False, markup=False)
    console.print(f"{'report':<50}{folder.report}", highlight=False, markup=False, soft_wrap=True)
    console.rule("try next")
    for command in commands:
        console.print(command, highlight=False, markup=False, soft_wrap=True)
    return summary


def check_ending(summary: Mapping[str, Any]) -> None:
    """Refuse to call a run a success whose last loss is not a finite number.

    Raises:
        UserError: It is not; the summary is that of a report.
    """
    if summary["step"] and summary["loss"] is None:
        raise UserError(
            f"the run has done its {summary['step']:,} steps, but the last loss is not finite; metrics.jsonl tells "
            "since when. Lower the learning rate, lengthen the warm-up or clip harder, in a new run with another --run"
        )


def taken(steps: int, skipped: Sequence[tuple[int, int]]) -> Iterator[int]:
    """The batches, by their order in the data, that made the state of a step.

    >>> list(taken(4, [(1, 3)]))
    [0, 3, 4, 5]
    """
    left_out = {batch for first, last in skipped for batch in range(first, last)}
    yield from itertools.islice((batch for batch in itertools.count() if batch not in left_out), steps)


def baselines(dataset: Any, steps: Iterable[int], interrupts: Interrupts) -> dict[str, Any]:
    """Bits per byte of gzip -9, and of a bigram model of just the tokens that the run has seen."""
    bigram, seen = Bigram(dataset.vocab_size), 0
    for step in steps:
        interrupts.check(ENDED)
        tokens, targets = counted_pairs(dataset.batch(step))
        bigram.update(tokens, targets)
        seen += len(tokens)
    return {
        "tokens_seen": seen,
        "gzip_bits_per_byte": gzip_bits_per_byte(dataset.held_out_text()),
        "bigram_bits_per_byte": bigram.bits_per_byte(dataset.held_out(), dataset.token_bytes),
    }


def continued(model: Any, tokenizer: Any, config: Any) -> Iterator[str]:
    """The prompt, and then what the model makes of it, piece by piece."""
    ids = model.generate(
        prompt_ids(tokenizer, config.sample_prompt),
        max_tokens=config.sample_tokens,
        temperature=config.sample_temperature,
        seed=config.seed,
        stop_ids=(tokenizer.eos_id,),
    )
    return itertools.chain([config.sample_prompt], tokenizer.decode_stream(ids))


def take_sample(model: Any, tokenizer: Any, config: Any, echo: Console, interrupts: Interrupts) -> str:
    """Continue the prompt, printing as it comes."""
    pieces = []
    for piece in continued(model, tokenizer, config):
        interrupts.check(ENDED)
        pieces.append(piece)
        echo.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    echo.print()
    return "".join(pieces)


def sample_on_the_way(folder: RunDir, result: FitResult, tokenizer: Any, config: Any, interrupts: Interrupts) -> None:
    """Keep what the model of now makes of the prompt; a signal ends it at once, and the sample is left out."""
    pieces = []
    for piece in continued(result.model, tokenizer, config):
        if interrupts.received is not None:
            return
        pieces.append(piece)
    folder.save_sample(result.step, "".join(pieces))
