"""Weights through transformers, completely or not at all; and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from kvcellar.backends.torch.load.gguf import gguf_tensors
from kvcellar.backends.torch.load.stored import plain_tensors, stand_in
from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import few
from kvcellar.models.files.formats import MLX, MXFP4, WeightFormat
from kvcellar.models.gguf.reader import read_gguf

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_MOST_TURNED = 1 << 24
"""Numbers of a model whose matrices are turned."""

_PAGE = 4096
"""The smallest page of memory in use."""


class UnreadWeightsError(ModelError):
    """Weights that are missing, damaged, or not those of their config's architecture."""


def load_weights(
    folder: Path,
    config: Any,
    reader: type[Any],
    finish: Callable[[Any], Any],
    *,
    format: WeightFormat | None,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    kept: Mapping[str, tuple[int, ...]],
    n_ranks: int = 1,
) -> Any:
    """Read a model's weights; return its network in evaluation mode.

    Args:
        folder: the checkpoint, or a GGUF file.
        config: its config object.
        reader: the class of transformers that reads it.
        finish: makes the network of what was read.
        format: how it stores weights; all are plain numbers in memory.
        dtype: type of the weights in memory.
        device: where to put them.
        attention: name of an attention that is registered with transformers.
        kept: shapes of tensors, by their names in the file, that stay as they are stored and are
            placed later. They are not read, and take no memory: all their numbers are one.
        n_ranks: of the process group; each reads its part, at the same time.

    Raises:
        UnreadWeightsError: weights that are missing, or not this architecture's.
    """
    whole = read_weights(
        folder,
        config,
        reader,
        format=format,
        dtype=dtype,
        attention=attention,
        kept=kept,
        n_ranks=n_ranks,
    )
    network = finish(whole).to(device).eval()
    if n_ranks > 1:
        make_plain(network)
    elif device.type == "cpu":
        turn_small(network)
    return network


def read_weights(
    folder: Path,
    config: Any,
    reader: type[Any],
    *,
    format: WeightFormat | None,
    dtype: torch.dtype,
    attention: str | None,
    kept: Mapping[str, tuple[int, ...]],
    n_ranks: int = 1,
) -> Any:
    """Read what a class has of a checkpoint, as :func:`load_weights` does; return its object.

    Args:
        folder: the checkpoint, or a GGUF file.
        config: its config object.
        reader: the class of transformers that reads it.
        format: how it stores weights; all are plain numbers in memory.
        dtype: type of the weights in memory.
        attention: name of an attention that is registered with transformers; None: its choice.
        kept: as of :func:`load_weights`.
        n_ranks: of the process group; each reads its part, at the same time.

    Raises:
        UnreadWeightsError: weights that are missing, or not this architecture's.
    """
    try:
        with _source(folder, config, reader, format, dtype, kept) as (path, options):
            whole, info = reader.from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused by name below
                **options,
                **_divided(n_ranks),
            )
    except (RuntimeError, ValueError, OSError, ImportError, SafetensorError) as error:
        raise UnreadWeightsError(f"the weights in {folder} cannot be loaded: {error}") from error
    except ModelError as error:  # of a file that is not this architecture's
        raise UnreadWeightsError(str(error)) from error
    _check_keys(info, whole, folder, format)
    return whole


def _divided(n_ranks: int) -> dict[str, Any]:
    """Return how transformers is told to read one rank's part of a model."""
    if n_ranks == 1:
        return {}
    from transformers.distributed.configuration_utils import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=n_ranks)}


def make_plain(network: torch.nn.Module) -> None:
    """Make the parts of weights that a rank has plain parameters, where modules take them so.

    What transformers computes between ranks hangs on the modules; embeddings alone look at their
    weights for it.
    """
    from torch.distributed.tensor import DTensor

    for module in network.modules():
        if isinstance(module, torch.nn.Embedding):
            continue
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                part = parameter.to_local().detach()
                module._parameters[name] = torch.nn.Parameter(part, requires_grad=False)


def own_tensors(network: Any) -> list[torch.Tensor]:
    """Return the tensors of a network's weights; of a divided one those of this rank."""
    from torch.distributed.tensor import DTensor  # transformers has imported it

    tensors = [*network.parameters(), *network.buffers()]
    return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]


