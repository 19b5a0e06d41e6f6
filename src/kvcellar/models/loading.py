"""From a name to a model: find the checkpoint, check it, load its weights once.

A loaded model holds no session state. Any number of sessions can be bound to it at a time.
"""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcellar.errors import BackendError, ConfigError, ModelError
from kvcellar.models.checkpoint import (
    check_tokenizer_files,
    check_weights,
    read_config,
    read_json,
)
from kvcellar.models.fingerprint import Fingerprint, Progress, fingerprint_checkpoint
from kvcellar.models.generation import sampling_defaults
from kvcellar.models.kv_quality import (
    KvQualityWarning,
    WeightsQualityWarning,
    harm_of,
    known_quality,
)
from kvcellar.models.options import DEMO, LoadOptions, ProgressFn
from kvcellar.models.prompts import encode, render
from kvcellar.models.runner import Runner
from kvcellar.models.weights import PACKINGS, WEIGHTS, choose_weights, parse_weights
from kvcellar.registry import CacheSession, load_backend
from kvcellar.spec import config_from_dict, params_from_config, positions_from_config
from kvcellar.types import ModelCacheParams

DEMO_FOLDER = Path(__file__).parent / "demo"


_DOWNLOAD = 0.9
"""How much of all the work it is to download a model, where that is needed."""

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""model_type -> the class of transformers that runs it with its attention on the op."""

MULTIMODAL = {"gemma3": "Gemma3ForConditionalGeneration"}
"""model_type of a checkpoint whose text part is loaded alone -> what its config calls itself."""

CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""What is downloaded of a checkpoint."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory, with its tokenizer. Shared by sessions and threads; never changes.

    Attributes:
        name: what ``load_model`` was asked for.
        path: the folder it came from.
        backend: id of the backend that runs it.
        params: what a cache for it must know.
        config: the config object of transformers, of the text part.
        tokenizer: the tokenizer of transformers.
        vocab_size: rows of the embedding: ids from 0 to ``vocab_size - 1`` exist.
        eos_token_ids: tokens that end a text or a turn.
        max_positions: the longest sequence that the model was made for.
        dtype: type that the model computes in, and of weights that are held in no other way.
        weights: how linear layers hold theirs: a name of ``WEIGHTS``, or a scheme of ExecuTorch's;
            None: in ``dtype``.
        sampling: settings of sampling that the checkpoint names (``generation_config.json``), for
            ``SamplingParams.for_model``.
        chat_template: what was given in place of the checkpoint's own; None: nothing.
    """

    name: str
    path: Path
    backend: str
    params: ModelCacheParams
    config: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_positions: int
    dtype: str
    weights: str | None
    sampling: Mapping[str, float]
    chat_template: str | None
    _model: Any = field(repr=False)

    def bind(self, session: CacheSession[Any], *, feature_layers: Sequence[int] = ()) -> Runner:
        """Join the model with a session that is open, as often as you like.

        Args:
            session: of a cache that was made with the model's ``params``.
            feature_layers: layers whose inputs are wanted beside the logits, ascending; the number
                of layers is the output of the last one. The runner is then a ``FeatureRunner``.

        Raises:
            SessionClosedError: the session is not open.
            BackendError: it is a session of another backend.
            ConfigError: its cache was made for another model, or it has no such layers.

        Warns:
            KvQualityWarning: the cache's storage type was measured with this model and is bad.
        """
        params = session.cache.config.params
        if session.backend != self.backend:
            raise BackendError(
                f"session {session.cache_key} is of backend {session.backend!r} and "
                f"{self.name!r} was loaded for {self.backend!r}; make the session with "
                f"{self.backend!r}"
            )
        if params != self.params:
            raise ConfigError(
                f"the cache of session {session.cache_key} was made for {_shape(params)}; "
                f"{self.name!r} has {_shape(self.params)}; make the session with the model's params"
            )
        check_feature_layers(feature_layers, self.params.n_layers)
        known = None
        if self.path.is_dir():  # figures are known by a checkpoint's files
            known = known_quality(self.path, session.cache.config.kv_dtype)
        if known is not None and known.verdict == "bad":
            warnings.warn(
                f"kv_dtype {known.kv_dtype} is known to be bad for {self.name!r}: perplexity "
                f"{known.ppl_ratio:.3f} times that of float32, the same likeliest token after "
                f"{known.same_top1:.1%} of {known.n_tokens} tokens; kvcellar bench kv-quality "
                f"{self.name} recommends another",
                KvQualityWarning,
                stacklevel=2,
            )
        return self._make_runner(session, feature_layers)

    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """A runner of this backend; session and model were found to fit."""
        runner = importlib.import_module("kvcellar.backends.torch.runner")
        made: Runner = runner.TorchRunner(
            self._model, self.params, self.vocab_size, session, feature_layers
        )
        return made

    @property
    def size_bytes(self) -> int:
        """Of the weights as they are stored, or as the kernel holds them."""
        if self.weights in WEIGHTS:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
        return sum(path.stat().st_size for path in self.path.glob("*.safetensors"))

    def fingerprint(
        self,
        *,
        cache_file: str | Path | None = None,
        on_progress: Progress | None = None,
        dtype: str | None = None,
    ) -> Fingerprint:
        """Whose KV it computes: equal where the same tokens give the same K and V.

        Args:
            cache_file: where hashes of large files are remembered; None: nowhere.
            on_progress: takes how much of the weights is read, 0 to 1, and what comes now.
            dtype: the type that the weights are used in, where it is not that in memory.

        Raises:
            StoreError: a file cannot be read.
        """
        packing = PACKINGS.get(self.weights or "")
        kept = self.dtype if packing is None else f"{self.dtype}+{packing}"
        replaced = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return fingerprint_checkpoint(
            self.path,
            cache_file=cache_file,
            on_progress=on_progress,
            dtype=dtype or kept,
            **replaced,
        )

    def touch_weights(self) -> int:
        """Have every weight in memory now, not when a forward first needs it; return their bytes.

        Weights may be mapped from their files. Whoever measures a process wants them to count.
        """
        return int(_torch_loading().touch_weights(self._model))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The tokens of a chat, by the model's own template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each, oldest first.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            ModelError: the model has no chat template, or its template refuses these messages.
        """
        rendered = render(self.tokenizer, messages, is_asking=add_generation_prompt)
        return encode(self.tokenizer, rendered)


def check_feature_layers(layers: Sequence[int], n_layers: int) -> None:
    """Make sure that a model has the layers whose features are asked for.

    Raises:
        ConfigError: it has not, or they are not ascending.
    """
    if sorted(set(layers)) != [layer for layer in layers if 0 <= layer <= n_layers]:
        raise ConfigError(
            f"features of the layers {list(layers)} were asked for; name some of 0 to {n_layers}, "
            f"each once, ascending"
        )


def load_model(
    model: str | Path | LoadOptions, /, *, progress: ProgressFn | None = None, **settings: Any
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        model: options, or the model alone; what concerns caches is ignored.
        progress: called while loading; otherwise loading is silent.
        settings: fields of ``LoadOptions``, in place of the options' own.

    Raises:
        ModelError: no such model, a checkpoint that is incomplete or damaged, or an architecture
            that is not supported.
        BackendError: the backend is unknown, or the packages it needs are not installed.
        ConfigError: a dtype, a device or weights that do not exist, or do not go together.

    Warns:
        WeightsQualityWarning: the weights' format harms the model, or models of its size.
    """
    options = LoadOptions.of(model, **settings)
    name_or_path, dtype, device = options.model, options.dtype, options.device
    if options.backend != "torch":
        found: LoadedModel = _loading_backend(options.backend).load_model(
            name_or_path, dtype=dtype, weights=options.weights, device=device, progress=progress
        )
        return _with_template(found, options.chat_template)
    weights = parse_weights(options.weights, dtype)
    kernel = load_backend(options.backend)
    torch_loading = _torch_loading()
    from kvcellar.models.tokenizer import load_tokenizer, quiet

    done = start = 0.0  # of everything; where reading and loading begin

    def report(fraction: float, what: str) -> None:
        nonlocal done
        done = max(done, start + (1.0 - start) * fraction)
        if progress is not None:
            progress(done, what)

    with quiet(lambda part: report(0.05 + 0.95 * part, "loading weights")):
        folder = find_checkpoint(name_or_path, lambda part, what: report(_DOWNLOAD * part, what))
        start = done
        report(0.0, "reading the config")
        raw = read_config(folder)
        torch_dtype, torch_device, held = _check_for_torch(
            folder, raw, weights, dtype, device, is_demo=name_or_path == DEMO
        )
        params = params_from_config(raw)
        config = config_from_dict(raw)
        report(0.02, "reading the tokenizer")
        tokenizer = load_tokenizer(folder)
        report(0.05, "loading weights")
        network = torch_loading.load_weights(
            folder,
            config,
            CLASSES[config.model_type],
            quantization=raw.get("quantization_config"),
            dtype=torch_dtype,
            device=torch_device,
        )
        n_parameters = sum(parameter.numel() for parameter in network.parameters())
        if held is not None:
            report(0.95, "packing the weights")
            kernel.hold_weights(network, held)
    vocab_size = int(network.get_input_embeddings().num_embeddings)
    check_vocabulary(tokenizer, vocab_size, folder)
    report(1.0, "ready")
    harm = harm_of(folder, str(name_or_path), held, n_parameters) if held is not None else ""
    if harm:
        warnings.warn(harm, WeightsQualityWarning, stacklevel=2)
    loaded = LoadedModel(
        name=str(name_or_path),
        path=folder,
        backend=options.backend,
        params=params,
        config=network.config,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eos_token_ids=find_eos_token_ids(folder, raw, tokenizer),
        max_positions=positions_from_config(config),
        dtype=str(network.dtype).removeprefix("torch."),
        weights=held,
        sampling=sampling_defaults(folder),
        chat_template=None,
        _model=network,
    )
    return _with_template(loaded, options.chat_template)


