"""Models of every family are exact behind our caches; what is not is refused, with the figures."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers.utils import logging as hf_logging

from kvcellar.backends.torch.cpu.decoder import KernelDecoder
from kvcellar.backends.torch.learn import checking
from kvcellar.backends.torch.learn.checking import check_checkpoint, check_family
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.backends.torch.loading import model_facts, prove_model
from kvcellar.errors import ModelError
from kvcellar.models import check as check_module
from kvcellar.models import load_model
from kvcellar.models.check import (
    CACHES,
    PARTS,
    TOLERANCE,
    CheckVerdict,
    InexactModelWarning,
    torch_versions,
    unit_of,
    verdict_path,
)
from kvcellar.models.files.checkpoint import read_config
from kvcellar.models.options import no_progress

EXACT = """
afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm
deepseek_v2 deepseek_v3 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint
fun_asr_nano gemma gemma2 gemma3 gemma3_text gemma3n gemma4 gemma4_unified glm glm4 glm4_moe
glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_docling granite_swa granitemoe
granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
jais2 kimi_k25 kolibri1 kosmos-2.5 laguna llama llama4 mellum mimo_v2_flash minicpm3
minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert-decoder nanochat nemotron olmo
olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen3 qwen3_moe
qwen3_vl seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
"""Families that are exact. One that is here and is not any more is a fault."""

OFTEN = """
apertus cohere2 deepseek_v2 deepseek_v3 exaone4 gemma2 gemma3_text gemma3n gemma4 glm4 glm4_moe
gpt2 gpt_oss granite hunyuan_v1_dense llama llama4 minimax_m2 ministral3 mistral mistral3 mixtral
nemotron olmo2 olmo3 phi3 phimoe qwen2 qwen3 qwen3_moe qwen3_vl smollm3 starcoder2
"""
"""Those of them that are checked each time: what people run, and each way to attend."""

NOISY = {"gemma3n"}
"""Families whose own float32 rounds by more than a fourth of the tolerance."""

RECURRENT = """
bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm2_vl lfm3
nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next zaya
"""
"""Families with recurrent layers that are exact; see ``EXACT``."""

RECURRENT_OFTEN = "granitemoehybrid jamba kimi_linear lfm2 nemotron_h qwen3_5 qwen3_next"


def each_time(often: str, families: str) -> list[str]:
    """Return the families of a list that run often, or all where ``KVCELLAR_ALL_CASES`` is set."""
    assert set(often.split()) <= set(families.split())
    return (families if "KVCELLAR_ALL_CASES" in os.environ else often).split()


UNLIKE_ITSELF = {"jamba"}
"""Families whose own code computes otherwise in chunks than at once: Jamba's is wrong by 10."""

LIMITS: dict[str, dict[str, Any]] = {
    "bamba": {"time_step_limit": [0.5, 0.9]},
    "falcon_h1": {"time_step_limit": [0.5, 0.9]},
    "granitemoehybrid": {"time_step_limit": [0.5, 0.9]},
    "nemotron_h": {"time_step_min": 0.5},
}
"""Families with Mamba 2 that can be served -> bounds of its time steps that are met."""

REFUSED = {
    "bert": "lets a token of layer 0 see others than those before it",
    "bart": "reads with an encoder",
    "bloom": "takes no position_ids",
    "gpt_neox_japanese": "does not call its attention through the interface",
    "deepseek_v32": "gives the attention of layer 0 indices",
    "diffllama": "attends more than once in layer 0",
    "mamba2": "has recurrent layers alone",
    "recurrent_gemma": "has 3 layers of 4 whose attention is not seen",
    "zamba": "has one attention module for several layers",
    "minimax": "asks for a cache of its own (get_linear_cache)",
    "deepseek_v4": "its own code stopped in DeepseekV4",
}
"""Families that are refused -> why, one of each kind."""


@pytest.mark.parametrize("family", each_time(OFTEN, EXACT))
def test_a_family_is_exact_in_every_way_and_on_every_cache(family):
    verdict = check_family(family)
    assert verdict.reason is None
    allowed = 2 * TOLERANCE if family in NOISY else TOLERANCE
    assert verdict.worst <= min(allowed, verdict.tolerance), verdict.differences
    assert set(verdict.differences) == set(CACHES)
    assert set(verdict.differences["seq"]) == set(verdict.differences["tree"]) == set(PARTS[:-1])


