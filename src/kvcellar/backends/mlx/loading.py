"""Checkpoints through mlx-lm: folders of Hugging Face, mlx-community's quantised ones, and GGUF."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
from mlx_lm.models.rope_utils import YarnRoPE

from kvcellar.backends.mlx.cache.codecs import FLOAT_DTYPES
from kvcellar.backends.mlx.checking import check_network, versions
from kvcellar.backends.mlx.gguf import pick_dtype, read_network
from kvcellar.backends.mlx.learn.learning import Learnt, learn
from kvcellar.backends.mlx.runner import MlxRunner
from kvcellar.backends.mlx.words import empty_model, text_config, windows_of
from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.models.check import CheckVerdict, demand_exact, keep_verdict, verdict_of
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.checkpoint import check_tokenizer_files, check_weights, read_config
from kvcellar.models.files.configs import positions_of
from kvcellar.models.files.formats import without_format
from kvcellar.models.files.generation import sampling_defaults
from kvcellar.models.files.hub import DEMO_FOLDER, find_checkpoint, is_local
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.known import facts_of, renew_facts
from kvcellar.models.model import LoadedModel
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn, no_progress
from kvcellar.models.picture_facts import text_alone
from kvcellar.models.plays import LENGTH
from kvcellar.models.runner import Runner
from kvcellar.models.sizes.sizing import size_checkpoint
from kvcellar.models.text.tokenizer import (
    check_vocabulary,
    find_eos_token_ids,
    load_tokenizer,
    quiet,
)
from kvcellar.models.weights import PLAIN
from kvcellar.registry import CacheSession
from kvcellar.spec import ModelCacheSpec

_BY = f"mlx-lm {mlx_lm.__version__}"
"""Whose rules a model's facts are learnt by."""

_MOST_SAID = 300
"""Letters of mlx-lm's reason; it may name every tensor of a model."""

_FEW = 8
"""Tokens by which it is seen whether a type has room for a model's numbers."""

_PARTS = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Where transformers keeps the parts of a multimodal model -> where mlx-lm looks for them."""

_NORMS = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
}
"""Names of norms in the files of some models -> their names in models, of mlx-lm too."""


@dataclass(frozen=True, slots=True, eq=False)
class MlxModel(LoadedModel):
    """A model of mlx-lm in memory; attributes as in :class:`LoadedModel`.

    Attributes:
        network: the module of mlx-lm, bound.
        learnt: what was learnt of it.
        device: where it runs; None: MLX's default, the GPU of a Mac.
    """

    network: Any = field(repr=False)
    learnt: Learnt = field(repr=False)
    device: mx.Device | None

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner of MLX, which keeps inside of the session's budget."""
        budget = session.cache.config.budget
        if budget is not None:
            limit_memory(budget.limit_bytes, budget.reserve_bytes)
        return MlxRunner(self.network, self.learnt, session, self.device, feature_layers)

    def touch_weights(self) -> int:
        """Return the bytes of the weights: loading has read them all."""
        return sum(array.nbytes for array in _arrays(self.network))


def limit_memory(limit_bytes: int, spare_bytes: int) -> None:
    """Keep MLX, in the whole process, inside of a memory budget.

    Args:
        limit_bytes: what its arrays may take.
        spare_bytes: freed memory that it may keep for later.
    """
    mx.set_memory_limit(limit_bytes)
    mx.set_cache_limit(spare_bytes)


