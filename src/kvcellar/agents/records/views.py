"""An agent as others see it, and its turns as they are remembered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvcellar.agents.records.misses import Miss


@dataclass(frozen=True, slots=True)
class Took:
    """Costs of one turn, as they are remembered beside it.

    Attributes:
        n_cached: tokens of the prompt that were not computed: in the cache already, or restored.
        n_restored: of these, those that came from the store.
        first_s: seconds to the first token, a restore included; None where none came.
        total_s: seconds to the end.
        n_lost: tokens that were computed although they had been before.
        cause: why, one of ``CAUSES``; empty where none were.
    """

    n_cached: int
    n_restored: int
    first_s: float | None
    total_s: float
    n_lost: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of an agent, as token counts of its history.

    Attributes:
        start: tokens before it.
        n_prompt: tokens up to where sampling began.
        stop: tokens at its end.
        n_messages: messages before it.
        reason: why it ended: ``stop``, ``length``, ``cancelled`` or ``error`` as the engine says
            it; ``context_full`` or ``cache_full`` where that was the length; ``cut`` where it was
            cut back since.
        took: what it took; None where nobody noted it.
    """

    start: int
    n_prompt: int
    stop: int
    n_messages: int
    reason: str
    took: Took | None = None


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """An agent as others see it.

    Attributes:
        agent_id: its name.
        title: for people: as it was given, or the first words that were said to it; empty: none.
        is_named: whether people know it by its id: it was chosen, and no other title was given.
        model: the model that its history belongs to.
        kv_dtype: how its K and V are stored.
        state: ``idle``, ``generating``, ``waiting`` (for a tool), ``paused``, ``finished``, or
            ``damaged``: what is stored of it cannot be read, and nothing else of it is known.
        n_tokens: length of its history.
        n_stored: leading tokens whose KV is in the store.
        n_turns: turns so far.
        n_messages: messages of its conversation.
        history_digest: of its tokens; a turn says by it which history it follows.
        parent: the agent that it was forked from.
        is_parent_gone: whether that one was deleted, though another may have its name by now.
        parent_position: tokens that it took over from that one.
        created_s: seconds since 1970.
        used_s: the same, of its last turn.
        n_cached: leading tokens that the cache holds; None where nobody asked the engine.
        miss: what the last turn had to compute again, and why.
        parted_from: of those forked from one agent, and it, the earlier one with which it has most
            tokens in common; None where there is none, or nobody asked.
        parted_at: these tokens.
        damage: why it cannot be read, of one that is damaged.
        notes: what there is to know of the verb that told of it.
    """

    agent_id: str
    title: str
    is_named: bool
    model: str
    kv_dtype: str
    state: str
    n_tokens: int
    n_stored: int
    n_turns: int
    n_messages: int
    history_digest: str
    parent: str | None
    parent_position: int | None
    created_s: float
    used_s: float
    n_cached: int | None = None
    miss: Miss | None = None
    is_parent_gone: bool = False
    parted_from: str | None = None
    parted_at: int | None = None
    damage: str | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return an agent as ``--json`` prints it."""
        value = asdict(self)
        value["id"] = value.pop("agent_id")
        miss = self.miss
        value["miss"] = None if miss is None else miss.as_json() | {"advice": miss.advice}
        return value


def damaged_info(name: str, why: str) -> AgentInfo:
    """Return what can be said of an agent whose reference cannot be read.

    Args:
        name: of the reference, or of its file where that is all that is known.
        why: what is wrong with it.
    """
    return AgentInfo(
        agent_id=name.rpartition("@")[0] or name,
        title="",
        is_named=True,
        model="",
        kv_dtype="",
        state="damaged",
        n_tokens=0,
        n_stored=0,
        n_turns=0,
        n_messages=0,
        history_digest="",
        parent=None,
        parent_position=None,
        created_s=0.0,
        used_s=0.0,
        damage=why,
    )
