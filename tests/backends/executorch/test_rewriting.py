"""Parts written in another way: found by what they do, with the same result."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers.activations import GELUTanh
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

import kvcellar as kv
from kvcellar.backends.executorch import exporting
from kvcellar.backends.executorch.exporting import export_program, trace
from kvcellar.backends.executorch.rewriting import (
    DenseExperts,
    DenseSortedExperts,
    RmsNorm,
    TanhGelu,
    rewrite,
)
from kvcellar.backends.executorch.rotating import pairs_for_complex
from kvcellar.backends.torch.learn.checking import twins
from kvcellar.backends.torch.learn.shrink.checkpoints import (
    default_raw,
    random_network,
    twin_raw,
    write_tiny,
)
from kvcellar.errors import ModelError
from kvcellar.models import load_model
from kvcellar.registry import use_cache
from tests.backends.executorch.programs import MAX_TOKENS, quietly


def rewritten(module: nn.Module) -> Any:
    holder = nn.Module()
    holder.part = module
    rewrite(holder)
    return holder.part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Gemma3RMSNorm, GptOssRMSNorm, Qwen3MoeRMSNorm])
def test_a_norm_of_any_class_is_found_by_what_it_does(kind: Any, dtype: torch.dtype) -> None:
    norm = kind(24, eps=1e-5)
    with torch.no_grad():
        norm.weight.uniform_(-2, 2, generator=torch.Generator().manual_seed(1))
    norm = norm.to(dtype)
    made, rows = rewritten(norm), 3 * torch.randn(2, 5, 24).to(dtype)
    assert isinstance(made, RmsNorm) and made.weight is norm.weight
    torch.testing.assert_close(made(rows), norm(rows))


def test_what_is_no_norm_of_that_kind_stays() -> None:
    for module in (CohereLayerNorm((24,)), nn.LayerNorm(24, bias=False), nn.PReLU(24), nn.SiLU()):
        assert rewritten(module) is module
    for module in (GELUTanh(), nn.GELU("tanh")):
        assert isinstance(rewritten(module), TanhGelu)
    assert type(rewritten(nn.GELU())) is nn.GELU


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_experts_of_transformers_interface_run_as_linear_layers(family: str) -> None:
    network = random_network(twin_raw(default_raw(family)))
    experts = next(m for m in network.modules() if hasattr(m, "has_gate"))
    made = rewritten(experts)
    assert isinstance(made, DenseExperts)
    generator = torch.Generator().manual_seed(2)
    n_in = made.inside[0].in_features
    x = torch.randn(7, n_in, generator=generator)
    index = torch.rand(7, len(made.down), generator=generator).argsort(dim=1)[:, :2]
    weights = torch.rand(7, 2, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(made(x, index, weights), experts(x, index, weights))


@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_text"])
def test_mixtures_and_layers_of_several_sizes_call_the_op_once(tmp_path: Any, family: str) -> None:
    model: Any = load_model(write_tiny(family, tmp_path), weights="none")
    rewrite(model.network)
    with quietly():
        program = trace(model.network, MAX_TOKENS)
    calls = [n for n in program.graph.nodes if "update_and_attend" in str(n.target)]
    assert [n.args[4] for n in calls] == list(range(model.params.n_layers))


@pytest.mark.parametrize("family", ["deepseek_v2", "llama4_text"])
def test_a_graph_has_no_complex_numbers_and_says_what_the_model_says(family: str) -> None:
    pair = twins(default_raw(family))
    rewrite(pair.ours)
    with quietly():
        graph = trace(pair.ours, MAX_TOKENS)
    kinds = {getattr(node.meta.get("val"), "dtype", None) for node in graph.graph.nodes}
    assert torch.float32 in kinds and not any(kind.is_complex for kind in kinds if kind)
    ids, at = torch.arange(20)[None] * 7 % 250, torch.arange(20)[None]
    config = kv.make_config(pair.facts.params, 32)
    with kv.make_decode_session("torch", config) as session, use_cache(session.cache):
        (got,) = graph.module()(ids, at, at[0])
    with torch.no_grad():
        want = pair.theirs(input_ids=ids, position_ids=at, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_outside_of_a_trace_complex_numbers_are_torchs() -> None:
    angles = torch.linspace(0, 3, 6).view(2, 3)
    q = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(3))

    def turned() -> torch.Tensor:
        turns = torch.polar(torch.ones_like(angles), angles) * 1.5
        return torch.view_as_real(torch.view_as_complex(q)[None] * turns.unsqueeze(0))

    want = turned()
    with pairs_for_complex():
        torch.testing.assert_close(turned(), want)
        assert not torch.is_tensor(torch.polar(angles, angles))
    assert torch.polar(angles, angles).is_complex()


def test_experts_that_are_given_rows_by_expert_run_as_linear_layers() -> None:
    network = random_network(twin_raw(default_raw("llama4_text")))
    experts = next(m for m in network.modules() if type(m).__name__ == "Llama4TextExperts")
    made = rewritten(experts)
    assert isinstance(made, DenseSortedExperts)
    rows = torch.randn(len(made.down) * 5, made.inside[0].in_features)
    with torch.no_grad():
        torch.testing.assert_close(made(rows), experts(rows))


def test_a_graph_that_cannot_be_exported_is_refused_by_name(
    tmp_path: Any, monkeypatch: Any
) -> None:
    write_tiny("qwen3", tmp_path / "it")
    monkeypatch.setattr(exporting, "trace", Mock(side_effect=ValueError("it branches")))
    match = "graph of 'qwen3' cannot be exported: ValueError: it branches.*backend torch"
    with quietly(), pytest.raises(ModelError, match=match):
        export_program(tmp_path / "it", tmp_path / "x.pte", max_tokens_per_step=32)
    assert not (tmp_path / "x.pte").exists()
