"""One turn: from what somebody says to tokens; at its end, what it took and what it lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcellar.agents.history import Message, Prefixes, Spoken, plan_messages
from kvcellar.agents.host import ModelHost
from kvcellar.agents.misses import Miss, explain
from kvcellar.agents.models import model_notes
from kvcellar.agents.records import Agent, Turn
from kvcellar.agents.residence import MIN_GAIN, BroughtBack
from kvcellar.agents.volatile import RuleChange
from kvcellar.engine import FinishEvent
from kvcellar.errors import PromptError
from kvcellar.models.prompts import common_prefix
from kvcellar.store import SaveTicket

__all__ = [
    "AgentUsage",
    "AnswerFn",
    "StartFn",
    "TurnEnd",
    "TurnPlan",
    "miss_of",
    "plan_turn",
    "record_turn",
    "usage_of",
]

AnswerFn = Callable[[str], Message]
"""From the text of an answer to the message that clients will send back for it."""

StartFn = Callable[[Sequence[int], int], None]
"""Called with a turn's tokens and how many of them the cache holds; it may refuse by raising."""


@dataclass(frozen=True, slots=True)
class AgentUsage:
    """What a turn took. Tokens are tokens of the prompt unless said otherwise.

    Attributes:
        prompt_tokens: all of them: the history and what is new.
        cached_tokens: those that were not computed: in the cache already, or restored.
        restored_tokens: of these, those that came from the store.
        restored_from: of these, how many from which tier (``warm``: RAM, ``cold``: disk).
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
    """

    agent_id: str
    finish: FinishEvent
    usage: AgentUsage
    save: SaveTicket | None


@dataclass(slots=True)
class TurnPlan:
    """What a turn brings.

    Attributes:
        tokens: the whole prompt.
        messages: the whole conversation, as the model reads it.
        tools: definitions of its tools.
        turns: the earlier turns that it goes on from, with their places in ``tokens``.
        n_messages: messages of these turns.
        changed: what keeps the history from being continued; None where nothing does.
        rules: what rules changed of what was sent.
        is_chat: whether it was given as messages.
        miss: reuse that was lost before it began.
        answer: makes the message of the answer.
    """

    tokens: Sequence[int]
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None
    turns: tuple[Turn, ...]
    n_messages: int
    changed: str | None = None
    rules: tuple[RuleChange, ...] = ()
    is_chat: bool = False
    miss: Miss | None = None
    answer: AnswerFn | None = None


def plan_turn(
    agent: Agent,
    host: ModelHost,
    text: str | None,
    messages: Sequence[Mapping[str, Any]] | None,
    tokens: Sequence[int] | None,
    tools: Sequence[Mapping[str, Any]] | None,
    role: str,
    rules: Collection[str],
    *,
    control_tokens_in_text: bool = False,
) -> TurnPlan:
    """The tokens of a turn, and what kept the history from being continued."""
    history = agent.tokens
    if tokens is not None:
        whole = [*history, *map(int, tokens)]
        if not tokens:
            raise PromptError(f"the turn of agent {agent.agent_id!r} brings no tokens")
        return TurnPlan(whole, agent.messages, agent.tools, agent.turns, len(agent.messages))
    if host.tokenizer is None:
        raise PromptError(f"model {host.name!r} has no tokenizer; give tokens")
    _decode_cut(agent, host)
    if messages is None:
        messages = [*agent.messages, {"role": role, "content": text}]
    tools = tools if tools is not None else agent.tools
    said: Spoken = plan_messages(
        host.tokenizer,
        history,
        agent.messages,
        agent.tools,
        messages,
        tools,
        rules,
        control_tokens_in_text=control_tokens_in_text,
        context=host.context,
    )
    turns, n_messages = _turns_within(agent, said)
    if not turns and said.messages[0].get("role") == "system":
        n_messages = 1
    return TurnPlan(
        said.tokens,
        tuple(said.messages),
        said.tools,
        turns,
        n_messages,
        said.changed or _what_differs(agent, host, said.prefixes),
        said.changes,
        is_chat=True,
    )


def _turns_within(agent: Agent, said: Spoken) -> tuple[tuple[Turn, ...], int]:
    """The turns of an agent that a conversation repeats, where they are in it, and their messages.

    Where the template writes a turn otherwise by now, or the answer is read in other tokens than it
    was sampled in, its place is found anew.
    """
    prefixes = said.prefixes
    kept: list[tuple[Turn, int]] = []
    for turn, end in agent.turns_with_ends():
        is_said = end > turn.n_messages
        if end > said.n_known or (turn.stop > prefixes.n_common and not is_said):
            break
        kept.append((turn, end))
    moved: list[Turn] = []
    stop = len(prefixes.tokens)
    for turn, end in reversed(kept):  # the last ones matter most, should there be many
        if turn.stop > prefixes.n_common:
            stop = min(stop, prefixes.end_of(end, is_asking=False))
            n_prompt = min(stop, prefixes.end_of(end - 1, is_asking=True))
            start = min(turn.start, n_prompt)
            turn = Turn(start, n_prompt, stop, turn.n_messages, turn.reason)
        moved.append(turn)
    return tuple(reversed(moved)), kept[-1][1] if kept else 0


