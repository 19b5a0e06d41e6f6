"""Models of transformers: found, checked, loaded once, and bound to sessions."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import transformers

from kvcellar.backends.torch.adapters.placing import linear_sizes
from kvcellar.backends.torch.adapters.updates import NO_ADAPTERS, Adapters
from kvcellar.backends.torch.bind.binding import bind_network
from kvcellar.backends.torch.bind.pictures import read_pictures
from kvcellar.backends.torch.cpu.hold import Held
from kvcellar.backends.torch.cpu.modules.blocks import Kept
from kvcellar.backends.torch.cpu.modules.linears import codes_weights, reads_weights
from kvcellar.backends.torch.gpu.choice import is_gpu
from kvcellar.backends.torch.gpu.compiled import keep_compiled
from kvcellar.backends.torch.gpu.transfer.pinned import use_pinned_memory
from kvcellar.backends.torch.load.card import CardMemory, card_memory
from kvcellar.backends.torch.load.counting import NOTHING, Counted, count, may_keep
from kvcellar.backends.torch.load.gguf import makers_of, other_types
from kvcellar.backends.torch.load.networks import WrappedText, empty_network, load_network
from kvcellar.backends.torch.load.weights import DTYPES
from kvcellar.backends.torch.run.load_adapters import check_adapters, load_adapters, read_adapters
from kvcellar.backends.torch.run.model import TorchModel
from kvcellar.backends.torch.run.place_weights import hold_parts
from kvcellar.backends.torch.vision.beside import seeing_config, seen_beside
from kvcellar.backends.torch.vision.part import NoPicturesError, VisionClass
from kvcellar.backends.torch.vision.processor import Processor
from kvcellar.backends.torch.vision.reader import TorchPictureReader
from kvcellar.budget import format_size
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.models.adapters import Adapter
from kvcellar.models.check import (
    TOLERANCE,
    CheckVerdict,
    demand_exact,
    keep_verdict,
    known_verdict,
    torch_versions,
    verdict_of,
)
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.checkpoint import (
    check_tokenizer_files,
    check_weights,
    pick_dtype,
    read_config,
    read_json,
)
from kvcellar.models.files.formats import GROUPED, MLX, format_of
from kvcellar.models.files.generation import sampling_defaults
from kvcellar.models.files.hub import DEMO_FOLDER, find_checkpoint, is_local
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.known import facts_of, known_path, renew_facts, stamps_of
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn, no_progress
from kvcellar.models.picture_facts import (
    PictureVerdict,
    has_pictures,
    keep_picture_verdict,
    picture_verdict_of,
)
from kvcellar.models.plans.plan import keep_plan
from kvcellar.models.sizes.sizing import find_config, size_checkpoint
from kvcellar.models.text.tokenizer import (
    check_vocabulary,
    find_eos_token_ids,
    load_tokenizer,
    quiet,
)
from kvcellar.models.weights import (
    BESIDE_BLOCKS,
    BETWEEN_BLOCKS,
    FILE,
    Matrix,
    are_blocks,
    choose_weights,
    parse_weights,
    wants_blocks,
)
from kvcellar.spec import DTYPE_BYTES, ModelCacheSpec

if TYPE_CHECKING:
    from kvcellar.backends.torch.eagle3.head import Eagle3Head
    from kvcellar.backends.torch.ranks.leading import Leader
    from kvcellar.models import LoadedModel

_BY = f"transformers {transformers.__version__}"
"""Whose rules a model's facts and parts are learnt by."""

_DOWNLOAD = 0.9
"""How much of all the work it is to download a model, where that is needed."""


@dataclass(frozen=True, slots=True)
class _FoundCheckpoint:
    """A checkpoint that can be loaded, and how.

    Attributes:
        folder: where it is.
        raw: its ``config.json``.
        dtype: type of its weights in memory.
        device: where they go.
        weights: how linear layers hold theirs; None: as torch does.
        facts: of the model.
        blocks: matrices that the kernel holds as the file has them, by name.
        kept: shapes of these, by their names in the file.
        adapters: to be loaded beside it.
        n_ranks: among how many processes it is divided.
    """

    folder: Path
    raw: dict[str, Any]
    dtype: torch.dtype
    device: torch.device
    weights: str | None
    facts: ModelFacts
    blocks: Mapping[str, Kept]
    kept: Mapping[str, tuple[int, ...]]
    adapters: Sequence[Adapter]
    n_ranks: int


