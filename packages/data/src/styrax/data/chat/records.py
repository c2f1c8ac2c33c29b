"""The shapes that records of instruction data come in, and the one shape that they are brought to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from styrax.core.errors import UserError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"

#: What the roles of ShareGPT's records are called here.
SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
SHAPES = {"messages": ("messages",), "conversations": ("conversations",), "completion": ("prompt", "completion")}
PAIR = ("chosen", "rejected")

Message = dict[str, Any]


class RecordError(UserError):
    """A record that cannot be used; the message goes on after what names the record.

    Args:
        reason: What is wrong, in the words that reports count by.
        detail: What is wrong with this one.
    """

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """Messages that a template writes down.

    Attributes:
        messages: Each with `role`, `content` (a text, or `None` beside `tool_calls`) and what else it has.
        tools: Schemas of tools.
        first: How many messages are the prompt: what the assistant says there carries no loss.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    first: int = 0


@dataclass(frozen=True)
class Completion:
    """Text that goes on from other text, without a template.

    Attributes:
        prompt: Carries no loss.
        completion: Carries loss.
    """

    prompt: str
    completion: str


def parse_record(record: Any) -> Conversation | Completion:
    """Read `messages`, `prompt` and `completion`, or ShareGPT's `conversations`.

    Raises:
        RecordError: It is none of these, or something in it is wrong.

    Example:
        >>> parse_record({"conversations": [{"from": "human", "value": "Hi"}]}).messages
        ({'role': 'user', 'content': 'Hi'},)
        >>> parse_record({"prompt": "1 + 1 =", "completion": " 2"})
        Completion(prompt='1 + 1 =', completion=' 2')
    """
    fields = _fields(record)
    if "messages" in fields:
        return Conversation(read_messages(fields["messages"], "messages"), _tools(fields))
    if "conversations" in fields:
        messages = read_messages(fields["conversations"], "conversations")
        system = fields.get("system")
        if isinstance(system, str) and system:
            messages = ({"role": "system", "content": system}, *messages)
        return Conversation(messages, _tools(fields))
    _need(fields, ("prompt", "completion"), [*SHAPES, "prompt"])
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _completion(prompt, completion, "completion")
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RecordError(
            "mixed shapes",
            f"has a prompt that is a {type(prompt).__name__} and a completion that is a {type(completion).__name__}; "
            "expected two texts or two lists of messages",
        )
    before = read_messages(prompt, "prompt")
    return Conversation((*before, *read_messages(completion, "completion")), _tools(fields), len(before))


