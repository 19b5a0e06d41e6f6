"""Additions that guides describe, made in a copy of the package: what they promise is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.additions import ROOT, added


def run(script: str, folder: Path) -> Any:
    """Run a program with the package in a folder, interpreting kernels; return what it prints."""
    path = os.pathsep.join([str(folder / "src"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, cwd=folder, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


SAMPLER = """
import json, sys
from pathlib import Path
import numpy as np
import torch
from pydantic import ValidationError
from typer.testing import CliRunner
import kvcellar
from kvcellar.cellar.answers import params_of
from kvcellar.cli.program import app
from kvcellar.engine.sampler.sampling import SamplingParams, SamplingState, sample
from kvcellar.errors import ConfigError, ModelError
from kvcellar.models.files.generation import checked_settings
from kvcellar.backends.torch.gpu.sampler.logits import DeviceLogits
from kvcellar.server.answer.parsing import sampling_of
from kvcellar.server.routes.viewer import sampler_script
from kvcellar.server.schemas.agents import GenerateRequest
from kvcellar.server.schemas.ollama import Options
from kvcellar.server.schemas.openai import ChatRequest, CompletionRequest
from kvcellar.server.schemas.responses import ResponseRequest
from tests.backends.gpu.interpreter import hasten

def refused(kind, error):
    try:
        kind()
    except error as found:
        return str(found)

hasten()
rng = np.random.default_rng(0)
logits = rng.normal(0, 2, (24, 300)).astype(np.float32)
states = [
    SamplingState(SamplingParams(temperature=0.9, top_a=a, min_p=m, seed=i), 300)
    for i, (a, m) in enumerate([(0.0, 0.0), (0.3, 0.0), (0.9, 0.02)] * 8)
]
here = [one.token_id for one in sample(logits, states)]
asked = [state.row_sampling(row) for row, state in enumerate(states)]
there = [one.token_id for one in DeviceLogits(torch.from_numpy(logits)).sample(asked)]
p = np.exp(logits / 0.9) / np.exp(logits / 0.9).sum(1, keepdims=True)
is_kept = [
    bool(p[row, token] >= state.params.top_a * p[row].max() ** 2 * (1 - 1e-5))
    for row, (token, state) in enumerate(zip(here, states))
]
sharp = [
    SamplingState(SamplingParams(temperature=1.0, top_a=1.0, seed=seed), 4) for seed in range(200)
]
flat = np.log(np.array([[0.6, 0.37, 0.03, 1e-9]] * 200, np.float32))
bodies = ChatRequest, CompletionRequest, GenerateRequest, ResponseRequest, Options
said, unsaid = ({"prompt": "a", **more} for more in ({"top_a": 0.25}, {}))
print(json.dumps({
    "package": str(Path(kvcellar.__file__).parent),
    "here": here, "there": there, "is_kept": is_kept,
    "sharp": sorted({one.token_id for one in sample(flat, sharp)}),
    "refused": refused(lambda: SamplingParams(top_a=2.0), ConfigError),
    "of_file": checked_settings({"top_a": 0.5}, Path("file")),
    "of_bad_file": refused(lambda: checked_settings({"top_a": 5}, Path("file")), ModelError),
    "bodies": [one.__name__ for one in bodies if "top_a" in one.model_fields],
    "of_request": sampling_of(CompletionRequest.model_validate(said), max_tokens=1).top_a,
    "above": refused(
        lambda: CompletionRequest.model_validate({**said, "top_a": 1.5}), ValidationError
    ),
    "unset": "top_a" in sampling_of(CompletionRequest.model_validate(unsaid), max_tokens=1).unset,
    "of_call": params_of({"top_a": 0.5}).top_a,
    "help": CliRunner().invoke(app, ["generate", "--help"]).stdout,
    "page": sampler_script(),
}))
"""


@pytest.mark.slow
def test_a_setting_of_sampling_is_added_in_four_files(tmp_path):
    changed = added("docs/add-a-sampler.md", tmp_path)
    assert len(changed) == 4
    found = run(SAMPLER, tmp_path)
    assert found["package"] == str(tmp_path / "src/kvcellar")
    assert found["there"] == found["here"] and all(found["is_kept"])
    assert found["sharp"] == [0, 1]  # 0.37 is above 0.36, the square of 0.6
    assert found["refused"] == "top_a must be 0 to 1, got 2.0"
    assert found["of_file"] == {"top_a": 0.5} and "top_a=5" in found["of_bad_file"]
    assert len(found["bodies"]) == 5
    assert (found["of_request"], found["of_call"], found["unset"]) == (0.25, 0.5, True)
    assert "top_a" in found["above"] and "less than or equal to 1" in found["above"]
    assert "--top-a" in found["help"]
    assert '["top_a", "Top a", {"min": 0.0, "max": 1.0, "step": "any"}]' in found["page"]


ROUTE = """
import json, logging, tempfile
from pathlib import Path
import kvcellar
from kvcellar.server.app import create_api
from tests.server.live import serving

