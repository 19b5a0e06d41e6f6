"""Random EAGLE-3 heads in the published format, and the same network written down once more."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def head_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` as the EAGLE repository writes it, for the tiny models."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "vocab_size": 272,
        "draft_vocab_size": 100,
        "torch_dtype": "float32",
        **changes,
    }


def head_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights by the published names."""
    drawn = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=drawn) / math.sqrt(columns) * 1.5

    def norm(width: int) -> Tensor:
        return 1 + 0.3 * torch.randn(width, generator=drawn)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    n_q = config["num_attention_heads"] * head_dim
    n_kv = config["num_key_value_heads"] * head_dim
    n_draft, n_vocab = config["draft_vocab_size"], config["vocab_size"]
    kept = torch.randperm(n_vocab, generator=drawn)[:n_draft].sort().values
    tensors = {
        "fc.weight": matrix(hidden, 3 * (config.get("target_hidden_size") or hidden)),
        "midlayer.self_attn.q_proj.weight": matrix(n_q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(n_kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(n_kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, n_q),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "midlayer.hidden_norm.weight": norm(hidden),
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(n_draft, hidden),
        "d2t": kept - torch.arange(n_draft),
        "t2d": torch.zeros(n_vocab, dtype=torch.bool).scatter(0, kept, True),
    }
    if config.get("attention_bias"):
        for name in ("q_proj", "k_proj", "v_proj"):
            width = len(tensors[f"midlayer.self_attn.{name}.weight"])
            tensors[f"midlayer.self_attn.{name}.bias"] = torch.randn(width, generator=drawn)
    return tensors


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder that ``load_eagle3`` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


class DenseHead:
    """The network of the paper over one path of pairs, with a dense mask and no cache.

    Knows nothing of ours: every call starts from the first pair.
    """

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], embedding: Tensor
    ) -> None:
        self.config, self.w, self.embedding = config, tensors, embedding.float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config["rms_norm_eps"]) * self.w[name]

    def rotated(self, x: Tensor) -> Tensor:
        """``[heads, T, dim]`` turned by 0, 1, ... positions, as Llama's halves."""
        dim = x.shape[-1]
        speed = self.config["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), speed)
        turned = torch.polar(torch.ones_like(angle), angle)
        pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double()) * turned
        return torch.cat((pairs.real, pairs.imag), dim=-1).float()

    def run(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states and probabilities behind each token.

        Args:
            tokens: ``[T]``.
            hidden: ``[T, hidden]``: ``fc`` of features, or what came out at the place before.
        """
        config, w, n = self.config, self.w, len(tokens)
        normed = self.norm(hidden, "midlayer.hidden_norm.weight")
        if config.get("norm_before_residual"):
            hidden = normed
        embeds = self.norm(self.embedding[tokens], "midlayer.input_layernorm.weight")
        x = torch.cat((embeds, normed), dim=-1)
        heads = {}
        for name in ("q", "k", "v"):
            flat = x @ w[f"midlayer.self_attn.{name}_proj.weight"].T
            flat = flat + w.get(f"midlayer.self_attn.{name}_proj.bias", torch.zeros(()))
            count = config["num_attention_heads" if name == "q" else "num_key_value_heads"]
            heads[name] = flat.view(n, count, -1).transpose(0, 1)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        q, k = self.rotated(heads["q"]), self.rotated(heads["k"]).repeat_interleave(group, 0)
        v = heads["v"].repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        attended = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(n, -1)
        hidden = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].T
        x = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(x @ w["midlayer.mlp.gate_proj.weight"].T)
        inner = gate * (x @ w["midlayer.mlp.up_proj.weight"].T)
        hidden = hidden + inner @ w["midlayer.mlp.down_proj.weight"].T
        return hidden, torch.softmax(self.norm(hidden, "norm.weight") @ w["lm_head.weight"].T, -1)

    def path(
        self, tokens: list[int], features: Tensor, guesses: list[int]
    ) -> tuple[Tensor, Tensor]:
        """(hidden state, probabilities ``[draft_vocab]``) behind pairs and a path of guesses."""
        hidden = features @ self.w["fc.weight"].T
        for n_guessed in range(len(guesses) + 1):
            known = tokens + guesses[:n_guessed]
            out, probabilities = self.run(known, hidden)
            hidden = torch.cat((hidden, out[-1:]))
        return out[-1], probabilities[-1]
