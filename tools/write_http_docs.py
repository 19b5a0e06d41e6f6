#!/usr/bin/env python3
"""Write docs/http-reference.md from the server's OpenAPI document and a recorded session.

python tools/write_http_docs.py            write it, with the answers that are recorded
python tools/write_http_docs.py --record   have the session of http_examples.py again, then write it
python tools/write_http_docs.py --check    fail where it is not what would be written
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from http_examples import EXAMPLES, Answer, Example, differences, session, shape

from kvcellar.server.app import create_api

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "http-reference.md"
RECORDED = ROOT / "tools" / "http_answers.json"

INTRO = """\
# HTTP reference

<!-- Written by tools/write_http_docs.py from the server's own OpenAPI document; do not edit. -->
<!-- run by tests/server/test_http_reference.py -->

Every route, what it takes, and one request with its answer. The requests are one session with the
bundled model, in which ids come from earlier answers; a test has the session again. Long texts
and lists are cut here (`…`), and what `demo` writes means little. [HTTP](http.md) says what the
routes do beyond their protocols, how answers end, who shares what, and what is refused. A running
server has the same as `/openapi.json`.

Where a server wants a key, it comes as `Authorization: Bearer KEY` or `x-api-key: KEY`. Errors
have a status, a message that says what to do, and a code, in the form of the route's protocol;
the common form is `{"error": {"message": "…", "type": "…", "code": "…"}}`.
"""

GROUPS = {
    "Agents": "Histories with names, which fork, go back, sleep and wake.",
    "OpenAI": "OpenAI's chat, responses, conversations, completions and embeddings.",
    "Anthropic": "Anthropic's messages.",
    "Ollama": "Ollama's API; see [HTTP](http.md#ollamas-api).",
    "Lookup": "What clients of llama.cpp and vLLM look up, and filling in.",
    "Pictures": "Pictures of conversations; see [HTTP](http.md#pictures).",
    "Observability": "Whether the server is well, and whose every cell is.",
}
"""What the routes' tags stand for, in their order here."""


def page() -> str:
    """Return the whole page."""
    document = create_api(SimpleNamespace()).openapi()  # type: ignore[arg-type]
    schemas = document["components"]["schemas"]
    answers = recorded()
    routes = [
        (method.upper(), path, route)
        for path, methods in document["paths"].items()
        for method, route in methods.items()
    ]
    parts = [INTRO, headers_of(routes)]
    for group, about in GROUPS.items():
        parts.append(f"## {group}\n\n{about}\n")
        for method, path, route in routes:
            if route["tags"][0] == group:
                parts += section(f"{method} {path}", route, answers, schemas)
    parts += bodies(routes, schemas)
    return "\n".join(parts)


def section(name: str, route: Any, answers: dict[str, Answer], schemas: Any) -> Iterator[str]:
    """Yield a route: what it does, what it takes, and its examples."""
    yield f"### `{name}`\n"
    yield plain(route["description"]) + "\n"
    queries = [one for one in route.get("parameters", []) if one["in"] == "query"]
    if queries:
        yield table("Query", ((one["name"], one["schema"], one["required"]) for one in queries))
    body = body_of(route)
    if body:
        yield f"Takes a [{body}](#{body.lower()})" + fields_in_short(schemas[body]) + "\n"
    for example in EXAMPLES:
        if example.name == name:
            answer = answers[example.key]
            yield f"```sh\n{command(example, answer)}\n```\n"
            yield shown(answer)


def body_of(route: Any) -> str | None:
    """Return the name of the schema of a route's body in JSON, if it takes one."""
    body = json.dumps(route.get("requestBody", {}))
    found = re.search(r"#/components/schemas/(\w+)", body)
    return found[1] if found else None


def fields_in_short(schema: Any) -> str:
    """Return how many fields a body has, and which it must have."""
    must = [f"`{name}`" for name in schema.get("required", [])]
    return f", which has to have {' and '.join(must)}." if must else "."


def command(example: Example, answer: Answer) -> str:
    """Return an example as a command of curl."""
    words = ["curl"]
    if example.method not in ("GET", "POST") or (example.method == "POST" and not example.body):
        words.append(f"-X {example.method}")
    words.append(shlex.quote(f"http://127.0.0.1:8642{answer.path}"))
    if example.keep == "file":
        words.append("-o poet.kvcellar")
    if example.body == "{file}":
        words.append("-H 'Content-Type: application/octet-stream' --data-binary @poet.kvcellar")
    elif example.body:
        words.append(f"-H 'Content-Type: application/json' -d '{in_quotes(example.body)}'")
    line = " ".join(words)
    is_short = max(map(len, line.splitlines())) <= 100
    return line if is_short else " \\\n  ".join([" ".join(words[:-1]), words[-1]])


