"""Parts written in another way: found by what they do, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import GELUTanh
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from kvcellar.backends.executorch.exporting import export_program, trace
from kvcellar.backends.executorch.rewriting import DenseExperts, RmsNorm, TanhGelu, rewrite
from kvcellar.backends.torch.tiny import default_raw, random_network, twin_raw, write_tiny
from kvcellar.errors import ModelError
from kvcellar.models import load_model
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


def test_a_graph_that_cannot_be_exported_is_refused_by_name(tmp_path: Any) -> None:
    write_tiny("llama4_text", tmp_path / "it")
    with quietly(), pytest.raises(ModelError, match=r"graph of 'llama4_text'.*backend torch"):
        export_program(tmp_path / "it", tmp_path / "x.pte", max_tokens_per_step=32)
    assert not (tmp_path / "x.pte").exists()
