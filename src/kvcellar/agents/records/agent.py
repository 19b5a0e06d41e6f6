"""Records of an agent, in memory and as the metadata of its history in the store."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from kvcellar.agents.records.checking import KIND, VERSION, checked_facts, is_agent, key_of
from kvcellar.agents.records.durable_marks import Mark, next_serial
from kvcellar.agents.records.looks import looks_as_json, looks_of
from kvcellar.agents.records.misses import Miss
from kvcellar.agents.records.names import is_chosen, model_tag, reference_name
from kvcellar.agents.records.titles import said_title
from kvcellar.agents.records.views import AgentInfo, Took, TurnRecord
from kvcellar.errors import AgentError, MovedOnError
from kvcellar.history import History
from kvcellar.hosting.fair_lock import Gate
from kvcellar.hosting.messages import Messages
from kvcellar.models.seeing import Look
from kvcellar.models.text.pictures import names_in
from kvcellar.pictures.tokens import usable
from kvcellar.store import ModelKey, Reference
from kvcellar.store.values.references import SERIAL

_numbers_of = attrgetter(*(one.name for one in fields(Took)))


@dataclass(slots=True, eq=False)
class LiveAgent:
    """State of an agent in this process alone, which is gone with it."""

    gate: Gate = field(default_factory=Gate)
    request_id: int | None = None
    """Id of the request of the turn that is being generated."""
    expected: History = field(default_factory=History)
    """Tokens of the turn that is being generated, as far as they are known."""
    is_passing: bool = False
    """True while its first turn runs and no client knows its id: nothing of it is written yet."""
    beside: AgentRecord | None = None
    """Until its first turn, the agent whose history that was expected to continue, as it was."""
    n_changes: int = 0
    """How often it has changed in this process."""
    mark: Mark | None = None
    """The last state that is durable, as far as this process knows."""
    resume_at: tuple[int, ...] = ()
    """Lengths of its history, besides the end, from which it is likely to go on otherwise."""
    digested: tuple[History, str] | None = field(default=None, repr=False)
    """A history that it had, and its digest: hashed once for all who look."""


@dataclass(slots=True, eq=False)
class AgentRecord:
    """A named sequence with a history. Its manager changes it; see ``AgentManager``.

    All of it is what the store keeps, but ``live``. ``tokens`` are never appended to: whoever
    read them has one state of the history.
    """

    agent_id: str
    model: str
    key: ModelKey
    tokens: History = field(default_factory=History)
    messages: Messages = field(default_factory=Messages)
    given_title: str = ""
    """Title that a person gave it; empty: none, and it is called by what was said."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments that the chat template was given beside messages and tools."""
    looks: dict[str, Look] = field(default_factory=dict)
    """By the name of each picture: the text and rows in prompts for it. Replaced, never changed."""
    turns: tuple[TurnRecord, ...] = ()
    parent: str | None = None
    parent_position: int | None = None
    parent_created_s: float | None = None
    """Tells the parent from a later agent of the same name."""
    created_s: float = field(default_factory=time.time)
    used_s: float = field(default_factory=time.time)
    is_waiting: bool = False
    is_paused: bool = False
    is_finished: bool = False
    miss: Miss | None = None
    notes: tuple[str, ...] = ()
    rates: dict[str, float | None] = field(default_factory=dict)
    revision: int = 0
    n_stored: int = 0
    serial: int = field(default_factory=next_serial)
    """Number of its state, ascending; what the store's journal has of it is ordered by that."""
    branch_of: str | None = None
    """Id of the named agent whose history a client's conversation did not continue; it has it."""
    is_rewound: bool = False
    """True if it has gone back since its last turn."""
    dropped: dict[str, Any] | None = None
    """For a state that was dropped: whose it was, and what dropped it; see ``dropped.py``."""
    live: LiveAgent = field(default_factory=LiveAgent)

    @property
    def name(self) -> str:
        """Name of its history in the store."""
        return reference_name(self.agent_id, model_tag(self.key))

    @property
    def title(self) -> str:
        """Title for people: as it was given, or the first words that are the agent's own."""
        shared = [
            n for turn, n in self.turns_with_ends() if turn.stop <= (self.parent_position or 0)
        ]
        return self.given_title or said_title(self.messages, max(shared, default=0))

    @property
    def label(self) -> str:
        """Name of the agent for errors; a dropped state is named by the agent that it came from."""
        if self.dropped is None:
            return f"agent {self.agent_id!r}"
        return f"what {self.dropped['verb']} drops of agent {self.dropped['id']!r}"

    @property
    def history_digest(self) -> str:
        """Digest of its tokens: 32 hexadecimal digits, the same in every process."""
        known, tokens = self.live.digested, self.tokens
        if known is None or known[0] is not tokens:
            known = self.live.digested = (tokens, tokens.digest())
        return known[1]

    def check_follows(self, follows: str | None) -> None:
        """Refuse what follows another history than the one that is there; None follows any.

        Raises:
            MovedOnError: it does.
        """
        if follows is not None and follows != self.history_digest:
            digest, n_turns = self.history_digest, len(self.turns)
            raise MovedOnError(self.agent_id, follows, digest, n_turns)

    @property
    def is_conversation(self) -> bool:
        """True if its messages say all of its history: no tokens were put behind them."""
        return not self.turns or self.turns[-1].stop in self.stops

    @property
    def state(self) -> str:
        """See :class:`AgentInfo`."""
        if self.live.request_id is not None:
            return "generating"
        if self.is_finished:
            return "finished"
        if self.is_waiting:
            return "waiting"
        return "paused" if self.is_paused else "idle"

    def is_child_of(self, other: AgentRecord) -> bool:
        """Return true if it was forked from the other."""
        return self.parent == other.name and self.parent_created_s in (None, other.created_s)

    def is_sibling_of(self, other: AgentRecord) -> bool:
        """Return true if both were forked from one agent, which may be gone."""
        mine, its = self.parent_created_s, other.parent_created_s
        return self.parent is not None and self.parent == other.parent and mine == its

    def info(self, n_cached: int | None = None) -> AgentInfo:
        """Return the agent as others see it."""
        parent = None if self.parent is None else self.parent.rpartition("@")[0]
        return AgentInfo(
            agent_id=self.agent_id,
            title=self.title,
            is_named=not self.given_title and is_chosen(self.agent_id),
            model=self.model,
            kv_dtype=self.key.layout.kv_dtype,
            state=self.state,
            n_tokens=len(self.tokens),
            n_stored=self.n_stored,
            n_turns=len(self.turns),
            n_messages=len(self.messages),
            history_digest=self.history_digest,
            parent=parent,
            parent_position=self.parent_position,
            created_s=self.created_s,
            used_s=self.used_s,
            n_cached=n_cached,
            miss=self.miss,
        )

    def copied(self, agent_id: str, **changes: Any) -> AgentRecord:
        """Copy what the agent has said to one of another name, which no store has yet.

        The store has its KV all the same: that goes by tokens, not by names.
        """
        return replace(
            self,
            agent_id=agent_id,
            revision=0,
            serial=next_serial(self.serial),
            is_waiting=False,
            is_paused=False,
            live=self._kept_life(),
            **changes,
        )

    def as_it_is(self) -> AgentRecord:
        """Return a copy that stays what the agent is now."""
        return replace(self, live=self._kept_life())

    def _kept_life(self) -> LiveAgent:
        """Return what a copy knows of this process: what goes by the history alone."""
        return LiveAgent(resume_at=self.live.resume_at, digested=self.live.digested)

    def forked(self, agent_id: str, position: int, n_turns: int | None) -> AgentRecord:
        """Copy the agent's beginning, as ``cut`` leaves it, to a child of another name."""
        child = self.copied(
            agent_id,
            parent=self.name,
            parent_position=position,
            parent_created_s=self.created_s,
            created_s=time.time(),
            used_s=time.time(),
            is_finished=False,
            miss=None,
            branch_of=None,
            is_rewound=False,
            given_title="",
        )
        child.cut(position, n_turns)
        return child

    def is_beginning_of(self, other: AgentRecord) -> bool:
        """Return true if the other has all that this one said; of a cut answer, its part."""
        n, messages = len(self.tokens), self.messages
        if self.turns and self.turns[-1].reason == "cut":
            messages = messages.prefix(len(messages) - 1)
        is_same = other.tokens.common_prefix(self.tokens) == n
        return is_same and other.messages[: len(messages)] == messages

    def is_older_state_of(self, other: AgentRecord) -> bool:
        """Return true if the other is of the same model, and went on from what this one said."""
        n = len(self.messages)
        is_same = self.model == other.model and not self.live.gate.is_taken
        return (
            is_same
            and n < len(other.messages)
            and plain(other.messages.prefix(n)) == plain(self.messages)
        )

    def read_anew(self, other: AgentRecord) -> None:
        """Take over what was said to another, of which no token is this one's yet."""
        self.messages, self.tools = plain(other.messages), other.tools
        self.given_title = other.given_title
        self.template_kwargs, self.looks = other.template_kwargs, {}
        self.tokens, self.turns, self.is_rewound = History(), (), False
        self.miss = Miss("other model", len(other.tokens), 0)
        self.advance()

    def take_history(self, other: AgentRecord) -> None:
        """Take over what another has said, under the own name."""
        self.tokens, self.turns, self.tools = other.tokens, other.turns, other.tools
        self.messages, self.template_kwargs = other.messages, other.template_kwargs
        self.looks = other.looks
        self.miss, self.used_s = other.miss, time.time()
        self.n_stored = other.n_stored
        self.is_rewound = other.is_rewound
        self.advance()

    def advance(self) -> None:
        """Give a state that has just changed its number."""
        self.serial = next_serial(self.serial)
        self.live.n_changes += 1

    def marked(self, token_hash: Any = None, message_hash: Any = None) -> Mark:
        """Return the mark of the state as it is; with hashes of all of it, where they are known."""
        return Mark(
            self.name,
            self.serial,
            self.live.n_changes,
            self.tokens,
            self.messages,
            self.stops,
            self.turns,
            self.tools,
            token_hash,
            message_hash,
        )

    def follows(self, mark: Mark) -> bool:
        """Return true if the state is the very next one behind a mark."""
        return mark.name == self.name and mark.n_changes + 1 == self.live.n_changes

    def position_of(self, position: int | None, turn: int | None) -> int:
        """Return a place in the history, given as tokens, or as turns from either end.

        A place inside of a picture is that picture's beginning.

        Raises:
            AgentError: both were given, or there is no such place.
        """
        if position is not None and turn is not None:
            raise AgentError("give a position in tokens or a number of turns, not both")
        if turn is not None:
            n = turn if turn >= 0 else len(self.turns) + turn
            if not 0 <= n <= len(self.turns):
                raise AgentError(
                    f"agent {self.agent_id!r} has {len(self.turns)} turns and none behind {turn}; "
                    f"choose 0 to {len(self.turns)}, or a negative number to count from the end"
                )
            return self.turns[n - 1].stop if n else (self.turns[0].start if self.turns else 0)
        at = len(self.tokens) if position is None else position
        if not 0 <= at <= len(self.tokens):
            raise AgentError(
                f"agent {self.agent_id!r} has {len(self.tokens)} tokens and no position {at}; "
                f"choose 0 to {len(self.tokens)}"
            )
        return usable(self.tokens.tokens, at, is_whole=True)

    def turns_of(self, turn: int | None) -> int | None:
        """Return a number of turns from the beginning, where it is given from the end."""
        return turn if turn is None or turn >= 0 else len(self.turns) + turn

    def turns_with_ends(self) -> list[tuple[TurnRecord, int]]:
        """Return the turns, each with the messages up to its end; raw tokens add none."""
        n = len(self.messages)
        ends = [*(min(turn.n_messages, n) for turn in self.turns[1:]), n]
        return list(zip(self.turns, ends, strict=False))

    @property
    def stops(self) -> tuple[int | None, ...]:
        """Per message, the tokens up to its end where it is a turn's answer; else None."""
        stops: list[int | None] = [None] * len(self.messages)
        for turn, end in self.turns_with_ends():
            if end > turn.n_messages:
                stops[end - 1] = turn.stop
        return tuple(stops)

    def cut(self, position: int, n_turns: int | None = None) -> None:
        """Go back to the first ``position`` tokens, and to the messages that they say whole.

        Several turns may end at one token, where the template has written them otherwise since:
        then ``n_turns`` says how many stay. An answer that is cut in its middle stays, with what is
        left of it (``content`` None until somebody decodes it).
        """
        self.tokens = self.tokens.prefix(min(position, len(self.tokens)))
        self.limit_stored(len(self.tokens))
        turns = self.turns_with_ends()
        whole = [turn for turn, _ in turns if turn.stop <= position]
        if n_turns is not None:
            whole = whole[:n_turns]
        if len(whole) < len(turns):
            cut, end = turns[len(whole)]
            if cut.n_prompt < position < cut.stop and end > cut.n_messages:
                left = {"role": "assistant", "content": None}
                self.messages = self.messages.prefix(end - 1).plus([left])
                whole.append(replace(cut, stop=position, reason="cut"))
            else:
                self.messages = self.messages.prefix(cut.n_messages)
        self.turns = tuple(whole)
        if not self.messages:
            self.tools, self.template_kwargs = None, {}

    def limit_stored(self, n_kept: int) -> None:
        """Note that of what the store has no more than so many tokens are still the agent's."""
        if n_kept < self.n_stored:  # a boundary state is at the end of what was stored
            self.n_stored = 0 if self.key.layout.has_boundaries else n_kept

    def metadata(self) -> dict[str, Any]:
        """Return what the store keeps beside the tokens and the lineage, as JSON."""
        return {
            KIND: VERSION,
            SERIAL: self.serial,
            "id": self.agent_id,
            "title": self.given_title,
            "model": self.model,
            "kv_dtype": self.key.layout.kv_dtype,
            "messages": list(self.messages),
            "stops": list(self.stops),
            "tools": self.tools,
            "template_kwargs": self.template_kwargs,
            "looks": looks_as_json(self.looks, names_in(self.messages)),
            "turns": [_turn_as_json(turn) for turn in self.turns],
            "created_s": self.created_s,
            "used_s": self.used_s,
            "parent_created_s": self.parent_created_s,
            "branch_of": self.branch_of,
            "dropped": self.dropped,
            "is_rewound": self.is_rewound,
            "is_waiting": self.is_waiting,
            "is_paused": self.is_paused,
            "is_finished": self.is_finished,
            "miss": None if self.miss is None else self.miss.as_json(),
            "notes": list(self.notes),
            "rates": self.rates,
        }

    def take(self, ref: Reference) -> None:
        """Become what a reference says; what lives stays.

        Raises:
            StoreError: it says what cannot be; nothing was changed.
        """
        value = checked_facts(ref)
        self.model = value["model"]
        self.tokens = ref.tokens
        self.messages = Messages(value["messages"])
        self.given_title = value.get("title", "")
        self.tools, self.template_kwargs = value["tools"], value.get("template_kwargs", {})
        self.looks = looks_of(value.get("looks", {}))
        self.turns = tuple(map(_turn_of, value["turns"]))
        self.parent, self.parent_position = ref.parent, ref.parent_position
        self.parent_created_s = value.get("parent_created_s")
        self.branch_of = value.get("branch_of")
        self.is_rewound = value.get("is_rewound") is True
        dropped = value.get("dropped")
        self.dropped = dropped if isinstance(dropped, dict) else None
        self.created_s, self.used_s = float(value["created_s"]), float(value["used_s"])
        self.is_waiting = value["is_waiting"]
        self.is_paused = value["is_paused"]
        self.is_finished = value["is_finished"]
        self.miss = Miss.from_json(value["miss"])
        self.notes = tuple(value["notes"])
        self.rates = value["rates"]
        self.revision, self.n_stored = ref.revision, ref.n_stored
        self.serial = ref.serial
        self.live.mark = self.marked()

    @classmethod
    def from_reference(cls, ref: Reference) -> AgentRecord | None:
        """Return the agent whose history it is; None for a history that is nobody's.

        Raises:
            StoreError: it is an agent's and says what cannot be.
        """
        if not is_agent(ref):
            return None
        facts = checked_facts(ref)
        agent = cls(facts["id"], facts["model"], key_of(ref))
        agent.take(ref)
        return agent


def plain(messages: Messages) -> Messages:
    """Return messages each of which has a content, as every template reads them."""
    bare = {i: one for i, one in enumerate(messages) if not one.get("content", "")}
    return messages.but({i: {**one, "content": ""} for i, one in bare.items()})


def _turn_as_json(turn: TurnRecord) -> list[Any]:
    """Return a turn as the store keeps it: its numbers in order, and what it took where known."""
    value = [turn.start, turn.n_prompt, turn.stop, turn.n_messages, turn.reason]
    return value if turn.took is None else [*value, list(_numbers_of(turn.took))]


def _turn_of(value: list[Any]) -> TurnRecord:
    """Return the turn of which ``_turn_as_json`` gave the value."""
    start, n_prompt, stop, n_messages, reason = value[:5]
    took = Took(*value[5]) if len(value) > 5 else None
    return TurnRecord(start, n_prompt, stop, n_messages, reason, took)