def _what_differs(agent: Agent, host: ModelHost, prefixes: Prefixes) -> str | None:
    """Why messages that are the same have other tokens; None where they have not."""
    at, history = prefixes.n_common, agent.tokens
    if at >= len(history) - 1:
        return None
    for turn in agent.turns:
        if turn.n_prompt <= at < turn.stop:
            assert host.tokenizer is not None
            n_more = 2 * (turn.stop - turn.n_prompt) + 16
            was, now = (
                host.tokenizer.decode(
                    list(part), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
                for part in (
                    history[turn.n_prompt : turn.stop],
                    prefixes.tokens[turn.n_prompt : turn.n_prompt + n_more],
                )
            )
            return "retokenised" if now.startswith(was) else "template"
    return "template"


def _decode_cut(agent: Agent, host: ModelHost) -> None:
    """Give an answer that was cut in its middle the text that is left of it."""
    if agent.messages and agent.messages[-1].get("content", "") is None and agent.turns:
        assert host.tokenizer is not None
        part = list(agent.tokens[agent.turns[-1].n_prompt :])
        text = host.tokenizer.decode(part, skip_special_tokens=True)
        agent.messages = (*agent.messages[:-1], {"role": "assistant", "content": text})


def record_turn(
    agent: Agent, host: ModelHost, turn: TurnPlan, event: FinishEvent, before: tuple[int, ...]
) -> None:
    """Take what a turn said into the agent's history."""
    n_before = common_prefix(before, turn.tokens)
    agent.tokens = (*turn.tokens, *event.token_ids)
    if turn.is_chat:
        answer = {"role": "assistant", "content": event.text}
        if turn.answer is not None:
            answer = turn.answer(event.text)
        agent.messages = (*turn.messages, answer)
        agent.tools = turn.tools
    n_tokens = len(turn.tokens)
    now = Turn(n_before, n_tokens, len(agent.tokens), turn.n_messages, event.reason)
    agent.turns = (*turn.turns, now)
    first = () if agent.turns[1:] else agent.notes  # what its creation had to say
    agent.notes = (*first, *model_notes(host))
    agent.used_s = time.time()
    agent.is_waiting = agent.is_paused = agent.is_finished = False
    agent.rates = host.costs.as_json()


def miss_of(
    agent: Agent,
    host: ModelHost,
    turn: TurnPlan,
    event: FinishEvent,
    before: tuple[int, ...],
    back: BroughtBack,
) -> Miss | None:
    """What the turn had to compute although its history had been computed before."""
    if turn.miss is not None:
        return turn.miss
    n_same = common_prefix(before, turn.tokens)
    # The last token of a history was sampled and never computed: it is no loss.
    n_lost = len(before) - 1 - n_same
    if n_lost > 0:
        return explain(
            turn.changed or "edited", n_lost, n_same, before, turn.tokens, host.tokenizer
        )
    reusable = min(n_same, len(before) - 1, len(turn.tokens) - 1)
    n_cached = reusable
    if event.usage is not None:
        n_cached = event.usage.cached_tokens - back.n_computed
    n_lost = reusable - n_cached
    if n_lost < host.engine.cache.block_size:  # a page that is not full is not shared
        return None
    cause = "evicted"
    if back.is_recomputed or back.n_computed:
        cause = "recomputed"
    elif host.key.layout.window_groups and n_cached:
        cause = "window"
    elif n_lost < MIN_GAIN:  # so few are not loaded, whoever has them
        cause = "recomputed"
    return explain(cause, n_lost, n_cached, before, turn.tokens, host.tokenizer)


def usage_of(
    agent: Agent,
    turn: TurnPlan,
    event: FinishEvent,
    back: BroughtBack,
    first_s: float | None,
) -> AgentUsage:
    """What a turn took, the caller's view."""
    usage = event.usage
    return AgentUsage(
        prompt_tokens=len(turn.tokens),
        cached_tokens=usage.cached_tokens - back.n_computed if usage is not None else 0,
        restored_tokens=back.n_restored,
        restored_from=dict(back.tiers) if back.n_restored else {},
        completion_tokens=len(event.token_ids),
        restore_s=back.load_s,
        time_to_first_token_s=first_s,
        drafted_tokens=usage.drafted_tokens if usage is not None else 0,
        accepted_tokens=usage.accepted_tokens if usage is not None else 0,
        miss=agent.miss,
        notes=(*agent.notes, *_notes_of(back)),
        rules=turn.rules,
    )


def _notes_of(back: BroughtBack) -> list[str]:
    """What there is to know of a restore."""
    notes = [back.trouble] if back.trouble else []
    if back.n_verified is not None:
        notes.append(
            f"{back.n_verified} restored rows were computed again and agree"
            if back.n_verified
            else "no restored row could be computed again: their windows are not stored"
        )
    if not back.is_exact:
        notes.append("the KV that was restored had been stored in 8 bits")
    return notes
