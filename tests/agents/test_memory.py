"""Agents inside a budget: what the process takes, measured; real models that come and go in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvcellar.agents import MemoryPlan, open_host
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.budget import parse_size
from kvcellar.engine import EngineConfig, Request, SamplingParams
from kvcellar.errors import ConfigError
from kvcellar.hosting.host import check_host
from kvcellar.hosting.memory import budgets_of_host, choose_capacity
from kvcellar.models import LoadOptions
from kvcellar.models.sizes.sizing import size_model
from tests.models.tiny_checkpoints import COMMON, randomize, save

ROOT = Path(__file__).parents[2]
MB = 1_000_000
SIZES = COMMON | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 6,
    "head_dim": 128,
}
"""Small weights and large KV: 49,152 bytes a token in float32."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folders = []
    for i in range(2):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SIZES), dtype=torch.float32
        )
        randomize(model, seed=i)
        folders.append(tmp_path_factory.mktemp(f"model{i}"))
        save(model, folders[-1])
    return [str(folder) for folder in folders]


def hosting(home: Path, *args: Any) -> dict[str, Any]:
    """What ``tests.agents.hosting`` prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.agents.hosting", *map(str, args)],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        | {"KVCELLAR_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return value


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.slow
def test_agents_on_models_that_take_turns_stay_inside_the_budget_and_lose_nothing(models, tmp_path):
    rich = hosting(tmp_path, tmp_path / "rich", "100GB", 4096, 1, 300, *models)
    assert rich["loaded"] == [[0], [0, 1], [0, 1], [0, 1]], "there is room for both"

    both = sum(rich["sizes"])
    limit = rich["process"] + int(0.8 * both * 8 / 7)  # 7 of 8 parts are for models
    seen = hosting(tmp_path, tmp_path / "poor", limit, 4096, 3, 300, *models)
    assert max(seen["sizes"]) <= seen["models"] < sum(seen["sizes"])
    assert seen["loaded"] == [[0], [1], [0], [1]], "one at a time"
    assert seen["peak"] <= limit, seen
    for prompt, cached in seen["ends"][6:]:  # those of the old model came back from the store
        assert cached == prompt - 20 - 1


def test_a_limit_that_holds_no_model_is_refused_with_numbers(models):
    plan = MemoryPlan.divide(100 * MB, 100 * MB)
    assert plan.models_bytes == 0
    with pytest.raises(ConfigError, match=r"does not hold the model: .*; give at least "):
        plan.size_of(LoadOptions(models[0]))
    with pytest.raises(ConfigError, match="leaves nothing for KV"):
        open_host(models[0], memory_bytes=5 * MB)


def test_a_limit_that_holds_weights_and_no_forward_is_refused_with_what_the_whole_process_needs(
    models,
):
    asked = LoadOptions(models[0])
    with pytest.raises(ConfigError, match=r"300.0 MB does not hold .* at least ") as told:
        MemoryPlan.divide(300 * MB, 290 * MB).size_of(asked)
    need = parse_size(re.search(r"at least ([\d.]+ MB)", str(told.value))[1].replace(" ", ""))
    plan = MemoryPlan.divide(need, 290 * MB)
    few = replace(asked, memory_bytes=plan.size_of(asked))
    check_host(few)  # with fewer cells than the model's context
    assert 0 < choose_capacity(few).cells < 8192


def test_snapshots_that_take_the_memory_of_kv_are_refused(tmp_path):
    folder = write_tiny("lfm2", tmp_path / "tiny")
    asked = LoadOptions(folder, memory_bytes=200 * MB, snapshot_bytes=10 * MB)
    assert choose_capacity(asked).why == "the model's context"
    with pytest.raises(ConfigError, match=r"snapshots may take 1.00 GB, and .* together; ask for"):
        choose_capacity(replace(asked, snapshot_bytes=1000 * MB))


def test_whoever_guesses_for_a_model_is_counted_with_it(models):
    plan = MemoryPlan.divide(10_000 * MB, 1000 * MB)
    asked = LoadOptions(models[0], capacity=1000)
    alone, both, ngram = (
        plan.size_of(replace(asked, speculate=who)) for who in (None, models[1], "ngram")
    )
    assert alone + 1000 * 49_152 < both <= 2 * alone + 100 * MB
    assert alone + 1_000_000 <= ngram < both

    limit = both - 10 * MB
    guessing = replace(asked, memory_bytes=limit, speculate=models[1])
    own, draft = budgets_of_host(guessing)
    assert draft is not None
    assert own.limit_bytes == limit and own.base_bytes > draft.limit_bytes
    assert own.base_bytes + own.reserve_bytes + own.kv_bytes == limit
    assert abs(own.kv_bytes - draft.kv_bytes) < MB, "models of one shape hold the same tokens"
    assert budgets_of_host(replace(guessing, speculate="ngram"))[1] is None
    with pytest.raises(ConfigError, match="leaves nothing for KV"):
        budgets_of_host(replace(guessing, memory_bytes=alone - 49 * MB))


def test_a_head_that_guesses_for_a_model_is_counted_with_it():
    plan = MemoryPlan.divide(10_000 * MB, 1000 * MB)
    asked = LoadOptions("demo", capacity=1000, speculate="eagle3")
    alone, both = (plan.size_of(one) for one in (replace(asked, speculate=None), asked))
    own, draft = budgets_of_host(replace(asked, memory_bytes=both - MB))
    assert draft is not None and 0 < draft.base_bytes < 13 * MB < draft.limit_bytes
    assert alone + draft.base_bytes + draft.reserve_bytes < both
    assert own.base_bytes + own.reserve_bytes + own.kv_bytes == both - MB
    assert own.kv_bytes > 3 * draft.kv_bytes, "six layers and one hold the same tokens"


def test_a_host_with_a_draft_model_keeps_both_caches_inside_the_limit(models):
    asked = LoadOptions(models[0], capacity=300, speculate=models[1])
    limit = MemoryPlan.divide(10_000 * MB, 1000 * MB).size_of(asked)
    config = EngineConfig(verify_all_drafts=True)
    host = open_host(asked, memory_bytes=limit, config=config)
    try:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        requests = [Request(tuple(range(i, 40 + i)), params) for i in range(2)]
        ends = host.service.run(lambda e: [e.generate(request) for request in requests]).result()
        assert all(len(end.token_ids) == 9 for end in ends)
        engine = host.engine
        drafter: Any = engine.outcomes.speculator.drafter
        budgets = [cache.config.budget for cache in (engine.cache, drafter._cache)]
        assert budgets[0] is not budgets[1]
        assert all(0 < budget.held_bytes <= budget.kv_bytes for budget in budgets)
        held = sum(b.held_bytes for b in budgets) + sum(b.reserve_bytes for b in budgets)
        assert held + 2 * size_model(models[0]).weight_bytes <= limit
        assert host.engine.stats().drafted_tokens > 0
    finally:
        host.close()


def test_a_model_is_given_what_its_capacity_takes_or_all_there_is(models):
    plan = MemoryPlan.divide(10_000 * MB, 1000 * MB)
    assert plan.process_bytes + plan.warm_bytes + plan.queue_bytes + plan.models_bytes == (
        plan.limit_bytes
    )
    small, large = (plan.size_of(LoadOptions(models[0], capacity=n)) for n in (1000, 2000))
    assert 1000 * 49_152 < large - small < 3 * 1000 * 49_152
    poor = MemoryPlan.divide(1500 * MB, 1000 * MB)
    assert poor.size_of(LoadOptions(models[0], capacity=100_000)) == poor.models_bytes
