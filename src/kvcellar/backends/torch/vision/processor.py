"""Processors of transformers, made of what pictures need: nothing of videos or sounds."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from PIL import Image
from transformers.utils.import_utils import DummyObject

from kvcellar.backends.torch.vision.lfm2_vl import Lfm2VlImageProcessor
from kvcellar.errors import ModelError, PictureError
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.fingerprint import PROCESSOR_FILES
from kvcellar.models.gguf.mmproj import Mmproj
from kvcellar.models.text.tokenizer import quiet
from kvcellar.pictures.picture import Picture

_SAMPLE = 224, 224
"""Width and height of a picture by which a processor is tried."""

_OPENED = ("vision", "image")
"""Words in config fields that name the tokens around a picture, which processors leave out."""

_NAMED_IN = (*PROCESSOR_FILES, "tokenizer_config.json")
"""Files in which a checkpoint may name the class of its processor."""


class Processor:
    """A checkpoint's processor: what it makes of one picture. For several threads.

    Attributes:
        written: what a chat template writes where a picture stands, for the processor to replace.
        in_text: that with the tokens around it that only a chat template writes, such as Qwen's.
    """

    def __init__(self, folder: Path, config: Any, tokenizer: Any = None) -> None:
        """Read a checkpoint's processor.

        Args:
            folder: the checkpoint.
            config: of the whole checkpoint.
            tokenizer: of transformers; None: the folder's.

        Raises:
            ModelError: it has none, or one that cannot be made here.
        """
        if not any((folder / name).is_file() for name in PROCESSOR_FILES):
            raise ModelError(
                f"{folder} has no {' and no '.join(PROCESSOR_FILES)}, which say how a model is "
                f"given pictures; copy them from where the model came from"
            )
        try:
            with quiet(lambda part: None):
                self._processor = _read(folder, config, tokenizer)
            self.written: str = self._processor.image_token
            self.in_text = self._surrounded(config)
            self._made(Image.new("RGB", _SAMPLE), return_text_replacement_offsets=True)
        except ModelError:
            raise
        except Exception as error:  # of many kinds: JSON, missing packages, fields of other times
            said = " ".join(str(error).split())
            if "torchvision" in said.lower():
                said = "transformers has it with torchvision alone; pip install torchvision"
            raise ModelError(f"the processor in {folder} cannot be made: {said}") from error

    @classmethod
    def of_gguf(cls, seen: Mmproj, config: Any, tokenizer: Any) -> Processor:
        """Make the processor that a vision part in GGUF says.

        Args:
            seen: the vision part.
            config: of the whole.
            tokenizer: of the model that it lies beside.

        Raises:
            ModelError: it cannot be made here.
        """
        theirs: Any = transformers.PreTrainedTokenizerFast
        made = theirs(
            tokenizer_object=tokenizer.backend_tokenizer,
            extra_special_tokens=dict(seen.named),
            **tokenizer.special_tokens_map,
        )
        said = dict(zip(PROCESSOR_FILES, (seen.preprocessor, seen.processor), strict=True))
        with TemporaryDirectory() as folder:
            for name, value in said.items():
                Path(folder, name).write_text(json.dumps(value), encoding="utf-8")
            return cls(Path(folder), config, made)

    def _surrounded(self, config: Any) -> str:
        """Return what stands for a picture in a text that no template writes parts into."""
        known = self._processor.tokenizer
        for name in _OPENED:
            ids = [getattr(config, f"{name}_{end}_token_id", None) for end in ("start", "end")]
            around = [None if one is None else known.convert_ids_to_tokens(one) for one in ids]
            if None not in around:
                return f"{around[0]}{self.written}{around[1]}"
        return self.written

    @property
    def merge_size(self) -> int:
        """Patches of a side that become one row, where a model asks for the grid of rows."""
        return int(getattr(self._processor.image_processor, "merge_size", 1))

    def replaced(self, picture: Picture) -> tuple[str, list[int], Mapping[str, Any]]:
        """Return what stands in a prompt in place of ``written``, its ids, and all that was said.

        Raises:
            PictureError: the processor does not take the picture.
        """
        said = self._run(picture, return_text_replacement_offsets=True)
        (found,) = said["text_replacement_offsets"][0]
        ids = [int(one) for one in said["input_ids"][0]]
        return found["replacement"], ids, said

    def inputs(self, picture: Picture) -> Mapping[str, Any]:
        """Return what the model is given of a picture, as tensors.

        Raises:
            PictureError: the processor does not take the picture.
        """
        return self._run(picture, return_tensors="pt")

    def _run(self, picture: Picture, **options: Any) -> Mapping[str, Any]:
        image = picture.pixels()
        try:
            return self._made(image, **options)
        except Exception as error:
            raise PictureError(
                f"the model cannot read a picture of {picture.width} by {picture.height} pixels: "
                f"{' '.join(str(error).split())}; send another one"
            ) from error

    def _made(self, image: Any, **options: Any) -> Mapping[str, Any]:
        """Return what the processor makes of an image of Pillow where one is written.

        Raises:
            Exception: whatever it does not like, which it says in many classes.
        """
        with torch.inference_mode():
            found: Mapping[str, Any] = self._processor(
                images=[image], text=[self.written], **options
            )
        return found


class _Absent:
    """Stand-in for a part that no picture needs, and whose packages may not be there."""

    model_input_names: tuple[str, ...] = ()


def _read(folder: Path, config: Any, tokenizer: Any) -> Any:
    """Make the processor of a checkpoint, with a tokenizer of transformers or the folder's own.

    Raises:
        Exception: whatever transformers raises that cannot.
    """
    kind = _lean(_class_of(folder, config))
    auto: Any = transformers
    given: dict[str, Any] = {
        "tokenizer": lambda: (
            tokenizer or auto.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        ),
        "image_processor": lambda: _image_processor(folder, config),
    }
    parts = [given.get(name, _Absent)() for name in kind.get_attributes()]
    fields, _ = kind.get_processor_dict(folder, local_files_only=True)
    return kind.from_args_and_dict(parts, fields)


def _image_processor(folder: Path, config: Any) -> Any:
    """Read the processor of images in a checkpoint, which resizes them by Pillow.

    Raises:
        Exception: whatever transformers raises that cannot.
    """
    options: dict[str, Any] = {"local_files_only": True}
    if config.model_type == "lfm2_vl":
        return Lfm2VlImageProcessor.from_pretrained(folder, **options)
    auto: Any = transformers.AutoImageProcessor
    return auto.from_pretrained(folder, backend="pil", **options)


def _class_of(folder: Path, config: Any) -> Any:
    """Return the class of transformers that a checkpoint names as its processor's, or its family's.

    Raises:
        ModelError: there is none.
    """
    mapping: Any = importlib.import_module("transformers.models.auto.processing_auto")
    by_family = mapping.PROCESSOR_MAPPING_NAMES.get(config.model_type)
    for name in (*_named(folder), by_family):
        found = None if name is None else _found(name)
        if found is not None:
            return found
    raise ModelError(
        f"transformers {transformers.__version__} has no processor for models of type "
        f"{config.model_type!r}"
    )


def _found(name: str) -> Any:
    """Return a class of processors of transformers; None: it has none of that name."""
    found = getattr(transformers, name, None)
    if not isinstance(found, type):
        return None
    if isinstance(found, DummyObject):  # it wants torchvision, be it for a function of no picture
        found = getattr(_without_torchvision(found.__module__), name)
    return found if issubclass(found, transformers.ProcessorMixin) else None


def _without_torchvision(name: str) -> Any:
    """Import a processor's module that takes functions from an image processor of torchvision.

    The same image processor on Pillow has them too, and stands in while the module is imported.

    Raises:
        ImportError: there is none, or the module needs other packages.
    """
    package, _, module = name.rpartition(".")
    family = module.removeprefix("processing_")
    wanted = f"{package}.image_processing_{family}"
    sys.modules[wanted] = importlib.import_module(f"{package}.image_processing_pil_{family}")
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules[wanted]


def _named(folder: Path) -> Iterator[str]:
    for name in _NAMED_IN:
        said = read_json(folder / name) if (folder / name).is_file() else {}
        if isinstance(said.get("processor_class"), str):
            yield said["processor_class"]


def _lean(kind: Any) -> Any:
    """Return a class of processors that takes stand-ins for parts that no picture needs."""

    def check(self: Any, name: str, part: Any) -> Any:
        if isinstance(part, _Absent):
            return _Absent
        return kind.check_argument_for_proper_class(self, name, part)

    module = inspect.unwrap(kind.__init__).__globals__
    if module.get("num2words", _Absent) is None:  # only what is said of a video needs the package
        module["num2words"] = str
    own = {
        "check_argument_for_proper_class": check,
        "__module__": kind.__module__,
        "__repr__": object.__repr__,  # its own asks all parts, and a log asks for that
    }
    return type(kind.__name__, (kind,), own)