def load_model(options: LoadOptions, report: ProgressFn) -> MlxModel:
    """Load a model and its tokenizer for MLX; see :func:`kvcellar.models.load_model`.

    A folder may be quantised for MLX; its weights are then loaded as they are.

    Args:
        options: ``dtype`` is that of the weights that are floats; None or ``auto``: as they are
            stored, float32 for the bundled model, and for a GGUF file what loses least.
            ``device`` is ``cpu`` or ``gpu``; None: MLX's default.
        report: called while loading.

    Raises:
        ModelError, ConfigError: as there.
    """
    _check_weights_option(options.weights)
    wanted, where = _pick_dtype(options), _pick_device(options.device)
    with quiet(lambda part: None):
        folder = find_checkpoint(options.model, lambda part, what: report(0.9 * part, what))
        report(0.9, "reading the config")
        raw = read_config(folder)
        _check_files(folder)
        config = text_config(raw)
        tokenizer = load_tokenizer(folder)
        report(0.92, "loading weights")
        model, said = _read(folder, raw, config, wanted)
        learnt = _learn(model, config)
        mx.eval(_arrays(model))  # what stayed lazy would belong to this thread
        if folder != DEMO_FOLDER:  # its tests are ours
            report(0.97, "checking")
            _prove(raw, model, learnt, options)
    check_vocabulary(tokenizer, learnt.vocab_size, folder)
    report(1.0, f"ready: {said}" if said else "ready")
    return MlxModel(
        name=options.name,
        path=folder,
        backend=options.backend or "mlx",
        params=learnt.params,
        config=config,
        tokenizer=tokenizer,
        vocab_size=learnt.vocab_size,
        eos_token_ids=find_eos_token_ids(folder, raw, tokenizer),
        max_positions=positions_of(config),
        dtype=next(name for name, known in FLOAT_DTYPES.items() if known == learnt.dtype),
        weights=None,
        sampling=sampling_defaults(folder),
        chat_template=None,
        no_pictures=text_alone(folder, raw, "mlx"),
        network=model,
        learnt=learnt,
        device=where,
    )


def _learn(model: Any, config: Any) -> Learnt:
    """Learn what a model needs; windows that it does not know are added where nothing else is.

    A config whose layers with a window have a RoPE of their own needs a model that knows which.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    is_plain = not any(isinstance(part, Mapping) for part in rope.values())
    name, windows = str(config.model_type), windows_of(config)
    return learn(model, name, windows, adds_windows=is_plain)


def _prove(raw: Mapping[str, Any], model: Any, learnt: Learnt, options: LoadOptions) -> None:
    """Make sure that a model is exact behind our caches; that is found out once, and kept.

    Where mlx-lm's own code sees more than it should in so short a text, there is nothing to hold
    the model to.

    Raises:
        ModelError: it is not.
    """
    if learnt.added_window is not None and learnt.added_window <= LENGTH:
        return
    family, device = str(raw.get("model_type")), _pick_device(options.device)
    verdict = verdict_of(
        raw,
        versions(str(learnt.dtype)),
        lambda: check_network(model, learnt, family, device),
        is_unchecked=options.is_unchecked,
    )
    demand_exact(verdict, options.name, is_unchecked=options.is_unchecked)


def prove_model(model: str | Path, report: ProgressFn) -> tuple[CheckVerdict, bool]:
    """Check a checkpoint and learn its facts anew, whatever is kept of it, and keep what was found.

    Args:
        model: as ``LoadOptions`` has it.
        report: called while it is checked.

    Returns:
        The verdict, and true if the facts that had been kept were not the model's.

    Raises:
        ModelError: there is no such checkpoint, or mlx-lm cannot load it.
    """
    with quiet(lambda part: None):
        folder = find_checkpoint(model, report)
        raw = read_config(folder)
        _check_files(folder)
        config = text_config(raw)
        network, _ = _read(folder, raw, config, None)
        learnt = _learn(network, config)
        if learnt.added_window is not None and learnt.added_window <= LENGTH:
            raise ModelError(
                f"{model} cannot be checked: mlx-lm's own code has no window of "
                f"{learnt.added_window} tokens, which its config asks for and kvcellar adds, so "
                f"there is nothing to hold it to"
            )
        report(0.5, f"checking {model}")
        verdict = check_network(network, learnt, str(raw.get("model_type")))
        is_replaced = renew_facts(without_format(raw), _facts_of_config, _BY)
    keep_verdict(raw, versions(str(learnt.dtype)), verdict)
    return verdict, is_replaced


def _read(folder: Path, raw: Mapping[str, Any], config: Any, dtype: str | None) -> tuple[Any, str]:
    """Make a model of mlx-lm with its weights; return it, and what is to be said of them.

    Raises:
        ModelError: as ``load_weights``, and ``read_network`` of a GGUF file.
    """
    if folder.is_file():
        file = read_gguf(folder)
        model, said = read_network(file, raw, config, dtype or pick_dtype(file))
        if dtype is None and not _is_in_range(model):
            model, said = read_network(file, raw, config, "float32")
    else:
        model, said = load_weights(folder, raw, config), ""
        if dtype is not None:
            model.set_dtype(FLOAT_DTYPES[dtype])
    _untruncate(model, config)
    return model, said


def _is_in_range(model: Any) -> bool:
    """Return true if a model's logits of a few tokens are finite: float16 ends at 65,504."""
    return bool(mx.isfinite(model(mx.arange(_FEW)[None])).all().item())


