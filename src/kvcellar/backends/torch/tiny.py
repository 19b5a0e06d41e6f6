"""Tiny checkpoints with random weights, of any family that transformers can build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.auto import modeling_auto

from kvcellar.backends.torch.twin import VOCAB_SIZE, meta_network, twin
from kvcellar.errors import ModelError
from kvcellar.models.tokenizer import quiet

SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""Special tokens of a tiny tokenizer, behind its 256 bytes."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Chat template of a tiny tokenizer."""

_DEFAULTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
"""Fields that some families' own defaults leave open -> what a tiny model has there."""

_MOST_NUMBERS = 20_000_000
"""Numbers of a tiny model at most."""

_SPREAD = 2.0
"""Spread of a tiny model's logits where the model itself scales them to almost nothing."""


def zoo() -> list[str]:
    """Return every model type whose decoder transformers can build, sorted.

    Found from the mappings by which transformers itself picks classes: causal language models, and
    models that read images or sounds beside text.
    """
    found: dict[str, Any] = {
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }
    return sorted(found)


def default_config(model_type: str, **fields: Any) -> Any:
    """Return the config of a family's text model with its class's own defaults, made complete.

    Args:
        model_type: the family, as its config.json has it.
        fields: values that are wanted in place of the defaults.

    Raises:
        ModelError: transformers has no such family, or its defaults make no text config.
    """
    try:
        config = transformers.CONFIG_MAPPING[model_type]()
        text = config.get_text_config(decoder=True)
        raw = {**text.to_dict(), **fields}
        return type(text)(**{**raw, **_open(raw)})
    except Exception as error:  # whatever a config class does not like of its own defaults
        raise ModelError(
            f"transformers makes no text config of model type {model_type!r} by its defaults: "
            f"{type(error).__name__}: {error}; give the fields that it lacks"
        ) from error


def _open(raw: dict[str, Any]) -> dict[str, Any]:
    """Return values for what a family's defaults leave open and its model needs."""
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    values: dict[str, Any] = dict(_DEFAULTS)
    if isinstance(heads, int) and isinstance(hidden, int):
        values |= {"head_dim": hidden // heads, "num_key_value_heads": heads}
    return {key: value for key, value in values.items() if key in raw and raw[key] is None}


def tiny_network(config: Any, seed: int = 0) -> Any:
    """Return a network of a twin's config with random weights whose logits say something.

    Raises:
        ModelError: its parts are not small.
    """
    n_numbers = sum(parameter.numel() for parameter in meta_network(config).parameters())
    if n_numbers > _MOST_NUMBERS:
        raise ModelError(
            f"a twin of {config.model_type} has {n_numbers:,} numbers, more than "
            f"{_MOST_NUMBERS:,}; some of its parts have sizes that nobody here knows"
        )
    auto: Any = transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = auto.from_config(config, dtype=torch.float32)
    randomise(network, seed)
    network.eval()
    head = network.get_output_embeddings()
    with torch.no_grad():
        spread = network(torch.arange(24)[None], use_cache=False).logits.std().item()
        if head is not None and 0.0 < spread < 1.0:
            head.weight.mul_(_SPREAD / spread)
    return network


def randomise(network: torch.nn.Module, seed: int = 0) -> None:
    """Give every parameter a value of its own, so that one that is not loaded is missed.

    Matrices keep the size of what they are given, embeddings and the head make clear choices, and
    norms, biases and the like move a little from where the model starts them.
    """
    is_tied = bool(getattr(network.config, "tie_word_embeddings", False))
    words = {id(m.weight) for m in network.modules() if isinstance(m, torch.nn.Embedding)}
    words |= {id(p) for p in network.parameters() if VOCAB_SIZE in p.shape}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(network.named_parameters()):
            noise = torch.empty(parameter.shape).normal_(0.0, 1.0, generator=generator)
            if id(parameter) in words:
                parameter.copy_((0.15 if is_tied else 0.3) * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * max(parameter.shape[-1], 1) ** -0.5)
            else:
                parameter.add_(0.1 * noise)


def write_tiny(model_type: str, folder: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a tiny random checkpoint of a family; return its folder.

    Args:
        model_type: the family, as its config.json has it.
        folder: where to; made if it is not there.
        seed: of the weights.
        fields: values that are wanted in place of the family's defaults.

    Raises:
        ModelError: transformers has no such family, or no small model of it can be built.
    """
    config = twin(default_config(model_type, **fields))
    network = tiny_network(config, seed)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet(lambda part: None):
        network.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer(specials: Sequence[str] = SPECIALS) -> Any:
    """Return a tokenizer with one token per byte, ids 0 to 255, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) + len(specials) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    make: Any = transformers.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, bos_token=specials[0], eos_token=specials[1])
    fast.chat_template = CHAT_TEMPLATE
    return fast
