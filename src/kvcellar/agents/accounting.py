"""Accounts of a turn: tokens read, reused, restored and sampled, and why reuse was lost."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvcellar.agents.kv.residence import MIN_GAIN, BroughtBack
from kvcellar.agents.planning import PlannedTurn
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.misses import Miss, explain, miss_beside
from kvcellar.agents.records.views import Took
from kvcellar.engine import FinishEvent
from kvcellar.hosting.conversation import what_changed
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.volatile import RuleChange
from kvcellar.store import SaveTicket


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """Costs of one turn. Tokens are tokens of the prompt unless said otherwise.

    Attributes:
        prompt_tokens: all of them: the history and what is new.
        cached_tokens: those that were not computed: in the cache already, or restored.
        restored_tokens: of these, those that came from the store.
        restored_from: of these, how many from which tier (``warm``: RAM, ``cold``: disk,
            ``shared``: another machine's).
        completion_tokens: tokens that were sampled.
        restore_s: seconds spent on loading.
        time_to_first_token_s: from the turn's beginning, loading included; None without a token.
        drafted_tokens: guesses that were verified.
        accepted_tokens: guesses that were right.
        miss: reuse that was lost, and why; None where nothing was.
        notes: what else there is to know: another model, a template that rewrites old turns.
        rules: what rules changed of what was sent.
    """

    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    restored_from: Mapping[str, int]
    completion_tokens: int
    restore_s: float
    time_to_first_token_s: float | None
    drafted_tokens: int
    accepted_tokens: int
    miss: Miss | None
    notes: tuple[str, ...]
    rules: tuple[RuleChange, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn has ended; nothing follows.

    Attributes:
        agent_id: whose.
        finish: how, as the engine says it.
        usage: what it took.
        save: what becomes of the state after it; None where nothing was saved.
        history_digest: of the agent's history behind it.
        notice: where else the turn went than it was sent, and what became of it there.
    """

    agent_id: str
    finish: FinishEvent
    usage: AgentUsage
    save: SaveTicket | None
    history_digest: str
    notice: str | None


def miss_of(
    planned: PlannedTurn,
    agent: AgentRecord,
    host: ModelHost,
    event: FinishEvent,
    back: BroughtBack,
    rules: Collection[str],
) -> Miss | None:
    """Return what a turn computed although that had been computed before; None: nothing.

    Args:
        planned: the turn.
        agent: whose; as it was before the turn.
        host: who answered.
        event: the end of the answer.
        back: what was in the cache when it began.
        rules: names of rules for volatile text that apply.
    """
    if not agent.turns and agent.miss is not None:  # of a name that belongs to another model
        return agent.miss
    miss = _miss_of_own(planned, agent, host, event, back)
    if miss is None and agent.live.beside is not None and event.usage is not None:
        return _miss_beside(planned, agent.live.beside, host, event.usage.cached_tokens, rules)
    return miss


def _miss_of_own(
    planned: PlannedTurn, agent: AgentRecord, host: ModelHost, event: FinishEvent, back: BroughtBack
) -> Miss | None:
    """Return what was lost against the agent's own history."""
    before = agent.tokens
    n_same = before.common_prefix(planned.prompt)
    # The last token of a history was sampled and never computed: it is no loss.
    n_differs = len(before) - 1 - n_same
    n_cached = reusable = min(n_same, len(before) - 1, len(planned.prompt) - 1)
    if event.usage is not None:
        n_cached = event.usage.cached_tokens - back.n_computed
    n_gone = reusable - n_cached
    has_states = host.engine.cache.config.params.state is not None
    n_now = len(planned.prompt) + len(event.token_ids)
    is_turned_anew = host.reading(len(before)).space != host.reading(n_now).space
    texts = (before, planned.prompt, host.tokenizer)
    if has_states and n_gone >= max(n_differs, MIN_GAIN) and back.lacks_snapshot(n_cached):
        return explain("snapshot", n_gone, n_cached, *texts)
    if is_turned_anew and n_gone > 0:
        return explain("rope", n_gone, n_cached, *texts)
    if n_differs > 0:
        n_lost = n_differs + (max(0, n_gone) if has_states else 0)
        return explain(planned.changed or "edited", n_lost, n_same, *texts)
    least = MIN_GAIN if has_states else host.engine.cache.block_size
    if n_gone < least:  # a block that is not full is not shared, nor states between snapshots
        return None
    return explain(_why_gone(host, back, n_gone, n_cached), n_gone, n_cached, *texts)


def _why_gone(host: ModelHost, back: BroughtBack, n_gone: int, n_cached: int) -> str:
    """Say why tokens of a history that goes on were computed again."""
    if back.is_recomputed or back.n_computed:
        return "recomputed"
    if host.key.layout.window_groups and n_cached:
        return "window"
    return "recomputed" if n_gone < MIN_GAIN else "evicted"  # so few are not loaded


def _miss_beside(
    planned: PlannedTurn, other: AgentRecord, host: ModelHost, n_cached: int, rules: Collection[str]
) -> Miss | None:
    """Return what a conversation's first turn lost against the agent that it came close to."""
    messages = planned.messages
    if other.key != host.key or messages is None:
        return None
    n_known = other.messages.n_matched(messages, rules)
    cause = what_changed(other.messages, messages, n_known, rules)
    if (planned.tools or None) != (other.tools or None):
        cause = "tools"
    return miss_beside(other.tokens, planned.prompt, n_cached, cause or "edited", host.tokenizer)


def took_of(
    agent: AgentRecord, event: FinishEvent, back: BroughtBack, started_s: float
) -> Took | None:
    """Return what a turn took, for the history; None where it never ran.

    Args:
        agent: whose; its ``miss`` is the turn's.
        event: the end of the answer.
        back: what was in the cache when it began.
        started_s: when it began, by ``time.perf_counter``.
    """
    usage, miss = event.usage, agent.miss
    if usage is None:
        return None
    first_s = round(back.load_s + usage.time_to_first_token_s, 4) if event.token_ids else None
    return Took(
        n_cached=usage.cached_tokens - back.n_computed,
        n_restored=back.n_restored,
        first_s=first_s,
        total_s=round(time.perf_counter() - started_s, 4),
        n_lost=miss.tokens_lost if miss else 0,
        cause=miss.cause if miss else "",
    )


def usage_of(
    planned: PlannedTurn,
    agent: AgentRecord,
    event: FinishEvent,
    back: BroughtBack,
    first_s: float | None,
) -> AgentUsage:
    """Sum up what a turn took.

    Args:
        planned: the turn.
        agent: whose; as it is after the turn.
        event: the end of the answer.
        back: what was in the cache when it began.
        first_s: seconds to its first token; None without one.
    """
    usage = event.usage
    return AgentUsage(
        prompt_tokens=len(planned.prompt),
        cached_tokens=usage.cached_tokens - back.n_computed if usage is not None else 0,
        restored_tokens=back.n_restored,
        restored_from=dict(back.tiers) if back.n_restored else {},
        completion_tokens=len(event.token_ids),
        restore_s=back.load_s,
        time_to_first_token_s=first_s,
        drafted_tokens=usage.drafted_tokens if usage is not None else 0,
        accepted_tokens=usage.accepted_tokens if usage is not None else 0,
        miss=agent.miss,
        notes=(*_notes_of_turn(planned), *agent.notes, *_notes_of(back)),
        rules=planned.rules,
    )


def _notes_of_turn(planned: PlannedTurn) -> tuple[str, ...]:
    """Say where else the turn went than it was sent, and what the template took otherwise."""
    where = () if planned.notice is None else (planned.notice,)
    return (*where, *planned.notes)


def _notes_of(back: BroughtBack) -> list[str]:
    """Say what there is to know of a restore."""
    notes = [back.trouble] if back.trouble else []
    if back.n_verified is not None:
        notes.append(
            f"{back.n_verified} restored rows were computed again and agree"
            if back.n_verified
            else "no restored row could be computed again: windows or states before are not stored"
        )
    if not back.is_exact:
        notes.append("the KV that was restored had been stored in 8 bits")
    return notes