def parse_pair(record: Any) -> tuple[Conversation | Completion, Conversation | Completion]:
    """Read a preference: `chosen` and `rejected`, with the `prompt` apart or in both.

    The messages that both begin with are the prompt. Of texts without a prompt, everything carries loss.

    Returns:
        The chosen and the rejected one.

    Raises:
        RecordError: It is no such record, something in it is wrong, or both are the same.
    """
    fields = _fields(record)
    _need(fields, PAIR, [*PAIR, "prompt"])
    prompt, sides = fields.get("prompt"), [fields[name] for name in PAIR]
    if all(isinstance(side, str) for side in sides) and (prompt is None or isinstance(prompt, str)):
        if sides[0] == sides[1]:
            raise RecordError("no preference", "has the same text as 'chosen' and 'rejected'; expected two")
        chosen, rejected = (_completion(prompt or "", side, name) for side, name in zip(sides, PAIR, strict=True))
        return chosen, rejected
    if any(isinstance(side, str) for side in sides):
        kinds = ", ".join(f"{name} a {type(fields[name]).__name__}" for name in ("prompt", *PAIR) if name in fields)
        raise RecordError("mixed shapes", f"has {kinds}; expected texts or lists of messages throughout")
    tools = _tools(fields)
    read = [read_messages(side, name) for side, name in zip(sides, PAIR, strict=True)]
    before: tuple[Message, ...] = ()
    if isinstance(prompt, str):
        # As UltraFeedback has it: the prompt once more, as the message that both sides hold.
        users = [next((m["content"] for m in side if m["role"] == "user"), None) for side in read]
        if users != [prompt, prompt]:
            raise RecordError(
                "mixed shapes",
                "has a prompt that is a text beside lists of messages that do not begin with it; expected a list of "
                "messages as 'prompt'",
            )
    elif prompt is not None:
        before = read_messages(prompt, "prompt")
    chosen, rejected = ((*before, *side) for side in read)
    first = len(before)
    while first < min(len(chosen), len(rejected)) and chosen[first] == rejected[first]:
        first += 1
    if first == max(len(chosen), len(rejected)):
        raise RecordError("no preference", "has the same messages as 'chosen' and 'rejected'; expected two answers")
    return Conversation(chosen, tools, first), Conversation(rejected, tools, first)


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Read a list of messages, with `role` and `content` or ShareGPT's `from` and `value`.

    Args:
        value: The list.
        where: The field that it stands in.

    Returns:
        The messages: contents are one text each, and fields without a value are left away.

    Raises:
        RecordError: Something is wrong; all that is, in one message.
    """
    if not isinstance(value, (list, tuple)) or not value:
        got = "an empty list" if isinstance(value, (list, tuple)) else _kind(value)
        raise RecordError("no messages", f"has in {where!r} {got}; expected a list of messages")
    problems: list[str] = []
    messages = [_message(entry, f"{where}[{index}]", problems) for index, entry in enumerate(value)]
    if problems:
        raise RecordError("bad message", "; ".join(problems))
    return tuple(messages)


def _message(entry: Any, where: str, problems: list[str]) -> Message:
    if not isinstance(entry, Mapping):
        problems.append(f"has in {where} {_kind(entry)}; expected a message with 'role' and 'content'")
        return {}
    message = {key: value for key, value in entry.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        role = SHAREGPT.get(sender) if isinstance(sender, str) else None
        if role is None:
            near = nearest(str(sender), SHAREGPT)
            problems.append(f"has in {where} 'from' {sender!r}{near}; expected one of {', '.join(SHAREGPT)}")
        message = {"role": role, "content": message.pop("value", None), **message}
    elif message.get("role") not in ROLES:
        role = message.get("role")
        got = (
            f"the role {role!r}{nearest(str(role), ROLES)}"
            if "role" in message
            else f"no 'role' among {_names(message)}"
        )
        problems.append(f"has in {where} {got}; expected one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else parts
    if not isinstance(content, str) and not (content is None and "tool_calls" in message):
        got = "parts that are no text" if isinstance(content, list) else _kind(content)
        near = "" if "content" in entry or content is not None else nearest("content", map(str, entry))
        problems.append(f"has in {where} a content that is {got}{near}; expected a text, or parts of the type 'text'")
    return {**message, "content": content}


def _completion(prompt: str, completion: str, name: str) -> Completion:
    if not completion:
        raise RecordError("no loss", f"has an empty {name!r}, so no token would carry loss")
    return Completion(prompt, completion)


def _fields(record: Any) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise RecordError("not a record", f"is no object: got {_kind(record)}")
    return {key: value for key, value in record.items() if value is not None}


def _need(fields: Mapping[str, Any], names: Sequence[str], known: Sequence[str]) -> None:
    missing = [name for name in names if name not in fields]
    if missing:
        near = "".join(dict.fromkeys(nearest(str(field), [n for n in known if n not in fields]) for field in fields))
        shapes = "'chosen' and 'rejected', with or without 'prompt'"
        if names != PAIR:
            shapes = "'messages', 'prompt' and 'completion', or 'conversations'"
        raise RecordError("unknown shape", f"has the fields {_names(fields)}{near}; expected {shapes}")


def _tools(fields: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Read the schemas of tools: a list, or the JSON of one, as files with fixed columns have it."""
    tools = fields.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError:
            raise RecordError("bad tools", f"has 'tools' that are no JSON: {tools[:40]!r}; expected a list") from None
    if tools is not None and not isinstance(tools, (list, tuple)):
        raise RecordError("bad tools", f"has 'tools' that are {_kind(tools)}; expected a list of schemas")
    return tuple(tools) if tools else None


def _names(fields: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, fields)) or "none"


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
