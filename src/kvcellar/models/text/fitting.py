"""Messages as one chat template takes them: roles that it refuses, or drops, are merged or moved.

What a template takes is found out by short conversations that are rendered once. Every change is
made in its place and depends on the messages alone, so that a conversation that goes on begins with
the same text: nothing is moved to the front, and no answer is made up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from kvcellar.errors import ModelError, TemplateLimitError
from kvcellar.models.text.rendering import ask_renderer

Message = dict[str, Any]
Takes = Callable[[str], bool]
"""Tells by the name of a probe whether the template takes what it has."""

RESULT_BEGIN, RESULT_END = "<tool_response>\n", "\n</tool_response>"
"""Around the result of a tool, for a template that has no role for it."""

_LOOKS = "I look at what came."
"""Answer put between a result and its pictures, for a template with no user behind a result."""

_ID = re.compile(r"[A-Za-z0-9]{9}")
"""Ids of calls that every template takes."""


# What a template takes ---------------------------------------------------------------------------


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _call(call_id: str, text: str) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "look", "arguments": {"what": text}},
    }


def _result(call_id: str, text: str) -> Message:
    return {"role": "tool", "name": "look", "tool_call_id": call_id, "content": text}


_SYSTEM, _USER, _MORE = _said("system", "kvsys"), _said("user", "kvone"), _said("user", "kvtwo")
_ANSWER, _OTHER = _said("assistant", "kvyes"), _said("assistant", "kvno")
_LATER = _said("system", "kvlater")
_ONE, _SECOND = _call("a23456789", "kvfirst"), _call("b23456789", "kvsecond")
_LONG = "call_0123456789abcdef"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
        },
    }
]


def _calling(*calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


PROBES: Mapping[str, Sequence[Message]] = {
    "system": (_SYSTEM, _USER),
    "two systems": (_SYSTEM, _LATER, _USER),
    "later system": (_USER, _ANSWER, _LATER, _MORE),
    "later system behind one": (_SYSTEM, _USER, _ANSWER, _LATER, _MORE),
    "two users": (_USER, _MORE),
    "two answers": (_USER, _ANSWER, _OTHER, _MORE),
    "answer first": (_ANSWER, _USER),
    "result": (_USER, _calling(_ONE), _result("a23456789", "kvfound")),
    "any id": (_USER, _calling(_call(_LONG, "kvfirst")), _result(_LONG, "kvfound")),
    "several calls": (
        _USER,
        _calling(_ONE, _SECOND),
        _result("a23456789", "kvfound"),
        _result("b23456789", "kvseen"),
    ),
    "user behind result": (_USER, _calling(_ONE), _result("a23456789", "kvfound"), _MORE),
}
"""Conversations by what one has to take to write them."""


@lru_cache(maxsize=1024)
def takes(template: str, words: tuple[tuple[str, str], ...], name: str) -> bool:
    """Return true if a template writes a probe: all its texts, in order, in roles of their own.

    Args:
        template: Jinja.
        words: the special tokens that the template may name.
        name: one of ``PROBES``.

    Raises:
        TemplateLimitError: it takes more time, memory or output than is allowed.
    """
    probe = [dict(message) for message in PROBES[name]]
    if "tool_calls" not in template:  # calls come as text to such a one
        for message in probe:
            if calls := message.pop("tool_calls", None):
                message["content"] = " ".join(c["function"]["arguments"]["what"] for c in calls)
    text = _written(template, words, probe)
    at = 0
    for message in probe:
        for shown in _texts_of(message):
            at = text.find(shown, at)
            if at < 0:
                return False
    for i, message in enumerate(probe):
        if message["role"] == "tool" or (message["role"] == "system" and i):
            as_answer = [*probe[:i], _said("assistant", message["content"]), *probe[i + 1 :]]
            if _written(template, words, as_answer) == text:
                return False  # it would be read as the model's own words
    return True


@lru_cache(maxsize=64)
def has_result_pictures_moved(
    template: str, words: tuple[tuple[str, str], ...], written: str
) -> bool:
    """Return true if a template writes results of tools, and no pictures in them.

    Such a one writes them as JSON, or their text alone.

    Args:
        template: Jinja.
        words: the special tokens that the template may name.
        written: what it writes for a picture.

    Raises:
        TemplateLimitError: it takes more time, memory or output than is allowed.
    """
    if not takes(template, words, "result"):
        return False
    parts = [{"type": "image"}, {"type": "text", "text": "kvfound"}]
    probe = [_USER, _calling(_ONE), {**_result("a23456789", ""), "content": parts}]
    text = _written(template, words, probe)
    return written not in text or "kvfound" not in text


@lru_cache(maxsize=64)
def writes_text_alone(template: str, words: tuple[tuple[str, str], ...], written: str) -> bool:
    """Return true if a template writes no pictures, and what stands for one in a message's text.

    Those of older models, and of texts that were not made for pictures, are so.

    Args:
        template: Jinja.
        words: the special tokens that the template may name.
        written: what stands for a picture.

    Raises:
        TemplateLimitError: it takes more time, memory or output than is allowed.
    """
    said = {"type": "text", "text": "kvone"}
    in_parts = _written(template, words, [{"role": "user", "content": [{"type": "image"}, said]}])
    if written in in_parts:
        return False
    return written in _written(template, words, [_said("user", f"{written}kvone")])


def _texts_of(message: Message) -> list[str]:
    calls = message.get("tool_calls") or ()
    said = [message["content"]] if message["content"] else []
    return [*said, *(call["function"]["arguments"]["what"] for call in calls)]


def _written(template: str, words: tuple[tuple[str, str], ...], messages: Sequence[Message]) -> str:
    """Return what a template makes of messages; nothing where it refuses them."""
    if reads_parts_alone(template, words):
        messages = [in_parts(message) for message in messages]
    has_calls = any(message.get("tool_calls") for message in messages)
    job = {
        "conversations": [list(messages)],
        "tools": _TOOLS if has_calls else None,
        "chat_template": template,
        "add_generation_prompt": False,
    }
    try:
        return ask_renderer({**dict(words), **job})
    except TemplateLimitError:
        raise
    except ModelError:
        return ""


@lru_cache(maxsize=64)
def reads_parts_alone(template: str, words: tuple[tuple[str, str], ...]) -> bool:
    """Return true if a template shows the text of a message only where it is in a list of parts.

    Some templates of models that see images are so.
    """
    text = "kvcellar"
    for content in (text, [{"type": "text", "text": text}]):
        job = {
            "conversations": [[{"role": "user", "content": content}]],
            "tools": None,
            "chat_template": template,
            "add_generation_prompt": False,
        }
        try:
            if text in ask_renderer({**dict(words), **job}):
                return content != text
        except TemplateLimitError:
            raise
        except ModelError:  # it wants other messages
            continue
    return False


def in_parts(message: Message) -> Message:
    """Return a message whose content, where it is a text, is a list with that text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