def load_model(options: LoadOptions, report: ProgressFn) -> TorchModel:
    """Load a model and its tokenizer; see :func:`kvcellar.models.load_model`."""
    asked = parse_weights(options.weights, options.dtype)
    start = 0.0  # where reading and loading begin, behind a download

    def downloading(part: float, what: str) -> None:
        nonlocal start
        start = _DOWNLOAD * part
        report(start, what)

    def reading(part: float, what: str) -> None:
        report(start + (1.0 - start) * part, what)

    with quiet(lambda part: reading(0.05 + 0.95 * part, "loading weights")):
        folder = find_checkpoint(options.model, downloading)
        reading(0.0, "reading the config")
        found = _check(folder, options, asked)
        if is_gpu(found.device):
            keep_compiled()
        _prove(found, options, reading)
        reading(0.02, "reading the tokenizer")
        tokenizer = load_tokenizer(folder)
        reading(0.05, "loading weights")
        leader = None
        if found.n_ranks == 1:
            network, held, beside = _read_network(found, reading)
        else:
            (network, leader), held, beside = _read_divided(found), None, NO_ADAPTERS
        pictures, no_pictures = _picture_reader(found, network, tokenizer)
    if held is not None and held.plan is not None and not options.is_unchecked:
        is_whole = isinstance(network, WrappedText)  # whose parameters have the wrapper's names
        plan = held.plan.renamed(network.plain_name) if is_whole else held.plan
        keep_plan(found.raw, plan)
    vocab_size = int(network.get_input_embeddings().num_embeddings)
    check_vocabulary(tokenizer, vocab_size, folder)
    said = [] if held is None else [_said(found, held)]
    said += [] if found.blocks else _expanded(found)
    report(1.0, f"ready: {'; '.join(said)}" if said else "ready")
    return TorchModel(
        name=options.name,
        path=folder,
        backend=options.backend or "torch",
        params=found.facts.params,
        config=network.config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=find_eos_token_ids(folder, found.raw, tokenizer),
        max_positions=found.facts.max_positions,
        dtype=str(network.dtype).removeprefix("torch."),
        weights=found.weights,
        sampling=sampling_defaults(folder),
        chat_template=None,
        adapters={one.name: one for one in found.adapters},
        pictures=pictures,
        no_pictures=no_pictures,
        network=network,
        decoder=None if held is None else held.decoder,
        facts=found.facts,
        beside=beside,
        leader=leader,
    )


def _picture_reader(
    found: _FoundCheckpoint, network: Any, tokenizer: Any
) -> tuple[TorchPictureReader | None, str]:
    """Return what reads pictures for a model, whose network takes their rows from then on.

    Returns:
        None, and why, where it reads none; without a reason where nobody would think that it does.
    """
    seen = None
    if found.folder.is_file():
        seen, why = seen_beside(found.folder)
        if seen is None:
            return None, why
    format = None if seen is not None else format_of(found.raw, found.folder)
    try:
        vision = VisionClass(found.raw if seen is None else seen.config)
    except NoPicturesError:
        return None, ""
    except ModelError as error:
        return None, str(error)
    if found.n_ranks > 1:
        return None, "a model that is divided among processes reads no pictures here"
    if format is not None and format.method == MLX:
        return None, "the vision part is stored as MLX's programs have it; load it with others"
    try:
        if seen is None:
            processor = Processor(found.folder, vision.config)
        else:
            processor = Processor.of_gguf(seen, vision.config, tokenizer)
    except ModelError as error:
        return None, str(error)
    versions = torch_versions()

    def find() -> PictureVerdict:
        from kvcellar.backends.torch.learn.picture_checking import (
            check_pictures,  # a second load needs it not
        )

        text = known_verdict(found.raw, versions)
        return check_pictures(found.raw, TOLERANCE if text is None else text.tolerance)

    verdict = picture_verdict_of(found.raw, versions, find)
    if verdict.facts is None or not verdict.is_exact:
        return None, verdict.refusal
    read_pictures(network, verdict.facts.n_deep)
    where = found.dtype, found.device
    weights = found.folder if seen is None else seen.file.path
    side = None
    if is_gpu(found.device):
        from kvcellar.backends.torch.gpu.transfer.side import SideStream  # it imports Triton

        side = SideStream(found.device)
    return TorchPictureReader(weights, processor, vision, verdict.facts, *where, side), ""


def _expanded(found: _FoundCheckpoint) -> list[str]:
    """Say that weights of few bits are plain numbers in memory, where they are."""
    format = None if found.folder.is_file() else format_of(found.raw, found.folder)
    if format is None or format.method not in GROUPED:
        return []
    return [f"{format.said} is {str(found.dtype).removeprefix('torch.')} in memory"]


