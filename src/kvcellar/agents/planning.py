"""A turn on its way: from what somebody says to a prompt, and into the agent's history."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcellar.agents.kv.residence import ProgressFn
from kvcellar.agents.records.agent import Agent
from kvcellar.agents.records.misses import Miss
from kvcellar.agents.records.views import Took, TurnRecord
from kvcellar.agents.text.reading import Reading, worded
from kvcellar.engine import DEFAULTABLE, FinishEvent, SamplingParams
from kvcellar.errors import PromptError
from kvcellar.history import History
from kvcellar.hosting.conversation import Prefixes, Spoken, plan_messages
from kvcellar.hosting.host import ModelHost
from kvcellar.hosting.models import model_notes

StartFn = Callable[[History, int], None]
"""Called with a turn's tokens and how many of them the cache holds; it may refuse by raising."""

_DEFAULT = SamplingParams(unset=DEFAULTABLE)


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of an agent: what is said, and the prompt that it becomes. For one ``generate``.

    One of ``text``, ``behind``, ``messages`` and ``tokens`` is given.

    Attributes:
        agent_id: whose turn; empty while the agent has still to be found.
        text: what somebody says next.
        behind: messages that are said next, behind the history.
        messages: the whole conversation, as a client sends it back; what begins with the same
            tokens as the history is not computed again.
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
        prompt: once planned, all tokens.
        kept: the earlier turns that it goes on from, with their places in ``prompt``.
        n_messages: messages of these turns.
        changed: what keeps the history from being continued; None where nothing does.
        spoken: the conversation as the model reads it; None for tokens.
        miss: reuse that was lost before it began.
        snapshots_at: lengths of the prompt at which later ones are likely to go on otherwise, for
            a model that cannot be cut back everywhere.
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
    reading: Reading | None = None
    on_start: StartFn | None = None
    progress: ProgressFn | None = None
    prompt: History = field(init=False, default_factory=History, repr=False)
    kept: tuple[TurnRecord, ...] = field(init=False, default=())
    n_messages: int = field(init=False, default=0)
    changed: str | None = field(init=False, default=None)
    spoken: Spoken | None = field(init=False, default=None, repr=False)
    miss: Miss | None = field(init=False, default=None)
    notice: str | None = field(init=False, default=None)
    snapshots_at: tuple[int, ...] = field(init=False, default=())

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


def plan_turn(
    turn: Turn,
    agent: Agent,
    host: ModelHost,
    rules: Collection[str],
    *,
    control_tokens_in_text: bool = False,
) -> None:
    """Fill in the prompt of a turn, and what kept the history from being continued.

    Raises:
        ContextError: it has many more tokens than the model's context.
        PromptError: there is nothing to answer, the model takes tokens alone, or its template takes
            no argument of such a name.
        ModelError: the template refuses the messages, or there is none.
    """
    is_cut_anywhere = all(sight.is_full for sight in host.engine.cache.config.params.sights)
    if turn.tokens is not None:
        if not turn.tokens:
            raise PromptError(f"the turn of agent {agent.agent_id!r} brings no tokens")
        turn.prompt = History(agent.tokens)
        turn.prompt.extend(turn.tokens)
        turn.kept, turn.n_messages = agent.turns, len(agent.messages)
        if not is_cut_anywhere:  # others may fork here, or ask for another answer
            found = {min(len(agent.tokens), len(turn.prompt) - 1), len(turn.prompt) - 1}
            turn.snapshots_at = tuple(sorted(found - {0}))
        return
    if host.tokenizer is None:
        raise PromptError(f"model {host.name!r} has no tokenizer; give tokens")
    _decode_cut(agent, host)
    messages, tools = turn.messages, turn.tools
    if messages is None:
        behind = turn.behind or [{"role": turn.role, "content": turn.text}]
        messages = [*agent.messages, *behind]
        if turn.reading is not None:
            messages, tools = worded(messages, tools, turn.reading, host)
    said = plan_messages(
        host.tokenizer,
        agent.tokens,
        agent.messages,
        agent.tools,
        messages,
        tools if tools is not None else agent.tools,
        rules,
        template_kwargs=kwargs_of(turn.template_kwargs, agent, host),
        control_tokens_in_text=control_tokens_in_text,
        context=host.context,
    )
    turn.spoken, turn.prompt = said, said.tokens
    turn.snapshots_at = () if is_cut_anywhere else said.prefixes.divergences()
    turn.kept, turn.n_messages = _turns_within(agent, said)
    if not turn.kept and said.messages[0].get("role") == "system":
        turn.n_messages = 1
    is_taken_otherwise = bool(agent.turns) and said.template_kwargs != agent.template_kwargs
    turn.changed = said.changed or _what_differs(agent, host, said.prefixes, is_taken_otherwise)


