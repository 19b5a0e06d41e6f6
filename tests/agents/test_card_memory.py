"""A limit on a card: models, KV and forwards are inside of it, and the store is in main memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcellar.agents import Hosting
from kvcellar.errors import ConfigError
from kvcellar.hosting import loader
from kvcellar.hosting.loader import limit_of
from kvcellar.hosting.memory import budgets_of_host
from kvcellar.models import LoadOptions
from kvcellar.store import StoreConfig

torch = pytest.importorskip("torch")

from kvcellar.backends.torch.load.card import CONTEXT_BYTES, CardMemory, card_memory  # noqa: E402

GB = 10**9


class FakeCuda:
    """Functions of ``torch.cuda`` that tell of a card's memory."""

    def __init__(self) -> None:
        self.reserved = 0
        self.fractions: dict[int, float] = {}

    def current_device(self) -> int:
        return 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 20 * GB, 24 * GB

    def memory_reserved(self, index: int) -> int:
        return self.reserved

    def set_per_process_memory_fraction(self, fraction: float, index: int) -> None:
        self.fractions[index] = fraction


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def memory(options: LoadOptions) -> Any:
        return None if options.device is None else CardMemory(torch.device(options.device), fake)

    monkeypatch.setattr(loader, "accelerator_memory", memory)
    return fake


def test_what_torch_may_take_is_the_limit_without_what_it_does_not_count() -> None:
    fake = FakeCuda()
    card = CardMemory(torch.device("cuda:1"), fake)
    fake.reserved = 2 * GB
    assert card.held_bytes == 2 * GB + CONTEXT_BYTES
    card.bound(12 * GB)
    assert fake.fractions == {1: (12 * GB - CONTEXT_BYTES) / (24 * GB)}
    card.bound(100)
    assert fake.fractions[1] == 0.0


def test_a_device_that_is_not_there_or_has_no_memory_of_its_own_tells_none() -> None:
    assert card_memory("cpu") is None
    if not torch.cuda.is_available():
        assert card_memory("cuda:0") is None


def test_models_have_the_card_and_the_store_has_main_memory(cuda: FakeCuda) -> None:
    asked = LoadOptions("demo", device="cuda")
    made = Hosting.within(limit_of("8GB", asked), asked)
    assert cuda.fractions.keys() == {0}, "what is beyond fails, whoever asks for it"
    assert made.plan is not None
    assert made.plan.models_bytes == 8 * GB - CONTEXT_BYTES
    assert made.store == StoreConfig()
    on_cpu = Hosting.within(8 * GB, LoadOptions("demo"))
    assert on_cpu.plan is not None and on_cpu.store.warm_bytes < StoreConfig().warm_bytes


def test_a_forward_on_a_card_has_more_set_aside(cuda: FakeCuda) -> None:
    asked = LoadOptions("demo", memory_bytes=4 * GB, weights="none")
    there, here = budgets_of_host(replace(asked, device="cuda"))[0], budgets_of_host(asked)[0]
    assert there.base_bytes == here.base_bytes
    assert there.reserve_bytes > here.reserve_bytes


def test_a_limit_beyond_the_card_or_below_its_runtime_is_refused(cuda: FakeCuda) -> None:
    asked = LoadOptions("demo", device="cuda")
    with pytest.raises(ConfigError, match=r"more than the card's 24.00 GB"):
        Hosting.within(25 * GB, asked)
    with pytest.raises(ConfigError, match=r"of the card besides; give at least "):
        Hosting.within(CONTEXT_BYTES, asked).check("demo")


def test_a_device_whose_memory_nobody_knows_cannot_be_bounded(monkeypatch) -> None:
    monkeypatch.setattr(loader, "accelerator_memory", lambda _: None)
    with pytest.raises(ConfigError, match="KV on 'mps' is neither"):
        limit_of("8GB", LoadOptions("demo", device="mps"))