def _prove(found: _FoundCheckpoint, options: LoadOptions, report: ProgressFn) -> None:
    """Make sure that a model is exact behind our caches; that is found out once, and kept.

    Raises:
        ModelError: it is not.
    """
    if found.folder == DEMO_FOLDER:  # its tests are ours
        return
    report(0.01, "checking")

    def find() -> CheckVerdict:
        from kvcellar.backends.torch.learn.checking import (
            check_checkpoint,  # a second load needs it not
        )

        return check_checkpoint(found.folder, found.raw)

    verdict = verdict_of(found.raw, torch_versions(), find, is_unchecked=options.is_unchecked)
    demand_exact(verdict, options.name, is_unchecked=options.is_unchecked)
    if found.n_ranks > 1:
        from kvcellar.backends.torch.ranks.checking import prove_division  # as above

        prove_division(found.raw, options.name, is_unchecked=options.is_unchecked)


def prove_model(model: str | Path, report: ProgressFn) -> tuple[CheckVerdict, bool]:
    """Check a checkpoint and learn its facts anew, whatever is kept of it, and keep what was found.

    Args:
        model: as ``LoadOptions`` has it.
        report: called while it is checked.

    Returns:
        The verdict, and true if the facts that had been kept were not the model's.

    Raises:
        ModelError: there is no such checkpoint, or its weights cannot be read.
    """
    with quiet(lambda part: None):
        from kvcellar.backends.torch.learn.checking import check_checkpoint

    folder = find_checkpoint(model, report)
    raw = _read_raw(folder)
    verdict = check_checkpoint(folder, raw, lambda part: report(0.9 * part, f"checking {model}"))
    is_replaced = False
    with suppress(ModelError):  # the verdict says it
        is_replaced = renew_facts(raw, _learn, _BY)
    keep_verdict(raw, torch_versions(), verdict)
    if has_pictures(folder, raw):
        from kvcellar.backends.torch.learn.picture_checking import check_pictures

        report(0.9, f"checking pictures of {model}")
        found = check_pictures(raw, verdict.tolerance)
        keep_picture_verdict(raw, torch_versions(), found)
    return verdict, is_replaced


def _read_network(found: _FoundCheckpoint, report: ProgressFn) -> tuple[Any, Held | None, Adapters]:
    """Read the weights; return the module on its device, what a kernel has of it, and its adapters.

    Raises:
        ModelError: weights or adapters that are not whole, or not this architecture's.
    """
    on_card = found.weights is not None and is_gpu(found.device)
    network = load_network(
        found.folder,
        found.raw,
        dtype=found.dtype,
        device=torch.device("cpu") if on_card else found.device,
        keeps_mxfp4=found.weights is not None,
        kept=found.kept,
    )
    layers = linear_sizes(network) if found.adapters else {}
    bind_network(network, found.facts, found.device)
    if found.device.type == "cuda":
        use_pinned_memory()
    known = known_path(found.raw, _BY).with_suffix(f".{found.weights or found.dtype}.parts.json")
    if found.weights is not None:
        report(0.95, "packing the weights")
    where = found.device, known
    held, parts = hold_parts(network, found.weights, *where, found.blocks, found.facts)
    if not found.adapters:
        return network, held, NO_ADAPTERS
    report(0.98, f"loading {len(found.adapters)} adapters")
    return network, held, load_adapters(network, parts, layers, found.adapters, found.facts)


def _read_divided(found: _FoundCheckpoint) -> tuple[Any, Leader]:
    """Have all ranks read their part of a model; return this one's, and what leads the others.

    Raises:
        ModelError: weights that are not whole, or not this architecture's.
        BackendError: a rank cannot be started, or has ended.
    """
    from kvcellar.backends.torch.ranks.commands import Load  # few models are divided
    from kvcellar.backends.torch.ranks.leading import read_together
    from kvcellar.backends.torch.ranks.processes import ranks_of

    ranks = ranks_of(found.n_ranks, found.device.type)
    dtype = str(found.dtype).removeprefix("torch.")
    number = ranks.new_number()
    what = Load(number, found.folder, found.raw, dtype, found.facts, found.n_ranks)
    return read_together(ranks, what, found.device)


