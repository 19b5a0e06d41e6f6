"""docs/http-reference.md has every route, and what it shows as answers is what a server answers."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import http_examples  # noqa: E402
import write_http_docs  # noqa: E402

from kvcellar.server.app import create_api  # noqa: E402
from tests.server.live import serving  # noqa: E402


def test_the_page_is_what_would_be_written():
    assert write_http_docs.PAGE.read_text() == write_http_docs.page(), (
        "run: python tools/write_http_docs.py"
    )


def test_every_route_has_an_example():
    paths = create_api(None).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, of_path in paths.items() for method in of_path}
    assert routes == {example.name for example in http_examples.EXAMPLES}


def test_each_answer_is_made_of_what_the_page_shows(tmp_path):
    recorded = write_http_docs.recorded()
    with serving(tmp_path) as live:
        for example, answer in http_examples.session(live.url):
            shown = recorded[example.key]
            assert answer.status == example.status == shown.status, answer.text
            assert not differing(answer.text, shown.text), (
                f"{answer.key}: {answer.text}\nrun: python tools/write_http_docs.py --record"
            )


def differing(one: str, other: str) -> list[str]:
    return list(http_examples.differences(http_examples.shape(one), http_examples.shape(other)))


def test_shapes_differ_where_a_key_or_a_type_does():
    assert not differing('{"a": 1, "b": null}', '{"b": "x", "a": 2.5}')
    assert not differing("event: a\ndata: {}", "event: b\ndata: {}")
    assert differing('{"a": 1}', '{"a": "1"}') == [".a: number is not str"]
    assert differing('{"a": 1}', '{"a": 1, "c": 2}') == [".c"]
    assert differing('{"a": [{"b": 1}]}', '{"a": [{"c": 1}]}') == [".a[].b", ".a[].c"]