def _with_template(model: LoadedModel, text: str | None) -> LoadedModel:
    """The model with another chat template; as it is where that is its own."""
    if text is None or text == model.tokenizer.chat_template:
        return model
    model.tokenizer.chat_template = text
    return replace(model, chat_template=text)


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model, or with how it is to be loaded, and read no weight.

    Of a model on the Hugging Face hub that is not here yet only the config is downloaded and
    checked.

    Raises:
        ModelError, BackendError, ConfigError: as ``load_model``.
    """
    name_or_path, dtype, device = options.model, options.dtype, options.device
    if options.backend != "torch":
        _loading_backend(options.backend).check_model(
            name_or_path, dtype=dtype, weights=options.weights, device=device
        )
        return
    weights = parse_weights(options.weights, dtype)
    load_backend(options.backend)
    torch_loading = _torch_loading()
    if not is_local(name_or_path):
        torch_loading.pick_types(dtype or "float32", device, {}, Counter())
        return
    folder = find_checkpoint(name_or_path, lambda fraction, what: None)
    raw = read_config(folder)
    _check_for_torch(folder, raw, weights, dtype, device, is_demo=name_or_path == DEMO)


def is_local(name_or_path: str | Path) -> bool:
    """Return whether a model cannot be one of the hub's: it is here, or its name is a path."""
    return (
        name_or_path == DEMO
        or Path(name_or_path).expanduser().exists()
        or isinstance(name_or_path, Path)
        or not HUB_ID.fullmatch(name_or_path)
    )


