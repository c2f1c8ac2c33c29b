"""Which special tokens in a rendered conversation the template wrote, and which are words of the messages.

A message may hold the very characters of a special token. To tell them apart, the conversation is rendered twice: as
it is, and by a program in which every special token that stands in the template is one character of private use,
which no message holds. The messages themselves are not touched, so whatever the template does with them, it does the
same. Where both renderings agree, these characters are the template's special tokens, and nothing else is one.

Some templates put special tokens together from pieces, such as `'<|' + message.role + '|>'`. They are found by
rendering messages in which all characters of special tokens are others: what still reads as a special token holds none
of theirs.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from styrax.data.chat.records import RecordError
from styrax.data.chat.sandbox import Program, RenderError
from styrax.data.chat.template import ChatTemplate, free_base, take_marks

Token = tuple[int, int, int]

#: Characters that stand for those of messages; rare ones (CJK extension B) that Python prints as they are.
OTHERS = range(0x20000, 0x2A6DE)
SPACE = re.compile(r"\s")
ROLE, TYPE = "role", "type"
PROBE = "a text"


@dataclass(frozen=True)
class Traced:
    """A rendered conversation and what in it is the template's.

    Attributes:
        text: The text, exactly as the template renders it.
        tokens: First character, the one after the last, and id of each special token, in order.
        spans: First character, and the one after the last, of each generation block.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


