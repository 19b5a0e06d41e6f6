"""Models with random weights, for benchmarks: sizes matter to them and words do not."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcellar.models.files.hub import DEMO_FOLDER

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

QWEN35_08B = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 248_320,
}
"""The shape of Qwen3.5 0.8B: three recurrent layers, then one of attention."""


def random_llama(shape: dict[str, int], folder: Path, device: str = "cpu") -> Path:
    """Make a random Llama of a shape; see :func:`random_model`."""
    return random_model(
        "llama", shape, folder, device, max_position_embeddings=16384, tie_word_embeddings=True
    )


def random_model(
    kind: str, shape: dict[str, int], folder: Path, device: str = "cpu", **fields: Any
) -> Path:
    """Make a random model of a family in bfloat16 on a device, with a word for each token."""
    config = transformers.CONFIG_MAPPING[kind](**shape, **fields, dtype="bfloat16")
    model = _empty(config).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    model.tie_weights()
    model.save_pretrained(folder)
    _save_words(config.vocab_size, folder)
    return folder


def random_vision(folder: Path, text: dict[str, int], tower: dict[str, int]) -> Path:
    """Make a random Qwen 2.5-VL in bfloat16 with the bundled tokenizer; all has to be given.

    Args:
        folder: where it is saved.
        text: shape of its language model, whose vocabulary is the bundled tokenizer's and more.
        tower: shape of its vision part.
    """
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    ids = tokenizer.convert_tokens_to_ids(tokens)
    names = "vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id"
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 8, 8]}
    more = {"max_position_embeddings": 32768, "rope_parameters": rope, "head_dim": 64}
    config = transformers.CONFIG_MAPPING["qwen2_5_vl"](
        text_config={**text, **more, "tie_word_embeddings": True, **_NO_ENDS},
        vision_config=tower,
        **dict(zip(names, ids, strict=True)),
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.chat_template = _VISION_TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
    said = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2}
    processor = {**said, "size": sizes, "processor_class": "Qwen2_5_VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


_NO_ENDS = {"bos_token_id": None, "eos_token_id": None}

_VISION_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def random_gpt_oss(shape: dict[str, int], folder: Path, device: str = "cpu", **fields: Any) -> Path:
    """Make a random gpt-oss whose experts are in MXFP4, as it is shipped; the rest in bfloat16."""
    from safetensors.torch import save_file

    config = transformers.CONFIG_MAPPING["gpt_oss"](**shape, **fields, dtype="bfloat16")
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, parameter in _empty(config).named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            n_experts, n_in, n_out = parameter.shape
            groups = n_experts, n_out, n_in // 32
            made = torch.empty(*groups, 16, dtype=torch.uint8, device=device)
            tensors[f"{name}_blocks"] = made.random_(0, 256, generator=generator).cpu()
            tensors[f"{name}_scales"] = torch.full(groups, 127 - 7, dtype=torch.uint8)
            continue
        made = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        made.normal_(0.0, 0.02, generator=generator)
        tensors[name] = (made.fill_(1.0) if name.endswith("norm.weight") else made).cpu()
    config.quantization_config = {"quant_method": "mxfp4"}
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _save_words(config.vocab_size, folder)
    return folder


def _empty(config: Any) -> Any:
    """Return the network of a config on the meta device, in bfloat16."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _save_words(n: int, folder: Path) -> None:
    """Save a tokenizer of so many words, none of which ends a text."""
    words = {f"w{i}": i for i in range(n)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


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


def write_blocks(shape: dict[str, int], to: Path, kind: str | None = None) -> Path:
    """Write a Llama of a shape with random blocks; its vocabulary is the bytes and made-up words.

    Args:
        shape: of the model.
        to: the GGUF file.
        kind: of all blocks: ``Q4_K`` or ``Q6_K``. None: those that a Q4_K_M file has: half of the
            layers have v and down in Q6_K, which the embedding has as well; the rest is Q4_K.
    """
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(to, "llama")
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    n_layers, n_vocab = shape["num_hidden_layers"], shape["vocab_size"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_context_length(16384)
    writer.add_embedding_length(hidden)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    words = [*bytes_to_unicode().values(), "ab", *(f"w{i}" for i in range(n_vocab - 257))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * n_vocab)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)

    def add(name: str, n_out: int, n_in: int, is_finer: bool = False) -> None:
        own = gguf.GGMLQuantizationType[kind or ("Q6_K" if is_finer else "Q4_K")]
        writer.add_tensor(f"{name}.weight", _blocks(random, own, n_out, n_in), raw_dtype=own)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))

    add("token_embd", n_vocab, hidden, is_finer=True)
    norm("output_norm")
    for i in range(n_layers):
        is_finer = i < n_layers // 8 or i >= 7 * n_layers // 8 or (i - n_layers // 8) % 3 == 2
        norm(f"blk.{i}.attn_norm")
        norm(f"blk.{i}.ffn_norm")
        add(f"blk.{i}.attn_q", heads * head, hidden)
        add(f"blk.{i}.attn_k", kv_heads * head, hidden)
        add(f"blk.{i}.attn_v", kv_heads * head, hidden, is_finer)
        add(f"blk.{i}.attn_output", hidden, heads * head)
        add(f"blk.{i}.ffn_gate", inner, hidden)
        add(f"blk.{i}.ffn_up", inner, hidden)
        add(f"blk.{i}.ffn_down", hidden, inner, is_finer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _blocks(random: np.random.Generator, kind: Any, n_out: int, n_in: int) -> np.ndarray:
    """Return random blocks, uint8 ``[n_out, bytes of a row]``, of weights around 0.02."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (n_out * n_in // numbers, size), dtype=np.uint8)
    if kind == gguf.GGMLQuantizationType.Q6_K:  # 128 + 64 bytes of numbers, 16 int8 scales, one d
        blocks[:, 192:208] = 16
        scales = np.array([0.02 / 16 / 18], np.float16)
        blocks[:, 208:] = scales.view(np.uint8)
    else:  # d and the minima's, 12 bytes of 6 bits that count them, 128 bytes of numbers
        scale, minimum = 16, 30  # of each 32: weights are d * 16 * (0 .. 15) - d_min * 30
        heads = np.array([0.02 / 4.6 / scale, 0.02 / 4.6 * 7.5 / minimum], np.float16)
        blocks[:, :4] = heads.view(np.uint8)
        blocks[:, 4:8] = scale | scale >> 4 << 6
        blocks[:, 8:12] = minimum | minimum >> 4 << 6
        blocks[:, 12:16] = scale & 15 | (minimum & 15) << 4
    return blocks.reshape(n_out, -1)