def _said(found: _FoundCheckpoint, held: Held) -> str:
    """Say in one line how much of a model the kernel has, and what became of other blocks."""
    said = held.said(str(found.weights))
    is_ours = found.weights == FILE and found.folder.is_file()
    others = other_types(read_gguf(found.folder)) if is_ours else {}
    if others:
        sizes = ", ".join(f"{kind} ({format_size(n)})" for kind, n in sorted(others.items()))
        said += f"; what the file has in {sizes} became plain numbers"
    return said


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model; see :func:`kvcellar.models.check_model`."""
    asked = parse_weights(options.weights, options.dtype)
    if is_local(options.model):
        _check(find_checkpoint(options.model, no_progress), options, asked)
    else:
        pick_types(options.dtype or "float32", options.device, {}, Counter())


def _check(folder: Path, options: LoadOptions, asked: str | None) -> _FoundCheckpoint:
    """Check a checkpoint's files and the options, and pick types and device."""
    raw = _read_raw(folder, sees=options.tp == 1)
    facts = model_facts(raw)
    facts.params  # noqa: B018 (what cannot be served is refused)
    stored = check_weights(folder)
    check_tokenizer_files(folder)
    wanted = "bfloat16" if asked == "bf16" else options.dtype
    if options.model == DEMO and wanted in (None, "auto"):
        wanted = "float32"
    if asked == FILE and not may_keep(raw, folder):
        raise ConfigError(
            f"weights {FILE} are those of a GGUF file, or as MLX, AWQ, GPTQ or compressed-tensors "
            f"store them, and {folder} has others; choose int8 or int4, or leave it out"
        )
    pick_types("float32", options.device, raw, stored)  # a device that is not there is refused
    counted = _blocks(folder, raw, facts, options, asked)
    if counted.blocks:
        asked = FILE
        wanted = _between(_device(options)) if wanted in (None, "auto") else wanted
    dtype, device = pick_types(wanted, options.device, raw, stored)
    has_kernel = reads_weights() and _has_kernel(device)
    weights = choose_weights(asked, str(dtype).removeprefix("torch."), has_kernel=has_kernel)
    if weights is not None and not _has_kernel(device):
        raise BackendError(
            f"weights {weights} are read by the CPU kernel, and on a card by Triton, which has "
            f"none for {device} here; choose another device, or leave weights out"
        )
    if options.tp > 1:
        from kvcellar.backends.torch.ranks.parts import check_division  # few models are divided

        check_division(raw, options.name, device, options.tp)
    kept = {counted.keys[name]: one.shape for name, one in counted.blocks.items()}
    adapters = read_adapters(options)
    with quiet(lambda part: None):
        check_adapters(adapters, raw)
    where = dtype, device, weights, facts
    return _FoundCheckpoint(folder, raw, *where, counted.blocks, kept, adapters, options.tp)


def _blocks(
    folder: Path, raw: Mapping[str, Any], facts: ModelFacts, options: LoadOptions, asked: str | None
) -> Counted:
    """Count a model whose matrices are to stay as its file has them; of others nothing.

    Raises:
        ConfigError: that was asked for, and none can.
    """
    has_kernel = _has_kernel(_device(options))
    if not (may_keep(raw, folder) and has_kernel and wants_blocks(asked, options.dtype)):
        return NOTHING
    counted = _count(raw, facts, folder)
    if asked == FILE and reads_weights() and not counted.blocks:
        raise ConfigError(
            f"weights {FILE} were asked for, and no matrix of {folder} can be multiplied as it is "
            f"stored; choose int8 or int4, or leave it out"
        )
    is_taken = asked == FILE or are_blocks(counted.sizes, counted.matrices)
    return counted if is_taken else NOTHING


def _device(options: LoadOptions) -> torch.device:
    """Return where a model goes."""
    return torch.device("cpu" if options.device is None else options.device)


def _between(device: torch.device) -> str:
    """Return the type that a model of a file's blocks computes in, where none is asked for."""
    return BESIDE_BLOCKS if is_gpu(device) else BETWEEN_BLOCKS


def _has_kernel(device: torch.device) -> bool:
    """Return true if a kernel of ours reads weights on a device: the CPU's, or Triton's."""
    return device.type == "cpu" or is_gpu(device)


def _read_raw(folder: Path, *, sees: bool = True) -> dict[str, Any]:
    """Read a checkpoint's config, of which the weights must be ones that are read here.

    What a GGUF file says of its model is held against its tensors first: nothing is made by sizes
    that only a damaged file has.

    Args:
        folder: the checkpoint, or a GGUF file.
        sees: of such a file, with the vision part beside it.
    """
    raw = read_config(folder)
    format_of(raw, folder)
    if folder.is_file():
        _check_gguf(_Stored.of(raw, folder))
        return seeing_config(folder, raw) if sees else raw
    return raw


