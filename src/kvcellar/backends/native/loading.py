"""Models from a checkpoint and a plan, without a network and without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvcellar.backends.host_memory import give_back
from kvcellar.backends.native.decoder import NativeDecoder
from kvcellar.backends.native.hybrid import HybridDecoder
from kvcellar.backends.native.pools import SideForm, forms_of
from kvcellar.backends.native.recurrent import in_parts
from kvcellar.backends.native.runner import NativeRunner
from kvcellar.backends.native.shapes import check_shapes
from kvcellar.backends.native.tensors import TYPES, ExpertRows, Tensors, tensors_of
from kvcellar.backends.native.weights import MXFP4, WeightHolder
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.kernel import blocks, levels
from kvcellar.kernel import linear as products
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.checkpoint import (
    check_tokenizer_files,
    check_weights,
    pick_dtype,
    read_config,
)
from kvcellar.models.files.generation import sampling_defaults
from kvcellar.models.files.hub import find_checkpoint, is_local
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.model import DeviceMemory, LoadedModel
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn, no_progress
from kvcellar.models.picture_facts import has_pictures, text_alone
from kvcellar.models.plans.plan import ModelPlan
from kvcellar.models.plans.rules import known_plan
from kvcellar.models.runner import Runner
from kvcellar.models.sizes.sizing import size_checkpoint
from kvcellar.models.text.tokenizer import check_vocabulary, find_eos_token_ids, load_tokenizer
from kvcellar.models.weights import (
    BETWEEN_BLOCKS,
    FILE,
    PLAIN,
    Matrix,
    are_blocks,
    parse_weights,
)
from kvcellar.registry import CacheSession
from kvcellar.spec import ModelCacheSpec

_USUAL_DIM = 128
"""Numbers of a head's row, of which no storage type is refused."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeModel(LoadedModel):
    """A planned model in memory; attributes as in :class:`LoadedModel`.

    Attributes:
        decoder: its weights, and what runs them.
    """

    decoder: NativeDecoder = field(repr=False)

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner; session and model were found to fit."""
        return NativeRunner(self.decoder, self.params, session, feature_layers)

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        return self.touch_weights()

    def touch_weights(self) -> int:
        """Return the bytes of the weights: loading has read them all."""
        return sum(array.nbytes for array in self.decoder.holder.kept)


def load_model(options: LoadOptions, report: ProgressFn) -> NativeModel:
    """Load a model and its tokenizer; see :func:`kvcellar.models.load_model`."""
    _refuse(options)
    folder = find_checkpoint(options.model, lambda part, what: report(0.9 * part, what))
    report(0.9, "reading the config")
    raw, plan = _planned(folder, options)
    dtype, weights = _types(folder, raw, options)
    report(0.91, "reading the tokenizer")
    tokenizer = load_tokenizer(folder)
    give_back()  # a large vocabulary leaves a hundred megabytes behind
    report(0.92, "loading weights")
    tensors = tensors_of(folder, plan)
    check_shapes(plan, tensors)
    is_in_parts = plan.is_hybrid or plan.query_growth is not None
    kind = HybridDecoder if is_in_parts else NativeDecoder
    decoder = kind(plan, WeightHolder(tensors, weights, dtype))
    check_vocabulary(tokenizer, plan.facts.vocab_size, folder)
    report(1.0, "ready")
    return NativeModel(
        name=options.name,
        path=folder,
        backend=options.backend or "native",
        params=plan.facts.params,
        config=SimpleNamespace(**(raw.get("text_config") or raw)),
        tokenizer=tokenizer,
        vocab_size=plan.facts.vocab_size,
        eos_token_ids=find_eos_token_ids(folder, raw, tokenizer),
        max_positions=plan.facts.max_positions,
        dtype=dtype,
        weights=None if weights == PLAIN else weights,
        sampling=sampling_defaults(folder),
        chat_template=None,
        no_pictures=text_alone(folder, raw, "native"),
        decoder=decoder,
    )


def _planned(folder: Path, options: LoadOptions) -> tuple[dict[str, Any], ModelPlan]:
    """Return a checkpoint's config and the plan of its model.

    Raises:
        BackendError: there is no plan.
        ModelError: the checkpoint is incomplete.
    """
    raw = read_config(folder)
    plan = known_plan(raw)
    if plan is None:
        raise BackendError(
            f"{options.name!r} has no plan yet, by which the native backend runs a model; load it "
            f"once with torch on the CPU, as with: kvcellar generate {options.name} --weights "
            f"{'file' if folder.is_file() else 'bf16'} --max-tokens 1"
        )
    check_tokenizer_files(folder)
    return raw, in_parts(plan, read_gguf(folder).tensors) if folder.is_file() else plan


def _types(folder: Path, raw: Mapping[str, Any], options: LoadOptions) -> tuple[str, str]:
    """Return the type that a model computes in, and how its weights are held.

    Raises:
        ConfigError: what was asked for are plain weights in a type that the kernel has no products
            for.
    """
    asked = parse_weights(options.weights, options.dtype)
    stored = check_weights(folder)
    if folder.is_file() and asked is None and options.dtype in (None, "auto"):
        asked = FILE
    if asked == FILE:
        dtype = BETWEEN_BLOCKS if options.dtype in (None, "auto") else options.dtype
        return pick_dtype(dtype, raw, stored, is_cpu=True), FILE
    wanted = options.dtype
    if options.model == DEMO and wanted in (None, "auto"):
        wanted = "float32"
    dtype = pick_dtype("bfloat16" if asked == "bf16" else wanted, raw, stored, is_cpu=True)
    if asked is None and dtype == "bfloat16":
        asked = "bf16"
    asked = asked or PLAIN
    if dtype == "float16" or (asked == PLAIN and dtype != "float32"):
        raise ConfigError(
            f"{options.name!r} would compute in {dtype} with plain weights, which the native "
            f"backend does not; choose weights bf16, int8 or int4, dtype float32, or the backend "
            f"torch"
        )
    return dtype, asked


def lack_of(options: LoadOptions) -> str:
    """Say what keeps a model from running here as the torch backend would run it; empty: nothing.

    Raises:
        ModelError, BackendError, ConfigError: as ``check_model``.
    """
    check_model(options)
    if not is_local(options.model):
        return "it is not here yet, and its tensors are looked at first"
    folder = find_checkpoint(options.model, no_progress)
    raw, plan = _planned(folder, options)
    _, weights = _types(folder, raw, options)
    is_usual = options.dtype in (None, "auto") and options.weights is None
    if has_pictures(folder, raw):
        return "it reads pictures, which the native backend does not"
    tensors = tensors_of(folder, plan)
    of_each = {name: tensors.shape(name)[0] for name in plan.tensors}
    kinds = {of_each.pop(name) for name in plan.matrices}
    expanding = {of_each.pop(name) for name in plan.expansions} - blocks.INPUTS.keys()
    small = ({*of_each.values()} | expanding) - TYPES.keys()
    if small:
        return f"its file has in {', '.join(sorted(small))} what is read as plain numbers"
    of_experts = {rows.kind for _, rows in _experts(tensors, plan)}
    _beside_experts(tensors, plan)  # which has to be there
    plain = (kinds | of_experts) - blocks.INPUTS.keys()
    if weights == FILE and plain:
        return f"its file has matrices in {', '.join(sorted(plain))}, which are not multiplied so"
    in_blocks = (kinds | of_experts - {MXFP4}) - TYPES.keys()
    if weights != FILE and in_blocks:
        return f"its file has matrices in {', '.join(sorted(in_blocks))}, which are not packed anew"
    if weights == FILE and is_usual and not are_blocks(*_counted(tensors, plan, is_kept=True)):
        return "most of its file is no blocks of few bits, and is rather held as bf16"
    return ""


def _refuse(options: LoadOptions) -> None:
    """Refuse options that no model here can have, whatever its files are.

    Raises:
        BackendError: the kernel is not built here.
        ConfigError: so it is, with the way out.
    """
    if not levels.is_available():
        raise BackendError(f"the native backend is the CPU kernel: {levels.why_not()}")
    speculate = options.speculate or ""
    refused = {
        f"device {options.device!r}": options.device not in (None, "cpu"),
        f"tp {options.tp}": options.tp > 1,
        f"adapters ({', '.join(options.adapters)})": bool(options.adapters),
        f"speculate {speculate!r}": speculate.partition(":")[0] == "eagle3",
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{name} was asked for, which the native backend does not have; choose the backend "
                f"torch, or leave it out"
            )
    if options.kv_dtype is not None:
        kv = parse_kv_dtype(options.kv_dtype)
        for side in (kv.k, kv.v):
            SideForm.of(side, _USUAL_DIM)
        if kv.k.is_rotated:
            raise ConfigError(
                f"kv_dtype {options.kv_dtype} stores K rotated, which models of the native backend "
                f"do not; leave :rot out, or choose the backend torch"
            )


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model; see :func:`kvcellar.models.check_model`."""
    _refuse(options)
    if is_local(options.model):
        folder = find_checkpoint(options.model, no_progress)
        raw, plan = _planned(folder, options)
        _types(folder, raw, options)
        if options.kv_dtype is not None:
            for group in plan.facts.params.groups:
                forms_of(group, parse_kv_dtype(options.kv_dtype))


