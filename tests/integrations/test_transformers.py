"""In the hands of transformers' own ``generate`` our cache gives the tokens of transformers'."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from kvcellar.errors import CacheFullError, ConfigError, ModelError, RewindError, ShapeError
from tests.models.players import text
from tests.models.tiny_checkpoints import FAMILIES, WINDOW

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.backends.torch.loading import model_facts  # noqa: E402
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


def test_latents_and_rotary_rows_come_back_as_transformers_has_them(tmp_path: Any) -> None:
    folder = write_tiny("deepseek_v3", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = make_cache(model)
    assert greedy(model, text(20), 12, cache) == greedy(model, text(20), 12)
    other = transformers.DynamicCache(config=model.config)
    model(torch.tensor([text(9)]), past_key_values=other)
    assert cache.layers[0].keys.shape[3] == other.layers[0].keys.shape[3]
    assert cache.layers[0].values.shape[3] == other.layers[0].values.shape[3]


@pytest.mark.parametrize("family", ["gemma3n_text", "llama4_text"])
def test_layers_that_share_rows_and_chunks_go_on_as_with_transformers_own_cache(
    family: str, tmp_path: Any
) -> None:
    folder = write_tiny(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    params, cache = model_facts(model.config.to_dict()).params, make_cache(model)
    assert bool(params.shared) == (family == "gemma3n_text")
    assert any(group.chunk for group in params.groups) == (family == "llama4_text")
    said = greedy(model, text(37), 4, cache)
    assert said == greedy(model, text(37), 4)
    assert len(cache.layers) == params.n_layers - len(params.shared)
    cache.crop(-2)
    other = (*text(37), said[0], 9, 11)
    assert greedy(model, other, 3, cache) == greedy(model, other, 3)


def test_rows_that_are_padded_have_chunks_of_their_own(tmp_path: Any) -> None:
    folder = write_tiny("llama4_text", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([text(21), text(21, seed=1), text(21, seed=2)])
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :13] = 0, 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 20}
    want = model.generate(ids, **options)
    got = model.generate(ids, past_key_values=make_cache(model, rollback=0), **options)
    assert got.tolist() == want.tolist()


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
    sizes = [usage(cache).size_bytes for cache in (mine, exact)]
    assert sizes[0] <= sizes[1] / 2


def usage(cache: Any) -> Any:
    return cache.layers[0]._rows.cache.usage()


def test_a_rotated_cache_with_exact_ends_is_closer_than_without(model_of: Any) -> None:
    """int4 of a model whose heads are as wide as a group; all tokens near an end are exact."""
    model, ids = model_of("gemma3"), torch.tensor([text(60), text(60, seed=1)])
    with torch.no_grad():
        want = model(ids, past_key_values=make_cache(model)).logits
        errors = {
            name: (model(ids, past_key_values=make_cache(model, kv_dtype=name)).logits - want)
            .square()
            .mean()
            .sqrt()
            for name in ("int4", "int4:rot", "int4:first4:last16", "int8:rot:last60")
        }
    assert errors["int4:first4:last16"] < errors["int4"]
    assert errors["int4:rot"] < 0.7 * want.std()
    assert errors["int8:rot:last60"] < 1e-4 * want.std()


def padded(prompts: list[list[int]]) -> tuple[Any, Any]:
    """Ids and mask of a batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@every_family
def test_a_padded_batch_says_what_it_says_with_transformers_own_cache(
    model_of: Any, family: str
) -> None:
    model = model_of(family)
    ids, mask = padded([text(3 * WINDOW), text(5, seed=1), text(2 * WINDOW, seed=2)])
    options = {"attention_mask": mask, "max_new_tokens": 20, "min_new_tokens": 20}
    cache = make_cache(model)
    got = model.generate(ids, past_key_values=cache, do_sample=False, **options)
    assert torch.equal(got, model.generate(ids, do_sample=False, **options))
    cache.reset()
    assert greedy(model, text(9), 12, cache) == greedy(model, text(9), 12)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_beams_say_the_same_and_share_their_cells(model_of: Any, family: str) -> None:
    model = model_of(family)
    ids, mask = padded([text(2 * WINDOW), text(9, seed=1)])
    options = {"attention_mask": mask, "max_new_tokens": 16, "num_beams": 4, "do_sample": False}
    cache = make_cache(model)
    got = model.generate(ids, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(ids, **options))
    assert any(group.shared for group in usage(cache).groups)
    cache.layers[0]._rows.cache.check()


