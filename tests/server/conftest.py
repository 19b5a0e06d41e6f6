"""One server for all tests that do not need one of their own."""

from __future__ import annotations

import pytest
import torch

from tests.agents.fakes import eager as eager
from tests.server.live import serving


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The server's forwards and the tests share few cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """The bundled model, served to all tests."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder) as server:
        yield server


@pytest.fixture
def live(served):
    """The bundled model, served; a test leaves nothing running."""
    yield served
    served.until(served.is_still, "the end of what a test began")


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """Fingerprints and stores of tests go to a folder of their own."""
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path_factory.getbasetemp() / "home"))


@pytest.fixture(autouse=True)
def loads_what_is_stored(eager: None) -> None:
    """What is asked for of a store comes from it: a small model may compute it sooner."""
