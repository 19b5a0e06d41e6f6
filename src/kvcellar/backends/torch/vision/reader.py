"""Reader of pictures for one loaded model: looks by its processor, rows by its vision part."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from kvcellar.backends.torch.vision.part import VisionClass, run
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.errors import PictureError
from kvcellar.models.picture_facts import PictureFacts
from kvcellar.models.seeing import EncodedPicture, Look
from kvcellar.pictures.picture import Picture


class TorchPictureReader:
    """A :class:`~kvcellar.models.seeing.PictureReader` of transformers. For several threads.

    The vision part's weights are read when the first picture is encoded.
    """

    def __init__(
        self,
        folder: Path,
        processor: Processor,
        vision: VisionClass,
        facts: PictureFacts,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Read pictures for a model; no weights are read.

        Args:
            folder: the checkpoint, or a vision part in GGUF.
            processor: of it.
            vision: what makes its vision part.
            facts: what was learnt of how the model places pictures.
            dtype: that the model computes in.
            device: where the model is.
        """
        self._folder, self._processor, self._vision = folder, processor, vision
        self._dtype, self._device = dtype, device
        self._part: Any = None
        self._lock = threading.Lock()
        self.facts = facts
        self.written, self.in_text = processor.written, processor.in_text
        self.token_id = int(vision.config.image_token_id)
        self.is_whole = facts.is_whole
        self.size_bytes = vision.n_numbers * dtype.itemsize

    def look(self, picture: Picture) -> Look:
        """See :meth:`kvcellar.models.seeing.PictureReader.look`."""
        text, ids, said = self._processor.replaced(picture)
        grid = (0, 0)
        if self.facts.has_grid:
            _, height, width = (int(side) for side in said["image_grid_thw"][0])
            grid = height // self._processor.merge_size, width // self._processor.merge_size
        return Look(text, ids.count(self.token_id), grid)

    def encode(self, picture: Picture) -> EncodedPicture:
        """See :meth:`kvcellar.models.seeing.PictureReader.encode`."""
        inputs = self._processor.inputs(picture)
        n_rows = int((inputs["input_ids"] == self.token_id).sum())
        given = {name: inputs[name] for name in self._vision.takes & set(inputs)}
        self.load()
        rows, deep = run(self._part, given)
        if len(rows) != n_rows:
            raise PictureError(
                f"the model's processor says that a picture of {picture.width} by "
                f"{picture.height} pixels is {n_rows} tokens, and its vision part makes "
                f"{len(rows)} rows of it; send one of another size"
            )
        n_bytes = sum(one.numel() * one.element_size() for one in (rows, *deep))
        return EncodedPicture(rows, deep, n_bytes)

    def load(self) -> None:
        """See :meth:`kvcellar.models.seeing.PictureReader.load`."""
        with self._lock:
            if self._part is None:
                self._part = self._vision.read(self._folder, self._dtype, self._device)
