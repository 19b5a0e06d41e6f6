"""Weights of GGUF files, made plain numbers one tensor at a time, by the names of transformers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from kvcellar.backends.torch.fast.blocks import StoredBlocks
from kvcellar.backends.torch.stored import PlainTensor
from kvcellar.errors import ModelError
from kvcellar.kernel.blocks import INPUTS
from kvcellar.models.checkpoint import few
from kvcellar.models.gguf.families import FAMILIES, Family
from kvcellar.models.gguf.reader import GgufFile, GgufTensor, wrong

_AT_A_TIME = 1 << 20
"""Numbers that are made plain at a time."""

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_JOINED = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.gate.weight": ("ffn_gate_inp.weight",),
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias",),
}
"""Parameters of a layer that transformers has in another form than files -> what they are made
of, one behind the other along their rows."""

_UNREAD = re.compile(r"^(rope_freqs|rope_factors_long|rope_factors_short)\.weight$")
"""Tensors that the config was made of."""

_SPARE = ("mtp.",)
"""Beginnings of names of what guesses several tokens, and is not loaded."""

Make = Callable[[], Tensor]
Turn = Callable[[Tensor], Tensor]
Plan = dict[str, tuple[tuple[str, ...], Turn | None]]
"""Parameters -> tensors of the file that they are made of, and what undoes how these are stored."""


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
    family = FAMILIES.get(file.architecture)
    if family is None:
        plan = _by_transformers(file, network.config)
    else:
        plan = _by_us(file, family, network.config, wanted)
    _check_names(file, network, wanted, plan)
    makers: dict[str, Make] = {}
    for name, shape in wanted.items():
        sources, turn = plan[name]
        tensors = [file.tensors[source] for source in sources]
        _check_shape(file, name, tensors, shape)
        makers[name] = partial(_made, file, tensors, shape, dtype, turn)
    return makers


def blocks_of(file: GgufFile, network: Any) -> dict[str, StoredBlocks]:
    """Return a network's matrices that the kernel multiplies as the file has them, by name.

    Args:
        file: the model; ``makers_of`` took it.
        network: of its config.
    """
    family, found = FAMILIES[file.architecture], {}
    for name, shape in _wanted(network).items():
        source, *others = _sources(file, name, network.config)
        tensor = file.tensors[source]
        if not others and len(shape) == 2 and tensor.shape == shape and tensor.type_name in INPUTS:
            turn = _turn(family, source, network.config)
            read = partial(_stored, file, tensor, turn)
            found[name] = StoredBlocks(tensor.type_name, *shape, read)
    return found


def _stored(file: GgufFile, tensor: GgufTensor, turn: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Read a matrix's rows as they are stored, in the order of transformers."""
    rows = torch.from_numpy(np.array(file.stored(tensor)))
    return rows if turn is None else turn(rows).contiguous()


def _wanted(network: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a network's parameters, those of a tied head left out."""
    embedding = network.get_input_embeddings().weight
    head = network.get_output_embeddings()
    is_tied = head is not None and network.config.tie_word_embeddings
    skip = head.weight if is_tied and head.weight is not embedding else None
    return {
        name: tuple(weight.shape)
        for name, weight in network.named_parameters()
        if weight is not skip
    }


def _sources(file: GgufFile, name: str, config: Any) -> tuple[str, ...]:
    """Return the names that the tensors of one parameter have in a file."""
    layer = _LAYER.match(name)
    if layer is not None and layer[2] in _JOINED:
        return tuple(f"blk.{layer[1]}.{end}" for end in _JOINED[layer[2]])
    base, dot, suffix = name.rpartition(".")
    found = _names(file.architecture, config.num_hidden_layers).get_name(base)
    return (f"{found}{dot}{suffix}",)


@lru_cache(maxsize=4)
def _names(architecture: str, n_layers: int) -> Any:
    """Return the format's own table from other programs' names to its."""
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    return gguf.get_tensor_name_map(known[architecture], n_layers)


def _by_us(
    file: GgufFile, family: Family, config: Any, wanted: Mapping[str, tuple[int, ...]]
) -> Plan:
    """Return what each parameter is made of, by the format's names and our families."""
    plan: Plan = {}
    for name in wanted:
        sources = _sources(file, name, config)
        plan[name] = sources, _turn(family, sources[0], config)
    return plan


def _by_transformers(file: GgufFile, config: Any) -> Plan:
    """Return what each parameter is made of, by transformers' own table for an architecture."""
    from transformers.core_model_loading import Concatenate, WeightConverter, rename_source_key
    from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

    mapping = GGUF_ARCHS[file.architecture](config)
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    renamings: list[Any] = [one for one in mapping if not isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    found: dict[str, dict[str, str]] = {}
    for source in file.tensors:
        name, pattern = rename_source_key(source, renamings, converters)
        found.setdefault(name, {})[pattern or ""] = source
    plan: Plan = {}
    for name, sources in found.items():
        converter = by_pattern.get(next(iter(sources)))
        operations = [] if converter is None else converter.operations
        if all(isinstance(one, Concatenate) for one in operations):
            order = [""] if converter is None else converter.source_patterns
            plan[name] = tuple(sources[one] for one in order if one in sources), None
        else:
            plan[name] = tuple(sources.values()), partial(_operated, operations=operations)
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
    file: GgufFile, network: Any, wanted: Mapping[str, tuple[int, ...]], plan: Plan
) -> None:
    """Refuse a file that has not all of a network's tensors, or has others.

    Raises:
        ModelError: so it is.
    """
    used = {source for name in wanted for source in plan.get(name, ((name,), None))[0]}
    missing = sorted(used - file.tensors.keys())
    if missing:
        raise wrong(
            file.path,
            f"lacks {len(missing)} tensors that a {type(network).__name__} has: {few(missing)}",
        )
    spare = {source for name in plan for source in plan[name][0] if name.startswith(_SPARE)}
    unread = {one for one in file.tensors if _UNREAD.match(one)}
    others = sorted(file.tensors.keys() - used - spare - unread)
    if others:
        raise ModelError(
            f"{file.path} has {len(others)} tensors that a {type(network).__name__} does not know: "
            f"{few(others)}; take the model's own safetensors"
        )


def _check_shape(
    file: GgufFile, name: str, tensors: list[GgufTensor], shape: tuple[int, ...]
) -> None:
    """Refuse tensors that do not make a parameter; axes of one number may be left out.

    Raises:
        ModelError: so they are.
    """
    found = list(tensors[0].shape)
    if len(tensors) > 1:
        found[-2] = sum(each.shape[-2] for each in tensors)
    ours, theirs = ([n for n in each if n != 1] for each in (found, shape))
    if ours != theirs or len({each.shape for each in tensors}) > 1:
        raise wrong(
            file.path, f"has {found} numbers for {name}, and its metadata wants {list(shape)}"
        )


def _turn(family: Family, source: str, config: Any) -> Turn | None:
    """Return what undoes the way in which a tensor is stored; None: nothing is to be done."""
    leaf = source.split(".", 2)[-1]
    if family.norm_offset and source.endswith("norm.weight"):
        return lambda some: some - family.norm_offset
    if family.is_turned and leaf.startswith(("attn_q.", "attn_k.")):
        is_q = leaf.startswith("attn_q.")
        n_heads = config.num_attention_heads if is_q else config.num_key_value_heads
        return partial(_halves, n_heads=n_heads)
    return None


def _halves(stored: Tensor, *, n_heads: int) -> Tensor:
    """Return rows of heads whose halves turn together, of rows that turn in pairs."""
    by_pairs = stored.view(n_heads, -1, 2, *stored.shape[1:])
    return by_pairs.transpose(1, 2).reshape(stored.shape)


def _made(
    file: GgufFile,
    tensors: list[GgufTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    turn: Turn | None,
) -> Tensor:
    """Make a parameter of the tensors that are its rows."""
    if len(tensors) == 1:
        # What is taken off a norm is taken off in float32: it is small beside what was added.
        made = _plain(file, tensors[0], dtype if len(shape) > 1 else torch.float32)
        try:
            made = made if turn is None else turn(made)
            return made.to(dtype).reshape(shape)
        except (IndexError, RuntimeError, ValueError) as error:
            raise wrong(
                file.path, f"has a tensor that cannot be {list(shape)} ({error})"
            ) from error
    out = torch.empty(shape, dtype=dtype)
    start = 0
    for tensor in tensors:
        stop = start + tensor.shape[-2]
        _plain(file, tensor, dtype, out[..., start:stop, :])
        start = stop
    return out


def _plain(
    file: GgufFile, tensor: GgufTensor, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Make a tensor plain numbers, some rows at a time; write them where they are wanted."""
    rows = file.stored(tensor)
    kind = gguf.GGMLQuantizationType(tensor.kind)
    width = tensor.shape[-1]
    made = torch.empty(tensor.shape, dtype=dtype) if out is None else out
    # Parts of a parameter are not one piece of memory: each expert's rows are filled in turn.
    blocks = made.view(1, -1, width) if out is None else made
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
