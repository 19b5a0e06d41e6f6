"""Cells that only one agent needs: freed at once, or the first to go."""

from __future__ import annotations

import contextlib

from kvcellar.agents.directory import Directory
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.errors import EngineClosedError
from kvcellar.history import History


async def free_cells(
    directory: Directory, agent: AgentRecord, tokens: History | None = None, keep: int = 0
) -> None:
    """Free the cells that no other agent needs: of an agent's history, or of one that it had.

    Args:
        directory: who the others are.
        agent: whose.
        tokens: the history; None: the agent's own.
        keep: leading tokens that stay.
    """
    host = directory.host_of(agent)
    if host is None:
        return
    history = agent.tokens if tokens is None else tokens
    shared = [
        history.common_prefix(other.live.expected or other.tokens)
        for other in directory.agents()
        if other is not agent
        and other.key == agent.key
        and not other.is_paused
        and not other.is_finished
    ]
    keep = max(keep, *shared) if shared else keep
    space = host.reading(len(history)).space
    with contextlib.suppress(EngineClosedError):
        await host.between_steps(lambda engine: engine.drop(history.tokens, keep, space))


async def demote_cells(directory: Directory, agent: AgentRecord) -> None:
    """Have the cells that only this agent needs go first where memory is short."""
    host = directory.host_of(agent)
    if host is not None:
        tokens = agent.tokens.tokens
        space = host.reading(len(tokens)).space
        await host.between_steps(lambda engine: engine.demote(tokens, space))
