"""Families in ``families.json``: what transformers says of them, and that torch is not needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.kernel import levels
from tests.models.family_logits import MODELS, checking, known, made
from tests.models.test_check import each_time

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())

OFTEN = "llama gemma-3 shared-expert delta-net latents-and-groups gemma-4-own-rows gemma3n"

ALONE = (
    "import runpy, sys\n"
    "sys.modules['torch'] = sys.modules['transformers'] = None\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)
"""A script, where neither torch nor transformers can be imported."""


def check(file: Path) -> subprocess.CompletedProcess[str]:
    """Run the check of a file without torch."""
    command = [sys.executable, "-c", ALONE, checking.__file__, "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_families_say_without_torch_what_transformers_says():
    families = known()
    done = check(checking.FILE)
    assert done.returncode == 0, done.stdout + done.stderr
    native = [one for one in families.values() if one["logits"] is not None]
    kinds = {one["config"]["model_type"] for one in native}
    n_refused = len(families) - len(native)
    assert len(kinds) >= 30
    assert (
        f"equal to transformers without torch: {len(kinds)} families ({len(native)} models); "
        f"refused: {n_refused}; wrong: 0" in done.stdout
    )
    assert "needs torch, which is not installed: 'MODEL' has no plan yet" in done.stdout


@pytest.mark.parametrize("model", each_time(OFTEN, " ".join(MODELS)))
def test_what_is_stored_is_what_transformers_says(model):
    want, got = known()[model], made(model)
    logits = [one.pop("logits") for one in (want, got)]
    assert json.loads(json.dumps(got)) == want
    assert (logits[0] is None) == (logits[1] is None)
    if logits[0] is not None:
        np.testing.assert_allclose(*logits, atol=1e-4, rtol=0)


def test_all_models_are_stored_in_their_order():
    assert list(known()) == list(MODELS)


@pytest.mark.parametrize("which", [0, 1])
def test_a_family_that_is_otherwise_ends_it(tmp_path, which):
    families = {name: known()[name] for name in ("llama", "delta-net", "gemma3n")}
    families["delta-net"]["logits"][which][-1][2] += 0.001
    assert "off by 0.001, more than 0.0002" in wrong(families, tmp_path, "delta-net")


def test_a_family_that_is_said_to_need_torch_and_runs_ends_it(tmp_path):
    families = {name: known()[name] for name in ("llama", "gemma3n")}
    families["llama"]["logits"] = None
    assert "is said to need it" in wrong(families, tmp_path, "llama")


def test_a_family_that_is_refused_and_should_run_ends_it(tmp_path):
    families = {name: known()[name] for name in ("llama", "gemma3n")}
    families["gemma3n"]["logits"] = families["llama"]["logits"]
    assert "has no plan yet" in wrong(families, tmp_path, "gemma3n")


def wrong(families: dict[str, Any], folder: Path, name: str) -> str:
    """Check families of which one is wrong; return the line that says so."""
    file = folder / "families.json"
    file.write_text(json.dumps(families))
    done = check(file)
    assert done.returncode == 1 and "wrong: 1" in done.stdout, done.stdout + done.stderr
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("WRONG"))
    assert line.startswith(f"WRONG: {name}: ")
    return line
