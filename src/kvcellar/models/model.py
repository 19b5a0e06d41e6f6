"""A model in memory, whatever the runtime: what is known of it, what loads it, its session."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kvcellar.cache_config import CacheConfig
from kvcellar.errors import BackendError, ConfigError
from kvcellar.models.adapters import Adapter
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.places import is_gguf
from kvcellar.models.fingerprint import (
    Fingerprint,
    Progress,
    fingerprint_checkpoint,
    processor_text,
    vision_files,
)
from kvcellar.models.gguf.described import quantisation_of
from kvcellar.models.kv_quality import KvQualityWarning, known_quality
from kvcellar.models.options import LoadOptions, ProgressFn
from kvcellar.models.runner import AdaptingRunner, Runner
from kvcellar.models.seeing import PictureReader
from kvcellar.models.weights import FILE, PACKINGS, own_kv_dtype
from kvcellar.registry import CacheSession, backend_names, load_backend, needed_packages
from kvcellar.spec import ModelCacheSpec
from kvcellar.types import ModelCacheParams


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel(ABC):
    """A model in memory, with its tokenizer. Shared by sessions and threads; never changes.

    Each backend that runs models has its own, with the weights.

    Attributes:
        name: what ``load_model`` was asked for.
        path: the folder it came from.
        backend: id of the backend that runs it.
        params: what a cache for it must know; their ``kv_dtype`` follows from the two below.
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
        adapters: those that are loaded beside it, by name.
        pictures: what reads pictures for it; None: it reads text alone.
        no_pictures: why it does not read pictures, where one might think so; else empty.
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
    adapters: Mapping[str, Adapter] = field(default_factory=dict, kw_only=True)
    pictures: PictureReader | None = field(default=None, kw_only=True)
    no_pictures: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        computed = own_kv_dtype(self.dtype, self.weights)
        object.__setattr__(self, "params", replace(self.params, kv_dtype=computed))

    def bind(
        self,
        session: CacheSession[Any],
        *,
        feature_layers: Sequence[int] = (),
        adapter: str = "",
    ) -> Runner:
        """Join the model with a session that is open; any number may be joined at a time.

        Args:
            session: of a cache that was made with the model's ``params``.
            feature_layers: layers whose inputs are wanted beside the logits, ascending; the number
                of layers is the output of the last one. The runner is then a ``FeatureRunner``.
            adapter: what computes tokens of which no adapter is said; empty: the model alone.

        Raises:
            SessionClosedError: the session is not open.
            BackendError: it is a session of another backend.
            ConfigError: its cache was made for another model, or it has no such layers or adapter.

        Warns:
            KvQualityWarning: the cache's storage type was measured with this model and is bad.
        """
        self._check_session(session)
        check_feature_layers(feature_layers, self.n_layers)
        known = known_quality(self.path, session.cache.config.kv_dtype)
        if known is not None and known.verdict == "bad":
            worst = f" of {known.text}, the worst of {known.n_texts} texts" * (known.n_texts > 1)
            warnings.warn(
                f"kv_dtype {known.kv_dtype} is known to be bad for {self.name!r}: perplexity "
                f"{known.ppl_ratio:.3f} times that of float32, the same likeliest token after "
                f"{known.same_top1:.1%} of {known.n_tokens} tokens{worst}; "
                f"kvcellar bench kv-quality {self.name} recommends another",
                KvQualityWarning,
                stacklevel=2,
            )
        runner = self._make_runner(session, feature_layers)
        if adapter:
            assert isinstance(runner, AdaptingRunner), "it has adapters"
            runner.own_adapter = self.adapter(adapter).name
        return runner

    def adapter(self, name: str) -> Adapter:
        """Return an adapter that is loaded beside it.

        Raises:
            ConfigError: it is not.
        """
        if name not in self.adapters:
            raise ConfigError(
                f"{self.name!r} has no adapter {name!r} beside it; there are: "
                f"{', '.join(self.adapters) or 'none'}"
            )
        return self.adapters[name]

    @property
    def n_layers(self) -> int:
        """Layers of the model; those without attention are no layers of its caches."""
        return self.params.n_layers

    @abstractmethod
    def _make_runner(self, session: CacheSession[Any], feature_layers: Sequence[int]) -> Runner:
        """Make a runner of this backend; session and model were found to fit."""

    def _check_session(self, session: CacheSession[Any]) -> None:
        """Refuse a session of another backend, or with a cache for another model."""
        params = session.cache.config.params
        if session.backend != self.backend:
            raise BackendError(
                f"session {session.cache_key} is of backend {session.backend!r} and "
                f"{self.name!r} was loaded for {self.backend!r}; make the session with "
                f"{self.backend!r}"
            )
        if params != self.params:
            raise ConfigError(
                f"the cache of session {session.cache_key} was made for {params}; "
                f"{self.name!r} has {self.params}; make the session with the model's params"
            )

    @property
    def held_as(self) -> str:
        """Way in which the weights are held, for people."""
        name = self.weights or self.dtype
        if not is_gguf(self.path):
            return name
        of_file = quantisation_of(self.path)
        return f"{of_file} as in the file" if name == FILE else f"{name} made of {of_file}"

    @property
    def kv_dtype(self) -> str:
        """Storage type of K and V where nothing else is asked for."""
        return self.params.kv_dtype

    @property
    def has_session_ropes(self) -> bool:
        """True if sessions of different capacity turn positions by different factors."""
        return False

    def rope_length_for(self, config: CacheConfig) -> int:
        """Return the length of text whose RoPE factors a session with such a cache has.

        Sessions with the same length turn a position in the same way; 0: all sessions do.
        """
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.stored_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights' files."""
        return sum(path.stat().st_size for path in self.path.glob("*.safetensors"))

    def fingerprint(
        self,
        *,
        cache_file: str | Path | None = None,
        on_progress: Progress | None = None,
        dtype: str | None = None,
        rope_length: int = 0,
    ) -> Fingerprint:
        """Work out whose KV it computes: equal where the same tokens give the same K and V.

        Args:
            cache_file: where hashes of large files are remembered; None: nowhere.
            on_progress: takes how much of the weights is read, 0 to 1, and what comes now.
            dtype: the type that the weights are used in, where it is not that in memory.
            rope_length: of the session whose KV it is, by ``rope_length_for``.

        Raises:
            ConfigError: sessions of this model turn positions otherwise, and no length is said.
            StoreError: a file cannot be read.
        """
        packing = PACKINGS.get(self.weights or "")
        kept = self.dtype if packing is None else f"{self.dtype}+{packing}"
        replaced = {} if self.chat_template is None else {"chat_template": self.chat_template}
        beside: list[Path] = []
        if self.pictures is not None:
            replaced["processor"] = processor_text(self.path)
            beside = vision_files(self.path)
        if rope_length:
            replaced["rope_length"] = str(rope_length)
        elif self.has_session_ropes:
            raise ConfigError(
                f"K of {self.name!r} depends on the capacity of its session; say whose it is, with "
                f"rope_length=model.rope_length_for(cache.config)"
            )
        return fingerprint_checkpoint(
            self.path,
            cache_file=cache_file,
            on_progress=on_progress,
            beside=beside,
            dtype=dtype or kept,
            **replaced,
        )

    @abstractmethod
    def touch_weights(self) -> int:
        """Have every weight in memory now, not when a forward first needs it; return their bytes.

        Weights may be mapped from their files. Whoever measures a process wants them to count.
        """


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


