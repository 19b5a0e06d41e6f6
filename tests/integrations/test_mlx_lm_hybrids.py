"""Hybrid models with our cache in mlx-lm's own functions: states stay mlx-lm's, and are honest."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from kvcellar.errors import ConfigError, RewindError

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
mlx_lm = pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")
ours = pytest.importorskip("kvcellar.integrations.mlx_lm")

from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models import cache as theirs  # noqa: E402

from tests.models.mlx_families import make_model  # noqa: E402
from tests.models.mlx_hybrids import HYBRIDS  # noqa: E402
from tests.models.test_mlx_families import text  # noqa: E402

pytestmark = pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])


@functools.cache
def model_of(family: str) -> Any:
    return make_model(family, **HYBRIDS[family])


def greedy(model: Any, prompt: Any, n: int, cache: Any) -> list[int]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=n, prompt_cache=cache, prefill_step_size=16
    )
    return [int(token) for token, _ in steps]


def test_tokens_are_those_of_mlx_lms_own_cache(family: str) -> None:
    model, prompt = model_of(family), text(40)
    want = greedy(model, prompt, 12, theirs.make_prompt_cache(model))
    assert greedy(model, prompt, 12, ours.make_prompt_cache(model)) == want
    small = ours.make_prompt_cache(model, kv_dtype="int8")
    assert greedy(model, prompt, 1, small) == want[:1]
    layer = next(one for one in ours._leaves(small) if hasattr(one, "offset"))
    assert layer._shared.config.kv.is_quantised


def test_it_says_that_it_cannot_be_trimmed_and_is_not(family: str) -> None:
    model, prompt, more = model_of(family), text(20), text(6, 2)
    cache = ours.make_prompt_cache(model)
    greedy(model, prompt, 4, cache)
    assert not theirs.can_trim_prompt_cache(cache)
    assert theirs.trim_prompt_cache(cache, 3) == 0
    layer = next(one for one in ours._leaves(cache) if hasattr(one, "offset"))
    with pytest.raises(RewindError, match="states of this model's recurrent layers"):
        layer.trim(3)
    assert layer.trim(0) == 0 and layer.offset == 24
    forked = copy.deepcopy(cache)
    assert greedy(model, more, 6, cache) == greedy(model, more, 6, forked), "a fork is whole"


def test_files_go_both_ways(family: str, tmp_path: Path) -> None:
    model, prompt, more = model_of(family), text(30), text(5, 3)
    mine, other = ours.make_prompt_cache(model), theirs.make_prompt_cache(model)
    for cache in (mine, other):
        greedy(model, prompt, 8, cache)
    want = greedy(model, more, 12, copy.deepcopy(other))
    a, b = str(tmp_path / "ours.safetensors"), str(tmp_path / "theirs.safetensors")
    ours.save_prompt_cache(a, mine)
    theirs.save_prompt_cache(b, other)
    assert greedy(model, more, 12, theirs.load_prompt_cache(a)) == want
    for name in (a, b):
        assert greedy(model, more, 12, ours.load_prompt_cache(name, model)) == want
    with pytest.raises(ConfigError, match="layers"):
        ours.load_prompt_cache(a, make_model("llama"))
