"""A session with the server in which every route is asked once: the examples of its reference.

tests/server/test_http_reference.py has the session against a server, and holds what it is answered
to the recorded answers; tools/write_http_docs.py records them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

LONGEST_TEXT = 72
MOST_ITEMS = 2
MOST_LINES = 12
"""What is shown of an answer."""

HELLO = [{"role": "user", "content": "def add(a, b):"}]
SHORT = {"max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Example:
    """One request: ``{names}`` in it stand for what earlier answers had under those names."""

    method: str
    route: str
    path: str
    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    keep: str = ""
    frames: int = 0
    beside: tuple[str, Any] | None = None

    @property
    def name(self) -> str:
        """Method and route, as the OpenAPI document has them."""
        return f"{self.method} {self.route}"

    @property
    def key(self) -> str:
        """Method and path, which no other example has."""
        return f"{self.method} {self.path}"


def example(route: str, body: Any = None, **more: Any) -> Example:
    """Return an example of a route that is asked at its own path, or at ``at``."""
    method, _, path = route.partition(" ")
    return Example(method, path, more.pop("at", path), body, **more)


def of_agent(verb: str, body: Any = None, name: str = "poet", **more: Any) -> Example:
    """Return an example of a verb of agents."""
    method, _, rest = verb.partition(" ")
    route = f"{method} /v1/agents/{{agent_id}}{rest}"
    return example(route, body, at=f"/v1/agents/{name}{rest}", **more)


def refused(route: str, body: Any = None, **more: Any) -> Example:
    """Return an example of a route that is there to say no."""
    return example(route, body, status=400, **more)


ITEM = {"type": "message", "role": "user", "content": "Hello."}
TALK = "/v1/conversations/{conversation_id}"
ONE = f"{TALK}/items/{{item_id}}"
RESPONSE = "/v1/responses/{response_id}"
REST = "{rest}"

EXAMPLES = (
    example("GET /health"),
    example("GET /v1/pictures/{name}", at="/v1/pictures/0123456789abcdef0123", status=404),
    example("GET /v1/models"),
    example("GET /v1/models/{name}", at="/v1/models/demo"),
    example("POST /v1/chat/completions", {"model": "demo", "messages": HELLO, **SHORT}),
    example("GET /ready"),
    example("POST /v1/completions", {"model": "demo", "prompt": "import ", **SHORT}),
    example(
        "POST /v1/responses",
        {"model": "demo", "input": "def add(a, b):", "max_output_tokens": 8, "temperature": 0},
        keep="response_id",
    ),
    example("POST /v1/responses/input_tokens", {"model": "demo", "input": "def add(a, b):"}),
    example("POST /v1/responses/compact", {"model": "demo", "input": "def add(a, b):"}),
    example(f"GET {RESPONSE}"),
    example(f"GET {RESPONSE}/input_items"),
    example(f"POST {RESPONSE}/cancel", status=400),
    example(f"DELETE {RESPONSE}"),
    example(
        "POST /v1/conversations",
        {"items": [ITEM], "metadata": {"topic": "sums"}},
        keep="conversation_id",
    ),
    example(f"GET {TALK}"),
    example(f"POST {TALK}", {"metadata": {"topic": "more"}}),
    example(f"GET {TALK}/items"),
    example(
        f"POST {TALK}/items", {"items": [{**ITEM, "content": "Another."}]}, keep="item_id data.0.id"
    ),
    example(f"GET {ONE}"),
    example(f"DELETE {ONE}"),
    example(f"DELETE {TALK}"),
    example("POST /v1/embeddings", {"model": "demo", "input": ["one text", "another"]}),
    example("POST /v1/messages", {"model": "demo", "messages": HELLO, **SHORT}),
    example("POST /v1/messages/count_tokens", {"model": "demo", "messages": HELLO}),
    example("POST /v1/agents", {"id": "poet", "system": "You write verse."}, status=201),
    of_agent("POST /generate", {"text": "A line about rain.", **SHORT}),
    of_agent("POST /fork", {"id": "twin"}, status=201),
    of_agent("POST /generate", {"text": "Another one.", "stream": True, **SHORT}, name="twin"),
    of_agent("POST /rename", {"title": "Verses about rain"}),
    example("GET /v1/agents"),
    of_agent("GET "),
    of_agent("GET /why"),
    of_agent("POST /rewind", {"turn": -1}),
    of_agent("POST /undo"),
    of_agent("POST /pause"),
    of_agent("POST /resume"),
    of_agent("POST /wait"),
    of_agent(
        "GET /live",
        frames=3,
        beside=("/v1/agents/poet/generate", {"text": "Now the sun.", "max_tokens": 48}),
    ),
    of_agent("POST /stop"),
    of_agent("GET /export", keep="file"),
    example(
        "POST /v1/agents/import",
        at="/v1/agents/import?id=guest",
        body="{file}",
        status=201,
        headers={"Content-Type": "application/octet-stream"},
    ),
    of_agent("POST /finish", name="guest"),
    of_agent("POST /keep", name="twin"),
    of_agent("DELETE ", name="twin"),
    example("GET /v1/cache"),
    example("GET /events", frames=1),
    example("GET /metrics"),
    example("POST /tokenize", {"content": "def add(a, b):", "with_pieces": True}),
    example("POST /detokenize", {"tokens": [87, 110, 106]}),
    example("GET /props"),
    refused("POST /props", {}),
    example("GET /slots"),
    refused("POST /slots/{slot_id}", {}, at="/slots/0?action=save"),
    refused("POST /infill", {"input_prefix": "def add(", "input_suffix": "return a + b"}),
    example("GET /api/version"),
    example("GET /api/tags"),
    example("GET /api/ps"),
    example("GET /api/v0/models"),
    example("GET /api/v0/models/{name}", at="/api/v0/models/demo"),
    example("POST /api/show", {"model": "demo"}),
    example("POST /api/pull", {"model": "demo", "stream": False}),
    example(
        "POST /api/chat",
        {"model": "demo", "messages": HELLO, "stream": False, "options": {"num_predict": 8}},
    ),
    example(
        "POST /api/generate",
        {"model": "demo", "prompt": "import ", "raw": True, "options": {"num_predict": 4}},
        frames=2,
    ),
    example("POST /api/embed", {"model": "demo", "input": "one text"}),
    example("POST /api/embeddings", {"model": "demo", "prompt": "one text"}),
    refused("POST /api/create", {"model": "mine", "from": "demo"}),
    refused("POST /api/copy", {"source": "demo", "destination": "mine"}),
    refused("POST /api/push", {"model": "demo"}),
    refused("DELETE /api/delete", {"model": "demo"}),
    refused(f"POST /v1/batches{REST}", {}, at="/v1/batches"),
    refused(f"GET /v1/batches{REST}", at="/v1/batches"),
    refused(f"POST /v1/messages/batches{REST}", {}, at="/v1/messages/batches"),
    refused(f"GET /v1/messages/batches{REST}", at="/v1/messages/batches"),
    refused(f"DELETE /v1/messages/batches{REST}", at="/v1/messages/batches/batch_1"),
)
"""In the order in which they are sent."""


@dataclass(frozen=True)
class Answer:
    """One recorded answer: to which example, at which path, its status, and what is shown."""

    key: str
    path: str
    status: int
    text: str


def session(url: str) -> Iterator[tuple[Example, Answer]]:
    """Yield every example with the answer that a server gives to it.

    Args:
        url: of a server with the bundled model as ``demo`` and an empty store.
    """
    kept: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=60) as client:
        for one in EXAMPLES:
            path = re.sub(r"\{(\w+)\}", lambda name: kept[name[1]], one.path)
            status, text, raw = ask(client, one, path, kept)
            if one.keep:
                name, _, where = one.keep.partition(" ")
                kept[name] = raw if name == "file" else value_at(json.loads(raw), where or "id")
            yield one, Answer(one.key, path, status, text)


def ask(
    client: httpx.Client, one: Example, path: str, kept: dict[str, Any]
) -> tuple[int, str, bytes]:
    """Return the status, what is shown of the answer, and all of it where it has an end."""
    content = kept["file"] if one.body == "{file}" else None
    body = None if content is not None else one.body
    with client.stream(
        one.method, path, json=body, content=content, headers=one.headers
    ) as response:
        if one.frames:
            text = "\n\n".join(first_frames(client, one, response))
            return response.status_code, text, b""
        raw = response.read()
    return response.status_code, shown(response), raw


def first_frames(client: httpx.Client, one: Example, response: httpx.Response) -> list[str]:
    """Return the first pieces of a stream, while another request makes it say something."""
    other = threading.Thread(target=lambda: one.beside and post(client, *one.beside))
    other.start()
    lines = response.iter_lines()
    frames = [frame for frame, _ in zip(frames_of(lines), range(one.frames), strict=False)]
    if one.beside and "event: end" not in frames[-1]:
        any(line == "event: end" for line in lines)  # read on until the turn is over
    other.join()
    return frames


def frames_of(lines: Iterator[str]) -> Iterator[str]:
    """Yield server-sent events, or lines of JSON, as they are shown."""
    frame: list[str] = []
    for line in lines:
        frame += [short_line(line)] if line else []
        if frame and (not line or line.startswith("{")):
            yield "\n".join(frame)
            frame = []


def post(client: httpx.Client, path: str, body: Any) -> None:
    """Send a request whose answer nobody reads."""
    client.post(path, json=body)


def value_at(value: Any, path: str) -> Any:
    """Return what a value has at a path of keys and indexes, as ``data.0.id``."""
    for key in path.split("."):
        value = value[int(key) if key.isdigit() else key]
    return value


def shown(response: httpx.Response) -> str:
    """Return an answer as the reference shows it: long texts and lists are cut."""
    kind = response.headers.get("content-type", "")
    if "event-stream" in kind or "ndjson" in kind:
        return cut_lines([short_line(line) for line in response.text.strip().split("\n")])
    if "json" in kind:
        return json.dumps(short(response.json()), indent=2, ensure_ascii=False)
    return cut_lines(response.text.splitlines()) if kind.startswith("text/") else ""


def cut_lines(lines: list[str]) -> str:
    """Return the first lines, and a mark where there are more."""
    return "\n".join([*lines[:MOST_LINES], *["…"][: len(lines) > MOST_LINES]])


def short_line(line: str) -> str:
    """Return a line of a stream, with the JSON in it cut."""
    mark, brace, rest = line.partition("{")
    if not brace:
        return line
    return mark + json.dumps(short(json.loads(brace + rest)), ensure_ascii=False)


def short(value: Any) -> Any:
    """Return a JSON value with its long texts, ids and lists cut."""
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    if isinstance(value, list):
        more = ["…"] if len(value) > MOST_ITEMS else []
        return [short(inner) for inner in value[:MOST_ITEMS]] + more
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str):
        value = re.sub(r"([0-9a-f]{6})[0-9a-f]{10,}", r"\1…", value)
        return value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}…"
    return value


def shape(text: str) -> Any:
    """Return what a shown answer is made of: keys, and types in place of values."""
    try:
        return kinds(json.loads(text))
    except ValueError:
        return sorted({re.split(r"[:{ ]", line)[0] for line in text.splitlines() if line})


def kinds(value: Any) -> Any:
    """Return a JSON value with types in place of values, of a list those of its first item.

    Keys that are made-up names are one.
    """
    if isinstance(value, dict):
        return {re.sub("[0-9a-f]{8,}", "…", key): kinds(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [kinds(inner) for inner in value[:1]]
    return "number" if isinstance(value, int | float) else type(value).__name__


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two shapes differ; what is null or empty in one differs nowhere."""
    if "NoneType" in (one, other) or {} in (one, other):
        return
    if isinstance(one, dict) and isinstance(other, dict):
        yield from (f"{path}.{key}" for key in sorted(one.keys() ^ other.keys()))
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        for a, b in zip(one, other, strict=False):
            yield from differences(a, b, f"{path}[]")
    elif one != other:
        yield f"{path}: {one} is not {other}"
