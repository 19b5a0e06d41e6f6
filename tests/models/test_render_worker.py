"""Chat templates give the text that transformers gives, and the same refusals."""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

import jinja2
import numpy as np
import pytest
from transformers.utils import chat_template_utils as theirs

from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.text import render_worker
from tests.dialects import templates
from tests.models import test_prompts

CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é<b>"]}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": 'It\'s "it" & <so>.',
        "parameters": {"type": "object"},
    },
}
SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief.\n"},
    {"role": "user", "content": 'What\'s 2 < 3 & "so" on?  \n'},
    {"role": "assistant", "reasoning": "Hm.\n", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "f", "tool_call_id": "a1", "content": "漢字 🙂 \u2028"},
    {"role": "assistant", "thinking": "So.", "content": "Yes."},
    {"role": "user", "content": "Go on"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PUBLISHED = {
    **{name: templates.template_of(name) for name in templates.CALLS},
    **{n: getattr(test_prompts, n) for n in ("CHATML", "LLAMA3", "GEMMA", "MISTRAL", "DEEPSEEK")},
    "demo": (DEMO_FOLDER / "chat_template.jinja").read_text(),
}


def outcome(render: Any) -> str:
    try:
        return str(render())
    except jinja2.exceptions.SecurityError:  # in words of our own
        return "SecurityError"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def hold_alike(template: str, said: Any, tools: Any = None, **more: Any) -> str:
    """Render by both; return what both gave, the text or the error's kind and words."""
    job = {
        "conversations": [said],
        "tools": tools,
        "chat_template": template,
        **SPECIAL,
        **more,
    }
    want = outcome(lambda: theirs.render_jinja_template(**job)[0][0])
    got = outcome(lambda: render_worker.render(**job))
    assert got == want
    return got


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_conversation_is_written_as_transformers_writes_it(name):
    for n in range(1, len(SAID) + 1):
        for tools in (None, [TOOL]):
            for is_asking in (True, False):
                hold_alike(PUBLISHED[name], SAID[:n], tools, add_generation_prompt=is_asking)


TRICKS = {
    "tojson": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}",
    "tojson options": "{{ x | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "blocks are trimmed": "  {% if true %}\n  a\n  {% endif %}\n  {{ 1 }}\n",
    "loop controls": "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
    "{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}"
    "{% endgeneration %}{% endfor %}",
    "generation is a scope": "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}"
    "{% endgeneration %}{{ a }}",
    "namespace": "{% set ns = namespace(n=0, self=3) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ ns.self }}",
    "namespace hides nothing": "{% set ns = namespace(_a=0) %}",
    "namespace is not set": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "dict": "{{ dict(a=1, **{'b': 2}) }}{{ dict.fromkeys([1, 2], 3) }}",
    "dict is no type": "{{ dict.__class__.__mro__ }}{{ dict.__init__.__globals__ }}",
    "raise": "{{ raise_exception('Roles must alternate') }}",
    "immutable": "{{ messages.append(1) }}",
    "immutable dictionaries": "{{ messages[0].update({'a': 1}) }}",
    "attributes": "{{ messages.__class__.__base__.__subclasses__() }}",
    "format": "{{ '{0.__class__}'.format(1) }}{{ '%s' | format(1) }}",
    "strings": "{{ ' a '.strip() }}{{ 'a,b'.split(',')[-1] }}{{ 'x'.startswith('x') }}",
    "undefined": "{{ nothing }}|{{ messages[0].no }}|{{ documents is none }}{{ tools is none }}",
    "undefined within": "{{ nothing.more }}",
    "tests": "{{ x is mapping }}{{ x is string }}{{ 1 is number }}{{ [] is iterable }}",
    "thoughts": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }};{% endfor %}",
    "macro": "{% macro f(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ f(1) }}{{ f(1, 3) }}",
    "broken": "{% if %}",
    "unknown filter": "{{ 1 | nothing }}",
    "import": "{% import 'os' as os %}",
    "filters": "{{ [3, 1] | sort | join('-') }}{{ x | items | list }}{{ 'ab' | upper | trim }}",
}


@pytest.mark.parametrize("name", TRICKS)
def test_what_templates_may_do_is_what_they_may_in_transformers(name):
    x = {"b": "é", "a": [1.5, None, True]}
    for said in (SAID, SAID[:1]):
        hold_alike(TRICKS[name], said, [TOOL], x=x)
        hold_alike(TRICKS[name], said, x=x, add_generation_prompt=True)


def test_the_date_is_that_of_now():
    template = "{{ strftime_now('%d %B %Y') }}"
    assert re.fullmatch(r"\d\d \w+ \d{4}", hold_alike(template, SAID))


class Colour(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Part:
    kind: str
    size: int


class Secret:
    def read(self) -> str:
        return "secret"


@pytest.mark.parametrize(
    "value",
    [Colour.RED, Part("a", 1), Secret(), np.int64(3), np.bool_(False), np.float32(0.5), (1, "a")],
    ids=lambda value: type(value).__name__,
)
def test_values_are_as_json_has_them(value):
    template = "{{ x }}|{{ x | tojson }}|{{ x.read is defined }}|{{ messages[0].content }}"
    hold_alike(template, [{"role": "user", "content": value}], x=value)
    hold_alike(template, [{"role": "user", "content": [{"x": value}]}], x={"y": [value]})


@pytest.mark.parametrize("bad", ["text", 3, None])
def test_what_is_no_message_is_refused(bad):
    with pytest.raises(TypeError):
        render_worker.render([[bad]], "{{ 1 }}")
    with pytest.raises(TypeError):
        render_worker.render([SAID], "{{ 1 }}", [bad])


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_template_reads_and_says_is_found_as_transformers_finds_it(name):
    template = PUBLISHED[name]
    literals = render_worker.literals(template)
    assert set(literals.split("\0")) == set(theirs._get_template_literal_text(template).split("\0"))
    assert render_worker.variables(template) == theirs._get_template_variables(template)


def test_a_template_that_is_none_is_refused_with_jinjas_words():
    with pytest.raises(jinja2.TemplateSyntaxError):
        render_worker.render([SAID], TRICKS["broken"])
