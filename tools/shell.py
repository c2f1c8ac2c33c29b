"""Runs the commands of the tools from the workspace's root."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


class CommandError(Exception):
    """A command ended with an error; holds its output."""


def run(program: str, *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    """Run a command and give its output; raise CommandError with the output if it fails."""
    program = os.environ.get("UV", "uv") if program == "uv" else program
    done = subprocess.run([program, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        command = " ".join([Path(program).name, *arguments])
        raise CommandError(f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout
