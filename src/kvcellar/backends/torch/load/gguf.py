"""Weights of GGUF files, made plain numbers one tensor at a time, by the names of transformers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.torch.cpu.modules.blocks import Kept, StoredBlocks, StoredExperts
from kvcellar.backends.torch.cpu.modules.mixtures import matrices_of_experts, mixtures
from kvcellar.backends.torch.load.gguf_names import Stored, Turn, stored_as
from kvcellar.backends.torch.load.mmproj_names import UNUSED, seen_as
from kvcellar.backends.torch.load.stored import PlainTensor
from kvcellar.errors import ModelError
from kvcellar.kernel.blocks import INPUTS
from kvcellar.models.files.checkpoint import few
from kvcellar.models.gguf.families import FAMILIES
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, wrong

_AT_A_TIME = 1 << 20
"""Numbers that are made plain at a time."""

_UNREAD = re.compile(r"^(blk\.\d+\.)?(rope_freqs|rope_factors_long|rope_factors_short)\.weight$")
"""Tensors that the config was made of."""

_SHARED = re.compile(r"^blk\.(\d+)\.(attn_k|attn_v|attn_k_norm)\.weight$")
"""Tensors that layers which take keys and values of another layer may have, and do not use."""

_AGAIN = re.compile(r"^(blk\.\d+\.attn_)[kv]_b\.weight$")
"""Halves of a matrix that some files have whole as well."""

_LAYER = re.compile(r"^blk\.(\d+)\.")
_WRAPPED = re.compile(r"^(whole\.)?model\.(language_model|text_model)\.")
_SEES = "clip"
"""Architecture of vision parts."""

_SPARE = ("mtp.",)
"""Beginnings of names of what guesses several tokens, and is not loaded."""

Make = Callable[[], Tensor]


@contextmanager
def gguf_tensors(
    file: GgufFile, network: Any, dtype: torch.dtype
) -> Iterator[dict[str, PlainTensor]]:
    """Yield the tensors of a GGUF file by a network's names; they are read within the block.

    transformers reads them one after the other meanwhile, since reading ahead would hold what it
    is going to copy twice.

    Args:
        file: the model.
        network: of its config, on the meta device.
        dtype: that weights are wanted in.

    Raises:
        ModelError: tensors are missing, of other shapes, or of nothing in the network.
    """
    makers = makers_of(file, network, dtype)
    before = os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    try:
        yield {name: PlainTensor(make) for name, make in makers.items()}
    finally:
        if before is None:
            del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
        else:
            os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before


def makers_of(file: GgufFile, network: Any, dtype: torch.dtype) -> dict[str, Make]:
    """Return what makes each parameter of a network; nothing is read yet.

    Raises:
        ModelError: as ``gguf_tensors``.
    """
    wanted = _wanted(network)
    _check_total(file, wanted)
    plan = _plan(file, network, wanted)
    _check_names(file, network, wanted, plan)
    makers: dict[str, Make] = {}
    for name, shape in wanted.items():
        stored = plan[name]
        tensors = [file.tensors[source] for source in stored.sources]
        _check_shape(file, name, tensors, shape, stored)
        makers[name] = partial(_made, file, tensors, shape, dtype, stored)
    return makers


def _plan(file: GgufFile, network: Any, wanted: Iterable[str]) -> dict[str, Stored]:
    """Return how each parameter of a network is stored."""
    if file.architecture == _SEES:
        return seen_as(file, network.config, wanted)
    family, config = FAMILIES.get(file.architecture), _text_config(network)
    alone = {name: _alone(name) for name in wanted}
    if family is None:
        plan = _by_transformers(file, config)
        return plan | {name: plan[one] for name, one in alone.items() if one in plan}
    of = partial(stored_as, file.tensors, file.architecture, family)
    return {name: of(one, config) for name, one in alone.items()}


def _text_config(network: Any) -> Any:
    """Return the config of a network's text, which may be a wrapper's."""
    return network.config.get_text_config(decoder=True)


def _alone(name: str) -> str:
    """Return the name that a parameter of a wrapper's text has in the text's own class."""
    return _WRAPPED.sub("model.", name).removeprefix("whole.")


def blocks_of(file: GgufFile, network: Any) -> dict[str, Kept]:
    """Return a network's parameters that the kernel multiplies as the file has them, by name.

    Of a mixture's experts all are, or none.

    Args:
        file: the model; ``makers_of`` took it.
        network: of its config.
    """
    wanted = _wanted(network)
    plan = _plan(file, network, wanted)
    found: dict[str, Kept] = {}
    for name, shape in wanted.items():
        stored = plan[name]
        tensor = file.tensors[stored.sources[0]]
        is_one = len(stored.sources) == 1 and stored.views is None and stored.is_of_rows
        if is_one and len(shape) == 2 and tensor.shape == shape and tensor.type_name in INPUTS:
            read = partial(_stored, file, tensor, stored.turn)
            found[name] = StoredBlocks(tensor.type_name, *shape, read)
    names = {id(weight): name for name, weight in network.named_parameters()}
    for module in mixtures(network):
        parts = [(names[id(one)], tuple(one.shape)) for one, _ in matrices_of_experts(module)]
        kept = [_experts_of(file, plan[name], shape) for name, shape in parts if name in plan]
        if len(kept) == len(parts) and None not in kept:
            found |= {name: one for (name, _), one in zip(parts, kept, strict=True) if one}
    return found


def other_types(file: GgufFile) -> dict[str, int]:
    """Return the bytes of a file's matrices that the kernel does not multiply as they are, by type.

    Not of those in float32, which are plain numbers already.
    """
    found: dict[str, int] = {}
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and tensor.type_name not in (*INPUTS, "F32"):
            found[tensor.type_name] = found.get(tensor.type_name, 0) + tensor.n_bytes
    return found


def _experts_of(file: GgufFile, stored: Stored, shape: tuple[int, ...]) -> StoredExperts | None:
    """Return matrices of experts as the file has them; None: the kernel has no such form.

    Args:
        file: the model.
        stored: how the parameter is, its outputs one source's behind the other's.
        shape: of the parameter.
    """
    tensors = [file.tensors[source] for source in stored.sources]
    n_experts, *axes = shape
    n_out, n_in = reversed(axes) if stored.is_crossed else axes
    (kind, *others), is_plain = {one.type_name for one in tensors}, stored.views is None
    are_whole = all(one.shape[::2] == (n_experts, n_in) for one in tensors if len(one.shape) == 3)
    n_there = sum(one.shape[-2] for one in tensors)
    is_there = all(len(one.shape) == 3 for one in tensors) and are_whole and n_there == n_out
    has_form = kind in INPUTS and not others and (is_plain or stored.is_crossed)
    if not (is_there and has_form and stored.turn is None):
        return None

    def of(expert: int) -> StoredBlocks:
        return StoredBlocks(kind, n_out, n_in, partial(_expert, file, tensors, expert))

    return StoredExperts(n_experts, of, shape, stored.is_crossed and len(tensors) == 2)


def _expert(file: GgufFile, tensors: Iterable[GgufTensor], expert: int) -> Tensor:
    """Read an expert's rows of tensors, one behind the other, as they are stored."""
    rows = []
    for tensor in tensors:
        whole, n = file.stored(tensor), tensor.shape[-2]
        rows.append(np.array(whole[expert * n : (expert + 1) * n]))
    return torch.from_numpy(np.concatenate(rows))


