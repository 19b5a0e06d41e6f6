"""A decoder's layers on the kernel, against transformers' own in the same types."""

from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvcellar.backends.torch.cpu.modules import rotations
from kvcellar.backends.torch.cpu.modules.layers import KernelNorm, join
from kvcellar.kernel import attend, levels
from kvcellar.kernel import layers as native

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
LEVELS = [found.name for found in levels.levels()] if levels.is_available() else []
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=LEVELS, scope="module")
def level(request):
    """Each instruction set in turn."""
    before = levels.level()
    levels.set_level(levels.Level[request.param])
    yield request.param
    levels.set_level(before)


def randn(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for last bits where a sum was taken in another order."""
    assert got.dtype == want.dtype and got.shape == want.shape
    relative = 1 / 64 if want.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(got, want, rtol=relative, atol=1e-6 if relative < 1e-3 else 1e-4)
    if want.dtype == torch.bfloat16:
        assert (got != want).sum() <= 1 + got.numel() // 50


SIZES = {
    "n_tokens": st.sampled_from([1, 2, 5, 300]),
    "dim": st.sampled_from([2, 6, 30, 64, 80, 130]),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 99),
}


@settings(max_examples=30, deadline=None)
@given(n_rows=st.sampled_from([0, 1, 3, 40]), is_apart=st.booleans(), **SIZES)
def test_norms_are_transformers_norms(level, n_tokens, n_rows, dim, dtype, is_apart, seed):
    norm = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(dim, eps=1e-5).to(dtype)
    norm.weight.data = randn(dim, seed=seed, dtype=dtype)
    rows = max(n_rows, 1)
    x = randn(1, n_tokens, rows + 2 * is_apart, dim, seed=seed + 1, dtype=dtype)[:, :, :rows]
    x = x if n_rows else x[:, :, 0]
    alike(KernelNorm(norm.weight, 1e-5)(x), norm(x))


@pytest.mark.parametrize("shape", [(2, 1, 24), (3, 2, 24), (3, 2, 4, 24)])
def test_norms_of_several_sequences_side_by_side_leave_none_out(level, shape):
    norm = transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm(24, eps=1e-5)
    x = randn(*shape[:-1], 56, seed=1, dtype=torch.float32)[..., :24]  # as split from others
    alike(KernelNorm(norm.weight, 1e-5)(x), norm(x))


@settings(max_examples=30, deadline=None)
@given(n_heads=st.sampled_from([1, 3, 40]), is_apart=st.booleans(), **SIZES)
def test_rotations_are_transformers_rotations(level, n_tokens, n_heads, dim, dtype, is_apart, seed):
    rotated = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    there = randn(1, n_tokens, n_heads + is_apart, dim, seed=seed, dtype=dtype)
    x, kept = there[:, :, :n_heads], there.clone()
    cos, sin = (randn(1, n_tokens, dim, seed=seed + i, dtype=dtype) for i in (1, 2))
    want, _ = rotated(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    rotations.rotate(x, cos, sin)
    assert torch.equal(x, want.transpose(1, 2))
    assert torch.equal(there[:, :, n_heads:], kept[:, :, n_heads:])


@settings(max_examples=30, deadline=None)
@given(**SIZES)
def test_gates_are_transformers_gates(level, n_tokens, dim, dtype, seed):
    both = randn(n_tokens, 2, dim, seed=seed, dtype=dtype)
    both[0, 0, 0], both[-1, 0, -1] = 1e30, -200.0
    out = torch.empty(n_tokens, dim, dtype=dtype)
    number = attend.Dtype[str(dtype).removeprefix("torch.")]
    native.gate(both.data_ptr(), n_tokens, dim, number, out.data_ptr())
    alike(out, nn.functional.silu(both[:, 0]) * both[:, 1])


def test_what_is_no_number_stays_with_its_token(level):
    both = torch.ones(3, 2, 40)
    both[1, 0, 7] = float("nan")
    out = torch.empty(3, 40)
    native.gate(both.data_ptr(), 3, 40, attend.Dtype.float32, out.data_ptr())
    assert out.isnan().nonzero().tolist() == [[1, 7]]
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(40)
    assert KernelNorm(norm.weight, 1e-6)(both[None, :, 0]).isnan().any(-1).tolist() == [
        [False, True, False]
    ]


def test_layers_that_are_joined_say_what_each_said():
    one, two = nn.Linear(32, 20), nn.Linear(32, 7, bias=False)
    x = torch.randn(3, 32)
    torch.testing.assert_close(join([one, two])(x), torch.cat([one(x), two(x)], -1))
