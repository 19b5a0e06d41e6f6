"""Finds agents by what was said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcellar.agents import salt_of, without_salt
from kvcellar.agents.text.reading import conversation_apart
from kvcellar.errors import UnknownAgentError
from kvcellar.server.answer.pictures import with_links
from kvcellar.server.look.snapshot import agent_as_json
from kvcellar.server.state.service import Service

MOST_PLACES = 3
"""Places of one agent that are told."""

_AROUND = 40
"""Characters of text around a place."""


def messages_of(service: Service, agent_id: str, model: str | None = None) -> list[dict[str, Any]]:
    """Return an agent's conversation as clients read it: thoughts and calls apart from text.

    Pictures have links to them.

    It is read through, so it is for threads.

    Raises:
        UnknownAgentError: none of that name is known here.
    """
    directory = service.agents.directory
    agent = directory.agent(agent_id, model)
    said = conversation_apart(agent, directory.host_of(agent), service.config.dialect)
    return [with_links(service, message, salt_of(agent_id)) for message in said]


def find_text(service: Service, text: str, salt: str = "") -> list[dict[str, Any]]:
    """Return the agents of a salt whose name, title or messages have a text, the latest first.

    In any case. For threads. Each is as routes say it, and has ``found``: the number of a message,
    and the text before, at and behind the place.
    """
    wanted = text.casefold()
    found = []
    for info in reversed(service.agents.directory.infos()):
        if info.damage is not None or salt_of(info.agent_id) != salt:
            continue
        try:
            messages = messages_of(service, info.agent_id, info.model)
        except UnknownAgentError:
            continue  # it has gone since they were listed
        places = list(_places(messages, wanted))
        names = f"{without_salt(info.agent_id)}\n{info.title}".casefold()
        if places or wanted in names:
            found.append({**agent_as_json(service, info), "found": places})
    return found


def _places(messages: Iterable[Mapping[str, Any]], wanted: str) -> Iterable[dict[str, Any]]:
    """Yield the first places of a text in messages."""
    n_left = MOST_PLACES
    for number, message in enumerate(messages):
        said = message.get("content")
        if not isinstance(said, str) or not n_left:
            continue
        at = said.casefold().find(wanted)
        if at < 0 or at >= len(said):
            continue
        n_left -= 1
        stop = at + len(wanted)
        yield {
            "message": number,
            "before": said[max(0, at - _AROUND) : at],
            "text": said[at:stop],
            "behind": said[stop : stop + _AROUND],
        }
