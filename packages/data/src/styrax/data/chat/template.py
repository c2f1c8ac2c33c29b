"""Chat templates: from messages to one text, as Hugging Face renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from styrax.core.errors import UserError, nearest
from styrax.data.chat.sandbox import Program
from styrax.data.hashing import fingerprint

CONFIG, JINJA = "tokenizer_config.json", "chat_template.jinja"

CHATML = """\
{%- if tools %}{{ raise_exception('chatml has no words for tools; give the template of the model') }}{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- raise_exception('chatml has no words for tool calls; give the template of the model') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BUILT_IN = {"chatml": CHATML}

#: Characters of private use that mark the ends of a generation block; others where a text holds these.
PRIVATE = range(0x100000, 0x10FFFE)
PRIVATE_CHAR = re.compile(f"[{chr(PRIVATE.start)}-{chr(PRIVATE.stop)}]")


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: The text.
        spans: First character, and the one after the last, of each `{% generation %}` block.
    """

    text: str
    spans: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """A chat template: a small program, run in a sandbox, that writes messages down as one text.

    It has what Hugging Face gives it: `messages`, `tools`, `documents`, `add_generation_prompt`, loop controls,
    `raise_exception`, `strftime_now`, `tojson` that escapes nothing, and `{% generation %}` blocks around what
    the assistant says.

    Args:
        text: The template, in Jinja.
        name: What errors call it.
        variables: What else it can read, such as `bos_token`.
        now: The time that `strftime_now` tells; by default when this object is made, so that all records have one.

    Raises:
        UserError: It is no Jinja, or Jinja is not installed.

    Example:
        >>> template = ChatTemplate.load("chatml")
        >>> template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True).text
        '<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n'
        >>> rendered = template.render([{"role": "assistant", "content": "Hello"}])
        >>> [rendered.text[start:stop] for start, stop in rendered.spans]
        ['Hello<|im_end|>']
    """

    def __init__(
        self,
        text: str,
        *,
        name: str = "the chat template",
        variables: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ):
        self.text, self.name, self.variables = text, name, dict(variables or {})
        self.now = datetime.now() if now is None else now
        self.program = self.compile()

    def __repr__(self) -> str:
        return f"ChatTemplate({self.name!r})"

    @classmethod
    def load(cls, source: str | Path | ChatTemplate, *, now: datetime | None = None) -> ChatTemplate:
        """Find a template.

        Args:
            source: `chatml`, a file with Jinja, a `tokenizer_config.json` or a model's folder, or the text of a
                template. The special tokens that a `tokenizer_config.json` names are variables of its template, as
                they are of a `chat_template.jinja` beside it.
            now: See `ChatTemplate`.

        Raises:
            UserError: There is no such template.
        """
        if isinstance(source, ChatTemplate):
            return source
        text = str(source)
        if text in BUILT_IN:
            return cls(BUILT_IN[text], name=text, now=now)
        if isinstance(source, str) and ("{{" in text or "{%" in text):
            return cls(text, now=now)
        path = Path(source).expanduser()
        if path.is_dir():
            found = [path / name for name in (JINJA, CONFIG) if (path / name).is_file()]
            if not found:
                raise UserError(f"{path} has no chat template: expected {JINJA} or {CONFIG} in it")
            path = found[0]
        try:
            if path.suffix == ".json":
                config = _read_config(path)
                return cls(_pick(config, path), name=str(path), variables=_tokens(config), now=now)
            beside = path.with_name(CONFIG)
            variables = _tokens(_read_config(beside)) if path.name == JINJA and beside.is_file() else {}
            return cls(path.read_text(encoding="utf-8"), name=str(path), variables=variables, now=now)
        except FileNotFoundError:
            raise UserError(
                f"there is no chat template {text!r}{nearest(text, BUILT_IN)}; expected one of "
                f"{', '.join(BUILT_IN)}, a {CONFIG}, a file with Jinja such as {JINJA}, or the text of a template"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the chat template {path}: {error}") from error

    @property
    def has_generation(self) -> bool:
        """Whether the template marks what the assistant says with `{% generation %}`."""
        return self.program.generation

    @property
    def settings(self) -> dict[str, Any]:
        """JSON: everything that its texts depend on."""
        now = {"now": self.now.isoformat()} if self.program.dated else {}
        return {"text": self.text, "variables": self.variables, **now}

    @property
    def fingerprint(self) -> str:
        """A hash of the settings."""
        return fingerprint(self.settings)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Write a conversation down.

        Args:
            messages: Mappings with `role`, `content` and whatever else the template reads.
            tools: Schemas of tools.
            add_generation_prompt: End with what comes before an assistant's message.
            **variables: What else the template can read; they come before the template's own.

        Raises:
            UserError: The template refuses the conversation or fails, or a generation block is used in a way
                in which its place cannot be told.
        """
        context = self.context(messages, tools, add_generation_prompt, variables)
        text = self.program.render(context)
        if not self.has_generation:
            return Rendered(text)
        base = free_base(2, [text])
        begin, end = chr(base), chr(base + 1)
        marked = self.compile(marks=(begin, end)).render(context)
        rendered = take_marks(marked, begin, end)
        if rendered is None or rendered.text != text:
            raise UserError(
                f"{self.name} changes what its {{% generation %}} blocks write, so their places cannot be told; "
                "expected blocks whose text goes into the conversation as it is"
            )
        return rendered

    def context(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Give everything that the program reads."""
        given = {"messages": list(messages), "tools": tools, "documents": None}
        return {**self.variables, **variables, **given, "add_generation_prompt": add_generation_prompt}

    def compile(self, replace: Callable[[str], str] | None = None, marks: tuple[str, str] = ("", "")) -> Program:
        """Compile the template, or one like it; see `Program`."""
        return Program(self.text, self.name, self.now, replace, marks)


def free_base(count: int, texts: Sequence[str]) -> int:
    """Find `count` characters of private use in a row that stand in none of the texts.

    Returns:
        The code point of the first.
    """
    found = {ord(char) for text in texts if not text.isascii() for char in PRIVATE_CHAR.findall(text)}
    base = PRIVATE.start
    while taken := [point for point in found if base <= point < base + count]:
        base = max(taken) + 1
        if base + count > PRIVATE.stop:
            raise UserError("a record uses nearly all characters of private use; expected text")
    return base


def take_marks(text: str, begin: str, end: str) -> Rendered | None:
    """Take the marks of generation blocks out of a text; `None` if they are not in pairs."""
    pieces, spans, length, opened = [], [], 0, -1
    for piece in re.split(f"([{begin}{end}])", text):
        if piece == begin and opened < 0:
            opened = length
        elif piece == end and opened >= 0:
            spans.append((opened, length))
            opened = -1
        elif piece in (begin, end):
            return None
        else:
            pieces.append(piece)
            length += len(piece)
    return None if opened >= 0 else Rendered("".join(pieces), tuple(spans))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no {CONFIG}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no {CONFIG}: expected an object, got {type(config).__name__}")
    return config


def _pick(config: Mapping[str, Any], path: Path) -> str:
    """Take the template out of a config; of several, the default one."""
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found if isinstance(entry, dict) and "name" in entry}
        if "default" not in found:
            raise UserError(f"{path} has the chat templates {', '.join(found) or 'none'}; expected one named 'default'")
        found = found["default"]
    if not isinstance(found, str):
        raise UserError(f"{path} has no 'chat_template'; give the template's own file, or 'chatml'")
    return found


def _tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Take the special tokens out of a config: `bos_token` and its like."""
    tokens = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens
