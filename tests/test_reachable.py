"""Every setting can be set by somebody: an option of a command, a field of a route, or a program.

Nothing here lists what is settable. All options of the commands are given, all fields of the routes
are sent, and the page for programs is run; whoever makes a setting meanwhile is written down, and a
field that nobody has given another value than its default is unreachable.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from kvcellar.agents.planning import Turn
from kvcellar.cache_config import CacheConfig
from kvcellar.cli import app
from kvcellar.cli.common.groups import CacheOptions, SamplingOptions
from kvcellar.cli.serve.serving import EngineOptions
from kvcellar.engine import EngineConfig, Request, SamplingParams
from kvcellar.models import LoadOptions
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.server import run as server_run
from kvcellar.server.app import create_api
from kvcellar.server.schemas.agents import GenerateRequest
from kvcellar.server.schemas.base import Body
from kvcellar.server.schemas.openai import ChatRequest, CompletionRequest
from tests.models.adapters import write_adapter
from tests.server.live import serving

SETTINGS = (EngineConfig, CacheConfig, LoadOptions, SamplingParams, Request, Turn)

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


class Seen:
    """What fields of the settings were given another value than their default."""

    def __init__(self) -> None:
        self.values: dict[tuple[type, str], list[Any]] = {}

    def saw(self, made: Any) -> None:
        for one in fields(made):
            value = getattr(made, one.name)
            self.values.setdefault((type(made), one.name), []).append(value)

    def is_set(self, kind: type, one: Any) -> bool:
        values = self.values.get((kind, one.name), [])
        if one.default is MISSING and one.default_factory is MISSING:
            return bool(values)
        usual = one.default if one.default is not MISSING else one.default_factory()
        return any(value is not usual and value != usual for value in values)

    def unreachable(self) -> list[str]:
        return [
            f"{kind.__name__}.{one.name}"
            for kind in SETTINGS
            for one in fields(kind)
            if not self.is_set(kind, one)
        ]


@contextmanager
def watched():
    """Write down every setting that is made, from the constructor on."""
    seen = Seen()
    with pytest.MonkeyPatch.context() as patch:
        for kind in SETTINGS:
            made = kind.__init__

            def init(self: Any, *args: Any, made: Any = made, **given: Any) -> None:
                made(self, *args, **given)
                seen.saw(self)

            patch.setattr(kind, "__init__", init)
        yield seen


# Commands -----------------------------------------------------------------------------------------

NUMBERS = {int: 3, float: 0.5}

VALUES = {
    "kv_dtype": "bfloat16",
    "dtype": "float32",
    "weights": "none",
    "device": "cpu",
    "cache": "paged",
    "layout": "block_first",
    "memory": "3GB",
    "snapshots": "100MB",
    "policy": "prefill-first",
    "index": "hashed",
    "index_block": 32,
    "block_size": 8,
    "capacity": 512,
    "stop": "end",
    "min_p": 0.5,
    "top_p": 0.5,
}
"""What options are given that take no number of any size."""


def options_of(*path: str) -> dict[str, Any]:
    """The options of a command, by the names of its parameters."""
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return {one.name: one for one in command.params if one.param_type_name == "option"}


def arguments(path: tuple[str, ...], *groups: type, without: tuple[str, ...] = ()) -> list[str]:
    """Every option of some groups, with a value."""
    options = options_of(*path)
    said: list[str] = []
    for group in groups:
        for name, hint in get_type_hints(group).items():
            if name in options and name not in without:
                types = {hint, *get_args(hint)}
                if bool in types:
                    said.append(options[name].opts[0])
                    continue
                value = VALUES.get(name, next((v for t, v in NUMBERS.items() if t in types), None))
                assert value is not None, f"give {options[name].opts[0]} a value in VALUES"
                said += [options[name].opts[0], str(value)]
    return said


def invoked(*command: str, said: str | None = None) -> None:
    result = CliRunner().invoke(app, list(command), input=said)
    assert result.exit_code == 0, (command, result.output, result.exception)


def run_commands(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Serve a model with every option of its cache and engine, and take an agent's turn."""
    template = folder / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    patch.setattr(server_run, "log_to_stderr", lambda: None)
    patch.setattr(server_run, "serve", lambda *made, **_: load_first(made[2]))
    store = ("--store", str(folder / "store"), "--chat-template", str(template))
    unloadable = ("backend", "chat_template", "adapter", "tp")  # these have their own tests
    adapter = write_adapter(folder / "tone", DEMO_FOLDER)
    serve = arguments(("serve",), CacheOptions, EngineOptions, without=unloadable)
    invoked(
        "serve",
        f"demo={DEMO_FOLDER}",
        *store,
        "--speculate",
        "ngram",
        *serve,
        "--adapter",
        str(adapter),
    )
    CliRunner().invoke(app, ["serve", "/nowhere", "--backend", "mlx"])  # refused, with its options
    CliRunner().invoke(app, ["serve", "/nowhere", "--tp", "3"])
    path = ("agents", "generate")
    said = arguments(path, CacheOptions, SamplingOptions, without=(*unloadable, "device"))
    invoked(*path, "a", "one", "--create", *store, *said)


