"""Products with weights in few bits, interpreted, against the formats' own numbers in NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from torch.overrides import TorchFunctionMode  # noqa: E402

from kvcellar.backends.torch.cpu.modules.blocks import StoredAffine, StoredBlocks  # noqa: E402
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear  # noqa: E402
from kvcellar.backends.torch.gpu.weights import multiply  # noqa: E402
from kvcellar.backends.torch.gpu.weights.matrices import (  # noqa: E402
    CardMatrices,
    experts_on_card,
    joined,
    packed,
    placed,
)
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402
from tests.kernel.test_blocks import FORMS, N_IN, N_OUT, PLAIN, Affine, plain, stored  # noqa: E402

CARD = device()


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    hasten()
    with CARD, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what tiles throw away
        yield


def on_card(form: str | tuple[int, int], seed: int = 0) -> tuple[CardMatrices, torch.Tensor]:
    """A matrix of a form as a card has it, and in float32."""
    if isinstance(form, str):
        rows = stored(form, seed)
        blocks = StoredBlocks(form, N_OUT, N_IN, lambda: torch.from_numpy(rows))
        return placed(blocks, CARD), torch.from_numpy(plain(form, rows).astype(np.float32)).to(CARD)
    one = Affine(*form, seed)
    parts = tuple(torch.from_numpy(part) for part in (one.numbers, one.scales, one.minima))
    affine = StoredAffine(*form, N_OUT, N_IN, lambda: parts)
    return placed(affine, CARD), torch.from_numpy(one.plain()).to(CARD)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    np.testing.assert_allclose(
        got.cpu().numpy(), want.cpu().numpy(), rtol=0, atol=2e-5 * float(want.abs().max())
    )


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal where Triton is interpreted; a card's compiler may round a product with its sum."""
    apart = 0.0 if CARD.type == "cpu" else 1e-6
    torch.testing.assert_close(got, want, rtol=apart, atol=0.1 * apart)


@pytest.mark.parametrize("form", [*FORMS, *PLAIN], ids=str)
def test_rows_are_the_format_s_own_numbers(form: str | tuple[int, int]) -> None:
    matrix, want = on_card(form)
    ids = torch.tensor([0, N_OUT - 1, 3, N_OUT, -1])
    got = multiply.take(matrix, ids, torch.float32)
    same(got[:3], want[ids[:3]])
    assert not got[3:].any()


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, *PLAIN], ids=str)
def test_a_product_is_that_of_the_numbers(form: str | tuple[int, int]) -> None:
    matrix, want = on_card(form)
    bias = torch.randn(N_OUT)
    for n_rows in (1, 3, 7):
        x = torch.randn(n_rows, 2 * N_IN)[:, :N_IN]
        near(multiply.multiply(matrix, x, bias), x @ want.T + bias)


def test_a_result_is_added_and_goes_where_it_is_wanted() -> None:
    matrix, want = on_card("Q5_1")
    for n_rows in (2, 9):
        x, add, out = torch.randn(n_rows, N_IN), torch.randn(n_rows, N_OUT), torch.zeros(n_rows, 99)
        multiply.multiply(matrix, x, None, add, out[:, 50 : 50 + N_OUT])
        near(out[:, 50 : 50 + N_OUT], x @ want.T + add)
        assert not out[:, :50].any() and not out[:, 50 + N_OUT :].any()


def test_a_gate_is_joined_with_the_product() -> None:
    (a, gate), (b, up) = on_card("Q4_K", 1), on_card("Q4_K", 2)
    both, bias = joined([a, b]), torch.randn(2 * N_OUT)
    assert both is not None
    for n_rows in (1, 3):
        x = torch.randn(n_rows, N_IN)
        got = multiply.multiply(both, x, bias, is_gated=True)
        gates, ups = x @ gate.T + bias[:N_OUT], x @ up.T + bias[N_OUT:]
        near(got, torch.nn.functional.silu(gates) * ups)


def test_inputs_are_normed_on_their_way() -> None:
    (a, gate), (b, up) = on_card("Q4_K", 1), on_card("Q4_K", 2)
    both, norm = joined([a, b]), multiply.Norm(torch.randn(N_IN), 0.1)
    assert both is not None
    for n_rows in (1, 3):
        x, add = torch.randn(n_rows, N_IN), torch.randn(n_rows, N_OUT)
        normed = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps) * norm.weight
        near(multiply.multiply(a, x, None, add, norm=norm), normed @ gate.T + add)
        got = multiply.multiply(both, x, norm=norm, is_gated=True)
        near(got, torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T))