def _check_for_torch(
    folder: Path,
    raw: dict[str, Any],
    weights: str | None,
    dtype: Any,
    device: Any,
    *,
    is_demo: bool,
) -> tuple[Any, Any, str | None]:
    """Check a checkpoint's files and the options, and pick: dtype, device, how weights are held."""
    check_architecture(raw, folder)
    params_from_config(raw)
    stored = check_weights(folder)
    check_tokenizer_files(folder)
    dtype = "bfloat16" if weights == "bf16" else dtype
    wanted = "float32" if is_demo and dtype in (None, "auto") else dtype
    torch_dtype, torch_device = _torch_loading().pick_types(wanted, device, raw, stored)
    held = choose_weights(
        weights,
        str(torch_dtype).removeprefix("torch."),
        is_cpu=torch_device.type == "cpu",
        is_built=load_backend("torch").reads_weights(),
    )
    return torch_dtype, torch_device, held


def _loading_backend(backend: str) -> Any:
    """The module of a backend other than torch that loads models.

    Raises:
        BackendError: there is none of that name, or it loads none.
    """
    module = load_backend(backend)
    if not hasattr(module, "load_model"):
        raise BackendError(f"backend {backend!r} loads no models; choose torch, mlx or executorch")
    return module


def _torch_loading() -> Any:
    """The module that loads with torch and transformers.

    Raises:
        BackendError: one of them is not installed.
    """
    try:
        return importlib.import_module("kvcellar.backends.torch.loading")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("kvcellar"):
            raise
        raise BackendError(
            f"loading a model needs the package {error.name!r}; install it with: "
            f"pip install 'kvcellar[torch]'"
        ) from error


