"""A turn on its way: from what somebody says to a prompt, and into the agent's history.

The prompt is always what the template makes of the whole conversation as it came, rendered and
encoded anew. What an agent has computed before is found by comparing tokens, so warm and cold are
the same conversation, whatever a template does to old turns: where it changes one, the turn is
computed from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcellar.agents.kv.residence import ProgressFn
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.looks import recalled
from kvcellar.agents.records.views import Took, TurnRecord
from kvcellar.agents.text.match_messages import Joined
from kvcellar.agents.text.reading import Reading, worded
from kvcellar.engine import DEFAULTABLE, FinishEvent, SamplingParams
from kvcellar.errors import PromptError
from kvcellar.history import History
from kvcellar.hosting.conversation import Prefixes, split_begun, what_changed
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.models import model_notes
from kvcellar.hosting.text_limits import refuse_text
from kvcellar.hosting.volatile import RuleChange, apply_rules, keep_known
from kvcellar.models.seeing import Look
from kvcellar.models.text.pictures import names_in
from kvcellar.models.text.prompts import encode, render
from kvcellar.pictures.picture import Picture
from kvcellar.pictures.tokens import check_ids, ids_of

StartFn = Callable[["PlannedTurn", int], None]
"""Called with a turn and how much of its prompt the cache holds; it may refuse by raising."""

_DEFAULT = SamplingParams(unset=DEFAULTABLE)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One turn of an agent, as it is asked for.

    One of ``text``, ``behind``, ``messages`` and ``tokens`` is given.

    Attributes:
        agent_id: whose turn; empty while the agent has still to be found.
        text: what somebody says next.
        behind: messages that are said next, behind the history.
        messages: the whole conversation, as a client sends it back; what begins with the same
            tokens as the history is not computed again.
        joined: how these messages meet the agent's history, where that was looked at.
        tokens: tokens behind the history.
        tools: definitions of tools; None: as before.
        template_kwargs: what the chat template takes beside messages and tools, such as
            ``enable_thinking``; None: as before, as far as the model's template takes it.
        role: who says ``text``: ``user`` or ``tool``.
        params: how to sample; left out: as the model wants it, or else the likeliest token.
        priority: higher goes first.
        model: to run on; another one than before reads the conversation anew, and its history
            stays what it was.
        deadline_s: longest time to wait for room; None for any.
        follows: digest of the history that it goes on from, as ``AgentInfo`` has it; where the
            agent has another one by then, or is in a turn, it is refused. None: of any history.
        is_continuing: refuse ``messages`` that do not continue the agent's history.
        reading: how its answer is read, and what is kept of it; None: its text.
        on_start: told what the turn is and what the cache has of it, before it is queued.
        progress: told about a restore.
    """

    agent_id: str = ""
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tokens: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    role: str = "user"
    behind: Sequence[Mapping[str, Any]] | None = None
    params: SamplingParams = _DEFAULT
    priority: int = 0
    model: str | None = None
    deadline_s: float | None = None
    follows: str | None = None
    is_continuing: bool = False
    joined: Joined | None = None
    reading: Reading | None = None
    on_start: StartFn | None = None
    progress: ProgressFn | None = None

    def __post_init__(self) -> None:
        given = (self.text, self.behind, self.messages, self.tokens)
        if sum(said is not None for said in given) != 1:
            raise PromptError("give one of text, behind, messages and tokens to a turn")
        if not isinstance(self.text, str | None):  # no store could keep it
            raise PromptError(f"the text of a turn has to be a str, got {self.text!r:.80}")

    @property
    def asked(self) -> str | None:
        """Text that it answers; None for tokens, and where the last message is no text."""
        messages = self.messages or self.behind
        if self.text is not None or not messages:
            return self.text
        said = messages[-1].get("content")
        return said if isinstance(said, str) else None

    @property
    def is_chat(self) -> bool:
        """True if it is given as messages, or as text that becomes one."""
        return self.tokens is None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedTurn:
    """A turn with the prompt that it becomes, and what its agent's history takes of it.

    Attributes:
        turn: what was asked; its agent is the one that takes it.
        prompt: all tokens.
        kept: the earlier turns that it goes on from, with their places in ``prompt``.
        n_messages: messages of these turns.
        snapshots_at: lengths of the prompt at which later ones are likely to go on otherwise, for
            a model that cannot be cut back everywhere.
        messages: the conversation as the model reads it, without the answer; None for tokens.
        n_matched: leading messages that the history has, too.
        begun: the text with which the answer has begun already, as it was sent.
        tools: the definitions that were rendered.
        template_kwargs: what else the template took.
        changed: what keeps the history from being continued, such as ``system``, ``tools``,
            ``truncated``, ``edited`` or ``echoed``; None where nothing does.
        rules: what rules changed of what was sent.
        notes: what the template takes otherwise than it was sent, in sentences.
        notice: where else the turn went than it was sent, and what became of it there.
    """

    turn: Turn
    prompt: History = field(repr=False)
    kept: tuple[TurnRecord, ...]
    n_messages: int
    snapshots_at: tuple[int, ...]
    messages: Messages | None = field(default=None, repr=False)
    n_matched: int = 0
    begun: str = ""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    changed: str | None = None
    rules: tuple[RuleChange, ...] = ()
    notes: tuple[str, ...] = ()
    notice: str | None = None
    looks: dict[str, Look] = field(default_factory=dict, repr=False)
    """By the name of each picture of the prompt: the text and rows that stand there for it."""
    pictures: tuple[Picture, ...] = field(default=(), repr=False)
    """Pictures in it that are in memory, so that they stay there until it has ended."""