FactsOf = Callable[[Mapping[str, Any]], ModelFacts]
"""Function from a ``config.json`` to the facts of the model."""


class DeviceMemory(Protocol):
    """Protocol of the memory of a device that has its own.

    Attributes:
        total_bytes: that the device has.
    """

    total_bytes: int

    @property
    def held_bytes(self) -> int:
        """Bytes that this process holds there now, its runtime's among them."""
        ...

    def bound(self, limit_bytes: int) -> None:
        """Have allocations beyond a limit of this process fail."""
        ...


class ModelLoader(Protocol):
    """Protocol of a backend's loader of models; a module with these functions is one."""

    def load_model(self, options: LoadOptions, report: ProgressFn) -> LoadedModel:
        """Load a model and its tokenizer; chat templates are replaced by :func:`load_model`."""
        ...

    def check_model(self, options: LoadOptions) -> None:
        """Find what is wrong with a model or its options; see :func:`check_model`."""
        ...

    def size_model(self, options: LoadOptions) -> ModelCacheSpec:
        """Work out what a model costs; see :func:`kvcellar.models.sizes.sizing.size_model`."""
        ...

    def model_facts(self, raw: Mapping[str, Any]) -> ModelFacts:
        """Return the facts of a model by its ``config.json``; they are learnt once, and kept.

        Raises:
            ModelError: the config makes no model that caches here can serve.
        """
        ...

    def device_memory(self, device: Any) -> DeviceMemory | None:
        """Return the memory of a device; None where it is main memory, or not known."""
        ...


def loader_of(backend: str) -> ModelLoader:
    """Import what loads the models of a backend.

    Raises:
        BackendError: it is unknown, loads none, or the packages it needs are not installed.
    """
    make = load_backend(backend).loader
    if make is None:
        raise BackendError(
            f"backend {backend!r} has caches and loads no models; choose another one of "
            f"{', '.join(backend_names())}"
        )
    with needed_packages(backend, f"loading models with the backend {backend!r}"):
        loader: ModelLoader = make()
    return loader
