"""Architectures of GGUF: which family of transformers each is, and what its metadata says of it.

The names are the format's own: a file says nothing else of how its model computes. What is common
to all is written down once, a family adds what is its alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcellar.models.gguf import mixtures as of
from kvcellar.models.gguf.family import LAYER_NORM, Family, Raw, windows_of
from kvcellar.models.gguf.gemmas import GEMMA_FAMILIES
from kvcellar.models.gguf.reader import GgufFile


def _mixtral(file: GgufFile, raw: Raw) -> None:
    if file.whole("llama.expert_count"):
        raw |= {
            "model_type": "mixtral",
            "sliding_window": None,
            "num_local_experts": file.whole("llama.expert_count"),
            "num_experts_per_tok": file.whole("llama.expert_used_count"),
        }


def _phi3(file: GgufFile, raw: Raw) -> None:
    raw["sliding_window"] = raw.get("sliding_window") or None
    original = raw["rope_parameters"].get("original_max_position_embeddings")
    raw["original_max_position_embeddings"] = original or raw["max_position_embeddings"]


def _mistral3(file: GgufFile, raw: Raw) -> None:
    """Read what Ministral 3 has and older Mistrals have not: queries that grow with positions."""
    beta = file.number("mistral3.attention.temperature_scale")
    if beta:
        raw["model_type"] = "ministral3"
        raw["rope_parameters"] |= {
            "llama_4_scaling_beta": beta,
            "max_position_embeddings": raw["max_position_embeddings"],
        }


def _windows(period: int) -> Callable[[GgufFile, Raw], None]:
    """Make what reads which layers have a window: all but each ``period``-th if nothing is said."""

    def finish(file: GgufFile, raw: Raw) -> None:
        window = raw.get("sliding_window") or None
        n_layers = raw["num_hidden_layers"]
        raw["sliding_window"] = window
        raw["layer_types"] = windows_of(file, n_layers, period if window else 0)

    return finish


def _olmo2(file: GgufFile, raw: Raw) -> None:
    if raw.get("sliding_window"):
        _windows(4)(file, raw)
        rope = raw["rope_parameters"]
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        raw["model_type"] = "olmo3"
        raw["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}


def _stablelm(file: GgufFile, raw: Raw) -> None:
    raw["use_parallel_residual"] = bool(file.flag("stablelm.use_parallel_residual"))


_QKV_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_QKV_BIAS, "mlp_bias": "ffn_up.bias"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_PATTERN = frozenset(("attention.sliding_window_pattern",))
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_MISTRAL3 = frozenset(("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"))

_OF_IMAGES = frozenset(("rope.dimension_sections", "n_deepstack_layers"))
"""Keys that matter for images alone: a text's tokens have the same position in each section."""

_DENSE = {
    "llama": Family(
        "llama",
        biases=_BIASES,
        reads=frozenset(("expert_count",)),
        is_turned=True,
        finish=_mixtral,
    ),
    "mistral3": Family(
        "mistral",
        fixed={"sliding_window": None},
        reads=_MISTRAL3,
        is_turned=True,
        finish=_mistral3,
    ),
    "qwen2": Family("qwen2"),
    "qwen2vl": Family("qwen2", reads=_OF_IMAGES),
    "qwen3": Family("qwen3"),
    "qwen3vl": Family("qwen3", reads=_OF_IMAGES),
    "phi3": Family("phi3", _WINDOW, finish=_phi3),
    "glm4": Family("glm4", biases=_QKV_BIAS),
    "granite": Family("granite", _SCALES, biases=_BIASES, is_turned=True),
    "smollm3": Family("smollm3", biases=_BIASES, is_turned=True),
    "seed_oss": Family("seed_oss", biases={**_BIASES, "attention_out_bias": "attn_output.bias"}),
    "olmo2": Family("olmo2", _WINDOW, reads=_PATTERN, finish=_olmo2),
    "exaone4": Family("exaone4", _WINDOW, reads=_PATTERN, finish=_windows(4)),
    "hunyuan-dense": Family("hunyuan_v1_dense", biases=_QKV_BIAS),
    "ernie4_5": Family("ernie4_5", biases={"use_bias": "attn_q.bias"}),
    "arcee": Family("arcee", biases=_BIASES, is_turned=True),
    "command-r": Family(
        "cohere",
        {"logit_scale": "logit_scale"},
        biases={**_QKV_BIAS, "use_qk_norm": "attn_q_norm.weight"},
        epsilon=LAYER_NORM,
    ),
    "cohere2": Family(
        "cohere2",
        {"logit_scale": "logit_scale", **_WINDOW},
        biases=_QKV_BIAS,
        epsilon=LAYER_NORM,
        finish=_windows(4),
    ),
    "starcoder2": Family(
        "starcoder2",
        _WINDOW,
        biases={"use_bias": "attn_q.bias"},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "stablelm": Family(
        "stablelm",
        biases={"use_qkv_bias": "attn_q.bias"},
        reads=frozenset(("use_parallel_residual",)),
        epsilon=LAYER_NORM,
        finish=_stablelm,
    ),
    "nemotron": Family(
        "nemotron", epsilon=("attention.layer_norm_epsilon", "norm_eps"), norm_offset=1.0
    ),
}

_OF_GRANITE = replace(_DENSE["granite"], fields={**_SCALES, **of.LOCAL})

_MIXED = {
    "qwen2moe": Family(
        "qwen2_moe",
        {**of.EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Family("qwen3_moe", of.EXPERTS, {"norm_topk_prob": True}),
    "qwen3vlmoe": Family("qwen3_moe", of.EXPERTS, {"norm_topk_prob": True}, reads=_OF_IMAGES),
    "qwen3next": of.QWEN3_NEXT,
    "gpt-oss": of.GPT_OSS,
    "deepseek2": of.DEEPSEEK2,
    "glm4moe": of.GLM4_MOE,
    "lfm2": of.LFM2,
    "lfm2moe": of.LFM2_MOE,
    "granitemoe": replace(_OF_GRANITE, model_type="granitemoe", finish=of.granite_shared),
    "granitehybrid": replace(
        _OF_GRANITE,
        model_type="granitemoehybrid",
        reads=of.GRANITE_HYBRID,
        finish=of.granite_hybrid,
    ),
    "ernie4_5-moe": of.ERNIE_MOE,
    "hunyuan-moe": of.HUNYUAN_MOE,
    "minimax-m2": of.MINIMAX_M2,
    "olmoe": Family("olmoe", of.EXPERTS, {"norm_topk_prob": False}),
    "falcon-h1": of.FALCON_H1,
    "nemotron_h": of.NEMOTRON_H,
    "nemotron_h_moe": of.NEMOTRON_H_MOE,
}

FAMILIES = {**_DENSE, **GEMMA_FAMILIES, **_MIXED}
"""Families by architecture of GGUF."""

TILED = {"qwen35": of.QWEN3_5, "qwen35moe": of.QWEN3_5_MOE}
"""Families whose value heads lie in files in another order than in transformers, which reads these
files by tables of its own."""
