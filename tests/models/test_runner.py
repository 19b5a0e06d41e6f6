"""The runner: what it checks, what a failure leaves behind, and what may share a model."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.errors import (
    BackendError,
    CacheFullError,
    ConfigError,
    PositionError,
    PromptError,
    SessionClosedError,
    StepError,
)
from kvcellar.models import Runner
from kvcellar.registry import CacheRegistry
from tests.models.players import MAKE_SESSION, Player, assert_close, text
from tests.models.tiny_checkpoints import VOCAB_SIZE

every_cache = pytest.mark.parametrize("kind", MAKE_SESSION)


@pytest.fixture
def llama(loaded):
    return loaded("llama")


def state(player: Player) -> object:
    """All that a failed forward must leave as it was."""
    if player.kind == "contiguous":
        return player.cache.length
    player.cache.check()
    return {s: player.cache.seq_len(s) for s in player.cache.seq_ids()}, player.cache.usage().groups


def test_a_runner_is_what_the_engine_expects(llama):
    with Player(llama, "seq") as player:
        assert isinstance(player.runner, Runner)
        assert player.runner.params == llama.params
        assert player.runner.vocab_size == llama.vocab_size == VOCAB_SIZE


def test_rows_choose_the_tokens_whose_logits_come_back_in_their_order(llama, oracle):
    prompt = text(9)
    want = oracle("llama").logits(prompt)
    for rows, which in (
        (None, [8]),
        ([8], [8]),
        ([3], [3]),
        ([7, 0, 7], [7, 0, 7]),
        (np.array([2, 5]), [2, 5]),
        ([], []),
    ):
        with Player(llama, "contiguous") as player:
            assert_close(player.feed(prompt, rows=rows), want[which])


def test_the_lm_head_runs_on_the_wanted_rows_alone(llama):
    shapes = []
    head = llama.network.get_output_embeddings()
    hook = head.register_forward_hook(lambda module, args, out: shapes.append(args[0].shape[1]))
    try:
        with Player(llama, "contiguous") as player:
            player.feed(text(30))
            player.feed(text(30), rows=[1, 4, 9])
            player.feed(text(1))
    finally:
        hook.remove()
    assert shapes == [1, 3, 1]


def test_logits_are_the_callers_to_keep_and_change(llama):
    with Player(llama, "contiguous") as player:
        first = player.feed([1, 2, 3])
        copy = first.copy()
        player.feed([4])
        assert np.array_equal(first, copy)
        first[:] = 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays_are_as_good_as_lists(llama, dtype):
    ids, positions = np.array([1, 2, 3], dtype=dtype), np.arange(3)
    ids.flags.writeable = False  # torch warns of these where it shares their memory
    with Player(llama, "contiguous") as player:
        got = player.runner.forward(ids, positions)
    with Player(llama, "contiguous") as player:
        assert_close(got, player.runner.forward([1, 2, 3], (0, 1, 2)))


@every_cache
@pytest.mark.parametrize("bad", [-1, VOCAB_SIZE, 10**12])
def test_an_unknown_token_is_refused_before_anything_changes(llama, kind, bad):
    with Player(llama, kind) as player:
        player.feed([1, 2, 3])
        before = state(player)
        for tokens in ([bad], [5, bad, 6]):
            with pytest.raises(PromptError, match=rf"token id {bad} .* 0 to {VOCAB_SIZE - 1}"):
                player.feed(tokens)
            assert state(player) == before
        assert not player.cache.is_step_open


@every_cache
@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([], "at least one token"),
        ("text", "at least one token"),
        ([[1, 2]], "at least one token"),
        ([1.5], "whole numbers"),
        ([10**30], "not in the model's vocabulary"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(llama, kind, tokens, match):
    with Player(llama, kind) as player, pytest.raises(PromptError, match=match):
        player.runner.forward(tokens, range(len(tokens)))


@every_cache
@pytest.mark.parametrize(
    ("positions", "rows", "error"),
    [
        ([3], None, StepError),
        ([3, 4, 5], None, StepError),
        ([3, 4], [2], StepError),
        ([3, 4], [-1], StepError),
        ([4, 5], None, PositionError),
    ],
    ids=["fewer positions", "more positions", "row past the end", "row below 0", "other positions"],
)
def test_a_batch_that_does_not_fit_leaves_nothing_behind(llama, kind, positions, rows, error):
    with Player(llama, kind) as player:
        player.feed([1, 2, 3])
        before = state(player)
        if kind != "contiguous":
            player.cache.begin_step([(0, 2)])
        with pytest.raises(error):
            player.runner.forward([7, 8], positions, rows)
        assert state(player) == before


@pytest.mark.parametrize("kind", ["seq", "tree"])
def test_a_forward_without_its_step_is_refused(llama, kind):
    with Player(llama, kind) as player:
        player.feed([1, 2], seq_id=3)
        before = state(player)
        with pytest.raises(StepError, match="begin_step"):
            player.runner.forward([7], [2])
        player.cache.begin_step([(3, 1)])
        with pytest.raises(StepError, match="begun for 1"):
            player.runner.forward([7, 8], [2, 3])
        assert state(player) == before


@every_cache
@pytest.mark.parametrize("at", ["before the first layer", "between two layers", "after the last"])
def test_a_forward_that_raises_leaves_no_cell_claimed_and_can_be_repeated(
    llama, oracle, kind, at, monkeypatch
):
    inner = llama.network.model
    module = {
        "before the first layer": inner.embed_tokens,
        "between two layers": inner.layers[1].mlp,
        "after the last": llama.network.lm_head,
    }[at]
    prompt = text(7)
    with Player(llama, kind) as player:
        player.feed(prompt[:4])
        before = state(player)

        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(module, "forward", fail)
            with pytest.raises(KeyboardInterrupt):
                player.feed(prompt[4:])
        assert state(player) == before
        assert_close(player.feed(prompt[4:], rows="all"), oracle("llama").logits(prompt)[4:])


@every_cache
def test_a_full_cache_is_an_error_that_leaves_room_for_what_fits(llama, kind):
    with Player(llama, kind, capacity=8) as player:
        player.feed(text(6))
        before = state(player)
        with pytest.raises(CacheFullError, match="needs 3 cells, 2 free of 8"):
            player.feed([1, 2, 3])
        assert state(player) == before
        player.feed([1, 2])


def test_a_closed_session_runs_and_binds_nothing(llama):
    player = Player(llama, "seq")
    with pytest.raises(SessionClosedError):
        llama.bind(player.session)
    with player:
        player.feed([1, 2])
    with pytest.raises(SessionClosedError, match=player.session.cache_key):
        player.runner.forward([3], [2])


def test_erasing_the_registry_entry_in_mid_use_is_safe(llama):
    with Player(llama, "contiguous") as player:
        player.feed([1, 2])
        CacheRegistry.instance().erase(player.session.cache_key)
        player.feed([3])
        assert player.cache.length == 3


def test_a_cache_of_another_model_is_refused_when_it_is_bound(llama, loaded):
    other = kv.make_config(loaded("mistral").params, 32)
    with (
        kv.make_seq_session("torch", other) as session,
        pytest.raises(ConfigError, match=r"made for 3 layers .*window 8.* has 3 layers"),
    ):
        llama.bind(session)


def test_a_session_of_another_backend_is_refused_when_it_is_bound(llama):
    with Player(llama, "seq") as player:
        other = kv.CacheSession(player.cache, backend="elsewhere")
        with other, pytest.raises(BackendError, match=r"'elsewhere'.*loaded for 'torch'"):
            llama.bind(other)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_two_sessions_of_two_kinds_take_turns_on_one_model(loaded, oracle, family):
    prompts = text(10, seed=1), text(17, seed=2)
    wants = [oracle(family).greedy(prompt, 8)[0] for prompt in prompts]
    model = loaded(family)
    with Player(model, "contiguous") as one, Player(model, "tree", kv_dtype="float32") as two:
        players = (one, two)
        rows = [player.feed(prompt)[-1] for player, prompt in zip(players, prompts, strict=True)]
        tokens: list[list[int]] = [[], []]
        for _ in range(8):
            for i, player in enumerate(players):
                tokens[i].append(int(rows[i].argmax()))
                rows[i] = player.feed(tokens[i][-1:])[0]
    assert tokens == wants


@pytest.mark.parametrize("family", ["qwen2_window", "gpt_oss"])
def test_two_threads_share_one_model(loaded, oracle, family):
    model = loaded(family)
    prompts = [text(12 + i, seed=i) for i in range(4)]
    wants = [oracle(family).greedy(prompt, 20)[0] for prompt in prompts]

    def run(i: int) -> list[int]:
        with Player(model, ["seq", "contiguous"][i % 2]) as player:
            return player.greedy(player.feed(prompts[i]), 20)[0]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, range(4))) == wants
    finally:
        sys.setswitchinterval(before)


def test_lower_kv_precision_stays_close_without_loading_the_model_again(llama, oracle):
    prompt = text(40)
    want = oracle("llama").logits(prompt)
    for kv_dtype, bound in (("bfloat16", 0.1), ("float16", 0.02)):
        with Player(llama, "contiguous", kv_dtype=kv_dtype) as player:
            error = np.abs(player.feed(prompt, rows="all") - want).max()
            assert 0 < error < bound


def test_the_graph_holds_no_gradients(llama):
    with Player(llama, "contiguous") as player:
        player.feed([1, 2, 3])
        assert not torch.is_inference_mode_enabled()
        assert all(not pool.k.parts[0].requires_grad for pool in player.cache.pools.of_layer)
