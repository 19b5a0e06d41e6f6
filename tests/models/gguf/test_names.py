"""Names of a file's tensors are those that llama.cpp's own package has for them."""

from __future__ import annotations

import gguf
import pytest

from kvcellar.models.gguf.names import stored_name

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "phi3", "granite", "smollm3", "olmo2", "gemma2", "gemma3"),
    *("qwen2moe", "qwen3moe", "olmoe", "granitemoe", "gpt-oss"),
)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_tensor_of_a_family_has_the_name_that_the_format_has_for_it(architecture):
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds[architecture]
    theirs = gguf.get_tensor_name_map(kind, 4)
    tensors = [gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[kind]]
    there = {f"{one.format(bid=2)}.weight" for one in tensors}
    layer = "model.layers.2."
    names = [f"{layer}{part}_proj" for part in ("mlp.gate", "mlp.up", "mlp.down", "mlp.gate_up")]
    names += [f"{layer}self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")]
    names += [f"{layer}self_attn.{part}" for part in ("qkv_proj", "q_norm", "k_norm")]
    names += [f"{layer}{when}_layernorm" for when in ("input", "post_attention")]
    names += [f"{layer}{when}_feedforward_layernorm" for when in ("pre", "post")]
    names += [f"{layer}mlp.{one}" for one in ("gate", "router", "shared_expert_gate")]
    names += [f"{layer}mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")]
    names += [f"{layer}block_sparse_moe.router.layer", f"{layer}self_attn.sinks"]
    names += ["model.embed_tokens", "model.norm", "lm_head"]
    known = {name: theirs.get_name(name) for name in names}
    assert sum(one is not None for one in known.values()) >= 10
    for name, wanted in known.items():
        ours = name if name.endswith("sinks") else f"{name.removesuffix('.layer')}.weight"
        if wanted is not None and f"{wanted}.weight" in there:
            assert stored_name(ours, there) == f"{wanted}.weight"


def test_a_name_that_nothing_is_stored_under_stays():
    assert stored_name("model.layers.2.mlp.gate_proj.weight", ()) == (
        "model.layers.2.mlp.gate_proj.weight"
    )
    assert stored_name("model.other.weight", ("model.other.weight",)) == "model.other.weight"
