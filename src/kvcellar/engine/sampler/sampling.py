"""From logits to tokens, many rows at a time, each with settings and randomness of its own.

A row's token depends on its logits, its settings, its seed and how many tokens it has sampled;
never on the other rows of the batch. Nothing here has a side effect until ``record`` is called,
so a step that fails after sampling has changed nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.checks import flag, number, seen, whole, wholes
from kvcellar.engine.sampler.guide import Guide, checked_guide
from kvcellar.errors import ConfigError
from kvcellar.history import History
from kvcellar.models.kept_logits import RowSampling, no_probabilities, nothing_may_come
from kvcellar.sampler_settings import SAMPLER_SETTINGS, SamplerSettings

FloatArray = NDArray[np.float32]

_DRAWS = 64
"""Random numbers drawn at a time, per sequence."""

_COLDEST = 1e-5
"""A temperature below it counts as 0."""

DEFAULTABLE = frozenset(SAMPLER_SETTINGS)
"""Settings for which models have defaults of their own."""


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplerSettings):
    """Settings of one sequence: how it is sampled, and when it ends.

    Which token is chosen is set by the fields of ``SamplerSettings``, which come first.
    ``logit_bias`` and ``guide`` apply behind the penalties and before the temperature.

    Attributes:
        logit_bias: token id -> number added to its logit.
        seed: the n-th token depends on the seed, n and the logits alone, never on what else runs
            or was guessed. So the same seed gives the same text wherever the model computes the
            same logits: in float32. In 16 bits the last digits of logits differ with the shape of
            a batch, and now and then a token that was on the edge does. None draws a new seed.
        max_tokens: tokens to sample at most; 0 to read the prompt alone; None until a stop, or
            until the cache is full.
        stop: end before the first of these texts; it is not part of the output.
        stop_token_ids: end after one of these tokens; it adds no text.
        ignore_eos: sample on after the model's end-of-sequence token.
        min_tokens: tokens before which neither the model's end-of-sequence token nor one of
            ``stop_token_ids`` is sampled, unless a guide lets nothing else come.
        logprobs: None for none, 0 for the sampled token's log probability, n for the n most
            likely tokens' too; always those of the model itself, before all settings above.
        guide: makes what decides which tokens may come; the sequence ends where it is complete.
        unset: names of settings that nobody asked for: their values hold where a model has no
            defaults of its own. See ``for_model``.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    guide: Callable[[], Guide] | None = field(default=None, hash=False, compare=False)
    unset: frozenset[str] = field(default=frozenset(), compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, list | tuple):
            raise ConfigError(f"stop must be a list of texts, got {seen(self.stop)}")
        object.__setattr__(self, "stop", tuple(self.stop))
        ids = tuple(wholes(self.stop_token_ids, "stop_token_ids"))
        object.__setattr__(self, "stop_token_ids", ids)
        self.check_settings()
        whole(self.min_tokens, "min_tokens")
        for name in ("seed", "max_tokens", "logprobs"):
            if getattr(self, name) is not None:
                whole(getattr(self, name), name)
        flag(self.ignore_eos, "ignore_eos")
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias must be a mapping, got {seen(self.logit_bias)}")
        for token_id, bias in self.logit_bias.items():
            whole(token_id, "each token of logit_bias")
            number(bias, f"logit_bias[{seen(token_id)}]")
        if self.guide is not None and not callable(self.guide):
            raise ConfigError(f"guide must make a Guide when it is called, got {seen(self.guide)}")
        if self.seed is not None:
            self._check("seed", self.seed, self.seed >= 0, "0 or more")
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens, self.max_tokens >= 0, "0 or more")
        most = math.inf if self.max_tokens is None else self.max_tokens
        limits = f"0 to max_tokens, which is {self.max_tokens}"
        self._check("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, limits)
        if self.logprobs is not None:
            self._check("logprobs", self.logprobs, self.logprobs >= 0, "0 or more, or None")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop holds texts of at least one character, got {self.stop!r}")

    def for_model(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Return the settings with a model's own defaults for those that were not asked for.

        A model that names a temperature says how it wants to be sampled: of what it leaves out
        nothing is cut off, whatever is usual here.

        Args:
            defaults: by name, as ``LoadedModel.sampling`` has them.
        """
        if not self.unset or not defaults:
            return replace(self, unset=frozenset()) if self.unset else self
        found: dict[str, Any] = {}
        if "temperature" in defaults and "temperature" in self.unset:
            found = {name: setting.neutral for name, setting in SAMPLER_SETTINGS.items()}
        found |= defaults
        named = {name: value for name, value in found.items() if name in self.unset}
        return replace(self, **named, unset=frozenset())

    def _check(self, name: str, value: float, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise ConfigError(f"{name} must be {wanted}, got {seen(value)}")

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is taken."""
        return self.temperature < _COLDEST or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on which tokens the sequence holds."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class TokenLogprob(NamedTuple):
    """A token and its natural-log probability."""

    token_id: int
    logprob: float


class Choice(NamedTuple):
    """Token that ``sample`` chose for one row.

    Attributes:
        token_id: the token.
        logprob: its log probability under the model, None where it was not asked for.
        top_logprobs: the most likely tokens, most likely first, as many as were asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class SamplingState:
    """Sampling state of one sequence between its tokens: random draws, and tokens to penalise.

    The n-th token of a sequence uses the n-th draw of its seed, however the sequence was batched,
    cut back or run again.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt: History | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Create the state of a sequence that has sampled nothing yet.

        Args:
            params: its settings.
            vocab_size: columns of the logits.
            prompt: what it holds already; only a repetition penalty looks at them.
            eos_token_ids: tokens with which the model ends a text; for ``min_tokens``.

        Raises:
            ConfigError: ``logit_bias`` names a token that the model does not have.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.n_sampled = 0
        self.seed = params.seed if params.seed is not None else np.random.SeedSequence().entropy
        self._random: np.random.Generator | None = None
        """Where the draws behind those that are known come from; None: it has to be found again."""
        self._draws = np.empty(0)
        for token_id in params.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise ConfigError(
                    f"logit_bias names token {token_id}; the model has tokens 0 to {vocab_size - 1}"
                )
        self._bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        known = [token_id for token_id in ends if 0 <= token_id < vocab_size]
        self._end_ids = np.array(sorted(known), dtype=np.int64)
        self._counts: NDArray[np.int32] | None = None
        self._in_prompt: NDArray[np.bool_] | None = None
        self._prompt_ids = np.empty(0, np.int64)
        self._sampled: list[int] = []
        """Tokens that are counted, each once."""
        self._guide = None if params.guide is None else checked_guide(params.guide())
        if params.has_penalties:
            self._counts = np.zeros(vocab_size, dtype=np.int32)
            self._in_prompt = np.zeros(vocab_size, dtype=np.bool_)
            if prompt is not None:
                self._in_prompt[prompt.tokens] = True
                self._prompt_ids = np.flatnonzero(self._in_prompt)

    def fork(self) -> SamplingState:
        """Return a copy that goes on by itself, with the same random draws."""
        if not self.params.is_greedy:  # so that copies seldom have to find their place
            self._draw_up_to(self.n_sampled + _DRAWS // 2)
        other = copy.copy(self)
        other._random = None
        if self._counts is not None:
            other._counts, other._sampled = self._counts.copy(), self._sampled.copy()
        if self._guide is not None:
            other._guide = self._guide.fork()
        return other

    def record(self, token_id: int) -> None:
        """Go on with ``token_id``."""
        self.n_sampled += 1
        if self._counts is not None:
            if not self._counts[token_id]:
                self._sampled.append(token_id)
            self._counts[token_id] += 1
        if self._guide is not None:
            self._guide.accept(token_id)

    def may_sample(self, token_id: int) -> bool:
        """Return true if the guide lets a token come next."""
        return self._guide is None or bool(self._guide.allowed()[token_id])

    @property
    def is_complete(self) -> bool:
        """True if the guide lets nothing follow."""
        return self._guide is not None and self._guide.is_complete

    def draw(self) -> float:
        """Return the random number in [0, 1) for the next token; the same until ``record``."""
        self._draw_up_to(self.n_sampled)
        return float(self._draws[self.n_sampled])

    def _draw_up_to(self, n: int) -> None:
        if n >= self._draws.size and self._random is None:
            self._random = np.random.default_rng(self.seed)
            self._random.random(self._draws.size)
        while n >= self._draws.size:
            assert self._random is not None
            self._draws = np.concatenate([self._draws, self._random.random(_DRAWS)])

    @property
    def adjusts_logits(self) -> bool:
        """True if ``adjust`` changes anything."""
        is_guided = self._guide is not None
        is_counted = self._counts is not None
        return is_guided or is_counted or self._bias_ids.size > 0 or self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        return self._end_ids.size > 0 and self.n_sampled < self.params.min_tokens

    def row_sampling(self, row: int) -> RowSampling:
        """Return in numbers how a row is sampled next, for a backend; a guide may raise."""
        params, counts, numbers = self.params, self._counts, dict[str, Any]()
        if counts is not None and self._in_prompt is not None:
            numbers["sampled"] = sampled = np.array(self._sampled, np.int64)
            numbers["times"] = counts[sampled].astype(np.float32)
            if params.repetition_penalty != 1.0:
                new = sampled[~self._in_prompt[sampled]]
                numbers["held"] = np.concatenate([self._prompt_ids, new])
        return RowSampling(
            row,
            params,
            None if params.is_greedy else self.draw(),
            bias_ids=self._bias_ids,
            bias=self._bias,
            allowed=None if self._guide is None else self._guide.allowed(),
            end_id=None if self._guide is None else self._guide.end_id,
            barred=self._end_ids if self._must_go_on else self._end_ids[:0],
            logprobs=params.logprobs,
            **numbers,
        )

    def adjust(self, logits: FloatArray) -> None:
        """Apply penalties, bias and guide to ``logits`` ``[vocab]``, in place."""
        params = self.params
        if self._counts is not None and self._in_prompt is not None:
            if params.repetition_penalty != 1.0:
                held = np.flatnonzero(self._in_prompt | (self._counts > 0))
                values = logits[held]
                penalty = np.float32(params.repetition_penalty)
                logits[held] = np.where(values > 0, values / penalty, values * penalty)
            sampled = np.flatnonzero(self._counts)
            times = self._counts[sampled].astype(np.float32)
            logits[sampled] -= times * np.float32(params.frequency_penalty)
            logits[sampled] -= np.float32(params.presence_penalty)
        if self._bias_ids.size:
            logits[self._bias_ids] += self._bias
        if self._guide is not None:
            barred = ~self._guide.allowed()
            end_id = self._guide.end_id
            if end_id is not None:
                logits[end_id] = _together(logits[end_id], logits[barred], params)
            logits[barred] = -np.inf
        if self._must_go_on:
            ends = logits[self._end_ids]
            logits[self._end_ids] = -np.inf
            if not np.isfinite(logits.max()):  # nothing else is allowed
                logits[self._end_ids] = ends


def sample(logits: NDArray[Any], states: Sequence[SamplingState]) -> list[Choice]:
    """Choose the next token of every row. Changes neither the logits nor the states.

    Args:
        logits: ``[R, vocab]``.
        states: one per row; call ``record`` with what each sequence really goes on with.

    Raises:
        ModelError: a row holds NaN or +inf, or nothing but -inf, or its guide lets nothing come.
    """
    raw = np.asarray(logits, dtype=np.float32)
    assert raw.ndim == 2 and len(raw) == len(states), "one state per row of logits"
    best = _best(raw)
    adjusted = raw
    if any(state.adjusts_logits for state in states):
        adjusted = raw.copy()
        for row, state in enumerate(states):
            state.adjust(adjusted[row])
    token_ids = adjusted.argmax(axis=1)  # the first of equals
    for row, token_id in enumerate(token_ids):
        if adjusted[row, token_id] == -np.inf:
            raise nothing_may_come(row)
    drawn = [row for row, state in enumerate(states) if not state.params.is_greedy]
    if drawn:
        token_ids[drawn] = _draw(adjusted[drawn], [states[row] for row in drawn])
    return [
        _with_logprobs(raw[row], int(token_ids[row]), best[row], state.params.logprobs)
        for row, state in enumerate(states)
    ]


def _best(logits: FloatArray) -> FloatArray:
    """Return the highest logit of each row.

    Raises:
        ModelError: one is no number.
    """
    best: FloatArray = logits.max(axis=1, initial=-np.inf)
    for row, value in enumerate(best):
        if not math.isfinite(value):
            raise no_probabilities(row, float(value))
    return best


def _together(logit: np.float32, others: FloatArray, params: SamplingParams) -> np.float32:
    """Return the logit of a token that stands for others: as likely chosen as all of them."""
    best = max(logit, others.max(initial=-np.inf))
    if params.is_greedy or not math.isfinite(best):
        return np.float32(best)
    scale = float(params.temperature)
    weights = np.exp((np.append(others, logit).astype(np.float64) - best) / scale)
    return np.float32(best + scale * math.log(weights.sum()))


def score(logits: NDArray[Any], token_ids: Sequence[int], n_top: int = 0) -> tuple[Choice, ...]:
    """Return the log probability of each token under its row of the model's own logits.

    Args:
        logits: ``[N, vocab]``; rows behind those are not looked at.
        token_ids: ``[N]``, what really followed.
        n_top: the most likely tokens that come with each.

    Raises:
        ModelError: a row holds NaN or +inf, or nothing but -inf.
    """
    raw = np.asarray(logits, dtype=np.float32)[: len(token_ids)]
    best = _best(raw)
    return tuple(
        _with_logprobs(raw[row], token_id, best[row], n_top)
        for row, token_id in enumerate(token_ids)
    )


def _draw(logits: FloatArray, states: list[SamplingState]) -> list[int]:
    """Sample every row by inverting its cumulative distribution, in order of token ids."""
    temperature = np.array([state.params.temperature for state in states], dtype=np.float32)
    scaled = logits - logits.max(axis=1, keepdims=True)  # before the division, which may overflow
    with np.errstate(over="ignore"):  # a temperature near 0: -inf, and exactly 0 for the best
        scaled /= temperature[:, None]
    weights = np.exp(scaled)
    chosen = []
    for row, state in enumerate(states):
        edge = _edge(scaled[row], weights[row], state.params)
        kept = np.flatnonzero((scaled[row] >= edge) & (weights[row] > 0))
        cumulative = np.cumsum(weights[row][kept].astype(np.float64))
        at = np.searchsorted(cumulative, state.draw() * cumulative[-1], side="right")
        chosen.append(int(kept[min(int(at), kept.size - 1)]))
    return chosen


def _edge(scaled: FloatArray, weights: FloatArray, params: SamplingParams) -> float:
    """Return the lowest scaled logit that stays; the highest is 0."""
    edge = -math.inf
    if 0 < params.top_k < scaled.size:
        at = scaled.size - params.top_k
        edge = float(np.partition(scaled, at)[at])
    if params.top_p < 1.0:
        order = np.sort(scaled[(scaled >= edge) & (weights > 0)])[::-1]
        cumulative = np.cumsum(np.exp(order, dtype=np.float64))
        at = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left"))
        edge = float(order[min(at, order.size - 1)])
    if params.min_p > 0.0:
        edge = max(edge, math.log(params.min_p))
    return edge


def _with_logprobs(logits: FloatArray, token_id: int, best: float, wanted: int | None) -> Choice:
    """Return the choice, with the model's own log probabilities where they are wanted."""
    if wanted is None:
        return Choice(token_id)
    shifted = logits.astype(np.float64) - best
    logprobs = shifted - math.log(np.exp(shifted).sum())
    top: tuple[TokenLogprob, ...] = ()
    if wanted:
        n = min(wanted, logits.size)
        edge = np.partition(logits, logits.size - n)[logits.size - n]
        ids = np.flatnonzero(logits >= edge)
        ids = ids[np.argsort(-logits[ids], kind="stable")][:n]
        top = tuple(TokenLogprob(int(i), float(logprobs[i])) for i in ids)
    return Choice(token_id, float(logprobs[token_id]), top)
