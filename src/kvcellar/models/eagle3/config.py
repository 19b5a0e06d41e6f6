"""Reads an EAGLE-3 head's ``config.json``, in the format of its authors and its later variants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.errors import ModelError
from kvcellar.models.files.configs import rope_of

MOST_HELD_TWICE = 1 << 24
"""Numbers of a float32 head whose matrices are held for the CPU kernel too, in 8 bits."""

_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def default_feature_layers(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose input a head reads where its config names none: low, middle, high.

    Layers 2, n // 2 and n - 3, as the authors' code has it; where a model is too small for three
    different ones, a third, two thirds and all of it. Layer ``n_layers`` is the output of the last
    one, before the norm.
    """
    published = (2, n_layers // 2, n_layers - 3)
    if published[0] < published[1] < published[2]:
        return published
    return (n_layers // 3, 2 * n_layers // 3, n_layers)


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """The shape of a head.

    Attributes:
        hidden_size: of the head.
        target_hidden_size: of the model whose hidden states it reads.
        intermediate_size: of its MLP.
        n_heads: of its attention.
        n_kv_heads: of its attention.
        head_dim: of its attention.
        vocab_size: of the target.
        draft_vocab_size: tokens that it can say.
        rms_norm_eps: of all norms.
        max_positions: the longest sequence that it was made for.
        rope_parameters: as transformers calls them.
        feature_layers: whose inputs it reads, low to high; None: the defaults for its target.
        attention_bias: whether q, k and v have one.
        fc_bias: whether what joins the features has one.
        norm_before_residual: whether the residual is the normalised hidden state.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_positions: int
    rope_parameters: Mapping[str, Any]
    feature_layers: tuple[int, ...] | None = None
    attention_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False

    @property
    def n_features(self) -> int:
        """Width of the features of one token."""
        return 3 * self.target_hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Return the config as ``read_eagle3_config`` and other runtimes read it."""
        written = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": dict(self.rope_parameters),
            "attention_bias": self.attention_bias,
            "bias": self.fc_bias,
            "norm_before_residual": self.norm_before_residual,
            "tie_word_embeddings": False,
        }
        if self.feature_layers is not None:
            written["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": list(self.feature_layers),
                "use_aux_hidden_state": True,
            }
        return written


def read_eagle3_config(raw: Mapping[str, Any], where: Path) -> Eagle3Config:
    """Read the ``config.json`` of an EAGLE-3 head.

    Args:
        raw: the file.
        where: its folder, for messages.

    Raises:
        ModelError: it is of no EAGLE-3 head, or of one that this network is not.
    """
    from transformers.models.llama.configuration_llama import LlamaConfig

    _check_kind(raw, where)
    config: Any = LlamaConfig.from_dict(dict(raw))
    if not rope_of(config).is_fixed:
        raise ModelError(
            f"{where} has RoPE of type {rope_of(config).kind!r}, which turns every position anew "
            f"as a sequence grows; K that is cached would be wrong, so it is not supported"
        )
    layers = _feature_layers(raw, where)
    return Eagle3Config(
        hidden_size=config.hidden_size,
        target_hidden_size=int(raw.get("target_hidden_size") or config.hidden_size),
        intermediate_size=config.intermediate_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or config.vocab_size),
        rms_norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        feature_layers=None if layers is None else tuple(layers),
        attention_bias=bool(config.attention_bias),
        fc_bias=bool(raw.get("bias", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
    )


def _check_kind(raw: Mapping[str, Any], where: Path) -> None:
    """Refuse a config of no EAGLE-3 head, or of one that this network is not.

    Raises:
        ModelError: it is one of these.
    """
    missing = [key for key in _NEEDED if not isinstance(raw.get(key), int)]
    if missing:
        raise ModelError(
            f"the config.json in {where} lacks {', '.join(missing)}, so it is not of an EAGLE-3 "
            f"head; give a folder in the format of the EAGLE repository"
        )
    n_layers = raw.get("num_hidden_layers", 1)
    if n_layers != 1:
        raise ModelError(
            f"{where} has {n_layers} layers and an EAGLE-3 head has one; to guess with a whole "
            f"model give its name alone"
        )
    eagle = raw.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ModelError(
            f"{where} reads the last hidden state alone (use_aux_hidden_state is false), as EAGLE "
            f"1 and 2 do; an EAGLE-3 head reads three layers"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{where} has the activation {raw['hidden_act']!r}, which is not supported; EAGLE-3 "
            f"heads have silu"
        )


def _feature_layers(raw: Mapping[str, Any], where: Path) -> list[int] | None:
    """Return the layers that a config names; None: it names none.

    Raises:
        ModelError: they are not three.
    """
    eagle = raw.get("eagle_config") or {}
    layers: list[int] | None = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    if layers is not None and (len(layers) != 3 or not all(isinstance(i, int) for i in layers)):
        raise ModelError(
            f"{where} names the layers {layers}, and an EAGLE-3 head reads three; its config.json "
            f"is damaged or of another kind of head"
        )
    return layers
