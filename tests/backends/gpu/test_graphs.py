"""Steps as graphs, on a device that records calls: when, with what, and when no longer.

A recorded call has the tensors of its moment, as a graph has their addresses: played after they
have moved it writes and reads where nobody else does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.backends.torch.gpu import choice  # noqa: E402
from kvcellar.backends.torch.gpu.attend import launch, lists, plans  # noqa: E402
from kvcellar.backends.torch.gpu.record import graphs  # noqa: E402
from kvcellar.backends.torch.gpu.record.graphs import StepGraphs  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.backends.torch.run import place_weights  # noqa: E402
from kvcellar.budget import MemoryBudget  # noqa: E402
from kvcellar.models import LoadedModel, load_model  # noqa: E402
from tests.backends.gpu.fake_device import FakeDevice  # noqa: E402
from tests.backends.gpu.interpreter import hasten  # noqa: E402
from tests.models.hybrid_checkpoints import write_hybrid  # noqa: E402
from tests.models.players import Player  # noqa: E402
from tests.models.tiny_checkpoints import make_checkpoint  # noqa: E402


@contextmanager
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU is a GPU, with tiles so small that short histories fill some."""

    def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> plans.Tiling:
        n_kv_heads = pool.k.data.shape[1]
        return plans.Tiling(n_heads // n_kv_heads, n_kv_heads, 16, 16, 16, 2, 2)

    hasten()
    monkeypatch.setattr(choice, "ON_CPU", True)
    monkeypatch.setattr(launch, "tiling_of", tiling)
    monkeypatch.setattr(lists, "LEAST_SHARED", 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away, and NaN
        yield


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_tiles(monkeypatch):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> LoadedModel:
    folder = tmp_path_factory.mktemp("llama")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return load_model(write_tiny("llama", folder, num_hidden_layers=2, **heads))


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let a CPU be one, without the interpreter."""
    choice.ON_CPU = False
    yield
    choice.ON_CPU = True  # as the fixture has it, which puts it back


@contextmanager
def both(model: LoadedModel, kind: str = "seq", **policy: Any) -> Iterator[Pair]:
    policy = {"min_chunk": 256, **policy}  # pools that do not grow, unless a test is about that
    with Player(model, kind, **policy) as ours, Player(model, kind, **policy) as plain:
        yield Pair(model, ours, plain)


class Pair:
    """A session whose steps are graphs, and one whose steps are the CPU's; both get the same."""

    def __init__(self, model: LoadedModel, ours: Player, plain: Player) -> None:
        self.ours, self.plain, self.device = ours, plain, FakeDevice()
        self.apart = 2e-5
        self.graphs = ours.runner.graphs = StepGraphs(model.network, self.device)

    def step(self, tokens: Sequence[tuple[int, int]], rows: Any = "all") -> None:
        """Bring (sequence, token) to both; their logits are the same, but for ``apart``."""
        found = self.ours.batch(tokens, rows=rows)
        with on_cpu():
            wanted = self.plain.batch(tokens, rows=rows)
        np.testing.assert_allclose(found, wanted, atol=self.apart)

    def decode(self, n: int, times: int = 1) -> None:
        """Bring a token to each of the first sequences."""
        for i in range(times):
            self.step([(seq, 7 * seq + i) for seq in range(n)])

    def fork(self, n: int) -> None:
        for player in (self.ours, self.plain):
            for seq in range(1, n):
                player.cache.seq_cp(0, seq)


def prompt(n: int, seq: int = 0) -> list[tuple[int, int]]:
    return [(seq, 3 * i % 200) for i in range(n)]


def test_batches_of_any_size_share_a_few_graphs_and_compute_the_same(model) -> None:
    with both(model) as pair:
        pair.step(prompt(20))
        pair.fork(9)
        for n in (1, 2, 4, 5, 9):
            pair.decode(n, 2)
        assert pair.device.n_captured == pair.graphs.n_graphs == 5  # 1, 2, 4, 8 and 16 tokens
        for n in (3, 6, 7, 8):
            pair.decode(n)
        assert pair.device.n_captured == 5 and pair.device.n_played >= 7


def test_a_step_that_a_prompt_comes_between_is_played_behind_it(model, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "MOST_TOKENS", 16)
    with both(model) as pair:
        pair.step(prompt(18))
        pair.decode(1, 3)
        n_played = pair.device.n_played
        pair.step([*prompt(19, seq=1), (0, 9)], rows=[18, 19])
        assert pair.device.n_played == n_played >= 1
        pair.decode(1, 2)
        assert pair.device.n_played == n_played + 2 and pair.device.n_captured == 1


def test_pools_that_have_grown_are_recorded_anew_and_at_once(model) -> None:
    with both(model, min_chunk=16) as pair:
        pair.step(prompt(12))
        pair.decode(1, 4)
        assert pair.device.n_captured == 1 and pair.device.n_forgotten == 0
        pair.decode(1, 2)
        assert pair.device.n_captured == 2 and pair.device.n_forgotten == 1
        assert pair.graphs.n_graphs == 1


def test_a_graph_is_not_played_over_addresses_that_are_another_s(model) -> None:
    with both(model, capacity=1024) as pair:
        pair.step(prompt(12))
        pair.decode(1, 3)
        pool = pair.ours.cache.pools.of_layer[1]
        was = pool.placed()
        pool.ensure(pool.n_cells + 1, torch.device("cpu"))
        was.v[0].zero_()
        pair.decode(1, 2)
        assert pair.device.n_captured == 2


@pytest.mark.parametrize("kind", ["contiguous", "tree"])
def test_histories_are_cut_and_go_on(model, kind) -> None:
    with both(model, kind) as pair:
        pair.step(prompt(18))
        pair.decode(1, 3)
        for player in (pair.ours, pair.plain):
            player.cut(17)
        pair.decode(1, 2)
        assert pair.device.n_played >= 3


def test_drafts_are_verified_by_a_graph(model) -> None:
    with both(model, "tree") as pair:
        pair.step(prompt(18))
        for i in range(3):
            found = []
            for player in (pair.ours, pair.plain):
                choice.ON_CPU = player is pair.ours
                positions = player.cache.propose([-1, 0, 0, 1])
                found.append(player.runner.forward([5, 6, 7, 8 + i], positions, range(4)))
                player.cache.commit([0, 2])
            np.testing.assert_allclose(*found, atol=2e-5)
        assert pair.device.n_played >= 1


def test_layers_with_windows_caps_and_quantised_cells_are_recorded_too(tmp_path) -> None:
    with on_cpu():
        model = load_model(make_checkpoint("gemma2", tmp_path / "gemma2"))
    with both(model, kv_dtype="int8") as pair:
        pair.apart = 0.02  # a number between two codes may be rounded to either
        pair.step(prompt(10))
        pair.decode(1, 3)
        assert pair.device.n_played >= 1


def test_a_forward_that_cannot_be_recorded_is_said_once_and_runs_by_itself(model, caplog) -> None:
    with both(model) as pair, caplog.at_level(logging.WARNING, "kvcellar.torch"):
        pair.device.error = RuntimeError("operation not permitted when stream is capturing")
        pair.step(prompt(5))
        pair.decode(1, 4)
        assert pair.graphs.is_off and pair.device.n_warm == 1
        assert [record.name for record in caplog.records] == ["kvcellar.torch"]
        assert "not permitted when stream is capturing" in caplog.text


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_decode_steps_of_recurrent_layers_are_recorded_too(tmp_path, family, monkeypatch) -> None:
    # The CPU kernel's are not a GPU's.
    monkeypatch.setattr(place_weights, "hold_mixers", lambda *_: {})
    write_hybrid(family, tmp_path)
    with on_cpu():
        model = load_model(tmp_path)
    with both(model) as pair:
        pair.step(prompt(3))
        pair.fork(3)
        for n in (3, 1):
            pair.decode(n, 3)
        assert pair.graphs.n_graphs == 2 and pair.device.n_played >= 3
        pair.step([*prompt(2), (1, 8)])  # two tokens of one sequence are not a decode step
        n_played = pair.device.n_played
        pair.decode(3)
        assert pair.device.n_played == n_played + 1


def test_steps_whose_features_are_wanted_have_graphs_of_their_own(model) -> None:
    with both(model) as pair:
        for player in (pair.ours, pair.plain):
            player.runner = model.bind(player.session, feature_layers=(0, 2))
        runner = pair.ours.runner
        runner.graphs = StepGraphs(model.network, pair.device, runner._feature_modules)
        pair.step(prompt(18))
        for i in range(6):
            found = []
            for player in (pair.ours, pair.plain):
                choice.ON_CPU = player is pair.ours
                run = player.runner.forward_with_features if i % 2 else player.runner.forward
                result = run([7 + i], player.cache.begin_step([(0, 1)]))
                found.append(result if i % 2 else (result,))
            for ours, wanted in zip(*found, strict=True):
                np.testing.assert_allclose(ours, wanted, atol=2e-5)
        assert pair.device.n_captured == 2 and found[0][1].shape == (1, runner.n_features)


def test_a_step_that_was_made_ready_is_played_with_the_tokens_that_came(model, monkeypatch) -> None:
    with both(model) as pair:
        pair.step(prompt(18))
        pair.fork(2)
        pair.decode(2, 2)
        packed: list[int] = []
        pack = StepGraphs._pack
        monkeypatch.setattr(StepGraphs, "_pack", lambda *a: (packed.append(1), pack(*a))[1])
        cache, n_captured = pair.ours.cache, pair.device.n_captured
        for tokens in ((5, 6), (7, 8)):
            at = cache.begin_step([(0, 1), (1, 1)])
            pair.graphs.prepare(cache, np.array(at), np.arange(2), 0)
            cache.cancel_step()  # it did not come
            at = cache.begin_step([(0, 1), (1, 1)])
            pair.graphs.prepare(cache, np.array(at), np.arange(2), 0)
            found = pair.ours.runner.forward(tokens, at, range(2))
            with on_cpu():
                wanted = pair.plain.batch(list(enumerate(tokens)), rows="all")
            np.testing.assert_allclose(found, wanted, atol=2e-5)
        assert len(packed) == 4 and pair.device.n_captured == n_captured


def test_graphs_last_used_are_kept(model, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    with both(model) as pair:
        pair.step(prompt(20))
        pair.fork(4)
        for n in (1, 2):
            pair.decode(n, 2)
        pair.decode(1)
        pair.decode(4, 2)  # the graph of two sequences goes
        assert pair.graphs.n_graphs == 2
        n_captured = pair.device.n_captured
        pair.decode(1)
        assert pair.device.n_captured == n_captured == 3


def test_memory_of_graphs_is_reported_and_held_of_the_budget(model) -> None:
    with both(model, budget=MemoryBudget(10_000_000)) as pair:
        pair.step(prompt(5))
        pair.decode(1)
        budget, cache = pair.ours.cache.config.budget, pair.ours.cache
        held, reported = budget.held_bytes, cache.usage().size_bytes
        pair.decode(1)
        n_bytes = 1000 + 10 + 4 * graphs.LEAST_BUFFER
        assert budget.held_bytes == held + n_bytes
        assert cache.usage().size_bytes == reported + n_bytes
        pair.graphs.clear()
        assert budget.held_bytes == held and cache.usage().size_bytes == reported


def test_a_budget_without_room_for_graphs_goes_on_without(model, caplog) -> None:
    with both(model, budget=MemoryBudget(280_000)) as pair:
        pair.step(prompt(5))
        pair.decode(1, 3)
        assert pair.graphs.is_off and "the memory budget has no room" in caplog.text


def test_no_more_is_recorded_than_there_is_memory_for(model, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "MOST_BYTES", 1)
    with both(model) as pair:
        pair.step(prompt(3))
        pair.fork(2)
        for n in (1, 2):
            pair.decode(n, 2)
        assert pair.graphs.n_graphs == 1 and not pair.graphs.is_off
