"""From a checkpoint to one .pte: traced once, lowered to XNNPACK, its cache chosen at run time."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvcellar.backends.executorch.archive import pack_files, seal
from kvcellar.backends.executorch.building import executorch_version
from kvcellar.backends.executorch.program import OWN_PREFIX
from kvcellar.backends.executorch.quantising import check_scheme, quantise
from kvcellar.backends.executorch.rewriting import rewrite
from kvcellar.backends.executorch.rotating import pairs_for_complex
from kvcellar.backends.torch.bind.inputs import inputs_of, modules_given
from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.run.model import TorchModel
from kvcellar.errors import ConfigError, KVCellarError, ModelError
from kvcellar.metadata import write_kv_cache_metadata
from kvcellar.models import load_model
from kvcellar.models.eagle3.config import default_feature_layers
from kvcellar.models.facts import ModelFacts
from kvcellar.models.fingerprint import TEMPLATE_FILES, TOKENIZER_FILES
from kvcellar.models.model import check_feature_layers
from kvcellar.models.options import ProgressFn, no_progress

DTYPES = ("float32", "float16", "bfloat16")
OP = "update_and_attend"
PRODUCTS = ("linear", "mm", "addmm")
"""Operators that linear layers become."""
CARRIED = ("config.json", "generation_config.json", *TOKENIZER_FILES, *TEMPLATE_FILES)
"""Files of a checkpoint that travel inside the program."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Report on an export: files, sizes, and which operators which library runs.

    Attributes:
        path: the file.
        size_bytes: of the file.
        method: the name of the method inside.
        quantize: the scheme of the weights, or ``none``.
        dtype: type of activations, and of weights that are not quantised.
        max_tokens_per_step: the most tokens that one forward takes.
        feature_layers: layers whose inputs are a second output.
        n_op_calls: calls of our op in the graph: one per layer.
        n_linears_kept: linear layers that the scheme could not take.
        n_delegates: parts of the graph that XNNPACK runs.
        delegated: operators inside of them, by name.
        kept: operators that the runtime's own kernels run, by name.
    """

    path: Path
    size_bytes: int
    method: str
    quantize: str
    dtype: str
    max_tokens_per_step: int
    feature_layers: tuple[int, ...]
    n_op_calls: int
    n_linears_kept: int
    n_delegates: int
    delegated: Mapping[str, int]
    kept: Mapping[str, int]

    @property
    def n_products_kept(self) -> int:
        """Products with weights that XNNPACK left to the runtime's own kernels: slow ones."""
        return sum(n for name, n in self.kept.items() if name.split(".")[1] in PRODUCTS)


