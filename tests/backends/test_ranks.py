"""Two processes that compute one model: its tokens, its rows, and what becomes of one that ends."""

from __future__ import annotations

import gc
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvcellar.agents import ModelHost, open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw, write_tiny
from kvcellar.backends.torch.ranks import checking, processes
from kvcellar.cache_config import make_config
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.engine.requests.request import FinishEvent
from kvcellar.errors import BackendError, ConfigError, EngineFailedError, ModelError, RankLostError
from kvcellar.installed import pip_command
from kvcellar.models import LoadedModel, LoadOptions, check_model, load_model
from kvcellar.models.check import InexactModelWarning
from kvcellar.models.options import CACHES
from kvcellar.registry import freeze_prefix
from tests.agents.fakes import Eager, manager, run, tokens_of, turn

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
FAMILIES = {
    "llama": {},
    "gemma3_text": {},  # windows, and a head that is the embedding
    "mixtral": {},  # experts
    "qwen3_next": {},  # recurrent layers, and experts
    "deepseek_v2": {},  # latents, whose expanding layer is divided
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    root = tmp_path_factory.mktemp("ranks")
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = write_tiny(family, root / family, seed=3)
        return made[family]

    return folder


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    """One follower for all tests; it has gone when they have."""
    n_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:  # a process of its own has a test of its own
        patch.setattr(checking, "_ask", lambda raw: {"gap": 0.0})
        yield
    torch.set_num_threads(n_threads)
    if processes._current is not None:
        others = processes._current._others
        processes._current.close()
        assert all(other.poll() is not None for other in others)


def whole(folder: Path) -> LoadedModel:
    return load_model(folder, weights="none", is_unchecked=True)


def divided(folder: Path) -> LoadedModel:
    return load_model(folder, tp=2, is_unchecked=True)


@contextmanager
def engine_of(model: LoadedModel, kind: str = "cells", kv_dtype: str = "float32", **more: Any):
    config = make_config(model.params, 512, kv_dtype, **more)
    with CACHES[kind]("torch", config) as session:
        yield Engine(
            model.bind(session),
            session.cache,
            config=EngineConfig(max_num_batched_tokens=24, max_num_seqs=4),
        )


def answers(engine: Engine) -> list[tuple[int, ...]]:
    """What an engine says when prompts come in parts, together, and begin alike."""
    alike = list(range(20, 60))
    prompts = [alike, [*alike[:30], 7, 8, 9], [5], alike]
    ids = [engine.submit(Request(prompt, params=GREEDY)) for prompt in prompts]
    ends = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    ends |= {-1: engine.generate(Request([*alike, 3], params=GREEDY))}
    for end in ends.values():
        assert end.error is None
    return [ends[number].token_ids for number in (*ids, -1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_say_what_one_says(family, folders):
    with engine_of(whole(folders(family))) as engine:
        want = answers(engine)
    model = divided(folders(family))
    with engine_of(model) as engine:
        assert answers(engine) == want
        own_groups = engine.cache.pools.groups
    for group, own in zip(model.params.groups, own_groups, strict=True):
        assert own.n_kv_heads == (1 if group.is_latent else group.n_kv_heads // 2)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("paged", {"block_size": 4, "layout": "block_first"}),
        ("tree", {"kv_dtype": "k8v4"}),
        ("cells", {"kv_dtype": "int8:first4:last8"}),
    ],
)
def test_caches_of_every_kind_hold_a_rank_s_heads(kind, more, folders):
    with engine_of(whole(folders("gemma3_text")), kind, **more) as engine:
        want = answers(engine)
    with engine_of(divided(folders("gemma3_text")), kind, **more) as engine:
        assert answers(engine) == want


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v2"])
def test_rows_and_states_that_leave_are_whole_and_return_to_any_number_of_ranks(family, folders):
    tokens, pairs = list(range(40, 60)), [(whole, divided), (divided, whole)]
    for make, make_other in pairs:
        with engine_of(make(folders(family))) as one, engine_of(make_other(folders(family))) as two:
            for engine in (one, two):
                engine.runner.forward(tokens, engine.cache.begin_step([(0, len(tokens))]))
            rows, slots = copies(one.cache, 0)
            others, other_slots = copies(two.cache, 0)
            for got, want in zip(leaves(rows), leaves(others), strict=True):
                assert got.shape == want.shape and np.allclose(got, want, atol=1e-4)
            for got, want in zip(leaves(slots), leaves(other_slots), strict=True):
                assert np.allclose(got, want, atol=1e-4)
            two.runner.forward(tokens[::-1], two.cache.begin_step([(1, len(tokens))]))
            put(two.cache, 1, rows, slots)  # in place of those of other tokens
            want = one.runner.forward([7], one.cache.begin_step([(0, 1)]))
            got = two.runner.forward([7], two.cache.begin_step([(1, 1)]))
            assert np.allclose(got, want, atol=1e-4)


def copies(cache: Any, seq_id: int) -> tuple[Any, Any]:
    """What a cache holds of a sequence: rows of every layer group, and states."""
    tables, n_groups = cache.seq_table(seq_id), len(cache.config.params.groups)
    rows = cache.read_rows([table[table >= 0] for table in tables[:n_groups]])
    return rows, [cache.read_states(table[-1:]) for table in tables[n_groups:]]


def put(cache: Any, seq_id: int, rows: Any, states: Any) -> None:
    tables, n_groups = cache.seq_table(seq_id), len(cache.config.params.groups)
    cache.write_rows([table[table >= 0] for table in tables[:n_groups]], rows)
    for table, some in zip(tables[n_groups:], states, strict=True):
        cache.write_states(table[-1:], some)


def leaves(value: Any) -> list[np.ndarray]:
    return [value] if isinstance(value, np.ndarray) else [x for part in value for x in leaves(part)]


def test_blocks_that_are_copied_are_copied_on_all_ranks(folders):
    found = []
    for make in (whole, divided):
        with engine_of(make(folders("llama")), "paged", block_size=8) as engine:
            run_of, cache = engine.runner.forward, engine.cache
            run_of([1, 2, 3, 4, 5], cache.begin_step([(0, 5)]))
            cache.end_step()
            cache.seq_cp(0, 1)
            found.append([run_of([6 + seq], cache.begin_step([(seq, 1)])) for seq in (1, 0, 1)])
    assert np.allclose(*found, atol=1e-4)


def test_an_agent_that_two_ranks_have_stored_goes_on_with_one_and_the_other_way_round(
    folders, tmp_path
):
    folder, said = str(folders("qwen3_next")), [list(b"The first thing. " * 4), list(b"Then?")]

    def loader(tp: int) -> Any:
        def load(name: str) -> ModelHost:
            host = open_host(folder, capacity=512, tp=tp, weights="none", is_unchecked=True)
            host.costs = Eager()
            return host

        return load

    found = []
    for first, second in ((1, 1), (2, 1), (1, 2)):
        store = tmp_path / f"{first}-{second}"
        with manager(store, loader(first)) as agents:
            run(agents.lifecycle.create("a", model=folder))
            run(turn(agents, "a", tokens=said[0], params=GREEDY))
            n_tokens = len(tokens_of(agents, "a"))
        with manager(store, loader(second), verify="canary") as agents:
            end = run(turn(agents, "a", tokens=said[1], params=GREEDY))
            assert end.usage.restored_tokens == n_tokens - 1
            assert agents.store.take_events() == []
            found.append(tokens_of(agents, "a"))
    assert found[0] == found[1] == found[2]


def test_hidden_states_and_features_are_those_of_one_rank(folders):
    found = []
    for make in (whole, divided):
        with CACHES["cells"]("torch", make_config(make(folders("llama")).params, 64)) as session:
            runner = make(folders("llama")).bind(session, feature_layers=(1, 2))
            at = session.cache.begin_step([(0, 3)])
            features = runner.forward_with_features([1, 2, 3], at)[1]
            at = session.cache.begin_step([(1, 2)])
            found.append((features, runner.forward_hidden([4, 5], at)))
    for got, want in zip(*found, strict=True):
        assert np.allclose(got, want, atol=1e-4)


def test_a_step_that_is_refused_leaves_the_ranks_as_they_were(folders):
    with engine_of(divided(folders("llama"))) as engine:
        engine.cache.begin_step([(0, 2)])
        with pytest.raises(Exception, match="brings 1 tokens"):
            engine.runner.forward([1], [0])
        assert engine.generate(Request([1, 2], params=GREEDY)).error is None


def test_what_the_leader_lets_go_of_the_others_let_go_of_too(folders):
    with engine_of(divided(folders("llama"))) as engine:
        assert engine.generate(Request([1, 2], params=GREEDY)).error is None
    del engine
    gc.collect()
    ranks = processes._current
    assert ranks is not None
    assert {"model", "cache"} <= {forgotten.kind for forgotten in ranks._forgotten}
    with engine_of(divided(folders("llama"))) as engine:  # they are told with the next command
        assert not ranks._forgotten
        assert engine.generate(Request([1, 2], params=GREEDY)).error is None


def test_a_rank_that_dies_while_nothing_is_asked_is_known_before_the_next_request(
    folders, monkeypatch
):
    with engine_of(divided(folders("llama"))) as engine:
        assert engine.failure is None
        with monkeypatch.context() as patch:
            patch.setattr(processes.Ranks, "_ended", lambda self: [(1, -9)])
            with pytest.raises(EngineFailedError, match=r"rank 1 \(exit code -9\)"):
                engine.submit(Request([1, 2], params=GREEDY))
        assert engine.generate(Request([1, 2], params=GREEDY)).error is None


def test_ranks_of_a_cpu_listen_on_the_loopback_device_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # so that it is as it was afterwards
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(processes.torch, "set_num_threads", lambda n: None)
    met = []
    monkeypatch.setattr(
        processes.dist, "init_process_group", lambda kind, **how: met.append((kind, how))
    )
    processes.join_group(processes.Join(tmp_path / "meet", 2, 1), 0, "cpu")
    ((kind, how),) = met
    assert kind == "gloo" and how["init_method"] == (tmp_path / "meet").as_uri()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_what_cannot_be_divided_is_refused_by_name(folders, monkeypatch):
    refused = {
        "--weights other than none needs the whole model": {"weights": "int8"},
        "an adapter .* needs the whole model": {"adapters": {"a": "x"}},
        "a head of EAGLE-3": {"speculate": "eagle3:x"},
        "--memory bounds one process": {"memory_bytes": 1 << 30},
        "1 or more": {"tp": 0},
    }
    for said, settings in refused.items():
        with pytest.raises(ConfigError, match=said):
            LoadOptions(folders("llama"), **{"tp": 2, **settings})
    with pytest.raises(ConfigError, match="choose torch, or leave tp out"):
        check_model(LoadOptions(folders("llama"), backend="executorch", tp=2))
    with pytest.raises(ConfigError, match="has 4, and 4 of K and V; ask for a --tp that divides"):
        check_model(LoadOptions(folders("llama"), tp=3))
    with pytest.raises(ConfigError, match="no plan to divide a model of type 'lfm2'"):
        check_model(LoadOptions(folders("lfm2"), tp=2))
    with pytest.raises(BackendError, match="divided among 2 ranks on cpu, and 4 on cpu"):
        load_model(folders("llama"), tp=4, is_unchecked=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=re.escape(pip_command("tp"))):
        check_model(LoadOptions(folders("llama"), tp=2))


def test_a_twin_tells_a_plan_that_is_right_from_one_that_is_not(folders):
    assert checking.division_gap(default_raw("llama")) < 1e-4
    # Of a layer's activations Gemma 3n keeps the largest, and a rank sees half of them.
    assert checking.division_gap(default_raw("gemma3n_text")) > 0.1


def test_a_model_that_ranks_compute_otherwise_is_refused_and_what_was_found_is_kept(monkeypatch):
    asked: list[Any] = []
    raw = {"model_type": "llama", "of": "this test"}
    found: dict[str, Any] = {"reason": "no twin"}
    monkeypatch.setattr(checking, "_ask", lambda raw: asked.append(raw) or found)
    with pytest.raises(ModelError, match="could not be compared with one: no twin"):
        checking.prove_division(raw, "it", is_unchecked=False)
    found = {"gap": 0.5}  # without a figure it is asked again
    for _ in range(2):
        with pytest.raises(ModelError, match=r"it cannot be divided .* differ by 5.0e-01"):
            checking.prove_division(raw, "it", is_unchecked=False)
    with pytest.warns(InexactModelWarning, match="differ by 5.0e-01"):
        checking.prove_division(raw, "it", is_unchecked=True)
    assert len(asked) == 2


def test_weights_that_cannot_be_read_are_named_as_they_are_for_one_rank(folders, monkeypatch):
    def cannot(*args: Any) -> Any:
        raise ModelError("the folder lacks 3 tensors")

    ranks = processes.ranks_of(2, "cpu")
    monkeypatch.setattr(processes.Ranks, "close", lambda self: None)
    monkeypatch.setattr(processes, "_send", lambda process, command: None)
    monkeypatch.setattr("kvcellar.backends.torch.ranks.leading.read_part", cannot)
    try:
        with pytest.raises(ModelError, match="lacks 3 tensors"):
            divided(folders("llama"))
    finally:
        ranks._lost = None


def test_a_rank_that_is_killed_while_weights_are_read_is_no_fault_of_the_model(
    folders, monkeypatch
):
    def cannot(*args: Any) -> Any:
        raise ModelError("leave --tp out") from RuntimeError("Connection closed by peer")

    ranks = processes.ranks_of(2, "cpu")
    monkeypatch.setattr(processes.Ranks, "close", lambda self: None)
    monkeypatch.setattr(processes.Ranks, "_ended", lambda self: [(1, -9)])
    monkeypatch.setattr(processes, "_send", lambda process, command: None)
    monkeypatch.setattr("kvcellar.backends.torch.ranks.leading.read_part", cannot)
    try:
        with pytest.raises(RankLostError, match=r"rank 1 \(exit code -9\)"):
            divided(folders("llama"))
    finally:
        ranks._lost, ranks.was_killed = None, False


def test_a_prefix_is_not_frozen_of_some_heads(folders):
    with engine_of(divided(folders("llama"))) as engine:
        engine.runner.forward([1, 2], engine.cache.begin_step([(0, 2)]))
        with pytest.raises(ConfigError, match="cannot be frozen"):
            freeze_prefix(engine.cache)


def test_a_rank_that_dies_in_a_forward_ends_everything_and_says_which(folders, monkeypatch):
    with engine_of(divided(folders("llama"))) as engine:
        assert engine.generate(Request([1, 2], params=GREEDY)).error is None
        ranks = processes._current
        assert ranks is not None
        send = processes._send

        def told_and_killed(process: subprocess.Popen[bytes], command: Any) -> None:
            process.kill()  # it may have begun with the command before, or not
            process.wait()

        monkeypatch.setattr(processes, "_send", told_and_killed)
        end = engine.generate(Request([1, 2], params=GREEDY))
        monkeypatch.setattr(processes, "_send", send)
        assert isinstance(end.error, RankLostError)
        assert "rank 1 (exit code -9)" in str(end.error)
        assert isinstance(engine.failure, EngineFailedError)
        with pytest.raises(EngineFailedError, match="rank 1"):
            engine.submit(Request([1, 2], params=GREEDY))
        with pytest.raises(RankLostError), ranks.together(lambda rank: pytest.fail("told")):
            pass
        assert ranks.is_closed
