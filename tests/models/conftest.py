"""Tiny checkpoints of every family, loaded once, and transformers itself as the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar.models import LoadedModel, load_model
from tests.models.players import Oracle
from tests.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: Any) -> Callable[[str], Path]:
    """Name of a tiny checkpoint -> its folder; not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    return functools.cache(lambda name: make_checkpoint(name, root / name))


@pytest.fixture(scope="session")
def loaded(checkpoint: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """Name of a tiny checkpoint, and who runs it -> the model, loaded by us."""
    return functools.cache(
        lambda name, backend="torch": load_model(checkpoint(name), backend=backend)
    )


@pytest.fixture(scope="session")
def oracle(checkpoint: Callable[[str], Path]) -> Callable[[str], Oracle]:
    """Name of a tiny checkpoint -> what transformers makes of it."""
    return functools.cache(lambda name: Oracle(checkpoint(name)))