def plan_turn(
    turn: Turn,
    agent: AgentRecord,
    host: ModelHost,
    rules: Collection[str],
    *,
    control_tokens_in_text: bool = False,
    n_matched: int | None = None,
) -> PlannedTurn:
    """Make the prompt of a turn, and find out what keeps the history from being continued.

    Args:
        turn: what was asked; where the last of its messages is an answer, it is gone on with.
        agent: whose.
        host: who answers.
        rules: names of rules for volatile text that apply; see ``volatile.RULES``.
        control_tokens_in_text: whether text of messages may spell control tokens.
        n_matched: leading messages that are the agent's; None: they have still to be compared.

    Raises:
        ContextError: it has many more tokens than the model's context, and not all were counted.
        PromptError: there is nothing to answer, the last message has calls whose results are not
            there, the model takes tokens alone, or its template takes no argument of such a name.
        ModelError: the template refuses the messages, or there is none.
    """
    if turn.tokens is not None:
        return _plan_tokens(turn, turn.tokens, agent, host)
    if host.tokenizer is None:
        raise PromptError(f"model {host.name!r} has no tokenizer; give tokens")
    if _decode_cut(agent, host):
        n_matched = None
    known = agent.messages
    messages, tools = _asked_of(turn, agent, host)
    said, begun = split_begun(messages)
    if not said or (said[-1].get("role") == "assistant" and not begun):
        raise PromptError(
            "a turn needs a message to answer; end the conversation with the user's or a tool's, "
            "or with an answer without calls that is to be gone on with"
        )
    sent = apply_rules(messages if begun else said, tools, rules)
    if n_matched is None:
        n_matched = known.n_matched(sent.messages, rules)
    n_said = min(n_matched, len(said))
    ruled = keep_known(sent, known, n_said, rules)
    kwargs = dict(kwargs_of(turn.template_kwargs, agent, host))
    looks = recalled(host.looks, agent)
    rendered = render(
        host.tokenizer,
        ruled.messages,
        ruled.tools,
        template_kwargs=kwargs,
        control_tokens_in_text=control_tokens_in_text,
        looks=looks,
    )
    refuse_text(host.tokenizer, rendered.text, host.context)
    prompt = History(encode(host.tokenizer, rendered))
    read = ruled.messages.prefix(len(said))
    prefixes = Prefixes(
        host.tokenizer,
        read,
        ruled.tools,
        kwargs,
        rendered,
        prompt,
        agent.tokens.common_prefix(prompt),
        control_tokens_in_text,
        looks,
    )
    n_known = 0  # messages whose tokens can be the history's: none with other tools, nor the last
    changed: str | None = "tools"
    if not known or ruled.tools == agent.tools:
        n_known = min(n_matched, len(said) - 1)
        # an answer that was there is gone on with: no message of it was dropped
        n_same = n_matched if begun else n_known
        changed = what_changed(known, ruled.messages, n_same, rules)
    kept, n_messages = _turns_within(agent, prefixes, n_known)
    if not kept and read[0].get("role") == "system":
        n_messages = 1
    is_taken_otherwise = bool(agent.turns) and kwargs != agent.template_kwargs
    return PlannedTurn(
        turn,
        prompt,
        kept,
        n_messages,
        () if _is_cut_anywhere(host) else prefixes.divergences(),
        read,
        n_said,
        begun,
        ruled.tools,
        kwargs,
        changed or _what_differs(agent, host, prefixes, is_taken_otherwise),
        ruled.changes,
        rendered.notes,
        looks=dict(rendered.pictures),
        pictures=() if host.looks is None else host.shelf.held(names_in(ruled.messages)),
    )


