"""Requests of strangers, by their salt or by their key, meet nothing of each other."""

from __future__ import annotations

import re

import pytest

from kvcellar.errors import ConfigError
from kvcellar.server.config import ServerConfig
from tests.server.live import serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXT = "Write a function that reads a file and counts its lines, and a test of it, please. " * 3
USER = {"role": "user", "content": TEXT}
SHORT = {"max_tokens": 4, "temperature": 0}


def bodies(salt):
    """A request of each protocol with one salt, and where its answer says what was reused."""
    more = {} if salt is None else {"cache_salt": salt}
    return [
        (CHAT, {"messages": [USER], **SHORT, **more}, ["prompt_tokens_details", "cached_tokens"]),
        (MESSAGES, {"messages": [USER], **SHORT, **more}, ["cache_read_input_tokens"]),
        (
            RESPONSES,
            {"input": TEXT, "max_output_tokens": 4, "temperature": 0, "store": False, **more},
            ["input_tokens_details", "cached_tokens"],
        ),
    ]


def reused(answer, path):
    found = answer["usage"]
    for name in path:
        found = found[name]
    return found


@pytest.mark.parametrize("number", range(3))
def test_a_prompt_is_reused_within_its_salt_alone(live, number):
    for salt in (None, f"one {number}", f"two {number}"):
        path, body, where = bodies(salt)[number]
        first, second = live.post(path, body), live.post(path, body)
        if salt is not None:
            assert reused(first, where) == 0
        assert reused(second, where) > 60


def test_a_salt_may_come_as_a_header_and_not_as_two(live):
    path, body, where = bodies(None)[0]
    headers = {"x-cache-salt": "as a header"}
    assert reused(live.post(path, body, headers=headers), where) == 0
    assert reused(live.post(path, {**body, "cache_salt": "as a header"}), where) > 60
    said = live.http.post(path, json={**body, "cache_salt": "x"}, headers=headers)
    assert said.status_code == 400 and "two salts" in said.text
    body = {"prompt": TEXT, "max_tokens": 1, "cache_salt": "plain"}
    host = live.host()
    before = live.engine().reused_tokens
    live.post("/v1/completions", body)
    assert live.engine().reused_tokens == before
    live.post("/v1/completions", body)
    assert live.engine().reused_tokens > before and host is live.host()


def test_a_conversation_goes_on_within_its_salt_and_its_agent_is_shown_without(live):
    more = {**SHORT, "cache_salt": "conversation"}
    first = live.post(CHAT, {"messages": [USER], **more})
    said = first["choices"][0]["message"]["content"]
    messages = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    again = live.post(CHAT, {"messages": messages, **more})
    agent = first["kvcellar"]["agent_id"]
    assert "~" not in agent and again["kvcellar"]["agent_id"] == agent
    other = live.post(CHAT, {"messages": messages, **SHORT, "cache_salt": "other"})
    assert other["kvcellar"]["agent_id"] != agent and other["kvcellar"]["miss"] is None
    headers = {"x-cache-salt": "conversation"}
    mine = live.http.get("/v1/agents", headers=headers).json()["data"]
    assert [one["id"] for one in mine] == [agent]
    assert agent not in live.http.get("/v1/agents").text
    assert live.http.get(f"/v1/agents/{agent}").status_code == 404
    whole = live.http.get(f"/v1/agents/{agent}", headers=headers).json()
    assert whole["id"] == agent and whole["messages"][0]["content"] == TEXT
    raw = next(i.agent_id for i in live.service.agents.directory.infos() if agent in i.agent_id)
    assert raw.startswith(f"{agent}~")
    for path in (f"/v1/agents/{raw}", f"/v1/agents/{raw}/why"):
        for given in ({}, headers):
            refused = live.http.get(path, headers=given)
            assert refused.status_code == 404 and "~" not in refused.text


