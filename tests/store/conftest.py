"""Folders for tests that make thousands of files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.fakes import QUICK


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory where there is one."""
    folder = Path(tempfile.mkdtemp(dir=QUICK))
    yield folder
    shutil.rmtree(folder)
