"""Whoever guesses, on whatever cache: the tokens of the plain loop, and the same reuse.

``KVCELLAR_PROMPTS`` sets how many prompts every combination gets, besides half as many forks of
running ones; 8 by default.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends.reference import ReferenceContiguousCache, ReferenceTreeCache
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.engine import Engine, EngineConfig, SamplingParams, generate, last
from kvcellar.engine.speculate import DraftModel, Eagle3Drafter, NgramDrafter
from kvcellar.models import LoadedModel, load_model
from kvcellar.types import ModelCacheParams
from tests.engine.fakes import (
    FULL_PARAMS,
    PARAMS,
    ByteTokenizer,
    GuessTrees,
    HashRunner,
    TreeCells,
    make_cache,
)
from tests.engine.speculate.test_eagle3 import head_of
from tests.engine.speculate.traces import NARROW, Doubtful, check, played
from tests.engine.test_engine import VOCAB, make_engine, nothing_is_left, plain_loop
from tests.models.eagle3_heads import head_config, head_tensors, write_head
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_checkpoint

N_PROMPTS = int(os.environ.get("KVCELLAR_PROMPTS", "8"))
DRAFTERS = ("ngram", "draft model", "trees", "eagle3")


def drafter_of(kind: str, params: Any) -> Any:
    if kind == "ngram":
        return NgramDrafter((4, 2, 1))
    if kind == "eagle3":
        return head_of(1500, width=3, target=params)
    if kind == "trees":
        return GuessTrees(params, VOCAB)
    cache = TreeCells(kv.make_config(params, 1500, min_chunk=16))
    return DraftModel(HashRunner(cache, VOCAB), cache, VOCAB)


@pytest.mark.parametrize("params", [FULL_PARAMS, PARAMS], ids=["full", "window"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.slow
def test_with_forks_and_preemption_between(params, kind):
    """Prompts and their forks, of which some have to give way."""
    cache = make_cache("tree", 110, params)
    engine = make_engine(
        params=params,
        cache=cache,
        drafter=drafter_of(kind, params),
        verify_all_drafts=True,
        max_num_batched_tokens=32,
    )
    n = N_PROMPTS + 1
    said = played(engine, n, VOCAB, bias=NARROW if kind == "ngram" else None)
    assert check(said, lambda p, s: plain_loop(p, s, params).token_ids) >= n
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.drafter_failures == 0
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    nothing_is_left(engine)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_as_much_is_reused_as_without_guesses(kind):
    rates = []
    for drafter in (None, drafter_of(kind, FULL_PARAMS)):
        engine = make_engine(
            capacity=3000,
            params=FULL_PARAMS,
            cache=make_cache("tree", 3000, FULL_PARAMS),
            drafter=drafter,
            verify_all_drafts=True,
            max_num_batched_tokens=64,
        )
        for seed in (0, 0, 1):
            played(engine, 6, VOCAB, seed, has_forks=False)
        rates.append(engine.stats().hit_rate)
    assert rates[0] == rates[1] > 0.4


class Attention:
    """A model of two layers in NumPy, over a cache of the reference backend."""

    params = ModelCacheParams(n_layers=2, n_kv_heads=2, head_dim=8)
    vocab_size = VOCAB
    max_tokens_per_step = None

    def __init__(self, cache: Any) -> None:
        rng = np.random.default_rng(0)
        self.cache = cache
        self.embedding = rng.normal(0, 1, (VOCAB, 16))
        self.places = rng.normal(0, 1, (512, 16))
        self.mixing = rng.normal(0, 0.5, (2, 4, 16, 16))

    def forward(self, token_ids: Any, positions: Any, rows: Any = None) -> np.ndarray:
        if not self.cache.is_step_open:
            self.cache.end_step()
        x = self.embedding[list(token_ids)] + self.places[list(positions)]
        for layer, (*inwards, outwards) in enumerate(self.mixing):
            q, k, v = ((x @ w).reshape(len(x), 2, 8).swapaxes(0, 1)[None] for w in inwards)
            seen = self.cache.update_and_attend(q, k, v, positions, layer, 1.0, np.float64)
            x = np.tanh(x + seen[0].swapaxes(0, 1).reshape(len(x), 16) @ outwards)
        wanted = [len(x) - 1] if rows is None else list(rows)
        return (x[wanted] @ self.embedding.T).astype(np.float32)


@pytest.mark.parametrize("kind", ["ngram", "trees"])
def test_on_the_reference_caches(kind):
    cache = ReferenceTreeCache(kv.make_config(Attention.params, 110, "float32"))
    drafter: Any = NgramDrafter((4, 2, 1))
    if kind == "trees":
        own = ReferenceTreeCache(kv.make_config(Attention.params, 600, "float32"))
        drafter = Doubtful(DraftModel(Attention(own), own, VOCAB), VOCAB)
    config = EngineConfig(verify_all_drafts=True, max_num_seqs=4)
    engine = Engine(Attention(cache), cache, drafter=drafter, config=config)

    def plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        alone = ReferenceContiguousCache(kv.make_config(Attention.params, 400, "float32"))
        events = generate(Attention(alone), alone, ByteTokenizer(), prompt, params)
        return last(events).token_ids

    said = played(engine, N_PROMPTS, VOCAB, bias=NARROW if kind == "ngram" else None)
    assert check(said, plain) >= N_PROMPTS
    stats = engine.stats()
    assert stats.preemptions > 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


# On models ----------------------------------------------------------------------------------------

CAPACITY = 90 if N_PROMPTS <= 50 else 110
"""Some of the trace's requests have to give way; each fits alone, long forks of forks too."""

