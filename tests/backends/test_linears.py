"""Linear layers that the kernel reads, against float64 on the weights that they really hold."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from kvcellar.backends.torch.cache.memory import Arena
from kvcellar.backends.torch.cpu.modules import linears
from kvcellar.backends.torch.cpu.modules.linears import Expanded, KernelLinear, codes_well, pack
from kvcellar.kernel import attend, levels
from kvcellar.kernel import linear as native
from kvcellar.models.weights import CODED_INPUTS, GROUP, SHARED, coded_bytes, packed_bytes

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
LEVELS = [found.name for found in levels.levels()] if levels.is_available() else []


@pytest.fixture(params=LEVELS, scope="module")
def level(request):
    """Each instruction set in turn."""
    before = levels.level()
    levels.set_level(levels.Level[request.param])
    yield request.param
    levels.set_level(before)


@contextlib.contextmanager
def at_level(name):
    """An instruction set for a while."""
    before = levels.level()
    levels.set_level(levels.Level[name])
    try:
        yield
    finally:
        levels.set_level(before)


def matrix_unit():
    """The instruction set that has one."""
    return at_level("amx")


needs_matrix_unit = pytest.mark.skipif("amx" not in LEVELS, reason="there is no matrix unit here")


def layer(n_out: int, n_in: int, *, seed: int = 0, bias: bool = False) -> nn.Linear:
    """Random weights; some groups much larger than others, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = nn.Linear(n_in, n_out, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        weight = torch.randn(n_out, n_in, generator=generator)
        weight *= 10 ** (2 * torch.rand(n_out, 1, generator=generator) - 1)
        weight[0, :GROUP] = 0
        found.weight.copy_(weight)
        if bias:
            found.bias.copy_(torch.randn(n_out, generator=generator))
    return found


def held(kernel: KernelLinear) -> torch.Tensor:
    """The weights that a layer holds, ``[n_out, n_in]``, decoded here and not by the kernel."""
    if kernel.bits == 16:
        return kernel.weight.double()
    if kernel.bits == 12:
        return decoded(kernel).double()
    data, zero = kernel.weight, 128
    n_groups = kernel.in_features // GROUP
    if kernel.bits == 4:
        pairs = data.view(-1, n_groups, GROUP // 8, 1, 16, 4)
        data, zero = torch.cat([pairs & 15, pairs >> 4], 3), 8
    fours = data.reshape(-1, n_groups, GROUP // 4, 16, 4).double() - zero
    scales = of_groups(kernel.scales.double(), kernel.bits, n_groups)
    scaled = fours * scales[:, :, None, :, None]
    rows = scaled.permute(0, 3, 1, 2, 4).reshape(-1, kernel.in_features)
    return rows[: kernel.out_features]


def of_groups(scales: torch.Tensor, bits: int, n_groups: int) -> torch.Tensor:
    """``[n_blocks, n_scales, 16] -> [n_blocks, n_groups, 16]``: of 32 inputs each."""
    return scales.repeat_interleave(SHARED[bits] // GROUP, 1)[:, :n_groups]


def decoded(kernel: KernelLinear) -> torch.Tensor:
    """bfloat16 weights in 12 bits, as ``native/linear.h`` says that they lie."""
    n_in, n_out = kernel.in_features, kernel.out_features
    blocks = kernel.weight.numpy().reshape(-(-n_out // 16), -1)
    tables = blocks[:, :256].reshape(-1, 16, 16)
    counts = blocks[:, 256:264].copy().view(np.uint32)
    groups = blocks[:, 320:].reshape(len(blocks), 16, n_in // 128, 3, 64)
    codes = np.stack([groups[..., 0, :] & 15, groups[..., 0, :] >> 4], -2)
    upper = np.take_along_axis(tables, codes.reshape(len(blocks), 16, -1), 2).reshape(codes.shape)
    numbers = upper.astype(np.uint16) << 8 | groups[..., 1:, :]
    i = np.arange(64)
    ordered = numbers[..., i % 32 // 8 * 16 + i // 32 * 8 + i % 8]
    rows = np.ascontiguousarray(ordered).reshape(len(blocks), 16, n_in)
    kind = np.dtype([("input", "<u4"), ("output", "<u2"), ("value", "<u2")])
    escapes = kernel.escapes.numpy().view(kind)
    for block, (n, first) in enumerate(counts):
        for one in escapes[first : first + n]:
            rows[block, one["output"], one["input"]] = one["value"]
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).view(-1, n_in)[:n_out]


def wild(linear: nn.Linear, seed: int, share: float) -> nn.Linear:
    """Give a share of the weights any magnitude, zeros and denormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = linear.weight
        odd = 2.0 ** torch.randint(-140, 4, weight.shape, generator=generator)
        odd[torch.rand(weight.shape, generator=generator) < 0.2] = 0
        is_odd = torch.rand(weight.shape, generator=generator) < share
        weight.copy_(torch.where(is_odd, odd.bfloat16(), weight))
    return linear


def bound(x: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """How far results may be off: inputs of packed weights are rounded to 8 bits by group.

    With AVX2, or VNNI, many bfloat16 inputs are rounded by the length of 128 of them, or 512, and
    weights to 15 bits of a limit that is up to four times the largest where they are kept in 12.
    """
    x, dtype, weight = x.double(), x.dtype, weight.double()
    error = 1e-6 * (x.abs() @ weight.abs().T) + 1e-6
    are_many = len(x) > linears.FEW_BF16 and dtype == torch.bfloat16
    by_words = {
        "avx2": (128, 32700),
        "avx_vnni": (128, 32700),
        "vnni": (512, 23100),
    }
    if bits >= 12 and are_many and levels.level().name in by_words:
        size, longest = by_words[levels.level().name]
        groups = [F.pad(t, (0, -t.shape[1] % size)).unflatten(-1, (-1, size)) for t in (x, weight)]
        error += 0.51 / longest * groups[0].norm(dim=-1) @ groups[1].abs().sum(-1).T
        step = (2.04 if bits == 12 else 0.51) / 16380 * weight.abs().amax(-1)
        error += x.abs().sum(-1)[:, None] * step
    if bits < 12:
        steps = x.unflatten(-1, (-1, GROUP)).abs().amax(-1) / 127
        error += 0.51 * steps @ weight.abs().unflatten(-1, (-1, GROUP)).sum(-1).T
    return error


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([16, 8, 4]),
    n_groups=st.integers(1, 9),
    n_out=st.integers(1, 70),
    n_tokens=st.integers(1, 19),
    seed=st.integers(0, 99),
)
def test_results_are_those_of_the_weights_it_holds(level, bits, n_groups, n_out, n_tokens, seed):
    kernel = KernelLinear(layer(n_out, GROUP * n_groups, seed=seed), bits, None)
    x = torch.randn(n_tokens, kernel.in_features, generator=torch.Generator().manual_seed(seed))
    if bits == 16:
        x = x[: linears.FEW_BF16].bfloat16()
    weight = held(kernel)
    want = x.double() @ weight.T
    rounding = 2**-8 * want.abs() if bits == 16 else 0.0  # of the result, in bfloat16
    assert bool(((kernel(x).double() - want).abs() <= bound(x, weight, bits) + rounding).all())


@settings(max_examples=25, deadline=None)
@given(
    n_in=st.sampled_from([1, 15, 32, 33, 100, 1024, 1500, 2112]),
    n_out=st.integers(1, 70),
    n_tokens=st.integers(linears.FEW_BF16 + 1, 60),
    seed=st.integers(0, 99),
)
def test_the_kernel_multiplies_bfloat16_for_many_tokens(level, n_in, n_out, n_tokens, seed):
    """Where the processor does not; and a token's result does not depend on how many they are."""
    kernel = KernelLinear(layer(n_out, n_in, seed=seed), 16, None)
    x = torch.randn(n_tokens, n_in, generator=torch.Generator().manual_seed(seed)).bfloat16()
    got, fewer = torch.empty(n_tokens, n_out).bfloat16(), torch.empty(5, n_out).bfloat16()
    dtype = attend.Dtype.bfloat16
    kernel._weights.linear(x.data_ptr(), n_tokens, dtype, got.data_ptr(), dtype)
    weight = held(kernel)
    want = x.double() @ weight.T
    error = bound(x, weight, 16) + 2**-8 * want.abs()
    assert bool(((got.double() - want).abs() <= error).all())
    last = x[-5:].contiguous()
    kernel._weights.linear(last.data_ptr(), 5, dtype, fewer.data_ptr(), dtype)
    assert torch.equal(fewer, got[-5:])


@settings(max_examples=25, deadline=None)
@given(
    n_groups=st.sampled_from([1, 2, 3, 15, 17, 33]),
    n_out=st.integers(1, 70),
    n_tokens=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, 47, 48, 50, 96, 97, 110]),
    share=st.sampled_from([0.0, 0.001, 0.3]),
    offset=st.sampled_from([0, 8]),
    seed=st.integers(0, 99),
)
def test_weights_in_12_bits_are_those_in_16(level, n_groups, n_out, n_tokens, share, offset, seed):
    """To the last bit when they are unpacked, and so multiplied, wherever the inputs lie."""
    linear = wild(layer(n_out, CODED_INPUTS * n_groups, seed=seed), seed, share)
    kernel = KernelLinear(linear, 12, None)
    n_in = kernel.in_features
    assert kernel.weight.nbytes == coded_bytes(n_out, n_in)
    assert torch.equal(decoded(kernel), linear.weight)
    to = torch.empty(n_out, n_in).bfloat16()
    kernel._weights.unpack(0, -(-n_out // 16), to.data_ptr())
    assert torch.equal(to.view(torch.int16), linear.weight.view(torch.int16))
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(n_tokens * n_in + offset, generator=generator).bfloat16()
    x = memory[offset:].view(n_tokens, n_in)
    for inputs in (x, x.float()):
        want = inputs.double() @ linear.weight.double().T
        error = bound(inputs, linear.weight.double(), 12) + 2**-8 * want.abs()
        assert bool(((kernel(inputs).double() - want).abs() <= error).all())


@pytest.mark.parametrize("bits", [12, 16])
@pytest.mark.parametrize("n_tokens", [4, 5, 66, 67, 140])
def test_many_outputs_meet_inputs_piece_by_piece(level, bits, n_tokens):
    """So many outputs that some inputs of several blocks are met before the next inputs are."""
    linear = layer(1100, 9 * CODED_INPUTS, seed=n_tokens)
    kernel = KernelLinear(linear, bits, None)
    x = torch.randn(n_tokens, kernel.in_features).bfloat16()
    got = multiplied(kernel, x)
    want = x.double() @ linear.weight.double().T
    error = bound(x, linear.weight.double(), bits) + 2**-8 * want.abs()
    assert bool(((got.double() - want).abs() <= error).all())


@pytest.mark.parametrize("bits", [12, 16])
@pytest.mark.parametrize("lane", [slice(0, None, 16), slice(1, None, 16), slice(0, None, 2)])
def test_sums_of_many_tokens_have_room_for_the_largest_there_are(level, bits, lane):
    """Inputs in proportion to weights, in the places that one sum has or in all of its pairs."""
    linear = layer(20, 2 * CODED_INPUTS)
    with torch.no_grad():
        linear.weight.zero_()
        linear.weight[:, lane] = 1.75
        linear.weight[:, 1:][:, lane] = 1.75
    kernel = KernelLinear(linear, bits, None)
    x = (linear.weight[0] * torch.tensor([[1.0], [-1.0], [64.0], [0.5], [-0.25]])).bfloat16()
    got = multiplied(kernel, x)
    want = x.double() @ linear.weight.double().T
    assert bool(((got.double() - want).abs() <= 2**-8 * want.abs()).all())


@pytest.mark.parametrize("bits", [12, 16])
@pytest.mark.parametrize("exponents", [(-100, 10), (100, -110), (-50, -50), (100, 10)])
def test_many_tokens_may_be_of_any_size(level, bits, exponents):
    """None so small that products of pairs of bfloat16, of which tiny ones are 0, would show."""
    linear = layer(20, 3 * CODED_INPUTS)
    x = torch.randn(9, 3 * CODED_INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = multiplied(KernelLinear(linear, bits, None), x)
    with torch.no_grad():
        linear.weight.mul_(2.0 ** exponents[1])
    found = multiplied(KernelLinear(linear, bits, None), x * 2.0 ** exponents[0])
    assert bool(
        ((found.double() * 2.0 ** -sum(exponents) - plain).abs() <= 2**-7 * plain.abs()).all()
    )


@pytest.mark.parametrize("bits", [12, 16])
def test_many_inputs_that_are_not_finite_or_far_larger_stay_in_their_token(level, bits):
    kernel = KernelLinear(layer(20, 2 * CODED_INPUTS), bits, None)
    x = torch.randn(9, kernel.in_features).bfloat16()
    whole = multiplied(kernel, x)
    x[3, 5], x[6, 200], x[7, 255], x[8, 0] = float("nan"), float("inf"), -float("inf"), 2.0**90
    spoilt = multiplied(kernel, x)
    assert not spoilt[[3, 6, 7]].isfinite().any()
    assert torch.equal(spoilt[[0, 1, 2, 4, 5]], whole[[0, 1, 2, 4, 5]])
    want = x[8].double() @ held(kernel).T
    error = bound(x.nan_to_num(), held(kernel), bits)[8] + 2**-8 * want.abs()
    assert bool(((spoilt[8].double() - want).abs() <= error).all())


def multiplied(kernel: KernelLinear, x: torch.Tensor, dtype: str = "bfloat16") -> torch.Tensor:
    """By the kernel, whoever multiplies so many tokens here."""
    out = torch.empty(len(x), kernel.out_features, dtype=getattr(torch, dtype))
    known = attend.Dtype
    kernel._weights.linear(x.data_ptr(), len(x), known["bfloat16"], out.data_ptr(), known[dtype])
    return out


@pytest.mark.parametrize("n_groups", [5, 33])
@pytest.mark.parametrize("n_tokens", [2, 3, 4, 23, 70])
def test_with_12_bits_a_token_s_result_does_not_depend_on_others(level, n_tokens, n_groups):
    """Nor on whether its inputs are taken a piece at a time."""
    linear = wild(layer(47, n_groups * CODED_INPUTS), 1, 0.01)
    kernel = KernelLinear(linear, 12, None)
    x = torch.randn(n_tokens, kernel.in_features).bfloat16()
    least = {23: 5, 70: 48}.get(
        n_tokens, 1
    )  # one order of sums up to 4, one up to 47, one for more
    assert torch.equal(kernel(x)[-least:], kernel(x[-least:].contiguous()))
    few = x[: min(n_tokens, 4)]  # in float32, which no rounding makes equal
    assert torch.equal(
        multiplied(kernel, few, "float32")[-1:], multiplied(kernel, few[-1:], "float32")
    )


@pytest.mark.parametrize("n_tokens", [1, 4, 5, 9, 60])
def test_an_escape_is_all_that_its_input_meets(level, n_tokens):
    """Where the table's least number, whose code it has and which is 1 here, is far from it."""
    linear = layer(20, 3 * CODED_INPUTS)
    with torch.no_grad():
        of_8 = 4.0 ** (torch.arange(linear.weight.numel()) % 8)
        linear.weight.copy_(of_8.view_as(linear.weight))
        linear.weight[3, 77] = 2.0**-20
        linear.weight[19, 300] = -(2.0**-18)
    kernel = KernelLinear(linear, 12, None)
    assert kernel.escapes.nbytes == 2 * 8
    for row, at in ((3, 77), (19, 300)):
        x = torch.zeros(n_tokens, kernel.in_features)
        x[:, at] = 1
        for inputs in (x, x.bfloat16()):
            assert bool((kernel(inputs)[:, row] == linear.weight[row, at]).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_in_12_bits_that_is_not_finite_is_its_output_s(level, value):
    linear = layer(20, CODED_INPUTS)
    with torch.no_grad():
        linear.weight[3, 77] = value
    kernel = KernelLinear(linear, 12, None)
    assert torch.equal(decoded(kernel).isfinite(), linear.weight.isfinite())
    for n_tokens in (1, 9, 60):
        out = kernel(torch.ones(n_tokens, CODED_INPUTS).bfloat16())
        assert not out[:, 3].isfinite().any()
        assert out[:, :3].isfinite().all()
        assert out[:, 4:].isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_weights_in_12_bits_are_expanded_for_torch(monkeypatch, bias):
    linear = wild(layer(85, 3 * CODED_INPUTS, bias=bias), 2, 0.001)
    kernel = KernelLinear(linear, 12, Expanded(20 * 3 * CODED_INPUTS))
    x = torch.randn(2, linears.FEW_PACKED, kernel.in_features).bfloat16()
    by_torch, asked = linears.F.linear, []
    monkeypatch.setattr(linears.F, "linear", lambda *of: asked.append(of) or by_torch(*of))
    got = kernel(x)
    assert len(asked) == 6
    want = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert bool(((got.double() - want).abs() <= 2**-6 * want.abs() + 0.05).all())


def test_only_weights_that_fit_into_12_bits_are_written_so(monkeypatch):
    weight = layer(300, 2 * CODED_INPUTS).weight.detach()
    monkeypatch.setattr(native, "reads_coded", lambda: True)
    assert codes_well(weight)
    assert not codes_well(weight[:, :-GROUP])
    assert not codes_well(weight.float())
    assert not codes_well(wild(layer(300, 2 * CODED_INPUTS), 3, 0.02).weight.detach())
    monkeypatch.setattr(native, "reads_coded", lambda: False)
    assert not codes_well(weight)


@pytest.mark.parametrize("bf16", [False, True])
def test_who_multiplies_many_tokens_depends_on_the_processor(monkeypatch, bf16):
    kernel = KernelLinear(layer(40, 2 * GROUP), 16, None)
    x = torch.randn(linears.FEW_BF16 + 1, kernel.in_features).bfloat16()
    asked = []
    monkeypatch.setattr(linears, "torch_multiplies_bf16", lambda: bf16)
    monkeypatch.setattr(linears.F, "linear", lambda *_: asked.append(1) or x.new_zeros(1))
    for name in LEVELS:
        with at_level(name):
            asked.clear()
            kernel(x)
            assert len(asked) == (bf16 and name != "amx")


@pytest.mark.parametrize(
    ("found", "found_levels", "is_fast"),
    [
        ({}, ["avx2"], False),
        ({"avx512_bf16": True}, ["bf16", "vnni"], True),  # AMD's
        ({"avx512_bf16": True}, ["vnni", "bf16"], False),  # Intel's, whose pairs are slow
        ({"avx512_bf16": True, "amx_bf16": True}, ["amx", "vnni", "bf16"], True),
    ],
)
def test_torch_multiplies_bfloat16_where_that_is_fast(monkeypatch, found, found_levels, is_fast):
    monkeypatch.setattr(linears.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(levels, "levels", lambda: [levels.Level[name] for name in found_levels])
    assert linears.torch_multiplies_bf16.__wrapped__() == is_fast


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n_groups", [3, 8, 9])
def test_packed_weights_are_within_a_step_of_the_model_s(bits, n_groups):
    linear = layer(37, n_groups * GROUP)
    kernel = KernelLinear(linear, bits, None)
    assert kernel.scales.shape == (3, -(-n_groups * GROUP // SHARED[bits]), 16)
    steps = of_groups(kernel.scales.float().abs(), bits, n_groups)
    step = steps.transpose(1, 2).reshape(-1, n_groups)[:37, :, None]
    apart = (held(kernel) - linear.weight.double()).unflatten(-1, (n_groups, GROUP)).abs()
    # One end of 4 bits is a step nearer to zero than the other; scales are rounded to float16.
    share = 0.5 if bits == 8 else 1.0
    assert bool((apart <= share * step * (1 + 2**-10 * 2**bits) + 1e-7).all())
    assert bool((held(kernel)[0, :GROUP] == 0).all())
    assert kernel.weight.nbytes + kernel.scales.nbytes == packed_bytes(37, n_groups * GROUP, bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_s_result_does_not_depend_on_its_company(level, bits):
    kernel = KernelLinear(layer(50, 4 * GROUP), bits, None)
    x = torch.randn(23, kernel.in_features)
    together = kernel(x)
    for i in (0, 7, 8, 15, 22):
        assert torch.equal(kernel(x[i : i + 1])[0], together[i])


@pytest.mark.parametrize("bits", [8, 4])
def test_numbers_that_are_not_finite_stay_in_their_token(level, bits):
    kernel = KernelLinear(layer(20, 2 * GROUP), bits, None)
    x = torch.randn(9, kernel.in_features)
    clean = kernel(x)
    x[3, 5], x[6, 40] = float("nan"), float("inf")
    spoilt = kernel(x)
    assert bool(spoilt[[3, 6]].isnan().all())
    others = [i for i in range(9) if i not in (3, 6)]
    assert torch.equal(spoilt[others], clean[others])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("n_numbers", [1 << 16, 32 * 3 * GROUP])  # at once, and in pieces
def test_many_tokens_go_through_expanded_weights(level, bits, n_numbers):
    kernel = KernelLinear(layer(85, 3 * GROUP, bias=True), bits, Expanded(n_numbers))
    x = torch.randn(2, linears.FEW_PACKED, kernel.in_features).bfloat16()
    want = nn.functional.linear(x, held(kernel).bfloat16(), kernel.bias)
    torch.testing.assert_close(kernel(x), want, rtol=2**-6, atol=1e-2)


def test_a_bias_is_added_and_shapes_are_kept():
    for bits in (16, 8, 4):
        linear = layer(33, 2 * GROUP, bias=True)
        with_bias = KernelLinear(linear, bits, None)
        bias, linear.bias = linear.bias, None
        x = torch.randn(1, 3, linear.in_features).bfloat16()
        want = KernelLinear(linear, bits, None)(x) + bias
        assert with_bias(x).shape == (1, 3, 33)
        assert torch.equal(with_bias(x), want)
        every_other = torch.randn(3, 2, linear.in_features).bfloat16()[:, 0]
        assert torch.equal(with_bias(every_other), with_bias(every_other.contiguous()))


def packed_by_torch(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in torch's operators: float32 is rounded where the kernel rounds it."""
    n_out, n_in = weight.shape
    n_blocks, n_scales = -(-n_out // 16), -(-n_in // SHARED[bits])
    zero, top = (128, 255) if bits == 8 else (8, 15)
    missing = n_scales * SHARED[bits] - n_in, n_blocks * 16 - n_out
    rows = nn.functional.pad(weight.float(), (0, missing[0], 0, missing[1]))
    groups = rows.view(n_blocks, 16, n_scales, SHARED[bits])
    if bits == 8:
        step = groups.abs().amax(-1) / 127
    else:
        step = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0] / -8
    step = step.half()
    inverse = torch.where(step == 0, 0.0, 1 / step.float())
    numbers = (groups * inverse[..., None]).round_().add_(zero).clamp_(0, top)
    # [blocks, fours of inputs, outputs, inputs of a four]
    fours = numbers.to(torch.uint8).flatten(2)[..., :n_in].unflatten(-1, (-1, 4)).transpose(1, 2)
    if bits == 4:
        fours = fours[:, ::2] | fours[:, 1::2] << 4
    return fours.flatten(1), step.transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    n_groups=st.integers(1, 9),
    n_out=st.integers(1, 70),
    seed=st.integers(0, 99),
    share=st.sampled_from([0.0, 0.1, 1.0]),
    is_turned=st.booleans(),
)
def test_weights_are_packed_by_the_definition(
    level, bits, dtype, n_groups, n_out, seed, share, is_turned
):
    """To the last bit: with zeros, denormal numbers, and equals of which the first one counts."""
    weight = wild(layer(n_out, n_groups * GROUP, seed=seed), seed, share).weight.detach().to(dtype)
    weight[:, 5] = -weight[:, 3]
    if is_turned:
        weight = weight.t().contiguous().t()
    for arena in (None, Arena()):
        for got, want in zip(pack(weight, bits, arena), packed_by_torch(weight, bits), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            assert torch.equal(got.view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_shows(level, bits, value):
    linear = layer(20, 2 * GROUP)
    linear.weight.data[3, 40] = value
    found = KernelLinear(linear, bits, None)(torch.ones(1, 2 * GROUP))
    assert found[0].isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_results_are_those_of_inputs_rounded_by_group(level, bits):
    """The definition, to float32's own accuracy: any scale that is off by a step shows."""
    kernel = KernelLinear(layer(37, 9 * GROUP), bits, None)
    x = torch.randn(11, kernel.in_features, generator=torch.Generator().manual_seed(1))
    x *= 10 ** torch.linspace(-3, 3, kernel.in_features)
    groups = x.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    numbers = (groups * (127 / most)).round()
    rounded = (numbers.double() * (most / 127).double()).flatten(1)
    weight = held(kernel)
    error = 2e-6 * (rounded.abs() @ weight.abs().T)
    assert bool(((kernel(x).double() - rounded @ weight.T).abs() <= error).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_expanded_weights_are_those_it_holds(level, bits):
    kernel = KernelLinear(layer(37, 9 * GROUP), bits, None)
    found = torch.empty(37, kernel.in_features, dtype=torch.bfloat16)
    kernel._weights.unpack(0, 3, found.data_ptr())
    assert torch.equal(found, held(kernel).bfloat16())


@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([12, 8, 4]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    n_groups=st.sampled_from([1, 3, 9, 33]),
    n_out=st.integers(1, 70),
    shape=st.sampled_from([(0,), (1,), (5,), (2, 3), (1, 200)]),
    seed=st.integers(0, 99),
)
def test_rows_are_the_weights_of_outputs(level, bits, dtype, n_groups, n_out, shape, seed):
    n_in = n_groups * (CODED_INPUTS if bits == 12 else GROUP)
    kernel = KernelLinear(wild(layer(n_out, n_in, seed=seed), seed, 0.01), bits, None)
    asked = torch.randint(n_out, shape, generator=torch.Generator().manual_seed(seed))
    if bits == 12:
        dtype = torch.bfloat16
    rows = kernel.rows(asked, dtype)
    assert rows.dtype == dtype and rows.shape == (*shape, n_in)
    assert torch.equal(rows, held(kernel).to(dtype)[asked])


@needs_matrix_unit
@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([16, 12, 8, 4]),
    n_groups=st.sampled_from([1, 2, 5, 65, 129]),
    n_out=st.sampled_from([1, 16, 31, 33, 70, 96]),
    n_tokens=st.sampled_from([1, 15, 33, 64, 257, 300]),
    seed=st.integers(0, 99),
)
@example(bits=12, n_groups=17, n_out=2048, n_tokens=257, seed=0)  # results that no cache keeps
@example(bits=12, n_groups=21, n_out=70, n_tokens=300, seed=0)
@example(bits=12, n_groups=21, n_out=70, n_tokens=16, seed=0)
def test_the_matrix_unit_multiplies_what_the_layer_holds(bits, n_groups, n_out, n_tokens, seed):
    n_in = n_groups * (CODED_INPUTS if bits == 12 else GROUP)
    linear = layer(n_out, n_in, seed=seed)
    kernel = KernelLinear(wild(linear, seed, 0.01) if bits == 12 else linear, bits, None)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n_tokens, kernel.in_features, generator=generator).bfloat16()
    out = torch.full((n_tokens + 1, n_out), 7.0, dtype=torch.bfloat16)
    alone = torch.empty(1, n_out, dtype=torch.bfloat16)
    with matrix_unit():
        assert kernel._weights.can_multiply
        kernel._weights.multiply(x.data_ptr(), n_tokens, out.data_ptr())
        kernel._weights.multiply(x[-1:].contiguous().data_ptr(), 1, alone.data_ptr())
    weight = held(kernel).bfloat16().double()
    want = x.double() @ weight.T
    error = want.abs() / 256 + 1e-5 * (x.double().abs() @ weight.abs().T)
    assert ((out[:-1].double() - want).abs() <= error + 1e-6).all()
    assert (out[-1] == 7).all()
    assert torch.equal(alone[0], out[n_tokens - 1])


@needs_matrix_unit
@pytest.mark.parametrize("bits", [8, 4])
def test_many_tokens_take_the_matrix_unit_and_say_what_expanding_says(monkeypatch, bits):
    kernel = KernelLinear(layer(85, 3 * GROUP, bias=True), bits, Expanded(1 << 20))
    x = torch.randn(2, linears.FEW_PACKED, kernel.in_features).bfloat16()
    want = kernel._by_expanding(x, kernel._expanded)
    monkeypatch.setattr(KernelLinear, "_by_expanding", None)
    with matrix_unit():
        got = kernel(x)
    torch.testing.assert_close(got, want, rtol=1 / 64, atol=1e-2)
