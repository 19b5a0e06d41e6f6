"""Recurrent layers in the CPU kernel, every level against double precision, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from kvcellar.errors import ConfigError
from kvcellar.kernel import levels
from kvcellar.states import NO_SLOT, Advance

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.kernel import recurrent
from kvcellar.kernel.attend import Dtype

pytestmark = pytest.mark.kernel

N_SLOTS = 6
ADVANCES = (
    Advance(0, 1, 0, 1),
    Advance(1, 19, NO_SLOT, 2),
    Advance(20, 2, 0, 3),
    Advance(22, 1, 2, 4),  # goes on from what the second one has written
)
N_TOKENS = 23
TYPES = ("float32", "bfloat16")


@pytest.fixture(params=levels.levels(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[levels.Level]:
    before = levels.level()
    levels.set_level(request.param)
    yield request.param
    levels.set_level(before)


class Rows(NamedTuple):
    """Rows as the kernel gets them, and the numbers that they stand for."""

    held: np.ndarray
    numbers: np.ndarray

    @property
    def address(self) -> int:
        return self.held.ctypes.data

    @property
    def stride(self) -> int:
        return self.held.shape[1]

    def at(self, first: int) -> int:
        """Return the address of the first token's number ``first``."""
        return self.address + first * self.held.itemsize


def make_rows(dtype: str, width: int, seed: int, size: float = 1.0) -> Rows:
    values = floats(N_TOKENS, width, seed=seed) * np.float32(size)
    held = to_bfloat16_bits(values) if dtype == "bfloat16" else values
    numbers = from_bfloat16_bits(held) if dtype == "bfloat16" else held
    return Rows(np.ascontiguousarray(held), numbers.astype(np.float64))


def floats(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def batch(dtype: str) -> recurrent.StateBatch:
    return recurrent.StateBatch(N_TOKENS, Dtype[dtype], ADVANCES)


def result(dtype: str, width: int) -> np.ndarray:
    return (
        np.full((N_TOKENS, width), np.nan, np.float32)
        if dtype == "float32"
        else np.zeros((N_TOKENS, width), np.uint16)
    )


def numbers(out: np.ndarray) -> np.ndarray:
    return from_bfloat16_bits(out) if out.dtype == np.uint16 else out


def follow(states: np.ndarray, step: Callable[[int, np.ndarray], np.ndarray]) -> np.ndarray:
    """Take states through all advances; ``step(token, state)`` returns the next one."""
    want = states.astype(np.float64)
    for one in ADVANCES:
        state = np.zeros_like(want[0]) if one.src == NO_SLOT else want[one.src].copy()
        for token in range(one.q_start, one.q_start + one.n_tokens):
            state = step(token, state)
        want[one.dst] = state
    return want


def check(
    states: np.ndarray, want_states: np.ndarray, out: np.ndarray, want: np.ndarray, dtype: str
) -> None:
    """Compare results and states; slots that are only read, or not named, stay as they were."""
    most = 1e-5 if dtype == "float32" else 1e-2
    assert np.abs(numbers(out) - want).max() <= most * np.abs(want).max()
    assert np.abs(states - want_states).max() <= most * np.abs(want_states).max()
    assert np.array_equal(states[[0, 5]], want_states[[0, 5]].astype(np.float32))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 3, 4])
def test_convolutions_go_on_from_the_inputs_that_a_slot_keeps(
    level: levels.Level, dtype: str, width: int
) -> None:
    n = 37
    x, weight, bias = make_rows(dtype, n + 3, 2), floats(width, n), floats(n, seed=3)
    states = floats(N_SLOTS, n, width, seed=4)
    want = np.empty((N_TOKENS, n))

    def step(token: int, state: np.ndarray) -> np.ndarray:
        state = np.concatenate([state[:, 1:], x.numbers[token, 3:, None]], 1)
        want[token] = silu((state * weight.T).sum(1) + bias)
        return state

    want_states = follow(states, step)
    made = recurrent.Convolution(n, width, weight.ctypes.data, bias.ctypes.data, has_silu=True)
    out = result(dtype, n)
    made.run(batch(dtype), states.ctypes.data, N_SLOTS, x.at(3), x.stride, out.ctypes.data)
    check(states, want_states, out, want, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_convolution_between_two_factors_has_no_activation(
    level: levels.Level, dtype: str
) -> None:
    n, width = 20, 3
    x, weight = make_rows(dtype, 3 * n, 2), floats(width, n)
    states = floats(N_SLOTS, n, width, seed=4)
    want = np.empty((N_TOKENS, n))

    def step(token: int, state: np.ndarray) -> np.ndarray:
        before, behind, value = np.split(x.numbers[token], 3)
        state = np.concatenate([state[:, 1:], (before * value)[:, None]], 1)
        want[token] = behind * (state * weight.T).sum(1)
        return state

    want_states = follow(states, step)
    made = recurrent.Convolution(n, width, weight.ctypes.data, has_silu=False)
    out = result(dtype, n)
    at = states.ctypes.data, N_SLOTS, x.at(2 * n), x.stride, out.ctypes.data
    made.run(batch(dtype), *at, x.at(0), x.at(n))
    check(states, want_states, out, want, dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(4, 2, 16, 128), (3, 3, 33, 39), (2, 1, 260, 64)])