def model_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model; see :meth:`kvcellar.models.loading.ModelLoader.model_facts`."""
    return facts_of(raw, _learn, _BY)


def _learn(raw: Mapping[str, Any]) -> ModelFacts:
    """Learn the facts of a model anew."""
    # Imported here, where loading is quiet: transformers imports all that it can find.
    with quiet(lambda part: None):
        from kvcellar.backends.torch.learn.probe import learn_facts

        return learn_facts(raw)


def pick_types(
    dtype: Any, device: Any, raw: Mapping[str, Any], stored: Counter[str]
) -> tuple[torch.dtype, torch.device]:
    """Pick the types that a checkpoint is loaded in; ``LoadOptions`` says by which rules.

    Args:
        dtype: what the caller asked for.
        device: what the caller asked for.
        raw: the checkpoint's ``config.json``.
        stored: tensors by stored type.

    Raises:
        ConfigError: a dtype or device that does not exist, or is not there.
    """
    try:
        where = torch.device("cpu" if device is None else device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"device {device!r} cannot be used: {str(error).splitlines()[0]}; choose another, "
            f"such as 'cpu'"
        ) from error
    return DTYPES[pick_dtype(dtype, raw, stored, is_cpu=where.type == "cpu")], where


def device_memory(device: Any) -> CardMemory | None:
    """Return the memory of a card; see :func:`~kvcellar.backends.torch.load.card.card_memory`."""
    return card_memory(device)


def load_eagle3(name_or_path: str | Path | None, target: LoadedModel) -> Eagle3Head:
    """Load an EAGLE-3 head for a model; see :func:`kvcellar.backends.torch.eagle3.loading`."""
    from kvcellar.backends.torch.eagle3 import loading

    return loading.load_eagle3(name_or_path, target)


def size_model(options: LoadOptions) -> ModelCacheSpec:
    """Work out what a model costs; see :func:`kvcellar.models.sizes.sizing.size_model`."""
    path = find_config(options.model)
    if path.suffix != ".json":
        _read_raw(path)
    device = _device(options)
    spec = size_checkpoint(
        options,
        model_facts,
        has_kernel=_has_kernel(device),
        is_coded=codes_weights() and not is_gpu(device),
        between=_between(device),
    )
    return spec.with_pictures(_vision_bytes(path, spec.dtype))


def _vision_bytes(config: Path, dtype: str) -> int:
    """Return the bytes of the weights that read pictures; 0 where a checkpoint reads none.

    Args:
        config: its ``config.json``, or a GGUF file.
        dtype: that they are used in.
    """
    is_json = config.suffix == ".json"
    raw = read_json(config) if is_json else _read_raw(config)
    if not has_pictures(config.parent if is_json else config, raw):
        return 0
    with suppress(ModelError), quiet(lambda part: None):  # who loads it says why it reads none
        return int(VisionClass(raw).n_numbers) * DTYPE_BYTES[dtype]
    return 0


def count_parameters(
    raw: Mapping[str, Any], file: Path | None
) -> tuple[Mapping[str, int], Mapping[str, Matrix]]:
    """Count the numbers of every parameter, a tied one once; and tell which the kernel can hold.

    Args:
        raw: a checkpoint's ``config.json``.
        file: a GGUF file or a folder with its weights; None: they are elsewhere.

    Raises:
        ModelError: the config's fields do not make a model.
    """
    return _counted(_Stored.of(raw, file))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A checkpoint, equal to another by its config and the state of its files."""

    key: tuple[object, ...]
    raw: Mapping[str, Any] = field(compare=False)
    file: Path | None = field(compare=False)

    @classmethod
    def of(cls, raw: Mapping[str, Any], file: Path | None) -> _Stored:
        """Look at a checkpoint's config and files, of which there may be none here."""
        stamps: tuple[object, ...] = ()
        if file is not None:
            stamps = tuple(stamps_of(file if file.is_file() else file / "config.json"))
        key = json.dumps(raw, sort_keys=True, default=str), stamps, reads_weights()
        return cls(key, raw, file)


@functools.lru_cache(maxsize=16)  # to size a model within a budget takes its counts several times
def _counted(stored: _Stored) -> tuple[Mapping[str, int], Mapping[str, Matrix]]:
    counted = _count(stored.raw, model_facts(stored.raw), stored.file)
    return MappingProxyType(dict(counted.sizes)), MappingProxyType(dict(counted.matrices))


@functools.lru_cache(maxsize=16)
def _check_gguf(stored: _Stored) -> None:
    """Hold what a GGUF file says of its model against its tensors.

    Raises:
        ModelError: they contradict each other.
    """
    assert stored.file is not None
    with quiet(lambda part: None):
        makers_of(read_gguf(stored.file), empty_network(stored.raw), torch.float32)


def _count(raw: Mapping[str, Any], facts: ModelFacts, file: Path | None) -> Counted:
    with quiet(lambda part: None):
        return count(raw, facts, file)
