"""The shapes of records, by hand."""

import pytest

from styrax.core import UserError
from styrax.data.chat.records import Completion, Conversation, parse_pair, parse_record

USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}


def test_all_shapes_become_messages():
    expected = Conversation((USER, REPLY))
    assert parse_record({"messages": [USER, REPLY], "prompt": "q", "id": 3}) == expected
    assert parse_record({"messages": (USER, {**REPLY, "name": None})}) == expected
    parts = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]}
    assert parse_record({"messages": [USER, parts]}) == expected
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse_record({"conversations": sharegpt}) == expected
    assert parse_record({"conversations": [USER, REPLY]}) == expected
    system = {"role": "system", "content": "s"}
    assert parse_record({"conversations": sharegpt, "system": "s"}) == Conversation((system, USER, REPLY))
    assert parse_record({"prompt": [USER], "completion": [REPLY]}) == Conversation((USER, REPLY), None, 1)
    assert parse_record({"prompt": "q", "completion": "a"}) == Completion("q", "a")


def test_tools_and_calls_are_kept():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
    answer = {"role": "tool", "content": "1", "tool_call_id": "7"}
    for tools in ([{"name": "f"}], '[{"name": "f"}]'):
        parsed = parse_record({"messages": [USER, call, answer, REPLY], "tools": tools})
        assert parsed == Conversation((USER, call, answer, REPLY), ({"name": "f"},))
    assert parse_record({"messages": [USER], "tools": []}).tools is None
    assert parse_record({"messages": [USER], "tools": None}).tools is None


def test_pairs():
    both = Conversation((USER, REPLY), None, 1), Conversation((USER, OTHER), None, 1)
    assert parse_pair({"prompt": [USER], "chosen": [REPLY], "rejected": [OTHER]}) == both
    assert parse_pair({"chosen": [USER, REPLY], "rejected": [USER, OTHER]}) == both
    assert parse_pair({"prompt": "q", "chosen": [USER, REPLY], "rejected": [USER, OTHER], "score": 1.0}) == both
    assert parse_pair({"prompt": "q", "chosen": "a", "rejected": "b"}) == (Completion("q", "a"), Completion("q", "b"))
    assert parse_pair({"chosen": "qa", "rejected": "qb"}) == (Completion("", "qa"), Completion("", "qb"))
    longer = parse_pair({"prompt": [USER], "chosen": [REPLY, USER, REPLY], "rejected": [REPLY, USER, OTHER]})
    assert [side.first for side in longer] == [3, 3]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([USER], "is no object: got list"),
        (
            {"mesages": [USER]},
            r"has the fields 'mesages' \(did you mean 'messages'\?\); expected 'messages', 'prompt' and",
        ),
        (
            {"prompt": "q", "response": "a"},
            "has the fields 'prompt', 'response'; expected 'messages', 'prompt' and 'comp",
        ),
        ({}, "has the fields none; expected"),
        ({"messages": []}, "has in 'messages' an empty list; expected a list of messages"),
        ({"messages": "hi"}, "has in 'messages' str 'hi'; expected a list of messages"),
        ({"messages": [USER, "hi"]}, r"has in messages\[1\] str 'hi'; expected a message with 'role' and 'content'"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, r"the role 'asistant' \(did you mean 'assistant'\?\)"),
        (
            {"messages": [{"content": "a"}]},
            r"has in messages\[0\] no 'role' among 'content'; expected one of system, dev",
        ),
        (
            {"messages": [{"role": "user", "contents": "a"}]},
            r"content that is null \(did you mean 'contents'\?\); expected",
        ),
        ({"messages": [{"role": "assistant", "content": 7}]}, "a content that is int '7'; expected a text, or parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a content that is parts that are no text"),
        (
            {"messages": [{"role": "user"}, {"role": "x", "content": ""}]},
            r"messages\[0\] a content.*; has in messages\[1\]",
        ),
        (
            {"conversations": [{"from": "humam", "value": "q"}]},
            r"'from' 'humam' \(did you mean 'human'\?\); expected one",
        ),
        ({"conversations": [{"from": "human"}]}, r"has in conversations\[0\] a content that is null"),
        ({"prompt": "q", "completion": [REPLY]}, "a prompt that is a str and a completion that is a list"),
        ({"prompt": "q", "completion": ""}, "has an empty 'completion', so no token would carry loss"),
        ({"messages": [USER], "tools": "["}, "'tools' that are no JSON"),
        ({"messages": [USER], "tools": 3}, "'tools' that are int '3'; expected a list of schemas"),
    ],
)
def test_unusable_records_are_explained(record, message):
    with pytest.raises(UserError, match=message):
        parse_record(record)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "a"}, "has the fields 'chosen'; expected 'chosen' and 'rejected'"),
        ({"chosen": "a", "rejectd": "b"}, r"\(did you mean 'rejected'\?\)"),
        ({"chosen": "a", "rejected": [OTHER]}, "has chosen a str, rejected a list; expected texts or lists"),
        ({"prompt": [USER], "chosen": "a", "rejected": "b"}, "has prompt a list, chosen a str, rejected a str"),
        ({"prompt": "x", "chosen": [USER, REPLY], "rejected": [USER, OTHER]}, "that do not begin with it"),
        ({"chosen": "a", "rejected": "a"}, "the same text as 'chosen' and 'rejected'"),
        ({"chosen": [USER, REPLY], "rejected": [USER, REPLY]}, "the same messages as 'chosen' and 'rejected'"),
        ({"chosen": "", "rejected": "b"}, "has an empty 'chosen'"),
    ],
)
def test_unusable_pairs_are_explained(record, message):
    with pytest.raises(UserError, match=message):
        parse_pair(record)
