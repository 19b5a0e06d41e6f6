"""Commands that say no more on a busy machine than on a quiet one."""

from __future__ import annotations

import pytest

from kvcellar.cli.common import terminal
from tests.agents.fakes import eager as eager


@pytest.fixture(autouse=True)
def stages_take_no_lines(monkeypatch):
    """A slow stage is told in a line of its own; these tests ask what else is said."""
    monkeypatch.setattr(terminal, "LINES_S", 3600.0)
