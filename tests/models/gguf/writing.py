"""Tiny models as GGUF files, written by the package of llama.cpp as its converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|think|>")
MERGES = ("t h", "th e", "Ġ a", "i n")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = [*bytes_to_unicode().values(), *(m.replace(" ", "") for m in MERGES), *SPECIALS]

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY) + 7,  # rows to spare, as real embeddings have
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 260,
    "eos_token_id": 261,
    "pad_token_id": 261,
    "tie_word_embeddings": False,
}

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}

Change = Callable[[str, np.ndarray], np.ndarray]
Parts = Callable[[str, np.ndarray], "dict[str, np.ndarray] | None"]


def started(config: Any) -> Any:
    """A network with random weights in which every tensor differs from what it starts with."""
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in network.state_dict().values():
            weight.add_(torch.randn_like(weight) * (0.15 if weight.dim() > 1 else 0.3))
    return network


def in_pairs(n_heads: int, rows: np.ndarray) -> np.ndarray:
    """Rows of Q or K as llama.cpp's converter permutes them."""
    split = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_model(
    path: Path,
    architecture: str,
    network: Any,
    metadata: Mapping[str, Any],
    change: Change = lambda name, values: values,
    *,
    parts: Parts = lambda name, values: None,
    kind: gguf.GGMLQuantizationType | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    split_max_tensors: int = 0,
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Write a network as GGUF.

    Args:
        path: of the file.
        architecture: by the format's names.
        network: of transformers.
        metadata: what only this architecture says, without its name in front.
        change: makes of a tensor, by its name in GGUF, what the converter stores.
        parts: makes of a layer's parameter, by its name in transformers, what the converter stores
            in its place, by the names of GGUF within the layer; None: it is stored as others are.
        kind: type of the matrices whose rows are whole blocks; None: float32.
        extra: further tensors.
        split_max_tensors: most tensors of a file; 0: all of them.
        vocabulary: writes the tokenizer; None: ``write_vocabulary``.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    config = network.config
    ours = {key: field for key, field in _KEYS.items() if key not in metadata}
    said = {key: getattr(config, field, None) for key, field in ours.items()}
    rope = getattr(config, "rope_parameters", None) or {}
    said["rope.freq_base"] = rope.get("rope_theta", 10_000.0)
    for key, value in (said | dict(metadata)).items():
        if value is not None:
            write_metadata(writer, f"{architecture}.{key}", value)
    (vocabulary or write_vocabulary)(writer)
    for name, values in tensors_of(architecture, network, parts).items():
        stored = np.ascontiguousarray(change(name, values))
        is_whole = kind is not None and stored.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        if kind is not None and stored.ndim > 1 and is_whole:
            writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, stored)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that converters give its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add a byte-level vocabulary with a chat template."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types(
        [3 if token in SPECIALS[:-1] else 4 if token in SPECIALS else 1 for token in VOCABULARY]
    )
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(260)
    writer.add_eos_token_id(261)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def tensors_of(
    architecture: str, network: Any, parts: Parts = lambda name, values: None
) -> dict[str, np.ndarray]:
    """The tensors of a network by the names of GGUF, experts taken apart."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[architecture], network.config.num_hidden_layers)
    kept = network.state_dict(keep_vars=True)
    is_tied = network.config.tie_word_embeddings
    found: dict[str, np.ndarray] = {}
    for name, weight in kept.items():
        if is_tied and name == "lm_head.weight":
            continue
        values = weight.detach().numpy()
        stack = re.match(r"model\.altup_(unembed_)?projections\.\d\.weight", name)
        if stack:
            key = f"altup_{'unembd_' if stack[1] else ''}proj.weight"
            found[key] = np.stack([*found.get(key, ()), values])
            continue
        at = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        own = parts(at[2], values) if at else None
        own = _usual(at[2], values) if at and own is None else own
        if own is not None:
            found |= {f"blk.{at[1]}.{part}": stored for part, stored in own.items()}
        else:
            base, _, end = name.rpartition(".")
            spelled = (base, base.replace("model.", "backbone."))
            stored = next((each for each in map(names.get_name, spelled) if each), None)
            found[f"{stored}.{end}" if stored else names.get_name(name)] = values
    return found


def _usual(name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
    """Write parameters that transformers has in another form as converters store them."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(values, 2)
        return {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
    end = name.rpartition(".")[2]
    stored = {
        "gate_up_proj": None,
        "up_proj": "ffn_up_exps.weight",
        "down_proj": "ffn_down_exps.weight",
        "A_log": "ssm_a",
        "D": "ssm_d",
        "dt_bias": "ssm_dt.bias",
        "e_score_correction_bias": "exp_probs_b.bias",
        "expert_bias": "exp_probs_b.bias",
        "sinks": "attn_sinks.weight",
        "layer_scalar": "layer_output_scale.weight",
        "per_expert_scale": "ffn_down_exps.scale",
        "scale": "ffn_gate_inp.scale",
        "correct_output_scale": "altup_correct_scale.weight",
    }.get(end)
    if stored is None and name.endswith(("mlp.gate.weight", ".router.weight")):
        stored = "ffn_gate_inp.weight"
    return None if stored is None else {stored: values}
