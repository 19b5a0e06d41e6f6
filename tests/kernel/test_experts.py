"""Mixtures of experts in the CPU kernel, every level against numbers worked out one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvcellar.kernel import levels

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from kvcellar.kernel import experts, linear
from kvcellar.kernel.attend import Dtype

pytestmark = pytest.mark.kernel

N_EXPERTS, HIDDEN, INNER, N_TOKENS, N_CHOSEN = 5, 128, 64, 7, 3
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FORMATS = ("bf16", "coded", "int8", "int4", "mxfp4")


@pytest.fixture(params=levels.levels(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> Iterator[levels.Level]:
    before = levels.level()
    levels.set_level(request.param)
    yield request.param
    levels.set_level(before)


def bf16(x: np.ndarray) -> np.ndarray:
    """Return numbers rounded to bfloat16, as float32."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def as_bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of numbers that are bfloat16."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


class Layer:
    """A linear layer of all experts, and the numbers that its weights stand for."""

    def __init__(self, form: str, n_in: int, n_out: int, seed: int, has_bias: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.form, self.n_in, self.n_out = form, n_in, n_out
        self.numbers = bf16(rng.standard_normal((N_EXPERTS, n_out, n_in)) / n_in**0.5)
        self.bias = rng.standard_normal((N_EXPERTS, n_out)).astype(np.float32) * has_bias
        self.held: list[np.ndarray] = []
        data, beside = self._mxfp4(rng) if form == "mxfp4" else self._written()
        self.held += [data, beside]
        self.data_bytes = data.nbytes + (0 if form == "coded" else beside.nbytes)
        weights = linear.LinearWeights(
            linear.WeightFormat[form], n_in, n_out, data.ctypes.data, beside.ctypes.data
        )
        self.native = experts.ExpertLayer(
            weights, N_EXPERTS, self.bias.ctypes.data if has_bias else 0
        )

    def _written(self) -> tuple[np.ndarray, np.ndarray]:
        form, n_in, n_out, rows = self.form, self.n_in, self.n_out, -(-self.n_out // 16) * 16
        if form == "bf16":
            return as_bits(self.numbers), np.zeros(0)
        if form == "coded":
            size = rows // 16 * (320 + 24 * n_in)
            data, escapes = np.empty((N_EXPERTS, size), np.uint8), b""
            for expert, bits in enumerate(as_bits(self.numbers)):
                at = bits.ctypes.data, n_in, n_out, data[expert].ctypes.data
                escapes += linear.code(*at, len(escapes) // 8)
            return data, np.frombuffer(escapes or bytes(8), np.uint8).copy()
        bits, shared = (8, 128) if form == "int8" else (4, 32)
        data = np.empty((N_EXPERTS, rows * n_in * bits // 8), np.uint8)
        scales = np.empty((N_EXPERTS, rows // 16, -(-n_in // shared), 16), np.float16)
        kind = linear.WeightFormat[form]
        for expert, plain in enumerate(self.numbers):
            to = data[expert].ctypes.data, scales[expert].ctypes.data
            linear.pack(plain.ctypes.data, Dtype.float32, kind, n_in, n_out, *to)
            of = linear.LinearWeights(kind, n_in, n_out, *to)
            outputs = np.arange(n_out)
            of.gather(outputs.ctypes.data, n_out, Dtype.float32, plain.ctypes.data)
        return data, scales

    def _mxfp4(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        n_in, n_out, rows = self.n_in, self.n_out, -(-self.n_out // 16) * 16
        halves = rng.integers(0, 16, (N_EXPERTS, n_out, n_in), np.uint8)
        steps = rng.integers(121, 126, (N_EXPERTS, n_out, n_in // 32), np.uint8)
        self.numbers = NUMBERS[halves] * 2.0 ** np.repeat(steps.astype(np.float32) - 127, 32, -1)
        blocks = halves[..., ::2] | halves[..., 1::2] << 4
        data = np.empty((N_EXPERTS, rows * n_in // 2), np.uint8)
        beside = np.empty((N_EXPERTS, rows * n_in // 32), np.uint8)
        for expert in range(N_EXPERTS):
            at = blocks[expert].ctypes.data, steps[expert].ctypes.data, n_in, n_out
            linear.place_mxfp4(*at, data[expert].ctypes.data, beside[expert].ctypes.data)
        return data, beside


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """Return inputs as packed weights meet them: of each 32 the largest is 127 steps."""
    if form in ("bf16", "coded"):
        return x
    groups = x.reshape(*x.shape[:-1], -1, 32)
    most = np.abs(groups).max(-1, keepdims=True)
    steps = np.rint(groups * (127 / most).astype(np.float32))
    return (steps * (most / 127)).reshape(x.shape).astype(np.float32)


def choose(n_tokens: int, n_chosen: int = N_CHOSEN) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n_tokens)
    chosen = np.stack([rng.permutation(N_EXPERTS)[:n_chosen] for _ in range(n_tokens)])
    return chosen.astype(np.int64), rng.random((n_tokens, n_chosen), np.float32)


def run(
    up: Layer,
    down: Layer,
    gate: experts.Gate,
    x: np.ndarray,
    chosen: np.ndarray,
    shares: np.ndarray,
) -> np.ndarray:
    out = np.empty((len(x), down.n_out), np.float32)
    made = experts.Experts(up.native, down.native, gate)
    at = x.ctypes.data, len(x), chosen.ctypes.data, shares.ctypes.data, chosen.shape[1]
    made.run(*at, Dtype.float32, out.ctypes.data)
    return out


def expected(
    up: Layer, down: Layer, x: np.ndarray, chosen: np.ndarray, shares: np.ndarray
) -> np.ndarray:
    """Work a mixture with SiLU out, token by token."""
    out = np.zeros((len(x), down.n_out))
    for token, (row, of_token) in enumerate(zip(rounded(x, up.form), chosen, strict=True)):
        for expert, share in zip(of_token, shares[token], strict=True):
            if expert >= N_EXPERTS:
                continue
            both = up.numbers[expert].astype(np.float64) @ row + up.bias[expert]
            gates, ups = np.split(both, 2)
            gated = (gates / (1 + np.exp(-gates)) * ups).astype(np.float32)
            result = down.numbers[expert].astype(np.float64) @ rounded(gated, down.form)
            out[token] += share * (result + down.bias[expert])
    return out


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("n_tokens", [1, N_TOKENS, 40])
def test_every_level_computes_what_the_numbers_of_the_weights_say(
    level: levels.Level, form: str, n_tokens: int
) -> None:
    inner = 128 if form == "coded" else INNER
    up, down = Layer(form, HIDDEN, 2 * inner, 1, True), Layer(form, inner, HIDDEN - 3, 2, True)
    x = np.random.default_rng(3).standard_normal((n_tokens, HIDDEN), np.float32)
    chosen, shares = choose(n_tokens)
    chosen[0, 1] = N_EXPERTS  # none
    out = run(up, down, experts.Gate(), x, chosen, shares)
    want = expected(up, down, x, chosen, shares)
    # Where a gated number lies between two steps, the other one may be taken.
    most = 2e-5 if form in ("bf16", "coded") else 2e-3
    assert np.abs(out - want).max() < most * np.abs(want).max()


@pytest.mark.parametrize("form", ["int8", "int4", "mxfp4", "coded"])
def test_a_token_gets_the_same_whatever_others_come_with_it(level: levels.Level, form: str) -> None:
    up, down = Layer(form, HIDDEN, 256, 1), Layer(form, 128, HIDDEN, 2)
    x = np.random.default_rng(3).standard_normal((4, HIDDEN), np.float32)
    chosen, shares = choose(4)
    together = run(up, down, experts.Gate(), x, chosen, shares)
    for t in range(4):
        one = slice(t, t + 1)
        alone = run(up, down, experts.Gate(), x[one].copy(), chosen[one], shares[one])
        assert np.array_equal(alone[0], together[t])


@pytest.mark.parametrize("form", FORMATS)
def test_each_expert_is_read_once_for_all_tokens_that_chose_it(
    level: levels.Level, form: str
) -> None:
    up, down = Layer(form, HIDDEN, 256, 1), Layer(form, 128, HIDDEN, 2)
    x = np.random.default_rng(3).standard_normal((4, HIDDEN), np.float32)
    chosen = np.array([[0, 2], [2, 0], [2, 4], [4, 2]])
    before = experts.expert_counts()
    run(up, down, experts.Gate(), x, chosen, np.ones((4, 2), np.float32))
    read, asked = np.subtract(experts.expert_counts(), before)
    assert read == asked == (up.data_bytes + down.data_bytes) * 3 // N_EXPERTS


def test_a_mixture_of_many_tokens_is_run_in_pieces_of_the_same_results() -> None:
    up, down = Layer("int8", HIDDEN, 64, 1), Layer("int8", 32, HIDDEN, 2)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2100, HIDDEN), np.float32)
    rows = rng.standard_normal((N_EXPERTS, HIDDEN), np.float32)
    weights = linear.LinearWeights(linear.WeightFormat.f32, HIDDEN, N_EXPERTS, rows.ctypes.data, 0)
    made: dict[str, bool] = {"is_sigmoid": False, "is_normalised": True}
    made |= {"rounds_logits": False, "rounds_shares": False}
    router = experts.Router(weights, 2, scale=1.0, bias=0, extra=0, **made)
    mixture = experts.Mixture(router, experts.Experts(up.native, down.native, experts.Gate()))
    out = np.zeros((2, *x.shape), np.float32)
    mixture.run(x.ctypes.data, len(x), Dtype.float32, out[0].ctypes.data)
    for at in range(0, len(x), 700):
        to = out[1, at:].ctypes.data
        mixture.run(x[at:].ctypes.data, 700, Dtype.float32, to)
    assert np.array_equal(out[0], out[1]) and np.abs(out[0][-1]).max() > 0.01


def test_gates_are_those_of_torch(level: levels.Level) -> None:
    up, down = Layer("bf16", HIDDEN, 2 * INNER, 1), Layer("bf16", INNER, HIDDEN, 2)
    up.numbers *= 8
    up.held[0][:] = as_bits(up.numbers)
    x = np.random.default_rng(3).standard_normal((2, HIDDEN), np.float32)
    chosen, shares = choose(2, 1)

    def gated(between: object) -> np.ndarray:
        assert callable(between)
        rows = [np.split(up.numbers[c[0]] @ row, 2) for row, c in zip(x, chosen, strict=True)]
        found = [down.numbers[c[0]] @ between(*row) for row, c in zip(rows, chosen, strict=True)]
        return np.array(found) * shares

    def clamped(gate: np.ndarray, ups: np.ndarray) -> np.ndarray:
        gate, ups = np.minimum(gate, 7), np.clip(ups, -7, 7)
        return (ups + 1) * gate / (1 + np.exp(-1.702 * gate))

    def gelu(gate: np.ndarray, ups: np.ndarray) -> np.ndarray:
        inside = np.tanh(0.7978845608 * (gate + 0.044715 * gate**3))
        return 0.5 * gate * (1 + inside) * ups

    for between, gate in (
        (clamped, experts.Gate(1.702, 0, 1, 7)),
        (gelu, experts.Gate(2 * 0.7978845608, 2 * 0.7978845608 * 0.044715)),
    ):
        want = gated(between)
        out = run(up, down, gate, x, chosen, shares)
        assert np.abs(out - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_one_layer_are_those_of_each_expert_that_a_row_chose(form: str) -> None:
    layer = Layer(form, HIDDEN, 37, 1, True)
    x = np.random.default_rng(3).standard_normal((3, HIDDEN), np.float32)
    chosen, _ = choose(3, 2)
    chosen[1, 1] = -1
    out = np.full((3, 2, 37), np.nan, np.float32)
    at = x.ctypes.data, 3, chosen.ctypes.data, 2
    layer.native.linear(*at, Dtype.float32, out.ctypes.data)
    for t, c in np.ndindex(3, 2):
        expert = chosen[t, c]
        want = layer.numbers[expert] @ rounded(x, form)[t] + layer.bias[expert]
        assert np.allclose(out[t, c], 0 if expert < 0 else want, atol=1e-4)


def test_exponents_of_mxfp4_are_powers_of_two_and_nothing_is_rounded() -> None:
    layer = Layer("mxfp4", 64, 20, 5)
    data, beside = layer.held
    kind = linear.WeightFormat.mxfp4
    weights = linear.LinearWeights(kind, 64, 20, data[3].ctypes.data, beside[3].ctypes.data)
    found, outputs = np.empty((20, 64), np.float32), np.arange(20)
    weights.gather(outputs.ctypes.data, 20, Dtype.float32, found.ctypes.data)
    assert np.array_equal(found, layer.numbers[3])
    short = np.empty((20, 64), np.uint16)
    weights.unpack(0, 2, short.ctypes.data)
    assert np.array_equal(short, as_bits(layer.numbers[3]))


@pytest.mark.parametrize("n_best", [1, 2])
@pytest.mark.parametrize("is_sigmoid", [True, False])
def test_a_token_chooses_among_the_experts_of_its_best_groups(
    n_best: int, is_sigmoid: bool
) -> None:
    n_groups, in_each, n_kept, n_chosen = 4, 3, 2, 4
    n_experts, n_tokens = n_groups * in_each, 40
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n_tokens, HIDDEN), np.float32)
    rows = rng.standard_normal((n_experts, HIDDEN), np.float32) / 8
    extra = rng.standard_normal(n_experts).astype(np.float32) / 4
    weights = linear.LinearWeights(linear.WeightFormat.f32, HIDDEN, n_experts, rows.ctypes.data, 0)
    router = experts.Router(
        weights,
        n_chosen,
        is_sigmoid=is_sigmoid,
        is_normalised=False,
        scale=1.0,
        bias=0,
        extra=extra.ctypes.data,
        rounds_logits=False,
        rounds_shares=False,
        groups=(n_groups, n_kept, n_best),
    )
    chosen = np.zeros((n_tokens, n_chosen), np.int64)
    shares = np.zeros((n_tokens, n_chosen), np.float32)
    router.choose(x.ctypes.data, n_tokens, Dtype.float32, chosen.ctypes.data, shares.ctypes.data)
    n_otherwise = 0
    for token, row in enumerate(x @ rows.T):
        scores = 1 / (1 + np.exp(-row)) if is_sigmoid else np.exp(row) / np.exp(row).sum()
        ranked = scores + extra
        groups = [ranked[g * in_each : (g + 1) * in_each] for g in range(n_groups)]
        worth = [sum(sorted(one)[-n_best:]) for one in groups]
        kept = sorted(range(n_groups), key=lambda g: -worth[g])[:n_kept]
        free = [e for e in range(n_experts) if e // in_each in kept]
        want = sorted(free, key=lambda e: -ranked[e])[:n_chosen]
        assert list(chosen[token]) == want
        assert np.allclose(shares[token], scores[want], atol=1e-6)
        n_otherwise += set(want) != set(np.argsort(-ranked)[:n_chosen])
    assert n_otherwise > 5, "groups change what is chosen"


@pytest.mark.parametrize(
    "groups", [(3, 1, 1), (2, 3, 1), (2, 0, 1), (2, 1, 4), (0, 0, 0), (6, 1, 1)]
)
def test_groups_that_do_not_divide_the_experts_are_refused(groups: tuple[int, int, int]) -> None:
    rows = np.zeros((6, HIDDEN), np.float32)
    weights = linear.LinearWeights(linear.WeightFormat.f32, HIDDEN, 6, rows.ctypes.data, 0)
    made = dict.fromkeys(("is_sigmoid", "is_normalised", "rounds_logits", "rounds_shares"), False)
    fields = {"scale": 1.0, "bias": 0, "extra": 0, "groups": groups}
    with pytest.raises(ValueError, match="groups"):
        experts.Router(weights, 3, **made, **fields)
