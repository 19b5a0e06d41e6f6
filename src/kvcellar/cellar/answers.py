"""Answers, and the settings that they are sampled with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from kvcellar.agents import AgentUsage, Miss, TurnEnd
from kvcellar.engine import DEFAULTABLE, FinishEvent, GeneratedToken, SamplingParams
from kvcellar.errors import EngineClosedError

MAX_TOKENS = 1024
"""Tokens of an answer for which nobody sets a limit."""

_USUAL: Mapping[str, float] = {"temperature": 0.7, "top_p": 0.95}


class Sampling(TypedDict, total=False):
    """Settings of one answer, each as :class:`kvcellar.engine.SamplingParams` has it.

    What is left out is as the model's own files want it; where they say nothing, a temperature of
    0.7, a ``top_p`` of 0.95, and no more than 1,024 tokens. ``max_tokens=None`` has no limit but
    the context.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int | None


def params_of(sampling: Sampling) -> SamplingParams:
    """Return settings that leave what was not given to the model.

    Raises:
        TypeError: there is no setting of a name that was given.
        ConfigError: a value that cannot work; the message names it.
    """
    given: dict[str, Any] = dict(sampling)
    unknown = given.keys() - Sampling.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"{', '.join(sorted(unknown))} is no setting of an answer; there are: "
            f"{', '.join(Sampling.__annotations__)}"
        )
    settings = {"max_tokens": MAX_TOKENS, **_USUAL, **given}
    return SamplingParams(**settings, unset=DEFAULTABLE - given.keys())


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that has ended. ``str(answer)`` is its text.

    Attributes:
        text: what was said; no part of a stop text is in it.
        finish_reason: ``stop`` (the model, or a stop text, ended it) or ``length`` (the limit of
            tokens, or the end of the context).
        agent: name of the agent whose turn it was; None of a completion.
        usage: tokens that were read, reused, restored and sampled, and what was lost.
        token_ids: tokens that were sampled.
        tokens: the same with their texts, and log probabilities where ``logprobs`` asked for them.
    """

    text: str
    finish_reason: str
    agent: str | None
    usage: AgentUsage
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    tokens: tuple[GeneratedToken, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def mean_logprob(self) -> float | None:
        """Mean log probability of its tokens, where ``logprobs`` asked for them; else None."""
        known = [token.logprob for token in self.tokens if token.logprob is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Why:
    """Reuse that the last turn of an agent lost, and why. ``str(why)`` says it in a sentence.

    Attributes:
        said: the sentence, with what helps.
        miss: cause, tokens, place and both texts; None where nothing was lost.
    """

    said: str
    miss: Miss | None = None

    def __str__(self) -> str:
        return self.said


def answer_of_turn(end: TurnEnd, tokens: Sequence[GeneratedToken]) -> Answer:
    """Return the answer of a turn that has ended.

    Raises:
        KVCellarError: it ended with an error; what it had said is in the agent's history.
    """
    return _answer(end.finish, end.agent_id, end.usage, tokens)


def answer_of_request(event: FinishEvent, tokens: Sequence[GeneratedToken]) -> Answer:
    """Return the answer of a request that is nobody's turn.

    Raises:
        KVCellarError: it ended with an error.
    """
    used = event.usage
    usage = AgentUsage(
        prompt_tokens=used.prompt_tokens if used else 0,
        cached_tokens=used.cached_tokens if used else 0,
        restored_tokens=0,
        restored_from={},
        completion_tokens=len(event.token_ids),
        restore_s=0.0,
        time_to_first_token_s=used.time_to_first_token_s if used else None,
        drafted_tokens=used.drafted_tokens if used else 0,
        accepted_tokens=used.accepted_tokens if used else 0,
        miss=None,
        notes=(),
    )
    return _answer(event, None, usage, tokens)


def _answer(
    event: FinishEvent, agent: str | None, usage: AgentUsage, tokens: Sequence[GeneratedToken]
) -> Answer:
    if event.error is not None:
        raise event.error
    if event.reason not in ("stop", "length"):
        raise EngineClosedError("the cellar was closed before the answer had ended")
    return Answer(event.text, event.reason, agent, usage, event.token_ids, tuple(tokens))
