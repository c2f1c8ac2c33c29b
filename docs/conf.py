"""Sphinx: Markdown pages, the Furo theme, and the API from docstrings."""

import os
import re
from importlib.metadata import version as installed

os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "styrax"
author = "The styrax developers"
project_copyright = "The styrax developers"
release = installed("styrax")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"styrax {release}"

myst_enable_extensions = ["attrs_inline", "deflist", "dollarmath"]
myst_heading_anchors = 3

# A package's `__all__` is its API; its names are imported lazily, which autodoc follows like anybody else.
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True

# Docstrings write code as Markdown does, `params`s, formulas as $x$ and displayed formulas by indenting them;
# reStructuredText wants more.
CODE = re.compile(r"(``.+?``|:\w+:`[^`]+`|(?<![`\w])`[^`]+`(?!`))", re.DOTALL)
FORMULA = re.compile(r"(?<![\w$\\])\$([^$\n]+)\$(?![\w$])")
DISPLAYED = re.compile(r"^((?!\.\. )\S.*)\n\n((?: {4,}(?!>>>).*\n?)+)", re.MULTILINE)


def to_restructured_text(text: str) -> str:
    """Translate code and formulas; roles, directives and examples stay as they are."""
    parts = CODE.split(DISPLAYED.sub(r"\1\n\n::\n\n\2", text))
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = FORMULA.sub(lambda found: f":math:`{found[1]}`", part)
        elif part.startswith("`") and not part.startswith("``"):
            after = "\\ " if re.match(r"\w", parts[i + 1]) else ""
            parts[i] = f"`{part}`{after}"
    return "".join(parts)


def process_docstring(app, what, name, obj, options, lines):
    """Give Sphinx the docstring in its own language."""
    lines[:] = to_restructured_text("\n".join(lines)).split("\n")


def skip_field(app, what, name, obj, skip, options):
    """Leave out a named tuple's fields, which its docstring tells of."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    """Connect the above."""
    app.connect("autodoc-process-docstring", process_docstring, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", skip_field)
