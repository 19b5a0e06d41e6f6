"""Agents: named histories that fork, go back, sleep and come back. A turn is in ``turn.py``."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvcellar.agents.directory import Directory
from kvcellar.agents.dropped import DroppedStates
from kvcellar.agents.lifecycle import Lifecycle
from kvcellar.agents.lookup import Lookup
from kvcellar.agents.pause_resume import Sleep
from kvcellar.agents.publishing import Publisher
from kvcellar.agents.text.live_text import LiveText
from kvcellar.agents.turn import Turns
from kvcellar.errors import AgentError
from kvcellar.hosting.models import ModelRegistry
from kvcellar.hosting.thread_lanes import Work
from kvcellar.hosting.volatile import DEFAULT_RULES, RULES
from kvcellar.moved import no_such_name
from kvcellar.store import Store

VERIFY = ("checksum", "canary")
"""What is asked of stored KV before it is used."""


class AgentManager:
    """All agents of one store, and their verbs. For callers on any event loop and thread.

    Each agent has one turn at a time; turns of different agents run in one batch. Verbs that change
    an agent wait for its turn to end, but ``fork``, ``wait`` and ``describe`` do not.

    Attributes:
        store: where histories are.
        models: who runs them.
        directory: who there is.
        lookup: which agent a conversation belongs to.
        lifecycle: create, fork, branch, rewind, keep, finish, delete, forget.
        dropped: what was dropped, and undo.
        sleep: pause, resume, wait, export, import.
        turns: generate.
        work: threads for long texts.
        live: text of turns as it comes.
    """

    def __init__(
        self,
        store: Store,
        models: ModelRegistry,
        *,
        default_model: str = "demo",
        rules: Collection[str] = DEFAULT_RULES,
        verify: str = "checksum",
        control_tokens_in_text: bool = False,
    ) -> None:
        """Find the agents that earlier processes left in the store.

        Args:
            store: where histories are; it stays the caller's to close.
            models: who runs them; it stays the caller's to close.
            default_model: of agents that are created without one.
            rules: names of rules for volatile text that apply; see ``volatile.RULES``.
            verify: what is asked of KV before it is restored: ``checksum``, that its bytes are
                what was saved; ``canary``, besides, that a few rows are what the model computes.
            control_tokens_in_text: let text of messages spell control tokens, which is read as
                text otherwise.

        Raises:
            AgentError: there is no rule, or no way to verify, of that name.
        """
        unknown = set(rules) - RULES.keys()
        if unknown:
            raise AgentError(f"no rule {sorted(unknown)}; there are: {', '.join(RULES)}")
        if verify not in VERIFY:
            raise AgentError(f"verify {verify!r} is unknown; choose one of {', '.join(VERIFY)}")
        is_verified = verify == "canary"
        self.store = store
        self.models = models
        self.work = Work()
        self.live = LiveText()
        models.shelf.saved_by(store.picture)
        publisher = Publisher(store, models.shelf)
        self.directory = Directory(store, models, publisher)
        self.lookup = Lookup(self.directory, self.work, rules)
        self.dropped = DroppedStates(store, self.directory, publisher)
        self.lifecycle = Lifecycle(
            store, models, self.directory, publisher, self.dropped, default_model
        )
        self.sleep = Sleep(store, models, self.directory, publisher, is_verified)
        models.before_unload(self.sleep.leave_model)
        self.turns = Turns(
            store=store,
            models=models,
            directory=self.directory,
            lookup=self.lookup,
            publisher=publisher,
            lifecycle=self.lifecycle,
            dropped=self.dropped,
            work=self.work,
            live=self.live,
            rules=rules,
            is_verified=is_verified,
            control_tokens_in_text=control_tokens_in_text,
        )

    if not TYPE_CHECKING:  # for programs of an earlier version, at run time

        def __getattr__(self, name: str) -> Any:
            """Say where a verb went that was the manager's own.

            Raises:
                AttributeError: always.
            """
            raise no_such_name("kvcellar.agents.AgentManager", name)
