"""From options to a model in memory: whichever backend they name loads it.

A loaded model holds no session state. Any number of sessions can be bound to it at a time.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcellar.errors import ConfigError
from kvcellar.models.backend_choice import chosen
from kvcellar.models.files import ollama
from kvcellar.models.kv_quality import WeightsQualityWarning, harm_of
from kvcellar.models.model import DeviceMemory, LoadedModel, loader_of
from kvcellar.models.options import LoadOptions, ProgressFn
from kvcellar.registry import load_backend


class ForeignSettingsWarning(UserWarning):
    """Another program keeps settings beside a model that are not taken over."""


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
        ForeignSettingsWarning: Ollama has settings beside the model that are not taken over.
    """
    report = _rising(progress)
    options, backend = chosen(LoadOptions.of(model, **settings), report)
    _check_backend(options, backend)
    loaded = _as_ollama_says(loader_of(backend).load_model(options, report))
    harm = "" if loaded.weights is None else harm_of(loaded.path, loaded.name, loaded.weights)
    if harm:
        warnings.warn(harm, WeightsQualityWarning, stacklevel=2)
    template = options.chat_template
    if template is None or template == loaded.tokenizer.chat_template:
        return loaded
    loaded.tokenizer.chat_template = template
    return replace(loaded, chat_template=template)


def _as_ollama_says(loaded: LoadedModel) -> LoadedModel:
    """Return a model with the sampling that Ollama's manifest names, where it is one of Ollama's.

    Warns:
        ForeignSettingsWarning: the manifest says more, which is not taken over.
    """
    if not loaded.name.startswith(ollama.PREFIX) or Path(loaded.name).exists():
        return loaded
    said = ollama.named(loaded.name)
    ends = frozenset(map(str, loaded.tokenizer.convert_ids_to_tokens(sorted(loaded.eos_token_ids))))
    left = said.left_out(ends, has_template=bool(loaded.tokenizer.chat_template))
    if left:
        warnings.warn(
            f"{loaded.name}: of what Ollama has beside the model, these are not taken over: "
            f"{'; '.join(left)}",
            ForeignSettingsWarning,
            stacklevel=3,
        )
    return replace(loaded, sampling={**loaded.sampling, **said.sampling()})


def _rising(progress: ProgressFn | None) -> ProgressFn:
    """Wrap a function that is told progress so that it is never told less than before."""
    done = 0.0

    def report(fraction: float, what: str) -> None:
        nonlocal done
        done = max(done, fraction)
        if progress is not None:
            progress(done, what)

    return report


def check_model(options: LoadOptions) -> None:
    """Find what is wrong with a model, or with how it is to be loaded, and read no weight.

    Of a model on the Hugging Face hub that is not here yet only the config is downloaded and
    checked.

    Raises:
        ModelError, BackendError, ConfigError: as ``load_model``.
    """
    options, backend = chosen(options)
    _check_backend(options, backend)
    loader_of(backend).check_model(options)


def _check_backend(options: LoadOptions, backend: str) -> None:
    """Refuse adapters and ranks for a backend that has none.

    Raises:
        ConfigError: so it is.
        BackendError: there is no such backend.
    """
    if options.adapters and not load_backend(backend).has_adapters:
        raise ConfigError(
            f"adapters ({', '.join(options.adapters)}) are loaded beside models of the backend "
            f"torch, and {backend!r} was asked for; choose torch, or merge the adapter "
            f"into the model with PEFT's merge_and_unload and load what that saves"
        )
    if options.tp > 1 and not load_backend(backend).has_ranks:
        raise ConfigError(
            f"models of the backend torch are divided among ranks, and tp={options.tp} was asked "
            f"for with {backend!r}; choose torch, or leave tp out"
        )


def accelerator_memory(options: LoadOptions) -> DeviceMemory | None:
    """Return the memory of the device that a model runs on; None: main memory, or not known."""
    if options.device in (None, "cpu"):
        return None
    return loader_of(chosen(options)[1]).device_memory(options.device)