def test_results_have_the_type_of_the_inputs() -> None:
    matrix, want = on_card("Q6_K")
    for n_rows in (1, 7):
        x = torch.randn(n_rows, N_IN).bfloat16()
        got = multiply.multiply(matrix, x, None)
        assert got.dtype == torch.bfloat16
        # a card's tensor cores take weights in the type of the inputs, a program of few rows
        # float32 ones
        products = [x.float() @ weights.T for weights in (want, want.bfloat16().float())]
        closest = min(products, key=lambda one: float((got.float() - one).norm()))
        torch.testing.assert_close(got.float(), closest, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("n_rows", [9, 33, 70])
@pytest.mark.parametrize("n_parts", [1, 16])
def test_more_rows_are_tiles_of_parts_of_the_inputs(
    n_rows: int, n_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiply, "PARTS", n_parts)
    matrix, want = on_card("Q4_K")
    x, bias, add = torch.randn(n_rows, N_IN), torch.randn(N_OUT), torch.randn(n_rows, N_OUT)
    near(multiply.multiply(matrix, x, bias, add), x @ want.T + bias + add)


@pytest.mark.parametrize("form", ["Q4_K", "Q6_K", "F16"])
def test_many_rows_meet_weights_that_are_unpacked_a_part_at_a_time(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiply, "UNPACKED_BYTES", 10 * N_IN * 4)  # of 37 outputs
    matrix, want = on_card(form)
    x, bias, add = torch.randn(200, N_IN), torch.randn(N_OUT), torch.randn(200, N_OUT)
    near(multiply.multiply(matrix, x), x @ want.T)
    near(multiply.multiply(matrix, x, bias), x @ want.T + bias)
    out = torch.zeros(200, 99)
    assert multiply.multiply(matrix, x, bias, add, out[:, 9 : 9 + N_OUT]).data_ptr() == (
        out[:, 9:].data_ptr()
    )
    near(out[:, 9 : 9 + N_OUT], x @ want.T + bias + add)
    assert not out[:, :9].any() and not out[:, 9 + N_OUT :].any()
    half = x.bfloat16()
    got = multiply.multiply(matrix, half)
    exact = half.float() @ want.T
    assert got.dtype == torch.bfloat16 and (got - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("shape", [(20, 96), (37, 160), (16, 32)])
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_weights_are_those_that_the_cpu_kernel_packs(shape, bits) -> None:
    torch.manual_seed(1)
    weight = torch.randn(shape)
    weight[1] = 0
    weight[2, 0], weight[2, 1] = 9.0, -9.0  # the first of two largest says which end is whole
    weight[3, 0], weight[3, 1] = -9.0, 9.0
    with torch.device("cpu"):  # where the kernel is
        linear = torch.nn.Linear(*shape[::-1], bias=False)
        linear.weight = torch.nn.Parameter(weight.cpu(), requires_grad=False)
        want = KernelLinear(linear, bits, None).rows(torch.arange(shape[0]), torch.float32)
    want = want.to(CARD)
    matrix = packed(weight, bits, CARD)
    same(multiply.take(matrix, torch.arange(shape[0]), torch.float32), want)
    x = torch.randn(2, shape[1])
    near(multiply.multiply(matrix, x, None), x @ want.T)


def test_a_group_with_infinity_is_no_number() -> None:
    weight = torch.randn(16, 64)
    weight[2, 3], weight[4, 40] = torch.inf, torch.nan
    got = multiply.take(packed(weight, 4, CARD), torch.arange(16), torch.float32)
    is_lost = got.isnan().view(16, 2, 32).all(-1)
    assert (
        is_lost.nonzero().tolist() == [[2, 0], [4, 1]] and is_lost.sum() * 32 == got.isnan().sum()
    )


def test_matrices_of_one_form_are_joined() -> None:
    (a, want_a), (b, want_b) = on_card("Q4_K", 1), on_card("Q4_K", 2)
    both = joined([a, b])
    assert both is not None and joined([a, on_card("Q6_K")[0]]) is None
    x = torch.randn(2, N_IN)
    near(multiply.multiply(both, x, None), x @ torch.cat([want_a, want_b]).T)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_each_row_meets_the_expert_that_it_chose(bits: int, n_tokens: int) -> None:
    torch.manual_seed(2)
    n_experts, n_out, n_in, n_each = 6, 24, 64, 2
    own = torch.randn(n_experts, n_out, n_in)
    own = own.bfloat16() if bits == 16 else own
    matrices = experts_on_card(list(own), bits, CARD)
    flat = torch.arange(n_out)
    want_w = [multiply.take(experts_on_card([one], bits, CARD), flat, torch.float32) for one in own]
    if bits == 16:
        assert torch.equal(torch.stack(want_w), own.float())
    x, bias = torch.randn(n_tokens, n_in), torch.randn(n_experts, n_out)
    chosen = torch.stack([torch.randperm(n_experts)[:n_each] for _ in range(n_tokens)]).flatten()
    chosen[-1], chosen[0] = n_experts, -1 if n_tokens > 1 else chosen[0]
    rows = None if n_tokens < 4 else multiply.sorted_rows(chosen, n_experts, x)
    got = multiply.multiply_chosen(matrices, x, chosen, bias, rows)
    for row, expert in enumerate(chosen.tolist()):
        is_there = 0 <= expert < n_experts
        want = (
            x[row // n_each] @ want_w[expert].T + bias[expert] if is_there else torch.zeros(n_out)
        )
        torch.testing.assert_close(got[row], want, rtol=0, atol=1e-4)


def test_tiles_cover_each_row_of_an_expert_once() -> None:
    rng = np.random.default_rng(3)
    for n_rows, n_experts in ((1, 4), (50, 3), (64, 8), (200, 5), (40, 64)):
        chosen = torch.from_numpy(rng.integers(-1, n_experts + 1, n_rows)).to(CARD)
        found = multiply.sorted_rows(chosen, n_experts, torch.empty(0))
        covered = []
        for expert, begin, end in found.tiles.tolist():
            rows = found.order[begin:end].tolist() if expert >= 0 else []
            assert len(rows) <= found.size and all(chosen[row] == expert for row in rows)
            covered += rows
        there = ((chosen >= 0) & (chosen < n_experts)).nonzero()[:, 0].tolist()
        assert sorted(covered) == there


class OnMeta(TorchFunctionMode):
    """Runs a test where tensors have no values: what it asks of these is true.

    What joins one there with a CPU's is refused as on a card; ``meta`` lets it pass.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__bool__, torch.Tensor.any):
            return func is torch.Tensor.__bool__
        if func is torch.Tensor.cpu:
            return torch.zeros(args[0].shape, dtype=args[0].dtype, device="cpu")
        tensors = [one for one in args if isinstance(one, torch.Tensor) and one.dim()]
        assert len({one.device.type for one in tensors}) < 2 or func is torch.Tensor.to, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "test",
    [
        lambda: test_a_product_is_that_of_the_numbers("Q4_K"),
        lambda: test_a_product_is_that_of_the_numbers("BF16"),
        lambda: test_a_product_is_that_of_the_numbers((4, 64)),
        lambda: test_rows_are_the_format_s_own_numbers("Q4_K"),
        test_a_result_is_added_and_goes_where_it_is_wanted,
        test_a_gate_is_joined_with_the_product,
        test_inputs_are_normed_on_their_way,
        lambda: test_more_rows_are_tiles_of_parts_of_the_inputs(
            70, multiply.PARTS, pytest.MonkeyPatch()
        ),
        lambda: test_packed_weights_are_those_that_the_cpu_kernel_packs((37, 160), 8),
        test_matrices_of_one_form_are_joined,
    ],
)
def test_what_runs_on_a_card_has_all_tensors_there(
    test: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run tests with tensors on ``meta`` for a card."""
    card, n_compared = torch.device("meta"), 0

    def on_the_card(*tensors: torch.Tensor | None) -> None:
        assert {one.device.type for one in tensors if one is not None} == {"meta"}

    def compares(got: torch.Tensor, want: torch.Tensor) -> None:
        nonlocal n_compared
        on_the_card(got, want)
        assert got.shape == want.shape
        n_compared += 1

    def multiplies(weights, x, bias=None, add=None, out=None, *, norm=None, is_gated=False):
        on_the_card(*weights.parts, x, bias, add, out, None if norm is None else norm.weight)
        made = x.new_empty((len(x), weights.n_out // (1 + is_gated)))
        return made if out is None else out

    def takes(weights, ids, dtype):
        on_the_card(*weights.parts, ids)
        return torch.empty((len(ids), weights.n_in), dtype=dtype)

    monkeypatch.setattr(multiply, "multiply", multiplies)
    monkeypatch.setattr(multiply, "take", takes)
    for name in ("near", "same"):
        monkeypatch.setitem(globals(), name, compares)
    monkeypatch.setitem(globals(), "CARD", card)
    with card, OnMeta():
        test()
    assert n_compared
