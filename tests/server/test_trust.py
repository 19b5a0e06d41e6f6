"""Who may call, how much they may send, and what they are told when there is no room."""

from __future__ import annotations

import io
import json
import logging
import secrets
import socket
import threading

import httpx
import openai
import pytest
from starlette.datastructures import Headers

from kvcellar.errors import ConfigError, StoreError
from kvcellar.server.commands.presence import held_store
from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError
from kvcellar.server.front.entrance import Entrance
from kvcellar.server.front.guard import log
from kvcellar.server.run import listen, listeners
from tests.server.live import PATIENCE_S, load_demo, serving

ASK = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A server with a key and little room."""
    with serving(
        tmp_path_factory.mktemp("strict"),
        load=load_demo(256),
        api_key="secret",
        allowed_hosts=("box.local",),
        allowed_origins=("https://good.example",),
        max_body_bytes=20_000,
        max_requests=2,
        wait_s=0.2,
    ) as server:
        yield server


def key(value="secret"):
    return {"Authorization": f"Bearer {value}"}


def test_a_key_is_wanted_where_one_is_set(strict):
    assert strict.http.get("/v1/models").status_code == 401
    wrong = strict.http.get("/v1/models", headers=key("other"))
    assert wrong.status_code == 401 and wrong.headers["www-authenticate"] == "Bearer"
    assert strict.http.get("/v1/models", headers=key()).status_code == 200
    assert strict.http.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    assert strict.http.get("/events").status_code == 401
    assert strict.http.get("/metrics").status_code == 401
    for path in ("/", "/health", "/viewer/main.js"):
        assert strict.http.get(path).status_code == 200, "the page asks for the key itself"
    with openai.OpenAI(base_url=f"{strict.url}/v1", api_key="secret", max_retries=0) as client:
        assert client.models.list().data


def test_no_cookie_is_set_and_none_lets_anybody_in(strict):
    cookie = {"Cookie": "secret; api_key=secret; Authorization=Bearer secret; x-api-key=secret"}
    assert strict.http.get("/v1/models", headers=cookie).status_code == 401
    for path in ("/", "/viewer/main.js", "/health", "/v1/models", "/nowhere", "/metrics"):
        for headers in ({}, key(), key("other"), {**key(), **cookie}):
            assert "set-cookie" not in strict.http.get(path, headers=headers).headers, path
    said = strict.http.post("/v1/chat/completions", json=ASK, headers={**key(), **cookie})
    assert said.status_code == 200 and "set-cookie" not in said.headers


KEYS = ServerConfig(api_key="owner", guest_keys=("guest",), folder_token="folder")


def entered(given, path="/v1/models"):
    """The status with which whoever brings this key or token is let in."""
    headers = Headers({"host": "localhost", "authorization": f"Bearer {given}"})
    scope = {"path": path, "method": "GET", "client": ("127.0.0.1", 5)}
    try:
        Entrance(KEYS).check(scope, headers)
    except ApiError as error:
        return error.status
    return 200


def test_nothing_but_a_comparison_in_constant_time_decides_about_a_key(monkeypatch):
    ours = ("owner", "guest", "folder")
    assert [entered(given) for given in (*ours, "other")] == [200, 200, 200, 401]
    compared = []

    def none_is_equal(given, wanted):
        compared.append((given, wanted))
        return False

    monkeypatch.setattr(secrets, "compare_digest", none_is_equal)
    for given in ours:
        compared.clear()
        assert entered(given) == 401
        # With the whole of each, whatever the ones before have said:
        assert sorted(compared) == sorted((given.encode(), one.encode()) for one in ours)
    monkeypatch.setattr(secrets, "compare_digest", lambda given, wanted: True)
    assert entered("other") == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/cache", "/events", "/slots"])
def test_what_shows_all_that_is_done_is_the_owners(path):
    assert [entered(given, path) for given in ("owner", "folder", "guest")] == [200, 200, 403]


def test_a_model_that_a_request_names_is_not_downloaded(strict, monkeypatch):
    fetched = []
    for where in ("hub.from_hub", "hub.pull_quant", "hub.fetch_packaged"):
        monkeypatch.setattr(f"kvcellar.models.files.{where}", lambda *names: fetched.append(names))
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        for model in ("some/model", "some/model:Q4_0", "smollm2"):
            body = {**ASK, "model": model, "prompt": "x", "input": "x"}
            kept = {
                "/v1/completions": ("prompt",),
                "/v1/responses": ("input",),
            }.get(path, ("messages", "max_tokens"))
            body = {name: body[name] for name in ("model", *kept)}
            refused = strict.http.post(path, json=body, headers=key())
            assert refused.status_code == 404, (path, model, refused.text)
    for path in ("/api/chat", "/api/pull", "/v1/models/load"):
        body = {"model": "some/model", "messages": ASK["messages"]}
        assert strict.http.post(path, json=body, headers=key()).status_code >= 400
    assert not fetched


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:80", 200),
        ("box.local:8642", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("10.0.0.7", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_rebound_is_refused(strict, host, status):
    assert strict.http.get("/health", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://good.example"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
    ],
)
def test_a_page_elsewhere_cannot_drive_the_server(strict, headers, status):
    assert strict.http.get("/health", headers=headers).status_code == status


def test_the_own_page_may_call(strict):
    assert strict.http.get("/health", headers={"Origin": strict.url}).status_code == 200


def test_a_body_that_is_too_large_is_refused_however_it_comes(strict):
    big = json.dumps({**ASK, "user": "x" * 30_000}).encode()
    kind = {**key(), "Content-Type": "application/json"}
    told = strict.http.post("/v1/chat/completions", content=big, headers=kind)
    assert told.status_code == 413 and "the limit is 20000" in told.text

    def pieces():
        for at in range(0, len(big), 1000):
            yield big[at : at + 1000]

    untold = strict.http.post("/v1/chat/completions", content=pieces(), headers=kind)
    assert untold.status_code == 413


def test_headers_have_a_limit(strict):
    headers = {**key(), "X-Large": "x" * 200_000}
    try:
        status = strict.http.get("/health", headers=headers).status_code
    except httpx.HTTPError:
        return  # the connection was closed while they were sent
    assert status in (400, 431)


def test_another_type_of_body_is_refused(strict):
    form = strict.http.post("/v1/chat/completions", data={"x": "y"}, headers=key())
    assert form.status_code == 415 and "application/json" in form.text


def test_a_prompt_that_cannot_fit_is_refused_with_numbers(strict):
    body = {**ASK, "messages": [{"role": "user", "content": "word " * 400}]}
    refused = strict.http.post("/v1/chat/completions", json=body, headers=key())
    assert refused.status_code == 400  # waiting does not cure it
    error = refused.json()["error"]
    assert error["available"] == 256 and error["needed"] > 400
    assert error["code"] == "context_length_exceeded" and "--capacity" in error["hint"]
    assert strict.is_still()


class Held:
    """An answer that is on its way until somebody says so."""

    def __init__(self, live, **more):
        body = {"messages": [{"role": "user", "content": "hold " * 100}], "stream": True}
        body |= {"max_tokens": 100, "ignore_eos": True, **more}
        self._client = httpx.Client(base_url=live.url, timeout=PATIENCE_S)
        self._context = self._client.stream(
            "POST", "/v1/chat/completions", json=body, headers=key()
        )
        self.response = self._context.__enter__()
        self.lines = self.response.iter_lines()

    def close(self):
        self._context.__exit__(None, None, None)
        self._client.close()


def test_too_many_requests_are_told_to_come_back(strict):
    service = strict.service
    with_two = service.admitted(2)

    async def take():
        with_two.__enter__()

    async def give():
        with_two.__exit__(None, None, None)

    strict.run(take())
    try:
        refused = strict.http.post("/v1/chat/completions", json=ASK, headers=key())
    finally:
        strict.run(give())
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["limit"] == 2
    many = strict.http.post("/v1/chat/completions", json={**ASK, "n": 3}, headers=key())
    assert many.status_code == 429
    assert strict.http.post("/v1/chat/completions", json=ASK, headers=key()).status_code == 200


def test_a_request_that_finds_no_room_in_time_is_told_who_has_it(strict):
    """The engine stands still meanwhile: whoever runs has the cells until it is let go."""
    gate = threading.Event()
    strict.http.post("/v1/agents", json={"id": "holder"}, headers=key())
    held = Held(strict, agent_id="holder")
    next(held.lines)
    host = strict.host()  # loaded for the one before, if not earlier
    # No step happens while the gate is closed, so the second waits longer than it may.
    clock = host.engine._clock
    late = [0.0]
    host.engine._clock = lambda: clock() + late[0]
    blocked = host.service.run(lambda engine: gate.wait(PATIENCE_S))
    try:
        answers = []

        def ask():
            body = {**ASK, "messages": [{"role": "user", "content": "other " * 150}]}
            answers.append(
                httpx.post(
                    f"{strict.url}/v1/chat/completions",
                    json=body,
                    headers=key(),
                    timeout=PATIENCE_S,
                )
            )

        asking = threading.Thread(target=ask)
        asking.start()
        strict.until(lambda: strict.service.n_active == 2, "the second request")
        gate.set()
        strict.until(
            lambda: strict.engine().waiting == 1 or bool(answers), "the second in the queue"
        )
        late[0] = 100.0
        asking.join(PATIENCE_S)
    finally:
        gate.set()
        blocked.result(PATIENCE_S)
        host.engine._clock = clock
        held.close()
    (refused,) = answers
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    assert error["code"] == "no_room_in_time" and error["available"] < 256
    assert error["holders"][0]["agent"] == "holder" and "holder" in error["message"]
    strict.until(strict.is_still, "the end of both")


def test_a_log_line_has_an_id_and_never_the_text(strict):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    try:
        secret = {"messages": [{"role": "user", "content": "my password is hunter2"}]}
        body = {**secret, "max_tokens": 3}
        headers = {**key(), "X-Request-Id": "my-id-7"}
        answer = strict.http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.headers["x-request-id"] == "my-id-7"
        strict.http.post("/v1/chat/completions", json={**body, "n": "secret3"}, headers=headers)
        strict.http.get("/v1/agents/hunter2", headers={**key(), "X-Request-Id": "my-id-9"})
        strict.until(lambda: "my-id-9" in out.getvalue(), "the lines")
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    first, second = [line for line in lines if line["request_id"] == "my-id-7"]
    assert first["status"] == 200 and second["status"] == 400
    assert first["prompt_tokens"] > 3 and first["completion_tokens"] == 3
    assert "hunter2" not in out.getvalue() and "secret3" not in out.getvalue()


def test_the_text_is_in_the_log_where_that_was_asked_for(tmp_path):
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    with serving(tmp_path, logs_text=True) as live:
        log.addHandler(handler)
        before = log.level
        log.setLevel(logging.INFO)
        try:
            live.post("/v1/completions", {"prompt": "say it aloud", "max_tokens": 1})
            live.until(lambda: bool(out.getvalue()), "the line")
        finally:
            log.removeHandler(handler)
            log.setLevel(before)
    assert "say it aloud" in json.loads(out.getvalue().splitlines()[0])["body"]


def test_a_second_server_on_a_port_is_told_so(strict):
    port = int(strict.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
        listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on '203\.0\.113\.1'"):
        listen("203.0.113.1", 0)


@pytest.mark.parametrize("is_given", [False, True])
def test_localhost_is_heard_at_both_of_its_addresses_on_one_port(is_given):
    with listeners("localhost", 0) as free:
        port = free[0].getsockname()[1] if is_given else 0
    with listeners("localhost", port) as found:
        where = [one.getsockname()[:2] for one in found]
        (port,) = {port for _, port in where}
        assert [address for address, _ in where] == ["127.0.0.1", "::1"]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), PATIENCE_S).close()
        with pytest.raises(ConfigError, match=f"port {port}"), listeners("localhost", port):
            pass
    with listeners("127.0.0.1", 0) as found:
        assert len(found) == 1


def test_a_port_that_is_taken_at_one_address_of_localhost_is_said_to_be():
    with listeners("::1", 0) as taken:
        port = taken[0].getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on ::1"), listeners("localhost", port):
            pass


@pytest.mark.parametrize("bearer", ["Bearer old", "Basic b2xkOm9sZA==", "old"])
def test_a_right_key_beside_a_wrong_one_is_right(strict, bearer):
    right = key()["Authorization"].removeprefix("Bearer ")
    told = strict.http.get("/v1/models", headers={"Authorization": bearer, "x-api-key": right})
    assert told.status_code == 200
    told = strict.http.get("/v1/models", headers={**key(), "x-api-key": "old"})
    assert told.status_code == 200
    told = strict.http.get("/v1/models", headers={"Authorization": bearer, "x-api-key": "old"})
    assert told.status_code == 401


def test_a_second_server_of_a_store_is_told_which_has_it(tmp_path):
    with (
        held_store(tmp_path, "http://127.0.0.1:1"),
        pytest.raises(StoreError, match=r"served already by http://127\.0\.0\.1:1 \(process \d+"),
        held_store(tmp_path, "http://127.0.0.1:2"),
    ):
        pass
    with held_store(tmp_path, "http://127.0.0.1:3"):
        pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "navigate"}, 404),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 404),
        ({"Sec-Fetch-Mode": "navigate"}, 403),
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
def test_a_navigation_of_another_site_may_only_look(strict, method, headers, status):
    """A form of another page, without an origin as some privacy settings send it."""
    told = strict.http.request(method, "/v1/agents/nobody", headers={**headers, **key()})
    assert told.status_code == (405 if status == 404 and method != "DELETE" else status), told.text
    for looking in ("GET", "HEAD"):
        assert strict.http.request(looking, "/health", headers=headers).status_code != 403


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"api_key": ""},
        {"api_key": "ü"},
        {"wait_s": 0},
        {"max_tokens": 0},
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("null",)},
        {"allowed_origins": ("good.example",)},
        {"allowed_origins": ("https://good.example/page",)},
    ],
)
def test_a_setting_that_cannot_work_is_refused(wrong):
    with pytest.raises(ConfigError):
        ServerConfig(**wrong)


def test_a_server_that_listens_for_all_takes_addresses_but_no_names(tmp_path):
    with serving(tmp_path, host="0.0.0.0") as live:
        assert live.http.get("/health", headers={"Host": "192.168.1.5:80"}).status_code == 200
        assert live.http.get("/health", headers={"Host": "evil.example"}).status_code == 403