class Flat(torch.nn.Module):
    """A model as the graph has it: token ids, positions and wanted rows in, logits out."""

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        """Around a model of transformers whose attention is on the op.

        Args:
            model: the model.
            feature_layers: layers whose inputs are a second output, side by side.
        """
        super().__init__()
        self.model = model
        self.feature_layers = tuple(feature_layers)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run ``[1, T], [1, T], [R] -> [1, R, vocab]``, and ``[1, T, n_features]`` where wanted.

        The LM head runs on the rows alone.
        """
        modules = modules_given(self.model, self.feature_layers)
        with inputs_of(modules) as seen, Positions(position_ids):
            logits = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows
            ).logits
        return (logits, torch.cat(seen, dim=-1)) if seen else (logits,)


def export_program(
    name_or_path: str | Path,
    to: str | Path,
    *,
    quantize: str = "none",
    dtype: str = "float32",
    max_tokens_per_step: int = 512,
    method: str = "forward",
    feature_layers: Sequence[int] | None = None,
    is_unchecked: bool = False,
    progress: ProgressFn | None = None,
) -> ExportReport:
    """Export a checkpoint as one file that runs with any cache.

    Args:
        name_or_path: as ``load_model`` takes it.
        to: the file to write; it is whole or not there.
        quantize: ``none``, ``8da4w`` or ``8da8w``.
        dtype: float32, float16 or bfloat16; quantised weights need float32.
        max_tokens_per_step: the most tokens of one forward; inputs and outputs are planned for it.
        method: what the method is called inside.
        feature_layers: layers whose inputs are a second output, for an EAGLE-3 head, as
            ``LoadedModel.bind`` takes them; none: those that heads read by default; None: no
            second output.
        is_unchecked: a model that is not exact is exported with a warning.
        progress: called with how much is done, 0 to 1, and the stage.

    Raises:
        ConfigError: settings that cannot work.
        ModelError: the checkpoint cannot be loaded, or the file not be written.
    """
    asked = _Settings(
        Path(to), quantize, dtype, max_tokens_per_step, method, tuple(feature_layers or ())
    )
    asked.check()
    report = progress or no_progress
    loaded = load_model(
        name_or_path,
        backend="torch",
        dtype=dtype,
        weights="none",
        is_unchecked=is_unchecked,
        progress=lambda part, what: report(0.15 * part, what),
    )
    assert isinstance(loaded, TorchModel)
    check_exports(loaded.facts, str(name_or_path))
    if feature_layers is not None:
        n_layers = loaded.n_layers
        asked = replace(asked, layers=asked.layers or default_feature_layers(n_layers))
        check_feature_layers(asked.layers, n_layers)
    with quietly(), telling(str(loaded.config.model_type)):
        lowered = _lower(loaded, asked, report)
    report(0.9, f"writing {asked.path.name}")
    _write(lowered.program, asked.path)
    report(1.0, "ready")
    return ExportReport(
        path=asked.path,
        size_bytes=asked.path.stat().st_size,
        method=method,
        quantize=quantize,
        dtype=dtype,
        max_tokens_per_step=max_tokens_per_step,
        feature_layers=asked.layers,
        n_op_calls=lowered.n_op_calls,
        n_linears_kept=lowered.n_linears_kept,
        n_delegates=lowered.n_delegates,
        delegated=lowered.delegated,
        kept=lowered.kept,
    )


def check_exports(facts: ModelFacts, name: str) -> None:
    """Refuse a model that sessions have to do more for than keep rows.

    Args:
        facts: of the model.
        name: as a person knows it.

    Raises:
        ModelError: it is one.
    """
    if facts.states:
        raise ModelError(
            f"{name} has {len(facts.states)} recurrent layers, whose states a program of "
            f"ExecuTorch would have inside, where no session can fork or keep them; run it with "
            f"the backend torch"
        )
    if not facts.rope.is_fixed:
        raise ModelError(
            f"{name} has RoPE of type {facts.rope.kind!r}, whose factors each session chooses, and "
            f"a program has its factors inside; run it with the backend torch"
        )


@dataclass(frozen=True, slots=True)
class _Settings:
    """Settings of an export; fields as ``export_program`` takes them."""

    path: Path
    quantize: str
    dtype: str
    max_tokens_per_step: int
    method: str
    layers: tuple[int, ...]

    def check(self) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: they cannot.
            ModelError: there is no folder to write to.
        """
        quantize, dtype, most = self.quantize, self.dtype, self.max_tokens_per_step
        check_scheme(quantize)
        if dtype not in DTYPES:
            raise ConfigError(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}")
        if quantize != "none" and dtype != "float32":
            raise ConfigError(
                f"{quantize} quantises activations that come in float32, got dtype {dtype!r}; "
                f"leave dtype out"
            )
        if most < 2:
            raise ConfigError(f"max_tokens_per_step must be at least 2, got {most}")
        if not self.method.isidentifier():
            raise ConfigError(
                f"method {self.method!r} is no name; use letters, digits and _, such as 'forward'"
            )
        if not self.path.parent.is_dir():
            raise ModelError(f"there is no folder {self.path.parent} to write {self.path.name} to")


@dataclass(frozen=True, slots=True)
class _Lowered:
    """A program that can be written, and counts as in ``ExportReport``."""

    program: Any
    n_op_calls: int
    n_linears_kept: int
    n_delegates: int
    delegated: Mapping[str, int]
    kept: Mapping[str, int]


def _lower(loaded: TorchModel, asked: _Settings, report: ProgressFn) -> _Lowered:
    """Fingerprint, rewrite, quantise, trace and lower a model; its modules are used up."""
    from kvcellar.backends.executorch.lowering import lower

    report(0.15, "fingerprinting the weights")
    scheme = "" if asked.quantize == "none" else f"+{asked.quantize}"
    fingerprint = loaded.fingerprint(dtype=asked.dtype + scheme)
    rewrite(loaded.network)
    n_linears_kept = 0
    if asked.quantize != "none":
        report(0.2, f"quantising to {asked.quantize}")
        _, n_linears_kept = quantise(loaded.network, asked.quantize)
    report(0.3, "tracing the graph")
    graph = trace(loaded.network, asked.max_tokens_per_step, asked.layers)
    report(0.4, "lowering to XNNPACK")
    edge = lower(graph, asked.method, _constants(loaded, fingerprint.value, asked))
    report(0.85, "planning memory")
    counts = _counts(edge.exported_program(asked.method).graph_module)  # planning rewrites it
    n_op_calls = sum(OP in str(node.target) for node in graph.graph.nodes)
    return _Lowered(edge.to_executorch(memory_plan()), n_op_calls, n_linears_kept, *counts)