@lru_cache(maxsize=64)
def reads_thoughts(template: str, words: tuple[tuple[str, str], ...]) -> str:
    """Return where a template reads what was thought before an answer: its last, probed.

    ``field``: of the message; ``parts``: of its content; empty: it reads no such thing apart.

    Args:
        template: Jinja.
        words: the special tokens that the template may name.

    Raises:
        TemplateLimitError: it takes more time, memory or output than is allowed.
    """
    answer = {**_ANSWER, "reasoning_content": "kvthought"}
    for where, said in (("field", answer), ("parts", thinking_in_parts(answer))):
        text = _written(template, words, [_USER, said])
        if "kvthought" in text and "'thinking'" not in text and '"thinking"' not in text:
            return where  # and does not write the parts as they are
    return ""


def thinking_in_parts(message: Message) -> Message:
    """Return a message whose content has its reasoning as a part, before its text."""
    thought = message.get("reasoning_content")
    if not thought:
        return message
    said = {key: value for key, value in message.items() if key != "reasoning_content"}
    content = in_parts(message)["content"]
    text = [part for part in content if part.get("text") != ""]
    return {**said, "content": [{"type": "thinking", "thinking": thought}, *text]}


# What is made of messages ------------------------------------------------------------------------


def fit(messages: Sequence[Message], takes: Takes) -> tuple[list[Message], tuple[str, ...]]:
    """Return messages as a template takes them, and sentences that say what was changed.

    Args:
        messages: the conversation, oldest first.
        takes: tells what the template takes, by the names of ``PROBES``; asked for that alone which
            the conversation has.
    """
    found, notes = list(messages), []
    for step, said in _STEPS:
        changed = step(found, takes)
        if changed != found:
            found = changed
            notes.append(f"the model's chat template takes no {said}")
    return found, tuple(notes)


