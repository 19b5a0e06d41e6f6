"""``kvcellar serve``: models and agents over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.budget import parse_size
from kvcellar.cli import options
from kvcellar.cli.session import memory_plan
from kvcellar.cli.store import Folder
from kvcellar.cli.terminal import (
    examples,
    help_of,
    print_note,
    print_warning,
    progress_bar,
    progress_lines,
    shown_warnings,
    write,
)
from kvcellar.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from kvcellar.agents import ModelHost
    from kvcellar.server.service import Service

TRUST = "Trust"
PREFILL_BESIDE = 32
"""Tokens of prompts in a step that has decodes too: others' answers go on evenly meanwhile."""

MIB = 1 << 20
BODY_SHARE = 64
"""With --memory a body may have one part in so many of it: reading takes several times its size."""

PARALLEL = 8
LIMITS = "Limits"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        name="serve",
        help=help_of(serve_command),
        epilog=examples(
            "kvcellar serve",
            "kvcellar serve ~/models/Qwen3-0.6B --port 8000",
            "kvcellar serve small=~/models/Qwen3-0.6B large=~/models/Qwen3-8B --memory 24GB",
            "curl -N localhost:8642/v1/chat/completions --json "
            '\'{"stream": true, "messages": [{"role": "user", "content": "Hello"}]}\'',
        ),
    )(serve_command)