@pytest.mark.parametrize("is_per_key", [False, True])
def test_the_delta_rule_is_that_of_one_token_after_the_other(
    level: levels.Level, dtype: str, sizes: tuple[int, int, int, int], is_per_key: bool
) -> None:
    n_heads, n_keys, k_dim, v_dim = sizes
    n_decays = k_dim if is_per_key else 1
    qkv = make_rows(dtype, 2 * n_keys * k_dim + n_heads * v_dim, 2)
    ab = make_rows(dtype, n_heads * (n_decays + 1), 3)
    rates, shifts = np.exp(floats(n_heads, seed=5)), floats(n_heads, n_decays, seed=6)
    states = floats(N_SLOTS, n_heads, k_dim, v_dim, seed=4)
    want = np.empty((N_TOKENS, n_heads, v_dim))

    def step(token: int, state: np.ndarray) -> np.ndarray:
        row = qkv.numbers[token]
        q, k = row[: 2 * n_keys * k_dim].reshape(2, n_keys, k_dim).repeat(n_heads // n_keys, 1)
        v = row[2 * n_keys * k_dim :].reshape(n_heads, v_dim)
        q, k = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
        a = ab.numbers[token, : n_heads * n_decays].reshape(n_heads, n_decays)
        beta = 2 / (1 + np.exp(-ab.numbers[token, n_heads * n_decays :]))
        state = state * np.exp(-rates[:, None] * softplus(a + shifts))[:, :, None]
        delta = beta[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * delta[:, None]
        want[token] = np.einsum("hkv,hk->hv", state, q) / np.sqrt(k_dim)
        return state

    want_states = follow(states, step)
    made = recurrent.DeltaRule(
        *sizes, rates.ctypes.data, shifts.ctypes.data, n_decays=n_decays, beta_scale=2.0
    )
    out = result(dtype, n_heads * v_dim)
    made.run(
        batch(dtype),
        states.ctypes.data,
        N_SLOTS,
        qkv.at(0),
        qkv.at(n_keys * k_dim),
        qkv.at(2 * n_keys * k_dim),
        qkv.stride,
        ab.at(0),
        ab.stride,
        ab.at(n_heads * n_decays),
        ab.stride,
        out.ctypes.data,
    )
    check(states, want_states, out, want.reshape(N_TOKENS, -1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", [(4, 2, 16, 128), (3, 1, 7, 37)])
def test_mamba_2_is_that_of_one_token_after_the_other(
    level: levels.Level, dtype: str, sizes: tuple[int, int, int, int]
) -> None:
    n_heads, n_groups, head_dim, dim = sizes
    inner, width = n_heads * head_dim, n_groups * dim
    xbc, dts = make_rows(dtype, inner + 2 * width, 2), make_rows(dtype, n_heads, 3)
    rates, skips = np.exp(floats(n_heads, seed=5)), floats(n_heads, seed=7)
    shifts = np.zeros(n_heads, np.float32)  # what is rounded there is transformers' own
    states = floats(N_SLOTS, n_heads, head_dim, dim, seed=4)
    want = np.empty((N_TOKENS, n_heads, head_dim))

    def step(token: int, state: np.ndarray) -> np.ndarray:
        row = xbc.numbers[token]
        x = row[:inner].reshape(n_heads, head_dim)
        b, c = row[inner:].reshape(2, n_groups, dim).repeat(n_heads // n_groups, 1)
        dt = softplus(dts.numbers[token] + shifts)
        state = state * np.exp(-rates * dt)[:, None, None]
        state = state + dt[:, None, None] * x[:, :, None] * b[:, None]
        want[token] = np.einsum("hpn,hn->hp", state, c) + skips[:, None] * x
        return state

    want_states = follow(states, step)
    made = recurrent.Scan(*sizes, rates.ctypes.data, shifts.ctypes.data, skips.ctypes.data)
    out = result(dtype, inner)
    where = xbc.at(0), xbc.at(inner), xbc.at(inner + width), xbc.stride, dts.at(0), dts.stride
    made.run(batch(dtype), states.ctypes.data, N_SLOTS, *where, out.ctypes.data)
    check(states, want_states, out, want.reshape(N_TOKENS, -1), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("is_sigmoid", [False, True])
@pytest.mark.parametrize("n_weights", [0, 20, 80])
def test_gated_norms_are_those_of_each_group(
    level: levels.Level, dtype: str, gates_first: bool, is_sigmoid: bool, n_weights: int
) -> None:
    x, gates = make_rows(dtype, 80, 2), make_rows(dtype, 90, 3, 4.0)
    weight = floats(n_weights)
    made = recurrent.GatedNorm(
        80,
        20,
        weight.ctypes.data if n_weights else 0,
        n_weights,
        eps=1e-5,
        gates_first=gates_first,
        is_sigmoid=is_sigmoid,
        rounds=False,
    )
    out = result(dtype, 80)
    made.run(N_TOKENS, Dtype[dtype], x.at(0), gates.at(10), gates.stride, out.ctypes.data)
    gate = gates.numbers[:, 10:]
    gate = 1 / (1 + np.exp(-gate)) if is_sigmoid else silu(gate)
    want = x.numbers * gate if gates_first else x.numbers
    if n_weights:
        groups = want.reshape(N_TOKENS, 4, 20)
        want = (groups / np.sqrt((groups**2).mean(-1, keepdims=True) + 1e-5)).reshape(want.shape)
        want = want * np.tile(weight, 80 // n_weights)
    want = want if gates_first else want * gate
    assert (
        np.abs(numbers(out) - want).max()
        <= (1e-5 if dtype == "float32" else 1e-2) * np.abs(want).max()
    )


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_sequence_gets_the_same_whatever_others_come_with_it(n_threads: int) -> None:
    sizes = 4, 2, 32, 128
    qkv, ab = make_rows("float32", 2 * 2 * 32 + 4 * 128, 2), make_rows("float32", 8, 3)
    rates, shifts = np.exp(floats(4, seed=5)), floats(4, seed=6)
    first = floats(N_SLOTS, 4, 32, 128, seed=4)

    def run(advances: tuple[Advance, ...]) -> tuple[np.ndarray, np.ndarray]:
        states, out = first.copy(), result("float32", 4 * 128)
        made = recurrent.DeltaRule(
            *sizes, rates.ctypes.data, shifts.ctypes.data, n_decays=1, beta_scale=1.0
        )
        of = recurrent.StateBatch(N_TOKENS, Dtype.float32, advances)
        at = (qkv.at(0), qkv.at(64), qkv.at(128), qkv.stride, ab.at(0), 8, ab.at(4), 8)
        made.run(of, states.ctypes.data, N_SLOTS, *at, out.ctypes.data)
        return states, out

    try:
        levels.set_num_threads(1)
        alone = [run((one,)) for one in ADVANCES[:3]]
        levels.set_num_threads(n_threads)
        states, out = run(ADVANCES)
    finally:
        levels.set_num_threads(0)
    for one, (own_states, own_out) in zip(ADVANCES, alone, strict=False):
        tokens = slice(one.q_start, one.q_start + one.n_tokens)
        assert np.array_equal(own_states[one.dst], states[one.dst])
        assert np.array_equal(own_out[tokens], out[tokens])


def test_slots_that_are_not_there_and_sizes_that_no_kernel_has_are_refused() -> None:
    weight, x = floats(4, 8), make_rows("float32", 8, 2)
    made = recurrent.Convolution(8, 4, weight.ctypes.data, has_silu=False)
    states, out = floats(4, 8, 4), result("float32", 8)
    with pytest.raises(ConfigError, match="needs 5 slots of states, and there are 4"):
        made.run(batch("float32"), states.ctypes.data, 4, x.at(0), 8, out.ctypes.data)
    with pytest.raises(ConfigError, match="tokens of the batch and slots, got 3, 2, 0, 1"):
        recurrent.StateBatch(4, Dtype.float32, [(3, 2, 0, 1)])
    with pytest.raises(ConfigError, match="float32 or bfloat16"):
        recurrent.StateBatch(4, Dtype.float16, [(0, 4, 0, 1)])
    with pytest.raises(ConfigError, match="1 to 8 inputs, got 9"):
        recurrent.Convolution(8, 9, weight.ctypes.data, has_silu=False)
    with pytest.raises(ConfigError, match="1 to 512 numbers, got 513"):
        recurrent.DeltaRule(2, 2, 513, 8, 0, 0, n_decays=1, beta_scale=1.0)
    with pytest.raises(ConfigError, match="multiple of key heads"):
        recurrent.DeltaRule(3, 2, 8, 8, 0, 0, n_decays=1, beta_scale=1.0)
    with pytest.raises(ConfigError, match="multiple of groups"):
        recurrent.Scan(3, 2, 8, 8, 0, 0, 0)
    with pytest.raises(ConfigError, match="groups divide"):
        recurrent.GatedNorm(9, 2, 0, 0, eps=0.0, gates_first=False, is_sigmoid=False, rounds=False)
