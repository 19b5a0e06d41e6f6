"""Levels of an EAGLE-3 head in one call of the kernel, against torch on what it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import kvcellar as kv
from kvcellar.backends.torch.cpu.modules.linears import pack
from kvcellar.backends.torch.eagle3.head import Eagle3Head
from kvcellar.backends.torch.eagle3.kernel import MOST_TOKENS
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.backends.torch.eagle3.network import Eagle3Network
from kvcellar.errors import StepError
from kvcellar.kernel import levels
from kvcellar.models import load_model
from kvcellar.models.eagle3.config import read_eagle3_config
from kvcellar.models.weights import SHARED
from tests.models.eagle3_heads import head_config, head_tensors
from tests.models.players import text

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
LEVELS = [found.name for found in levels.levels()] if levels.is_available() else []
N_FEATURES = 192


@pytest.fixture(params=LEVELS)
def level(request):
    """Each instruction set in turn."""
    before = levels.level()
    levels.set_level(levels.Level[request.param])
    yield request.param
    levels.set_level(before)


def head_with(tmp_path, dtype: torch.dtype = torch.float32, **changes: Any) -> Eagle3Head:
    """A random head whose matrices' inputs come in whole groups, but for what ``changes`` says."""
    config = head_config(**{"intermediate_size": 96, **changes})
    tensors = head_tensors(config)
    tensors["embed_tokens.weight"] = torch.randn(
        config["vocab_size"], config["hidden_size"], generator=torch.Generator().manual_seed(2)
    )
    network = Eagle3Network(read_eagle3_config(config, tmp_path))
    network.load_state_dict(tensors)
    return Eagle3Head(network.to(dtype), (0, 1, 2))


