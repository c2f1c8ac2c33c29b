"""``styrax mesh``: what is split over which devices."""

from styrax.core.subcommands import subcommands

HELP = "what is split over which devices"

add_arguments, run = subcommands("styrax.train.meshes", ("show",))
