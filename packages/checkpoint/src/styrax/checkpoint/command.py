"""`styrax checkpoint`: look into checkpoints and carry arrays in and out; a file in `commands` for each action."""

from styrax.core.subcommands import subcommands

HELP = "list, show, verify, compare, delete, export and import checkpoints"

add_arguments, run = subcommands(
    "styrax.checkpoint.commands",
    ("list", "show", "verify", "diff", "cat", "rm", "gc", "doctor", "export", "import"),
    aliases={"ls": "list"},
)
