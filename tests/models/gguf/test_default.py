"""Blocks of a GGUF file as the default: what is held, and counted before."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kvcellar.backends.torch import loading
from kvcellar.backends.torch.cpu.modules.blocks import BlockLinear
from kvcellar.backends.torch.load import counting
from kvcellar.backends.torch.load import gguf as gguf_weights
from kvcellar.kernel import levels
from kvcellar.models import LoadedModel, load_model
from kvcellar.models.sizes.sizing import size_model
from tests.models.gguf.families import CASES

pytestmark = pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())


def written(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    CASES["llama"].write(path, kind=gguf.GGMLQuantizationType[kind])
    return path


def test_blocks_are_the_default_and_counted_to_the_byte(tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_1")
    model, spec = load_model(path, is_unchecked=True), size_model(path)
    assert (model.weights, model.dtype, model.kv_dtype) == ("file", "float32", "bfloat16")
    assert (spec.kv_dtype, spec.is_in_blocks, spec.held_in) == ("bfloat16", True, "Q4_1")
    buffers = sum(one.nbytes for name, one in model.network.named_buffers() if "block" not in name)
    beside = sum(one.nbytes for name, one in model.network.named_buffers() if "beside" in name)
    assert model.size_bytes - spec.weight_bytes == buffers - beside  # of rotations
    assert sum(spec.stored_types.values()) == spec.stored_bytes
    assert model.held_as == "Q4_1 as in the file"


@pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"weights": "bf16"}, {"weights": "none"}])
def test_what_is_asked_for_has_blocks_made_plain(asked: dict[str, str], tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_1")
    model, spec = load_model(path, is_unchecked=True, **asked), size_model(path, **asked)
    assert model.dtype == model.kv_dtype == spec.dtype == spec.kv_dtype == "bfloat16"
    assert not any(isinstance(one, BlockLinear) for one in model.network.modules())
    assert not spec.is_in_blocks and model.held_as.endswith(" made of Q4_1")


def test_without_the_kernel_blocks_are_made_plain(tmp_path: Path, monkeypatch) -> None:
    for module in (counting, loading):
        monkeypatch.setattr(module, "reads_weights", lambda: False)
    path = written(tmp_path, "Q4_1")
    model, spec = load_model(path, is_unchecked=True), size_model(path)
    assert (model.weights, model.held_as) == (None, "bfloat16 made of Q4_1")
    assert not spec.is_in_blocks and spec.weight_bytes == model_bytes(model)


def model_bytes(model: LoadedModel) -> int:
    return sum(one.nbytes for one in model.network.parameters())


def test_files_of_plain_numbers_or_of_other_blocks_are_made_plain(tmp_path: Path) -> None:
    path = written(tmp_path, "F16")
    assert load_model(path, is_unchecked=True).weights == "bf16"
    assert not size_model(path).is_in_blocks


def test_matrices_that_stay_blocks_are_never_there_as_numbers(tmp_path: Path, monkeypatch) -> None:
    made, plain = [], gguf_weights._plain

    def seen(file, tensor, *args):
        made.append(tensor.shape)
        return plain(file, tensor, *args)

    monkeypatch.setattr(gguf_weights, "_plain", seen)
    load_model(written(tmp_path, "Q4_1"), is_unchecked=True)
    assert made and all(len(shape) == 1 for shape in made)