def load_weights(folder: Path, raw: Mapping[str, Any], config: Any) -> Any:
    """Make a model of mlx-lm, in evaluation mode, its weights not yet read.

    Args:
        folder: the checkpoint.
        raw: its ``config.json``.
        config: the config object of its text part.

    Raises:
        ModelError: mlx-lm makes no model of the config; or weights that are missing or not this
            architecture's, or a quantisation that mlx-lm does not know.
    """
    _, words = empty_model(raw, config)
    failed: Exception | None = None
    for classes in (mlx_lm.utils._get_classes, _renaming_classes):
        try:
            model, _ = mlx_lm.utils.load_model(
                folder, lazy=True, model_config=words, get_model_classes=classes
            )
            return model
        except Exception as error:  # its models raise whatever their arguments lead to
            failed = failed or error
    said = " ".join(str(failed).split())
    said = said if len(said) <= _MOST_SAID else f"{said[:_MOST_SAID]} ..."
    raise ModelError(
        f"{folder} cannot be loaded by mlx-lm: {said}; run it with the backend torch, or take a "
        f"copy that was converted by mlx_lm.convert"
    ) from failed


def _renaming_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a model whose ``sanitize`` gets other names than are stored."""
    model_class, arguments_class = mlx_lm.utils._get_classes(config)

    class Model(model_class):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            """Give mlx-lm's own method the names that it looks for."""
            own: Any = getattr(super(), "sanitize", dict)
            return dict(own(_renamed(weights)))

    return Model, arguments_class


