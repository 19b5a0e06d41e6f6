"""Options that several commands have together, as values that are passed on as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from kvcellar.cli.common import options
from kvcellar.models.options import DEMO, LoadOptions
from kvcellar.sampler_settings import SAMPLER_SETTINGS

if TYPE_CHECKING:
    from kvcellar.engine import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of loading a model, and the type in which its cache stores K and V."""

    kv_dtype: options.KvDtype = None
    backend: options.Backend = None
    dtype: options.Dtype = None
    weights: options.Weights = None
    device: options.Device = None
    chat_template: options.ChatTemplate = None
    is_unchecked: options.Unchecked = False
    tp: options.Tp = 1
    adapter: options.Adapter = None

    def options_for(self, model: str = DEMO) -> LoadOptions:
        """Return the options as functions that load a model take them; the template is read.

        Raises:
            ConfigError: the chat template cannot be read, or is none; snapshots of no size; or
                adapters without names.
        """
        given = {key: value for key, value in asdict(self).items() if key != "memory"}
        given["adapters"] = options.read_adapters(given.pop("adapter"))
        given["chat_template"] = options.read_template(self.chat_template)
        given["snapshot_bytes"] = options.snapshot_bytes(given.pop("snapshots", None))
        return LoadOptions(model, **given)

    def as_json(self) -> dict[str, Any]:
        """Return all of the options as JSON has them, for comparing those of two commands."""
        said = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.chat_template is not None:
            said["chat_template"] = str(self.chat_template.expanduser().resolve())
        return said

    def given(self) -> dict[str, Any]:
        """Return those of ``as_json`` that are not as by default."""
        usual = {one.name: one.default for one in fields(self)}
        return {name: value for name, value in self.as_json().items() if value != usual[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions(ModelOptions):
    """Options of loading a model, of which cache for many sequences it gets, and of its size.

    ``memory`` is of the whole process, and whoever loads the models divides it.
    """

    cache: options.Cache = "cells"
    block_size: options.BlockSize = None
    layout: options.Layout = None
    capacity: options.Capacity = None
    memory: options.Memory = None
    snapshots: options.Snapshots = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyCacheOptions(CacheOptions):
    """Options of loading a model for one conversation, in a cache of any kind."""

    cache: options.AnyCache = "contiguous"


def _sampler_options() -> type:
    """Return a group of options that has all settings of sampling."""
    said = "Default, as for the others: what the model's own files say."
    options_of = [
        (
            name,
            Annotated[
                (int if one.is_whole else float) | None,
                options.in_sampling(one.metavar, one.meaning if i else f"{one.meaning} {said}"),
            ],
            None,
        )
        for i, (name, one) in enumerate(SAMPLER_SETTINGS.items())
    ]
    return make_dataclass("_Sampler", options_of, frozen=True, slots=True, kw_only=True)


if TYPE_CHECKING:

    class _Sampler:
        """A group of options with all settings of sampling."""

else:
    _Sampler = _sampler_options()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(_Sampler):
    """Options of sampling; what is None is the model's own default, or else the usual one."""

    usual: ClassVar[Mapping[str, float]] = {}

    max_tokens: options.MaxTokens = 256
    seed: options.Seed = None
    stop: options.Stop = None

    def as_json(self) -> dict[str, Any]:
        """Return the options as :func:`kvcellar.server.commands.asked.params_of` reads them."""
        named: dict[str, Any] = {k: v for k, v in asdict(self).items() if v is not None}
        return {"usual": dict(self.usual), "named": named}

    def params(self) -> SamplingParams:
        """Return the options as settings that leave what was not given to the model.

        Raises:
            ConfigError: a value that cannot work.
        """
        from kvcellar.server.commands.asked import params_of

        return params_of(self.as_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling(SamplingOptions):
    """Options of sampling in a chat: longer answers, and some chance where a model says none."""

    usual: ClassVar[Mapping[str, float]] = {"temperature": 0.7, "top_p": 0.95}

    max_tokens: options.MaxTokens = 1024
