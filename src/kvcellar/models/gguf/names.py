"""Names of tensors: the format's own for those that transformers has."""

from __future__ import annotations

from collections.abc import Collection

_NAMES = {
    "model.embed_tokens": ("token_embd",),
    "model.norm": ("output_norm",),
    "lm_head": ("output",),
    "input_layernorm": ("attn_norm",),
    "self_attn.q_proj": ("attn_q",),
    "self_attn.k_proj": ("attn_k",),
    "self_attn.v_proj": ("attn_v",),
    "self_attn.qkv_proj": ("attn_qkv",),
    "self_attn.o_proj": ("attn_output",),
    "self_attn.q_norm": ("attn_q_norm",),
    "self_attn.k_norm": ("attn_k_norm",),
    "post_attention_layernorm": ("post_attention_norm", "ffn_norm"),
    "pre_feedforward_layernorm": ("ffn_norm",),
    "post_feedforward_layernorm": ("post_ffw_norm",),
    "post_feedforward_layernorm_1": ("post_ffw_norm_1",),
    "pre_feedforward_layernorm_2": ("pre_ffw_norm_2",),
    "post_feedforward_layernorm_2": ("post_ffw_norm_2",),
    "model.embed_tokens_per_layer": ("per_layer_token_embd",),
    "model.per_layer_model_projection": ("per_layer_model_proj",),
    "model.per_layer_projection_norm": ("per_layer_proj_norm",),
    "per_layer_input_gate": ("inp_gate",),
    "per_layer_projection": ("proj",),
    "post_per_layer_input_norm": ("post_norm",),
    "router.proj": ("ffn_gate_inp",),
    "mlp.gate_proj": ("ffn_gate",),
    "mlp.up_proj": ("ffn_up",),
    "mlp.gate_up_proj": ("ffn_up",),
    "mlp.down_proj": ("ffn_down",),
    "self_attn.sinks": ("attn_sinks",),
    "self_attn.q_a_proj": ("attn_q_a",),
    "self_attn.q_a_layernorm": ("attn_q_a_norm",),
    "self_attn.q_b_proj": ("attn_q_b",),
    "self_attn.kv_a_proj_with_mqa": ("attn_kv_a_mqa",),
    "self_attn.kv_a_layernorm": ("attn_kv_a_norm",),
    "self_attn.kv_b_proj": ("attn_kv_b",),
    "mlp.gate": ("ffn_gate_inp",),
    "mlp.router": ("ffn_gate_inp",),
    "block_sparse_moe.router": ("ffn_gate_inp",),
    "mlp.shared_expert.gate_proj": ("ffn_gate_shexp",),
    "mlp.shared_expert.up_proj": ("ffn_up_shexp",),
    "mlp.shared_expert.down_proj": ("ffn_down_shexp",),
    "mlp.shared_experts.gate_proj": ("ffn_gate_shexp",),
    "mlp.shared_experts.up_proj": ("ffn_up_shexp",),
    "mlp.shared_experts.down_proj": ("ffn_down_shexp",),
    "mlp.shared_expert_gate": ("ffn_gate_inp_shexp",),
    "model.embedding_norm": ("token_embd_norm", "output_norm"),
    "operator_norm": ("attn_norm",),
    "ffn_norm": ("ffn_norm",),
    "self_attn.q_layernorm": ("attn_q_norm",),
    "self_attn.k_layernorm": ("attn_k_norm",),
    "self_attn.out_proj": ("attn_output",),
    "feed_forward.gate": ("ffn_gate_inp",),
    "feed_forward.w1": ("ffn_gate",),
    "feed_forward.w3": ("ffn_up",),
    "feed_forward.w2": ("ffn_down",),
    "conv.in_proj": ("shortconv.in_proj",),
    "conv.conv": ("shortconv.conv",),
    "conv.out_proj": ("shortconv.out_proj",),
    "shared_mlp.output_linear": ("ffn_down", "ffn_down_shexp"),
    "linear_attn.in_proj_qkvz": ("ssm_in",),
    "linear_attn.in_proj_ba": ("ssm_ba",),
    "linear_attn.in_proj_qkv": ("attn_qkv",),
    "linear_attn.in_proj_z": ("attn_gate",),
    "linear_attn.in_proj_a": ("ssm_alpha",),
    "linear_attn.in_proj_b": ("ssm_beta",),
    "linear_attn.conv1d": ("ssm_conv1d",),
    "linear_attn.norm": ("ssm_norm",),
    "linear_attn.out_proj": ("ssm_out",),
    "mamba.in_proj": ("ssm_in",),
    "mamba.conv1d": ("ssm_conv1d",),
    "mamba.norm": ("ssm_norm",),
    "mamba.out_proj": ("ssm_out",),
}
"""Names of transformers, of a layer within the layer -> names that files have for them; where there
are several, the first that a file has is meant."""

_PARAMETERS = {
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
} | {
    f"{module}.{leaf}": name
    for module in ("mamba", "linear_attn")
    for leaf, name in (("A_log", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias"))
}
"""Parameters of transformers that are no module's weight or bias -> names that files have."""

_LAYER = "model.layers."


def stored_name(name: str, there: Collection[str]) -> str:
    """Return what a file calls a tensor.

    Args:
        name: in transformers, such as ``model.layers.3.self_attn.q_proj.weight``, or
            ``model.layers.3.self_attn.sinks``, which is a parameter itself.
        there: names of the file's tensors.

    Returns:
        Such as ``blk.3.attn_q.weight``; ``name`` where there is no such tensor.
    """
    layer, within = "", name
    if name.startswith(_LAYER):
        number, _, within = name.removeprefix(_LAYER).partition(".")
        layer = f"blk.{number}."
    if within in _PARAMETERS:
        return f"{layer}{_PARAMETERS[within]}"
    base, suffix = (within, "weight") if within in _NAMES else within.rsplit(".", 1)
    found = (f"{layer}{one}.{suffix}" for one in _NAMES.get(base, ()))
    return next((one for one in found if one in there), name)
