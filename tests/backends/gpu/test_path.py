"""The whole path of a card, interpreted: steps as a scheduler makes them, and what an engine says.

Weights, K and V, states, logits and graphs are a card's; what is wanted is the CPU's, by torch's
operations on the numbers that the weights stand for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.cache import kernel  # noqa: E402
from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.attend import launch, lists, plans  # noqa: E402
from kvcellar.backends.torch.gpu.sampler import logits  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.backends.torch.run import place_weights as holding  # noqa: E402
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams  # noqa: E402
from kvcellar.models import load_model  # noqa: E402
from tests.backends.gpu.test_held import by_torch  # noqa: E402
from tests.card import stand_in  # noqa: E402
from tests.engine.test_recurrent_on_torch import HalfRight  # noqa: E402
from tests.models.hybrid_checkpoints import write_hybrid  # noqa: E402
from tests.models.players import Player  # noqa: E402

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
SIZES = {"hidden_size": 256, "intermediate_size": 512}
WINDOWS = {"sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama-int8": ("llama", SMALL, "int8"),
    "lfm2": ("lfm2", {}, "none"),
    "llama": ("llama", SMALL, "none"),
    "gemma2-int8": ("gemma2", WINDOWS, "int8"),
    "gpt_oss-int8": ("gpt_oss", WINDOWS, "int8"),
    "qwen3_moe-int8": ("qwen3_moe", SMALL, "int8"),
    "llama-int4": ("llama", {**SMALL, **SIZES}, "int4"),
}
"""Name of a model -> its family, fields of its config, and how a card holds its weights."""

KV_DTYPES = ["int8", "k8v4", "bfloat16", "fp8", "int4:rot:last4"]

HAS_ALL = "KVCELLAR_ALL_CASES" in os.environ
"""True for all cases, which take minutes: the first of each list are under one."""

N_SEQUENCES = 3

FEW = max(1, settings.default.max_examples // 16)
"""Steps that are drawn for each model: an interpreted one takes a second."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Callable[[str], tuple[Any, Any]]:
    """Name of a model -> it with a card's weights, and with the CPU's."""

    @functools.cache
    def load(name: str) -> tuple[Any, Any]:
        family, fields, weights = MODELS[name]
        folder: Path = tmp_path_factory.mktemp(family)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holding, "hold_mixers", lambda *_: {})  # the CPU kernel's
            if name == "lfm2":
                write_hybrid(family, folder)
            else:
                write_tiny(family, folder, **fields)
            given = {"dtype": "float32", "is_unchecked": True}
            plain = load_model(folder, weights="none", **given)
            if weights == "none":
                return plain, plain
            stand_in(patch)
            card = load_model(folder, weights=weights, **given)
            return card, by_torch(folder, weights)

    return load


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """A CPU stands in for a card, with tiles so small that short histories fill some."""

    def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> plans.Tiling:
        n_kv_heads = pool.k.data.shape[1]
        return plans.Tiling(n_heads // n_kv_heads, n_kv_heads, 16, 16, 16, 2, 2)

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        patch.setattr(launch, "tiling_of", tiling)
        patch.setattr(lists, "LEAST_SHARED", 8)
        patch.setattr(kernel, "takes", lambda *_: False)  # on the CPU torch's own operations
        yield


class Piece(NamedTuple):
    """Tokens of one sequence in a step.

    Attributes:
        seq: whose.
        n: how many.
        n_wanted: of the last of them logits are wanted; 0: a prompt goes on.
    """

    seq: int
    n: int
    n_wanted: int


class Step(NamedTuple):
    """A step, and what happened before it.

    Attributes:
        pieces: of different sequences.
        fork: sequence that is forked, and which one becomes it; or None.
        cut: sequence that goes back, and by how many tokens; or None.
    """

    pieces: tuple[Piece, ...]
    fork: tuple[int, int] | None = None
    cut: tuple[int, int] | None = None


SEQS = st.integers(0, N_SEQUENCES - 1)
PIECES = st.builds(
    lambda seq, n, n_wanted: Piece(seq, n, min(n, n_wanted)),
    SEQS,
    st.one_of(st.just(1), st.integers(2, 20)),
    st.sampled_from([0, 1, 1, 4, 20]),  # of a chunk, of its end and a decode, of guesses, of scores
)
STEPS = st.lists(
    st.builds(
        Step,
        st.lists(PIECES, min_size=1, max_size=N_SEQUENCES, unique_by=lambda piece: piece.seq).map(
            tuple
        ),
        st.none() | st.tuples(SEQS, SEQS).filter(lambda pair: pair[0] != pair[1]),
        st.none() | st.tuples(SEQS, st.integers(1, 5)),
    ),
    min_size=1,
    max_size=5,
)
CHUNKS = [
    Step((Piece(0, 17, 0),)),
    Step((Piece(0, 9, 1), Piece(1, 7, 0))),
    *[Step((Piece(0, 1, 1), Piece(1, 1, 1)))] * 3,
    Step((Piece(2, 1, 1),), fork=(0, 2)),
]
"""A prompt in two chunks, of which the first wants no logits, then decode steps and a fork."""


def play(models: tuple[Any, Any], steps: list[Step], atol: float = 1e-3, **policy: Any) -> None:
    """Run steps on a card and on the CPU: the logits that are wanted are the same."""
    ours, plain = models
    policy = {"min_chunk": 256, "capacity": 512, "window_slack": 5, **policy}
    has_states = ours.params.state is not None
    with Player(ours, "seq", **policy) as mine, Player(plain, "seq", **policy) as theirs:
        lengths = [0] * N_SEQUENCES
        for at, step in enumerate(steps):
            if step.fork is not None and lengths[step.fork[0]]:
                seq, to = step.fork
                for player in (mine, theirs):
                    if lengths[to]:
                        player.cache.seq_rm(to, 0)
                    player.cache.seq_cp(seq, to)
                lengths[to] = lengths[seq]
            if step.cut is not None and not has_states and lengths[step.cut[0]]:
                seq, n = step.cut
                lengths[seq] = max(0, lengths[seq] - n)
                for player in (mine, theirs):
                    player.cut(lengths[seq], seq)
            tokens, rows = [], []
            for seq, n, n_wanted in step.pieces:
                tokens += [(seq, (7 * seq + 3 * i + at) % 200) for i in range(n)]
                rows += range(len(tokens) - n_wanted, len(tokens))
                lengths[seq] += n
            found = mine.batch(tokens, rows=rows)
            choice.ON_CPU = False
            wanted = theirs.batch(tokens, rows=rows)
            choice.ON_CPU = True
            assert found.shape == wanted.shape == (len(rows), ours.vocab_size)
            np.testing.assert_allclose(found, wanted, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS)[: None if HAS_ALL else 2])
