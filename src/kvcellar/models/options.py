"""Options of a model: one value, from a command's options to the runtime that loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcellar.budget import MemoryBudget
from kvcellar.cache_config import CacheConfig, make_config
from kvcellar.checks import whole
from kvcellar.errors import ConfigError
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.adapter_names import check_names
from kvcellar.models.sizes.snapshots import check_snapshot_bytes, slots_for
from kvcellar.models.weights import PLAIN
from kvcellar.registry import (
    CacheSession,
    make_decode_session,
    make_paged_session,
    make_seq_session,
    make_tree_session,
)
from kvcellar.types import ModelCacheParams

CACHES: Mapping[str, Callable[[str, CacheConfig], CacheSession[Any]]] = {
    "contiguous": make_decode_session,
    "cells": make_seq_session,
    "paged": make_paged_session,
    "tree": make_tree_session,
}
"""What a cache is asked for by, and what makes it."""

DEMO = "demo"
"""The name of the bundled model."""

_NOT_DIVIDED = {
    "weights": "--weights other than none needs the whole model in one process",
    "adapters": "an adapter (--adapter) needs the whole model in one process",
    "speculate": "a head of EAGLE-3 (--speculate) needs the whole model in one process",
    "memory_bytes": "--memory bounds one process",
}
"""Reasons why a model that is divided among ranks cannot have an option, by the option's field."""

