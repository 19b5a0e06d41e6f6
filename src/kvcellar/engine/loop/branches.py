"""One prompt, several continuations: forked without copying, continued in one batch, one kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvcellar.cache import SeqCache
from kvcellar.cache_config import CacheConfig, CacheUsage
from kvcellar.checks import whole
from kvcellar.engine.loop.generating import (
    Finish,
    check_prompt,
    prefill,
    told,
)
from kvcellar.engine.loop.sequence import SequenceView
from kvcellar.engine.loop.text import TextStream, Tokenizer
from kvcellar.engine.sampler.sampling import Choice, SamplingParams, SamplingState, sample
from kvcellar.errors import ConfigError, PictureError, PromptError
from kvcellar.models.runner import rope_border_of, turning
from kvcellar.pictures.tokens import pictures_in

if TYPE_CHECKING:
    from kvcellar.models.runner import FloatArray, Runner

StepFn = Callable[[int, int], None]
"""Called with how many tokens each branch has, and how many it may have."""


@dataclass(slots=True)
class Branch:
    """One continuation of the prompt.

    Attributes:
        seq_id: its sequence.
        token_ids: what was sampled.
        text: the text of it.
        mean_logprob: the mean log probability of its tokens under the model.
        finish: why it ended.
        cells: cells that its sequence held at the end, in all layer groups.
        shared_cells: of these, the cells that other sequences held too.
    """

    seq_id: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    mean_logprob: float = 0.0
    finish: Finish | None = None
    cells: int = 0
    shared_cells: int = 0

    @property
    def private_cells(self) -> int:
        """Cells that are this branch's alone."""
        return self.cells - self.shared_cells


@dataclass(frozen=True, slots=True)
class BranchReport:
    """Report of ``branch``: the branches, the seconds that they took, and their cells.

    Attributes:
        prompt_tokens: tokens of the prompt, computed once for all branches.
        branches: in the order of their sequences.
        best: index of the branch with the highest mean log probability; its sequence was kept.
        n_forwards: batched forwards after the prompt.
        prefill_s: time for the prompt.
        fork_s: time to fork all branches.
        decode_s: time for the branches' tokens.
        usage: the cache at its fullest.
        usage_kept: the cache with the best branch alone.
    """

    prompt_tokens: int
    branches: tuple[Branch, ...]
    best: int
    n_forwards: int
    prefill_s: float
    fork_s: float
    decode_s: float
    usage: CacheUsage
    usage_kept: CacheUsage

    @property
    def n_sampled(self) -> int:
        """Tokens of all branches together."""
        return sum(len(branch.token_ids) for branch in self.branches)