@settings(max_examples=FEW)
@example(CHUNKS)
@given(STEPS)
def test_any_steps_of_a_scheduler_give_what_the_cpu_gives(models, name, steps) -> None:
    play(models(name), steps)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[: None if HAS_ALL else 2])
def test_k_and_v_are_stored_as_the_cpu_stores_them(models, kv_dtype: str) -> None:
    play(models("llama"), CHUNKS, kv_dtype=kv_dtype, atol=0.05)


# The engine ------------------------------------------------------------------------------------


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let the CPU be one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "ON_CPU", False)
        patch.setattr(choice, "has_graphs", lambda device: False)
        patch.setattr(logits, "ON_CPU", False)
        yield


class Letters:
    """A guide that lets every second token come."""

    is_complete, end_id = False, None

    def allowed(self) -> Any:
        return np.arange(288) % 2 == 0

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0

    def fork(self) -> Letters:
        return self


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, n).tolist()


def asked(prompt: list[int], n: int = 3, **params: Any) -> Request:
    return Request(prompt, SamplingParams(max_tokens=n, ignore_eos=True, **params))


TRUNK = text(26)
MIXED = [
    asked(TRUNK),
    asked([*TRUNK, *text(9, 1)], temperature=0.8, seed=1, logprobs=2),
    asked(TRUNK[:17], temperature=1.1, top_k=9, top_p=0.9, seed=2),
    asked(TRUNK[3:], repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1),
    asked(TRUNK, temperature=0.7, min_p=0.1, guide=Letters, seed=4),
    Request(TRUNK[:9], SamplingParams(max_tokens=2, logit_bias={65: 3.0}), prompt_logprobs=2),
    asked(text(3, 5), min_tokens=2, stop_token_ids=tuple(range(200))),
]
"""Prompts of several chunks and of less than one, that share a beginning, sampled in every way."""


def said(
    model: Any, requests: list[Request], drafter: Any = None, capacity: int = 512, **config: Any
) -> tuple[list[tuple[int, ...]], Any, Any]:
    """Run requests at once; return their tokens, the engine's counts and its runner."""
    with kv.make_tree_session("torch", kv.make_config(model.params, capacity)) as session:
        runner = model.bind(session)
        config = {"max_num_batched_tokens": 16, **config}
        engine = Engine(runner, session.cache, drafter=drafter, config=EngineConfig(**config))
        ids = [engine.submit(request) for request in requests]
        ends = {one.request_id: one for one in engine.run() if isinstance(one, FinishEvent)}
        assert [ends[i].error for i in ids] == [None] * len(ids)
        return [ends[i].token_ids for i in ids], engine.stats(), runner


@pytest.mark.slow
def test_prompts_in_chunks_and_every_sampler_say_what_the_cpu_says(models) -> None:
    card, plain = models("llama-int8")
    found, _, runner = said(card, MIXED)
    with on_cpu():
        wanted, _, other = said(plain, MIXED)
    assert found == wanted
    assert type(runner) is not type(other) and runner.graphs.n_graphs > 0
    assert not runner.graphs.is_off and runner.graphs._device.n_played > 3


@pytest.mark.slow
def test_who_had_to_give_way_says_the_same(models) -> None:
    card, plain = models("llama-int8")
    long = [asked(text(9, i), 12) for i in range(3)]
    found, stats, _ = said(card, long, capacity=40, index="naive")
    with on_cpu():
        wanted, _, _ = said(plain, long, index="naive")
    assert found == wanted and stats.preemptions > 0


@pytest.mark.slow
def test_guesses_are_verified(models) -> None:
    card, plain = models("llama-int8")
    prompt = text(9, 3)
    with on_cpu():
        wanted, _, _ = said(plain, [asked(prompt, 8)])
    guesses = HalfRight([*prompt, *wanted[0]], has_trees=True)
    found, stats, _ = said(card, [asked(prompt, 8)], guesses, verify_all_drafts=True)
    assert found == wanted and stats.drafted_tokens > stats.accepted_tokens > 0
