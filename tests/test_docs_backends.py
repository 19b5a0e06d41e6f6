"""docs/backends.md: its code is a backend that is registered from outside and is conformant."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvcellar as kv
from kvcellar import errors, registry

PAGE = Path(__file__).parents[1] / "docs" / "backends.md"
MOST_LINES = 150


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The page as a module, imported from a folder of its own; unregistered at the end."""
    path = tmp_path_factory.mktemp("outside") / "toy_backend.py"
    path.write_text("\n\n".join(blocks()))
    spec = importlib.util.spec_from_file_location("toy_backend", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy_backend"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["toy_backend"], registry._registered["toy"]


def test_the_page_builds_a_backend_in_so_many_lines_of_code():
    lines = [line for block in blocks() for line in block.splitlines()]
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= MOST_LINES, len(code)


def test_its_sessions_are_made_by_its_name(toy):
    config = kv.make_config(kv.ModelCacheParams(1, 1, 8), 16)
    with kv.make_seq_session("toy", config) as session:
        assert type(session.cache) is toy.ToySeqCache
        assert session.cache.begin_step([(3, 2)]) == [0, 1]
    assert "toy" in kv.backend_names()


def test_it_refuses_what_it_does_not_store(toy):
    with pytest.raises(errors.ConfigError, match="toy stores float32, got kv_dtype 'int8'"):
        kv.make_seq_session("toy", kv.make_config(kv.ModelCacheParams(1, 1, 32), 16, "int8"))


@pytest.mark.slow
def test_it_passes_the_conformance_suite(toy):
    """Whoever writes a backend runs it so: pytest on the page's module."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", toy.__file__],
        cwd=Path(toy.__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 300, done.stdout
