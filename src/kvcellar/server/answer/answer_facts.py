"""Facts of an answer that all protocols tell: its agent, its costs, and the line of the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request

from kvcellar.dialects import Call, CallPart
from kvcellar.server.answer.dialogue import ChatEvent, Ended, Started
from kvcellar.server.schemas.base import QuestionBody
from kvcellar.server.stream.replies import Frames


def agent_facts(event: Started | Ended) -> dict[str, str]:
    """Say whose turn it is, and what is to be known of that, for ``kvcellar`` in an answer."""
    notice = {} if event.notice is None else {"notice": event.notice}
    return {"agent_id": event.agent_id, **notice}


def answer_headers(event: Started | Ended) -> dict[str, str]:
    """Say the same as headers."""
    facts = agent_facts(event)
    notice = {"x-agent-notice": header_text(facts["notice"])} if "notice" in facts else {}
    return {"x-agent-id": header_text(event.agent_id), **notice}


def header_text(text: str) -> str:
    """Return a text as a header can have it: in ASCII, on one line."""
    return " ".join(text.split()).encode("ascii", "replace").decode()


def call_delta(part: CallPart) -> dict[str, Any]:
    """Return a piece of a call as streams of chat completions have it."""
    if not part.text:
        return {
            "index": part.index,
            "id": part.call.call_id,
            "type": "function",
            "function": {"name": part.call.name, "arguments": ""},
        }
    return {"index": part.index, "function": {"arguments": part.text}}


def calls_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return calls as messages of chat completions have them."""
    return [
        {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


class AnswerFrames(Frames[ChatEvent]):
    """Writer of one answer in a conversation; a protocol's own writes its events."""

    def headers(self, first: ChatEvent | None) -> Mapping[str, str]:
        """Say whose turn it is, where that is known."""
        return answer_headers(first) if isinstance(first, Started) else {}


def ignored_of(body: QuestionBody) -> dict[str, str]:
    """Return the header of an answer that names the request's fields that nobody here knows."""
    return {"x-kvcellar-ignored": ", ".join(body.ignored)} if body.ignored else {}


def extra_of(end: Ended, body: QuestionBody) -> dict[str, Any]:
    """Return what there is to know of an answer that its protocol has no field for."""
    return {
        **agent_facts(end),
        "finish_cause": end.cause,
        "ignored": list(body.ignored),
        **usage_extra(end.usage),
        "notes": [*body.notes, *end.usage.notes],
    }


def usage_extra(usage: Any) -> dict[str, Any]:
    """Return what an answer took beyond what the protocols know."""
    miss, first_s = usage.miss, usage.time_to_first_token_s
    return {
        "restored_tokens": usage.restored_tokens,
        "restore_s": round(usage.restore_s, 4),
        "first_token_s": first_s if first_s is None else round(first_s, 4),
        "miss": None if miss is None else {**miss.as_json(), "advice": miss.advice},
        "notes": list(usage.notes),
        "rules": [change.as_json() for change in usage.rules],
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
    }


def notes_of(usage: Any) -> dict[str, Any]:
    """Return what a line of the log says of an answer beside its tokens."""
    first_s = usage.time_to_first_token_s
    said = {} if first_s is None else {"first_token_s": round(first_s, 3)}
    return {**said, **({"notes": list(usage.notes)} if usage.notes else {})}


def predictions(usages: Iterable[Any]) -> dict[str, int]:
    """Guesses that were verified, by the names of OpenAI's predicted outputs."""
    counts = [(usage.accepted_tokens, usage.drafted_tokens) for usage in usages]
    accepted = sum(right for right, _ in counts)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": sum(n for _, n in counts) - accepted,
    }


def note(request: Request, **facts: Any) -> None:
    """Put something into the request's line of the log; never text of prompts or answers."""
    request.scope.setdefault("kvcellar.notes", {}).update(facts)
