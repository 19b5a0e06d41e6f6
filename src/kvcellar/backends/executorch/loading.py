"""Models of this backend: a program and what its file carries; checkpoints are exported first."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvcellar import models
from kvcellar.backends.executorch.archive import unpack_files
from kvcellar.backends.executorch.building import executorch_version
from kvcellar.backends.executorch.program import OWN_PREFIX, Program
from kvcellar.backends.torch.loading import model_facts as torch_model_facts
from kvcellar.errors import ConfigError, MetadataError, ModelError, StepError
from kvcellar.home import default_home, locked
from kvcellar.metadata import PREFIX
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.configs import config_from_dict
from kvcellar.models.files.generation import sampling_defaults
from kvcellar.models.files.hub import find_checkpoint
from kvcellar.models.files.places import is_gguf
from kvcellar.models.fingerprint import (
    Fingerprint,
    Progress,
    fingerprint_checkpoint,
    fingerprint_of,
)
from kvcellar.models.model import LoadedModel
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn
from kvcellar.models.runner import BoundRunner, FloatArray, Runner
from kvcellar.models.sizes.sizing import size_checkpoint
from kvcellar.models.weights import own_kv_dtype
from kvcellar.registry import CacheSession
from kvcellar.spec import ModelCacheSpec
from kvcellar.types import IntArray
from kvcellar.version import __version__

_SIZED_AS = {"8da4w": "int4", "8da8w": "int8"}
"""Scheme of the weights -> a format that takes about as much."""


@dataclass(frozen=True, slots=True, eq=False)
class ExecutorchModel(LoadedModel):
    """A program in memory. Its weights are loaded once, whatever the number of sessions.

    Attributes:
        program: the open file.
        method: which of its methods is the model.
        max_tokens_per_step: the most tokens that one forward takes.
        feature_layers: layers whose inputs it tells beside the logits.
    """

    program: Program = field(repr=False)
    method: str
    max_tokens_per_step: int
    feature_layers: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def fingerprint(
        self,
        *,
        cache_file: str | Path | None = None,
        on_progress: Progress | None = None,
        dtype: str | None = None,
        rope_length: int = 0,
    ) -> Fingerprint:
        """Return that of the checkpoint that was exported, with the type of the weights."""
        parts = json.loads(self.program.metadata[OWN_PREFIX + "fingerprint"])
        if self.chat_template is not None:
            parts |= fingerprint_of(chat_template=self.chat_template).parts
        return Fingerprint(parts)

    def touch_weights(self) -> int:
        """Return the bytes of the weights: XNNPACK copied them when the method was loaded."""
        return self.size_bytes

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner of the program.

        Raises:
            ConfigError: the program does not tell these features.
        """
        if feature_layers and tuple(feature_layers) != self.feature_layers:
            told = f"those of {list(self.feature_layers)}" if self.feature_layers else "none"
            raise ConfigError(
                f"features of the layers {list(feature_layers)} are asked for, and {self.path} "
                f"tells {told}; export it again with --features "
                f"{','.join(map(str, feature_layers))}"
            )
        return ExecutorchRunner(self, session)


class ExecutorchRunner(BoundRunner):
    """One program bound to one session; a :class:`~kvcellar.models.runner.Runner`."""

    def __init__(self, model: ExecutorchModel, session: CacheSession[Any]) -> None:
        """Bind a program, whose method is loaded."""
        n_features = len(model.feature_layers) * int(model.config.hidden_size)
        super().__init__(
            session, model.params, model.vocab_size, n_features, model.max_tokens_per_step
        )
        self.method = model.program.load_method(model.method, cache=session.cache)

    def _run(
        self, cache: Any, ids: IntArray, at: IntArray, rows: IntArray | None, *, has_features: bool
    ) -> tuple[FloatArray, FloatArray]:
        n_tokens = ids.size
        if self.max_tokens_per_step is not None and n_tokens > self.max_tokens_per_step:
            raise StepError(
                f"the program takes at most {self.max_tokens_per_step} tokens per step, got "
                f"{n_tokens}; feed them in pieces, or export it with a larger "
                f"--max-tokens-per-step"
            )
        wanted = np.array([n_tokens - 1]) if rows is None else rows
        keep = wanted if wanted.size else np.zeros(1, np.int64)  # a graph has no empty axes
        logits, *others = self.method(
            torch.from_numpy(ids[None]),
            torch.from_numpy(at[None]),
            torch.from_numpy(keep),
            n_tokens=n_tokens,
            positions=at.tolist(),
        )
        out: FloatArray = logits[0, : wanted.size].float().numpy()
        return out, others[0][0].float().numpy() if has_features else out


