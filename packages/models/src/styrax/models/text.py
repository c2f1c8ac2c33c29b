"""Text from token ids as they come, without ever giving half a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from styrax.core import UserError

_UNFINISHED = "\ufffd"  # what decoders give for bytes that are no whole character, yet
_BEFORE = 6


class TextStream:
    """Decodes a growing text.

    A token may hold a part of a character, and what a token looks like may depend on the one before it. So a few
    tokens are decoded together with those that came since, and text is held back while it ends within a character,
    or with what may become a stop string.

    All pieces together are `decode(before + ids)` without `decode(before)`, up to the stop string.

    Args:
        decode: Token ids -> text, such as a tokenizer's `decode`; for bytes that are no character it gives U+FFFD.
        before: The ids before the text, such as a prompt.
        stop: The text ends before the first of these that is complete.

    Attributes:
        stopped: The stop string that ended the text, or `None`.

    Raises:
        UserError: A stop string is empty.

    Example:
        >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stop=["\\n"])
        >>> [stream.push(byte) for byte in "aé\\nb".encode()], stream.finish(), stream.stopped
        (['a', '', 'é', '', ''], '', '\\n')
    """

    def __init__(self, decode: Callable[[list[int]], str], *, before: Iterable[int] = (), stop: Sequence[str] = ()):
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(stops):
            raise UserError("stop: expected texts of a character or more, got an empty one")
        self.stopped: str | None = None
        self._decode = decode
        self._stops = stops
        self._ids = list(before)[-_BEFORE:]
        # Tokens up to here are given. If the last ones begin a character, it is given as a whole once it is one.
        self._given = len(self._ids)
        self._shown = self._broken = decode(self._ids) if self._ids else ""
        while self._given and self._shown.endswith(_UNFINISHED):
            self._given -= 1
            self._shown = decode(self._ids[: self._given]) if self._given else ""
        self._held = ""

    def push(self, token: int) -> str:
        """Take a token, and give the text that is sure now; often it is empty.

        Args:
            token: The next one. After the end of the text nothing more is given.
        """
        if self.stopped is not None:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_UNFINISHED):
            return ""
        piece = self._new(text)
        # The next tokens are decoded together with the ones just given.
        del self._ids[: self._given]
        self._given = len(self._ids)
        self._shown = self._broken = self._decode(self._ids)
        return self._until_stop(piece)

    def finish(self) -> str:
        """Give what was held back, be it half a character; call it when there are no more tokens."""
        if self.stopped is not None:
            return ""
        rest = self._new(self._decode(self._ids)) if self._ids else ""
        self._ids, self._given, self._shown, self._broken = [], 0, "", ""
        piece = self._until_stop(rest)
        held, self._held = self._held, ""
        return piece if self.stopped is not None else piece + held

    def _new(self, text: str) -> str:
        """Cut off what is given, and the half character at the end of what comes before if it has stayed one."""
        return text[len(self._broken if text.startswith(self._broken) else self._shown) :]

    def _until_stop(self, piece: str) -> str:
        text = self._held + piece
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.stopped = min(ends)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def stream_text(
    ids: Iterable[int], decode: Callable[[list[int]], str], *, before: Iterable[int] = (), stop: Sequence[str] = ()
) -> Iterator[str]:
    """Decode ids as they come, in pieces that are whole characters.

    Args:
        ids: Such as `styrax.models.generate` gives; none is asked for after a stop string.
        decode: As for `TextStream`.
        before: As for `TextStream`.
        stop: As for `TextStream`.

    Example:
        >>> list(stream_text("né".encode(), lambda ids: bytes(ids).decode(errors="replace")))
        ['n', 'é']
    """
    stream = TextStream(decode, before=before, stop=stop)
    return _pieces(ids, stream)


def _pieces(ids: Iterable[int], stream: TextStream) -> Iterator[str]:
    for token in ids:
        if piece := stream.push(token):
            yield piece
        if stream.stopped is not None:
            return
    if piece := stream.finish():
        yield piece


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of a text that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
