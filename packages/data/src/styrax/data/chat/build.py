"""Token stores of instruction data: of conversations and completions, and of preference pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from styrax.core.errors import UserError
from styrax.data.build.encode import batches
from styrax.data.build.quarantine import Quarantine, Refused, Tally, check_budget
from styrax.data.build.write import Progress
from styrax.data.build.writer import StoreWriter, check_out
from styrax.data.chat.encode import ChatEncoder, EncodedChat
from styrax.data.chat.read import Item, Source
from styrax.data.chat.records import Completion, Conversation, RecordError, parse_pair, parse_record
from styrax.data.chat.spans import TrainOn
from styrax.data.chat.template import ChatTemplate
from styrax.data.store.tokens import TokenStore
from styrax.data.tokenizer import ByteTokenizer, StoreTokenizer, load_tokenizer

OnError = Literal["raise"] | Quarantine
Parsed = Sequence[Conversation | Completion]

BATCH_CHARS = 2_000_000
SIDES = ("#chosen", "#rejected")
KIND_CHAT, KIND_PREFERENCE = "chat", "preference"


def build_chat_store(
    records: str | Path | Iterable[Any],
    out: str | Path,
    tokenizer: str | Path | StoreTokenizer,
    *,
    template: str | Path | ChatTemplate = "chatml",
    train_on: TrainOn = "assistant",
    variables: Mapping[str, Any] | None = None,
    id: str | None = None,
    on_error: OnError = "raise",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TokenStore:
    """Build a store with one document per record, whose mask says which tokens carry loss; `LMData` does the rest.

    Records are mappings with

    - `messages`: each with `role` (`system`, `developer`, `user`, `assistant`, `tool`) and `content`, a text or a list
      of parts of the type `text`; and `tools`, if the template knows what to do with them;
    - or `prompt` and `completion`: two texts, which no template touches, or two lists of messages. What carries loss
      is in the completion; both are tokenized as one text;
    - or `conversations`, as ShareGPT has them: each with `from` and `value`.

    Args:
        records: Names of `.jsonl` (`.gz`, `.zst`) or `.parquet` files, or an iterable of mappings.
        out: The folder to make; it appears whole or not at all.
        tokenizer: An exact tokenizer, `byte`, or the path of a `tokenizer.json`.
        template: `chatml`, a file, or the text of a template; see `ChatTemplate.load`.
        train_on: What carries loss: all that the `assistant` says after the prompt, the `last` of it, or `all` text.
        variables: What else the template reads, such as `enable_thinking`.
        id: The field that holds a record's id, for provenance; by default record 7 of a file is `FILE@7`.
        on_error: `raise` at the first record that cannot be used, also for want of loss, or put such records aside
            within a budget.
        overwrite: Replace a store at `out`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store, open; `meta["report"]` says what was read, dropped and why, how many tokens carry loss, and how long
        the longest document is.

    Raises:
        UserError: A record or the template cannot be used, files are missing or damaged, or `out` exists.

    Example:
        >>> import tempfile
        >>> record = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
        >>> store = build_chat_store([record], f"{tempfile.mkdtemp()}/s", "byte")
        >>> store.tokenizer.decode(store[0][store.mask[: len(store[0])] == 1])
        'Hello<|im_end|>'
    """
    encoder = ChatEncoder(_tokenizer(tokenizer), template, train_on=train_on, variables=variables)
    about = {"kind": KIND_CHAT, "train_on": train_on}
    build = _Build(encoder, lambda fields: [parse_record(fields)], ("",), about, on_error)
    return build.run(Source(records, id), Path(out), id, variables, overwrite, progress)


def build_preference_store(
    records: str | Path | Iterable[Any],
    out: str | Path,
    tokenizer: str | Path | StoreTokenizer,
    *,
    template: str | Path | ChatTemplate = "chatml",
    variables: Mapping[str, Any] | None = None,
    id: str | None = None,
    on_error: OnError = "raise",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TokenStore:
    """Build a store with two documents per record, `X#chosen` and `X#rejected`, for `PreferenceData`.

    Records are mappings with `chosen` and `rejected`: two lists of messages, or two texts; and with a `prompt` of the
    same kind, unless both begin with it. What the assistant says after the prompt carries loss.

    Args:
        records: Names of `.jsonl` (`.gz`, `.zst`) or `.parquet` files, or an iterable of mappings.
        out: The folder to make; it appears whole or not at all.
        tokenizer: An exact tokenizer, `byte`, or the path of a `tokenizer.json`.
        template: `chatml`, a file, or the text of a template; see `ChatTemplate.load`.
        variables: What else the template reads.
        id: The field that holds a record's id; by default record 7 of a file is `FILE@7`.
        on_error: `raise` at the first record that cannot be used, or put such records aside within a budget.
        overwrite: Replace a store at `out`.
        progress: Called as `progress(label, done, total)`, in bytes.

    Returns:
        The store, open.

    Raises:
        UserError: As `build_chat_store`; and both sides of a record are the same.

    Example:
        >>> import tempfile
        >>> record = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
        >>> build_preference_store([record], f"{tempfile.mkdtemp()}/s", "byte").ids
        ['records@0#chosen', 'records@0#rejected']
    """
    encoder = ChatEncoder(_tokenizer(tokenizer), template, variables=variables)
    build = _Build(encoder, lambda fields: list(parse_pair(fields)), SIDES, {"kind": KIND_PREFERENCE}, on_error)
    return build.run(Source(records, id), Path(out), id, variables, overwrite, progress)


class _Build:
    """A store being made of records.

    Args:
        encoder: Makes documents of them.
        parse: Reads one record as one or more documents.
        sides: What the id of each document ends in.
        about: What the store says of how it was made.
        on_error: What to do with records that cannot be used.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        parse: Callable[[Any], Parsed],
        sides: Sequence[str],
        about: Mapping[str, Any],
        on_error: OnError,
    ):
        if on_error != "raise" and not isinstance(on_error, Quarantine):
            raise UserError(f"on_error = {on_error!r}: expected 'raise' or Quarantine(max_fraction=...)")
        self._encoder, self._parse, self._sides = encoder, parse, sides
        self._about, self._on_error = about, on_error
        self._tally, self._lines = Tally(), []
        self._kept = self._loss = self._longest = 0

    def run(
        self,
        source: Source,
        out: Path,
        id: str | None,
        variables: Mapping[str, Any] | None,
        overwrite: bool,
        progress: Progress | None,
    ) -> TokenStore:
        """Read, encode and write everything."""
        check_out(out, overwrite)
        done = 0
        with StoreWriter(out, self._encoder.tokenizer, mask=True, overwrite=overwrite) as writer:
            for batch in batches(self._read(source), lambda pair: _length(pair[1]), BATCH_CHARS):
                self._write(writer, batch)
                read = sum(_length(parsed) for _, parsed in batch)
                done = done + read if source.total is None else max(done, batch[-1][0].done)
                if progress is not None:
                    progress("tokenize", done, source.total)
            for line in self._lines:
                writer.refuse(line, 1)
            if isinstance(self._on_error, Quarantine):
                check_budget(self._on_error, self._tally, self._lines)
            report = {**self._tally.report(self._kept), "loss_tokens": self._loss, "longest": self._longest}
            return writer.finish(build=self._describe(source, id, variables), report=report)

    def _read(self, source: Source) -> Iterator[tuple[Item, Parsed]]:
        for item in source:
            self._tally.read += 1
            if isinstance(item, Refused):
                self._refuse(item)
                continue
            try:
                parsed = self._parse(item.fields)
            except RecordError as error:
                self._refuse(item.refuse(error))
                continue
            yield item, parsed

    def _write(self, writer: StoreWriter, batch: Sequence[tuple[Item, Parsed]]) -> None:
        encoded = iter(self._encoder.encode_batch([part for _, parsed in batch for part in parsed]))
        for item, parsed in batch:
            documents = [next(encoded) for _ in parsed]
            wrong = next((made for made in documents if isinstance(made, RecordError)), None)
            if wrong is not None:
                self._refuse(item.refuse(wrong))
                continue
            for side, made in zip(self._sides, documents, strict=True):
                assert isinstance(made, EncodedChat)
                writer.add(item.id + side, made.ids, made.size, made.mask)
                self._loss += int(made.mask.sum())
                self._longest = max(self._longest, len(made.ids))
            self._kept += 1

    def _refuse(self, refused: Refused) -> None:
        if self._on_error == "raise":
            raise refused.error()
        self._tally.refused[refused.reason] += 1
        self._lines.append(refused.line().encode())

    def _describe(self, source: Source, id: str | None, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        template = self._encoder.template
        on_error = self._on_error
        return {
            **self._about,
            "sources": source.names,
            "id": id,
            "template": {"name": template.name, **template.settings},
            "variables": dict(variables or {}),
            "on_error": {"max_fraction": on_error.max_fraction} if isinstance(on_error, Quarantine) else on_error,
        }


def _tokenizer(tokenizer: str | Path | StoreTokenizer) -> StoreTokenizer:
    if not isinstance(tokenizer, (str, Path)):
        return tokenizer
    if str(tokenizer).startswith("bpe:"):
        raise UserError(
            f"tokenizer {str(tokenizer)!r}: expected the tokenizer of the model that learns from the records: its "
            "tokenizer.json, or 'byte'"
        )
    return ByteTokenizer() if tokenizer == "byte" else load_tokenizer(tokenizer)


def _length(parsed: Parsed) -> int:
    return sum(
        len(part.prompt) + len(part.completion)
        if isinstance(part, Completion)
        else sum(len(message["content"] or "") for message in part.messages)
        for part in parsed
    )
