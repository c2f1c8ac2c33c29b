"""Which stretches of a rendered conversation carry loss."""

from __future__ import annotations

from typing import Literal, get_args

from styrax.core.errors import UserError, nearest
from styrax.data.chat.origin import Traced, Tracer
from styrax.data.chat.records import ASSISTANT, Conversation, RecordError
from styrax.data.chat.sandbox import RenderError

TrainOn = Literal["assistant", "last", "all"]
TRAIN_ON: tuple[str, ...] = get_args(TrainOn)

Span = tuple[int, int]


def check_train_on(train_on: str) -> None:
    """Refuse what is no choice.

    Raises:
        UserError: It is none of `assistant`, `last` and `all`.
    """
    if train_on not in TRAIN_ON:
        raise UserError(
            f"train_on = {train_on!r}{nearest(train_on, TRAIN_ON)}: expected one of {', '.join(map(repr, TRAIN_ON))}"
        )


def loss_spans(tracer: Tracer, conversation: Conversation, traced: Traced, train_on: TrainOn) -> list[Span]:
    """Find what the assistant says.

    A template with `{% generation %}` blocks says so itself. Of any other, message i is what comes after the
    rendering of the messages before it, with a generation prompt, in the rendering of these and itself. White space
    after the special token that ends it is left away: a model stops there.

    Args:
        tracer: Renders.
        conversation: The conversation.
        traced: All of it, rendered.
        train_on: Everything the assistant says after the prompt, only the last of it, or all text.

    Returns:
        First character, and the one after the last, of each stretch.

    Raises:
        RecordError: The template renders messages differently as the conversation goes on, so that they have no place.
    """
    if train_on == "all":
        return [(0, len(traced.text))]
    messages = conversation.messages
    speaks = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    chosen = [i for i in speaks if i >= conversation.first]
    if train_on == "last":
        chosen = chosen[-1:]
    if not chosen:
        return []
    if not tracer.template.has_generation:
        return [_trim(traced, *_place(tracer, conversation, traced.text, index)) for index in chosen]
    spans = list(traced.spans)
    if len(chosen) == len(speaks):
        return spans
    if len(spans) == len(speaks):
        return [spans[speaks.index(index)] for index in chosen]
    before = _start(tracer, traced.text, tracer.plain(messages[: chosen[0]], conversation.tools))
    if before is None:
        raise _changes(tracer, chosen[0])
    return [(start, stop) for start, stop in spans if start >= len(before)]


def starts_turn(tracer: Tracer, conversation: Conversation, place: int) -> bool:
    """Tell whether the rendering of some first messages ends at a place, so that a turn begins there."""
    for count in range(1, len(conversation.messages)):
        try:
            before = tracer.plain(conversation.messages[:count], conversation.tools)
        except RenderError:
            continue
        if len(before) == place:
            return True
    return False


def _place(tracer: Tracer, conversation: Conversation, text: str, index: int) -> Span:
    """Find message `index` by rendering what comes before it, and it too."""
    messages, tools = conversation.messages, conversation.tools
    try:
        before = tracer.plain(messages[:index], tools, add_generation_prompt=True)
        after = _start(tracer, text, tracer.plain(messages[: index + 1], tools))
    except RenderError as error:
        raise RecordError(
            "messages without a place",
            f"has the assistant's message {index}, whose place cannot be told, since {error}; mark what the assistant "
            "says in the template with {% generation %} ... {% endgeneration %}",
        ) from None
    if after is None:
        raise _changes(tracer, index + 1, cure=", or train on the last message only (train_on='last')")
    if not after.startswith(before):
        raise _changes(tracer, index, " with a generation prompt")
    return len(before), len(after)


def _start(tracer: Tracer, text: str, part: str) -> str | None:
    """Give the rendering of some first messages as `text` begins with it, or `None` if it does not.

    Some templates end every text with the end token, after the token that ends the last turn; it is left away.
    """
    if text.startswith(part):
        return part
    part = tracer.without_end(part)
    return part if text.startswith(part) else None


def _changes(tracer: Tracer, count: int, prompt: str = "", cure: str = "") -> RecordError:
    what = "message 0" if count == 1 else f"messages 0 to {count - 1}"
    return RecordError(
        "messages without a place",
        f"cannot be masked: {tracer.template.name} renders {what}{prompt} differently when more messages follow, so it "
        "cannot be told what the assistant says; mark that in the template with {% generation %} ... "
        "{% endgeneration %}" + cure,
    )


def _trim(traced: Traced, start: int, stop: int) -> Span:
    """Leave away white space after the special token that ends a stretch."""
    inside = [end for _, end, _ in traced.tokens if start < end <= stop]
    if inside and traced.text[inside[-1] : stop].isspace():
        stop = inside[-1]
    return start, stop