def serve_command(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[NAME=]MODEL]...",
            help="What to offer, as `kvcellar generate` takes it; the first is the default. "
            "Without any: `demo`. A name is what clients ask for.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0: any that is free.")] = 8642,
    store: Folder = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="KVCELLAR_API_KEY",
            help="What clients must bring as a bearer token or `x-api-key`. On the command line "
            "every user of this machine can read it, with `ps`: rather set the variable, or give "
            "--api-key-file.",
            rich_help_panel=TRUST,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A file whose first line is the API key.",
            rich_help_panel=TRUST,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name by which this server may be called; may be given several times.",
            rich_help_panel=TRUST,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A web page's origin that may call it; may be given several times.",
            rich_help_panel=TRUST,
        ),
    ] = None,
    log_text: Annotated[
        bool,
        typer.Option("--log-text", help="Let prompts into the log.", rich_help_panel=TRUST),
    ] = False,
    any_model: Annotated[
        bool,
        typer.Option(
            "--any-model", help="Answer with the first model whatever name a client asks for."
        ),
    ] = False,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Let a rule change what clients sent, besides `billing-header`: `header`, `date` "
            "or `tool-order`; may be given several times. `none`: no rule at all.",
        ),
    ] = None,
    control_tokens_in_text: Annotated[
        bool,
        typer.Option(
            "--control-tokens-in-text",
            help="Let text of messages spell the model's control tokens. Whoever writes a message "
            "can then end it, and speak as somebody else.",
            rich_help_panel=TRUST,
        ),
    ] = False,
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Of an answer for which the client sets no limit.",
            rich_help_panel=LIMITS,
        ),
    ] = 1024,
    max_requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Answers that wait or run at a time; more are told to come back.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    parallel: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Answers that run at a time; more wait their turn, so that these go on evenly.",
            rich_help_panel=LIMITS,
        ),
    ] = PARALLEL,
    max_body: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Of one request; where it is not given, at most a 64th of --memory.",
            rich_help_panel=LIMITS,
        ),
    ] = "32MiB",
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Longest time to wait for room in the cache.",
            rich_help_panel=LIMITS,
        ),
    ] = 120.0,
    remember: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Conversations without a name that are remembered.",
            rich_help_panel=LIMITS,
        ),
    ] = 256,
    shutdown: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Time that running answers have when the server is stopped; then they end with "
            "an error. A second signal does not wait.",
            rich_help_panel=LIMITS,
        ),
    ] = 5.0,
    idle_unload: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Let go of a model that nobody has used for so long. Default: never.",
            rich_help_panel=options.LOADING,
        ),
    ] = None,
    memory: options.Memory = None,
    capacity: options.Capacity = None,
    kv_dtype: options.KvDtype = None,
    backend: options.Backend = "torch",
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    device: options.Device = None,
    speculate: options.Speculate = None,
    chat_template: options.ChatTemplate = None,
) -> None:
    """Serve models and agents over HTTP, as OpenAI and Anthropic do, with a page to look at.

    Agents are in the store, so they are there again after a restart. Ctrl-C saves them all and
    ends.
    """
    try:
        from kvcellar.server.config import ServerConfig
        from kvcellar.server.models import ServedModels
        from kvcellar.server.run import log_to_stderr, serve
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the server needs {error.name}, which is not installed; pip install 'kvcellar[server]'"
        ) from error
    from kvcellar.engine import EngineConfig
    from kvcellar.store import Store, StoreConfig, default_store

    api_key = _api_key(context, api_key, api_key_file)
    config = ServerConfig(
        host=host,
        port=port,
        api_key=api_key,
        allowed_hosts=tuple(allow_host or ()),
        allowed_origins=tuple(allow_origin or ()),
        logs_text=log_text,
        takes_any_model=any_model,
        rules=_rules(rule or []),
        control_tokens_in_text=control_tokens_in_text,
        max_tokens=max_tokens,
        max_requests=max_requests,
        max_body_bytes=parse_size(max_body),
        wait_s=wait,
        max_unnamed=remember,
        shutdown_s=shutdown,
    )
    offered = _offered(models or ["demo"])
    loading: dict[str, Any] = {
        "config": EngineConfig(max_num_seqs=parallel, max_prefill_beside=PREFILL_BESIDE),
        "capacity": capacity,
        "kv_dtype": kv_dtype,
        "backend": backend,
        "dtype": dtype,
        "weights": weights,
        "device": device,
        "speculate": speculate,
        "chat_template": options.read_template(chat_template),
    }
    if chat_template is not None and len(offered) > 1:
        raise ConfigError(
            f"one --chat-template is for one model, and {len(offered)} are offered; start a server "
            f"for each"
        )

    plan = memory_plan(memory, loading)
    if plan is not None and not _is_typed(context, "max_body"):
        most = max(MIB, plan.limit_bytes // BODY_SHARE)
        config = replace(config, max_body_bytes=min(config.max_body_bytes, most))

    shared: dict[str, int | None] = {}
    if plan is not None and capacity is None:
        shared = plan.shared_capacities(list(offered.values()), **loading)

    def settings_of(path: str) -> dict[str, Any]:
        return loading | {"capacity": shared.get(path, capacity)}

    def size_of(path: str) -> int:
        assert plan is not None
        return plan.size_of(path, **settings_of(path))

    def context_of(path: str) -> tuple[int, int]:
        from kvcellar.agents import planned_context

        limit = None if plan is None else size_of(path)
        settings = settings_of(path)
        del settings["chat_template"]
        return planned_context(path, limit, **settings)

    def load(path: str, progress: Callable[[float, str], None]) -> ModelHost:
        from kvcellar.agents import open_host

        limit = None if plan is None else size_of(path)
        with shown_warnings(), progress_lines(f"loading {path}", tell=_log_stage) as tell:

            def report(fraction: float, what: str) -> None:
                progress(fraction, what)
                tell(fraction, what)

            opened = open_host(path, progress=report, memory_bytes=limit, **settings_of(path))
        chosen = {"model": path, "weights": opened.weights, "cache": str(opened.capacity)}
        logging.getLogger("kvcellar.server").info(json.dumps({"event": "model loaded", **chosen}))
        for found in opened.template.findings if opened.template is not None else ():
            print_note(f"chat template: {found}")
        return opened

    log_to_stderr()
    with progress_bar(f"starting {backend}", tell=_log_stage):
        from kvcellar.agents import check_host

        for path in offered.values():
            limit = None if plan is None else size_of(path)
            settings = settings_of(path)
            del settings["chat_template"]  # read already; the model's template is tried later
            check_host(path, memory_bytes=limit, **settings)

    def make_models() -> ServedModels:
        return ServedModels(
            offered,
            load,
            takes_any=any_model,
            budget_bytes=None if plan is None else plan.models_bytes,
            idle_ttl_s=idle_unload,
            size_of=None if plan is None else size_of,
            context_of=context_of,
        )

    def on_ready(url: str, service: Service) -> None:
        write(f"{', '.join(service.models.offered)} at {url}\n")
        print_note(f"OpenAI clients: base_url {url}/v1; Anthropic clients: {url}; look: {url}/")

    if not _is_local(host) and api_key is None:
        print_warning(
            f"{host} is reached from other machines, and everybody there may use this server; "
            f"set --api-key"
        )
    stored = StoreConfig()
    if plan is not None:
        stored = StoreConfig(warm_bytes=plan.warm_bytes, queue_bytes=plan.queue_bytes)
    with Store((store or default_store()).expanduser(), stored) as opened_store:
        serve(config, opened_store, make_models, on_ready=on_ready)
        for event in opened_store.take_events():
            print_warning(f"{event.subject}: {event.detail}")


def _rules(names: list[str]) -> tuple[str, ...]:
    """The rules that apply: those that always do, and those that were named."""
    from kvcellar.agents import DEFAULT_RULES

    if "none" not in names:
        return (*DEFAULT_RULES, *names)
    if len(names) > 1:
        raise ConfigError(f"--rule none is for no rule, and {', '.join(names)} were given")
    return ()


def _offered(models: list[str]) -> dict[str, str]:
    """Name -> what to load, for ``NAME=MODEL`` and for ``MODEL`` alone."""
    offered: dict[str, str] = {}
    for text in models:
        name, is_named, rest = text.partition("=")
        path = rest if is_named else text
        folder = Path(path).expanduser()
        if path != "demo" and folder.is_dir():
            path = str(folder.resolve())
            name = name if is_named else folder.resolve().name
        if not name or not path:
            raise ConfigError(f"{text!r} is no model; give MODEL or NAME=MODEL")
        if name in offered:
            raise ConfigError(f"two models are called {name!r}; name one as NAME=MODEL")
        offered[name] = path
    return offered


def _api_key(context: typer.Context, given: str | None, file: Path | None) -> str | None:
    """The key that clients must bring, from wherever it was given; None: none is wanted.

    Raises:
        ConfigError: it was given twice, or the file cannot be read.
    """
    is_typed = _is_typed(context, "api_key")
    if file is None:
        if is_typed:
            print_warning(
                "every user of this machine can read the command line, and so this --api-key; "
                "rather set KVCELLAR_API_KEY, or give --api-key-file"
            )
        return given
    if is_typed:
        raise ConfigError("--api-key and --api-key-file were both given; leave one of them out")
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the API key in {file} cannot be read ({said})") from error
    return lines[0].strip() if lines else ""


def _is_typed(context: typer.Context, name: str) -> bool:
    """Return whether an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _log_stage(fraction: float, stage: str) -> None:
    """Log how far a slow start is, as the server logs all else."""
    line = {"event": "starting", "stage": stage, "done": round(fraction, 2)}
    logging.getLogger("kvcellar.server").info(json.dumps(line))
