"""In the hands of transformers' own ``generate`` our cache gives the tokens of transformers'."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvcellar.errors import CacheFullError, ConfigError, RewindError
from tests.models.players import text
from tests.models.tiny_checkpoints import FAMILIES, WINDOW

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcellar.integrations.transformers import make_cache  # noqa: E402

every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="module")
def model_of(checkpoint: Any) -> Any:
    """Family -> a model of transformers, as its own loader makes it."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return functools.cache(lambda name: load(checkpoint(name), dtype=torch.float32).eval())


def greedy(model: Any, tokens: Any, n: int, cache: Any = None, **options: Any) -> list[int]:
    ids = torch.tensor([list(tokens)])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False} | options
    out = model.generate(ids, max_new_tokens=n, min_new_tokens=n, past_key_values=cache, **options)
    return out[0, ids.shape[1] :].tolist()


@every_family
def test_tokens_are_those_of_transformers_own_cache(model_of: Any, family: str) -> None:
    model, prompt = model_of(family), text(3 * WINDOW)
    cache = make_cache(model)
    assert greedy(model, prompt, 24, cache) == greedy(model, prompt, 24)
    assert cache.get_seq_length() == 3 * WINDOW + 23


@every_family
def test_logits_are_those_of_transformers_own_cache(model_of: Any, family: str) -> None:
    model, tokens = model_of(family), text(40)
    mine, other = make_cache(model), transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 25), (25, 26), (26, 40)):
            ids = torch.tensor([tokens[start:stop]])
            a, b = (model(ids, past_key_values=cache).logits for cache in (mine, other))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@every_family
def test_a_crop_goes_on_as_if_the_rest_had_never_been(model_of: Any, family: str) -> None:
    model, prompt = model_of(family), text(40)
    cache = make_cache(model, rollback=30)
    greedy(model, prompt, 12, cache)
    cache.crop(-19)
    assert cache.get_seq_length() == 32
    other = (*prompt[:32], *text(6, seed=8))
    assert greedy(model, other, 10, cache) == greedy(model, other, 10)


def test_a_crop_past_a_window_is_refused_and_changes_nothing(model_of: Any) -> None:
    model = model_of("gemma3")
    cache = make_cache(model, 2000, rollback=3)
    with torch.no_grad():
        for start in range(0, 900, 300):  # past the smallest chunk of a pool
            model(torch.tensor([text(300, seed=start)]), past_key_values=cache)
    cache.crop(-3)
    with pytest.raises(RewindError):
        cache.crop(-870)
    assert cache.get_seq_length() == 897


@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "bfloat16"])
def test_other_storage_types_are_close_and_smaller(model_of: Any, kv_dtype: str) -> None:
    model, ids = model_of("gemma3"), torch.tensor([text(60)])
    mine, exact = make_cache(model, kv_dtype=kv_dtype), make_cache(model)
    with torch.no_grad():
        a, b = (model(ids, past_key_values=cache).logits for cache in (mine, exact))
    assert (a - b).square().mean().sqrt() < (0.1 if kv_dtype != "k8v4" else 0.7) * b.std()
    sizes = [cache.layers[0]._shared.usage().size_bytes for cache in (mine, exact)]
    assert sizes[0] <= sizes[1] / 2


def test_a_reset_cache_is_as_new(model_of: Any) -> None:
    model, cache = model_of("qwen3"), make_cache(model_of("qwen3"))
    greedy(model, text(30), 5, cache)
    cache.reset()
    assert greedy(model, text(9), 12, cache) == greedy(model, text(9), 12)


def test_what_cannot_work_is_refused(model_of: Any) -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match="leave out"):
        make_cache(model, kv_dtype="int8:first4")
    with pytest.raises(CacheFullError, match="16"):
        greedy(model, text(20), 2, make_cache(model, 16))
    with pytest.raises(ConfigError, match="num_beams=1"):
        make_cache(model).reorder_cache(torch.tensor([0]))
    with pytest.raises(ConfigError, match="negative"):
        make_cache(model).crop(3)
