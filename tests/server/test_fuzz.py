"""Whatever the OpenAPI document allows, and what it does not, is answered and never breaks it."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.server.live import load_demo, serving

pytestmark = pytest.mark.filterwarnings("ignore")

ENDLESS = "/events"


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    """A cache of few cells: whatever is asked for, the answer is short."""
    with serving(tmp_path_factory.mktemp("fuzzed"), load=load_demo(64), max_tokens=4) as live:
        live.post("/v1/agents", {"id": "somebody"})
        yield live


@pytest.fixture(scope="module")
def api(fuzzed):
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json").exclude(path=ENDLESS)


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_every_route_answers_whatever_comes(case, fuzzed):
    response = case.call(timeout=60)
    # 507 says with numbers that something does not fit in the few cells; 503 that nothing is ready.
    assert response.status_code < 500 or response.status_code in (503, 507), response.text
    if response.status_code >= 400 and case.path != "/ready":
        error = response.json()["error"]
        assert error["message"] and error["type"]


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
