"""The token of the store's folder: it makes its bearer the owner, on this machine alone."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from kvcellar.server.config import ServerConfig
from kvcellar.server.errors import ApiError
from kvcellar.server.front.entrance import FOLDER_OWNER, Entrance
from tests.server.live import Live, serving

TOKEN = "of-the-folder"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    keys = {"api_key": "owner", "guest_keys": ("guest",)}
    with serving(tmp_path_factory.mktemp("store"), folder_token=TOKEN, **keys) as live:
        yield live


def status_of(live: Live, path: str, key: str | None, **body: Any) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return live.http.post(path, json=body, headers=headers).status_code


def test_it_is_taken_beside_the_api_key_and_nothing_like_it_is(live: Live) -> None:
    for key, status in ((TOKEN, 200), ("owner", 200), (TOKEN[:-1], 401), (None, 401)):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        assert live.http.get("/v1/agents", headers=headers).status_code == status, key


def test_what_commands_ask_takes_the_token_and_no_key(live: Live) -> None:
    assert status_of(live, "/folder/list", TOKEN) == 200
    assert status_of(live, "/folder/list", "owner") == 403
    assert status_of(live, "/folder/list", "guest") == 403
    assert status_of(live, "/folder/nothing", TOKEN) == 404
    assert (
        "/folder/{verb}"
        not in live.http.get("/openapi.json", headers={"Authorization": "Bearer owner"}).json()[
            "paths"
        ]
    )


def test_without_a_token_of_the_server_no_bearer_is_the_folders_owner(tmp_path: Path) -> None:
    with serving(tmp_path) as open_to_all:
        assert status_of(open_to_all, "/folder/list", None) == 403
        assert status_of(open_to_all, "/folder/list", "x") == 403


@pytest.mark.parametrize(
    ("client", "is_owner"),
    [("127.0.0.1", True), ("::1", True), ("192.168.1.2", True), ("192.168.1.3", False)],
)
def test_it_is_good_on_this_machine_alone(client: str, is_owner: bool) -> None:
    entrance = Entrance(ServerConfig(host="0.0.0.0", folder_token=TOKEN, api_key="owner"))
    headers = Headers({"host": "192.168.1.2", "authorization": f"Bearer {TOKEN}"})
    scope = {"path": "/v1/agents", "method": "GET"}
    scope |= {"client": (client, 5), "server": ("192.168.1.2", 8642)}
    if is_owner:
        entrance.check(scope, headers)
        assert scope[FOLDER_OWNER]
    else:
        with pytest.raises(ApiError) as refused:
            entrance.check(scope, headers)
        assert refused.value.status == 401


def test_it_is_in_no_log_and_in_no_words_of_the_configuration(live: Live) -> None:
    assert TOKEN not in repr(live.service.config)
    out = io.StringIO()
    log = logging.getLogger("kvcellar.server")
    handler, before = logging.StreamHandler(out), log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        status_of(live, "/folder/show", TOKEN, agent_id="nobody")
        live.until(lambda: "/folder/{verb}" in out.getvalue(), "the line, behind the answer")
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    assert "UnknownAgentError" in out.getvalue()
    assert TOKEN not in out.getvalue()
