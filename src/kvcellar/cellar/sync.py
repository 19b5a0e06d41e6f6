"""The cellar for programs without an event loop: the same verbs, which wait.

Written by tools/write_sync_cellar.py from ``aio.py``; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack, overload

from kvcellar.agents import AgentInfo, Message
from kvcellar.cellar.aio import Prompt
from kvcellar.cellar.answers import Answer, Asking, Why
from kvcellar.cellar.asking import Said
from kvcellar.cellar.waiting import Stream, WaitingAgent, WaitingBranches, WaitingCellar
from kvcellar.engine import EngineStats

__all__ = ["Agent", "Branches", "Cellar", "Stream"]


class Cellar(WaitingCellar):
    """A model, its engine and its store. ``kvcellar.open`` makes one; close it, or use ``with``.

    Attributes:
        model: name of the model that answers.
    """

    def agent(self, name: str | None = None, *, system: str | None = None) -> Agent:
        """Return the agent of a name, which is made where there is none.

        Args:
            name: None: a new agent, whose name is made up.
            system: its system message. Of an agent that is there it has to be the same.

        Raises:
            AgentNameError: it cannot be a name; nothing was made.
            AgentError: the agent is there with another system message; it is as it was.
            StoreError: it cannot be saved; nothing was made.
        """
        made = self._wait(self._behind.agent(name, system=system))
        return Agent(made, self)

    def agents(self) -> list[Agent]:
        """Return all agents of the store, the one that was used last at the end."""
        return [Agent(one, self) for one in self._wait(self._behind.agents())]

    def import_agent(self, file: str | Path, name: str | None = None) -> Agent:
        """Take in an agent from a file that ``export`` wrote; all of it is verified first.

        Raises:
            AgentError, StoreError: the file is damaged, or the name is taken; nothing was changed.
        """
        made = self._wait(self._behind.import_agent(file, name))
        return Agent(made, self)

    @overload
    def complete(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, prompts: str, **how: Unpack[Asking]
    ) -> Answer: ...

    @overload
    def complete(self, prompts: Sequence[Prompt], **how: Unpack[Asking]) -> list[Answer]: ...

    def complete(
        self, prompts: str | Sequence[Prompt], **how: Unpack[Asking]
    ) -> Answer | list[Answer]:
        """Go on from texts, or answer conversations, all in one batch; nothing is remembered.

        Args:
            prompts: one text; or several, each a text or the messages of a conversation. What they
                begin alike with is computed once.
            how: a form of the answers, tools for conversations, and settings of sampling, as
                :class:`Asking`.

        Returns:
            One answer for one text, else as many as there are prompts, in their order.

        Raises:
            PromptError: a prompt is empty or too long.
            KVCellarError: the first error of any of them, once all have ended.
        """
        return self._wait(self._behind.complete(prompts, **how))

    @property
    def context(self) -> int:
        """The longest conversation that the model can read, in tokens."""
        return self._behind.context

    def stats(self) -> EngineStats:
        """Return the engine's counts: cells, requests, tokens that were reused."""
        return self._wait(self._behind.stats())


class Agent(WaitingAgent):
    """An agent: a history with a name, which forks, goes back, sleeps and comes back."""

    def fork(
        self, name: str | None = None, *, turn: int | None = None, position: int | None = None
    ) -> Agent:
        """Make an agent that shares the beginning of this one; no KV is copied.

        Args:
            name: None: made up from this one's.
            turn: turns to share, from the beginning, or from the end where negative; None: all.
            position: or tokens to share.

        Raises:
            AgentError: the name is taken, or cannot be one, or there is no such place; nothing was
                changed.
        """
        made = self._wait(self._behind.fork(name, turn=turn, position=position))
        return Agent(made, self._cellar)

    def branch(self, n: int, *, turn: int | None = None) -> Branches:
        """Fork this agent ``n`` times; the branches answer in one batch.

        Raises:
            ConfigError: ``n`` is below 1; nothing was made.
        """
        branches = self._wait(self._behind.branch(n, turn=turn))
        return Branches(branches, [Agent(one, self._cellar) for one in branches], self._cellar)

    def keep(self) -> list[str]:
        """Keep this branch and delete its siblings, with all that was forked from them.

        ``undo`` of this one brings them back.

        Returns:
            The names that are gone.

        Raises:
            AgentError: one of them is in a turn; nothing was deleted.
        """
        return self._wait_in_turn(self._behind.keep())

    def rename(self, title: str) -> AgentInfo:
        """Give it another title, for people; its name stays. Empty: the first words said to it.

        Raises:
            AgentNameError: the title is too long; nothing was changed.
        """
        return self._wait_in_turn(self._behind.rename(title))

    def rewind(self, turn: int = -1, *, position: int | None = None) -> AgentInfo:
        """Go back; ``undo`` brings back what is dropped.

        Args:
            turn: turns that stay, from the beginning, or from the end where negative.
            position: or tokens that stay.

        Raises:
            AgentError: there is no such place; nothing was changed.
        """
        return self._wait_in_turn(self._behind.rewind(turn, position=position))

    def undo(self) -> list[Agent]:
        """Bring back what was dropped last of this agent, by rewind, keep or delete.

        Raises:
            AgentError: nothing was dropped.
        """
        return [Agent(one, self._cellar) for one in self._wait_in_turn(self._behind.undo())]

    def pause(self) -> AgentInfo:
        """Have all of it on disk and none of it in memory; its next turn brings it back."""
        return self._wait_in_turn(self._behind.pause())

    def resume(self) -> int:
        """Load its KV into the cache; return how many tokens came from the store."""
        return self._wait_in_turn(self._behind.resume())

    def export(self, file: str | Path) -> int:
        """Write it with its KV to one file; return the bytes of that."""
        return self._wait_in_turn(self._behind.export(file))

    def delete(self, *, forever: bool = False) -> None:
        """Forget it; what others share stays. ``undo`` brings it back, unless it is forever."""
        self._wait_in_turn(self._behind.delete(forever=forever))

    @property
    def messages(self) -> Sequence[Message]:
        """Messages of its conversation, oldest first, with thoughts and calls apart from text."""
        return self._behind.messages

    @property
    def system(self) -> str | None:
        """Text of its system message; None where it has none."""
        return self._behind.system

    def info(self) -> AgentInfo:
        """Return what is known of it: tokens, turns, parent, and how much the cache holds."""
        return self._wait(self._behind.info())

    def why(self) -> Why:
        """Return what its last turn had to compute again, and why."""
        return self._behind.why()


class Branches(WaitingBranches[Agent]):
    """Branches of one agent, which answer in one batch."""

    def say(self, said: Said | Sequence[Said], **how: Unpack[Asking]) -> list[Answer]:
        """Say the same to all branches, or to each its own; return their answers, in their order.

        A list of texts, or of lists of messages, has one for each branch; a text, a message or a
        list of messages is for all. Branch i samples with the seed plus i, so one seed gives
        several answers. Log probabilities come with each answer, for whoever chooses by
        ``mean_logprob``.

        Raises:
            ConfigError: there are more or fewer texts than branches; nothing was said.
            KVCellarError: the first error of any branch, once all have ended.
        """
        return self._wait(self._behind.say(said, **how))
