"""``kvcellar bench kv-quality``: a table, JSON, what is remembered, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.models.kv_quality import KvQuality, known_quality, save_quality

pytest.importorskip("torch")

DEMO = Path(__file__).parents[2] / "src" / "kvcellar" / "models" / "demo"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Figures are remembered in a folder of the test's own."""
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "kv-quality", *args], env={"COLUMNS": "120"})


def test_a_table_shows_every_type_and_recommends_one_and_the_figures_are_remembered(
    home: Path,
) -> None:
    result = run("--tokens", "300", "--kv-dtype", "int8", "--kv-dtype", "int4")
    assert result.exit_code == 0, result.stderr
    assert "demo: 299 tokens of standard library" in result.stdout
    for name in ("float32", "int8", "int4"):
        assert f"│ {name} " in result.stdout
    assert "recommended: --kv-dtype" in result.stdout
    known = known_quality(DEMO, "int8")
    assert known is not None and known.n_tokens == 299 and known.verdict == "good"
    assert list(home.rglob("*.json"))


def test_the_object_has_the_figures_of_a_text_of_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("def roses(red):\n    return violets + blue\n" * 8)
    result = run("--text", str(text), "--kv-dtype", "k8v4", "--context", "64", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert (value["model"], value["text"], value["context"]) == ("demo", "poem.txt", 64)
    base, mixed = value["results"]
    assert (base["kv_dtype"], base["ppl_ratio"], base["same_top1"]) == ("float32", 1.0, 1.0)
    assert mixed["kv_dtype"] == "k8v4"
    assert mixed["bytes_per_token"] == 6 * 2 * ((64 + 4) + (32 + 8))
    assert 0 < mixed["kl"] < 0.1 and mixed["verdict"] in ("good", "fair", "bad")
    assert value["recommended"] in ("float32", "k8v4")


def test_a_session_with_a_bad_type_says_so_on_stderr_and_goes_on() -> None:
    save_quality(DEMO, [KvQuality("int4", 40.0, 2.0, 0.5, 0.6, 1000, 960)], "made up")
    args = ["generate", "--prompt", "import", "--max-tokens", "2", "--kv-dtype", "int4"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0
    assert "warning: kv_dtype int4 is known to be bad for 'demo'" in " ".join(result.stderr.split())
    assert "2.000 times that of float32" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kv-dtype", "int5"), "kv_dtype 'int5' is not known"),
        (("--text", "/no/such/file"), "cannot be read as UTF-8 text"),
        (("--context", "100000"), "context 100000 is more than the 4096 positions"),
        (("--tokens", "1"), "--tokens"),
        (("no/such/model",), "there is no folder"),
    ],
)
def test_wrong_input_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())