with tempfile.TemporaryDirectory() as folder, serving(Path(folder), api_key="key") as live:
    def post(body, key="key"):
        headers = {"authorization": f"Bearer {key}"}
        return live.http.post("/v1/tokens/count", json=body, headers=headers)

    texts = ["import os", "", "é" * 10]
    tokenizer = live.host().tokenizer
    answers = {
        "counted": post({"texts": texts, "brand_new": 1}),
        "nothing": post({"texts": []}),
        "too_many": post({"texts": ["x"] * 65}),
        "another_routes": post({"texts": ["x"], "max_output_tokens": 3}),
        "stranger": post({"texts": ["x"]}, "no key"),
        "large": post({"texts": ["x" * (40 << 20)]}),
        "no_json": live.http.post(
            "/v1/tokens/count", content=b"{", headers={"authorization": "Bearer key"}
        ),
    }
    print(json.dumps({
        "package": str(Path(kvcellar.__file__).parent),
        "wanted": [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts],
        "ignored": answers["counted"].headers.get("x-kvcellar-ignored"),
        "documented": "/v1/tokens/count" in create_api(None).openapi()["paths"],
        **{name: [one.status_code, one.json()] for name, one in answers.items()},
    }))
"""


@pytest.mark.slow
def test_a_route_is_added_with_all_that_routes_have_in_common(tmp_path):
    changed = added("docs/add-a-route.md", tmp_path)
    assert changed == {"app.py", "counting.py"}
    found = run(ROUTE, tmp_path)
    assert found["package"] == str(tmp_path / "src/kvcellar") and found["documented"]
    assert found["counted"] == [200, {"counts": found["wanted"]}] and found["wanted"][0] > 0
    assert found["ignored"] == "brand_new"
    statuses = {"nothing": 400, "too_many": 400, "another_routes": 400, "stranger": 401}
    for name, status in {**statuses, "large": 400, "no_json": 400}.items():
        said = found[name][1]["error"]["message"]
        assert found[name][0] == status and said, name
    assert "nothing to count" in found["nothing"][1]["error"]["message"]
    assert "max_output_tokens" in found["another_routes"][1]["error"]["message"]
    assert "context" in found["large"][1]["error"]["message"]  # refused while it comes


KV_DTYPE = """
import json, subprocess, sys
from pathlib import Path
import numpy as np
import torch
import kvcellar
from kvcellar.backends.reference.byte_floats import from_bytes, to_bytes
from kvcellar.kv_dtype import parse_kv_dtype

form = parse_kv_dtype("fp8_e5m2").k.byte_float
stored = np.arange(256, dtype=np.uint8)
theirs = torch.from_numpy(stored).view(torch.float8_e5m2).float().numpy()
is_finite = np.isfinite(theirs)
numbers = np.random.default_rng(0).normal(0, 1, 4000) * 10.0 ** np.arange(-6, 6).repeat(334)[:4000]
numbers = np.concatenate([numbers, theirs[is_finite], [np.nan, 1e9, -1e9, 0.0]]).astype(np.float32)
most = torch.from_numpy(numbers).clamp(-form.most, form.most)
rounded = most.to(torch.float8_e5m2).view(torch.uint8).numpy()
done = subprocess.run(
    [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"],
    capture_output=True, text=True,
)
print(json.dumps({
    "package": str(Path(kvcellar.__file__).parent),
    "values": bool(np.array_equal(from_bytes(stored, form)[is_finite], theirs[is_finite])),
    "bytes": bool(np.array_equal(to_bytes(numbers, form), rounded)),
    "suite": done.stdout[-2000:],
}))
"""

SUITE = """
from kvcellar.testing import CASES, ConformanceSuite, NumpyAdapter
from kvcellar.testing.suite.scenarios import Scenarios
from tests.backends.adapters import TorchAdapter, TritonAdapter

OWN = [case for case in CASES if case.kv_dtype == "fp8_e5m2"]


class Few(Scenarios):
    suite = ConformanceSuite
    test_prompts_and_tokens = suite.test_a_flat_batch_mixes_prefill_and_decode_of_many_sequences
    test_forks = suite.test_a_fork_shares_the_trunk_and_then_diverges
    test_moves = suite.test_short_runs_are_copied_together_and_nobody_sees_a_difference
    test_shapes = suite.test_wrong_shapes_are_refused_and_the_right_ones_go_on


class TestReference(Few):
    adapter = NumpyAdapter("reference", cases=OWN, walked=())


class TestTorch(Few):
    adapter = TorchAdapter(OWN)


class TestCard(Scenarios):
    adapter = TritonAdapter(OWN)
    test_forks = ConformanceSuite.test_a_fork_shares_the_trunk_and_then_diverges
"""


@pytest.mark.slow
def test_a_storage_type_of_k_and_v_is_added_in_three_files(tmp_path):
    changed = added("docs/add-a-kv-dtype.md", tmp_path)
    assert len(changed) == 3
    (tmp_path / "test_own.py").write_text(SUITE)
    found = run(KV_DTYPE, tmp_path)
    assert found["package"] == str(tmp_path / "src/kvcellar")
    assert found["values"] and found["bytes"]
    said = found["suite"]
    assert re.search(r"^[0-9]{2,} passed(, [^f]*)? in ", said, re.MULTILINE), said
