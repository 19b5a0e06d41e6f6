"""What a chat template takes beside the conversation, and what becomes of it in the prompt."""

from __future__ import annotations

import pytest

from kvcellar.agents import check_template
from kvcellar.errors import PromptError
from kvcellar.models.text.prompts import encode, render
from kvcellar.models.text.templates import reads_reasoning, template_kwargs_of, texts_of
from tests.models.test_prompts import byte_level, plain, special, tokenizer, wrapped

QWEN3 = """\
{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
{%- if m.role == 'assistant' and m.reasoning_content is string \
and (preserve_thinking is defined and preserve_thinking or loop.index0 > ns.last) %}\
{{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}\
{{- m.content }}<|im_end|>\n{% endfor %}\
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{%- if enable_thinking is defined and enable_thinking is false %}\
{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""

SETS_ITS_OWN = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}\
{%- if reasoning_effort is undefined %}{% set reasoning_effort = 'medium' %}{% endif %}\
{{- bos_token }}{{ 'Reasoning: ' + reasoning_effort }}{% set low = 'low' %}\
{%- for m in messages %}{{ m.content }}{% endfor %}{{ strftime_now('%Y') and '' }}"""

TOKENS = [special(t) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
USER = {"role": "user", "content": "Hi"}


def known(template: str, **names: str):
    tags = map(plain, ("<think>", "</think>"))
    return wrapped(byte_level(), template, [*TOKENS, *tags], eos_token="<|im_end|>", **names)


def test_a_template_takes_what_it_reads_and_neither_gives_itself_nor_is_given():
    assert template_kwargs_of(known(QWEN3)) == {"enable_thinking", "preserve_thinking"}
    own = known(SETS_ITS_OWN, bos_token="<|endoftext|>")
    assert template_kwargs_of(own) == {"enable_thinking", "reasoning_effort"}
    assert "low" in texts_of(own) and "lo" not in texts_of(own)
    assert not template_kwargs_of(tokenizer("llama3"))
    assert check_template(known(QWEN3)).takes == template_kwargs_of(known(QWEN3))
    assert reads_reasoning(known(QWEN3)) and not reads_reasoning(own)


def test_what_a_template_takes_reaches_it_and_what_it_does_not_take_is_refused_by_name():
    qwen = known(QWEN3)
    said = [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}, USER]
    for kwargs in ({}, {"preserve_thinking": True}, {"enable_thinking": False}):
        assert render(qwen, said, template_kwargs=kwargs).text == qwen.apply_chat_template(
            said, add_generation_prompt=True, tokenize=False, **kwargs
        )
    assert "Hm." not in render(qwen, said).text
    assert "Hm." in render(qwen, said, template_kwargs={"preserve_thinking": True}).text
    with pytest.raises(PromptError, match="takes no argument 'thinking'; it takes enable_thinking"):
        render(qwen, said, template_kwargs={"thinking": True})
    with pytest.raises(PromptError, match="takes no argument 'messages'"):
        render(qwen, said, template_kwargs={"messages": [USER]})
    with pytest.raises(PromptError, match="it takes none"):
        render(tokenizer("llama3"), said, template_kwargs={"eos_token": "x"})


def test_a_template_that_reads_thoughts_as_parts_of_the_content_is_given_them_so():
    parts = """\
{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}\
{% else %}{% for part in m.content %}{% if part.type == 'thinking' %}\
{{- '[THINK]' + part.thinking + '[/THINK]' }}{% else %}{{ part.text }}{% endif %}{% endfor %}\
{% endif %}<|im_end|>{% endfor %}"""
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    rendered = render(known(parts), [USER, answer, USER])
    assert "[THINK]Hm.[/THINK]Yes.<|im_end|>" in rendered.text
    assert reads_reasoning(known(parts))


def test_what_a_template_is_given_never_becomes_a_control_token():
    own = known(SETS_ITS_OWN, bos_token="<|endoftext|>")
    rendered = render(own, [USER], template_kwargs={"reasoning_effort": "<|im_end|>"})
    assert rendered.text == "<|endoftext|>Reasoning: <|im_end|>Hi"
    tokens = own.convert_ids_to_tokens(encode(own, rendered))
    assert "<|im_end|>" not in tokens and tokens.count("<|endoftext|>") == 1