@pytest.mark.parametrize("family", each_time(RECURRENT_OFTEN, RECURRENT))
def test_a_family_with_recurrent_layers_is_exact_in_every_way_and_on_every_cache(family):
    verdict = check_family(family)
    assert verdict.reason is None
    assert verdict.is_exact, verdict.differences
    assert verdict.tolerance <= 5 * TOLERANCE
    assert verdict.layers[-1].endswith(" recurrent")
    assert set(verdict.differences["seq"]) == set(verdict.differences["tree"]) == set(PARTS[:-1])
    assert bool(verdict.remark) == (family in UNLIKE_ITSELF)


def test_transformers_does_not_say_while_it_is_checked_that_its_own_kernels_are_missing(
    monkeypatch,
):
    heard = []
    compare = checking.compare
    monkeypatch.setattr(
        checking, "compare", lambda of: heard.append(hf_logging.get_verbosity()) or compare(of)
    )
    before = hf_logging.get_verbosity()
    assert check_family("lfm2").is_exact
    assert heard == [logging.ERROR]
    assert hf_logging.get_verbosity() == before


@pytest.mark.parametrize("family", LIMITS)
def test_a_token_by_itself_keeps_the_limits_of_time_steps_that_prompts_keep(family):
    verdict = check_family(family, **LIMITS[family])
    assert verdict.reason is None
    assert verdict.worst <= TOLERANCE, verdict.differences
    assert verdict.own is not None and verdict.own > 100 * TOLERANCE  # what transformers' step does


LONG = {"long_factor": [1.5 + i for i in range(48)], "short_factor": [1.0] * 48}

ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"factor": 32.0, **LONG, "original_max_position_embeddings": 4096},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "linear": {"factor": 2.0},
}
"""Kinds of RoPE with numbers of their own."""