class Tracer:
    """Renders conversations and tells whose special tokens they hold.

    Args:
        template: The template.
        special: Ids of the special tokens by their text.
        variables: What else the template reads. Texts there are the template's.
        named: Variables that are one special token, with its id, whether or not `special` has their text.
    """

    def __init__(
        self,
        template: ChatTemplate,
        special: Mapping[str, int],
        variables: Mapping[str, Any] | None = None,
        named: Mapping[str, tuple[str, int]] | None = None,
    ):
        self.template = template
        texts = {key: text for key, (text, _) in (named or {}).items()}
        self._variables = {**texts, **template.variables, **(variables or {})}
        self._special = dict(special)
        self._find = _matcher(special)
        self._begin = re.compile(f"(?=(?:{self._find.pattern}))(.)", re.DOTALL)
        own = {key: pair for key, pair in (named or {}).items() if self._variables[key] == pair[0]}
        #: Every special token that a character of private use stands for, and its text.
        self._signs = [*special.items(), *(pair for pair in own.values() if pair[0] not in special)]
        self._named = {key: self._signs.index(pair) for key, pair in own.items() if pair in self._signs}
        self._programs: dict[bool, tuple[int, Program, dict[str, Any]]] = {}
        self._parts = self._wants_parts()

    def plain(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        """Render, and no more."""
        messages = self._written(messages)
        return self.template.program.render(
            self.template.context(messages, tools, add_generation_prompt, self._variables)
        )

    def trace(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Traced:
        """Render a conversation.

        Raises:
            UserError: The template refuses it, or it cannot be told whose a special token is.
        """
        text = self.plain(messages, tools)
        messages = self._written(messages)
        base = free_base(2 + len(self._signs), [text, self.template.text, *_strings([messages, tools])])
        found = self._read(self._render(base, messages, tools), base)
        if found.text == text and not any(self._left(found)):
            return found
        if found.text == text and self._none_is_built(text, base, messages, tools):
            return found
        others = self._others(messages, tools)
        names = self.template.program.names

        def change(value: str, key: str) -> str:
            return value if key == ROLE or (key == TYPE and value.isidentifier()) else others.write(value)

        given = _change([messages, tools], change, lambda key: key if key in names else others.write(key))
        shown = self._read(self._render(base, *given, replace=False), base)
        if others.read(shown.text) != text:
            raise RecordError(
                "unclear special token",
                f"holds text that reads as a special token, and {self.template.name} does with it what cannot be "
                "followed; remove such text from the messages",
            )
        tokens = sorted([*shown.tokens, *self._left(shown)])
        return Traced(text, tuple(tokens), shown.spans)

    def without_end(self, text: str) -> str:
        """Take the end token from a text's end, if a special token that ends the last turn comes before it."""
        end = self._variables.get("eos_token")
        rest = text.removesuffix(end) if isinstance(end, str) and end else text
        return rest if rest.rstrip().endswith(tuple(self._special)) else text

    def _wants_parts(self) -> bool:
        """Tell whether the template writes a text only as a list of parts, as those for images do."""
        for parts in (False, True):
            content = [{"type": "text", "text": PROBE}] if parts else PROBE
            context = self.template.context([{"role": "user", "content": content}], None, False, self._variables)
            try:
                if PROBE in self.template.program.render(context):
                    return parts
            except RenderError:
                continue
        return False

    def _written(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Give contents in the form that the template reads."""
        if not self._parts:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content := message["content"], str)
            else message
            for message in messages
        ]

    def _none_is_built(
        self, text: str, base: int, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> bool:
        """Tell whether all that still reads as a special token holds a character of a message."""
        others = self._others(messages, tools)

        def change(value: str) -> str:
            return self._begin.sub(lambda found: others.write(found[1]), value)

        given = _change([messages, tools], lambda value, key: value if key == ROLE else change(value), change)
        shown = self._read(self._render(base, *given), base)
        return others.read(shown.text) == text and not any(self._left(shown))

    def _others(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> _Others:
        avoid = [self.template.text, *_strings(self._variables), *_strings([messages, tools])]
        return _Others("".join(self._special), avoid)

    def _render(
        self, base: int, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, replace: bool = True
    ) -> str:
        """Render with characters of private use for special tokens and for the ends of generation blocks."""
        made = self._programs.get(replace)
        if made is None or made[0] != base:
            made = self._programs[replace] = base, *self._compile(base, replace)
        _, program, variables = made
        return program.render(self.template.context(messages, tools, False, variables))

    def _compile(self, base: int, replace: bool) -> tuple[Program, dict[str, Any]]:
        """Make a program, and its variables, whose special tokens are the characters from `base + 2` on."""
        signs = {text: chr(base + 2 + i) for i, (text, _) in enumerate(self._signs)}

        def sign(text: str) -> str:
            return self._find.sub(lambda found: signs[found[0]], text) if replace else text

        variables = _change(self._variables, lambda value, key: sign(value), lambda key: key)
        variables.update({key: chr(base + 2 + i) for key, i in self._named.items()})
        return self.template.compile(sign, (chr(base), chr(base + 1))), variables

    def _read(self, marked: str, base: int) -> Traced:
        """Write special tokens out again; text that cannot be the right one if marks are not in pairs."""
        rendered = take_marks(marked, chr(base), chr(base + 1))
        if rendered is None:
            return Traced(marked)
        pieces, tokens, ends, length = [], [], [], 0
        for piece in re.split(f"([{chr(base + 2)}-{chr(base + 2 + len(self._signs))}])", rendered.text):
            sign = ord(piece) - base - 2 if len(piece) == 1 else -1
            if 0 <= sign < len(self._signs):
                piece, token = self._signs[sign]
                tokens.append((length, length + len(piece), token))
                ends.append(len(piece) - 1)
            pieces.append(piece)
            length += len(piece)
        return Traced("".join(pieces), tuple(tokens), _moved(rendered.spans, tokens, ends))

    def _left(self, traced: Traced) -> Iterator[Token]:
        """Find what reads as a special token in the text between them."""
        begin = 0
        for start, stop, _ in (*traced.tokens, (len(traced.text), 0, 0)):
            for found in self._find.finditer(traced.text, begin, start):
                yield found.start(), found.end(), self._special[found[0]]
            begin = stop


class _Others:
    """Another character for each that special tokens consist of, and back; white space stays.

    Args:
        chars: Those of special tokens.
        avoid: Texts whose characters are not used.
    """

    def __init__(self, chars: str, avoid: Iterable[str]):
        taken = {ord(char) for text in avoid if not text.isascii() for char in text}
        chars = "".join(dict.fromkeys(SPACE.sub("", chars)))
        free = [point for point in OTHERS if point not in taken][: len(chars)]
        if len(free) < len(chars):
            raise RecordError("unclear special token", "holds nearly all characters of CJK extension B; expected text")
        self._to = {ord(char): other for char, other in zip(chars, free, strict=True)}
        self._back = {other: point for point, other in self._to.items()}

    def write(self, text: str) -> str:
        """Put others for the characters."""
        return text.translate(self._to)

    def read(self, text: str) -> str:
        """Put the characters back."""
        return text.translate(self._back)


def _matcher(special: Iterable[str]) -> re.Pattern[str]:
    """Match special tokens as the `tokenizers` library does: the leftmost, and there the longest."""
    return re.compile(_any_of([text for text in special if text]) or "(?!)")


def _any_of(texts: Sequence[str]) -> str:
    """Write a pattern that reads each character once, however many texts there are, and prefers the longest."""
    heads: dict[str, list[str]] = {}
    for text in texts:
        heads.setdefault(text[:1], []).append(text[1:])
    branches = [re.escape(head) + _any_of(rests) for head, rests in heads.items() if head]
    if len(branches) == 1 and "" not in heads:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in heads else ''}" if branches else ""


def _moved(
    spans: Iterable[tuple[int, int]], tokens: Sequence[Token], longer: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Move the ends of spans by how much longer the special tokens before them are than one character."""
    grown = [0, *accumulate(longer)]
    places = [start - before for (start, _, _), before in zip(tokens, grown, strict=False)]
    return tuple((a + grown[bisect_left(places, a)], b + grown[bisect_left(places, b)]) for a, b in spans)


def _strings(value: Any) -> Iterator[str]:
    """Give all strings in JSON, names of fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)


def _change(value: Any, change: Callable[[str, str], str], rename: Callable[[str], str], key: str = "") -> Any:
    """Change the strings in JSON; `change` is told the name of the field that a string stands in."""
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {
            rename(name) if isinstance(name, str) else name: _change(inner, change, rename, str(name))
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_change(inner, change, rename, key) for inner in value]
    return value
