"""Tests whether a chat template changes old turns when new ones follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvcellar.errors import ModelError, TemplateLimitError
from kvcellar.hosting.conversation import AgentTokenizer
from kvcellar.hosting.messages import Message, n_alike
from kvcellar.models.text.prompts import render
from kvcellar.models.text.templates import reads_reasoning, template_kwargs_of, texts_of


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Report on a chat template: whether it changes old turns when new ones follow.

    Attributes:
        findings: what it changes, in words, with both texts; empty where it changes nothing.
        takes: names of the arguments that it takes beside the conversation.
        texts: literal texts in it.
        reads_reasoning: whether it reads the reasoning of a message apart from its content.
    """

    findings: tuple[str, ...]
    takes: frozenset[str] = frozenset()
    texts: frozenset[str] = field(default=frozenset(), repr=False)
    reads_reasoning: bool = False

    @property
    def is_prefix_stable(self) -> bool:
        """True if a conversation that goes on begins with the same text."""
        return not self.findings


_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


_USER: Message = {"role": "user", "content": "One?"}
_MORE: Message = {"role": "user", "content": "Two?"}


def _case(what: str, before: list[Message], said: str) -> tuple[str, list[Message], Message, str]:
    return what, before, {"role": "assistant", "content": said}, said


_CASES = (
    _case("an answer", [_USER], "Yes."),
    _case(
        "an answer behind a system message",
        [{"role": "system", "content": "Be brief."}, _USER],
        "Yes.",
    ),
    _case("an answer with thoughts", [_USER], "<think>\nHm.\n</think>\n\nYes."),
    _case("an answer with spaces around it", [_USER], " Yes.\n"),
)
"""What is said before an answer, the answer as a message, and its text."""


def check_template(tokenizer: AgentTokenizer) -> TemplateReport:
    """Render a few conversations turn by turn and say where an earlier turn comes out differently.

    Each turn is rendered anew, so such a template costs the reuse of what it changes, and nothing
    else.
    """
    findings = []
    for what, before, answer, said in _CASES:
        try:
            first = render(tokenizer, before).text
            second = render(tokenizer, [*before, answer, _MORE]).text
        except TemplateLimitError as error:
            return TemplateReport((str(error),))  # the next one would take as long
        except ModelError as error:
            if what == "an answer":
                findings.append(str(error))
            continue
        expected = first + said
        if not second.startswith(expected):
            at = n_alike(expected, second)
            findings.append(
                f"{what} comes out differently in the next turn, from character {at} on: it was "
                f"{_around(expected, at)!r} and becomes {_around(second, at)!r}"
            )
    findings += _check_tools(tokenizer)
    return TemplateReport(
        tuple(findings),
        template_kwargs_of(tokenizer),
        texts_of(tokenizer),
        reads_reasoning(tokenizer),
    )


def _check_tools(tokenizer: AgentTokenizer) -> list[str]:
    """Check that tool results are appended to what was there."""
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "look", "arguments": {"what": "it"}}}
        ],
    }
    result = {"role": "tool", "name": "look", "content": "Seen."}
    try:
        first = render(tokenizer, [_USER, call], _TOOLS, is_asking=False).text
        second = render(tokenizer, [_USER, call, result], _TOOLS).text
    except (ModelError, TypeError):
        return []  # a template without tools
    at = n_alike(first, second)
    if at == len(first) or not first[at:].strip():
        return []
    return [
        f"a tool's result changes the turn before it, from character {at} on: it was "
        f"{_around(first, at)!r} and becomes {_around(second, at)!r}"
    ]


def _around(text: str, at: int) -> str:
    return text[max(0, at - 20) : at + 20]
