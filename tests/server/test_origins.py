"""Pages of other origins: those that are allowed can use the whole API, others nothing."""

from __future__ import annotations

import http.server
import threading
from functools import partial

import pytest
from playwright.sync_api import Error, sync_playwright
from starlette.datastructures import Headers, MutableHeaders

from kvcellar.errors import ConfigError
from kvcellar.server.origins import Origins, checked_origin
from tests.server.live import serving
from tests.server.test_viewer import CHROMIUM, FLAGS

PAGE = "https://good.example"
ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def open_to_one(tmp_path_factory):
    """A server that one page elsewhere may call, with the key."""
    with serving(
        tmp_path_factory.mktemp("origins"), api_key="secret", allowed_origins=(f"{PAGE}:443/",)
    ) as server:
        yield server


def preflight(live, origin, *, method="POST", path="/v1/chat/completions", **more):
    """What a browser asks before it sends what no form could send."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-agent-id",
        "Sec-Fetch-Mode": "cors",
        "Sec-Fetch-Site": "cross-site",
        **more,
    }
    return live.http.options(path, headers=headers)


ALLOWED = {
    "vscode-webview://*": (
        ["vscode-webview://1gnq8d7m2h"],
        ["vscode-webview-resource://1gnq", "https://vscode-webview"],
    ),
    "http://localhost:*": (
        ["http://localhost", "http://localhost:3000"],
        ["https://localhost:3000", "http://localhost.evil.example:80", "http://127.0.0.1:3000"],
    ),
    "https://*.app.example": (
        ["https://one.app.example", "https://a.b.app.example"],
        ["https://app.example", "https://evilapp.example", "https://x.app.example.evil.example"],
    ),
    "tauri://localhost": (["tauri://localhost"], ["tauri://elsewhere"]),
    "app://*": (["app://obsidian.md", "app://-"], ["apps://x"]),
    "localhost": (
        [
            "http://localhost",
            "https://localhost:8443",
            "http://127.0.0.1:5173",
            "http://[::1]:3000",
            "http://tauri.localhost",
            "tauri://localhost",
        ],
        ["http://localhost.evil.example", "http://evil.example:80", "http://192.168.0.2", "null"],
    ),
}


@pytest.mark.parametrize("wish", ALLOWED)
def test_a_wildcard_lets_in_the_pages_that_it_stands_for_and_no_others(wish):
    origins = Origins([wish])
    let_in, kept_out = ALLOWED[wish]
    for origin in (*let_in, *kept_out):
        headers = Headers({"origin": origin, "host": "server.example"})
        assert origins.allow(headers) == (origin in let_in), origin
        answer = MutableHeaders()
        origins.mark(answer, headers)
        assert answer.get("access-control-allow-origin") == (origin if origin in let_in else None)
        assert answer["vary"] == "Origin"


@pytest.mark.parametrize(
    "wish",
    ["*", "null", "http://*", "https://*:443", "https://*.example", "https://app.*", "http://l*:1"],
)
def test_a_wildcard_that_would_let_in_strangers_is_refused(wish):
    with pytest.raises(ConfigError, match="no origin"):
        Origins([wish])


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_a_preflight_of_an_allowed_page_lets_it_through_without_a_key(open_to_one, method):
    told = preflight(open_to_one, PAGE, method=method)
    assert told.status_code == 204 and not told.content
    assert told.headers["access-control-allow-origin"] == PAGE
    assert method in told.headers["access-control-allow-methods"].split(", ")
    allowed = told.headers["access-control-allow-headers"]
    assert allowed == "authorization,content-type,x-agent-id"
    assert "origin" in told.headers["vary"].lower()
    assert int(told.headers["access-control-max-age"]) > 0
    assert "access-control-allow-credentials" not in told.headers
    more = {"Access-Control-Request-Private-Network": "true"}
    near = preflight(open_to_one, PAGE, **more)
    assert near.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://good.example", f"{PAGE}:444", f"{PAGE}.x"]
)
def test_a_preflight_of_another_page_is_refused(open_to_one, origin):
    told = preflight(open_to_one, origin)
    assert told.status_code == 403
    assert not any(name.startswith("access-control") for name in told.headers)


def test_a_preflight_for_a_host_that_was_rebound_is_refused(open_to_one):
    told = preflight(open_to_one, PAGE, Host="evil.example")
    assert told.status_code == 403 and told.json()["error"]["code"] == "host_not_allowed"


def test_every_answer_to_an_allowed_page_can_be_read_by_it(open_to_one):
    key = {"Authorization": "Bearer secret", "Origin": PAGE}
    post = partial(open_to_one.http.post, headers={**key, "Content-Type": "application/json"})
    answers = {
        "an answer": (200, post("/v1/chat/completions", json=ASK)),
        "a stream": (200, post("/v1/chat/completions", json={**ASK, "stream": True})),
        "wrong JSON": (400, post("/v1/chat/completions", content=b"{")),
        "a wrong field": (400, post("/v1/messages", json={**ASK, "messages": 5})),
        "no key": (401, open_to_one.http.get("/v1/models", headers={"Origin": PAGE})),
        "no route": (404, post("/v1/nothing")),
        "a wrong method": (405, open_to_one.http.put("/v1/models", headers=key)),
        "a large body": (413, post("/v1/completions", content=iter([bytes(33 << 20)]))),
        "the page": (200, open_to_one.http.get("/", headers=key)),
    }
    for what, (status, answer) in answers.items():
        assert answer.status_code == status, what
        assert answer.headers["access-control-allow-origin"] == PAGE, what
        assert "origin" in answer.headers["vary"].lower(), what
        assert answer.headers["access-control-expose-headers"] == "*", what
        assert answer.headers["x-request-id"], what


def test_an_answer_to_nobody_in_particular_is_not_kept_for_pages(open_to_one):
    told = open_to_one.http.get("/health")
    assert "origin" in told.headers["vary"].lower()
    assert "access-control-allow-origin" not in told.headers


def test_a_server_that_allows_no_page_says_nothing_of_origins(live):
    told = live.http.get("/health", headers={"Origin": live.url})
    assert told.status_code == 200 and "vary" not in told.headers
    assert preflight(live, PAGE).status_code == 403


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("HTTPS://Good.Example", "https://good.example"),
        ("https://good.example:443/", "https://good.example"),
        ("http://good.example:443", "http://good.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_an_origin_is_kept_as_browsers_send_it(given, kept):
    assert checked_origin(given) == kept


SCRIPT = """
async ([url]) => {
  const key = {"Authorization": "Bearer secret", "Content-Type": "application/json"};
  const ask = {messages: [{role: "user", content: "x"}], max_tokens: 2};
  const post = (more) => fetch(url + "/v1/chat/completions",
    {method: "POST", headers: key, body: JSON.stringify({...ask, ...more})});
  const whole = await post({});
  const streamed = await post({stream: true});
  const refused = await post({max_tokens: "many"});
  const gone = await fetch(url + "/v1/agents/nobody", {method: "DELETE", headers: key});
  return {
    whole: whole.status, agent: whole.headers.get("x-agent-id"),
    id: refused.headers.get("x-request-id"), refused: (await refused.json()).error.message,
    frames: (await streamed.text()).trim().endsWith("data: [DONE]"), gone: gone.status,
  };
}
"""


class _Blank(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>An application</title>")

    def log_message(self, *_):
        pass


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_lets_an_allowed_page_use_the_api_and_no_other(tmp_path):
    """Two pages on ports of their own; one of them is allowed."""
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blank) as good,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Blank) as other,
    ):
        pages = [f"http://localhost:{server.server_port}" for server in (good, other)]
        for server in (good, other):
            threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with (
                serving(tmp_path, api_key="secret", allowed_origins=(pages[0],)) as live,
                sync_playwright() as playwright,
            ):
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                try:
                    page = browser.new_page()
                    page.goto(pages[0])
                    told = page.evaluate(SCRIPT, [live.url])
                    page.goto(pages[1])
                    with pytest.raises(Error, match="Failed to fetch"):
                        page.evaluate(SCRIPT, [live.url])
                finally:
                    browser.close()
        finally:
            for server in (good, other):
                server.shutdown()
    assert told["whole"] == 200 and told["agent"] and told["frames"]
    assert told["id"] and "max_tokens" in told["refused"] and told["gone"] == 404
