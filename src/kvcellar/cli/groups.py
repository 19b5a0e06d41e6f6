"""Options that several commands have together, as values that are passed on as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from kvcellar.cli import options
from kvcellar.engine import DEFAULTABLE, SamplingParams

__all__ = ["CacheOptions", "ChatSampling", "ModelOptions", "SamplingOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is loaded, and in which type its cache stores K and V."""

    kv_dtype: options.KvDtype = None
    backend: options.Backend = "torch"
    dtype: options.Dtype = None
    weights: options.Weights = None
    device: options.Device = None
    chat_template: options.ChatTemplate = None

    def loading(self) -> dict[str, Any]:
        """Return the options as functions that load models take them; the template is read.

        Raises:
            ConfigError: the chat template cannot be read, or is none.
        """
        return asdict(self) | {"chat_template": options.read_template(self.chat_template)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions(ModelOptions):
    """How a model is loaded, and how much its cache holds."""

    capacity: options.Capacity = None
    memory: options.Memory = None

    def loading(self) -> dict[str, Any]:
        """Return the options as functions that open hosts take them, without the memory to share.

        Raises:
            ConfigError: as ``ModelOptions.loading``.
        """
        found = ModelOptions.loading(self)
        del found["memory"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are sampled; what is None is the model's own default, or else the usual one."""

    usual: ClassVar[Mapping[str, float]] = {}

    max_tokens: options.MaxTokens = 256
    temperature: options.Temperature = None
    top_p: options.TopP = None
    top_k: options.TopK = None
    min_p: options.MinP = None
    repetition_penalty: options.RepetitionPenalty = None
    seed: options.Seed = None
    stop: options.Stop = None

    def params(self) -> SamplingParams:
        """Return the options as settings that leave what was not given to the model.

        Raises:
            ConfigError: a value that cannot work.
        """
        named: dict[str, Any] = {k: v for k, v in asdict(self).items() if v is not None}
        return SamplingParams(**{**self.usual, **named}, unset=DEFAULTABLE - named.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(SamplingOptions):
    """How tokens are sampled in a chat: longer answers, and some chance where a model says none."""

    usual: ClassVar[Mapping[str, float]] = {"temperature": 0.7, "top_p": 0.95}

    max_tokens: options.MaxTokens = 1024
