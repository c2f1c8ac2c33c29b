"""Jinja as Hugging Face sets it up for chat templates: sandboxed, with `{% generation %}` blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from styrax.core.errors import UserError

OLDEST = (3, 1, 6)


class Program:
    """A template, compiled.

    Args:
        source: Its text.
        name: What errors call it.
        now: What `strftime_now` tells.
        replace: Applied to every stretch of text and every string constant in the template.
        marks: Written before and after what stands in a `{% generation %}` block.

    Attributes:
        generation: Whether it has `{% generation %}` blocks.
        names: All attributes and string constants that it mentions.
        dated: Whether it asks for the time.

    Raises:
        UserError: The template is no Jinja, or Jinja is missing or too old.
    """

    def __init__(
        self,
        source: str,
        name: str,
        now: datetime,
        replace: Callable[[str], str] | None = None,
        marks: tuple[str, str] = ("", ""),
    ):
        jinja2 = need_jinja()
        from jinja2 import nodes

        environment = _environment(now, marks)
        self._name = name
        try:
            tree = environment.parse(source)
            self.dated = any(node.name == "strftime_now" for node in tree.find_all(nodes.Name))
            constants = [node for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
            self.names = frozenset(
                [*(node.value for node in constants), *(g.attr for g in tree.find_all(nodes.Getattr))]
            )
            self.generation = any(
                isinstance(block.call.node, nodes.ExtensionAttribute)
                for block in tree.find_all(nodes.CallBlock)
                if isinstance(block.call, nodes.Call)
            )
            if replace is not None:
                for node in constants:
                    node.value = replace(node.value)
                for node in tree.find_all(nodes.TemplateData):
                    node.data = replace(node.data)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{name}, line {error.lineno}: {error.message}; expected a chat template in Jinja, as models come with"
            ) from None

    def render(self, context: Mapping[str, Any]) -> str:
        """Render.

        Raises:
            UserError: The template refuses what it is given, fails, or tries to leave the sandbox.
        """
        try:
            return self._template.render(context)
        except Exception as error:  # whatever the template's code runs into
            refuses = type(error).__name__ == "TemplateError"
            said = f"refuses the conversation: {error}" if refuses else f"fails on it: {type(error).__name__}: {error}"
            raise RenderError(f"{self._name} {said}") from error


class RenderError(UserError):
    """A template that refuses or fails on what it is given."""


def need_jinja() -> Any:
    """Import `jinja2`.

    Raises:
        UserError: It is missing, or so old that templates can leave its sandbox.
    """
    try:
        import jinja2
    except ImportError:
        raise UserError('chat templates need jinja2: pip install "styrax-data[chat]"') from None
    from importlib.metadata import version

    got = version("jinja2")
    if tuple(int(part) for part in got.split(".")[:3] if part.isdigit()) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UserError(
            f"jinja2 {got} has known holes in its sandbox, and a chat template is a program that others wrote; "
            f'expected {needed} or newer: pip install -U "styrax-data[chat]"'
        )
    return jinja2


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as a template's `tojson` does: characters stay as they are, nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment(now: datetime, marks: tuple[str, str]) -> Any:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_blocks(), loopcontrols]
    )
    environment.extend(generation_marks=marks)
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment


@cache
def _generation_blocks() -> Any:
    """Make the extension; a function, since its base must be imported first."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            begin, end = self.environment.generation_marks  # pyright: ignore[reportAttributeAccessIssue]
            return begin + caller() + end

    return GenerationBlocks
