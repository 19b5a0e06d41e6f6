"""Weights that files have in groups: numbers as the files have them, and products with them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvcellar.backends.reference.pools import from_bfloat16_bits, to_bfloat16_bits
from kvcellar.errors import ConfigError
from kvcellar.kernel import levels

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

from kvcellar.kernel import blocks
from kvcellar.kernel.attend import Dtype
from kvcellar.kernel.linear import LinearWeights

pytestmark = pytest.mark.kernel

N_IN, N_OUT = 768, 37
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
"""Bytes of a block at which its float16 numbers lie."""
PLAIN = ("F16", "BF16")
"""Types whose numbers stand by themselves; inputs are not rounded where they meet them."""


def stored(name: str, seed: int) -> np.ndarray:
    """Rows of random blocks ``[N_OUT, bytes]``, whose scales are of a usual size."""
    rng = np.random.default_rng(seed)
    if name in PLAIN:
        numbers = rng.normal(0, 0.1, (N_OUT, N_IN)).astype(np.float32)
        halves = numbers.astype(np.float16) if name == "F16" else to_bfloat16_bits(numbers)
        return halves.view(np.uint8)
    n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
    rows = rng.integers(0, 256, (N_OUT, N_IN // blocks.INPUTS[name], n_bytes), np.uint8)
    for at in SCALES.get(name, ()):
        halves = rng.normal(0, 0.01, rows.shape[:2]).astype(np.float16)
        rows[..., at : at + 2] = halves[..., None].view(np.uint8)
    if name == "MXFP4":
        rows[..., 0] = rng.integers(118, 126, rows.shape[:2])
    return rows.reshape(N_OUT, -1)


def plain(name: str, rows: np.ndarray) -> np.ndarray:
    """Weights by the format's own package."""
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[name])


