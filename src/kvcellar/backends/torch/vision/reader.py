"""Reader of pictures for one loaded model: looks by its processor, rows by its vision part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvcellar.backends.torch.cache.shortage import within_memory
from kvcellar.backends.torch.vision.part import VisionClass, run
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.errors import PictureError
from kvcellar.models.picture_facts import PictureFacts
from kvcellar.models.seeing import EncodedPicture, Look
from kvcellar.pictures.picture import Picture

if TYPE_CHECKING:
    from kvcellar.backends.torch.gpu.transfer.side import SideStream  # it imports Triton


R = TypeVar("R")


class TorchPictureReader:
    """A :class:`~kvcellar.models.seeing.PictureReader` of transformers. For several threads.

    The vision part's weights are read when the first picture is encoded. On a GPU it runs in a
    stream of its own, beside the steps of whoever decodes there.
    """

    def __init__(
        self,
        folder: Path,
        processor: Processor,
        vision: VisionClass,
        facts: PictureFacts,
        dtype: torch.dtype,
        device: torch.device,
        side: SideStream | None = None,
    ) -> None:
        """Read pictures for a model; no weights are read.

        Args:
            folder: the checkpoint, or a vision part in GGUF.
            processor: of it.
            vision: what makes its vision part.
            facts: what was learnt of how the model places pictures.
            dtype: that the model computes in.
            device: where the model is.
            side: a stream there that is the vision part's; None: it runs where its caller does.
        """
        self._folder, self._processor, self._vision = folder, processor, vision
        self._dtype, self._device = dtype, device
        self._side = side
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
        (rows, deep), done = self._run(given)
        if len(rows) != n_rows:
            raise PictureError(
                f"the model's processor says that a picture of {picture.width} by "
                f"{picture.height} pixels is {n_rows} tokens, and its vision part makes "
                f"{len(rows)} rows of it; send one of another size"
            )
        n_bytes = sum(one.numel() * one.element_size() for one in (rows, *deep))
        if self._side is None:
            return EncodedPicture(rows, deep, n_bytes)
        return EncodedPicture(rows, deep, n_bytes, partial(self._side.lend, done, (rows, *deep)))

    def load(self) -> None:
        """See :meth:`kvcellar.models.seeing.PictureReader.load`."""
        with self._lock:
            if self._part is None:
                given = self._folder, self._dtype, self._device
                self._part = self._within(lambda: self._vision.read(*given), "the vision part")

    def _run(self, given: Mapping[str, Any]) -> tuple[tuple[Tensor, tuple[Tensor, ...]], Any]:
        """Run the vision part; return its rows when they are there, and the event behind them.

        No event where there is no stream for it.

        Raises:
            DeviceMemoryError: the device has no memory for it.
        """
        if self._side is None:
            return self._within(lambda: run(self._part, given), "a picture"), None
        from kvcellar.backends.torch.gpu.transfer.side import RECORDING  # it imports Triton

        with RECORDING, self._side.work() as before:
            self._side.wait(before)  # the weights came in the caller's stream
            found = self._within(lambda: run(self._part, given), "a picture")
            done = self._side.mark()
            done.synchronize()  # a step that took the rows sooner would wait, and all in it
            return found, done

    def _within(self, call: Callable[[], R], what: str) -> R:
        """Return what a call returns; where the device has no memory for it, it ends alone."""
        return within_memory(call, self._device, what=what, instead="send a smaller picture")
