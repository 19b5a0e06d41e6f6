"""Models with random weights, for benchmarks: sizes matter to them and words do not."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
}
"""The shape of Llama 3.2 1B."""


def random_llama(shape: dict[str, int], folder: Path) -> Path:
    """Make a random model of a shape in bfloat16, with a tokenizer of a few words."""
    config = transformers.LlamaConfig(
        **shape, max_position_embeddings=16384, tie_word_embeddings=True, dtype="bfloat16"
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def write_gguf(folder: Path, to: Path) -> Path:
    """Write weights as a GGUF file in float16, without a vocabulary: llama.cpp takes token ids.

    Llama's K and Q are stored there in another order of each head's numbers, since llama.cpp
    rotates neighbours.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(to, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        for part, n in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                halves = weight.view(n, 2, -1, weight.shape[1])
                weight = halves.transpose(1, 2).reshape(weight.shape)
        data = (weight.float() if weight.dim() == 1 else weight.half()).numpy()
        writer.add_tensor(names.get_name(name, (".weight",)), data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def quantise_gguf(source: Path, to: Path, scheme: str) -> Path:
    """Quantise a file as llama.cpp does: ``Q8_0`` or ``Q4_0``."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{scheme}")
    found: Any = llama_cpp.llama_model_quantize(
        str(source).encode(), str(to).encode(), ctypes.byref(options)
    )
    if found != 0:
        raise RuntimeError(f"llama.cpp cannot quantise {source} to {scheme}")
    return to
