"""Quantised K and V on every family: logits stay within stated bounds of transformers' own.

The bound is on the root mean square error of the logits over that of their spread. Random weights
are the harder case: their attention is flat and their rows have no structure to lean on.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from kvcellar.engine.quality import measure_kv_quality
from kvcellar.errors import ConfigError
from kvcellar.models import load_model
from kvcellar.models.kv_quality import (
    KvQuality,
    KvQualityWarning,
    known_quality,
    recommended,
    save_quality,
    worst_of_texts,
)
from tests.models.players import Player, text
from tests.models.tiny_checkpoints import FAMILIES, make_checkpoint

BOUNDS = {"int8": 0.03, "int8:rot": 0.03, "k8v4": 0.25, "int4": 0.4, "int4:rot": 0.4}
BOUNDS_WITH_EXPERTS = {"int8": 0.3, "int8:rot": 0.3, "k8v4": 0.6, "int4": 0.8, "int4:rot": 0.8}
"""Where random weights choose the experts, many choices are close, and some fall otherwise."""


@pytest.mark.parametrize("kv_dtype", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_logits_stay_within_the_bound_of_the_type(family, kv_dtype, loaded, oracle):
    model = loaded(family)
    tokens = text(48)
    want = oracle(family).logits(tokens)
    bounds = BOUNDS_WITH_EXPERTS if family == "gpt_oss" else BOUNDS
    got = []
    for kind in ("contiguous", "seq", "tree"):
        with Player(model, kind, kv_dtype=kv_dtype) as player:
            rows = [player.feed(tokens[:19], rows="all"), player.feed(tokens[19:40], rows="all")]
            rows += [player.feed([token]) for token in tokens[40:]]
            got.append(np.concatenate(rows))
    for logits in got:
        error = np.sqrt(np.mean((logits - want) ** 2)) / np.std(want)
        assert 0 < error <= bounds[kv_dtype]


def test_a_fork_and_a_rollback_of_quantised_cells_go_on_as_if_they_were_alone(loaded):
    model = loaded("llama")
    trunk, tail, other = text(20), text(5, seed=1), text(5, seed=2)
    with Player(model, "seq", kv_dtype="int4") as player:
        player.feed(trunk)
        player.cache.seq_cp(0, 1)
        player.feed(other, 0)
        player.cache.seq_rm(0, len(trunk))
        got = [player.feed(tail, seq_id, rows="all") for seq_id in (0, 1)]
    with Player(model, "seq", kv_dtype="int4") as player:
        player.feed(trunk)
        want = player.feed(tail, rows="all")
    for logits in got:
        np.testing.assert_allclose(logits, want, atol=1e-4)


# Quality, measured and remembered -----------------------------------------------------------------


def test_quality_falls_with_the_bits_and_float32_is_the_base(loaded):
    results = measure_kv_quality(loaded("llama"), text(90), ["int4", "int8"], context=40)
    by_name = {r.kv_dtype: r for r in results}
    assert list(by_name) == ["float32", "int4", "int8"]
    base = by_name["float32"]
    assert (base.ppl_ratio, base.kl, base.same_top1) == (1.0, 0.0, 1.0)
    assert base.n_tokens == 39 + 39 + 9
    assert 0 < by_name["int8"].kl < by_name["int4"].kl
    assert by_name["int4"].bytes_per_token < by_name["int8"].bytes_per_token


def test_perplexity_is_that_of_transformers(loaded, oracle):
    tokens = text(60)
    (base,) = measure_kv_quality(loaded("qwen3"), tokens, [], context=60)
    logits = oracle("qwen3").logits(tokens)[:-1].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = np.exp(-logprobs[np.arange(59), tokens[1:]].mean())
    assert base.perplexity == pytest.approx(want, rel=1e-5)


def test_a_text_without_a_next_token_is_refused(loaded):
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        measure_kv_quality(loaded("llama"), [5], ["int8"])
    with pytest.raises(ConfigError, match="kv_dtype 'int5' is not known"):
        measure_kv_quality(loaded("llama"), [5, 6, 7], ["int5"])


def figures(kv_dtype: str, ratio: float, same: float, n_bytes: int = 10) -> KvQuality:
    return KvQuality(kv_dtype, 20.0 * ratio, ratio, 0.01 * ratio, same, 1000, n_bytes)


def test_the_smallest_good_type_is_recommended_and_the_least_bad_where_none_is():
    good, small = figures("int8", 1.0001, 0.99, 20), figures("int4", 1.004, 0.975, 10)
    fair, bad = figures("int4:g64", 1.01, 0.93, 9), figures("k4v4", 1.05, 0.95, 8)
    assert [r.verdict for r in (good, small, fair, bad)] == ["good", "good", "fair", "bad"]
    assert figures("int8", 1.0, 0.749).verdict == "bad"
    assert recommended([good, small, fair, bad]) is small
    assert recommended([bad, fair]) is fair


def test_of_several_texts_the_worst_is_the_verdict_and_the_range_is_told():
    prose = [figures("float32", 1.0, 1.0, 40), figures("int4", 1.001, 0.98)]
    code = [figures("float32", 1.0, 1.0, 40), figures("int4", 1.118, 0.99)]
    base, small = worst_of_texts({"prose": prose, "code": code})
    assert (base.verdict, base.ppl_ratios) == ("good", (1.0, 1.0))
    assert (small.verdict, small.text, small.n_texts, small.ppl_ratio) == ("bad", "code", 2, 1.118)
    assert (small.ppl_ratios, small.same_top1s) == ((1.001, 1.118), (0.98, 0.99))
    assert recommended([base, small]) is base


def test_a_session_in_a_type_that_is_known_to_be_bad_warns_with_the_figures(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    folder = make_checkpoint("llama", tmp_path / "model")
    model = load_model(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Player(model, "seq", kv_dtype="int4"):
            pass  # never measured
        path = save_quality(folder, [figures("int4", 1.31, 0.62), figures("int8", 1.0, 1.0)], "t")
        with Player(model, "seq", kv_dtype="int8"):
            pass
    with (
        pytest.warns(KvQualityWarning, match=r"int4 is known to be bad.*1\.310 times.*62\.0%"),
        Player(model, "seq", kv_dtype="k4v4"),  # the same by another name
    ):
        pass
    save_quality(folder, [figures("int4", 1.01, 0.95)], "t")
    assert known_quality(folder, "int4") == figures("int4", 1.01, 0.95)
    assert known_quality(folder, "int8") == figures("int8", 1.0, 1.0)
    of_texts = {"prose": [figures("int4", 1.01, 0.95)], "code": [figures("int4", 1.1, 0.93)]}
    save_quality(folder, worst_of_texts(of_texts), "prose, code")
    said = r"1\.100 times.*93\.0% of 1000 tokens of code, the worst of 2 texts"
    with pytest.warns(KvQualityWarning, match=said), Player(model, "seq", kv_dtype="int4"):
        pass
    save_quality(folder, [figures("int4", 1.01, 0.95)], "t")
    moved = folder.rename(tmp_path / "elsewhere")
    assert known_quality(moved, "int4") == figures("int4", 1.01, 0.95)
    path.write_text("{")
    assert known_quality(moved, "int4") is None
