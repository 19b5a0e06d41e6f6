"""Every exception that kvcellar raises on purpose.

All of them derive from :class:`KVCellarError`, so one ``except`` catches what is ours and nothing
else. Each message says what was asked, what was there, and the way out; unless a docstring says
otherwise the object that raised is exactly as it was before the call.
"""

from __future__ import annotations


class KVCellarError(Exception):
    """The root of all errors raised on purpose by this package."""


class ConfigError(KVCellarError, ValueError):
    """A setting cannot work: a capacity of 0, a window of 0, groups that miss a layer."""


class CacheFullError(KVCellarError):
    """A step or a claim needs more cells than are free. Nothing was claimed."""


class PositionError(KVCellarError, ValueError):
    """Positions are not the consecutive ones that the cache expects. Nothing was written."""


class StepError(KVCellarError):
    """A forward met a cache that was not ready for it, or brought another number of tokens."""


class UnknownSequenceError(KVCellarError, KeyError):
    """A ``seq_id`` that holds no tokens in this cache."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class SequenceConflictError(KVCellarError, ValueError):
    """Two histories disagree: a sequence would own two cells at one position."""


class RewindError(KVCellarError, ValueError):
    """A history cannot go on from that length: it is shorter, or what was before is gone."""


class ProposalError(KVCellarError, ValueError):
    """A draft tree, or the chain that is committed out of it, is not well formed."""


class SessionClosedError(KVCellarError):
    """A session is used outside its ``with`` block."""


class UnknownCacheError(KVCellarError, KeyError):
    """No cache is installed under that key, or no backend builds a cache of that kind."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class MetadataError(KVCellarError, ValueError):
    """``kv_cache.*`` metadata is missing, incomplete, or of an unknown schema version."""


class BackendError(KVCellarError):
    """A backend is unknown, or the package that it needs is not installed."""


class RankLostError(BackendError):
    """A process that computes a part of a model has ended or cannot go on; the model is gone."""


class DeviceMemoryError(KVCellarError, MemoryError):
    """A forward, or a picture's encoding, found no memory on its device.

    A forward's step was taken back; what was held still is.
    """


class ModelError(KVCellarError):
    """A checkpoint cannot be loaded: missing, half copied, or of an unknown architecture."""


class LogitsError(ModelError):
    """A forward gave no probabilities: its logits are no numbers, or leave no token to sample."""


class TemplateLimitError(ModelError):
    """A chat template took more time, memory or output than rendering may take; it was stopped."""


class PromptError(KVCellarError, ValueError):
    """A prompt is empty, or longer than the capacity of the cache it is meant for."""


class PictureError(PromptError):
    """A picture cannot be read, is larger than is allowed, or is not here any more."""


class PictureLostError(PictureError):
    """A picture has to be read that is not here any more. Nothing was changed.

    Attributes:
        name: of the picture.
    """

    def __init__(self, name: str) -> None:
        """Say which."""
        super().__init__(
            f"the picture {name} is not here any more; send the message that has it again"
        )
        self.name = name

    def say_turn(self, agent_id: str, n_before: int) -> None:
        """Name the turn that it stands in, and both ways out.

        Args:
            agent_id: whose turn.
            n_before: turns before that.
        """
        turns = f"{n_before} turn{'s' * (n_before != 1)}"
        self.args = (
            f"the picture {self.name} in turn {n_before + 1} of agent {agent_id!r} has to be read "
            f"and is not here any more; send it again with what you say next, or rewind to before "
            f"it, to the first {turns}",
        )


class GrammarError(PromptError):
    """No grammar can be made of what an answer has to be. Nothing was begun.

    Attributes:
        code: a word for programs.
        param: what asked for it: ``response_format``, ``tools``, or a field of a request.
    """

    def __init__(self, message: str, code: str = "invalid_schema", *, param: str = "") -> None:
        """See the attributes."""
        super().__init__(message)
        self.code = code
        self.param = param


class ContextError(PromptError):
    """A prompt is longer than its model's context, as is known before all of it is encoded.

    Attributes:
        n_tokens: that it has at least.
        context: that it may have at most.
    """

    def __init__(self, n_tokens: int, context: int) -> None:
        """Say both numbers."""
        super().__init__(
            f"the prompt has at least {n_tokens} tokens and the context is {context} tokens; "
            f"shorten it"
        )
        self.n_tokens = n_tokens
        self.context = context


class ShapeError(KVCellarError, ValueError):
    """Tensors do not have the heads or dims that the cache was built for. Nothing was written."""


class DeadlineError(KVCellarError, TimeoutError):
    """A request waited longer for its turn than it wanted to. It never ran."""


class EngineClosedError(KVCellarError):
    """The engine was closed; it takes no more requests."""


class EngineFailedError(EngineClosedError):
    """The engine met an error of its own after which nothing that it holds can be trusted.

    It has ended all of its requests and takes no more; the message says what happened.
    """


class PrefixError(KVCellarError, ValueError):
    """A prefix handle that is stale or not locked, or cells that do not fit their tokens."""


class AgentError(KVCellarError):
    """An agent cannot do what was asked: the name is taken, it is busy, there is no such place."""


class AgentNameError(AgentError, ValueError):
    """A text cannot name an agent: its characters, or its length, are not those of a name."""


class NameTakenError(AgentError):
    """Another agent has that name already."""


class AgentHeldError(AgentError):
    """Another process is changing the agent, and did for longer than this one waits."""


class HistoryChangedError(AgentError):
    """An agent's history is not the one that a turn was to go on from. Nothing was changed."""


class MovedOnError(AgentError):
    """An agent's history is not, or will not stay, the one that a caller follows.

    Nothing was changed.

    Attributes:
        follows: digest of the history that the caller knows.
        history_digest: of the history that is there.
        n_turns: turns of that history.
        is_under_way: whether a turn is being answered behind it.
        asked: what that turn answers; None where there is none, or it was given tokens.
    """

    def __init__(
        self,
        agent_id: str,
        follows: str,
        history_digest: str,
        n_turns: int,
        *,
        is_under_way: bool = False,
        asked: str | None = None,
    ) -> None:
        """Say what was followed, and what is there."""
        turns = f"{n_turns} turn{'s' * (n_turns != 1)}"
        now = "is in a turn behind" if is_under_way else "has by now"
        super().__init__(
            f"this follows the history {follows[:64]} of agent {agent_id!r}, which {now} the "
            f"history {history_digest} of {turns}; nothing was changed: read the agent, and send "
            f"this again behind what is there then"
        )
        self.follows = follows
        self.history_digest = history_digest
        self.n_turns = n_turns
        self.is_under_way = is_under_way
        self.asked = asked


class UnknownAgentError(KVCellarError, KeyError):
    """No agent of that name is known."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StoreError(KVCellarError):
    """The store cannot do what was asked: closed, not writable, in use by others for too long."""


class LeaseHeldError(StoreError):
    """Another process, or another part of this one, is extending the history.

    Attributes:
        owner: who, in words.
    """

    def __init__(self, name: str, owner: str) -> None:
        """Say who holds the lease of a history; an empty owner is not known yet."""
        self.owner = owner or "another process"
        super().__init__(
            f"the history {name!r} is being extended by {self.owner}; try again when that is done"
        )


class LeaseLostError(StoreError):
    """A lease has ended before it was released; another may have extended the history since."""

    def __init__(self, name: str) -> None:
        """Say of which history."""
        super().__init__(
            f"the lease of the history {name!r} has ended, and another process may have extended "
            f"it; read it again"
        )


class UnknownReferenceError(KVCellarError, KeyError):
    """No history of that name is in the store."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