def branch(
    runner: Runner,
    cache: SeqCache,
    tokenizer: Tokenizer,
    prompt_ids: Iterable[int],
    params: SamplingParams,
    n_branches: int,
    *,
    eos_token_ids: Collection[int] = (),
    on_step: StepFn | None = None,
) -> BranchReport:
    """Continue a prompt in several ways and keep the likeliest.

    The prompt is sequence 0, its branches are 1 to ``n_branches``; they share its cells. Branch i
    samples with the seed ``params.seed + i - 1``.

    Args:
        runner: the model, bound to the session of ``cache``.
        cache: for many sequences; 0 to ``n_branches`` must be unused.
        tokenizer: for the text.
        prompt_ids: the trunk.
        params: how to sample; ``max_tokens`` is needed.
        n_branches: how many continuations.
        eos_token_ids: tokens with which the model ends a text.
        on_step: called after each token of the branches.

    Raises:
        PromptError: the prompt is empty or of another tokenizer, or it does not fit together with
            its branches, or their states do not; raised before any compute.
        PictureError: the prompt has pictures; likewise.
        ConfigError: no branches, or no ``max_tokens`` above 0.
    """
    whole(n_branches, "n_branches", least=1)
    if not params.max_tokens:
        raise ConfigError(
            "branches need max_tokens above 0, so that their cells can be counted before"
        )
    trunk = SequenceView(cache)
    prompt = check_prompt(
        prompt_ids, runner.vocab_size, trunk, n_reserved=n_branches * (params.max_tokens - 1)
    )
    pictures = pictures_in(prompt.tokens)
    if pictures:
        raise PictureError(
            f"branches are shown of a prompt of text, and this one has {len(pictures)} picture"
            f"{'s' * (len(pictures) > 1)}; ask without them"
        )
    n_slots = 2 * n_branches + 1  # each branch reads one and writes one, and the prompt's stays
    if cache.n_missing_slots(n_slots) > 0:
        raise PromptError(
            f"{n_branches} branches take {n_slots} slots for the states of recurrent layers, "
            f"{n_slots - cache.n_missing_slots(n_slots)} are free of {cache.config.n_slots}; ask "
            f"for fewer branches or raise n_slots"
        )
    growing = [
        _Growing(
            Branch(1 + index),
            SamplingState(_params_of(index, params), runner.vocab_size, prompt, eos_token_ids),
            TextStream(tokenizer, params.stop, context=prompt),
            eos_token_ids,
        )
        for index in range(n_branches)
    ]
    started = time.perf_counter()
    n_text = len(prompt) + params.max_tokens  # that a branch may come to
    logits = prefill(runner, trunk, prompt, n_text=n_text)
    prefilled = time.perf_counter()
    for one in growing:
        cache.seq_cp(trunk.seq_id, one.branch.seq_id)
    forked = time.perf_counter()
    with turning(runner, n_text > rope_border_of(runner)):
        n_forwards = _decode(runner, cache, growing, logits, on_step)
    finished = time.perf_counter()
    branches = tuple(one.end(cache) for one in growing)
    best = max(range(n_branches), key=lambda index: branches[index].mean_logprob)
    usage = cache.usage()
    cache.seq_keep(branches[best].seq_id)
    return BranchReport(
        prompt_tokens=len(prompt),
        branches=branches,
        best=best,
        n_forwards=n_forwards,
        prefill_s=prefilled - started,
        fork_s=forked - prefilled,
        decode_s=finished - forked,
        usage=usage,
        usage_kept=cache.usage(),
    )


@dataclass(slots=True)
class _Growing:
    """A branch that goes on."""

    branch: Branch
    state: SamplingState
    stream: TextStream
    eos_token_ids: Collection[int]
    logprob_sum: float = 0.0

    def take(self, choice: Choice) -> None:
        """Add a token; the branch has a finish if it ends with it."""
        one = self.branch
        self.state.record(choice.token_id)
        one.token_ids.append(choice.token_id)
        self.logprob_sum += choice.logprob or 0.0
        _, one.finish = told(choice.token_id, self.state, self.stream, self.eos_token_ids)

    def end(self, cache: SeqCache) -> Branch:
        """Return the branch with its text, its mean and the cells that it holds."""
        one = self.branch
        one.text = self.stream.text
        one.mean_logprob = self.logprob_sum / len(one.token_ids)
        one.cells, one.shared_cells = cache.seq_usage(one.seq_id)
        return one


def _decode(
    runner: Runner,
    cache: SeqCache,
    growing: list[_Growing],
    logits: FloatArray,
    on_step: StepFn | None,
) -> int:
    """Sample until all branches have ended, from the logits behind the prompt ``[1, vocab]``.

    Returns:
        The number of forwards.
    """
    logits = np.repeat(logits, len(growing), axis=0)
    states = [one.state for one in growing]
    live = growing
    n_forwards = 0
    while True:
        for one, choice in zip(live, sample(logits, [each.state for each in live]), strict=True):
            one.take(choice)
        if on_step is not None:
            most = states[0].params.max_tokens
            assert most is not None, "branches are bounded"
            on_step(max(state.n_sampled for state in states), most)
        live = [one for one in live if one.branch.finish is None]
        if not live:
            return n_forwards
        positions = cache.begin_step([(one.branch.seq_id, 1) for one in live])
        tokens = [one.branch.token_ids[-1] for one in live]
        logits = runner.forward(tokens, positions, rows=range(len(live)))
        n_forwards += 1


def bytes_per_cell(config: CacheConfig) -> int:
    """Return the bytes of one token's K and V in all layers that keep it."""
    return sum(group.cell_bytes(config.kv) for group in config.params.groups)


def _params_of(index: int, params: SamplingParams) -> SamplingParams:
    """Return one branch's settings: a seed of its own, and log probabilities of its tokens."""
    seed = None if params.seed is None else params.seed + index
    return replace(params, seed=seed, logprobs=params.logprobs or 0)