def accelerator_bytes(options: LoadOptions) -> int | None:
    """Return the memory of the device that a model runs on; None: main memory, or not known."""
    device = options.device
    if options.backend != "torch" or device in (None, "cpu"):
        return None
    try:
        loading = importlib.import_module("kvcellar.backends.torch.loading")
    except ModuleNotFoundError:
        return None
    found: int | None = loading.device_bytes(str(device))
    return found


def find_checkpoint(name_or_path: str | Path, report: ProgressFn) -> Path:
    """The folder of the checkpoint; downloads it where the name is one of the hub's.

    Raises:
        ModelError: there is no such model.
    """
    if name_or_path == DEMO:  # a Path of that name is a folder
        if not DEMO_FOLDER.is_dir():
            raise ModelError(
                f"the bundled model is not in this installation ({DEMO_FOLDER}); install kvcellar "
                f"again, or give the folder of another model"
            )
        return DEMO_FOLDER
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = "; GGUF files are not supported" if path.suffix == ".gguf" else ""
        if path.suffix == ".pte":
            hint = "; for an ExecuTorch program choose the backend executorch"
        raise ModelError(
            f"{path} is a file; give the folder of a Hugging Face checkpoint, with its config, "
            f"tokenizer and safetensors{hint}"
        )
    if isinstance(name_or_path, Path) or not HUB_ID.fullmatch(name_or_path):
        raise ModelError(f"there is no folder {path}; give a checkpoint's folder, or {DEMO!r}")
    return from_hub(name_or_path, report)


def from_hub(name: str, report: ProgressFn, patterns: Sequence[str] = CHECKPOINT_FILES) -> Path:
    """Download a checkpoint, or take the local copy of an earlier download.

    Args:
        name: as the hub calls it.
        report: told about the progress.
        patterns: which files.

    Raises:
        ModelError: no such model, a licence to accept, or no connection.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        folder = snapshot_download(
            name,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*", "consolidated*"],  # other formats of the same weights
            tqdm_class=_download_bar(name, report),
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{name!r} asks for its licence to be accepted; do so on its page on huggingface.co, "
            f"then log in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name!r} here and no model of that name on the Hugging Face hub; "
            f"check the spelling, or log in where it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {name!r} here, no copy of a model of that name from an earlier "
            f"download, and the Hugging Face hub cannot be reached (offline?); connect, or give a "
            f"checkpoint's folder, or {DEMO!r}"
        ) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"downloading {name!r} failed: {error}; try again") from error
    return Path(folder)


def _download_bar(name: str, report: ProgressFn) -> Any:
    """A class of bars that draw nothing and report what they would show."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B" and self.total:
                report(min(1.0, self.n / self.total), f"downloading {name}")
            return shown

    return Bar