def kwargs_of(
    given: Mapping[str, Any] | None, agent: Agent | None, host: ModelHost
) -> Mapping[str, Any]:
    """Return what a turn gives to its model's chat template: its own, or what its agent has had."""
    if given is not None or agent is None:
        return given or {}
    takes = host.template.takes if host.template is not None else ()
    return {name: value for name, value in agent.template_kwargs.items() if name in takes}


def _turns_within(agent: Agent, said: Spoken) -> tuple[tuple[TurnRecord, ...], int]:
    """Find the turns of an agent that a conversation repeats, and count their messages.

    Where the template writes a turn otherwise by now, or the answer is read in other tokens than it
    was sampled in, its place is found anew.
    """
    prefixes = said.prefixes
    kept: list[tuple[TurnRecord, int]] = []
    for turn, end in agent.turns_with_ends():
        is_said = end > turn.n_messages
        if end > said.n_known or (turn.stop > prefixes.n_common and not is_said):
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
    agent: Agent, host: ModelHost, prefixes: Prefixes, is_taken_otherwise: bool
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
                    part.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
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
        part = agent.tokens[agent.turns[-1].n_prompt :].tolist()
        text = host.tokenizer.decode(part, skip_special_tokens=True)
        agent.messages = (*agent.messages[:-1], {"role": "assistant", "content": text})


def record_turn(
    turn: Turn, agent: Agent, host: ModelHost, event: FinishEvent, took: Took | None
) -> None:
    """Take what a turn said into the agent's history.

    Args:
        turn: as it was planned.
        agent: whose; its history is the turn's from then on.
        host: who answered.
        event: the end of the answer.
        took: what it took; None: it never ran.
    """
    n_before = agent.tokens.common_prefix(turn.prompt)
    agent.tokens = History(turn.prompt)
    agent.tokens.extend(event.token_ids)
    if turn.spoken is not None:
        text = turn.spoken.begun + event.text
        answer = {"role": "assistant", "content": text}
        if turn.reading is not None:
            answer = turn.reading.kept(text)
        agent.messages = (*turn.spoken.messages, answer)
        agent.tools, agent.template_kwargs = turn.spoken.tools, turn.spoken.template_kwargs
    n_prompt = len(turn.prompt)
    reason, finish = event.reason, event.finish
    is_full = finish is not None and finish.cause in ("context_full", "cache_full")
    ended = finish.cause if finish is not None and is_full else reason
    now = TurnRecord(n_before, n_prompt, len(agent.tokens), turn.n_messages, ended, took)
    agent.turns = (*turn.kept, now)
    is_stable = host.template is not None and host.template.is_prefix_stable
    is_ended_alike = is_stable and turn.changed not in ("retokenised", "template", "arguments")
    agent.resume_at = () if is_ended_alike or turn.spoken is None else turn.snapshots_at
    first = () if agent.turns[1:] else agent.notes  # what its creation had to say
    agent.notes = (*first, *model_notes(host))
    agent.used_s = time.time()
    agent.is_waiting = agent.is_paused = agent.is_finished = False
    agent.rates = host.costs.as_json()