def load_model(options: LoadOptions, report: ProgressFn) -> ExecutorchModel:
    """Load a program and the tokenizer inside; see :func:`kvcellar.models.load_model`.

    Args:
        options: the model is a .pte file. Anything else that can be loaded is exported first, in
            float32 if nothing is said, and the program kept in the user's own folder for the next
            time. ``dtype`` and ``weights`` are what it must have been exported in.
        report: called while exporting and loading.

    Raises:
        ModelError: the file is damaged, or of no model.
        MetadataError: it has no cache metadata, or of an unknown schema.
        ConfigError: another device or type.
        BackendError: the native part is missing.
    """
    _check_device(options.device)
    path = _program_of(options)
    if path is None:
        path = _exported(options, lambda part, what: report(0.95 * part, what))
    report(0.95, "reading the program")
    program = Program(path)
    params = program.params
    facts = _facts(program)
    report(0.96, "reading the tokenizer")
    config, tokenizer, sampling = _carried(program)
    report(0.98, "loading weights")
    _check_asked(path, facts, options)
    method = program.method_names[0]
    program.load_method(method)
    report(1.0, "ready")
    return ExecutorchModel(
        name=options.name,
        path=path,
        backend=options.backend or "executorch",
        params=params,
        config=config,
        tokenizer=tokenizer,
        vocab_size=int(facts["vocab_size"]),
        eos_token_ids=frozenset(facts.get("eos_token_ids", ())),
        max_positions=int(facts["max_positions"]),
        dtype=str(facts["dtype"]),
        weights=None if facts["quantize"] == "none" else str(facts["quantize"]),
        sampling=sampling,
        chat_template=None,
        program=program,
        method=method,
        max_tokens_per_step=int(facts["max_tokens_per_step"]),
        feature_layers=tuple(int(layer) for layer in facts.get("feature_layers", ())),
    )


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a program or with what would be exported.

    See :func:`kvcellar.models.check_model`.
    """
    from kvcellar.backends.executorch.quantising import check_scheme

    _check_device(options.device)
    path = _program_of(options)
    if path is None:
        check_scheme(options.weights or "none")
        models.check_model(LoadOptions(options.model, dtype=_exported_dtype(options)))
        return
    program = Program(path)
    try:
        _check_asked(path, _facts(program), options)
        _carried(program)
    finally:
        program.close()


def device_memory(device: Any) -> None:
    """Return None: programs run in main memory."""
    return None


def _program_of(options: LoadOptions) -> Path | None:
    """Return the .pte file that is asked for; None where a checkpoint is, which is exported."""
    path = Path(options.model).expanduser()
    is_program = path.suffix == ".pte" or (path.is_file() and not is_gguf(path))
    return path if is_program else None


def _exported_dtype(options: LoadOptions) -> str:
    """Return the type that a checkpoint is exported in: float32 if nothing is said."""
    asked = options.dtype
    return "float32" if asked in (None, "auto") else str(asked).removeprefix("torch.")


def _check_device(device: Any) -> None:
    """Refuse a device other than the CPU."""
    if device is not None and str(device).partition(":")[0] != "cpu":
        raise ConfigError(f"programs run on the CPU, got device {device!r}; leave it out")


def _check_asked(path: Path, facts: Mapping[str, Any], options: LoadOptions) -> None:
    """Refuse a program that was exported otherwise than is asked for."""
    dtype, weights = options.dtype, options.weights
    found = str(facts["dtype"]) + ("" if facts["quantize"] == "none" else f"+{facts['quantize']}")
    asked = None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")
    if asked not in (None, facts["dtype"]):
        raise ConfigError(
            f"{path} was exported in {found} and dtype {asked!r} is asked for; leave it out, or "
            f"export again with --dtype {asked}"
        )
    if weights not in (None, facts["quantize"]):
        raise ConfigError(
            f"{path} was exported in {found} and weights {weights!r} are asked for; leave them "
            f"out, or export again with --quantize {weights}"
        )


def size_model(options: LoadOptions) -> ModelCacheSpec:
    """Work out what a model costs; see :func:`kvcellar.models.sizes.sizing.size_model`.

    A checkpoint is counted in the type that it is exported in.
    """
    if Path(options.model).suffix == ".pte":
        return size_program(Path(options.model).expanduser())
    weights = _SIZED_AS.get(options.weights or "", options.weights)
    dtype = "float32" if options.dtype in (None, "auto") else options.dtype
    return size_checkpoint(replace(options, dtype=dtype, weights=weights), model_facts)


def model_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model; see :meth:`kvcellar.models.loading.ModelLoader.model_facts`."""
    return torch_model_facts(raw)


