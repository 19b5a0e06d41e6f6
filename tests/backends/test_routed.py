"""Blocks of mixtures as one call of the kernel: routers are found by what they choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcellar.kernel import levels  # noqa: E402

if not levels.is_available():
    pytest.skip(levels.why_not(), allow_module_level=True)

import kvcellar as kv  # noqa: E402
from kvcellar.backends.torch.bind.model_attention import NAME  # noqa: E402
from kvcellar.backends.torch.cpu.hold import hold_weights  # noqa: E402
from kvcellar.backends.torch.cpu.modules.mixtures import mixtures  # noqa: E402
from kvcellar.backends.torch.cpu.modules.routed import KernelMixture, find_router  # noqa: E402
from kvcellar.backends.torch.run.runner import TorchRunner  # noqa: E402

pytestmark = pytest.mark.kernel

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
}


def make(kind: str, **fields: Any) -> Any:
    """Return a random model in bfloat16."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**SHAPE | fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=NAME
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmoe", {}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("minimax_m2", {}),
    ],
)
def test_a_router_is_found_by_what_it_chooses(kind: str, fields: dict[str, Any]) -> None:
    model = make(kind, **fields)
    experts = next(mixtures(model))
    name = next(name for name, one in model.named_modules() if one is experts)
    assert find_router(model.get_submodule(name.rpartition(".")[0]), experts) is not None


def test_a_block_with_a_shared_expert_is_more_than_its_experts() -> None:
    model = make("qwen2_moe", shared_expert_intermediate_size=64)
    block = model.model.layers[0].mlp
    assert find_router(block, block.experts) is None


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_a_mixture_is_one_call_of_the_kernel_and_says_what_its_modules_say(
    kind: str, weights: str
) -> None:
    model = make(kind)
    held = hold_weights(model, weights)
    assert held.decoder is not None and held.why_none is None
    assert all(isinstance(layer.mlp, KernelMixture) for layer in model.model.layers)
    params = kv.ModelCacheParams(2, 2, 32)
    tokens = [(7 * i) % 96 for i in range(24)]

    def logits(decoder: Any) -> np.ndarray:
        config = kv.make_config(params, 64, kv_dtype="bfloat16")
        with kv.make_decode_session("torch", config) as session:
            runner = TorchRunner(model, decoder, params, 96, session, ())
            parts = [runner.forward(tokens[i : i + 3], range(i, i + 3)) for i in range(0, 24, 3)]
        return np.concatenate(parts)

    whole = logits(held.decoder)
    for layer in model.model.layers:
        layer.few = 0
    by_modules = logits(None)
    # Where two experts are as likely, rounding decides which one a token takes.
    assert np.median(abs(whole - by_modules)) < 0.02 * abs(by_modules).mean()