def _short_ids(messages: list[Message], takes: Takes) -> list[Message]:
    """Give calls ids of nine letters and digits, the same for the same id."""
    ids = {str(m["tool_call_id"]) for m in messages if m.get("tool_call_id")}
    ids |= {str(call.get("id") or "") for m in messages for call in m.get("tool_calls") or ()}
    if all(_ID.fullmatch(one) for one in ids) or takes("any id") or not takes("result"):
        return messages
    short = {one: hashlib.blake2b(one.encode(), digest_size=8).hexdigest()[:9] for one in ids}
    short |= {one: one for one in ids if _ID.fullmatch(one)}
    found = []
    for message in messages:
        if message.get("tool_call_id"):
            message = {**message, "tool_call_id": short[str(message["tool_call_id"])]}
        if message.get("tool_calls"):
            calls = [{**c, "id": short[str(c.get("id") or "")]} for c in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        found.append(message)
    return found


def _calls_one_by_one(messages: list[Message], takes: Takes) -> list[Message]:
    """Put each of several calls into an answer of its own, its result behind it."""
    if all(len(m.get("tool_calls") or ()) < 2 for m in messages) or takes("several calls"):
        return messages
    found: list[Message] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while rest and rest[0].get("role") == "tool":
            results.append(rest.pop(0))
        for i, call in enumerate(calls):
            head = {**message, "content": ""} if i else message
            found.append({**head, "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == call.get("id")] or results
            if own:
                found.append(own[0])
                results.remove(own[0])
        found += results
    return found


def _results_as_text(messages: list[Message], takes: Takes) -> list[Message]:
    """Have the user say what came of a call."""
    if all(m.get("role") != "tool" for m in messages) or takes("result"):
        return messages
    return [
        _said("user", f"{RESULT_BEGIN}{_text_of(m)}{RESULT_END}") if m.get("role") == "tool" else m
        for m in messages
    ]


def _systems_in_front(messages: list[Message], takes: Takes) -> list[Message]:
    """Make one of several system messages at the beginning; a user's where none is taken."""
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    if not n or ((n < 2 or takes("two systems")) and takes("system")):
        return messages
    if takes("system"):
        return [_merged(messages[:n]), *messages[n:]]
    return [*({**m, "role": "user"} for m in messages[:n]), *messages[n:]]


def _later_systems(messages: list[Message], takes: Takes) -> list[Message]:
    """Have the user say what a system message in the middle says."""
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    is_behind = "later system behind one" if n else "later system"
    if all(m.get("role") != "system" for m in messages[n:]) or takes(is_behind):
        return messages
    later = ({**m, "role": "user"} if m.get("role") == "system" else m for m in messages[n:])
    return [*messages[:n], *later]


def _users_behind_results(messages: list[Message], takes: Takes) -> list[Message]:
    """Put what the user says right behind a result at its end."""
    roles = [m.get("role") for m in messages]
    if ("tool", "user") not in pairwise(roles) or takes("user behind result"):
        return messages
    found: list[Message] = []
    for message in messages:
        if found and found[-1].get("role") == "tool" and message.get("role") == "user":
            found[-1] = _merged([found[-1], message])
        else:
            found.append(message)
    return found


def apart_from_results(
    messages: Sequence[Message], is_shown: Callable[[Message], bool], takes: Takes
) -> list[Message]:
    """Put an answer between a result and the pictures that the user shows right behind it.

    For a template that takes no user there, so that both would be read as the result.

    Args:
        messages: the conversation.
        is_shown: true for a message that has pictures.
        takes: as of ``fit``.
    """
    found: list[Message] = []
    for message in messages:
        is_behind = found and found[-1].get("role") == "tool" and message.get("role") == "user"
        if is_behind and is_shown(message) and not takes("user behind result"):
            found.append(_said("assistant", _LOOKS))
        found.append(message)
    return found


def _users_in_a_row(messages: list[Message], takes: Takes) -> list[Message]:
    return _runs(messages, takes, "user", "two users")


def _answers_in_a_row(messages: list[Message], takes: Takes) -> list[Message]:
    return _runs(messages, takes, "assistant", "two answers")


def _runs(messages: list[Message], takes: Takes, role: str, probe: str) -> list[Message]:
    """Make one message of those of a role that follow each other."""
    roles = [m.get("role") for m in messages]
    if (role, role) not in pairwise(roles) or takes(probe):
        return messages
    found: list[Message] = []
    for message in messages:
        if message.get("role") == role and found and found[-1].get("role") == role:
            has_calls = message.get("tool_calls") and found[-1].get("tool_calls")
            if not has_calls or takes("several calls"):
                found[-1] = _merged([found[-1], message])
                continue
        found.append(message)
    return found


def _answers_first(messages: list[Message], takes: Takes) -> list[Message]:
    """Put a user who says nothing before an answer to nobody."""
    n = next((i for i, m in enumerate(messages) if m.get("role") != "system"), len(messages))
    if n == len(messages) or messages[n].get("role") != "assistant" or takes("answer first"):
        return messages
    return [*messages[:n], _said("user", ""), *messages[n:]]


_STEPS: Sequence[tuple[Callable[[list[Message], Takes], list[Message]], str]] = (
    (_short_ids, "ids of calls but of nine letters and digits; others were made such"),
    (_calls_one_by_one, "several calls in one answer; each is read in an answer of its own"),
    (_results_as_text, "results of tools; they are read as the user's"),
    (
        _systems_in_front,
        "such system message at the beginning; it is read with the others, or as the user's",
    ),
    (_later_systems, "system message later on; it is read as the user's"),
    (_users_behind_results, "user behind a result of a tool; both are read as one message"),
    (_users_in_a_row, "two messages of the user in a row; they are read as one"),
    (_answers_in_a_row, "two answers in a row; they are read as one"),
    (_answers_first, "answer at the beginning; an empty message of the user comes before it"),
)
"""What is done in turn, and what is said of it."""


def _merged(messages: Sequence[Message]) -> Message:
    """Make one message of several of one role: their texts with an empty line between."""
    found = dict(messages[0])
    for message in messages[1:]:
        for key in ("reasoning_content", "content"):
            mine, its = found.get(key), message.get(key)
            if isinstance(mine, list) or isinstance(its, list):
                found[key] = [*_parts_of(mine), *_parts_of(its)]
            elif its:
                found[key] = f"{mine}\n\n{its}" if mine else its
        if message.get("tool_calls"):
            found["tool_calls"] = [*(found.get("tool_calls") or ()), *message["tool_calls"]]
    return found


def _parts_of(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": str(content)}] if content else []


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(
            str(p.get("text", "")) if isinstance(p, Mapping) else str(p) for p in content
        )
    return str(content or "")