def rounded(matrix: torch.Tensor) -> torch.Tensor:
    """``[in, out]`` as 8 bits hold it."""
    n_in, n_out = matrix.shape
    data, scales = pack(matrix.t(), 8)
    fours = data.reshape(-1, n_in // 32, 8, 16, 4).float() - 128
    steps = scales.float().repeat_interleave(SHARED[8] // 32, 1)[:, : n_in // 32]
    rows = (fours * steps[:, :, None, :, None]).permute(0, 3, 1, 2, 4)
    return rows.reshape(-1, n_in)[:n_out].t().contiguous()


@contextmanager
def products_as_the_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's products take their inputs as the kernel does: in 8 bits, by groups of 32."""
    product = torch.mm

    def mm(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(1, (-1, 32))
        step = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return product(((groups / step).round() * step).flatten(1), matrix)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", mm)
        patch.setattr(torch, "addmm", lambda bias, x, matrix: bias + mm(x, matrix))
        yield


def play(head: Eagle3Head, kv_dtype: str) -> list[Any]:
    """Two sequences of pairs, and two levels behind them; everything that was said on the way."""
    drawn = torch.Generator().manual_seed(1)
    known = {0: list(text(9, 1)), 3: list(text(5, 2))}
    features = {s: torch.randn(len(t), N_FEATURES, generator=drawn) for s, t in known.items()}
    config = kv.make_config(head.params, 64, kv_dtype)
    with kv.make_tree_session("torch", config) as session:
        runner, cache = head.bind(session), session.cache
        joined = {s: runner.join([rows.numpy()]) for s, rows in features.items()}
        at = cache.begin_step([(0, 6), (3, 1)])
        none = runner.read(known[0][:6] + known[3][:1], [joined[0][:6], joined[3][:1]], at, [], 1)
        assert none.tokens.shape == (0, 1)
        at = cache.begin_step([(3, 4), (0, 3)])
        fresh = [joined[3][1:], joined[0][6:]]
        first = runner.read(known[3][1:] + known[0][6:], fresh, at, [3, 6], 3)
        cache.propose([-1, -1], 3)
        cache.propose([-1], 0)
        at = cache.begin_step([(3, 2), (0, 1)])
        second = runner.go_on([11, 200, 42], first, [0, 0, 1], at, 4)
        cache.propose([1, 0], 3)
        third = runner.go_on([7, 7], second, [1, 0], cache.begin_step([(3, 2)]), 100)
        return [*joined.values(), first, second, third]


@pytest.mark.parametrize(
    ("changes", "kv_dtype"),
    [
        ({}, "float32"),
        ({"head_dim": 24, "num_attention_heads": 8, "attention_bias": True}, "float32"),
        ({"norm_before_residual": True, "num_key_value_heads": 4}, "bfloat16"),
        ({"draft_vocab_size": 272, "hidden_size": 128}, "int8:g32:first4"),
    ],
    ids=["published", "bias", "normed residual", "whole vocabulary, exact ends"],
)
def test_a_level_is_what_torch_says(changes, kv_dtype, level, tmp_path, monkeypatch):
    """But for a number here and there that is rounded the other way."""
    if changes.get("hidden_size") == 128:
        changes = {**changes, "target_hidden_size": 64}
    head = head_with(tmp_path, **changes)
    assert head.kernel is not None
    got = play(head, kv_dtype)
    for name in ("fc", "qkv", "o", "gate_up", "down", "lm_head"):
        setattr(head, name, rounded(getattr(head, name)))
    head.kernel = None
    with products_as_the_kernels(monkeypatch):
        want = play(head, kv_dtype)
    for mine, its in zip(got[:2], want[:2], strict=True):
        assert (mine - its).abs().max() < 0.005 * its.abs().max()
    for mine, its in zip(got[2:], want[2:], strict=True):
        assert (mine.hidden - its.hidden).abs().max() < 0.01 * its.hidden.abs().max()
        np.testing.assert_allclose(mine.beliefs, its.beliefs, atol=0.01)
        # The same tokens, where they are all that the head can say or far enough apart.
        for row in range(len(mine.tokens)):
            believed = dict(zip(mine.tokens[row].tolist(), mine.beliefs[row], strict=True))
            for token, belief in zip(its.tokens[row].tolist(), its.beliefs[row], strict=True):
                assert abs(believed.get(token, mine.beliefs[row][-1]) - belief) < 0.01
    whole = got[4].beliefs
    assert (np.diff(whole, axis=1) <= 0).all()
    if head.config.draft_vocab_size == whole.shape[1]:
        np.testing.assert_allclose(whole.sum(axis=1), 1, atol=1e-5)
        assert [sorted(row) for row in got[4].tokens] == [sorted(head.target_ids.tolist())] * 2


def test_many_tokens_are_torchs_and_fit_what_the_kernel_says_of_few(tmp_path):
    head = head_with(tmp_path)
    tokens = list(text(MOST_TOKENS + 9, 1))
    features = torch.randn(len(tokens), N_FEATURES).numpy()
    said = []
    for n in (MOST_TOKENS + 1, MOST_TOKENS):
        with kv.make_tree_session("torch", kv.make_config(head.params, 64)) as session:
            runner, cache = head.bind(session), session.cache
            for start, stop in ((0, n), (n, len(tokens))):
                at = cache.begin_step([(0, stop - start)])
                joined = [runner.join([features[start:stop]])]
                rows = [stop - start - 1]
                last = runner.read(tokens[start:stop], joined, at, rows, 3)
            said.append(last.hidden)
    assert 0 < (said[0] - said[1]).abs().max() < 0.1 * said[0].abs().max()


def test_a_level_that_fails_leaves_no_cell_claimed(tmp_path):
    head = head_with(tmp_path)
    with kv.make_tree_session("torch", kv.make_config(head.params, 64)) as session:
        runner, cache = head.bind(session), session.cache
        joined = runner.join([np.zeros((2, N_FEATURES), np.float32)])
        for tokens, rows, k, error in (
            ([1, 2], [1], 1, StepError),
            ([272], [0], 1, ValueError),
            ([-1], [0], 1, ValueError),
            ([1], [1], 1, ValueError),
            ([1], [0], 101, ValueError),
        ):
            cache.begin_step([(0, 1)])
            with pytest.raises(error):
                runner.read(tokens, [joined[: len(tokens)]], list(range(len(tokens))), rows, k)
            assert not cache.has_seq(0)
            assert cache.usage().groups[0].live == 0
        at = cache.begin_step([(0, 1)])
        assert runner.read([1], [joined[:1]], at, [0], 100).tokens.shape == (1, 100)


@pytest.mark.parametrize("changes", [{"intermediate_size": 80}, {"dtype": torch.bfloat16}])
def test_other_heads_are_torchs_alone(changes, tmp_path):
    assert head_with(tmp_path, **changes).kernel is None


def test_the_bundled_head_is_the_kernels():
    head = load_eagle3(None, load_model("demo"))
    n_numbers = sum(matrix.numel() for matrix in head.matrices)
    assert n_numbers < head.kernel.size_bytes < 1.1 * n_numbers