def size_model(options: LoadOptions) -> ModelCacheSpec:
    """Work out what a model costs; see :func:`kvcellar.models.sizes.sizing.size_model`."""
    return size_checkpoint(
        options,
        model_facts,
        has_kernel=True,
        is_coded=products.reads_coded(),
        count=partial(_count, options),
    )


def _count(
    options: LoadOptions, raw: Mapping[str, Any], kept: Path | None
) -> tuple[dict[str, int], dict[str, Matrix]]:
    """Count the numbers of a planned model's tensors; its matrices are the kernel's.

    Args:
        options: of the model.
        raw: its ``config.json``.
        kept: a GGUF file whose blocks stay as they are; None: nothing does.
    """
    folder = find_checkpoint(options.model, no_progress)
    _, plan = _planned(folder, options)
    return _counted(tensors_of(folder, plan), plan, is_kept=kept is not None)


def _counted(
    tensors: Tensors, plan: ModelPlan, *, is_kept: bool
) -> tuple[dict[str, int], dict[str, Matrix]]:
    """Count the numbers of a plan's tensors; ``is_kept`` where blocks stay as they are."""
    own = () if plan.own_rows is None else (plan.own_rows.embedding,)
    exact = (plan.embedding, *plan.head.weights, *own)
    at_matrices = set(plan.matrices)
    sizes, matrices = {}, {}

    def block_bytes(kind: str, n_out: int, n_in: int) -> int:
        if not is_kept or kind not in blocks.INPUTS:
            return 0
        return sum(blocks.block_sizes(blocks.block_type(kind), n_in, n_out)[1:])

    for name in plan.tensors:
        kind, shape = tensors.shape(name)
        sizes[name] = math.prod(shape)
        if name in at_matrices:
            n_out, n_in = shape
            n_bytes = block_bytes(kind, n_out, n_in)
            matrices[name] = Matrix(n_out, n_in, name in exact, False, block_bytes=n_bytes)
    for name, rows in _experts(tensors, plan):
        n, n_out, n_in = rows.n_experts, rows.n_out, rows.n_in
        sizes[name] = n * n_out * n_in
        n_bytes = n * block_bytes(rows.kind, n_out, n_in)
        matrices[name] = Matrix(n_out, n_in, False, False, n, block_bytes=n_bytes)
    return sizes | _beside_experts(tensors, plan), matrices


def _beside_experts(tensors: Tensors, plan: ModelPlan) -> dict[str, int]:
    """Count the numbers of what mixtures have beside their experts' matrices.

    Raises:
        ModelError: some is not there.
    """
    sizes = dict[str, int]()
    for one in plan.mixtures:
        biases = one.biases or ()
        small = [name for name in one.tensors if name not in biases]
        sizes |= {name: math.prod(tensors.shape(name)[1]) for name in small}
        sizes |= {name: tensors.expert_biases(name, is_crossed=False).size for name in biases}
    return sizes


def _experts(tensors: Tensors, plan: ModelPlan) -> Iterator[tuple[str, ExpertRows]]:
    """Yield the matrices of all experts by the plan's names; nothing is read."""
    for one in plan.mixtures:
        for name in (one.gate_up, one.down):
            yield name, tensors.experts(name, is_crossed=one.is_crossed)


def model_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model by its plan.

    Raises:
        ModelError: there is none.
    """
    plan = known_plan(raw)
    if plan is None:
        raise ModelError(
            f"a model of {raw.get('model_type')!r} has no plan yet; load it once with torch"
        )
    return plan.facts


def device_memory(device: Any) -> DeviceMemory | None:
    """Return None: the memory of a CPU is the main memory."""
    return None
