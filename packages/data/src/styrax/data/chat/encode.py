"""From records of instruction data to token ids and the mask of those that carry loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from styrax.core.errors import UserError
from styrax.data.chat.origin import Token, Tracer
from styrax.data.chat.records import ASSISTANT, Completion, Conversation, RecordError, parse_record
from styrax.data.chat.spans import Span, TrainOn, check_train_on, loss_spans, starts_turn
from styrax.data.chat.special import SpecialTokens
from styrax.data.chat.template import ChatTemplate
from styrax.data.tokenizer import StoreTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import UInt8, UInt32


@dataclass(frozen=True)
class EncodedChat:
    """A record as a document of a store.

    Attributes:
        ids: Its tokens, exactly one end token last and no begin token first.
        mask: 1 where a token carries loss, as the target that it is, and 0 where it does not.
        size: How many bytes of UTF-8 its tokens stand for; special tokens stand for none.
        text: What was encoded, special tokens written out.
    """

    ids: UInt32[np.ndarray, " tokens"]
    mask: UInt8[np.ndarray, " tokens"]
    size: int
    text: str = field(repr=False)


@dataclass(frozen=True)
class _Layout:
    """A text cut at its special tokens.

    Attributes:
        text: The text.
        tokens: Its special tokens.
        spans: What carries loss.
        ends: Whether the end token that follows carries loss.
        why: What to say when nothing carries loss.
    """

    text: str
    tokens: Sequence[Token]
    spans: Sequence[Span]
    ends: bool
    why: str

    def pieces(self) -> list[tuple[str, int | None]]:
        """Give the stretches of text, and the special tokens with what they stand for, in order."""
        pieces: list[tuple[str, int | None]] = []
        last = 0
        for start, stop, token in self.tokens:
            if last < start:
                pieces.append((self.text[last:start], None))
            pieces.append((self.text[start:stop], token))
            last = stop
        if last < len(self.text):
            pieces.append((self.text[last:], None))
        return pieces


class ChatEncoder:
    """Encodes conversations and completions.

    The special tokens that the template writes become their ids; the same characters in a message stay text, so that
    no message can forge the end of a turn. What stands between two special tokens is encoded as a whole, as the
    tokenizer would encode it, and a token carries loss if any of its bytes belongs to what carries loss.

    A begin token at the start is left away, since a store's reader puts one there; one end token is last, and carries
    loss when the last message is the assistant's.

    Args:
        tokenizer: Any exact tokenizer. One without texts for special tokens, such as `ByteTokenizer`, takes all that a
            template writes for text; only the variables `bos_token` and `eos_token` are its tokens.
        template: See `ChatTemplate.load`.
        train_on: `assistant`: all that the assistant says after the prompt; `last`: the last of it; `all`: everything.
        variables: What else the template reads, such as `enable_thinking`.

    Raises:
        UserError: The template cannot be read, or `train_on` is none of these.

    Example:
        >>> from styrax.data import ByteTokenizer
        >>> template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
        >>> messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        >>> chat = ChatEncoder(ByteTokenizer(), template).encode({"messages": messages})
        >>> chat.text, "".join(map(str, chat.mask))
        ('[1+1][2]', '000001111')
    """

    def __init__(
        self,
        tokenizer: StoreTokenizer,
        template: str | Path | ChatTemplate = "chatml",
        *,
        train_on: TrainOn = "assistant",
        variables: Mapping[str, Any] | None = None,
    ):
        check_train_on(train_on)
        self.tokenizer, self.template = tokenizer, ChatTemplate.load(template)
        self.train_on: TrainOn = train_on
        self.special = SpecialTokens.of(tokenizer)
        self._tracer = Tracer(self.template, self.special.ids, variables, self.special.named)
        self._bos = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id

    def encode(self, record: Any) -> EncodedChat:
        """Encode one record.

        Args:
            record: A mapping as `build_chat_store` takes it, or what `parse_record` gave.

        Raises:
            UserError: The record cannot be used.
        """
        try:
            parsed = record if isinstance(record, (Conversation, Completion)) else parse_record(record)
            (encoded,) = self.encode_batch([parsed])
            if isinstance(encoded, RecordError):
                raise encoded
        except RecordError as error:
            raise UserError(f"the record {error}") from None
        return encoded

    def encode_batch(self, records: Sequence[Conversation | Completion]) -> list[EncodedChat | RecordError]:
        """Encode many records at once, on all cores.

        Args:
            records: What `parse_record` gave.

        Returns:
            For each its document, or why there is none.
        """
        layouts = [self._lay_out(record) for record in records]
        cut = [layout.pieces() if isinstance(layout, _Layout) else [] for layout in layouts]
        texts = [text for pieces in cut for text, token in pieces if token is None]
        encoded = iter(self.tokenizer.encode_batch(texts) if texts else [])
        results: list[EncodedChat | RecordError] = []
        for layout, pieces in zip(layouts, cut, strict=True):
            rows = [next(encoded) if token is None else np.array([token]) for _, token in pieces]
            done = self._join(layout, pieces, rows) if isinstance(layout, _Layout) else layout
            results.append(done)
        return results

    def _lay_out(self, record: Conversation | Completion) -> _Layout | RecordError:
        """Render a record, and find special tokens and what carries loss."""
        try:
            if isinstance(record, Completion):
                text = record.prompt + record.completion
                start = 0 if self.train_on == "all" else len(record.prompt)
                layout = _Layout(text, (), [(start, len(text))], True, "is empty")
            else:
                traced = self._tracer.trace(record.messages, record.tools)
                tokens = self.special.settle(traced.text, traced.tokens)
                self._check_begin(record, tokens)
                spans = loss_spans(self._tracer, record, traced, self.train_on)
                ends = self.train_on == "all" or record.messages[-1]["role"] == ASSISTANT
                layout = _Layout(traced.text, tokens, spans, ends, _why(record, spans))
            layout.text.encode()
        except UnicodeEncodeError:
            return RecordError("not Unicode", "has half a surrogate pair in its text")
        except RecordError as error:
            return error
        except UserError as error:
            return RecordError("not rendered", f"cannot be rendered: {error}")
        return layout

    def _join(
        self, layout: _Layout, pieces: Sequence[tuple[str, int | None]], rows: Sequence[np.ndarray]
    ) -> EncodedChat | RecordError:
        """Put the ids of the pieces together and mask them."""
        end, table = self.tokenizer.eos_id, self.tokenizer.token_bytes
        widths = []
        for (text, token), row in zip(pieces, rows, strict=True):
            size = len(text.encode())
            width = table[row] if token is None else np.array([size])
            if int(width.sum()) != size:
                raise UserError(
                    f"the tokenizer does not keep text as it is: {text[:60]!r} has {size} bytes, but its tokens stand "
                    f"for {int(width.sum())}; use another byte-level tokenizer"
                )
            widths.append(width)
        ids = np.concatenate(rows).astype(np.uint32) if rows else np.zeros(0, np.uint32)
        stops = np.cumsum(np.concatenate(widths), dtype=np.int64) if rows else np.zeros(0, np.int64)
        starts = np.concatenate([[0], stops[:-1]])
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in layout.spans:
            low = len(layout.text[:start].encode())
            high = low + len(layout.text[start:stop].encode())
            if low < high:
                mask[np.searchsorted(stops, low, "right") : np.searchsorted(starts, high, "left")] = 1
        begin = 1 if pieces and pieces[0][1] == self._bos else 0
        kept = slice(begin, self._stop(pieces, rows))
        ids, mask = ids[kept], mask[kept]
        if not len(ids) or ids[-1] != end:
            ids, mask = np.append(ids, np.uint32(end)), np.append(mask, np.uint8(0))
        mask[-1] = layout.ends
        if not mask[:-1].any():
            return RecordError("no loss", f"has no token that carries loss: {layout.why}")
        return EncodedChat(ids, mask, int(table[ids].sum()), layout.text)

    def _stop(self, pieces: Sequence[tuple[str, int | None]], rows: Sequence[np.ndarray]) -> int:
        """Tell how many tokens there are without white space after the template's own end token."""
        total = sum(map(len, rows))
        if len(pieces) > 1 and pieces[-2][1] == self.tokenizer.eos_id and pieces[-1][1] is None:
            return total - len(rows[-1]) if pieces[-1][0].isspace() else total
        return total

    def _check_begin(self, conversation: Conversation, tokens: Sequence[Token]) -> None:
        """Refuse begin tokens but one at the start and those that the template begins every turn with."""
        if self._bos == self.tokenizer.eos_id:
            return  # one token for both ends: a template ends turns with it
        begins = [(start, stop) for start, stop, token in tokens if token == self._bos]
        if begins and begins[0][0] == 0:
            first_stop = begins.pop(0)[1]
            if begins and begins[0][0] == first_stop:
                raise RecordError(
                    "two begin tokens",
                    f"begins with two begin tokens: {self.template.name} writes it twice; expected one or none",
                )
        for start, _ in begins:
            if not starts_turn(self._tracer, conversation, start):
                raise RecordError(
                    "two begin tokens",
                    f"has a begin token at character {start}, where no turn begins; expected one at the start, or one "
                    f"for every turn: change {self.template.name}",
                )


def _why(conversation: Conversation, spans: Sequence[Span]) -> str:
    """Say why a conversation might carry no loss."""
    roles = [message["role"] for message in conversation.messages]
    if ASSISTANT not in roles[conversation.first :]:
        after = f" after its prompt of {conversation.first}" if conversation.first else ""
        return f"the assistant says nothing in its messages{after} ({', '.join(roles)})"
    if not spans:
        return "the template marks nothing in it with {% generation %}; is the block around what the assistant says?"
    return "what the assistant says is empty"