def test_rows_are_taken_kept_and_repeated_without_a_copy(model_of: Any) -> None:
    model = model_of("gemma3")
    mine, other = make_cache(model), transformers.DynamicCache(config=model.config)
    ids = torch.tensor([text(30), text(30, seed=1)])
    with torch.no_grad():
        for cache in (mine, other):
            model(ids, past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 0, 2]))
            cache.batch_select_indices(torch.tensor([0, 1, 3]))
        assert [g.live for g in usage(mine).groups if g.window is None] == [60]
        for n in (1, 5, 1):
            more = torch.tensor([text(n, seed=s) for s in (5, 6, 7)])
            a, b = (model(more, past_key_values=cache).logits for cache in (mine, other))
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_a_batch_is_cut_back_in_all_of_its_rows(model_of: Any) -> None:
    model = model_of("gemma3")
    ids, more = (torch.tensor([text(40, seed=s), text(40, seed=s + 1)]) for s in (0, 5))
    cache = make_cache(model, rollback=20)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.crop(-15)
        got = model(more[:, :7], past_key_values=cache).logits
        want = model(torch.cat([ids[:, :25], more[:, :7]], dim=1)).logits[:, 25:]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_a_forward_that_raised_leaves_the_batch_as_it_was(model_of: Any) -> None:
    model, cache = model_of("llama"), make_cache(model_of("llama"))
    ids = torch.tensor([text(8), text(8, seed=1)])
    with torch.no_grad():
        model(ids, past_key_values=cache)
        hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        hook.remove()
        got = model(ids, past_key_values=cache).logits
        want = model(torch.cat([ids, ids], dim=1)).logits[:, 8:]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_a_reset_cache_is_as_new(model_of: Any) -> None:
    model, cache = model_of("qwen3"), make_cache(model_of("qwen3"))
    greedy(model, text(30), 5, cache)
    cache.reset()
    assert greedy(model, text(9), 12, cache) == greedy(model, text(9), 12)


def test_what_cannot_work_is_refused(model_of: Any) -> None:
    model = model_of("llama")
    with pytest.raises(CacheFullError, match="16"):
        greedy(model, text(20), 2, make_cache(model, 16))
    with pytest.raises(ConfigError, match="negative"):
        make_cache(model).crop(3)
    cache = make_cache(model)
    greedy(model, text(5), 2, cache)
    with torch.no_grad(), pytest.raises(ShapeError, match="1 rows"):
        model(torch.tensor([text(3), text(3)]), past_key_values=cache)


@every_family
def test_keys_and_values_are_those_of_transformers_own_cache(model_of: Any, family: str) -> None:
    model, tokens = model_of(family), torch.tensor([text(30), text(30, seed=4)])
    mine, other = make_cache(model), transformers.DynamicCache(config=model.config)
    assert mine.layers[0].keys is None and mine.layers[0].values is None
    assert mine.batch_size == -1
    with torch.no_grad():
        for part in (tokens[:, :20], tokens[:, 20:]):
            for cache in (mine, other):
                model(part, past_key_values=cache)
    assert mine.batch_size == 2
    for ours, theirs in zip(mine.layers, other.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=0)
    mine.layers[0].keys.zero_()  # a copy
    assert mine.layers[0].keys.abs().sum() > 0
    mine.reset()
    assert mine.layers[0].keys is None


@pytest.mark.parametrize("kv_dtype", ["int8", "int4:rot:first4:last64"])
def test_keys_of_other_storage_types_are_numbers(model_of: Any, kv_dtype: str) -> None:
    model, tokens = model_of("llama"), torch.tensor([text(30)])
    mine, other = make_cache(model, kv_dtype=kv_dtype), transformers.DynamicCache()
    with torch.no_grad():
        for cache in (mine, other):
            model(tokens, past_key_values=cache)
    wanted = other.layers[0].keys
    assert (mine.layers[0].keys - wanted).norm() < 0.2 * wanted.norm()


def test_gradients_are_refused_and_not_cut_in_silence(model_of: Any) -> None:
    model, tokens = model_of("llama"), torch.tensor([text(12)])
    cache = make_cache(model)
    with pytest.raises(ConfigError, match=r"torch\.no_grad"):
        model(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0 and cache.layers[0].keys is None
    with torch.inference_mode():
        model(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 12


def test_layers_can_be_offloaded_and_fetched_where_they_are_in_main_memory(model_of: Any) -> None:
    model, prompt = model_of("llama"), text(20)
    cache = make_cache(model)
    want = greedy(model, prompt, 8)
    with torch.no_grad():
        model(torch.tensor([prompt[:10]]), past_key_values=cache)
    for layer in range(len(cache.layers)):
        cache.offload(layer, only_non_sliding=False)
        cache.layers[layer].prefetch()
    assert greedy(model, prompt, 8, cache) == want


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "nemotron_h", "zaya"])
def test_models_with_recurrent_layers_say_what_they_say_with_transformers_own_cache(
    family: str, tmp_path: Any
) -> None:
    folder = write_tiny(family, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = make_cache(model)
    assert greedy(model, text(21), 8, cache) == greedy(model, text(21), 8)
    assert cache.get_seq_length() == 21 + 7
    cache.reset()
    assert greedy(model, text(5), 8, cache) == greedy(model, text(5), 8)
    beams = {"num_beams": 3, "num_return_sequences": 1}
    assert greedy(model, text(9), 6, make_cache(model), **beams) == greedy(
        model, text(9), 6, **beams
    )


def test_states_cannot_be_cut_back_and_that_is_said(tmp_path: Any) -> None:
    folder = write_tiny("falcon_h1", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = make_cache(model)
    greedy(model, text(9), 2, cache)
    assert not cache.is_croppable
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert cache.get_seq_length() == 10


def test_a_model_or_a_type_that_nobody_knows_gets_no_cache():
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            num_hidden_layers=1,
            vocab_size=8,
        )
    )
    with pytest.raises(ConfigError):
        make_cache(model, 16, kv_dtype="int3")
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=8)
    with pytest.raises(ModelError, match="has recurrent layers alone"):
        make_cache(transformers.AutoModelForCausalLM.from_config(config), 16)
