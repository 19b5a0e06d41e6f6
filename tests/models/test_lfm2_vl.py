"""LFM2-VL's processor on Pillow gives what transformers' own gives on torchvision."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import PILImageResampling

from kvcellar.backends.torch.vision.lfm2_vl import Lfm2VlImageProcessor

_STAND_INS = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")


@pytest.fixture(scope="module")
def theirs():
    """Transformers' own, which resizes by Pillow here: torchvision is not always there."""
    names = [*_STAND_INS, f"{_STAND_INS[-1]}.functional"]
    own = "transformers.models.lfm2_vl.image_processing_lfm2_vl"
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("torchvision") is None:
            for name in names:
                patch.setitem(sys.modules, name, ModuleType(name))
            sys.modules[names[-1]].InterpolationMode = object
            sys.modules[_STAND_INS[-1]].functional = sys.modules[names[-1]]
        patch.delitem(sys.modules, own, raising=False)
        module = importlib.import_module(own)
        patch.delitem(sys.modules, own)

    def resize(self: Any, image: Any, size: Any, **options: Any) -> Any:
        found = [PilBackend().resize(one.numpy(), size, _BILINEAR) for one in image]
        return torch.stack([torch.from_numpy(np.ascontiguousarray(one)) for one in found])

    def scale(self: Any, image: Any, *said: Any) -> Any:
        _, factor, _, mean, deviation = said
        return (image.float() * factor - _by_colour(mean)) / _by_colour(deviation)

    own_methods = {"resize": resize, "rescale_and_normalize": scale}
    base: Any = type("OnPillow", (module.TorchvisionBackend,), own_methods)
    return type("Theirs", (module.Lfm2VlImageProcessor, base), own_methods)()


_BILINEAR = PILImageResampling.BILINEAR


def _by_colour(values: Any) -> Any:
    return torch.tensor(values).view(-1, 1, 1)


def _settings(random: Any) -> dict[str, Any]:
    least, tiles = int(random.integers(1, 9)), int(random.integers(1, 4))
    return {
        "downsample_factor": 2,
        "do_image_splitting": bool(random.integers(4)),
        "min_tiles": tiles,
        "max_tiles": tiles + int(random.integers(0, 8)),
        "use_thumbnail": bool(random.integers(3)),
        "min_image_tokens": least,
        "max_image_tokens": least + int(random.integers(8, 30)),
        "encoder_patch_size": 4,
        "tile_size": int(random.choice([16, 24, 32])),
        "max_pixels_tolerance": float(random.choice([1.0, 1.5, 2.0])),
        "do_resize": True,
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
        "do_pad": True,
        "return_row_col_info": True,
        "return_tensors": None,
    }


def test_pictures_are_cut_and_made_patches_as_by_transformers(theirs):
    random, ours, cut = np.random.default_rng(0), Lfm2VlImageProcessor(), 0
    for _ in range(300):
        width, height = random.integers(12, 130, 2)
        said = _settings(random)
        pixels = random.integers(0, 256, (3, height, width), np.uint8)
        longest = max(said["max_image_tokens"] * 4, (said["tile_size"] // 4) ** 2)
        found = ours._preprocess([pixels], **said)
        if found["pixel_values"].shape[1] > longest:  # longer than wide by far: theirs has no mask
            continue
        want = theirs._preprocess([torch.from_numpy(pixels)], disable_grouping=None, **said)
        assert found.keys() == want.keys()
        for name, one in want.items():
            np.testing.assert_allclose(np.asarray(found[name]), np.asarray(one), atol=1e-5)
        cut += len(found["spatial_shapes"]) > 1
    assert cut > 100


@pytest.mark.parametrize("size", [(6000, 4), (4, 6000), (2000, 3), (1600, 33), (1, 1)])
def test_a_picture_far_longer_than_wide_is_read_within_the_bound(size):
    processor = Lfm2VlImageProcessor()
    found = processor(images=[Image.new("RGB", size)], return_tensors="pt")
    for height, width in found["spatial_shapes"].tolist():
        assert 0 < height * width <= 4 * processor.max_image_tokens
