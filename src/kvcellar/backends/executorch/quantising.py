"""Weights in 4 or 8 bits for XNNPACK: linear layers through torchao, the embedding here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvcellar.errors import ConfigError

WEIGHT_DTYPES = {"8da4w": "int4", "8da8w": "int8"}
"""Scheme -> type of the weights of linear layers; activations are int8, scaled as they come."""

SCHEMES = ("none", *WEIGHT_DTYPES)

GROUP = 32
"""Weights of 4 bits, and embedding rows, that share a scale."""


def check_scheme(scheme: str) -> None:
    """Make sure that there is a scheme of that name.

    Raises:
        ConfigError: there is none.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"quantize {scheme!r} is unknown; choose one of {', '.join(SCHEMES)}")


def quantise(model: Any, scheme: str) -> tuple[int, int]:
    """Quantise a model's linear layers and its embedding in place.

    Args:
        model: of transformers, in float32.
        scheme: a name of ``WEIGHT_DTYPES``: 4 bits in groups of 32 along the input, or 8 bits per
            output row. The embedding is in 8 bits either way, in groups of 32.

    Returns:
        How many linear layers are quantised, and how many stay because their input cannot be
        grouped.

    Raises:
        ConfigError: no such scheme.
    """
    if scheme not in WEIGHT_DTYPES:
        raise ConfigError(
            f"quantisation {scheme!r} is unknown; choose none, {', '.join(WEIGHT_DTYPES)}"
        )
    from torchao.quantization import (
        Int8DynamicActivationIntxWeightConfig,
        PerAxis,
        PerGroup,
        quantize_,
    )
    from torchao.utils import unwrap_tensor_subclass

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    per_group = scheme == "8da4w"
    fit = {id(m) for m in linears if not per_group or m.in_features % GROUP == 0}
    model.set_input_embeddings(QuantisedEmbedding(model.get_input_embeddings()))
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=getattr(torch, WEIGHT_DTYPES[scheme]),
        weight_granularity=PerGroup(GROUP) if per_group else PerAxis(0),
        # XNNPACK keeps the scales of groups in bfloat16: rounded here, weights are made for them.
        weight_scale_dtype=torch.bfloat16 if per_group else None,
    )
    quantize_(model, config, filter_fn=lambda module, name: id(module) in fit)
    unwrap_tensor_subclass(model)
    return len(fit), len(linears) - len(fit)


class QuantisedEmbedding(nn.Module):
    """An embedding in int8 with a float scale per group of a row; gathers before it expands."""

    def __init__(self, embedding: Any) -> None:
        """Quantise an ``nn.Embedding``; one that scales its rows (Gemma) still does."""
        super().__init__()
        weight = embedding.weight.detach()
        n_rows, dim = weight.shape
        group = GROUP if dim % GROUP == 0 else dim
        parts = weight.float().view(n_rows, dim // group, group)
        scales = parts.abs().amax(dim=-1, keepdim=True).clamp_(min=1e-12) / 127
        rows = (parts / scales).round_().clamp_(-127, 127).to(torch.int8)
        extra = getattr(embedding, "embed_scale", None)
        if extra is not None:
            scales = scales * torch.as_tensor(extra).to(weight.dtype).float()
        self.dtype = weight.dtype
        self.register_buffer("rows", rows.view(n_rows, dim))
        self.register_buffer("scales", scales.view(n_rows, dim // group))

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up, ``[..., T] -> [..., T, dim]``."""
        rows = nn.functional.embedding(ids, self.rows).float()  # type: ignore[arg-type]
        scales = nn.functional.embedding(ids, self.scales)  # type: ignore[arg-type]
        grouped = rows.unflatten(-1, (scales.shape[-1], -1)) * scales.unsqueeze(-1)
        out: Tensor = grouped.flatten(-2).to(self.dtype)
        return out
