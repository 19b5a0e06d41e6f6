"""Recurrent modules that the CPU kernel computes: found by trying, and on a cache's slots."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.models.qwen3_5 import modeling_qwen3_5

import kvcellar as kv
from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.cpu.hold import hold_mixers, hold_weights
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.backends.torch.cpu.modules.recurrent import KernelMixer
from kvcellar.backends.torch.learn.probe import learn_facts
from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw, random_network, twin_raw
from kvcellar.backends.torch.run.runner import TorchRunner
from kvcellar.errors import BackendError
from kvcellar.kernel import levels
from kvcellar.models.facts import ModelFacts
from tests.stretches import stretches

pytestmark = pytest.mark.kernel
if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

KINDS = {
    "qwen3_5": {"delta"},
    "qwen3_next": {"delta"},
    "olmo_hybrid": {"delta"},
    "kimi_linear": {"delta"},
    "falcon_h1": {"scan"},
    "granitemoehybrid": {"scan"},
    "lfm2": {"convolution"},
}
"""Families whose recurrent modules are all the kernel's; ``test_check.py`` has what they give."""


def bound(family: str, dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[Any, ModelFacts]:
    raw = twin_raw(default_raw(family, **fields))
    facts = learn_facts(raw)
    network = random_network(raw).to(dtype)
    bind_network(network, facts)
    return network, facts


def mixers(network: Any) -> list[KernelMixer]:
    return [module for module in network.modules() if isinstance(module, KernelMixer)]


def run(network: Any, facts: ModelFacts) -> np.ndarray:
    """Run two sequences, of which one is forked, in flat batches; return all logits."""
    with kv.make_seq_session("torch", kv.make_config(facts.params, 64)) as session:
        runner = TorchRunner(network, None, facts.params, facts.vocab_size, session)
        cache = session.cache
        batches = (
            ([0] * 7, [3, 1, 4, 1, 5, 9, 2]),
            ([0, 1, 1, 1], [6, 5, 3, 5]),
            ([0, 2, 2, 1], [8, 9, 7, 9]),
            ([2, 1, 0], [3, 2, 3]),
        )
        rows = []
        for at, (seqs, tokens) in enumerate(batches):
            if at == 2:
                cache.seq_cp(0, 2)
            rows.append(
                runner.forward(tokens, cache.begin_step(stretches(seqs)), range(len(tokens)))
            )
        return np.concatenate(rows)


@pytest.mark.parametrize("family", KINDS)
def test_recurrent_modules_of_a_family_are_the_kernels(family: str) -> None:
    network, facts = bound(family)
    plain = copy.deepcopy(network)
    assert len(hold_mixers(network)) == len(facts.states)
    assert {mixer.part.kind for mixer in mixers(network)} == KINDS[family]
    got, want = run(network, facts), run(plain, facts)
    assert np.abs(got - want).max() <= 5e-4 * np.abs(want).max()


def test_factors_on_inputs_and_on_what_linear_layers_say_are_taken_along() -> None:
    factors = {"ssm_in_multiplier": 0.35, "ssm_multipliers": [0.4, 0.25, 1.7, 0.5, 0.31]}
    network, facts = bound("falcon_h1", **factors)
    plain = copy.deepcopy(network)
    assert len(hold_mixers(network)) == len(facts.states)
    assert {(one.part.scale, one.part.scales) for one in mixers(network)} == {(0.35, "mup_vector")}
    got, want = run(network, facts), run(plain, facts)
    assert np.abs(got - want).max() <= 5e-4 * np.abs(want).max()


def test_steps_that_are_clamped_in_chunks_alone_are_transformers_own() -> None:
    network, _ = bound("nemotron_h")
    assert hold_mixers(network) == {}


def test_a_module_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = bound("qwen3_5")
    own = modeling_qwen3_5.torch_recurrent_gated_delta_rule

    def other(*args: Any, **kwargs: Any) -> Any:
        out, state = own(*args, **kwargs)
        return out, state * 1.01  # a norm behind it takes factors away

    monkeypatch.setattr(modeling_qwen3_5, "torch_recurrent_gated_delta_rule", other)
    assert hold_mixers(network) == {}


@pytest.mark.parametrize(
    ("family", "weights"), [("qwen3_next", "bf16"), ("kimi_linear", "bf16"), ("qwen3_5", "int8")]
)
def test_held_weights_are_those_of_the_mixers_too(
    family: str, weights: str, tmp_path: Path
) -> None:
    network, facts = bound(family, torch.bfloat16)
    plain, again = copy.deepcopy(network), copy.deepcopy(network)
    known = tmp_path / "parts.json"
    held = hold_weights(network, weights, known=known)
    assert held.why_none is None and len(mixers(network)) == len(facts.states)
    assert all(isinstance(mixer.in_proj, KernelLinear) for mixer in mixers(network))
    got, want = run(network, facts), run(plain, facts)
    assert np.linalg.norm(got - want) <= 0.1 * np.linalg.norm(want)
    assert hold_weights(again, weights, known=known).parts == held.parts
    assert np.array_equal(run(again, facts), got)


def test_states_of_transformers_cache_are_refused_not_ignored() -> None:
    network, _ = bound("qwen3_5")
    hold_mixers(network)
    with torch.inference_mode(), pytest.raises(BackendError, match="transformers' cache"):
        network.model.layers[0].linear_attn(
            torch.randn(1, 3, network.config.hidden_size),
            cache_params=DynamicCache(config=network.config),
        )
