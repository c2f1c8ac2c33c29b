"""`styrax data`: build token stores, look into them, check them; a file in `commands` for each subcommand."""

from styrax.core.subcommands import subcommands

HELP = "build, inspect, measure, compare and verify token stores"

add_arguments, run = subcommands(
    "styrax.data.commands", ("build", "chat", "inspect", "stats", "provenance", "verify", "merge", "diff")
)
