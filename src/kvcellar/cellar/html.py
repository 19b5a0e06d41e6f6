"""HTML of an agent and of a cellar, for notebooks."""

from __future__ import annotations

import concurrent.futures
from html import escape
from typing import Any

import numpy as np

from kvcellar.agents import Message, ModelHost
from kvcellar.agents.directory import Directory
from kvcellar.agents.text.reading import conversation_apart
from kvcellar.agents.text.transcripts import arguments_of
from kvcellar.engine import CellMap, CellState
from kvcellar.types import IntArray

_COLOURS = {
    CellState.FREE: ("free", "#8883"),
    CellState.EVICTABLE: ("kept for reuse", "#4a90d9"),
    CellState.LOCKED: ("held", "#8e6bbf"),
    CellState.RUNNING: ("answering now", "#e0913a"),
}
_PARTS = 400
"""Parts into which the cells of a cache are summed up for the eye."""

_WAIT_S = 2.0
"""Seconds to wait for a step that is under way."""

_MOST_SHOWN = 2000
"""Characters of one message that are shown."""


def agent_html(name: str, directory: Directory) -> str:
    """Return an agent's conversation and its figures as HTML."""
    agent = directory.agent(name)
    info = directory.info_of(agent)
    of = (
        f", forked from {escape(info.parent)} at token {info.parent_position}"
        if info.parent
        else ""
    )
    said = conversation_apart(agent, directory.host_of(agent))
    rows = "".join(_message(message) for message in said)
    title = f" &middot; {escape(info.title)}" if info.title else ""
    return (
        f"<div><b>{escape(name)}</b>{title} &middot; {escape(info.model)} &middot; "
        f"{info.n_tokens} tokens in {info.n_turns} turns{of}</div>"
        f'<table style="text-align:left">{rows}</table>'
    )


def _message(message: Message) -> str:
    content = message.get("content")
    parts = []
    if message.get("reasoning_content"):
        parts.append(
            f"<details><summary>Thought</summary>{_cut(message['reasoning_content'])}</details>"
        )
    if content:
        parts.append(_cut(content))
    for call in message.get("tool_calls") or ():
        name = escape(str(call["function"]["name"]))
        parts.append(
            f'<div style="border:1px solid #8886;border-radius:4px;padding:2px 8px">Calls '
            f"<b>{name}</b>\n{_cut(arguments_of(call))}</div>"
        )
    return (
        f'<tr><th style="vertical-align:top">{escape(str(message.get("role")))}</th>'
        f'<td style="white-space:pre-wrap;text-align:left">{"".join(parts)}</td></tr>'
    )


def _cut(content: Any) -> str:
    text = content if isinstance(content, str) else str(content)
    return escape(text[:_MOST_SHOWN]) + (" ..." if len(text) > _MOST_SHOWN else "")


def cellar_html(host: ModelHost, directory: Directory) -> str:
    """Return a model's cache, cell by cell, and the agents that it knows, as HTML."""
    cache = host.engine.cache
    agents = sorted(directory.agents(host.name), key=lambda agent: agent.used_s, reverse=True)
    rows = "".join(
        f"<tr><td>{escape(one.agent_id)}</td><td>{escape(one.title)}</td><td>{len(one.tokens)}</td><td>{len(one.turns)}</td>"
        f"</tr>"
        for one in agents[:20]
    )
    more = f"<div>and {len(agents) - 20} more</div>" if len(agents) > 20 else ""
    return (
        f"<div><b>{escape(host.name)}</b> &middot; {cache.capacity} cells in "
        f"{escape(cache.config.kv_dtype)}, each the K and V of one token</div>{_cells(host)}"
        f"<table><tr><th>agent</th><th>title</th><th>tokens</th><th>turns</th></tr>{rows}</table>{more}"
    )


def _cells(host: ModelHost) -> str:
    """Return a bar of the cache's cells; a word where the engine is in a long step."""
    try:
        found: CellMap = host.service.run(lambda engine: engine.cell_map(())).result(_WAIT_S)
    except concurrent.futures.TimeoutError:
        return "<div>(the engine is in a long step)</div>"
    counts = "".join(
        f'<span style="margin-right:1em"><span style="background:{colour}">&emsp;</span> '
        f"{int((found.states == state).sum())} {words}</span>"
        for state, (words, colour) in _COLOURS.items()
    )
    bar = "".join(
        f'<span style="background:{_COLOURS[CellState(state)][1]};flex:{n}"></span>'
        for state, n in _runs(_summed(found.states))
    )
    return f'<div style="display:flex;height:1.2em;width:100%">{bar}</div><div>{counts}</div>'


def _summed(states: IntArray) -> IntArray:
    """Return the busiest state of each part of the cells."""
    parts = np.array_split(states, min(_PARTS, max(1, len(states))))
    return np.array([int(part.max(initial=0)) for part in parts], dtype=np.int64)


def _runs(states: IntArray) -> list[tuple[int, int]]:
    """Return (state, how many follow each other) from the beginning."""
    starts = np.flatnonzero(np.diff(states, prepend=-1))
    stops = np.append(starts[1:], len(states))
    return [(int(states[a]), int(b - a)) for a, b in zip(starts, stops, strict=True)]
