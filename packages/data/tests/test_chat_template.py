"""Chat templates, against Jinja used by hand and, where it is installed, against transformers."""

import json
import sys
from datetime import datetime

import pytest

pytest.importorskip("jinja2")

from styrax.core import UserError
from styrax.data.chat import ChatTemplate

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "né <b> 'x' & \"y\""},
    {"role": "assistant", "content": "  日本\n"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"b": 1, "a": [True, None]}}}
]

MARKED = """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'assistant' %}
        {% generation %}
A: {{ message['content'] | trim }}{{ eos_token }}
        {% endgeneration %}
    {% else %}
{{ message.role | upper }}: {{ message.content | trim }}
    {% endif %}
{% endfor %}
{%- if add_generation_prompt %}A:{% endif %}"""
WITH_TOOLS = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2, sort_keys=true) }}
{% endfor %}{% endif %}
{%- for message in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{{ message.content }}|{% endfor %}"""


def test_chatml_is_what_it_is_everywhere():
    rendered = ChatTemplate.load("chatml").render(TURNS, add_generation_prompt=True)
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TURNS)
    assert rendered.text == expected + "<|im_start|>assistant\n"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["  日本\n<|im_end|>"]


def test_whitespace_of_blocks_and_spans():
    rendered = ChatTemplate(MARKED, variables={"bos_token": "<s>", "eos_token": "</s>"}).render(TURNS)
    assert rendered.text == "<s>SYSTEM: Be brief.\nUSER: né <b> 'x' & \"y\"\nA: 日本</s>\n"
    # lstrip_blocks and trim_blocks hold for the generation tags as for any other.
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["A: 日本</s>\n"]


def test_json_is_not_escaped_and_loops_break():
    text = ChatTemplate(WITH_TOOLS).render(TURNS, tools=TOOLS).text
    expected = json.dumps(TOOLS[0], ensure_ascii=False) + "\n"
    expected += json.dumps(TOOLS[0]["function"]["parameters"], indent=2, sort_keys=True) + "\n"
    assert text == expected + f"{TURNS[0]['content']}|{TURNS[1]['content']}|"


def test_the_clock_stands_still():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 7, 26))
    assert template.render([]).text == "26 Jul 2024"
    assert template.settings["now"] == "2024-07-26T00:00:00"
    assert "now" not in ChatTemplate("x").settings
    assert ChatTemplate("x").fingerprint == ChatTemplate("x").fingerprint != ChatTemplate("y").fingerprint


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1] }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ strftime_now.__self__.year }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ (joiner or cycler).__init__.__globals__.os }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(text):
    with pytest.raises(UserError, match=r"fails on it: (SecurityError|OverflowError|UndefinedError|TypeError)"):
        print(ChatTemplate(text, name="t").render([{"role": "user", "content": "x"}]).text)


def test_files_and_names(tmp_path):
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}",
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "add_bos_token": True,
    }
    (tmp_path / "one").mkdir()
    (tmp_path / "one/tokenizer_config.json").write_text(json.dumps(config))
    for path in (tmp_path / "one", str(tmp_path / "one/tokenizer_config.json")):
        assert ChatTemplate.load(path).render(TURNS).text == "<s></s>Be brief."
    # A template beside a config is newer, and has the tokens of that config.
    (tmp_path / "one/chat_template.jinja").write_text("{{ eos_token }}!")
    assert ChatTemplate.load(tmp_path / "one").render(TURNS).text == "</s>!"
    assert ChatTemplate.load(tmp_path / "one").variables == {"bos_token": "<s>", "eos_token": "</s>"}
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "two.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path / "two.json").render(TURNS).text == "D"
    (tmp_path / "three.json").write_text(json.dumps({"chat_template": named[:1]}))
    (tmp_path / "four.json").write_text("{}")
    (tmp_path / "five.json").write_text("[")
    (tmp_path / "empty").mkdir()
    wrong = {
        tmp_path / "three.json": "has the chat templates tool_use; expected one named 'default'",
        tmp_path / "four.json": "has no 'chat_template'",
        tmp_path / "five.json": "is no tokenizer_config.json",
        tmp_path / "empty": "has no chat template: expected chat_template.jinja or tokenizer_config.json",
        "chatlm": "no chat template 'chatlm' .did you mean 'chatml'",
    }
    for source, message in wrong.items():
        with pytest.raises(UserError, match=message):
            ChatTemplate.load(source)


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"t, line 2: .*endfor"):
        ChatTemplate("\n{% endfor %}", name="t")
    with pytest.raises(UserError, match="t refuses the conversation: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", name="t").render(TURNS)
    with pytest.raises(UserError, match="t fails on it: UndefinedError: 'dict object' has no attribute 'b'"):
        ChatTemplate("{{ messages[0].b.c }}", name="t").render(TURNS)
    with pytest.raises(UserError, match="no words for tools"):
        ChatTemplate.load("chatml").render(TURNS, tools=TOOLS)
    twice = "{% macro a() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ a() }}{{ a() | length }}"
    with pytest.raises(UserError, match="their places cannot be told"):
        ChatTemplate(twice).render(TURNS)


def test_jinja_must_be_there_and_whole(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.1.5")
    with pytest.raises(UserError, match=r"jinja2 3.1.5 has known holes in its sandbox.*expected 3.1.6 or newer"):
        ChatTemplate("x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r'chat templates need jinja2: pip install "styrax-data\[chat\]"'):
        ChatTemplate("x")


@pytest.mark.parametrize("text", [ChatTemplate.load("chatml").text, MARKED, WITH_TOOLS])
@pytest.mark.parametrize("prompt", [False, True])
def test_texts_and_spans_are_those_of_transformers(text, prompt):
    reference = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    tools = TOOLS if text == WITH_TOOLS else None
    (expected,), (spans,) = reference.render_jinja_template(
        [TURNS],
        tools=tools,
        chat_template=text,
        return_assistant_tokens_mask=True,
        add_generation_prompt=prompt,
        **variables,
    )
    rendered = ChatTemplate(text, variables=variables).render(TURNS, tools=tools, add_generation_prompt=prompt)
    assert rendered.text == expected
    assert list(rendered.spans) == list(spans)