SESSIONS = {
    "seq": kv.make_seq_session,
    "paged": kv.make_paged_session,
    "tree": kv.make_tree_session,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2_window", tmp_path_factory.mktemp("tiny"))


@contextmanager
def guessing(
    model: LoadedModel,
    cache: str,
    kind: str | None,
    capacity: int = CAPACITY,
    kv_dtype: str = "float32",
) -> Iterator[Engine]:
    """An engine whose drafter is of the kind, everything verified; None: without one."""
    block_size = 8 if cache == "paged" else 1
    config = kv.make_config(model.params, capacity, kv_dtype, block_size=block_size)
    with ExitStack() as stack:
        session = stack.enter_context(SESSIONS[cache](model.backend, config))
        drafter: Any = None
        layers: tuple[int, ...] = ()
        if kind == "ngram":
            drafter = NgramDrafter((4, 2, 1))
        elif kind == "eagle3":
            head = load_eagle3(narrow_head(stack), model)
            layers, own = head.feature_layers, kv.make_config(head.params, 600)
            other = stack.enter_context(kv.make_tree_session("torch", own))
            drafter = Eagle3Drafter(head.bind(other), other.cache, min_reach=0.0)
        elif kind is not None:
            own = kv.make_config(model.params, 600, kv_dtype)
            other = stack.enter_context(kv.make_tree_session(model.backend, own))
            drafter = DraftModel(model.bind(other), other.cache, model.vocab_size)
        if kind == "trees":
            drafter = Doubtful(drafter, model.vocab_size)
        settings = EngineConfig(verify_all_drafts=True, max_num_seqs=5, max_drafted=8)
        runner = model.bind(session, feature_layers=layers)
        yield Engine(runner, session.cache, drafter=drafter, config=settings)


def narrow_head(stack: ExitStack) -> Path:
    """A random head that says the first four tokens alone: of ``NARROW`` it is often right."""
    config = head_config(draft_vocab_size=4)
    tensors = head_tensors(config)
    tensors["d2t"] = torch.zeros(4, dtype=torch.int64)
    drawn = torch.Generator().manual_seed(1)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB_SIZE, 64, generator=drawn)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return write_head(Path(folder) / "head", config, tensors)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Callable[..., LoadedModel]:
    """Backend -> the model, loaded once."""
    return functools.cache(lambda backend="torch": load_model(checkpoint, backend=backend))


@functools.lru_cache(maxsize=8)
def plainly(model: LoadedModel, kv_dtype: str = "float32") -> Any:
    """The plain loop, one request at a time; all drafters are given the same requests."""
    known: dict[Any, tuple[int, ...]] = {}

    def said(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        key = tuple(prompt), repr(params)
        if key not in known:
            config = kv.make_config(model.params, 400, kv_dtype)
            with kv.make_decode_session(model.backend, config) as session:
                runner = model.bind(session)
                events = generate(runner, session.cache, model.tokenizer, prompt, params)
                known[key] = last(events).token_ids
        return known[key]

    return said


def agrees(model: LoadedModel, cache: str, kind: str, *, capacity: int = CAPACITY) -> None:
    """Prompts, forks of running ones, and some that give way: the tokens of the plain loop."""
    is_narrow = kind in ("ngram", "eagle3")
    with guessing(model, cache, kind, capacity) as engine:
        said = played(engine, N_PROMPTS, VOCAB_SIZE, bias=NARROW if is_narrow else None)
        stats = engine.stats()
    assert check(said, plainly(model)) >= N_PROMPTS
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert stats.preemptions > 0 and stats.drafter_failures == 0


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("cache", SESSIONS)
@pytest.mark.slow
def test_on_torch(loaded, cache, kind):
    agrees(loaded(), cache, kind)


TIES = {"int8": 0.05, "int4": 0.1}
"""How far logits are moved where a few numbers of K and V are rounded the other way."""


def next_logits(model: LoadedModel, kv_dtype: str, prompt: Any, said: Any) -> np.ndarray:
    """What the plain loop chooses from, behind a prompt and what it has said."""
    tokens = [*prompt, *said]
    with kv.make_decode_session(
        model.backend, kv.make_config(model.params, 400, kv_dtype)
    ) as session:
        runner = model.bind(session)
        logits = runner.forward(prompt, range(len(prompt)))
        for at in range(len(prompt), len(tokens)):
            logits = runner.forward([tokens[at]], [at])
    return logits[-1]


@pytest.mark.parametrize("kind", [None, *DRAFTERS])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("cache", SESSIONS)
@pytest.mark.slow
def test_on_quantised_pools(loaded, cache, kv_dtype, kind):
    """With guesses and without: the tokens of the plain loop, but for a tie in some hundred texts.

    K and V of a token differ in their last bits with the tokens that it is computed beside, and
    what is quantised may be rounded the other way by that.
    """
    model = loaded()
    is_narrow = kind in ("ngram", "eagle3")
    with guessing(model, cache, kind, CAPACITY, kv_dtype) as engine:
        said = played(engine, N_PROMPTS, VOCAB_SIZE, bias=NARROW if is_narrow else None)
        stats = engine.stats()
    assert stats.preemptions > 0 and stats.drafter_failures == 0
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens or kind is None
    plain, n_other = plainly(model, kv_dtype), 0
    for prompt, params, tokens in said:
        want = plain(prompt, params)
        if tokens == want:
            continue
        n_other += 1
        at = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
        logits = next_logits(model, kv_dtype, prompt, want[:at])
        if params.is_greedy:
            assert logits[want[at]] - logits[tokens[at]] < TIES[kv_dtype], "no tie"
    assert n_other <= len(said) // 100


@pytest.mark.skipif(importlib.util.find_spec("mlx_lm") is None, reason="needs mlx-lm")
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("cache", ["seq", "tree"])
def test_on_mlx(loaded, cache, kind):
    agrees(loaded("mlx"), cache, kind)
