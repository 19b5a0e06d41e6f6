"""Files of a checkpoint in safetensors, of which one at a time is open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import TensorPlace, tensor_places

AT_A_TIME = 1 << 20
"""Numbers that are made plain at a time."""


class OpenFiles:
    """Files of a checkpoint, of which one at a time is open.

    Attributes:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Learn which file holds which tensor."""
        self.folder = folder
        self._places = tensor_places(folder)
        self._name = ""
        self._file: Any = None
        self._scratch = torch.empty(0)

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all tensors."""
        return iter(self._places)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors as they are stored, by name."""
        return {key: place.shape for key, place in self._places.items()}

    def place(self, key: str) -> TensorPlace:
        """Return where a tensor is, with its type and shape.

        Raises:
            ModelError: it is nowhere.
        """
        if key not in self._places:
            raise ModelError(
                f"{self.folder} lacks {key}, without which other tensors cannot be read; the "
                f"checkpoint is half copied, copy it again"
            )
        return self._places[key]

    def read(self, key: str) -> Tensor:
        """Return a tensor as it is stored; it is mapped, and keeps its file so."""
        name = self.place(key).file
        if name != self._name:
            self.close()
            self._file = safe_open(self.folder / name, framework="pt")
            self._name = name
        tensor: Tensor = self._file.get_tensor(key)
        return tensor

    def scratch(self, shape: tuple[int, ...]) -> Tensor:
        """Return float32 of any value, in the same place each time.

        Memory that is taken and given back again and again, between tensors that stay, would
        leave holes of half a checkpoint.
        """
        n = math.prod(shape)
        if self._scratch.numel() < n:
            self._scratch = torch.empty(max(n, AT_A_TIME))
        return self._scratch[:n].view(shape)

    def close(self) -> None:
        """Let go of the file that is open."""
        self._file, self._name = None, ""
