"""Whatever the OpenAPI document allows, and what it does not, is answered and never breaks it."""

from __future__ import annotations

import contextlib
import os

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.server.live import load_demo, serving

pytestmark = pytest.mark.filterwarnings("ignore")

ENDLESS = "/events"
N_EXAMPLES = int(os.environ.get("KVCELLAR_FUZZ", "6"))
"""Of each route, right ones and as many wrong ones."""


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A cache of few cells: whatever is asked for, the answer is short."""
    with serving(tmp_path_factory.mktemp("fuzzed"), load=load_demo(64), max_tokens=4) as live:
        live.post("/v1/agents", {"id": "somebody"})
        yield live


def test_every_route_answers_whatever_comes(fuzzed):
    document = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json").exclude(path=ENDLESS)
    n_routes = 0
    for found in document.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=N_EXAMPLES,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
                database=None,
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def answers(case):
                response = case.call(timeout=60)
                said = f"{case.method} {case.path}: {response.status_code} {response.text[:500]}"
                # 507: it does not fit in the few cells; 503: nothing is ready. Both with numbers.
                assert response.status_code < 500 or response.status_code in (503, 507), said
                if response.status_code >= 400 and case.path != "/ready":
                    error = response.json()["error"]
                    assert error["message"] and error["type"], said

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong without parameters
                answers()
        n_routes += 1
    assert n_routes >= 25


def test_nothing_is_left_behind_by_all_of_it(fuzzed):
    fuzzed.until(fuzzed.is_still, "the end of all requests")


def test_the_document_has_every_route(fuzzed):
    paths = fuzzed.get("/openapi.json")["paths"]
    verbs = ("generate", "fork", "rewind", "keep", "pause", "resume", "export", "why")
    assert {
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/agents",
        "/v1/agents/import",
        "/v1/cache",
        "/health",
        "/ready",
        "/metrics",
        *(f"/v1/agents/{{agent_id}}/{verb}" for verb in verbs),
    } <= paths.keys()