def trace(
    model: Any, max_tokens_per_step: int, feature_layers: Sequence[int] = ()
) -> torch.export.ExportedProgram:
    """Trace a rewritten model: one call of the op per layer, no cache, mask or length."""
    n_tokens = torch.export.Dim("n_tokens", min=1, max=max_tokens_per_step)
    n_rows = torch.export.Dim("n_rows", min=1, max=max_tokens_per_step)
    n = min(4, max_tokens_per_step)
    example = (
        torch.arange(1, n + 1)[None],
        torch.arange(n)[None],
        torch.arange(min(3, max_tokens_per_step)),
    )
    with torch.no_grad(), pairs_for_complex():
        return torch.export.export(
            Flat(model, feature_layers),
            example,
            dynamic_shapes=({1: n_tokens}, {1: n_tokens}, {0: n_rows}),
            strict=False,
        )


def _constants(loaded: TorchModel, fingerprint: str, asked: _Settings) -> dict[str, Any]:
    """Return what a program says of itself: facts for a cache, and the files of its model."""
    params = loaded.params
    facts: dict[str, Any] = {}
    write_kv_cache_metadata(
        facts,
        n_layers=params.n_layers,
        groups=params.groups,
        shared=params.shared,
        vocab_size=loaded.vocab_size,
    )
    packed = torch.frombuffer(bytearray(pack_files(_carried(loaded))), dtype=torch.uint8)
    own = {
        "name": Path(loaded.name).name,
        "max_tokens_per_step": asked.max_tokens_per_step,
        "max_positions": loaded.max_positions,
        "eos_token_ids": sorted(loaded.eos_token_ids),
        "dtype": asked.dtype,
        "quantize": asked.quantize,
        "fingerprint": fingerprint,
        "executorch": executorch_version(),
        "files": packed,
    }
    if asked.layers:
        own["feature_layers"] = list(asked.layers)
    if not own["eos_token_ids"]:
        del own["eos_token_ids"]
    return facts | {OWN_PREFIX + key: value for key, value in own.items()}


def _carried(loaded: TorchModel) -> dict[str, bytes]:
    """Return the files that travel inside a program: a checkpoint's, or those that a GGUF file is.

    Whoever loads the program reads them as a checkpoint's.
    """
    folder, made = loaded.path, None
    if folder.is_file():
        made = tempfile.TemporaryDirectory(prefix="kvcellar-")
        folder = Path(made.name)
        loaded.config.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps(dict(loaded.sampling)), "utf-8")
    with made or contextlib.nullcontext():
        files = {name: folder / name for name in CARRIED}
        return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def memory_plan() -> Any:
    """Return ExecuTorch's settings by which a lowered graph becomes a program."""
    from executorch.exir import ExecutorchBackendConfig

    return ExecutorchBackendConfig()


def _counts(module: torch.fx.GraphModule) -> tuple[int, dict[str, int], dict[str, int]]:
    """Count delegates, operators inside of them, and operators outside, by name."""
    delegated: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    n_delegates = 0
    inside = {
        str(node.target): getattr(module, str(node.target))
        for node in module.graph.nodes
        if node.op == "get_attr" and node.name.startswith("lowered_module")
    }
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        name = getattr(node.target, "__name__", str(node.target))
        if name == "executorch_call_delegate":
            n_delegates += 1
            part = inside[str(node.args[0].target)].original_module.graph_module
            delegated.update(_operators(part.graph))
        elif "." in name:
            kept[name] += 1
    return n_delegates, dict(delegated.most_common()), dict(kept.most_common())


def _operators(graph: torch.fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and "." in name:
            yield name


def _write(program: Any, target: Path) -> None:
    try:
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with staged.open("w+b") as file:
                program.write_to_file(file)
                seal(file, file.tell())
            staged.replace(target)
        finally:
            staged.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{target} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def telling(family: str) -> Iterator[None]:
    """Say of whatever the exporter raises which model it was about, and what to do.

    Raises:
        ModelError: in place of what is none of ours.
    """
    try:
        yield
    except KVCellarError:
        raise
    except Exception as error:  # torch.export and ExecuTorch raise classes of many kinds
        what = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"the graph of {family!r} cannot be exported: {type(error).__name__}: {what.strip()}; "
            f"run the checkpoint with the backend torch"
        ) from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep back what the exporter warns of its own deprecations and logs that nobody asked for."""
    loggers = [
        logging.getLogger(name) for name in ("", "torchao", "torch", "torch.__trace", "executorch")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