@contextmanager
def _source(
    folder: Path,
    config: Any,
    reader: type[Any],
    format: WeightFormat | None,
    dtype: torch.dtype,
    kept: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Yield where transformers reads, and with which options, so that plain numbers come out."""
    if folder.is_file():
        with gguf_tensors(read_gguf(folder), _empty(reader, config), dtype) as tensors:
            stand_ins = {name: stand_in(kept[name], dtype) for name in kept}
            yield None, {"state_dict": tensors | stand_ins}
    elif format is None:
        yield folder, {}
    elif format.method == MXFP4:
        classes: Any = transformers
        yield folder, {"quantization_config": classes.Mxfp4Config(dequantize=True)}
    else:
        with plain_tensors(folder, format, dtype, _empty(reader, config), kept) as tensors:
            yield None, {"state_dict": tensors}


def _empty(reader: type[Any], config: Any) -> Any:
    """Return a network without weights, on the meta device."""
    with torch.device("meta"):
        return reader(config)


def _check_keys(
    info: Mapping[str, Any], whole: Any, folder: Path, format: WeightFormat | None
) -> None:
    """Refuse a checkpoint whose tensors are not those of the class.

    Raises:
        UnreadWeightsError: some are missing, of other shapes, or of layers that it has not.
    """
    name = type(whole).__name__
    missing = sorted(info["missing_keys"])
    if missing:
        is_for_mlx = format is not None and format.method == MLX
        why = (
            "MLX's programs may have stored them otherwise: load it with the backend mlx, or "
            "download the same model in GGUF or bfloat16"
            if is_for_mlx
            else "the checkpoint is half copied or of another architecture"
        )
        raise UnreadWeightsError(
            f"{folder} lacks {len(missing)} tensors that a {name} has: {few(missing)}; {why}"
        )
    shapes = [
        f"{key} is {list(found)} and not {list(wanted)}"
        for key, found, wanted in sorted(info["mismatched_keys"])
    ]
    if shapes:
        raise UnreadWeightsError(
            f"{folder} has {len(shapes)} tensors of other shapes than a {name} has: "
            f"{few(shapes)}; its config.json is of another checkpoint, or a file is damaged"
        )
    layers = tuple(
        f"{path}.{i}."
        for path, module in whole.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        for i in range(len(module))
    )
    strangers = sorted(key for key in info["unexpected_keys"] if key.startswith(layers))
    if strangers:
        raise UnreadWeightsError(
            f"{folder} has {len(strangers)} tensors that a {name} does not know: "
            f"{few(strangers)}; its config.json is of another architecture"
        )


def turn_small(model: Any) -> None:
    """Have the linear layers of a small float32 model lie as products of a few rows want them.

    ``[in, out]``, behind the same shape: 4 to 24 tokens take a third to a half less, as when some
    answers go on together or guesses are verified; one token and many take the same. Matrices that
    do not fit into a core's cache gain nothing, so larger models stay as they are, and so does a
    layer that is the embedding too. No file stays mapped for what was copied out of it.
    """
    parameters = list(model.parameters())
    is_small = sum(parameter.numel() for parameter in parameters) <= _MOST_TURNED
    if model.dtype != torch.float32 or not is_small:
        return
    embedding = model.get_input_embeddings().weight
    turned = {
        id(module.weight)
        for module in model.modules()
        if type(module) is torch.nn.Linear and module.weight is not embedding
    }
    for parameter in parameters:
        data = parameter.data
        if id(parameter) in turned:
            parameter.data = data.t().contiguous().t()
        else:
            parameter.data = data.clone()


def touch_weights(model: Any) -> int:
    """Read a byte of every page of the weights; return how many bytes they are.

    Loading maps files where it can, and their pages come into memory when they are first read.
    """
    storages = {
        storage.data_ptr(): storage
        for tensor in own_tensors(model)
        for storage in [tensor.untyped_storage()]
    }
    n_bytes = 0
    for storage in storages.values():
        view = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        view[::_PAGE].sum()
        n_bytes += storage.nbytes()
    return n_bytes
