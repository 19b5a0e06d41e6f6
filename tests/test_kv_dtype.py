"""Names of storage types: what they mean, what a row costs, what is refused."""

from __future__ import annotations

import pytest

from kvcellar import LayerGroup, ModelCacheParams, make_config
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import KV_DTYPES, SideDtype, parse_kv_dtype


@pytest.mark.parametrize("name", KV_DTYPES)
def test_one_name_says_both_sides(name: str) -> None:
    kv = parse_kv_dtype(name)
    assert kv.k == kv.v == SideDtype(name)
    assert kv.is_quantised == name.startswith("int")


def test_k_and_v_are_chosen_separately() -> None:
    kv = parse_kv_dtype("k8v4:g32")
    assert kv.k == SideDtype("int8", 32) and kv.v == SideDtype("int4", 32)
    kv = parse_kv_dtype("k4v16:rot")
    assert kv.k == SideDtype("int4", None, True) and kv.v == SideDtype("bfloat16")
    assert parse_kv_dtype("k32v8:g128").k == SideDtype("float32")


def test_the_ends_of_a_history_can_stay_exact() -> None:
    kv = parse_kv_dtype("int4:first4:g64:last64")
    assert (kv.exact_first, kv.exact_last) == (4, 64)
    assert kv.k == kv.v == SideDtype("int4", 64)
    assert (parse_kv_dtype("k8v32:last7").exact_first, parse_kv_dtype("int8").exact_last) == (0, 0)


@pytest.mark.parametrize(
    "name",
    ["int3", "", "k8", "k8v5", "k8v8v8", "int8:", "int8:g16", "int8:g32:g64", "int4:rot:rot",
     "int4:32", "int4:last0", "int4:last9999", "int4:first4:first5", "int4:last",
     "INT8", "k-8v4", "int4 "],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match="is not known; choose one of float32, bfloat16"):
        parse_kv_dtype(name)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="float type, which has none"):
        parse_kv_dtype("bfloat16:g32")
    with pytest.raises(ConfigError, match="float type, which has none"):
        parse_kv_dtype("fp8:rot")
    with pytest.raises(ConfigError, match="which only a quantised K needs"):
        parse_kv_dtype("k16v4:rot")


@pytest.mark.parametrize(
    ("name", "dim", "n_bytes"),
    [
        ("float32", 64, 256),
        ("bfloat16", 64, 128),
        ("fp8", 64, 64),
        ("int8", 64, 64 + 4),  # one group of 64
        ("int8", 128, 128 + 2 * 4),
        ("int8:g32", 64, 64 + 2 * 4),
        ("int8:g128", 128, 128 + 4),
        ("int8", 96, 96 + 3 * 4),  # 64 does not divide it, 32 does
        ("int8", 80, 80 + 4),  # neither does: the row is one group
        ("int4", 64, 32 + 2 * 4),
        ("int4:g64", 64, 32 + 4),
        ("int4", 7, 4 + 4),
    ],
)
def test_a_row_costs_its_numbers_and_four_bytes_a_group(name: str, dim: int, n_bytes: int) -> None:
    assert parse_kv_dtype(name).k.row_bytes(dim) == n_bytes


def test_a_cell_costs_the_rows_of_all_heads_and_layers_of_its_group() -> None:
    group = LayerGroup((0, 2, 5), 4, 128, 64)
    assert group.cell_bytes(parse_kv_dtype("k8v4")) == 3 * 4 * ((128 + 8) + (32 + 8))
    assert group.cell_bytes(parse_kv_dtype("float16")) == 3 * 4 * 2 * (128 + 64)


def test_a_group_size_that_does_not_divide_the_row_is_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match=r"groups of 128 do not divide a row of 96.*choose 32"):
        make_config(ModelCacheParams(1, 1, 96), 8, "int8:g128")
    with pytest.raises(ConfigError, match=r"groups of 64 do not divide a row of 80 numbers; leave"):
        make_config(ModelCacheParams(1, 1, 128, 80), 8, "k16v4:g64")
