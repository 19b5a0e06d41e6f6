"""One trace for every engine with guesses: requests, forks of running ones, little room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvcellar.engine import Engine, FinishEvent, Request, SamplingParams
from kvcellar.engine.speculate import Draft, DraftRequest

GREEDY = SamplingParams(max_tokens=14, ignore_eos=True)
NARROW = dict.fromkeys(range(3), 30.0)
"""A bias after which few tokens are left, so that what was said before is often said again."""

Said = list[tuple[tuple[int, ...], SamplingParams, tuple[int, ...]]]
"""Whole prompts, settings, and what was said."""


def prompts(n: int, vocab: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts that share beginnings and repeat themselves, so that n-grams find something."""
    rng = np.random.default_rng(seed)
    trunks = [tuple(rng.integers(0, vocab, 12).tolist()) for _ in range(2)]
    made = []
    for i in range(n):
        tail = tuple(rng.integers(0, vocab, 5).tolist())
        made.append(trunks[i % 2] + tail + tail + tail[: int(rng.integers(1, 4))])
    return made


def played(
    engine: Engine,
    n: int,
    vocab: int,
    seed: int = 0,
    *,
    has_forks: bool = True,
    bias: Mapping[int, float] | None = None,
) -> Said:
    """Run ``n`` prompts and half as many forks of running ones; everything that was said.

    Every third request is sampled with a temperature, the others are greedy.
    """
    greedy = replace(GREEDY, logit_bias=bias or {})
    submitted: dict[int, Request] = {}
    ends: dict[int, FinishEvent] = {}

    def submit(request: Request) -> None:
        submitted[engine.submit(request)] = request

    for i, prompt in enumerate(prompts(n, vocab, seed)):
        submit(Request(prompt, replace(greedy, temperature=0.7, seed=i) if i % 3 == 2 else greedy))
        for _ in range(2):
            ends.update((e.request_id, e) for e in engine.step() if isinstance(e, FinishEvent))
        running = engine.scheduler.running
        decoding = [s for s in running if len(s.sampled) > 1 and s.n_computed]
        if has_forks and i % 2 and decoding:
            so_far = engine.publish(decoding[-1].request_id)
            assert so_far is not None
            submit(Request((*so_far, 7), greedy))
    ends.update((e.request_id, e) for e in engine.run() if isinstance(e, FinishEvent))
    said = []
    for request_id, request in submitted.items():
        end = ends[request_id]
        assert end.usage is not None and end.finish is not None, end
        assert end.finish.cause != "cache_full", "each has to fit alone"
        said.append((request.prompt_ids, request.params, end.token_ids))
    return said


def check(said: Said, plain: Callable[[tuple[int, ...], SamplingParams], tuple[int, ...]]) -> int:
    """Compare with one request at a time without guesses; how many were compared."""
    for prompt, params, tokens in said:
        assert tokens == plain(prompt, params), (prompt, params)
    return len(said)


class Doubtful:
    """Another drafter's guesses, each with a rival of its own, some of them spoilt.

    So trees have siblings, wrong branches that go on, and right ones anywhere.
    """

    is_free = True

    def __init__(self, drafter: Any, vocab: int, seed: int = 0) -> None:
        self._drafter, self._vocab = drafter, vocab
        self._rng = np.random.default_rng(seed)

    def propose(self, asks: Sequence[DraftRequest]) -> list[Draft]:
        return [
            self._doubted(ask, draft)
            for ask, draft in zip(asks, self._drafter.propose(asks), strict=True)
        ]

    def ended(self, request_id: int) -> None:
        self._drafter.ended(request_id)

    def _doubted(self, ask: DraftRequest, draft: Draft) -> Draft:
        if not draft or not ask.n_nodes:
            return draft
        tokens: list[int] = []
        parents: list[int] = []
        level = [-1]
        for node in draft.follow(_first_path(draft)):
            guess = draft.tokens[node]
            rival = int(self._rng.integers(self._vocab))
            both = [guess] if rival == guess else [guess, rival]
            self._rng.shuffle(both)
            below = []
            for parent in level:
                for token in both:
                    if len(tokens) < ask.n_nodes and self._rng.random() < 0.8:
                        below.append(len(tokens))
                        tokens.append(token)
                        parents.append(parent)
            level = below[:3]
        return Draft(tuple(tokens), "doubtful", tuple(parents))


def _first_path(draft: Draft) -> list[int]:
    path: list[int] = []
    node = next(draft.children(-1), None)
    while node is not None:
        path.append(draft.tokens[node])
        node = next(draft.children(node), None)
    return path