def _plan_tokens(
    turn: Turn, tokens: Sequence[int], agent: AgentRecord, host: ModelHost
) -> PlannedTurn:
    """Put tokens behind the history.

    Raises:
        PromptError: there are none, or one is no id of a vocabulary.
    """
    if not tokens:
        raise PromptError(f"the turn of agent {agent.agent_id!r} brings no tokens")
    check_ids(tokens)
    prompt = History(agent.tokens)
    prompt.extend(tokens)
    found: set[int] = set()
    if not _is_cut_anywhere(host):  # others may fork here, or ask for another answer
        found = {min(len(agent.tokens), len(prompt) - 1), len(prompt) - 1}
    snapshots_at = tuple(sorted(found - {0}))
    return PlannedTurn(turn, prompt, agent.turns, len(agent.messages), snapshots_at)


def _is_cut_anywhere(host: ModelHost) -> bool:
    """Return true if the cells of a history can be cut back to any of its lengths."""
    return all(sight.is_full for sight in host.engine.cache.config.params.sights)


def _asked_of(
    turn: Turn, agent: AgentRecord, host: ModelHost
) -> tuple[Messages, Sequence[Mapping[str, Any]] | None]:
    """Return the whole conversation that a turn is to answer, and definitions of its tools."""
    messages, tools = turn.messages, turn.tools
    if messages is None:
        behind = turn.behind or [{"role": turn.role, "content": turn.text}]
        messages = agent.messages.plus(behind)
        if turn.reading is not None:
            messages, tools = worded(messages, tools, turn.reading, host)
    return Messages(messages), tools if tools is not None else agent.tools


def kwargs_of(
    given: Mapping[str, Any] | None, agent: AgentRecord | None, host: ModelHost
) -> Mapping[str, Any]:
    """Return what a turn gives to its model's chat template: its own, or what its agent has had."""
    if given is not None or agent is None:
        return given or {}
    takes = host.template.takes if host.template is not None else ()
    return {name: value for name, value in agent.template_kwargs.items() if name in takes}


def _turns_within(
    agent: AgentRecord, prefixes: Prefixes, n_known: int
) -> tuple[tuple[TurnRecord, ...], int]:
    """Find the turns of an agent that a conversation repeats, and count their messages.

    Where the template writes a turn otherwise by now, or the answer is read in other tokens than it
    was sampled in, its place is found anew.

    Args:
        agent: whose turns.
        prefixes: tokens of the conversation, and where its messages end.
        n_known: its leading messages that the agent's history has.
    """
    kept: list[tuple[TurnRecord, int]] = []
    for turn, end in agent.turns_with_ends():
        is_said = end > turn.n_messages
        if end > n_known or (turn.stop > prefixes.n_common and not is_said):
            break
        kept.append((turn, end))
    moved: list[TurnRecord] = []
    stop = len(prefixes.tokens)
    for turn, end in reversed(kept):  # the last ones matter most, should there be many
        if turn.stop > prefixes.n_common:
            stop = min(stop, prefixes.end_of(end, is_asking=False))
            n_prompt = min(stop, prefixes.end_of(end - 1, is_asking=True))
            start = min(turn.start, n_prompt)
            turn = replace(turn, start=start, n_prompt=n_prompt, stop=stop)
        moved.append(turn)
    return tuple(reversed(moved)), kept[-1][1] if kept else 0