def test_a_named_agent_is_its_salts_and_so_are_all_its_verbs(live):
    headers = {"x-cache-salt": "named"}
    live.post("/v1/agents", {"id": "rhymer", "system": "Rhyme."}, headers=headers)
    live.post("/v1/agents", {"id": "rhymer", "system": "Count."})
    said = {"messages": [USER], **SHORT}
    answer = live.post(CHAT, said, headers={**headers, "x-agent-id": "rhymer"})
    assert answer["kvcellar"]["agent_id"] == "rhymer"
    plain = live.post(CHAT, said, headers={"x-agent-id": "rhymer"})
    assert plain["kvcellar"]["agent_id"] == "rhymer"
    assert live.get("/v1/agents/rhymer")["messages"][0]["content"] == "Count."
    own = live.http.get("/v1/agents/rhymer", headers=headers).json()
    assert own["messages"][0]["content"] == "Rhyme."
    fork = live.post("/v1/agents/rhymer/fork", {"id": "descant"}, headers=headers)
    assert (fork["id"], fork["parent"]) == ("descant", "rhymer")
    done = live.post(
        "/v1/agents/descant/generate", {"text": "And?", "max_tokens": 2}, headers=headers
    )
    assert done["id"] == "descant" and done["usage"]["cached_tokens"] > 60
    messages = [{"role": "system", "content": "Sing."}, USER]
    named = {**headers, "x-agent-id": "rhymer"}
    branch = live.post(CHAT, {"messages": messages, **SHORT}, headers=named)
    assert branch["kvcellar"]["agent_id"] == "rhymer.2" and "~" not in str(branch["kvcellar"])
    missing = live.http.post(CHAT, json=said, headers={"x-agent-id": "descant"})
    there = re.search(r"there are: ([^;]*);", missing.text)[1].split(", ")
    assert missing.status_code == 404 and "descant" not in there and "~" not in missing.text
    assert live.http.get("/v1/agents/descant").status_code == 404
    for name in ("descant", "rhymer"):
        gone = live.http.delete(f"/v1/agents/{name}", headers=headers).json()
        assert gone == {"id": name, "deleted": True}
    dropped = live.http.get("/v1/agents?dropped=true", headers=headers).json()["data"]
    assert {one["id"] for one in dropped} >= {"rhymer", "descant"}
    assert "descant" not in live.http.get("/v1/agents?dropped=true").text
    assert live.get("/v1/agents/rhymer")["messages"][0]["content"] == "Count."
    live.http.delete("/v1/agents/rhymer?forever=true")


def test_a_stored_response_is_its_salts(live):
    body = {"input": TEXT, "max_output_tokens": 4, "temperature": 0, "cache_salt": "stored"}
    first = live.post(RESPONSES, body)
    path, headers = f"{RESPONSES}/{first['id']}", {"x-cache-salt": "stored"}
    assert live.http.get(path).status_code == 404
    assert live.http.delete(path).status_code == 404
    assert live.http.get(path, headers=headers).json() == first
    after = {**body, "input": "And?", "previous_response_id": first["id"]}
    assert live.http.post(RESPONSES, json={**after, "cache_salt": "x"}).status_code == 404
    second = live.post(RESPONSES, after)
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 60
    assert live.http.delete(path, headers=headers).json()["deleted"]


def test_a_stored_conversation_is_its_salts(live):
    headers = {"x-cache-salt": "kept"}
    made = live.post("/v1/conversations", {}, headers=headers)["id"]
    body = {"input": TEXT, "max_output_tokens": 4, "temperature": 0, "conversation": made}
    assert live.http.get(f"/v1/conversations/{made}").status_code == 404
    assert live.http.post(RESPONSES, json=body).status_code == 404
    live.post(RESPONSES, body, headers=headers)
    again = live.post(RESPONSES, {**body, "input": "And?"}, headers=headers)
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 60
    assert again["kvcellar"]["agent_id"] == made
    assert live.http.delete(f"/v1/conversations/{made}", headers=headers).json()["deleted"]
    assert not any(made in info.agent_id for info in live.service.agents.directory.infos())


# Keys ---------------------------------------------------------------------------------------------


def test_guests_share_nothing_with_each_other_or_the_owner(tmp_path):
    with serving(tmp_path, api_key="owner", guest_keys=("ann", "bob")) as live:
        path, body, where = bodies(None)[0]
        agents = {}
        for key in ("owner", "ann", "bob"):
            headers = {"authorization": f"Bearer {key}"}
            first, second = (live.post(path, body, headers=headers) for _ in range(2))
            assert reused(first, where) == 0 and reused(second, where) > 60
            agents[key] = {one["kvcellar"]["agent_id"] for one in (first, second)}
            mine = live.http.get("/v1/agents", headers=headers).json()["data"]
            assert {one["id"] for one in mine} == agents[key]
            salted = live.post(path, {**body, "cache_salt": "same"}, headers=headers)
            assert reused(salted, where) == 0
            seen = live.http.get("/v1/cache", headers=headers)
            assert seen.status_code == (200 if key == "owner" else 403)
        assert live.http.post(path, json=body, headers={"x-api-key": "eve"}).status_code == 401


def test_keys_that_cannot_be_are_refused():
    for more, said in (
        ({"guest_keys": ("a",)}, "the owner has none"),
        ({"api_key": "a", "guest_keys": ("a",)}, "are the same"),
        ({"api_key": "a", "guest_keys": ("ü",)}, "printable ASCII"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerConfig(**more)
