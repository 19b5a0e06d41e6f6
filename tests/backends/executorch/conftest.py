"""One folder for all workers of a run: programs are exported and the native part built once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from filelock import FileLock

from kvcellar.models import LoadedModel, load_model
from tests.backends.executorch.programs import checkpoint_of, export_once
from tests.models import players
from tests.models.players import Oracle


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from torch's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of transformers to this here."""
    monkeypatch.setattr(players, "TOLERANCE", 1e-4)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run, the same in all of its workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "executorch"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def home(shared: Path) -> Path:
    """The home of this run, with the native part in it."""
    from kvcellar.backends.executorch import native

    folder = shared / "home"
    with FileLock(shared / "native.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_HOME", str(folder))
        native.library()
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here touches the user's own folder."""
    monkeypatch.setenv("KVCELLAR_HOME", str(home))


@pytest.fixture(scope="session")
def exported(shared: Path, home: Path) -> Iterator[Callable[..., Path]]:
    """(name of a tiny model, scheme) -> its program, which must be the same file at the end."""
    digests: dict[Path, str] = {}

    @functools.cache
    def program(family: str, quantize: str = "none") -> Path:
        path = export_once(shared, family, quantize)
        digests[path] = digest_of(path)
        return path

    yield program
    assert {path: digest_of(path) for path in digests} == digests, "a program was written to"


@pytest.fixture(scope="session")
def checkpoint(shared: Path) -> Callable[[str], Path]:
    """Name of a tiny model -> the checkpoint that it is exported from."""
    return functools.partial(checkpoint_of, shared)


@pytest.fixture(scope="session")
def loaded(exported: Callable[..., Path]) -> Callable[..., LoadedModel]:
    """(name of a tiny model, scheme) -> its program, loaded."""
    return functools.cache(
        lambda family, quantize="none": load_model(exported(family, quantize), backend="executorch")
    )


@pytest.fixture(scope="session")
def oracle(shared: Path) -> Callable[[str], Oracle]:
    """Name of a tiny model -> what transformers makes of it."""
    return functools.cache(lambda family: Oracle(checkpoint_of(shared, family)))


def digest_of(path: Path) -> Any:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