class Affine:
    """Random affine weights, of which none is exact in fewer bits than float32."""

    def __init__(self, bits: int, group: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.form, n = (bits, group), (N_OUT, N_IN // group)
        self.numbers = rng.integers(0, 1 << bits, (N_OUT, N_IN), np.uint8)
        self.scales = rng.normal(0, 0.01, n).astype(np.float32)
        self.minima = (-self.scales * rng.integers(0, 1 << bits, n)).astype(np.float32)

    def plain(self) -> np.ndarray:
        """Weights by NumPy, in float32."""
        scales, minima = (np.repeat(x, self.form[1], -1) for x in (self.scales, self.minima))
        return scales * self.numbers.astype(np.float32) + minima


FORMS = [
    *(name for name in blocks.INPUTS if name not in PLAIN),
    *((bits, group) for bits in (4, 8) for group in (32, 64, 128, 384, N_IN)),
]
"""Names of blocks, and bits and groups of affine weights."""


def made(form: str | tuple[int, int], seed: int) -> tuple[Placed, np.ndarray]:
    """Weights of a form as they are placed, and in float32."""
    if isinstance(form, str):
        rows = stored(form, seed)
        return Placed(form, rows), plain(form, rows)
    affine = Affine(*form, seed)
    return Placed(form, affine), affine.plain()


class Placed:
    """Weights, with the memory that they lie in."""

    weights: LinearWeights

    def __init__(self, form: str | tuple[int, int], given: np.ndarray | Affine) -> None:
        if isinstance(given, Affine):
            n_data, n_beside = blocks.affine_sizes(*given.form, N_IN, N_OUT)
        else:
            kind = blocks.block_type(str(form))
            n_stored, n_data, n_beside = blocks.block_sizes(kind, N_IN, N_OUT)
            assert n_stored == given.size
        self.data, self.beside = np.empty(n_data, np.uint8), np.empty(n_beside, np.uint8)
        to = self.data.ctypes.data, self.beside.ctypes.data
        if isinstance(given, Affine):
            of = [part.ctypes.data for part in (given.numbers, given.scales, given.minima)]
            blocks.place_affine(*given.form, *of, N_IN, N_OUT, *to)
            self.weights = blocks.affine_weights(*given.form, N_IN, N_OUT, *to)
        else:
            blocks.place_blocks(kind, given.ctypes.data, N_IN, N_OUT, *to)
            self.weights = blocks.block_weights(kind, N_IN, N_OUT, *to)

    def rows(self) -> np.ndarray:
        outputs, found = np.arange(N_OUT), np.empty((N_OUT, N_IN), np.float32)
        self.weights.gather(outputs.ctypes.data, N_OUT, Dtype.float32, found.ctypes.data)
        return found

    def multiply(self, x: np.ndarray) -> np.ndarray:
        out = np.empty((len(x), N_OUT), np.float32)
        dtype = Dtype.float32 if x.dtype == np.float32 else Dtype.bfloat16
        self.weights.linear(x.ctypes.data, len(x), dtype, out.ctypes.data, Dtype.float32)
        return out


@pytest.fixture(params=levels.levels(), ids=lambda found: found.name)
def level(request: pytest.FixtureRequest):
    """Use each level that this machine has, one after the other."""
    before = levels.level()
    levels.set_level(request.param)
    yield
    levels.set_level(before)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", blocks.INPUTS)
def test_weights_are_the_files_bit_for_bit(name: str) -> None:
    rows = stored(name, 1)
    if name == "MXFP4":
        rows.reshape(-1, 17)[:4, 0] = 0, 1, 2, 251
    found = Placed(name, rows).rows()
    assert np.array_equal(found.view(np.uint32), plain(name, rows).view(np.uint32))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("form", FORMS[-10:], ids=str)
def test_affine_weights_are_a_product_and_a_sum_in_float32(form: tuple[int, int]) -> None:
    placed, weights = made(form, 1)
    assert np.array_equal(placed.rows().view(np.uint32), weights.view(np.uint32))


@pytest.mark.parametrize("form", [(3, 32), (4, 48), (8, 16), (4, 512)], ids=str)
def test_affine_weights_of_other_forms_are_refused(form: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        blocks.affine_sizes(*form, N_IN, N_OUT)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 3, 11])
def test_products_differ_by_the_rounding_of_inputs_alone(
    form: str | tuple[int, int], n_tokens: int
) -> None:
    x = np.random.default_rng(3).normal(0, 1, (n_tokens, N_IN)).astype(np.float32)
    x[:, ::50] *= 30
    in_bf16 = to_bfloat16_bits(x)
    placed, weights = made(form, 2)
    weights = weights.astype(np.float64)
    for given, numbers in ((x, x), (in_bf16, from_bfloat16_bits(in_bf16))):
        groups = numbers.reshape(n_tokens, -1, 32)
        steps = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
        rounded = (np.rint(groups / steps) * steps).reshape(n_tokens, N_IN).astype(np.float64)
        got = placed.multiply(given)
        # A number that lies between two steps may be rounded to the other one.
        between = np.abs(np.abs(groups / steps % 1) - 0.5) < 1e-4
        doubt = (between * steps).reshape(n_tokens, N_IN) @ np.abs(weights).T
        size = np.abs(rounded) @ np.abs(weights).T
        assert np.all(np.abs(got - rounded @ weights.T) <= doubt + 4e-6 * size)
        bound = np.repeat(steps / 2, 32, -1).reshape(n_tokens, N_IN) @ np.abs(weights).T
        assert np.all(np.abs(got - numbers @ weights.T) <= 1.001 * bound + 4e-6 * size)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("n_tokens", [1, 3, 11])
def test_plain_numbers_meet_inputs_as_they_are(name: str, n_tokens: int) -> None:
    placed, weights = made(name, 2)
    x = np.random.default_rng(3).normal(0, 1, (n_tokens, N_IN)).astype(np.float32)
    in_bf16 = to_bfloat16_bits(x)
    for given, numbers in ((x, x), (in_bf16, from_bfloat16_bits(in_bf16))):
        size = np.abs(numbers) @ np.abs(weights).T.astype(np.float64)
        off = placed.multiply(given) - numbers.astype(np.float64) @ weights.T
        assert np.all(np.abs(off) <= 4e-6 * size)


@pytest.mark.usefixtures("level")
def test_a_tokens_result_does_not_depend_on_others() -> None:
    x = np.random.default_rng(4).normal(0, 1, (13, N_IN)).astype(np.float32)
    for form in FORMS:
        placed, _ = made(form, 5)
        alone = np.concatenate([placed.multiply(row[None]) for row in x])
        assert np.array_equal(placed.multiply(x), alone), form
