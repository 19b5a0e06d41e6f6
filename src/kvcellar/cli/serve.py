"""``kvcellar serve``: models and agents over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.cli import options
from kvcellar.cli.commands import add_command
from kvcellar.cli.groups import CacheOptions
from kvcellar.cli.hosting import hosting_of, open_shown
from kvcellar.cli.serving import (
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
from kvcellar.cli.store import HOME_STORE, StorePlace
from kvcellar.cli.terminal import (
    ProgressFn,
    print_note,
    print_warning,
    progress_bar,
    progress_lines,
    write,
)
from kvcellar.errors import BackendError, ConfigError
from kvcellar.installed import pip_command
from kvcellar.models.adapter_names import adapted
from kvcellar.models.options import DEMO
from kvcellar.models.packaged import NAMES, PACKAGED, fetch_packaged

if TYPE_CHECKING:
    from kvcellar.agents import Hosting, ModelHost
    from kvcellar.engine import EngineConfig
    from kvcellar.engine.embedding import TextEmbedder
    from kvcellar.server.config import ServerConfig
    from kvcellar.server.state.models import ServedModels
    from kvcellar.server.state.service import Service
    from kvcellar.store import StoreEvent


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "serve",
        serve_command,
        "kvcellar serve",
        "kvcellar serve ~/models/Qwen3-0.6B --port 8000",
        "kvcellar serve small=~/models/Qwen3-0.6B large=~/models/Qwen3-8B --memory 24GB",
        "kvcellar serve a=~/models/Qwen3-8B b=~/models/Qwen3-4B --device a=cuda:0,b=cuda:1",
        "curl -N localhost:8642/v1/chat/completions --json "
        '\'{"stream": true, "messages": [{"role": "user", "content": "Hello"}]}\'',
    )


def serve_command(
    context: typer.Context,
    models: Models = None,
    *,
    place: PlaceOptions,
    store: StorePlace = HOME_STORE,
    any_model: AnyModel = False,
    rule: Rules = None,
    dialect: DialectName = None,
    trust: TrustOptions,
    limits: LimitOptions,
    engine: EngineOptions,
    loading: CacheOptions,
    speculate: options.Speculate = None,
    embeddings: Annotated[
        str | None,
        options.in_loading(
            "[NAME=]MODEL",
            "An embedding model beside the others, on the CPU: a checkpoint's folder, or a name on "
            "the Hugging Face hub. Without it the models that answer make vectors, too.",
        ),
    ] = None,
    idle_unload: IdleUnload = None,
) -> None:
    """Serve models and agents over HTTP, as OpenAI and Anthropic do, with a page to look at.

    Agents are in the store, so they are there again after a restart. On a card kernels are compiled
    before a model answers, and kept for the next start. Ctrl-C saves all agents and ends.
    """
    check_installed()
    offered = offered_models(models or ["demo"])
    beside, beside_bytes = _embedding_models(embeddings, offered)
    adapters = adapters_of(loading.adapter, offered, beside)
    said = loading.as_json() | {"speculate": speculate, "shared": store.shared}
    device, devices = devices_of(loading.device, offered, loading.memory)
    loading = replace(loading, device=device)
    hosting = hosting_for(loading, engine.config(), speculate, adapters, beside_bytes)
    hosting.devices = devices
    config = server_config(
        context,
        place,
        trust,
        limits,
        plan=hosting.plan,
        takes_any_model=any_model,
        rules=rule or [],
        dialect=dialect,
    )
    check_models(hosting, loading.backend, offered.values())
    place.warn(config)
    _serve(
        config,
        store,
        hosting,
        offered.values(),
        lambda: _served(
            config, hosting, with_adapters(offered, adapters), beside, idle_unload, said
        ),
    )


def check_installed() -> None:
    """Refuse where the server's packages are not installed.

    Raises:
        BackendError: one is missing.
    """
    try:
        import kvcellar.server.run  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the server needs {error.name}, which is not installed; install it with: "
            f"{pip_command()}"
        ) from error


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


def _embedding_models(
    text: str | None, offered: dict[str, str]
) -> tuple[dict[str, TextEmbedder], int]:
    """Load the embedding model that is wanted; return it by its name, and the bytes it takes.

    Raises:
        ConfigError: an offered model has its name.
        ModelError: it cannot be read.
    """
    if text is None:
        return {}, 0
    ((name, path),) = offered_models([text]).items()
    if name in offered:
        raise ConfigError(f"two models are called {name!r}; name one as NAME=MODEL")
    with progress_bar(f"loading {path}", tell=_log_stage) as report:
        from kvcellar.backends.torch.run.embedding import WORKING_BYTES, load_embedding_model

        model = load_embedding_model(path, report)
    return {name: model}, model.size_bytes + WORKING_BYTES


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
    hosting = hosting_of(options, loading.memory, engine, beside_bytes)
    hosting.adapters = adapters
    hosting.share_among(paths)
    return hosting


def check_models(hosting: Hosting, backend: str, paths: Iterable[str]) -> None:
    """Find what would keep the models from being loaded, before anybody is told an address."""
    from kvcellar.server.run import log_to_stderr

    log_to_stderr()
    with progress_bar(f"starting {backend}", tell=_log_stage) as report:
        for path in paths:
            if path in PACKAGED:
                fetch_packaged(path, lambda part, what: report(0.9 * part, what))
            hosting.check(path)


def _served(
    config: ServerConfig,
    hosting: Hosting,
    offered: dict[str, str],
    beside: dict[str, TextEmbedder],
    idle_unload: float | None,
    said: dict[str, Any],
) -> ServedModels:
    """Make the models that clients may name; none is loaded yet."""
    from kvcellar.server.state.models import ServedModels

    def load(path: str, progress: ProgressFn) -> ModelHost:
        opened = open_shown(hosting, path, _told_twice(path, progress), is_prepared=True)
        facts = {"weights": opened.weights, "cache": str(opened.capacity)}
        if opened.resumes:
            facts["resumes"] = opened.resumes
        _log("model loaded", model=path, **facts)
        return opened

    return ServedModels(
        offered,
        load,
        takes_any=config.takes_any_model,
        idle_ttl_s=idle_unload,
        context_of=hosting.context_of,
        embedding_models=beside,
        loading=said,
        **hosting.registry,
    )


@contextmanager
def _told_twice(path: str, progress: ProgressFn) -> Iterator[ProgressFn]:
    """Report how far loading is to whoever asks for the model's state, and to the log."""
    with progress_lines(f"loading {path}", tell=_log_stage) as tell:

        def report(fraction: float, what: str) -> None:
            progress(fraction, what)
            tell(fraction, what)

        yield report