@pytest.mark.parametrize("kind", ROPES)
def test_positions_that_are_scaled_are_exact_beyond_the_original_length(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    family = "phi3" if kind == "longrope" else "llama"
    verdict = check_family(family, rope_parameters=rope, max_position_embeddings=131072)
    assert verdict.reason is None
    assert verdict.is_exact, verdict.differences
    is_moving = kind in ("longrope", "dynamic")
    for parts in verdict.differences.values():  # short texts, alone and beside long ones
        assert ("border" in parts) == is_moving
    if kind == "dynamic":  # which is said, with a figure
        assert verdict.exact_to == 131072
        assert verdict.beyond is not None and verdict.beyond > 100 * TOLERANCE
        assert "more than 131,072 tokens are not exact" in verdict.limit
    else:
        assert (verdict.exact_to, verdict.beyond, verdict.limit) == (None, None, "")


def test_at_least_55_families_are_exact():
    assert len(set(EXACT.split())) >= 55


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_is_refused_by_what_it_needs(family):
    verdict = check_family(family)
    assert not verdict.is_exact
    assert not verdict.differences
    assert REFUSED[family] in str(verdict.reason)


# What the check finds -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: Any) -> Path:
    """A tiny checkpoint with a window in half of its layers."""
    return write_tiny("gemma2", tmp_path_factory.mktemp("tiny") / "gemma2")


def checked(folder: Path) -> CheckVerdict:
    return check_checkpoint(folder, read_config(folder))


def test_a_small_checkpoint_is_checked_itself(tiny):
    verdict = checked(tiny)
    assert verdict.is_exact
    assert verdict.subject.startswith("the model itself")
    assert verdict.layers == ("2 window 8", "2 full")
    assert verdict.own is not None
    assert verdict.own <= TOLERANCE


def test_a_window_that_is_a_token_too_long_is_found_in_every_part(tiny, monkeypatch):
    learn = checking.learn_facts
    monkeypatch.setattr(checking, "learn_facts", lambda raw: with_windows(learn(raw), 1))
    verdict = checked(tiny)
    assert verdict.reason is None
    assert not verdict.is_exact
    assert all(gap > TOLERANCE for parts in verdict.differences.values() for gap in parts.values())


def test_a_cap_on_the_logits_that_is_lost_is_found(monkeypatch):
    learn = checking.learn_facts

    def uncapped(raw: Any) -> Any:
        facts = learn(raw)
        assert all(layer.softcap for layer in facts.layers)
        return replace(facts, layers=tuple(replace(at, softcap=None) for at in facts.layers))

    monkeypatch.setattr(checking, "learn_facts", uncapped)
    verdict = check_family("gemma2")
    assert verdict.reason is None
    assert verdict.worst > 100 * TOLERANCE


def with_windows(facts: Any, longer: int) -> Any:
    layers = tuple(
        replace(layer, window=layer.window and layer.window + longer) for layer in facts.layers
    )
    return replace(facts, layers=layers)


def test_sequences_that_see_each_other_are_found_in_flat_batches_alone(tiny, monkeypatch):
    """A runner that gives the second sequence of a batch the first one's logits."""
    bound = checking.TorchRunner

    class Mixing(bound):  # type: ignore[misc,valid-type]
        def _run(self, cache: Any, ids: Any, at: Any, rows: Any, **how: Any) -> Any:
            logits, features = super()._run(cache, ids, at, rows, **how)
            if (np.diff(at) < 0).any():
                logits = logits[::-1].copy()
            return logits, features

    monkeypatch.setattr(checking, "TorchRunner", Mixing)
    found = checked(tiny).differences
    wrong = {part for parts in found.values() for part, gap in parts.items() if gap > TOLERANCE}
    assert wrong == {"fork", "batch"}


def test_a_model_whose_logits_say_nothing_is_not_called_exact(tiny, monkeypatch):
    monkeypatch.setattr(check_module, "_TELLING", 1e3)
    verdict = checked(tiny)
    assert not verdict.is_exact
    assert "say too little" in str(verdict.reason)


# Loading ------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def counted(monkeypatch) -> list[Path]:
    """The folders that were checked."""
    folders: list[Path] = []

    def count(folder: Path, *args: Any) -> CheckVerdict:
        folders.append(folder)
        return check_checkpoint(folder, *args)

    monkeypatch.setattr(checking, "check_checkpoint", count)
    return folders


def inexact(folder: Path, raw: Any, *args: Any) -> CheckVerdict:
    gaps = {kind: {"decode": 0.5, "prefill": 1e-6} for kind in CACHES}
    return CheckVerdict("gemma2", ("4 full",), "a twin", gaps, 3e-3, None, torch_versions(), 0.1)


def test_a_checkpoint_is_checked_at_its_first_load_and_no_more(tiny, home, counted):
    said: list[str] = []
    load_model(tiny, progress=lambda part, what: said.append(what))
    assert "checking" in said
    load_model(tiny)
    assert counted == [tiny]
    path = verdict_path(read_config(tiny), torch_versions())
    path.write_text("{}")
    load_model(tiny)
    assert counted == [tiny, tiny], "a damaged verdict is found again"


def test_a_half_copied_checkpoint_is_no_verdict_on_others_of_its_config(tiny, home, tmp_path):
    half = Path(shutil.copytree(tiny, tmp_path / "half"))
    whole = load_file(tiny / "model.safetensors")
    name = next(name for name in whole if name.endswith("q_proj.weight"))
    for rest, says in (
        ({key: value for key, value in whole.items() if key != name}, "lacks 1 tensors"),
        (whole | {name: whole[name][:-1].contiguous()}, rf"{name} is \[.*\] and not \["),
    ):
        save_file(rest, half / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=says) as refused:
            load_model(half)
        assert "--unchecked" not in str(refused.value)
    load_model(tiny)
    shutil.copy(tiny / "model.safetensors", half)
    load_model(half)


def test_a_verdict_without_figures_is_found_again(tiny, home, monkeypatch):
    def lacking(folder: Path, raw: Any, *args: Any) -> CheckVerdict:
        return replace(inexact(folder, raw), reason="MemoryError: no room", differences={})

    monkeypatch.setattr(checking, "check_checkpoint", lacking)
    with pytest.raises(ModelError, match="no room"):
        load_model(tiny)
    monkeypatch.undo()
    monkeypatch.setenv("KVCELLAR_HOME", str(home))
    load_model(tiny)


def test_a_verdict_of_other_versions_is_found_again(tiny, home, counted, monkeypatch):
    load_model(tiny)
    monkeypatch.setattr("kvcellar.models.check.VERSION", 10**6)
    load_model(tiny)
    assert counted == [tiny, tiny]


def test_a_model_that_was_refused_is_checked_again(tiny, home, counted, tmp_path):
    """A folder that lacked a tensor says nothing of the one that has them all."""
    folder = Path(shutil.copytree(tiny, tmp_path / "copied"))
    weights = load_file(folder / "model.safetensors")
    lacking = {name: tensor for name, tensor in weights.items() if ".1.self_attn.q" not in name}
    save_file(lacking, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        load_model(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_model(folder)
    load_model(folder)
    assert counted == [folder, folder]


def test_the_bundled_model_is_not_checked_when_it_is_loaded(home, counted):
    load_model("demo")
    assert counted == []


def test_a_model_that_is_not_exact_is_refused_with_figures_and_the_way_out(tiny, home, monkeypatch):
    monkeypatch.setattr(checking, "check_checkpoint", inexact)
    says = r"by 5\.0e-01 \(decode 5\.0e-01\).*own cache in chunks differs by 3\.0e-03.*--unchecked"
    with pytest.raises(ModelError, match=says):
        load_model(tiny)


def test_a_person_may_go_on_and_is_warned_at_every_start(tiny, home, monkeypatch):
    found = MagicMock(side_effect=inexact)
    monkeypatch.setattr(checking, "check_checkpoint", found)
    for _ in range(2):
        with pytest.warns(InexactModelWarning, match="not exact"):
            load_model(tiny, is_unchecked=True)
    found.assert_called_once()  # the verdict that is kept has all that is said
    with pytest.raises(ModelError, match="not exact"):
        load_model(tiny)
    assert found.call_count == 2, "who wants an exact model has it looked at again"


def test_facts_that_were_kept_and_are_wrong_are_replaced_by_a_check(tiny, home):
    raw = read_config(tiny)
    assert not prove_model(tiny, no_progress)[1], "none were kept"
    facts = model_facts(raw)
    (path,) = home.glob("models/*[0-9a-f].json")
    path.write_text(json.dumps(replace(facts, max_positions=7).to_json()))
    assert model_facts(raw) != facts
    verdict, is_replaced = prove_model(tiny, no_progress)
    assert verdict.is_exact
    assert is_replaced
    assert model_facts(raw) == facts
    assert not prove_model(tiny, no_progress)[1]


def test_a_decoder_that_does_not_say_what_its_modules_say_is_not_used(home, tmp_path, monkeypatch):
    tiny = write_tiny("qwen3", tmp_path / "tiny")
    forward = KernelDecoder.forward

    def spoilt(self, *args: Any) -> Any:
        found = forward(self, *args)
        return None if found is None else (found[0] + 1.0, found[1])

    with monkeypatch.context() as only:
        only.setattr(KernelDecoder, "forward", spoilt)
        assert load_model(tiny, weights="int8").decoder is None
    assert load_model(tiny, weights="int8").decoder is not None, "it is looked for again"
    monkeypatch.setattr(KernelDecoder, "forward", spoilt)
    assert load_model(tiny, weights="int8").decoder is not None, "it was compared once"


def test_a_model_that_is_exact_is_not_warned_of(tiny, home):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(tiny, is_unchecked=True)


def test_a_verdict_that_was_written_is_read_as_it_was(tiny):
    verdict = checked(tiny)
    assert CheckVerdict.from_json(verdict.to_json()) == verdict
    odd = [{kind: {"prefill": value} for kind in CACHES} for value in ("0", float("nan"), None)]
    lists = [{**verdict.to_json(), "differences": value} for value in ({}, *odd)]
    for broken in ({}, [], *lists, {**verdict.to_json(), "versions": None}, "no"):
        with pytest.raises(ValueError, match="no verdict"):
            CheckVerdict.from_json(broken)


def test_differences_of_large_logits_count_in_proportion():
    assert unit_of(np.array([[-9.0, 4.0]])) == 1.0
    assert unit_of(np.array([[-300.0, 4.0]])) == 30.0


def test_a_pipe_in_place_of_a_verdict_or_of_facts_is_not_waited_for(tiny, home):
    load_model(tiny, dtype="float32")
    kept = sorted((home / "models").glob("*.json"))
    assert kept
    for path in kept:
        path.unlink()
        os.mkfifo(path)
    assert load_model(tiny, dtype="float32").params == load_model(tiny, dtype="float32").params
