"""``kvcellar bench kv-quality``: a table, JSON, what is remembered, and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvcellar.cli import app
from kvcellar.cli.models.bench import read_text
from kvcellar.kernel import levels
from kvcellar.models.kv_quality import (
    KvQuality,
    WeightsQuality,
    known_quality,
    known_weights_quality,
    recommended,
    save_quality,
    save_weights_quality,
)

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
    assert "demo: 299 tokens of Python's standard library" in result.stdout
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
    assert (base["own_ppl_ratio"], base["own_same_top1"]) == (1.0, 1.0), "it computes in float32"
    assert (base["kv_dtype"], base["ppl_ratio"], base["same_top1"]) == ("float32", 1.0, 1.0)
    assert mixed["kv_dtype"] == "k8v4"
    assert mixed["bytes_per_token"] == 6 * 2 * ((64 + 4) + (32 + 8))
    assert 0 < mixed["kl"] < 0.1 and mixed["verdict"] in ("good", "fair", "bad")
    assert value["recommended"] in ("float32", "k8v4")


def test_several_texts_are_told_as_ranges(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.py", "b.py")]
    files[0].write_text("def roses(red):\n    return violets + blue\n" * 8)
    files[1].write_text("import os\nfor name in os.listdir():\n    print(name)\n" * 8)
    asked = [part for file in files for part in ("--text", str(file))]
    result = run(*asked, "--kv-dtype", "int4", "--context", "64")
    assert result.exit_code == 0, result.stderr
    assert "of a.py, b.py in pieces of 64" in result.stdout
    assert re.search(r"int4 .* \d\.\d{4} to \d\.\d{4} ", result.stdout), result.stdout
    known = known_quality(DEMO, "int4")
    assert known is not None and known.ppl_ratios is not None
    assert known.ppl_ratio == known.ppl_ratios[1] > known.ppl_ratios[0]
    assert known.n_texts == 2


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


# What a model rounds itself -----------------------------------------------------------------------


def of(name: str, ratio: float, same: float, n_bytes: int, own: float = 1.0) -> KvQuality:
    return KvQuality(name, 20.0 * ratio, ratio, 0.002, same, 500, n_bytes, own_same_top1=own)


def test_float32_is_not_advised_for_a_model_that_computes_in_bfloat16() -> None:
    """Measured with SmolLM2 135M: what its own type loses is its own rounding."""
    rows = [
        of("float32", 1.0, 1.0, 46080, own=0.965),
        of("bfloat16", 1.0, 0.965, 23040, own=0.965),
        of("int4", 1.1, 0.80, 7200, own=0.965),
    ]
    assert [row.verdict for row in rows] == ["good", "good", "bad"]
    assert recommended(rows, "bfloat16").kv_dtype == "bfloat16"
    rows.append(of("int8", 1.001, 0.93, 12240, own=0.965))
    assert rows[-1].verdict == "good", "as far from float32 as what loses nothing"
    assert recommended(rows, "bfloat16").kv_dtype == "int8"
    # A model in float32 rounds nothing: there the same figures are a loss.
    assert of("int8", 1.001, 0.93, 12240).verdict == "fair"
    plain = [of("float32", 1.0, 1.0, 46080), of("bfloat16", 1.0, 0.93, 23040)]
    # A novel through the blocks of its file: nothing is lost that shows, and int4 is bad.
    read = [
        of("float32", 1.0, 1.0, 46080),
        of("bfloat16", 1.0002, 0.955, 23040),
        of("int8", 0.9969, 0.9536, 12240),
        of("k8v4", 1.0022, 0.9453, 9720),
        of("int4", 1.0288, 0.8583, 7200),
    ]
    assert [row.verdict for row in read] == ["good"] * 4 + ["bad"]
    assert recommended(read, "float32").kv_dtype == "k8v4"
    assert recommended(plain, "float32").kv_dtype == "float32"


def test_a_model_in_bfloat16_is_measured_with_its_own_type_too() -> None:
    result = run("--dtype", "bfloat16", "--tokens", "200", "--kv-dtype", "int8", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    names = [r["kv_dtype"] for r in value["results"]]
    assert names == ["float32", "bfloat16", "int8"]
    own = value["results"][1]["same_top1"]
    assert {r["own_same_top1"] for r in value["results"]} == {own}
    assert value["recommended"] != "float32"


def test_a_text_begins_as_the_tokenizer_itself_begins_it(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    from kvcellar.models.text.tokenizer import opening_tokens
    from tests.models.tiny_checkpoints import make_tokenizer

    text = tmp_path / "a.txt"
    text.write_text("hello")
    tokenizer = make_tokenizer()
    assert tokenizer.bos_token_id is not None and opening_tokens(tokenizer) == []
    model = SimpleNamespace(tokenizer=tokenizer, path=tmp_path)
    hello = tokenizer.encode("hello")
    assert len(hello) == 5
    assert read_text(model, text, 100, 50)[0] == hello, "no BOS where it puts none"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    assert opening_tokens(tokenizer) == [256]
    assert read_text(model, text, 100, 50)[0] == [256, *hello]
    assert read_text(model, text, 100, 4)[0] == [256, *hello[:3], 256, *hello[3:]], "each piece"


def test_models_read_prose_that_comes_along(tmp_path: Path) -> None:
    from tests.models.tiny_checkpoints import make_tokenizer

    model = SimpleNamespace(tokenizer=make_tokenizer(), path=tmp_path)
    token_ids, source = read_text(model, None, 10_000, 1024)
    assert source == "Northanger Abbey" and len(token_ids) == 10_000
    assert model.tokenizer.decode(token_ids).startswith("Chapter 1\n\nNo one who had ever seen")


def test_files_of_other_bytes_have_figures_of_their_own(tmp_path: Path) -> None:
    """A GGUF file has no folder of its own, and a model trained further only other numbers."""
    files = [tmp_path / name for name in ("a.gguf", "b.gguf")]
    for at, file in enumerate(files):
        file.write_bytes(b"GGUF" + bytes(1 << 18) + bytes([at]))
    save_weights_quality(files[0], [WeightsQuality("int4", 40.0, 1.14, 0.5, 0.8, 9, 9)], "made up")
    assert known_weights_quality(files[0], "int4") is not None
    assert known_weights_quality(files[1], "int4") is None


# Weights ------------------------------------------------------------------------------------------

needs_kernel = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())


def weights(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "weights-quality", *args], env={"COLUMNS": "120"})


@needs_kernel
def test_every_format_of_weights_is_measured_against_float32_and_remembered(home: Path) -> None:
    result = weights("--tokens", "200", "--context", "100", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    rows = {row["weights"]: row for row in value["results"]}
    assert list(rows) == ["float32", "none", "bf16", "int8", "int4"]
    base = rows["float32"]
    assert (base["ppl_ratio"], base["kl"], base["same_top1"]) == (1.0, 0.0, 1.0)
    assert 0 < rows["bf16"]["kl"] < rows["int4"]["kl"] and rows["int8"]["kl"] < rows["int4"]["kl"]
    sizes = [row["size_bytes"] for row in value["results"]]
    assert sizes == sorted(sizes, reverse=True)
    known = known_weights_quality(DEMO, "int4")
    assert known is not None and known.kl == rows["int4"]["kl"]
    assert known_quality(DEMO, "int4") is None, "K and V are another thing"
    table = weights("--tokens", "50", "--weights", "int8")
    assert table.exit_code == 0 and "int8" in table.stdout and "of float32" in table.stdout


@needs_kernel
def test_a_format_that_harms_a_model_says_so_once_it_was_measured(home: Path) -> None:
    def said() -> str:
        args = ["generate", "--prompt", "import", "--max-tokens", "2", "--weights", "int4"]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0
        return " ".join(result.stderr.split())

    assert said() == ""
    bad = WeightsQuality("int4", 40.0, 1.14, 0.5, 0.8, 1000, 960)
    save_weights_quality(DEMO, [bad], "made up")
    assert "were measured with 'demo': 1.14 times the perplexity of float32" in said()
    good = WeightsQuality("int4", 40.0, 1.001, 0.001, 0.99, 1000, 960)
    save_weights_quality(DEMO, [good], "made up")
    assert said() == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--weights", "int3"), "weights 'int3' are unknown"),
        (("--context", "100000"), "context 100000 is more than the 4096 positions"),
        (("no/such/model",), "there is no folder"),
    ],
)
def test_wrong_input_of_weights_is_one_line(args: tuple[str, ...], message: str) -> None:
    result = weights(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in " ".join(result.stderr.split())
