"""Tiny checkpoints with random weights, one per family, saved as transformers saves real ones.

The weights are spread enough that attention is uneven and greedy choices are clear, and every
tensor differs from what a model starts with: one that is not loaded changes the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 272
"""256 bytes, 8 special tokens, and a few rows to spare, as real embeddings have."""

WINDOW = 8

SPECIALS = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "dtype": "float32",
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(
        **COMMON,
        num_hidden_layers=3,
        head_dim=24,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": lambda: transformers.MistralConfig(
        **COMMON, num_hidden_layers=3, head_dim=16, sliding_window=WINDOW
    ),
    "mistral_full": lambda: transformers.MistralConfig(
        **COMMON, num_hidden_layers=2, head_dim=32, sliding_window=None
    ),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, num_hidden_layers=3),
    "qwen2_window": lambda: transformers.Qwen2Config(
        **COMMON,
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON | {"num_key_value_heads": 1}, num_hidden_layers=3, head_dim=32
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON,
        num_hidden_layers=4,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=20.0,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=7,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        head_dim=32,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
}
"""Name of a checkpoint -> its config. Two families come in two shapes."""


def make_checkpoint(family: str, folder: Path, **save_options: Any) -> Path:
    """Save a model of the family and a tokenizer in ``folder``."""
    save(make_model(family), folder, **save_options)
    return folder


def make_model(family: str) -> Any:
    """A model of the family with random weights, the same each time."""
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model)
    return model


def randomize(model: Any, seed: int = 7) -> None:
    """Give every parameter a value of its own."""
    generator = torch.Generator().manual_seed(seed)
    is_gemma = "Gemma" in type(model).__name__
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0.0, 1.0 if "sinks" in name else 0.2, generator=generator)
            if name.endswith("norm.weight") and not is_gemma:
                parameter += 1.0


def save(model: Any, folder: Path, **options: Any) -> None:
    """Save a model and the tiny tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer(n_extra: int = 0, chat_template: str | None = CHAT_TEMPLATE) -> Any:
    """One token per byte, ids 0 to 255, then the special ones, then ``n_extra`` plain words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([f"word{i}" for i in range(n_extra)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = chat_template
    return fast


def rewrite(path: Path, change: Any) -> None:
    """Change the tensors of a safetensors file."""
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; ``...`` removes one."""
    value = json.loads(path.read_text())
    value.update(changes)
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not ...}))
