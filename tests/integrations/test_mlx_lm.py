"""In the hands of mlx-lm's own functions our cache gives the tokens of mlx-lm's."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcellar.errors import CacheFullError, ConfigError, RewindError
from tests.models.players import text
from tests.models.tiny_checkpoints import WINDOW, make_tokenizer

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
mlx_lm = pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")
ours = pytest.importorskip("kvcellar.integrations.mlx_lm")

from mlx_lm.generate import generate_step, speculative_generate_step  # noqa: E402
from mlx_lm.models import cache as theirs  # noqa: E402

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss"]
WINDOWED = ["gemma3", "gpt_oss"]


@pytest.fixture(scope="module")
def model_of(checkpoint: Any) -> Any:
    """Family -> a model of mlx-lm, as its own loader makes it; nothing of ours is in it."""
    from kvcellar.backends.mlx.loading import load_weights
    from kvcellar.models.files.checkpoint import read_config
    from kvcellar.models.files.configs import config_from_dict

    @functools.cache
    def load(family: str) -> Any:
        raw = read_config(checkpoint(family))
        model = load_weights(checkpoint(family), raw, config_from_dict(raw))
        mx.eval(model.parameters())
        return model

    return load


@pytest.fixture
def model(model_of: Any, family: str) -> Any:
    return model_of(family)


def greedy(model: Any, prompt: Any, n: int, cache: Any, **options: Any) -> list[int]:
    steps = generate_step(
        mx.array(list(prompt)), model, max_tokens=n, prompt_cache=cache, **options
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_window", "gemma2"])
def test_tokens_are_those_of_mlx_lms_own_cache(model: Any, family: str) -> None:
    prompt = text(45)
    want = greedy(model, prompt, 24, theirs.make_prompt_cache(model))
    for step in (2048, 7):
        cache = ours.make_prompt_cache(model)
        assert greedy(model, prompt, 24, cache, prefill_step_size=step) == want
        assert {layer.offset for layer in cache} == {45 + 24}
    with_windows = {isinstance(c, theirs.RotatingKVCache) for c in theirs.make_prompt_cache(model)}
    assert {layer._window is not None for layer in cache} == with_windows


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_mlx_lms_own_cache_bit_for_bit(model: Any, family: str) -> None:
    mine, other = ours.make_prompt_cache(model), theirs.make_prompt_cache(model)
    tokens = text(30)
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        ids = mx.array([tokens[start:stop]])
        a, b = model(ids, cache=mine), model(ids, cache=other)
        mx.eval(a, b)
        np.testing.assert_array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollback_goes_on_as_if_the_rest_had_never_been(model: Any, family: str) -> None:
    prompt = list(text(40))
    cache = ours.make_prompt_cache(model, rollback=30)
    first = greedy(model, prompt, 12, cache)
    assert theirs.can_trim_prompt_cache(cache)
    assert theirs.trim_prompt_cache(cache, 20) == 20
    assert {layer.offset for layer in cache} == {32}
    other = list(text(6, seed=8))
    want = greedy(model, prompt[:32] + other, 10, theirs.make_prompt_cache(model))
    assert greedy(model, other, 10, cache) == want
    assert len(first) == 12


@pytest.mark.parametrize("family", WINDOWED)
def test_a_rollback_works_where_mlx_lms_windows_refuse(model: Any, family: str) -> None:
    other = theirs.make_prompt_cache(model)
    greedy(model, text(20), 2, other)
    assert not theirs.can_trim_prompt_cache(other)
    mine = ours.make_prompt_cache(model, 2000, rollback=3)
    greedy(model, text(900), 2, mine, prefill_step_size=300)
    held = {layer._shared.held(layer._layer) for layer in mine if layer._window}
    assert max(held) < 700, "the windows have moved on"
    with pytest.raises(RewindError):
        theirs.trim_prompt_cache(mine, 899)
    assert {layer.offset for layer in mine} == {902}
    assert theirs.trim_prompt_cache(mine, 3) == 3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_speculative_decoding_takes_it_and_gives_the_same_tokens(model: Any, family: str) -> None:
    prompt = mx.array(list(text(20)))
    want = greedy(model, text(20), 16, theirs.make_prompt_cache(model))
    cache = ours.make_prompt_cache(model) + ours.make_prompt_cache(model)
    steps = speculative_generate_step(
        prompt, model, model, max_tokens=16, prompt_cache=cache, num_draft_tokens=3
    )
    got = [(int(token), drafted) for token, _, drafted in steps]
    assert [token for token, _ in got] == want
    assert any(drafted for _, drafted in got)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_files_go_both_ways(model: Any, family: str, tmp_path: Path) -> None:
    prompt, more = text(30), text(5, seed=3)
    mine, other = ours.make_prompt_cache(model), theirs.make_prompt_cache(model)
    greedy(model, prompt, 8, mine)
    greedy(model, prompt, 8, other)
    want = greedy(model, more, 12, copy.deepcopy(other))
    a, b = str(tmp_path / "ours.safetensors"), str(tmp_path / "theirs.safetensors")
    theirs.save_prompt_cache(a, mine, {"said": "yes"})  # their function on our cache
    theirs.save_prompt_cache(b, other)
    assert greedy(model, more, 12, theirs.load_prompt_cache(a)) == want
    for name in (a, b):
        assert greedy(model, more, 12, ours.load_prompt_cache(name, model)) == want
    _, metadata = ours.load_prompt_cache(a, model, return_metadata=True)
    assert metadata == {"said": "yes"}
    with pytest.raises(CacheFullError):
        ours.load_prompt_cache(a, model, capacity=10)


def test_a_file_of_a_quantised_cache_goes_both_ways(model_of: Any, tmp_path: Path) -> None:
    model = model_of("qwen3")
    prompt, more = text(30), text(5, seed=3)
    mine = ours.make_prompt_cache(model, kv_dtype="int8:g32")
    greedy(model, prompt, 4, mine)
    name = str(tmp_path / "quantised.safetensors")
    ours.save_prompt_cache(name, mine)
    loaded = theirs.load_prompt_cache(name)
    assert {type(layer) for layer in loaded} == {theirs.QuantizedKVCache}
    ids = mx.array([list(more)])
    a, b = model(ids, cache=copy.deepcopy(mine)), model(ids, cache=loaded)
    c = model(ids, cache=ours.load_prompt_cache(name, model, kv_dtype="float32"))
    scale = float(mx.abs(a).max())
    assert float(mx.abs(a - b).max()) < 0.03 * scale  # they round the new tokens their way
    assert float(mx.abs(a - c).max()) < 0.03 * scale  # and here they stay float32


def test_a_file_that_does_not_fit_is_refused(model_of: Any, tmp_path: Path) -> None:
    model, name = model_of("llama"), str(tmp_path / "other.safetensors")
    short = theirs.make_prompt_cache(model)[:2]
    theirs.save_prompt_cache(name, short)
    with pytest.raises(ConfigError, match="2 layers"):
        ours.load_prompt_cache(name, model)
    rotating = [theirs.RotatingKVCache(max_size=16, keep=4) for _ in range(3)]
    greedy(model, text(40), 2, rotating)
    theirs.save_prompt_cache(name, rotating)
    with pytest.raises(ConfigError, match="first 4 tokens"):
        ours.load_prompt_cache(name, model)
    rotating = [theirs.RotatingKVCache(max_size=16) for _ in range(3)]
    greedy(model, text(40), 2, rotating)
    theirs.save_prompt_cache(name, rotating)
    with pytest.raises(RewindError, match="cannot go on exactly"):
        ours.load_prompt_cache(name, model)


def test_a_copy_goes_its_own_way(model_of: Any) -> None:
    model = model_of("gemma3")
    cache = ours.make_prompt_cache(model)
    greedy(model, text(40), 2, cache)
    twin = copy.deepcopy(cache)
    left = greedy(model, text(4, seed=5), 10, cache)
    right = greedy(model, text(4, seed=6), 10, twin)
    again = ours.make_prompt_cache(model)
    greedy(model, text(40), 2, again)
    assert greedy(model, text(4, seed=5), 10, copy.deepcopy(again)) == left
    assert greedy(model, text(4, seed=6), 10, again) == right


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("kv_dtype", ["int8", "k8v4", "int4:g32"])
def test_quantised_caches_are_close_and_smaller(model: Any, family: str, kv_dtype: str) -> None:
    mine, exact = ours.make_prompt_cache(model, kv_dtype=kv_dtype), ours.make_prompt_cache(model)
    ids = mx.array([list(text(60))])
    a, b = model(ids, cache=mine), model(ids, cache=exact)
    mx.eval(a, b, [c.state for c in mine])
    spread = float(mx.sqrt(mx.var(b)))
    assert float(mx.sqrt(mx.mean((a - b) ** 2))) < (0.1 if kv_dtype == "int8" else 0.7) * spread
    assert sum(c.nbytes for c in mine) < 0.4 * sum(c.nbytes for c in exact)


def test_a_rotated_cache_with_exact_ends_is_closer_than_without(model_of: Any) -> None:
    model, ids = model_of("gemma3"), mx.array([list(text(60))])

    def logits(kv_dtype: str | None = None) -> Any:
        cache = ours.make_prompt_cache(model, kv_dtype=kv_dtype)
        return mx.concatenate([model(ids[:, a:b], cache=cache) for a, b in ((0, 41), (41, 60))], 1)

    want = logits()
    errors = {
        name: float(mx.sqrt(mx.mean((logits(name) - want) ** 2)))
        for name in ("int4", "int4:rot", "int4:first4:last16", "int8:rot:last60")
    }
    spread = float(mx.sqrt(mx.var(want)))
    assert errors["int4:first4:last16"] < errors["int4"]
    assert errors["int4:rot"] < 0.7 * spread
    assert errors["int8:rot:last60"] < 1e-4 * spread


def test_copies_and_files_of_a_rotated_cache_with_exact_ends_go_on(
    model_of: Any, tmp_path: Path
) -> None:
    """All that a file holds is within the exact end, so every way goes on with the same tokens."""
    model, options = model_of("gemma3"), {"kv_dtype": "int8:rot:first4:last60"}
    mine = ours.make_prompt_cache(model, **options)
    greedy(model, text(40), 4, mine)
    mx.eval([c.state for c in mine])
    file = tmp_path / "cache.safetensors"
    ours.save_prompt_cache(str(file), mine)
    copied, loaded = copy.deepcopy(mine), theirs.load_prompt_cache(str(file))
    more = text(4, seed=5)
    want = greedy(model, more, 10, copied)
    assert greedy(model, more, 10, loaded) == want
    assert greedy(model, more, 10, mine) == want
    again = ours.load_prompt_cache(file, model, **options)
    assert again[0].offset == mine[0].offset - 14
    mx.eval([c.state for c in again])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_dtype", [None, "int8:rot:first4:last60"])
def test_batch_generate_goes_on_from_our_caches_beside_its_own(
    model: Any, family: str, kv_dtype: str | None
) -> None:
    """Prefixes of different lengths in ours, and one row whose cache mlx-lm makes itself."""
    from mlx_lm.generate import BatchGenerator

    prefixes = [text(50), text(23, seed=1), []]
    ends = [text(5, seed=s) for s in (2, 3, 4)]
    caches: list[Any] = []
    for prefix in prefixes:
        caches.append(ours.make_prompt_cache(model, kv_dtype=kv_dtype) if prefix else None)
        if prefix:
            model(mx.array([list(prefix)]), cache=caches[-1])
    for order in ((0, 1, 2), (2, 1, 0)):
        batch = BatchGenerator(model, max_tokens=10)
        uids = batch.insert([list(ends[i]) for i in order], caches=[caches[i] for i in order])
        got: dict[int, list[int]] = {uid: [] for uid in uids}
        while responses := batch.next_generated():
            for response in responses:
                got[response.uid].append(response.token)
        batch.close()
        for uid, i in zip(uids, order, strict=True):
            alone = greedy(model, (*prefixes[i], *ends[i]), 10, theirs.make_prompt_cache(model))
            assert got[uid] == alone
    assert caches[0][0].offset == 50, "they stay as they were"


def test_what_cannot_work_is_refused_and_a_full_cache_says_so(model_of: Any) -> None:
    model = model_of("llama")
    with pytest.raises(ConfigError, match="int3"):
        ours.make_prompt_cache(model, kv_dtype="int3")
    cache = ours.make_prompt_cache(model, capacity=16)
    with pytest.raises(CacheFullError, match="16"):
        greedy(model, text(20), 2, cache)

    class Recurrent:
        def make_cache(self) -> list[Any]:
            return [theirs.ArraysCache(2)]

    with pytest.raises(ConfigError, match="no layer of this model keeps K and V"):
        ours.make_prompt_cache(Recurrent())


def test_the_capacity_stands_where_mlx_lm_has_its_own_limit() -> None:
    of_theirs, of_ours = (
        list(inspect.signature(one.make_prompt_cache).parameters) for one in (theirs, ours)
    )
    assert of_theirs[:2] == ["model", "max_kv_size"] and of_ours[:2] == ["model", "capacity"]


# mlx-lm's documented examples, with our cache in place of theirs ----------------------------------


class Documented:
    """``mlx_lm/examples/chat.py`` and ``generate_response.py``, line by line."""

    def __init__(self, model: Any, tokenizer: Any, folder: Path, cache: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.file = str(folder / "mistral_prompt.safetensors")
        self.make_prompt_cache, self.load_prompt_cache = cache

    def chat(self) -> list[str]:
        generate, model, tokenizer = mlx_lm.generate, self.model, self.tokenizer
        prompt_cache = self.make_prompt_cache(model)
        said = []
        for prompt in ("Hi my name is <Name>.", "What's my name?"):
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            said.append(
                generate(model, tokenizer, prompt=prompt, prompt_cache=prompt_cache, max_tokens=12)
            )
        theirs.save_prompt_cache(self.file, prompt_cache)
        prompt_cache = self.load_prompt_cache(self.file)
        again = tokenizer.apply_chat_template(
            [{"role": "user", "content": "And yours?"}], add_generation_prompt=True
        )
        stream = mlx_lm.stream_generate(
            model, tokenizer, again, max_tokens=12, prompt_cache=prompt_cache
        )
        said.append("".join(response.text for response in stream))
        return said


@pytest.mark.parametrize("family", ["mistral_full", "gemma3"])
def test_the_documented_examples_say_the_same(model: Any, family: str, tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    def run(cache: Any) -> list[str]:
        return Documented(model, TokenizerWrapper(make_tokenizer()), tmp_path, cache).chat()

    mine = run((ours.make_prompt_cache, lambda name: ours.load_prompt_cache(name, model)))
    assert mine == run((theirs.make_prompt_cache, theirs.load_prompt_cache))
    assert any(mine)
    assert WINDOW < 20, "the chat is longer than the windows"


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("n_before", [0, 3, 12])
@pytest.mark.parametrize("window_size", [None, 2, 4, 8, 100])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_mask_lets_each_token_see_its_window_of_what_the_cache_returns(
    model_of: Any, family: str, window_size: int | None, n_before: int, n: int
) -> None:
    model = model_of(family)
    cache = ours.make_prompt_cache(model)
    if n_before:
        model(mx.array([text(n_before)]), cache=cache)
    for layer in cache:
        own = getattr(layer, "max_size", None)
        held = n_before if own is None else min(n_before, own - 1)
        window = min((w for w in (own, window_size) if w), default=None)
        wanted = np.tril(np.ones((n, held + n), dtype=bool), held)
        if window is not None:
            wanted &= ~np.tril(np.ones((n, held + n), dtype=bool), held - window)
        array = layer.make_mask(n, return_array=True, window_size=window_size)
        assert (np.array(array).reshape(wanted.shape) == wanted).all()
        usual = layer.make_mask(n, window_size=window_size)
        if usual is None:
            assert n == 1 and wanted.all()
        elif isinstance(usual, str):
            assert (wanted == np.tril(np.ones_like(wanted), held)).all()
        else:
            assert (np.array(usual).reshape(wanted.shape) == wanted).all()


def test_what_mlx_lm_asks_of_its_own_classes_is_there_or_says_why_not(model_of: Any) -> None:
    windowed = ours.make_prompt_cache(model_of("gemma3"))
    assert {layer.keep for layer in windowed if hasattr(layer, "max_size")} == {0}
    quantised = ours.make_prompt_cache(model_of("qwen3"), kv_dtype="int8:g32")
    assert quantised[0].group_size == 32
    for layer in (*windowed, *quantised):
        assert layer.step > 0 and not hasattr(layer, "bits")
        with pytest.raises(ConfigError, match="kv_dtype"):
            _ = layer.bits
        with pytest.raises(ConfigError, match="kv_dtype='int4'"):
            layer.to_quantized(group_size=64, bits=4)