def _stored(file: GgufFile, tensor: GgufTensor, turn: Turn | None) -> Tensor:
    """Read a matrix's rows as they are stored, in the order of transformers."""
    rows = torch.from_numpy(file.stored(tensor))
    return rows if turn is None else turn(rows).contiguous()


def _wanted(network: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of what a network is read from, those of a tied head left out.

    Parameters are, and buffers that are kept with them.
    """
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    is_tied = head is not None and network.config.tie_word_embeddings
    skip = head.weight if is_tied and head.weight is not embedding.weight else None
    parameters = dict(network.named_parameters())
    kept = network.state_dict(keep_vars=True)
    buffers = {name: one for name, one in network.named_buffers() if name in kept}
    return {
        name: tuple(weight.shape)
        for name, weight in (parameters | buffers).items()
        if weight is not skip
    }


def _by_transformers(file: GgufFile, config: Any) -> dict[str, Stored]:
    """Return what each parameter is made of, by transformers' own table for an architecture."""
    from transformers.core_model_loading import Concatenate, WeightConverter, rename_source_key
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS, PermuteRows

    mapping = GGUF_ARCHS[file.architecture](config)
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings: list[Any] = [one for one in mapping if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, dict[str, str]] = {}
    for source in file.tensors:
        name, pattern = rename_source_key(source, renamings, converters)
        found.setdefault(name, {})[pattern or ""] = source
    plan = {}
    for name, sources in found.items():
        converter = by_pattern.get(next(iter(sources)))
        operations = [] if converter is None else converter.operations
        if all(isinstance(one, Concatenate) for one in operations):
            order = [""] if converter is None else converter.source_patterns
            plan[name] = Stored(tuple(sources[one] for one in order if one in sources))
        else:
            turn = partial(_operated, operations=operations)
            is_of_rows = all(isinstance(one, PermuteRows) for one in operations)
            plan[name] = Stored(tuple(sources.values()), turn, is_of_rows)
    return plan


def _operated(stored: Tensor, *, operations: list[Any]) -> Tensor:
    """Return a tensor after transformers' operations."""
    for one in operations:
        (stored,) = one.convert({"": stored}, [""], [""]).values()
    return stored


def _check_total(file: GgufFile, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse metadata that wants more numbers than the file has.

    Raises:
        ModelError: so it does.
    """
    total = sum(math.prod(shape) for shape in wanted.values())
    there = sum(math.prod(one.shape) for one in file.tensors.values())
    if total > there:
        raise wrong(file.path, f"has {there:,} numbers, and its metadata wants {total:,}")


def _check_names(
    file: GgufFile,
    network: Any,
    wanted: Iterable[str],
    plan: Mapping[str, Stored],
) -> None:
    """Refuse a file that has not all of a network's tensors, or has others.

    Raises:
        ModelError: so it is.
    """
    name, config = type(network).__name__, _text_config(network)
    used = {one for key in wanted for one in (plan[key].sources if key in plan else (key,))}
    missing = sorted(used - file.tensors.keys())
    if missing:
        raise wrong(file.path, f"lacks {len(missing)} tensors that a {name} has: {few(missing)}")
    spare = {one for key in plan for one in plan[key].sources if key.startswith(_SPARE)}
    n_layers = config.num_hidden_layers
    ahead = range(n_layers, file.whole(f"{file.architecture}.block_count") or 0)
    sharing = range(n_layers - (getattr(config, "num_kv_shared_layers", 0) or 0), n_layers)
    others = [
        one
        for one in sorted(file.tensors.keys() - used - spare)
        if not (_UNREAD.match(one) or UNUSED.match(one))
        and _AGAIN.sub(r"\1kv_b.weight", one) not in used
        and _layer_of(_LAYER, one) not in ahead
        and _layer_of(_SHARED, one) not in sharing
    ]
    if others:
        raise ModelError(
            f"{file.path} has {len(others)} tensors that a {name} does not know: {few(others)}; "
            f"take the model's own safetensors"
        )


def _layer_of(pattern: re.Pattern[str], name: str) -> int:
    """Return the layer that a tensor of a pattern belongs to; -1: it has another name."""
    found = pattern.match(name)
    return int(found[1]) if found else -1


def _check_shape(
    file: GgufFile, name: str, tensors: list[GgufTensor], shape: tuple[int, ...], stored: Stored
) -> None:
    """Refuse tensors that have more or fewer numbers than a parameter, or rows of other lengths.

    Axes of one number may be left out; those that fill views of it are held against these later.

    Raises:
        ModelError: so they are.
    """
    n_there = sum(math.prod(one.shape) for one in tensors)
    n_there = math.prod(shape) if stored.is_part else n_there
    row = next((n for n in reversed(shape) if n != 1), 1)
    rows = {next((n for n in reversed(one.shape) if n != 1), 1) for one in tensors}
    is_bent = len(shape) > 1 and stored.views is None and rows != {row}
    if n_there != math.prod(shape) or is_bent:
        there = [list(one.shape) for one in tensors]
        raise wrong(
            file.path, f"has {there} numbers for {name}, and its metadata wants {list(shape)}"
        )


def _made(
    file: GgufFile,
    tensors: list[GgufTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    stored: Stored,
) -> Tensor:
    """Make a parameter of tensors; what a file has in float32 stays so, for what is kept so."""
    try:
        if len(tensors) == 1 and stored.views is None:
            is_whole = tensors[0].type_name == "F32" or not stored.is_of_rows
            made = _plain(file, tensors[0], torch.float32 if is_whole else dtype)
            return (made if stored.turn is None else stored.turn(made)).reshape(shape)
        out = torch.empty(shape, dtype=dtype)
        views = _behind(out, tensors) if stored.views is None else stored.views(out)
        for tensor, parts in zip(tensors, views, strict=True):
            _fill(file, tensor, parts)
        return out
    except (IndexError, RuntimeError, ValueError) as error:
        raise wrong(file.path, f"has a tensor that cannot be {list(shape)} ({error})") from error


def _behind(out: Tensor, tensors: list[GgufTensor]) -> list[list[Tensor]]:
    """Return the rows of a parameter that each tensor fills, one behind the other."""
    sizes = [one.shape[-2] for one in tensors]
    return [[part] for part in out.split(sizes, dim=-2)]


def _fill(file: GgufFile, tensor: GgufTensor, parts: list[Tensor]) -> None:
    """Fill views of a parameter with a tensor's rows."""
    (first, *others) = parts
    if not others and first.shape == tensor.shape and (first.dim() == 3 or first.is_contiguous()):
        _plain(file, tensor, first.dtype, first)
        return
    made = _plain(file, tensor, first.dtype)
    sizes = [part.numel() // made.shape[-1] for part in parts]
    for part, rows in zip(parts, made.view(-1, made.shape[-1]).split(sizes), strict=True):
        part.copy_(rows.view(part.shape))


def _plain(
    file: GgufFile, tensor: GgufTensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Make a tensor plain numbers, some rows at a time; write them where they are wanted."""
    rows = file.stored(tensor)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    width = tensor.shape[-1]
    made = torch.empty(tensor.shape, dtype=dtype) if out is None else out
    # Parts of a parameter are not one piece of memory: each expert's rows are filled in turn.
    blocks = made if made.dim() == 3 else made.view(1, -1, width)
    per_block = math.prod(blocks.shape[1:-1])
    step = max(1, _AT_A_TIME // width)
    for at, block in enumerate(blocks):
        for start in range(0, per_block, step):
            stop = min(start + step, per_block)
            some = np.array(rows[at * per_block + start : at * per_block + stop])
            with np.errstate(all="ignore"):  # a file may hold infinities
                plain = gguf.dequantize(some, kind)
            block[start:stop] = torch.from_numpy(plain.reshape(-1, width))
    return made