def _what_differs(
    agent: AgentRecord, host: ModelHost, prefixes: Prefixes, is_taken_otherwise: bool
) -> str | None:
    """Say why messages that are the same have other tokens; None where they have not."""
    at, history = prefixes.n_common, agent.tokens
    if at >= len(history) - 1:
        return None
    if is_taken_otherwise:
        return "arguments"
    for turn in agent.turns:
        if turn.n_prompt <= at < turn.stop:
            assert host.tokenizer is not None
            n_more = 2 * (turn.stop - turn.n_prompt) + 16
            was, now = (
                host.tokenizer.decode(
                    ids_of(part).tolist(),
                    skip_special_tokens=True,
                    clean_up_tokenization_spaces=False,
                )
                for part in (
                    history[turn.n_prompt : turn.stop],
                    prefixes.tokens[turn.n_prompt : turn.n_prompt + n_more],
                )
            )
            return "retokenised" if now.startswith(was) else "template"
    return "template"


def _decode_cut(agent: AgentRecord, host: ModelHost) -> bool:
    """Give an answer that was cut in its middle the text that is left of it; whether there was."""
    is_cut = agent.messages and agent.messages[-1].get("content", "") is None and agent.turns
    if not is_cut:
        return False
    assert host.tokenizer is not None
    part = agent.tokens[agent.turns[-1].n_prompt :].tolist()
    text = host.tokenizer.decode(part, skip_special_tokens=True)
    last = len(agent.messages) - 1
    agent.messages = agent.messages.but({last: {"role": "assistant", "content": text}})
    return True


def record_turn(
    planned: PlannedTurn, agent: AgentRecord, host: ModelHost, event: FinishEvent, took: Took | None
) -> None:
    """Take what a turn said into the agent's history.

    Args:
        planned: the turn.
        agent: whose; its history is the turn's from then on.
        host: who answered.
        event: the end of the answer.
        took: what it took; None: it never ran.
    """
    n_before = agent.tokens.common_prefix(planned.prompt)
    agent.tokens = History(planned.prompt)
    agent.tokens.extend(event.token_ids)
    if planned.messages is not None:
        text, reading = planned.begun + event.text, planned.turn.reading
        answer = {"role": "assistant", "content": text} if reading is None else reading.kept(text)
        agent.messages = planned.messages.plus([answer])
        agent.tools, agent.template_kwargs = planned.tools, planned.template_kwargs
        agent.looks = planned.looks
    n_prompt = len(planned.prompt)
    reason, finish = event.reason, event.finish
    is_full = finish is not None and finish.cause in ("context_full", "cache_full")
    ended = finish.cause if finish is not None and is_full else reason
    now = TurnRecord(n_before, n_prompt, len(agent.tokens), planned.n_messages, ended, took)
    agent.turns = (*planned.kept, now)
    is_stable = host.template is not None and host.template.is_prefix_stable
    is_ended_alike = is_stable and planned.changed not in ("retokenised", "template", "arguments")
    agent.live.resume_at = (
        () if is_ended_alike or planned.messages is None else planned.snapshots_at
    )
    first = () if agent.turns[1:] else agent.notes  # what its creation had to say
    agent.notes = (*first, *model_notes(host))
    agent.used_s = time.time()
    agent.is_waiting = agent.is_paused = agent.is_finished = False
    agent.rates = host.costs.as_json()