def load_first(make_models: Any) -> None:
    """Load what is served, as its first client would have it."""

    async def load() -> None:
        served = make_models()
        try:
            async with served.registry.use(served.default):
                pass
        finally:
            served.registry.close()

    asyncio.run(load())


# Routes -------------------------------------------------------------------------------------------

SENT = {
    "logit_bias": {"7": -1.0},
    "stop": ["end"],
    "stop_token_ids": [7],
    "messages": [{"role": "user", "content": "One"}],
    "guided_regex": "[a-z]+",
    "logprobs": 1,
    "top_p": 0.5,
    "n": None,
    "best_of": None,
    "text": "One",
    "tokens": [5, 6],
    "prompt": "One",
    "role": "tool",
}
"""What fields of requests are sent that take no number of any size."""

NOT_SENT = ("stream", "parallel_tool_calls", "continue_final_message")


def body_of(kind: type[Body]) -> dict[str, Any]:
    """A request with every setting of one number or switch, as clients send it."""
    body: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        types = {*get_args(field.annotation), field.annotation}
        numbers = {int: 3, float: 0.5, bool: True}
        value = SENT.get(name, next((numbers[t] for t in numbers if t in types), None))
        if value is not None and name not in NOT_SENT:
            body[name] = value
    return body


def send_requests(live: Any) -> None:
    """Ask each route that answers, with all that it can be asked."""
    live.post("/v1/agents", {"id": "a"})
    turn = body_of(GenerateRequest)
    tokens = {key: value for key, value in turn.items() if key != "text"}
    live.post("/v1/agents/a/generate", {**turn, "tokens": None, "go_on": False})
    follows = live.get("/v1/agents/a")["history_digest"]
    live.post("/v1/agents/a/generate", {"text": "Go", "follows": follows, "max_tokens": 2})
    live.post("/v1/agents/a/generate", {**tokens, "role": "user", "go_on": False})
    chat = body_of(ChatRequest)
    live.post("/v1/chat/completions", {**chat, "logprobs": True, "max_completion_tokens": None})
    said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for _ in range(2):
        live.post(
            "/v1/chat/completions", said, headers={"X-Agent-Id": "b", "X-Agent-Create": "true"}
        )
    live.post("/v1/completions", {**body_of(CompletionRequest), "echo": True, "logprobs": 1})


# Programs -----------------------------------------------------------------------------------------


def run_page() -> None:
    """Run the code of the page for programs, from its first line to its last."""
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    names["session"].__exit__(None, None, None)


def test_every_setting_is_reached_by_a_command_a_route_or_a_program(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    with serving(tmp_path / "served") as live:
        live.post("/v1/completions", {"prompt": "1", "max_tokens": 1})  # loaded by this test's hand
        with watched() as seen:
            send_requests(live)
            run_page()
            with pytest.MonkeyPatch.context() as patch:
                run_commands(tmp_path, patch)
    assert seen.unreachable() == []


def test_every_request_that_is_declared_is_taken_by_a_route(tmp_path):
    with serving(tmp_path) as live:
        schemas = create_api(live.service).openapi()["components"]["schemas"]
    kinds = [Body]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    for kind in kinds:
        if not kind.__subclasses__():
            taken = schemas[kind.__name__]["properties"]
            declared = {field.alias or name for name, field in kind.model_fields.items()}
            assert set(taken) == declared, kind
