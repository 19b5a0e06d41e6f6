"""LFM2-VL's image processor on Pillow and NumPy; transformers has it with torchvision alone.

A picture is resized so that its patches come out even and in a number that the model was trained
with; a large one is cut into tiles of a fixed size as well, and its small form goes behind them.
Each of these is a list of patches, filled up with zeros to one length.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.feature_extraction_utils import BatchFeature
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs

Pixels = NDArray[Any]
"""``[3, height, width]``."""


class Lfm2VlImagesKwargs(ImagesKwargs, total=False):
    """Settings of the processor, by the names that checkpoints have for them.

    Attributes:
        downsample_factor: patches of a side that become one row.
        do_image_splitting: cut large pictures into tiles.
        min_tiles: least that a picture is cut into.
        max_tiles: most of them.
        use_thumbnail: have a picture that was cut go behind its tiles as well, small.
        min_image_tokens: least rows of a picture that is not cut.
        max_image_tokens: most of them.
        encoder_patch_size: side of a patch in pixels.
        tile_size: side of a tile in pixels.
        max_pixels_tolerance: how many times the most rows a picture has to be worth to be cut.
        return_row_col_info: say how pictures were cut, too.
    """

    downsample_factor: int
    do_image_splitting: bool
    min_tiles: int
    max_tiles: int
    use_thumbnail: bool
    min_image_tokens: int
    max_image_tokens: int
    encoder_patch_size: int
    tile_size: int
    max_pixels_tolerance: float
    return_row_col_info: bool


class Lfm2VlImageProcessor(PilBackend):
    """Processor of LFM2-VL's pictures; settings are those of :class:`Lfm2VlImagesKwargs`."""

    downsample_factor = 2
    do_image_splitting = True
    min_tiles = 2
    max_tiles = 10
    use_thumbnail = True
    min_image_tokens = 64
    max_image_tokens = 256
    encoder_patch_size = 16
    tile_size = 512
    max_pixels_tolerance = 2.0
    do_resize = True
    size: Any = {"height": 512, "width": 512}  # noqa: RUF012 (wanted, and not read)
    resample = PILImageResampling.BILINEAR
    do_rescale = True
    rescale_factor = 1 / 255
    do_normalize = True
    do_pad = True
    return_row_col_info = False
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    valid_kwargs: Any = Lfm2VlImagesKwargs
    model_input_names: Any = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]  # noqa: RUF012

    def _preprocess(self, images: list[Pixels], **said: Any) -> BatchFeature:  # type: ignore[override]
        """Return patches of pictures ``[n, n_patches, n_numbers]``, and how they lie."""
        parts: list[Pixels] = []
        rows, columns, sizes = [], [], []
        for image in images:
            cut, grid, small = self._parts(image, said)
            parts += cut
            rows.append(grid[1])
            columns.append(grid[0])
            sizes.append(list(small))
        side = said["encoder_patch_size"]
        patches = [_patches(self._scaled(part, said), side) for part in parts]
        shapes = [[part.shape[-2] // side, part.shape[-1] // side] for part in parts]
        found: dict[str, Any] = {"pixel_values": np.stack(_filled(patches, said))}
        if said["do_pad"]:
            n_all = found["pixel_values"].shape[1]
            at = np.arange(n_all)
            found["pixel_attention_mask"] = np.stack(
                [(at < len(one)).astype(np.int32) for one in patches]
            )
            found["spatial_shapes"] = np.array(shapes)
        if said["return_row_col_info"]:
            found |= {"image_rows": rows, "image_cols": columns, "image_sizes": sizes}
        return BatchFeature(data=found, tensor_type=said["return_tensors"])

    def _scaled(self, part: Pixels, said: dict[str, Any]) -> Pixels:
        """Return colours as the model takes them."""
        if said["do_rescale"]:
            part = self.rescale(part, said["rescale_factor"])
        if said["do_normalize"]:
            part = self.normalize(part, said["image_mean"], said["image_std"])
        return part

    def _parts(
        self, image: Pixels, said: dict[str, Any]
    ) -> tuple[list[Pixels], tuple[int, int], tuple[int, int]]:
        """Cut a picture.

        Returns:
            Its parts, how many columns and rows of tiles they are, and height and width of the
            picture as it is where it is not cut.
        """
        height, width = image.shape[-2:]
        small = _small_size(height, width, said)
        whole = self._sized(image, small, said)
        if not (said["do_image_splitting"] and said["max_tiles"] > 1) or not _is_large(
            height, width, said
        ):
            return [whole], (1, 1), small
        n_wide, n_high = _grid(height, width, said)
        tile = said["tile_size"]
        large = self._sized(image, (tile * n_high, tile * n_wide), said)
        tiles = [
            large[:, y : y + tile, x : x + tile]
            for y in range(0, tile * n_high, tile)
            for x in range(0, tile * n_wide, tile)
        ]
        has_whole = said["use_thumbnail"] and len(tiles) > 1
        return [*tiles, *([whole] if has_whole else [])], (n_wide, n_high), small

    def _sized(self, image: Pixels, size: tuple[int, int], said: dict[str, Any]) -> Pixels:
        """Return a picture of another height and width."""
        height, width = size
        found: Pixels = self.resize(image, SizeDict(height=height, width=width), said["resample"])
        return found


def _rounded(side: int, step: int, least: int) -> int:
    return max(least, round(side / step) * step)


def _small_size(height: int, width: int, said: dict[str, Any]) -> tuple[int, int]:
    """Return height and width, of even patches, of a picture that is not cut."""
    step = said["encoder_patch_size"] * said["downsample_factor"]
    least, most = said["min_image_tokens"] * step**2, said["max_image_tokens"] * step**2
    high, wide = _rounded(height, step, step), _rounded(width, step, step)
    if high * wide > most:
        scale = math.sqrt(height * width / most)
        longest = most // step**2 * step  # of one that is hardly high, or wide
        high, wide = (
            min(longest, max(step, math.floor(n / scale / step) * step)) for n in (height, width)
        )
    elif high * wide < least:
        scale = math.sqrt(least / (height * width))
        high, wide = (math.ceil(n * scale / step) * step for n in (height, width))
    return high, wide


def _is_large(height: int, width: int, said: dict[str, Any]) -> bool:
    """Return true if a picture is to be cut."""
    patch = said["encoder_patch_size"]
    step = patch * said["downsample_factor"]
    area = _rounded(height, step, patch) * _rounded(width, step, patch)
    most: float = said["max_image_tokens"] * step**2 * said["max_pixels_tolerance"]
    return area > most


def _grid(height: int, width: int, said: dict[str, Any]) -> tuple[int, int]:
    """Return columns and rows of tiles whose shape is nearest to a picture's.

    Of two that are as near, the one behind is taken if the picture has half its pixels.
    """
    least, most = said["min_tiles"], said["max_tiles"]
    every = {
        (w, h)
        for n in range(least, most + 1)
        for w in range(1, n + 1)
        for h in range(1, n + 1)
        if least <= w * h <= most
    }
    best, nearest = (1, 1), math.inf
    for w, h in sorted(every, key=lambda grid: grid[0] * grid[1]):
        gap = abs(width / height - w / h)
        if gap < nearest or (
            gap == nearest and height * width > 0.5 * said["tile_size"] ** 2 * w * h
        ):
            best, nearest = (w, h), gap
    return best


def _patches(part: Pixels, side: int) -> Pixels:
    """Return the patches of a picture ``[n_patches, n_numbers]``, row by row, colours last."""
    n_high, n_wide = part.shape[-2] // side, part.shape[-1] // side
    apart = part[:, : n_high * side, : n_wide * side].reshape(-1, n_high, side, n_wide, side)
    return apart.transpose(1, 3, 2, 4, 0).reshape(n_high * n_wide, -1)


def _filled(patches: list[Pixels], said: dict[str, Any]) -> list[Pixels]:
    """Return lists of patches filled up with zeros to the longest that settings allow."""
    if not said["do_pad"]:
        return patches
    longest = said["max_image_tokens"] * said["downsample_factor"] ** 2
    if said["do_image_splitting"]:
        longest = max(longest, (said["tile_size"] // said["encoder_patch_size"]) ** 2)
    return [np.pad(one, ((0, max(0, longest - len(one))), (0, 0))) for one in patches]