def check_architecture(raw: Mapping[str, Any], folder: Path) -> None:
    """Refuse what would load and then run wrongly."""
    family = raw.get("model_type")
    if family not in CLASSES and family not in MULTIMODAL:
        supported = ", ".join([*CLASSES, *MULTIMODAL])
        raise ModelError(
            f"{folder} is of architecture {family!r}, which is not supported; there are: "
            f"{supported}"
        )
    known = MULTIMODAL.get(family) or CLASSES[family]
    named = raw.get("architectures") or [known]
    if known not in named and CLASSES.get(family) not in named:
        raise ModelError(f"{folder} is a {', '.join(named)}; to generate text it must be a {known}")
    quantization = raw.get("quantization_config")
    if is_quantised_for_mlx(raw):
        raise ModelError(f"{folder} is quantised for MLX; load it with the backend mlx")
    if quantization and (quantization.get("quant_method") != "mxfp4" or family != "gpt_oss"):
        raise ModelError(
            f"{folder} is quantised with {quantization.get('quant_method')!r}, which is not "
            f"supported; choose a checkpoint in bfloat16, float16 or float32"
        )
    text = raw.get("text_config") or raw
    if family in ("gemma3", "gemma3_text") and text.get("attn_logit_softcapping"):
        raise ModelError(
            f"{folder} asks for attn_logit_softcapping, which Gemma 3 of transformers ignores; "
            f"the result would not be the model's"
        )
    check_rope(text, folder)


def check_rope(text: Mapping[str, Any], folder: Path) -> None:
    """Refuse a RoPE with which K that was cached would be wrong.

    Raises:
        ModelError: it is of such a type.
    """
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for part in (rope, *nested):
        kind = part.get("rope_type", part.get("type"))
        if kind in ("dynamic", "longrope"):
            raise ModelError(
                f"{folder} has RoPE of type {kind!r}, which turns every position anew as a "
                f"sequence grows; K that is cached would be wrong, so it is not supported"
            )


def is_quantised_for_mlx(raw: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config says so: weights that only MLX's own functions read."""
    return "quantization" in raw


def without_quantisation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's config without what it says of how its weights are stored."""
    return {k: v for k, v in raw.items() if k not in ("quantization", "quantization_config")}


def check_vocabulary(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Refuse a tokenizer of another model.

    Special tokens past the embedding are let through: Gemma 3's tokenizer has one for images that
    its smallest model lacks. A runner refuses them when they come.
    """
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    beyond = sorted(
        i for i in tokenizer.get_vocab().values() if i >= vocab_size and i not in special
    )
    if beyond:
        raise ModelError(
            f"the tokenizer in {folder} has token ids up to {beyond[-1]} and the model's embedding "
            f"has {vocab_size} rows; they are of different models, copy the model's own tokenizer"
        )


def find_eos_token_ids(folder: Path, raw: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Every token that the checkpoint's files call an end; they disagree in many chat models."""
    sources = [raw, raw.get("text_config") or {}]
    if (folder / "generation_config.json").is_file():
        sources.append(read_json(folder / "generation_config.json"))
    found: set[int] = set()
    for value in [*(source.get("eos_token_id") for source in sources), tokenizer.eos_token_id]:
        found.update([value] if isinstance(value, int) else value or ())
    return frozenset(found)


def _shape(params: ModelCacheParams) -> str:
    windows = ", ".join(str(group.window or "all") for group in params.groups)
    return (
        f"{params.n_layers} layers of {params.n_kv_heads} KV heads and head_dim "
        f"{params.head_dim} (windows: {windows})"
    )
