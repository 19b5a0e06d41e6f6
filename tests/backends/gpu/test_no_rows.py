"""Every function takes no rows: a chunk of a prompt but the last wants no logits of the head."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.cpu.rotations import Rotation  # noqa: E402
from kvcellar.backends.torch.gpu import (  # noqa: E402
    launch,
    layers,
    linears,
    multiply,
    rows,
    sampling,
)
from kvcellar.backends.torch.gpu.logits import DeviceLogits  # noqa: E402
from kvcellar.backends.torch.gpu.matrices import experts_on_card, packed  # noqa: E402
from kvcellar.backends.torch.gpu.settings import sent  # noqa: E402
from kvcellar.backends.torch.gpu.transfers import transfers_on  # noqa: E402
from tests.backends.gpu.interpreter import device, hasten  # noqa: E402

CARD = device()
N_IN, N_OUT = 64, 32
WHOLE = torch.empty((0,), dtype=torch.int64, device=CARD)


@pytest.fixture(autouse=True)
def interpreter() -> None:
    hasten()


def numbers(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=CARD)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_products(bits: int) -> None:
    weight = numbers(N_OUT, N_IN)
    matrix = (
        experts_on_card([weight.bfloat16()], 16, CARD)
        if bits == 16
        else packed(weight.cpu(), bits, CARD)
    )
    x, out = numbers(0, N_IN), numbers(0, 2 * N_OUT)[:, :N_OUT]
    assert multiply.multiply(matrix, x).shape == (0, N_OUT)
    assert multiply.multiply(matrix, x, numbers(N_OUT), numbers(0, N_OUT), out) is out
    assert multiply.multiply(matrix, x, is_gated=True).shape == (0, N_OUT // 2)
    norm = multiply.Norm(numbers(N_IN), 1e-5)
    assert multiply.multiply(matrix, x, norm=norm).shape == (0, N_OUT)
    assert multiply.take(matrix, WHOLE, torch.float32).shape == (0, N_IN)


@pytest.mark.parametrize("bits", [16, 8])
def test_experts(bits: int) -> None:
    up = experts_on_card(list(numbers(4, 2 * N_OUT, N_IN).bfloat16()), bits, CARD)
    down = experts_on_card(list(numbers(4, N_IN, N_OUT).bfloat16()), bits, CARD)
    order = multiply.sorted_rows(WHOLE, 4, numbers(0, N_IN))
    for sorted_rows in (None, order):
        got = multiply.multiply_chosen(up, numbers(0, N_IN), WHOLE, None, sorted_rows)
        assert got.shape == (0, 2 * N_OUT)
    experts = linears.CardExperts((up, down), (None, None), linears.gate, None, is_silu=True)
    chosen = torch.empty((0, 2), dtype=torch.int64, device=CARD)
    assert experts(numbers(0, N_IN), chosen, numbers(0, 2)).shape == (0, N_IN)


def test_layers_around_them() -> None:
    one = packed(numbers(N_OUT, N_IN).cpu(), 8, CARD)
    other = packed(numbers(N_OUT, N_IN).cpu(), 4, CARD)
    for matrices in ([one], [one, one], [one, other]):
        linear = linears.CardLinear(matrices, None)
        n_out = len(matrices) * N_OUT
        norm = linears.CardNorm(numbers(N_IN), 1e-5)
        assert linear(numbers(1, 0, N_IN), norm=norm).shape == (1, 0, n_out)
        assert linear.gated(numbers(1, 0, N_IN), norm).shape == (1, 0, n_out // 2)
    assert norm(numbers(1, 0, 3, N_IN)).shape == (1, 0, 3, N_IN)
    assert linears.gate(numbers(0, 2 * N_OUT)).shape == (0, N_OUT)
    both = numbers(1, 0, 4 * 16)
    sides = numbers(1, 0, 16), numbers(1, 0, 16)
    layers.turn(both, Rotation(16, False, "doubled", True, False), sides, None, (2, 1, 16))


def test_an_embedding() -> None:
    held = linears.CardLinear([packed(numbers(N_OUT, N_IN).cpu(), 8, CARD)], None)
    embedding = linears.CardEmbedding(held, torch.float32, numbers(1))
    assert embedding(WHOLE[None]).shape == (1, 0, N_IN)


def test_sampling() -> None:
    logits = numbers(0, 9)
    assert sampling.likeliest(logits).shape == (0, 2)
    assert sampling.scored(logits, WHOLE, 2).shape == (0, 3 + 2 * 2)
    assert sampling.sampled(logits, sent([], 9, CARD), 2).shape == (0, 2)
    for likeliest in (None, sampling.likeliest(logits)):
        kept = DeviceLogits(logits, likeliest)
        assert kept.sample([]) == kept.score(0, np.empty(0, np.int64), 2) == []


def test_cells() -> None:
    params = kv.ModelCacheParams(1, groups=(kv.LayerGroup((0,), 2, 16, 16),))
    with kv.make_seq_session("torch", kv.make_config(params, 32)) as session:
        pools = session.cache.pools
        pools.place(CARD)
        (pool,) = pools.of_layer
        pool.ensure(8, CARD)
        placed = launch.pool_arguments(pool.placed())
        parts = [*pool.placed().k, *pool.placed().v]
        for part in parts:
            part.fill_(3)
        launch.move(placed, 4, WHOLE)
        moves, group = transfers_on(CARD), pools.groups[0]
        none = np.empty(0, np.int64)
        found = moves.read([pool], none, group, pools.config.kv)
        assert [array.shape[2] for side in found for array in side] == [0, 0]
        moves.write([pool], none, found, group, CARD)
        places = rows.Parts(torch.zeros(1, 2, dtype=torch.int64, device=CARD), 16, 0, 2, 4, 0)
        rows.copy(places, WHOLE, numbers(1, 2, 0, 16), step=1, at=0, is_read=False)
        assert all((part == 3).all() for part in parts)
