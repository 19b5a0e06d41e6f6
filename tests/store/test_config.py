"""Limits of a store: what cannot be is refused by name, with what was given."""

from __future__ import annotations

import pytest

from kvcellar.errors import ConfigError
from kvcellar.store import StoreConfig


def test_a_limit_may_be_nothing_and_no_less() -> None:
    for name in ("warm_bytes", "cold_bytes", "queue_bytes", "lock_timeout_s"):
        assert getattr(StoreConfig(**{name: 0}), name) == 0
        with pytest.raises(ConfigError, match=f"^{name} must be 0 or more, got -1$"):
            StoreConfig(**{name: -1})
    assert StoreConfig(max_boundaries=1).max_boundaries == 1
    with pytest.raises(ConfigError, match=r"^max_boundaries must be at least 1, got 0$"):
        StoreConfig(max_boundaries=0)


@pytest.mark.parametrize("name", ["warm_precision", "cold_precision"])
def test_a_precision_is_one_of_two(name: str) -> None:
    for precision in ("exact", "int8"):
        assert getattr(StoreConfig(**{name: precision}), name) == precision
    with pytest.raises(ConfigError, match=r"'int4' is not known; choose \('exact', 'int8'\)"):
        StoreConfig(**{name: "int4"})