def in_quotes(body: Any) -> str:
    """Return a body as JSON for single quotes, with a line for each key where it is long."""
    pairs = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()]
    line = "{" + ", ".join(pairs) + "}"
    return line if len(line) <= 60 else "{\n  " + ",\n  ".join(pairs) + "}"


def shown(answer: Answer) -> str:
    """Return an answer as a block, with its status where that is not 200."""
    status = "" if answer.status == 200 else f"{answer.status}:\n\n"
    if not answer.text:
        return "A file.\n"
    kind = "json" if answer.text.startswith("{\n") else "text"
    return f"{status}```{kind}\n{answer.text}\n```\n"


def headers_of(routes: list[tuple[str, str, Any]]) -> str:
    """Return the headers that routes take, each once."""
    found: dict[str, Any] = {}
    for _, _, route in routes:
        for one in route.get("parameters", []):
            if one["in"] == "header":
                found[one["name"]] = one["schema"]
    return table("Header", ((name, schema, False) for name, schema in found.items()))


def bodies(routes: list[tuple[str, str, Any]], schemas: Any) -> Iterator[str]:
    """Yield every schema that a body has, and those that they are made of, by their names."""
    wanted = [body for _, _, route in routes if (body := body_of(route))]
    for name in wanted:
        inner = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schemas[name]))
        wanted += [other for other in dict.fromkeys(inner) if other not in wanted]
    yield "## Bodies\n"
    yield "Fields may be left out unless they are needed. Others are refused or named as ignored.\n"
    for name in sorted(set(wanted)):
        schema = schemas[name]
        must = schema.get("required", [])
        yield f"### {name}\n"
        yield plain(schema.get("description", "")) + "\n"
        fields = schema.get("properties", {})
        if fields:
            yield table("Field", ((key, one, key in must) for key, one in fields.items()))


def table(heading: str, rows: Any) -> str:
    """Return names with their types and what they are for."""
    lines = [f"| {heading} | type | what it is |", "| --- | --- | --- |"]
    for name, schema, is_needed in rows:
        about = plain(description(schema)) or ""
        default = schema.get("default")
        if default not in (None, False, []):
            about = f"{about} Default: `{json.dumps(default)}`.".strip()
        needed = " (needed)" if is_needed else ""
        lines.append(f"| `{name}`{needed} | {kind(schema)} | {about} |".replace("  ", " "))
    return "\n".join(lines) + "\n"


def description(schema: Any) -> str:
    """Return what a schema says of itself, or of what it may be."""
    inner = [description(one) for one in schema.get("anyOf", [])]
    return schema.get("description") or next((text for text in inner if text), "")


def kind(schema: Any) -> str:
    """Return the type of a value in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        found = [kind(one) for one in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(one for one in found if one != "null"))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum") or [schema["const"]]
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    if schema.get("type") == "array":
        return f"list of {kind(schema.get('items', {}))}"
    return str(schema.get("type", "any")) + bounds(schema)


def bounds(schema: Any) -> str:
    """Return between which values a number may be."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None or abs(high) > 2**30:
        return f" from {low:g}" if low is not None and abs(low) < 2**30 else ""
    return f", {low:g} to {high:g}"


def plain(text: str) -> str:
    """Return a docstring as Markdown of one paragraph, without what it says of errors."""
    text = re.split(r"\n\s*(?:Raises|Args|Returns):", text)[0]
    return " ".join(re.sub(r"``([^`]+)``", r"`\1`", text).split()).replace("|", "\\|")


def recorded() -> dict[str, Answer]:
    """Return the recorded answers, by the keys of their examples."""
    answers = [Answer(**one) for one in json.loads(RECORDED.read_text(encoding="utf-8"))]
    return {answer.key: answer for answer in answers}


def record() -> None:
    """Have the session with a server of the bundled model, and write down what it answers.

    An answer that is made of the same as the recorded one stays what it was.
    """
    sys.path.insert(0, str(ROOT))
    from tests.server.live import serving

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as live:
        answers = [answer for _, answer in session(live.url)]
    known = recorded() if RECORDED.exists() else {}
    kept = [
        was
        if (was := known.get(answer.key))
        and was.status == answer.status
        and not list(differences(shape(was.text), shape(answer.text)))
        else answer
        for answer in answers
    ]
    text = json.dumps([dataclasses.asdict(one) for one in kept], indent=1, ensure_ascii=False)
    RECORDED.write_text(text.replace(live.url, "http://127.0.0.1:8642") + "\n", encoding="utf-8")


def main() -> int:
    """Write or check the page."""
    if "--record" in sys.argv[1:]:
        record()
    want = page()
    if "--check" in sys.argv[1:]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == want:
            return 0
        print(f"{PAGE} is stale; run: python tools/write_http_docs.py", file=sys.stderr)
        return 1
    PAGE.write_text(want, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
