"""Configurations that ship with the package, found by name."""

from importlib.resources import files

from styrax.core.config import Recipe

QUICKSTART = Recipe(
    name="quickstart",
    path=files(__name__).joinpath("quickstart.toml"),
    doc="A small decoder on the source of Python's standard library; about two minutes on two cores.",
)
