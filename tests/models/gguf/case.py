"""Tiny models as files: what each says, and what its converter does to its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.gguf.writing import SIZES, in_pairs, started, write_model

HEADLESS = {key: value for key, value in SIZES.items() if key != "head_dim"}


def turned(config: Any) -> Any:
    def change(name: str, values: np.ndarray) -> np.ndarray:
        if ".attn_q." in name:
            return in_pairs(config.num_attention_heads, values)
        if ".attn_k." in name:
            return in_pairs(config.num_key_value_heads, values)
        return values

    return change


def added(config: Any) -> Any:
    return lambda name, values: values + 1 if name.endswith("norm.weight") else values


def plain(config: Any) -> Any:
    return lambda name, values: values


@dataclass
class Case:
    """A tiny model: its config, what its file says besides, and what is done to its tensors.

    ``read_as`` names the class that its file is read as, where another computes the same.
    """

    architecture: str
    config: Callable[[], Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] = plain
    parts: Callable[[str, np.ndarray], Any] = lambda name, values: None
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    read_as: str = ""

    def write(self, path: Path, **how: Any) -> Any:
        """Write it, and return the network."""
        network = started(self.config())
        if "attention.key_length" not in self.metadata:
            network.config.head_dim = getattr(network.config, "head_dim", 16)
        how |= {"change": self.change(network.config), "parts": self.parts, "extra": self.extra}
        write_model(path, self.architecture, network, self.metadata, **how)
        return network