def _serve(
    config: ServerConfig,
    place: StorePlace,
    hosting: Hosting,
    offered: Iterable[str],
    make_models: Callable[[], ServedModels],
) -> None:
    """Run the server until it is stopped; then warn of what its store has met."""
    from kvcellar.server.run import serve

    def on_ready(url: str, service: Service) -> None:
        write(f"{', '.join(service.models.offered)} at {url}\n")
        print_note(f"OpenAI clients: base_url {url}/v1; Anthropic clients: {url}; look: {url}/")
        if DEMO in offered:
            print_note(options.DEMO_NOTE)

    with place.open(hosting.store, _log_place) as store:
        serve(config, store, make_models, on_ready=on_ready)
        for event in store.take_events():
            print_warning(f"{event.subject}: {event.detail}")


def _log_stage(fraction: float, stage: str) -> None:
    """Log how far a slow start is, as the server logs all else."""
    _log("starting", stage=stage, done=round(fraction, 2))


def _log_place(event: StoreEvent) -> None:
    """Log when a shared place goes away and comes back; all else is told at the end."""
    if event.kind in ("shared_away", "shared_back"):
        _log(event.kind, place=event.subject, detail=event.detail)


def _log(event: str, **facts: object) -> None:
    logging.getLogger("kvcellar.server").info(json.dumps({"event": event, **facts}))
