"""`styrax optim`: what optimizers there are, what they do to a model and weigh; a file in `commands` for each."""

from styrax.core.subcommands import subcommands

HELP = "list the optimizers, show what one does to each parameter, what its state weighs, and check a transfer"

add_arguments, run = subcommands("styrax.optim.commands", ("list", "show", "memory", "coordcheck"))