ProgressFn = Callable[[float, str], None]
"""Called with how much is done, 0 to 1 and never less than before, and what comes now."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of the model to load, and of the cache that it gets. None: the default.

    Attributes:
        model: ``demo`` for the bundled model; a folder with a Hugging Face checkpoint in
            safetensors; a name on the Hugging Face hub, which is downloaded once; or what else the
            backend loads, as a .pte file.
        backend: who runs it, one of :func:`kvcellar.registry.backend_names`; None: as
            :func:`kvcellar.models.backend_choice.choose_backend` says.
        dtype: type of the weights in memory, by name or as a ``torch.dtype``. None or ``auto``:
            the checkpoint's own, with three exceptions. float16 becomes bfloat16 on a CPU, where
            arithmetic in float16 is slow and overflows; it takes the same memory, and three bits
            of each weight are lost: ask for ``float32`` to keep them. The bundled model runs in
            float32, and so does what stays blocks of a file (``weights``): it is the type between
            them. A type that is named has such blocks made plain in it.
        weights: how linear layers hold theirs. With torch, on a CPU or a GPU: ``bf16``, ``int8``
            or ``int4``, which the kernels of this package read, ``file``: the blocks of a GGUF
            file, or weights of MLX, AWQ, GPTQ or compressed-tensors, as they are, or ``none``: as
            torch does. None: ``file`` where a file is mostly such that a kernel multiplies it so,
            and no ``dtype`` is named; ``bf16`` where ``dtype`` is bfloat16, since nothing is lost;
            else ``none``, and where the kernel is not built. With executorch ``8da8w`` or
            ``8da4w``: a checkpoint is exported so.
        device: where it runs, as the backend knows it; None: the CPU, or MLX's default.
        chat_template: text of a template in place of the checkpoint's own.
        kv_dtype: how K and V are stored; None: as the weights, and beside a file's blocks in
            bfloat16.
        capacity: cells of its cache, of all conversations together; one may have as many as the
            model has positions. None: the model's context where memory allows it, else what memory
            allows.
        memory_bytes: what it may hold: weights, forwards and KV; None: its KV grows up to the
            capacity.
        cache: the kind of its cache, one of ``CACHES``. Agents and servers need one for many
            sequences: ``cells``, or ``paged`` for blocks of cells.
        block_size: of a paged cache: cells that are taken and shared together; None: 16.
        layout: of a paged cache: how it lays out its bytes, one of ``LAYOUTS``; None:
            ``layer_first``.
        speculate: who guesses tokens that are verified where that saves time: ``ngram`` (what
            followed before), ``eagle3:PATH`` (a head that reads the model's own layers; the
            bundled model brings one: ``eagle3``), or a smaller model of the same vocabulary; None:
            nobody.
        snapshot_bytes: of a model with recurrent layers: what snapshots of their states may take,
            from which conversations go on, beside what running answers live on; None: a quarter of
            the memory for K, V and states.
        is_unchecked: a model is loaded, with a warning, that was found not to be exact behind our
            caches; otherwise it is refused.
        tp: how many processes compute the model together, each with its part of the weights and
            its KV heads (tensor parallelism), as transformers plans it: on all cards of a machine,
            or on the CPU of one without any. Linear layers are torch's then (``weights`` none).
        adapters: LoRA adapters that are loaded beside it, each a folder as PEFT saves it, by the
            name that a request asks for it by.
    """

    model: str | Path = DEMO
    backend: str | None = None
    dtype: Any = None
    weights: str | None = None
    device: Any = None
    chat_template: str | None = None
    kv_dtype: str | None = None
    capacity: int | None = None
    memory_bytes: int | None = None
    cache: str = "cells"
    block_size: int | None = None
    layout: str | None = None
    speculate: str | None = None
    snapshot_bytes: int | None = None
    is_unchecked: bool = False
    tp: int = 1
    adapters: Mapping[str, str | Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.adapters)
        self._check_tp()
        if self.cache not in CACHES:
            raise ConfigError(f"cache {self.cache!r} is unknown; choose one of {', '.join(CACHES)}")
        object.__setattr__(self, "snapshot_bytes", check_snapshot_bytes(self.snapshot_bytes))
        for name in ("block_size", "layout"):
            value = getattr(self, name)
            if value is not None and self.cache != "paged":
                raise ConfigError(
                    f"{name} {value!r} is for a paged cache, and {self.cache} were asked for; "
                    f"choose the cache paged, or leave it out"
                )

    def _check_tp(self) -> None:
        """Refuse what a model that is divided among ranks cannot have.

        Raises:
            ConfigError: so it is.
        """
        object.__setattr__(self, "tp", whole(self.tp, "tp"))
        if self.tp < 1:
            raise ConfigError(f"tp is a number of processes, 1 or more; got {self.tp}")
        if self.tp == 1:
            return
        refused = {
            "weights": self.weights not in (None, PLAIN),
            "adapters": bool(self.adapters),
            "speculate": (self.speculate or "").partition(":")[0] == "eagle3",
            "memory_bytes": self.memory_bytes is not None,
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise ConfigError(
                    f"{_NOT_DIVIDED[name]}, and --tp {self.tp} divides the model among "
                    f"{self.tp} processes; leave one of them out"
                )
        object.__setattr__(self, "weights", PLAIN)

    @classmethod
    def of(cls, model: str | Path | LoadOptions, /, **settings: Any) -> LoadOptions:
        """Make options of a model's name, or of other options, with some fields set."""
        return replace(model if isinstance(model, LoadOptions) else cls(model), **settings)

    @property
    def name(self) -> str:
        """The model as it was asked for, for messages."""
        return str(self.model)

    def config_for(
        self,
        params: ModelCacheParams,
        capacity: int,
        budget: MemoryBudget | None = None,
        n_running: int = 1,
    ) -> CacheConfig:
        """Return the settings of the model's cache.

        Args:
            params: the model's facts.
            capacity: cells, where the options leave them to whoever knows the memory.
            budget: whom the cache asks before it grows.
            n_running: answers that run at a time.

        Raises:
            ConfigError: a value that cannot work; the message names it.
        """
        given = {"block_size": self.block_size, "layout": self.layout}
        paged: dict[str, Any] = {name: it for name, it in given.items() if it is not None}
        kv_dtype = self.kv_dtype or params.kv_dtype
        kv = parse_kv_dtype(kv_dtype)
        n_slots = slots_for(params, capacity, kv, self.snapshot_bytes, n_running)
        return make_config(params, capacity, kv_dtype, budget=budget, n_slots=n_slots, **paged)


def no_progress(fraction: float, what: str) -> None:
    """Report to nobody."""