def size_program(path: Path) -> ModelCacheSpec:
    """Work out what a program costs; its weights are not read.

    XNNPACK packs them when a method is loaded, in about as many bytes as the file has, and lets go
    of the file then.

    Raises:
        ModelError, MetadataError, BackendError: as ``load_model``.
    """
    program = Program(path)
    try:
        facts, (config, *_) = _facts(program), _carried(program)
        params = program.params
    finally:
        program.close()
    size_bytes = path.stat().st_size
    return ModelCacheSpec(
        name=str(path),
        family=str(config.model_type),
        params=replace(params, kv_dtype=own_kv_dtype(str(facts["dtype"]))),
        max_positions=int(facts["max_positions"]),
        stored_bytes=size_bytes,
        weight_bytes=size_bytes,
        dtype=str(facts["dtype"]),
        counted="a program, the size of its file",
        n_heads=int(config.num_attention_heads),
        hidden_size=int(config.hidden_size),
        inner_size=int(config.intermediate_size)
        * max(1, int(getattr(config, "num_local_experts", 1))),
        vocab_size=int(facts["vocab_size"]),
    )


def _facts(program: Program) -> Mapping[str, Any]:
    """Return what kvcellar's exporter wrote beside the cache's facts.

    Raises:
        MetadataError: it wrote none.
    """
    own = {
        key.removeprefix(OWN_PREFIX): value
        for key, value in program.metadata.items()
        if key.startswith(OWN_PREFIX)
    }
    own["vocab_size"] = program.metadata.get(PREFIX + "vocab_size")
    needed = ("max_tokens_per_step", "max_positions", "dtype", "quantize", "files", "fingerprint")
    missing = [name for name in (*needed, "vocab_size") if own.get(name) is None]
    if missing or len(program.method_names) != 1:
        raise MetadataError(
            f"{program.path} is no model that 'kvcellar export' wrote: it lacks "
            f"{', '.join(missing) or 'a single method'}; export it with kvcellar, or run its "
            f"methods yourself through Program.load_method"
        )
    return own


def _carried(program: Program) -> tuple[Any, Any, Mapping[str, float]]:
    """Read the config and the tokenizer inside, and how the model wants to be sampled."""
    from kvcellar.models.text.tokenizer import load_tokenizer, quiet

    with tempfile.TemporaryDirectory(prefix="kvcellar-") as temporary:
        folder = Path(temporary)
        unpack_files(program.metadata[OWN_PREFIX + "files"].numpy().tobytes(), folder)
        try:
            raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{program.path} carries no config that can be read") from error
        with quiet(lambda part: None):
            return config_from_dict(raw), load_tokenizer(folder), sampling_defaults(folder)


def _exported(options: LoadOptions, report: ProgressFn) -> Path:
    """Return the program of a checkpoint, exported now or at an earlier time.

    Whose program it is says its name: the checkpoint's fingerprint, the versions and the options.
    One process exports it while others that want it wait; what one left half written, when it was
    killed, the next removes.
    """
    from kvcellar.backends.executorch.exporting import export_program

    folder = find_checkpoint(options.model, lambda part, what: report(0.1 * part, what))
    wanted, weights = _exported_dtype(options), options.weights or "none"
    fingerprint = fingerprint_checkpoint(
        folder,
        cache_file=default_home() / "fingerprints.json",
        on_progress=lambda part, what: report(0.1 + 0.04 * part, what),
    )
    digest = hashlib.blake2b(digest_size=8)
    parts = [__version__, executorch_version(), wanted, weights, fingerprint.value]
    if options.is_unchecked:  # kept apart: nobody else is given it
        parts.append("unchecked")
    for part in parts:
        digest.update(part.encode() + b"\0")
    name = DEMO if options.model == DEMO else folder.name
    path = default_home() / "executorch" / "programs" / f"{name}-{digest.hexdigest()}.pte"
    if path.is_file():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    report(0.15, "exporting, once for this model and these options")
    with locked(path.with_suffix(".lock")):
        if not path.is_file():
            for half in path.parent.glob(f".{path.name}.*"):
                half.unlink(missing_ok=True)
            export_program(
                options.model,
                path,
                quantize=weights,
                dtype=wanted,
                is_unchecked=options.is_unchecked,
                progress=lambda part, what: report(0.15 + 0.85 * part, f"exporting: {what}"),
            )
    return path
