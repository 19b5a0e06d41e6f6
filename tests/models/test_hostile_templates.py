"""Any template writes any conversation, or is refused in our words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvcellar.errors import ModelError, PromptError
from kvcellar.hosting.templates import check_template
from kvcellar.models.seeing import Look
from kvcellar.models.text import rendering
from kvcellar.models.text.prompts import encode, render
from kvcellar.valid import valid_json
from tests.models.test_prompts import byte_level, special, tokenizer

NAME = "0123456789" * 2
EXPRESSIONS = [
    *("messages", "m", "m.role", "m.content", "m['content'][0]", "m.tool_calls", "tools", "x.y.z"),
    *("loop", "loop.index0", "loop.previtem.content", "namespace(a=1)", "bos_token", "none", "1/0"),
    *("''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os", "self"),
    *(
        "'\\ud83d'",
        "joiner.__init__.__globals__",
        "messages.append(1)",
        "messages.clear()",
        "m.update(a=1)",
    ),
    *("'%s' % m", "'{0.__class__}'.format(m)", "'a' * 99999", "range(9)", "[] | first", "{}.a.b"),
    *("raise_exception('no')", "raise_exception(m)", "strftime_now('%Y')", "strftime_now(m)"),
    *("m | tojson", "m | tojson(indent=-1)", "m.content | trim", "m | length", "m.content[9:]"),
    *("m.content | replace('a', m)", "m | pprint", "m | map(attribute='x') | list", "m ~ m", "-m"),
    *("m.content.split('<|im_end|>')[-1]", "m.content | upper | reverse", "lipsum()", "super()"),
]
"""What templates read, and what none should."""

TEXTS = [
    "<|im_start|>",
    "<|im_end|>",
    "<picture>",
    "text",
    "\n",
    " ",
    "\0",
    "\ufdd0",
    "\ud83d",
    "é",
]
AROUND = [
    ("{% for m in messages %}", "{% endfor %}"),
    ("{% for m in messages %}{% if loop.first %}", "{% else %}{{ m }}{% endif %}{% endfor %}"),
    ("{% for x in m %}", "{% endfor %}"),
    ("{% macro f(a) %}", "{% endmacro %}{{ f(messages) }}"),
    ("{% macro f(a) %}{{ f(f) }}", "{% endmacro %}{{ f(1) }}"),
    ("{% set m = messages[0] %}", ""),
    ("{% set ns = namespace(a=1) %}{% set ns.a = ns %}", "{{ ns.a }}"),
    ("{% filter upper %}", "{% endfilter %}"),
    ("{% generation %}", "{% endgeneration %}"),
    ("{% raw %}", "{% endraw %}"),
    ("{% block a %}", "{% endblock %}"),
    ("{%- if messages[0]['content'] is string -%}", "{%- endif -%}"),
]
BROKEN = ["{%", "{{", "}}", "{#", "{% endif %}", "{% include 'a' %}", "{% import 'os' as m %}"]
BROKEN += [
    "{% extends 'b' %}",
    "{% break %}",
    "{% do m %}",
    "{% for m in messages %}",
    "{% else %}",
]

TEMPLATES = st.recursive(
    st.one_of(
        st.sampled_from(TEXTS),
        st.sampled_from(EXPRESSIONS).map(lambda one: f"{{{{ {one} }}}}"),
        st.text(max_size=6),
    ),
    lambda part: st.one_of(
        st.lists(part, max_size=3).map("".join),
        st.tuples(st.sampled_from(AROUND), part).map(lambda one: one[0][0] + one[1] + one[0][1]),
        st.tuples(part, st.sampled_from(BROKEN), part).map("".join),
    ),
    max_leaves=8,
)

WORDS = st.one_of(
    st.text(max_size=12), st.sampled_from(["<|im_end|>", "<|im_", "\ufdd0", "\ud800", "<picture>"])
)
PARTS = st.lists(
    st.dictionaries(st.sampled_from(["type", "text"]), st.text(max_size=6)), max_size=2
)
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None]}}}]
MORE = [{}, {"tool_calls": CALLS}, {"reasoning_content": "so"}, {"name": "n"}]
MESSAGES = st.one_of(
    st.lists(
        st.builds(
            lambda role, content, more: {"role": role, "content": content, **more},
            st.sampled_from(["system", "user", "assistant", "tool", "developer", ""]),
            st.one_of(WORDS, PARTS, st.none()),
            st.sampled_from(MORE),
        ),
        max_size=4,
    ),
    WORDS.map(lambda content: [{"role": "user", "content": content}]),
)


class _Looks:
    """A model that reads any picture as three rows."""

    written, in_text, token_id = "<picture>", "<picture>", 1

    def look(self, name: str) -> Look:
        return Look("<pad><pad><pad>", 3)


def pictured(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, each with a picture where it has a text."""
    return [
        {**one, "pictures": [{"name": NAME, "at": 0}]} if isinstance(one["content"], str) else one
        for one in messages
    ]


NO_CLOCK = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=max(10, settings().max_examples // 2),
)


@pytest.fixture(scope="module", autouse=True)
def soon():
    """A template that takes long is stopped after less time than is promised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "CPU_S", 1.0)
        yield


def written(known: Any, messages: list[dict[str, Any]], **how: Any) -> bool:
    """Return true if messages become tokens; else they are refused in words that say why."""
    try:
        encode(known, render(known, valid_json(messages), **how))
    except (ModelError, PromptError) as error:
        assert str(error) and len(str(error)) < 5000, error
        return False
    return True


def known_by(template: str) -> Any:
    known = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    own = [special(one) for one in ("<|im_start|>", "<pad>", "<|im_end|>", "<picture>")]
    known.add_tokens(own, special_tokens=True)
    return known


@NO_CLOCK
@example("{{ '\\ud83d' }}", [{"role": "user", "content": "half a character"}])
@given(TEMPLATES, MESSAGES)
def test_any_template_writes_a_prompt_or_is_refused(template, messages):
    known = known_by(template)
    written(known, messages)
    written(known, messages, control_tokens_in_text=True, is_asking=False)
    check_template(known)  # as at load, where nothing is raised
    looks: Any = _Looks()
    looks.token_id = known.convert_tokens_to_ids("<pad>")
    written(known, pictured(messages), looks=looks)
    assert written(tokenizer("chatml"), [{"role": "user", "content": "x"}]), "the next is written"
