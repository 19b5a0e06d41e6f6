"""Options of ``kvcellar serve`` in groups, and the server's configuration that they make."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.budget import parse_size
from kvcellar.cli.common.commands import option
from kvcellar.cli.common.options import in_loading
from kvcellar.cli.common.terminal import print_warning
from kvcellar.errors import ConfigError

if TYPE_CHECKING:
    from kvcellar.agents import MemoryPlan
    from kvcellar.engine import EngineConfig
    from kvcellar.server.config import ServerConfig

_in_trust = partial(option, panel="Trust")
_in_limits = partial(option, panel="Limits")
_in_engine = partial(option, panel="Engine")
_PARALLEL = 8
_PREFILL_BESIDE = 32
"""Tokens of prompts in a step that has decodes too: others' answers go on evenly meanwhile."""

_MIB = 1 << 20
_BODY_SHARE = 64
"""With --memory a body may have one part in so many of it: reading takes several times its size."""


Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[[NAME=]MODEL]...",
        help="What to offer, as `kvcellar generate` takes it; the first is the default. "
        "Without any: `demo`. A name is what clients ask for.",
    ),
]
AnyModel = Annotated[
    bool,
    typer.Option(
        "--any-model", help="Answer with the first model whatever name a client asks for."
    ),
]
Rules = Annotated[
    list[str] | None,
    option(
        "NAME",
        "Let a rule change what clients sent, besides `billing-header`: `header`, `date`, "
        "`reasoning` or `tool-order`; may be given several times. `none`: no rule at all.",
    ),
]
DialectName = Annotated[
    str | None,
    option(
        "NAME",
        "How the models write calls of tools, such as `hermes`, `qwen3-coder` or `mistral`; "
        "a wrong name has all of them listed. By default as each model's chat template shows.",
    ),
]
IdleUnload = Annotated[
    float | None,
    in_loading("SECONDS", "Let go of a model that nobody has used for so long. Default: never."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """Options of where the server listens."""

    host: Annotated[str, option("ADDRESS", "Where to listen.")] = "127.0.0.1"
    port: Annotated[int, option("N", "0: any that is free.")] = 8642

    @property
    def is_local(self) -> bool:
        """True where this machine alone can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def warn(self, config: ServerConfig) -> None:
        """Say who may use a server without a key that other machines reach."""
        if not self.is_local and config.api_key is None:
            print_warning(
                f"{self.host} is reached from other machines, and everybody there may use this "
                f"server; set --api-key"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustOptions:
    """Options of who may use the server, and what it may tell and be told."""

    api_key: Annotated[
        str | None,
        _in_trust(
            "KEY",
            "What clients must bring as a bearer token or `x-api-key`. On the command line "
            "every user of this machine can read it, with `ps`: rather set the variable, or give "
            "--api-key-file.",
            envvar="KVCELLAR_API_KEY",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _in_trust(
            "FILE",
            "A file whose first line is the API key. Each other line is a guest's: guests share "
            "nothing with each other or with you, and see no metrics.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        _in_trust(
            "NAME", "Another name by which this server may be called; may be given several times."
        ),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        _in_trust(
            "URL",
            "A web page's origin that may call it, such as https://app.example, "
            "http://localhost:* or vscode-webview://*; localhost: every page of this machine; "
            "may be given several times.",
        ),
    ] = None
    allow_fetch: Annotated[
        list[str] | None,
        _in_trust(
            "HOST",
            "A host from which pictures may be fetched that requests name by address, such as "
            "images.example or images.example:8080; never one of this machine or of a private "
            "network; may be given several times. Default: none.",
        ),
    ] = None
    log_text: Annotated[
        bool,
        _in_trust(None, "Let prompts into the log.", "--log-text"),
    ] = False
    control_tokens_in_text: Annotated[
        bool,
        _in_trust(
            None,
            "Let text of messages spell the model's control tokens. Whoever writes a message "
            "can then end it, and speak as somebody else.",
            "--control-tokens-in-text",
        ),
    ] = False

    def key(self, context: typer.Context) -> str | None:
        """Return the key that clients must bring, from wherever it was given; None: none is wanted.

        Raises:
            ConfigError: it was given twice, or the file cannot be read.
        """
        is_typed = _is_typed(context, "api_key")
        if self.api_key_file is None:
            if is_typed:
                print_warning(
                    "every user of this machine can read the command line, and so this --api-key; "
                    "rather set KVCELLAR_API_KEY, or give --api-key-file"
                )
            return self.api_key
        if is_typed:
            raise ConfigError("--api-key and --api-key-file were both given; leave one of them out")
        return _keys_in(self.api_key_file)[0]

    def guest_keys(self) -> tuple[str, ...]:
        """Return the keys of guests.

        Raises:
            ConfigError: the file cannot be read.
        """
        return () if self.api_key_file is None else tuple(_keys_in(self.api_key_file)[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of how answers share steps and stored prefixes, for the engine of each model."""

    parallel: Annotated[
        int,
        _in_engine(
            "N",
            "Answers that run at a time; more wait their turn, so that these go on evenly.",
            min=1,
        ),
    ] = _PARALLEL
    policy: Annotated[
        str,
        _in_engine(
            "NAME",
            "How prompts and running answers share steps. mixed: answers go on in every step, "
            "and prompts get what is left; prefill-first: prompts first, which is best for many at "
            "once that nobody watches.",
        ),
    ] = "mixed"
    delay: Annotated[
        float,
        _in_engine(
            "X",
            "With --policy prefill-first: let new prompts gather for X times as long as the "
            "last one took to read, so that they are read together.",
            min=0.0,
        ),
    ] = 0.0
    index: Annotated[
        str,
        _in_engine(
            "NAME",
            "How stored prefixes are found. radix: to the token; hashed: by hashes of whole "
            "blocks; naive: never, so every prompt is read whole.",
        ),
    ] = "radix"
    index_block: Annotated[
        int | None,
        _in_engine(
            "N",
            "Tokens that the index stores and finds together. Default: as many as the cache's "
            "blocks have; 16 for a hashed index over cells.",
            min=1,
        ),
    ] = None

    def config(self) -> EngineConfig:
        """Return the engine's settings.

        Raises:
            ConfigError: a value that cannot work, or two that do not go together.
        """
        from kvcellar.engine import EngineConfig

        return EngineConfig(
            max_num_seqs=self.parallel,
            max_prefill_beside=_PREFILL_BESIDE,
            policy=self.policy,
            delay_factor=self.delay,
            index=self.index,
            block_size=self.index_block,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Options of how much the server does at a time, and how long it waits."""

    max_tokens: Annotated[
        int,
        _in_limits("N", "Of an answer for which the client sets no limit."),
    ] = 1024
    max_requests: Annotated[
        int,
        _in_limits("N", "Answers that wait or run at a time; more are told to come back."),
    ] = 256
    max_body: Annotated[
        str,
        _in_limits("SIZE", "Of one request; where it is not given, at most a 64th of --memory."),
    ] = "32MiB"
    wait: Annotated[
        float,
        _in_limits("SECONDS", "Longest time to wait for room in the cache."),
    ] = 120.0
    remember: Annotated[
        int,
        _in_limits("N", "Conversations without a name that are remembered."),
    ] = 256
    shutdown: Annotated[
        float,
        _in_limits(
            "SECONDS",
            "Time that running answers have when the server is stopped; then they end with "
            "an error. A second signal does not wait.",
        ),
    ] = 5.0

    def body_bytes(self, context: typer.Context, plan: MemoryPlan | None) -> int:
        """Return how long one request may be: as asked, or what memory allows.

        Raises:
            ConfigError: what was asked is no size.
        """
        asked = parse_size(self.max_body)
        if plan is None or _is_given(context, "max_body"):
            return asked
        return min(asked, max(_MIB, plan.limit_bytes // _BODY_SHARE))


def server_config(
    context: typer.Context,
    place: PlaceOptions,
    trust: TrustOptions,
    limits: LimitOptions,
    *,
    plan: MemoryPlan | None,
    takes_any_model: bool,
    rules: list[str],
    dialect: str | None,
) -> ServerConfig:
    """Make the server's configuration of its options.

    Raises:
        ConfigError: a value that cannot work, or two that contradict each other.
    """
    from kvcellar.server.config import ServerConfig

    return ServerConfig(
        host=place.host,
        port=place.port,
        api_key=trust.key(context),
        guest_keys=trust.guest_keys(),
        allowed_hosts=tuple(trust.allow_host or ()),
        allowed_origins=tuple(trust.allow_origin or ()),
        allowed_fetches=tuple(trust.allow_fetch or ()),
        logs_text=trust.log_text,
        takes_any_model=takes_any_model,
        rules=_rules(rules),
        dialect=dialect,
        control_tokens_in_text=trust.control_tokens_in_text,
        max_tokens=limits.max_tokens,
        max_requests=limits.max_requests,
        max_body_bytes=limits.body_bytes(context, plan),
        wait_s=limits.wait,
        max_unnamed=limits.remember,
        shutdown_s=limits.shutdown,
    )


def _rules(names: list[str]) -> tuple[str, ...]:
    """Return the rules that apply: those that always do, and those that were named."""
    from kvcellar.agents import DEFAULT_RULES

    if "none" not in names:
        return (*DEFAULT_RULES, *names)
    if len(names) > 1:
        raise ConfigError(f"--rule none is for no rule, and {', '.join(names)} were given")
    return ()


def _keys_in(file: Path) -> list[str]:
    """Read API keys, one a line; the first is there, if only empty.

    Raises:
        ConfigError: the file cannot be read as text.
    """
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"the API key in {file} cannot be read ({said})") from error
    first, *others = [line.strip() for line in lines] or [""]
    return [first, *filter(None, others)]


def _is_given(context: typer.Context, name: str) -> bool:
    """Return true if an option was given, on the command line or in the config file."""
    source = context.get_parameter_source(name)
    return _is_typed(context, name) or (source is not None and source.name == "DEFAULT_MAP")


def _is_typed(context: typer.Context, name: str) -> bool:
    """Return true if an option was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