def _renamed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Rename weights of multimodal models, of gpt-oss with float experts, and norms for mlx-lm."""
    found: dict[str, mx.array] = {}
    for name, value in weights.items():
        for theirs, ours in _PARTS.items():
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        for theirs, ours in _NORMS.items():
            name = name.replace(theirs, ours)
        stem, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # [experts, in, 2 * out], gate and up in turns
            found[f"{stem}.gate_proj.weight"] = value[..., 0::2].swapaxes(-1, -2)
            found[f"{stem}.up_proj.weight"] = value[..., 1::2].swapaxes(-1, -2)
        elif last == "down_proj" and stem.endswith("experts"):
            found[f"{name}.weight"] = value.swapaxes(-1, -2)
        elif last == "gate_up_proj_bias" and f"{stem}.gate_up_proj" in weights:
            found[f"{stem}.gate_proj.bias"] = value[..., 0::2]
            found[f"{stem}.up_proj.bias"] = value[..., 1::2]
        elif last == "down_proj_bias" and f"{stem}.gate_up_proj" in weights:
            found[f"{stem}.down_proj.bias"] = value
        else:
            found[name] = value
    return found


def _untruncate(model: Any, config: Any) -> None:
    """Let YaRN blend its frequencies between the bounds that the config asks for.

    A config may say ``truncate: false`` (gpt-oss does); mlx-lm rounds the bounds in any case. Its K
    would not be those of the model, nor of a snapshot that another backend wrote.
    """
    rope = config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") != "yarn" or rope.get("truncate", True):
        return
    base, original = float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])
    for yarn in [module for module in model.modules() if isinstance(module, YarnRoPE)]:
        dims = yarn.dims
        low, high = (
            dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))
        )
        low, high = max(low, 0.0), min(high, dims - 1.0)
        half = mx.arange(0, dims, 2, dtype=mx.float32)
        ramp = mx.clip((half / 2 - low) / max(high - low, 0.001), 0, 1)
        alone = base ** (half / dims)
        scaled = float(rope["factor"]) * alone
        yarn._freqs = scaled * alone / (scaled * (1 - ramp) + alone * ramp)


def _arrays(model: Any) -> list[mx.array]:
    """Return every array of a model, those that are no parameters too."""
    return [
        value
        for module in model.modules()
        for value in module.values()
        if isinstance(value, mx.array)
    ]


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model; see :func:`kvcellar.models.check_model`."""
    _check_weights_option(options.weights)
    _pick_dtype(options)
    _pick_device(options.device)
    if is_local(options.model):
        folder = find_checkpoint(options.model, no_progress)
        model_facts(without_format(read_config(folder))).params  # noqa: B018 (what cannot be served)
        _check_files(folder)


def size_model(options: LoadOptions) -> ModelCacheSpec:
    """Work out what a model costs; see :func:`kvcellar.models.sizes.sizing.size_model`."""
    return size_checkpoint(options, model_facts)


def model_facts(raw: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of a model; see :meth:`kvcellar.models.loading.ModelLoader.model_facts`.

    They are mlx-lm's own model's, built of its config: nothing of its weights is ever computed.
    """
    return facts_of(raw, _facts_of_config, _BY)


def _facts_of_config(raw: Mapping[str, Any]) -> ModelFacts:
    config = text_config(raw)
    return _facts(_learn(empty_model(raw, config)[0], config), config)


def _facts(learnt: Learnt, config: Any) -> ModelFacts:
    n_active = int(getattr(config, "num_experts_per_tok", None) or 1)
    inner = int(getattr(config, "intermediate_size", None) or 4 * learnt.hidden_size)
    return learnt.facts(str(config.model_type), positions_of(config), inner * n_active)


def device_memory(device: Any) -> None:
    """Return None: a Mac's GPU has no memory of its own."""
    return None


def _check_weights_option(weights: str | None) -> None:
    """Refuse a format of weights that is not made here."""
    if weights not in (None, PLAIN):
        raise ConfigError(
            f"weights {weights!r} are not made by the backend mlx; quantise the checkpoint with "
            f"mlx_lm.convert, and give its folder"
        )


def _check_files(folder: Path) -> None:
    """Make sure that the files of a checkpoint are there and whole."""
    check_weights(folder)
    check_tokenizer_files(folder)


def _pick_dtype(options: LoadOptions) -> str | None:
    """Return the type that floats are converted to; None: they stay."""
    dtype = options.dtype
    if dtype in (None, "auto"):
        return "float32" if options.model == DEMO else None
    name = str(dtype).removeprefix("mlx.core.")
    if name not in FLOAT_DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; choose one of {', '.join(FLOAT_DTYPES)}")
    return name


def _pick_device(device: Any) -> mx.Device | None:
    """Return a device of MLX; None: its default."""
    if device is None:
        return None
    if device not in ("cpu", "gpu"):
        raise ConfigError(f"device {device!r} is not one of MLX's; choose 'cpu' or 'gpu'")
    if device == "gpu" and not mx.metal.is_available():
        raise BackendError("MLX finds no GPU here; leave the device out, or say cpu")
    return mx.Device(mx.gpu if device == "gpu" else mx.cpu)
