"""`styrax models`: the families that are known, and the models in folders and files."""

from styrax.core.subcommands import subcommands

HELP = "list, show, convert and verify models"

add_arguments, run = subcommands("styrax.models.commands", ("list", "show", "convert", "verify"))
