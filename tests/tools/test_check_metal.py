"""The script for Mac owners: on a CPU it runs the same checks, and it fails where one does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from tests.tools.scripts import TOOLS, load_script

if importlib.util.find_spec("mlx_lm") is None:
    pytest.skip("needs mlx-lm: pip install 'kvcellar[mlx]'", allow_module_level=True)

SCRIPT = TOOLS / "check_metal.py"


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("check_metal")


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)


@pytest.mark.slow
def test_the_checks_hold_on_a_cpu() -> None:
    names = ("attention_equals_numpy", "a_token_does_not_copy_its_pool", "threads_take_turns",
             "rows_come_back_bit_for_bit", "the_wired_limit_is_left_alone")  # fmt: skip
    done = run("--cpu", "--quick", *(f"--only={name}" for name in names))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == len(names)
    assert "verdict: everything that was checked holds" in done.stdout


def test_a_check_that_fails_is_a_verdict(script: Any, monkeypatch: Any, capsys: Any) -> None:
    from kvcellar.backends.mlx.cache import attention

    real = attention.mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(sys, "argv", ["check_metal", "--cpu", "--only=attention_equals_numpy"])
    monkeypatch.setattr(
        attention.mx.fast, "scaled_dot_product_attention",
        lambda *args, **options: 1.01 * real(*args, **options),
    )  # fmt: skip
    assert script.main() == 1
    assert "FAIL" in capsys.readouterr().out


def test_every_check_is_documented(script: Any) -> None:
    text = (TOOLS.parent / "docs" / "metal.md").read_text()
    for name in script.CHECKS:
        assert f"`{name}`" in text


def test_without_metal_nothing_is_claimed(script: Any) -> None:
    if script.mx.metal.is_available():
        pytest.skip("there is a GPU")
    done = run()
    assert done.returncode == 2 and "nothing was checked" in done.stdout
