"""The agents' own routes: every verb over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest

import kvcellar.agents.turn
from kvcellar.agents import Turn
from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.text.live_text import AnswerPieces, Begun, LiveText, Over
from kvcellar.dialects import TextPart
from kvcellar.engine import SamplingParams
from kvcellar.errors import UnknownAgentError
from kvcellar.history import History
from tests.server.live import PATIENCE_S, serving
from tests.store.fakes import make_key

SHORT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def make(live, name, *texts, **more):
    live.post("/v1/agents", {"id": name, **more})
    for text in texts:
        end = live.post(f"/v1/agents/{name}/generate", {"text": text, **SHORT})
    return end if texts else None


@pytest.mark.slow
def test_an_agent_lives_through_all_its_verbs(live):
    make(live, "verbs", "One.", "Two.", system="You write Python.")
    shown = live.get("/v1/agents/verbs")
    assert [m["role"] for m in shown["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert len(shown["turns"]) == 2 and shown["n_cached"] == shown["n_tokens"] - 1
    fork = live.post("/v1/agents/verbs/fork", {"id": "verbs-2", "turn": 1})
    assert fork["parent"] == "verbs" and fork["parent_position"] == shown["turns"][0]["stop"]
    end = live.post("/v1/agents/verbs-2/generate", {"text": "Other.", **SHORT})
    assert end["usage"]["cached_tokens"] >= shown["turns"][0]["stop"] - 1
    third = live.post("/v1/agents/verbs-2/fork")["id"]
    assert live.post("/v1/agents/verbs/rewind")["n_turns"] == 1
    assert live.post("/v1/agents/verbs/wait")["state"] == "waiting"
    assert live.post("/v1/agents/verbs/finish")["state"] == "finished"
    assert live.post("/v1/agents/verbs-2/pause")["state"] == "paused"
    back = live.post("/v1/agents/verbs-2/resume")
    assert back["state"] == "idle" and back["n_cached"] == back["n_tokens"] - 1
    live.post("/v1/agents/verbs/fork", {"id": "sibling"})
    assert live.post("/v1/agents/sibling/keep")["deleted"] == ["verbs-2", third]
    assert live.http.delete("/v1/agents/verbs").json() == {"id": "verbs", "deleted": True}
    ids = {agent["id"] for agent in live.get("/v1/agents")["data"]}
    assert "sibling" in ids and not {"verbs", "verbs-2", third} & ids


def test_an_agent_is_called_by_what_was_said_until_it_is_renamed_also_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        agent_id = live.post("/v1/agents", {})["id"]
        assert live.get(f"/v1/agents/{agent_id}")["title"] == ""
        live.post(f"/v1/agents/{agent_id}/generate", {"text": "Plan  a trip.", **SHORT})
        for path in ("/v1/agents", "/v1/agents?search=trip"):
            (listed,) = live.get(path)["data"]
            assert (listed["id"], listed["title"]) == (agent_id, "Plan a trip.")
        assert live.get("/v1/cache")["agents"][0]["title"] == "Plan a trip."
        fork = live.post(f"/v1/agents/{agent_id}/fork")["id"]
        live.post(f"/v1/agents/{fork}/generate", {"text": "To the sea.", **SHORT})
        assert live.get(f"/v1/agents/{fork}")["title"] == "To the sea."
        renamed = live.post(f"/v1/agents/{agent_id}/rename", {"title": "  Ümläut:\n “trip” 7/8 "})
        assert (renamed["id"], renamed["title"]) == (agent_id, "Ümläut: “trip” 7/8")
        too_long = live.http.post(f"/v1/agents/{agent_id}/rename", json={"title": "x" * 201})
        assert too_long.status_code == 400 and "at most 200 characters" in too_long.text
        live.post(f"/v1/agents/{agent_id}/generate", {"text": "More.", **SHORT})
        live.post(f"/v1/agents/{agent_id}/rewind")
        live.http.delete(f"/v1/agents/{agent_id}")
        live.post(f"/v1/agents/{agent_id}/undo")
    with serving(tmp_path) as live:
        assert live.get(f"/v1/agents/{agent_id}")["title"] == "Ümläut: “trip” 7/8"
        assert live.post(f"/v1/agents/{agent_id}/rename", {"title": ""})["title"] == "Plan a trip."


def test_a_title_makes_a_name_and_two_of_the_same_title_have_two(live):
    made = [live.post("/v1/agents", {"title": "My chat"}) for _ in range(2)]
    assert [(one["id"], one["title"]) for one in made] == [
        ("my-chat", "My chat"),
        ("my-chat-2", "My chat"),
    ]


def test_an_agent_travels_as_a_file(live):
    make(live, "traveller", "Pack. " * 100)
    response = live.http.get("/v1/agents/traveller/export")
    assert response.headers["content-disposition"] == 'attachment; filename="traveller.kvcellar"'
    kind = {"Content-Type": "application/octet-stream"}
    info = live.http.post(
        "/v1/agents/import", params={"id": "arrived"}, content=response.content, headers=kind
    )
    assert info.status_code == 201 and info.json()["n_tokens"] > 300
    end = live.post("/v1/agents/arrived/generate", {"text": "Unpack.", **SHORT})
    assert end["usage"]["cached_tokens"] >= info.json()["n_tokens"] - 1
    broken = bytearray(response.content)
    broken[len(broken) // 2] ^= 1
    refused = live.http.post("/v1/agents/import", content=bytes(broken), headers=kind)
    assert refused.status_code == 400 and "not a whole export" in refused.text
    assert "/tmp" not in refused.text


def test_a_turn_streams_its_tokens_and_ends_with_what_it_took(live):
    make(live, "streamer")
    body = {"text": "Stream.", "stream": True, **SHORT}
    with live.http.stream("POST", "/v1/agents/streamer/generate", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    events = list(zip(lines[::2], (json.loads(line[6:]) for line in lines[1::2]), strict=True))
    assert [name for name, _ in events] == ["event: token"] * 6 + ["event: end"]
    assert "".join(value["text"] for _, value in events[:-1]) == events[-1][1]["text"]
    assert events[-1][1]["usage"]["completion_tokens"] == 6


def test_tokens_go_behind_the_history(live):
    make(live, "raw")
    live.post("/v1/agents/raw/generate", {"tokens": [10, 11, 12], **SHORT})
    assert live.get("/v1/agents/raw")["n_tokens"] == 9
    both = live.http.post("/v1/agents/raw/generate", json={"tokens": [1], "text": "x"})
    assert both.status_code == 400 and "one of text, tokens and go_on" in both.text


def test_it_is_said_why_something_was_computed_again(live):
    live.post("/v1/agents", {"id": "changed", "system": "First. " * 20})

    async def turn(messages):
        """Take a turn by the library, which does what it is told."""
        params = SamplingParams(max_tokens=6)
        async for _ in live.service.agents.turns.generate(
            Turn("changed", messages=messages, params=params)
        ):
            pass

    messages = [{"role": "system", "content": "First. " * 20}, {"role": "user", "content": "Q?"}]
    live.run(turn(messages))
    assert live.get("/v1/agents/changed/why")["miss"] is None
    messages = list(live.get("/v1/agents/changed")["messages"])
    messages[0] = {"role": "system", "content": "Second. " * 20}
    live.run(turn([*messages, {"role": "user", "content": "And?"}]))
    miss = live.get("/v1/agents/changed/why")["miss"]
    assert miss["cause"] == "system" and miss["tokens_lost"] > 20
    assert "First" in miss["was"] and "Second" in miss["became"] and miss["advice"]


@pytest.mark.parametrize("verb", ["fork", "rewind", "keep", "pause", "resume", "wait", "finish"])
def test_a_verb_for_nobody_says_who_there_is(live, verb):
    make(live, "somebody") if verb == "fork" else None
    response = live.http.post(f"/v1/agents/nobody/{verb}")
    assert response.status_code == 404 and "no agent 'nobody'; there are" in response.text


def test_an_id_never_becomes_a_path(live, tmp_path):
    for bad in ("../up", "/etc/passwd", "a/b", "", ".hidden", "x" * 200, "a\x00b", "ü"):
        response = live.http.post("/v1/agents", json={"id": bad})
        assert response.status_code == 400, bad
        response = live.http.post("/v1/agents/any/fork", json={"id": bad})
        assert response.status_code in (400, 404), bad
    for bad in ("..", "a b", "a:b", "ü", "x" * 129):
        kind = {"Content-Type": "application/octet-stream"}
        response = live.http.post(
            "/v1/agents/import", params={"id": bad}, content=b"", headers=kind
        )
        assert response.status_code == 400 and "cannot name an agent" in response.text
    for odd in ("..%2Fup", "%2e%2e", "a%00b"):
        assert live.http.get(f"/v1/agents/{odd}").status_code == 404


def test_an_odd_name_of_before_is_listed_and_can_be_deleted(live):
    make(live, "even")
    agents = live.service.agents
    even = agents.directory.agent("even")
    odd = AgentRecord("../odd name", even.model, even.key)
    odd.take(agents.store.get(even.name))
    agents.store.save(odd.name, odd.key, odd.tokens, metadata=odd.metadata()).wait()
    assert odd.agent_id in {agent["id"] for agent in live.get("/v1/agents")["data"]}
    gone = live.http.delete("/v1/agents/..%2Fodd%20name")
    assert gone.json() == {"id": odd.agent_id, "deleted": True}
    assert odd.agent_id not in {agent["id"] for agent in live.get("/v1/agents")["data"]}


def test_a_name_is_taken_once(live):
    make(live, "taken")
    again = live.http.post("/v1/agents", json={"id": "taken"})
    assert again.status_code == 409 and "choose another name" in again.text


@pytest.mark.slow
def test_agents_are_there_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        make(live, "stays", "Remember this. " * 30)
        live.post("/v1/agents/stays/fork", {"id": "fork"})
        asked = {"messages": [{"role": "user", "content": "Nobody named me. " * 30}], **SHORT}
        said = live.post("/v1/chat/completions", asked)
        before = live.get("/v1/agents/stays")
    with serving(tmp_path) as live:
        assert live.get("/health")["models"][0]["state"] == "absent"
        after = live.get("/v1/agents/stays")
        assert after["messages"] == before["messages"] and after["n_tokens"] == before["n_tokens"]
        back = live.post("/v1/agents/fork/resume")
        assert back["restored_tokens"] == before["n_tokens"] - 1
        asked["messages"] += [said["choices"][0]["message"], {"role": "user", "content": "And?"}]
        more = live.post("/v1/chat/completions", asked)
        n = said["usage"]["total_tokens"]
        assert more["kvcellar"]["agent_id"] == said["kvcellar"]["agent_id"]
        assert more["usage"]["prompt_tokens"] > n, "its own tokens are gone on from"


@pytest.mark.slow
def test_a_turn_that_the_cli_took_meanwhile_is_shown(tmp_path):
    """Another process on the same store: listed, described, explained, and gone on from."""
    command = [sys.executable, "-m", "kvcellar", "agents"]
    where = ["--store", str(tmp_path)]

    def cli(*words):
        done = subprocess.run(
            [*command, *words, *where], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    with serving(tmp_path) as live:
        make(live, "poet", "One.")
        live.service.store.flush()
        cli("generate", "poet", "Two.", "--max-tokens", "4", "--dtype", "float32")
        (listed,) = live.get("/v1/agents")["data"]
        assert listed["n_turns"] == 2
        shown = live.get("/v1/agents/poet")
        assert [m["content"] for m in shown["messages"] if m["role"] == "user"] == ["One.", "Two."]
        (seen,) = live.get("/v1/cache")["agents"]
        assert seen["n_tokens"] == shown["n_tokens"] == listed["n_tokens"]
        end = live.post("/v1/agents/poet/generate", {"text": "Three.", **SHORT})
        assert end["usage"]["prompt_tokens"] > shown["n_tokens"]
        live.service.store.flush()
        cli("rewind", "poet", "--turn", "1")
        assert live.get("/v1/agents/poet")["n_turns"] == 1
        cli("delete", "poet")
        assert live.get("/v1/agents")["data"] == []
        assert live.http.get("/v1/agents/poet").status_code == 404


def test_what_is_stored_is_counted_again_when_it_was_brought_back(live):
    make(live, "stored", "Write one line about rain.", "Another way, with the sun in it.")
    before = live.post("/v1/agents/stored/pause")["n_stored"]
    assert before > 30
    live.post("/v1/agents/stored/resume")
    for verb in ("rewind", "rewind", "undo", "undo"):
        live.post(f"/v1/agents/stored/{verb}")
    assert live.get("/v1/agents/stored")["n_stored"] == before
    end = live.post("/v1/agents/stored/generate", {"text": "Three.", **SHORT})
    assert live.get("/v1/agents/stored")["n_stored"] >= end["usage"]["restored_tokens"]
    live.http.delete("/v1/agents/stored")
    live.post("/v1/agents/stored/undo")
    assert live.get("/v1/agents/stored")["n_stored"] >= before


def test_what_was_dropped_comes_back_over_http_also_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        make(live, "poet", "One.", "Two.", system="You write verse.")
        live.post("/v1/agents/poet/fork", {"id": "sister"})
        live.post("/v1/agents/poet/fork", {"id": "brother"})
        before = {name: live.get(f"/v1/agents/{name}")["messages"] for name in ("poet", "sister")}
        live.post("/v1/agents/poet/rewind")
        live.post("/v1/agents/brother/keep")
        live.http.delete("/v1/agents/brother")
        (rewound, kept, deleted) = live.get("/v1/agents?dropped=true")["data"]
        assert [one["verb"] for one in (rewound, kept, deleted)] == ["rewind", "keep", "delete"]
        assert (kept["id"], kept["by"], kept["model"]) == ("sister", "brother", "demo")
        assert rewound["n_turns"] == 2 and rewound["n_messages"] == 5
        assert [agent["id"] for agent in live.get("/v1/agents")["data"]] == ["poet"]
    with serving(tmp_path) as live:
        (poet,) = live.post("/v1/agents/poet/undo")["restored"]
        assert poet["id"] == "poet" and poet["n_turns"] == 2
        assert live.post("/v1/agents/brother/undo")["restored"][0]["id"] == "brother"
        assert live.post("/v1/agents/brother/undo")["restored"][0]["id"] == "sister"
        assert {n: live.get(f"/v1/agents/{n}")["messages"] for n in before} == before
        assert live.get("/v1/agents?dropped=true")["data"] == []
        again = live.http.post("/v1/agents/poet/undo")
        assert again.status_code == 409 and "can be brought back" in again.text
        nobody = live.http.post("/v1/agents/nobody/undo")
        assert nobody.status_code == 404
        live.http.delete("/v1/agents/poet", params={"forever": True})
        assert live.http.post("/v1/agents/poet/undo").status_code == 404


def test_an_answer_that_was_cut_is_gone_on_with(live):
    whole = make(live, "whole", "import os", system="You write Python.")
    long = live.post(
        "/v1/agents",
        {"id": "cut", "system": "You write Python."},
    )
    assert long["id"] == "cut"
    body = {"temperature": 0, "ignore_eos": True}
    first = live.post("/v1/agents/cut/generate", {"text": "import os", "max_tokens": 3, **body})
    more = live.post("/v1/agents/cut/generate", {"go_on": True, "max_tokens": 3, **body})
    assert first["text"] + more["text"] == whole["text"]
    assert more["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"] + 2
    shown = live.get("/v1/agents/cut")
    assert shown["messages"][-1]["content"] == whole["text"] and len(shown["messages"]) == 3
    assert live.get("/v1/agents/whole")["n_tokens"] == shown["n_tokens"]
    for wrong in ({"go_on": True, "text": "x"}, {}):
        refused = live.http.post("/v1/agents/cut/generate", json=wrong)
        assert refused.status_code == 400 and "go_on" in refused.text
    live.post("/v1/agents", {"id": "silent"})
    refused = live.http.post("/v1/agents/silent/generate", json={"go_on": True})
    assert refused.status_code == 400


# A turn says what it follows ----------------------------------------------------------------------


def digest_of(live, name):
    return live.get(f"/v1/agents/{name}")["history_digest"]


def asked_of(live, name):
    messages = live.get(f"/v1/agents/{name}")["messages"]
    return [m["content"] for m in messages if m["role"] == "user"]


def held_turns(monkeypatch):
    """Have turns that have begun wait; returns what lets them go on."""
    goes_on, bring_back = threading.Event(), kvcellar.agents.turn.bring_back

    async def held(*asked, **more):
        await asyncio.to_thread(goes_on.wait, PATIENCE_S)
        return await bring_back(*asked, **more)

    monkeypatch.setattr(kvcellar.agents.turn, "bring_back", held)
    return goes_on


def test_of_two_turns_at_once_that_follow_the_same_one_exactly_one_is_taken(live):
    make(live, "raced", "One.")
    body = {"follows": digest_of(live, "raced"), **SHORT}
    together, said = threading.Barrier(2), {}

    def send(text):
        together.wait(PATIENCE_S)
        said[text] = live.http.post("/v1/agents/raced/generate", json={"text": text, **body})

    threads = [threading.Thread(target=send, args=(text,)) for text in ("Left.", "Right.")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (taken,) = [text for text, response in said.items() if response.status_code == 200]
    (refused,) = [response for response in said.values() if response.status_code != 200]
    assert asked_of(live, "raced") == ["One.", taken]
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "history_moved_on")
    assert error["follows"] == body["follows"] and "read the agent" in error["message"]
    now = said[taken].json()["history_digest"]
    assert now == digest_of(live, "raced") != body["follows"]
    body["follows"] = now
    live.post("/v1/agents/raced/generate", {"text": "Behind it.", **body})


def test_a_turn_does_not_wait_for_the_one_that_it_cannot_follow(live, monkeypatch):
    make(live, "taken-already", "One.")
    follows = digest_of(live, "taken-already")
    goes_on = held_turns(monkeypatch)
    body = {"text": "First.", "follows": follows, **SHORT}
    path = "/v1/agents/taken-already/generate"
    first = threading.Thread(target=live.post, args=(path, body))
    first.start()
    under_way = live.service.agents.live.under_way
    live.until(lambda: under_way("taken-already") is not None, "the first")
    error = live.http.post(path, json={**body, "text": "Second."}).json()["error"]
    assert (error["code"], error["asked"], error["is_under_way"]) == (
        "history_moved_on",
        "First.",
        True,
    )
    assert (error["history_digest"], error["n_turns"]) == (follows, 1)
    silent = threading.Thread(target=live.post, args=(path, {"text": "Third.", **SHORT}))
    silent.start()  # says nothing, and is behind it as ever
    goes_on.set()
    for thread in (first, silent):
        thread.join()
    assert asked_of(live, "taken-already") == ["One.", "First.", "Third."]


def test_what_a_turn_follows_goes_back_and_comes_back_with_the_history(live):
    make(live, "sequence", "One.", "Two.")
    path = "/v1/agents/sequence"
    two = digest_of(live, "sequence")
    fork = live.post(f"{path}/fork", {"id": "sequence-fork", "turn": 1})
    one = live.post(f"{path}/rewind")["history_digest"]
    assert one == fork["history_digest"] == digest_of(live, "sequence-fork") != two
    stale = live.http.post(f"{path}/generate", json={"text": "x", "follows": two, **SHORT})
    assert stale.status_code == 409 and stale.json()["error"]["n_turns"] == 1
    (back,) = live.post(f"{path}/undo")["restored"]
    assert back["history_digest"] == two
    end = live.post(f"{path}/generate", {"text": "Three.", "follows": two, **SHORT})
    for_one = {"text": "Other.", "follows": one, **SHORT}
    other = live.post("/v1/agents/sequence-fork/generate", for_one)
    assert len({one, two, end["history_digest"], other["history_digest"]}) == 4
    listed = {agent["id"]: agent["history_digest"] for agent in live.get("/v1/agents")["data"]}
    assert listed["sequence"] == end["history_digest"]
    (seen,) = [one for one in live.get("/v1/cache")["agents"] if one["id"] == "sequence"]
    assert seen["history_digest"] == end["history_digest"]


def test_two_who_take_back_the_last_turn_take_back_one(live):
    make(live, "rewound", "One.", "Two.", "Three.")
    body = {"follows": digest_of(live, "rewound")}
    assert live.post("/v1/agents/rewound/rewind", body)["n_turns"] == 2
    again = live.http.post("/v1/agents/rewound/rewind", json=body)
    assert again.status_code == 409 and again.json()["error"]["code"] == "history_moved_on"
    assert live.get("/v1/agents/rewound")["n_turns"] == 2


def test_going_on_with_an_answer_drops_no_turn_that_has_come_behind_it(live, monkeypatch):
    make(live, "gone-on", "One.")
    goes_on = held_turns(monkeypatch)
    path = "/v1/agents/gone-on/generate"
    turn = threading.Thread(target=live.post, args=(path, {"text": "Two.", **SHORT}))
    turn.start()
    under_way = live.service.agents.live.under_way
    live.until(lambda: under_way("gone-on") is not None, "the turn")
    assert live.http.post(path, json={"go_on": True, **SHORT}).status_code == 409
    goes_on.set()
    turn.join()
    assert asked_of(live, "gone-on") == ["One.", "Two."]


# A turn goes on without its client ----------------------------------------------------------------


def slowed(live, monkeypatch):
    """Have answers come slowly, and not end by themselves."""
    engine = live.host().engine
    step, pause = engine.step, threading.Event()
    monkeypatch.setattr(engine, "step", lambda: pause.wait(0.02) or step())
    monkeypatch.setattr(engine.outcomes, "eos_token_ids", frozenset())


def left(live, name, **body):
    """Ask for a turn and leave when its first token has come."""
    body = {"text": "Tell me.", "stream": True, "temperature": 0, **body}
    with live.http.stream("POST", f"/v1/agents/{name}/generate", json=body) as response:
        for line in response.iter_lines():
            if line == "event: token":
                return


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_turn_in_the_background_goes_on_without_its_client_and_others_end(
    live, monkeypatch, is_kept
):
    name = f"left-{is_kept}"
    make(live, name)
    slowed(live, monkeypatch)
    left(live, name, max_tokens=60, background=is_kept)
    live.until(lambda: live.get(f"/v1/agents/{name}")["n_turns"] == 1, "the turn")
    (turn,) = live.get(f"/v1/agents/{name}")["turns"]
    assert turn["reason"] == ("length" if is_kept else "cancelled")
    assert (turn["stop"] - turn["n_prompt"] == 60) == is_kept


def test_who_comes_back_joins_the_answer_and_stop_ends_it_for_all(live, monkeypatch):
    make(live, "rejoined")
    slowed(live, monkeypatch)
    left(live, "rejoined", max_tokens=2000, background=True)
    now = live.get("/v1/agents/rejoined")["under_way"]
    assert now["asked"] == "Tell me." and now["text"] and now["follows"] == History().digest()
    events = []
    listener = threading.Thread(target=heard, args=(live, "rejoined", events))
    listener.start()
    live.until(lambda: len(events) > 3, "more of it")
    assert live.post("/v1/agents/rejoined/stop")["stopped"] is True
    listener.join()
    assert events[0][0] == "turn" and events[0][1]["text"].startswith(now["text"])
    assert events[-1][1]["reason"] == "cancelled"
    shown = live.get("/v1/agents/rejoined")
    assert shown["under_way"] is None and shown["turns"][0]["reason"] == "cancelled"
    text = "".join(event["text"] for kind, event in events if kind in ("turn", "token"))
    assert shown["messages"][-1]["content"] == text
    assert live.post("/v1/agents/rejoined/stop")["stopped"] is False
    more = live.post("/v1/agents/rejoined/generate", {"go_on": True, **SHORT})
    assert live.get("/v1/agents/rejoined")["messages"][-1]["content"] == text + more["text"]


def test_who_is_stopped_by_another_client_is_told(live, monkeypatch):
    make(live, "interrupted")
    slowed(live, monkeypatch)
    said, end = [], []

    def chat():
        messages = [{"role": "user", "content": "Say it."}]
        body = {"messages": messages, "agent_id": "interrupted", "max_tokens": 2000}
        said.append(live.http.post("/v1/chat/completions", json=body))

    def turn():
        end.append(live.post("/v1/agents/interrupted/generate", {"text": "x", "max_tokens": 2000}))

    under_way = live.service.agents.live.under_way
    for ask in (chat, turn):
        asking = threading.Thread(target=ask)
        asking.start()
        live.until(lambda: (now := under_way("interrupted")) and now.parts, "its first word")
        live.post("/v1/agents/interrupted/stop")
        asking.join()
    assert said[0].status_code == 409 and said[0].json()["error"]["code"] == "answer_stopped"
    assert end[0]["finish_reason"] == "cancelled"
    assert live.get("/v1/agents/interrupted")["n_turns"] == 2


def test_who_looks_on_is_told_how_much_of_a_prompt_is_read(live, monkeypatch):
    make(live, "read-so-far", "Known. " * 100)
    slowed(live, monkeypatch)
    monkeypatch.setattr("kvcellar.server.routes.agents.PERIOD_S", 0.001)
    events = []
    listener = threading.Thread(target=heard, args=(live, "read-so-far", events))
    listener.start()
    live.until(lambda: "read-so-far" in live.service.agents.live._listeners, "a listener")
    text = "New. " * 600
    end = live.post("/v1/agents/read-so-far/generate", {"text": text, **SHORT})
    listener.join()
    usage = end["usage"]
    read = [value for kind, value in events if kind == "reading"]
    last = next(value for value in reversed(read) if value["n_read"] < value["n_prompt"])
    assert last["n_prompt"] == usage["prompt_tokens"]
    assert 0 < last["n_cached"] == usage["cached_tokens"] < last["n_read"]
    kinds = [kind for kind, _ in events]
    assert "reading" not in kinds[kinds.index("token") :]


# Looking on ---------------------------------------------------------------------------------------


def heard(live, agent_id, events):
    """Listen to an agent in a thread, until its turn is over."""
    with live.http.stream("GET", f"/v1/agents/{agent_id}/live") as response:
        name = None
        for line in response.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                events.append((name, json.loads(line[6:])))
                if name == "end":
                    return


@pytest.mark.parametrize("route", ["agents", "chat"])
def test_whoever_looks_on_hears_what_another_client_is_told(live, route):
    name = f"heard-{route}"
    make(live, name)
    events = []
    listener = threading.Thread(target=heard, args=(live, name, events))
    listener.start()
    agents = live.service.agents
    live.until(lambda: name in agents.live._listeners, "a listener")
    if route == "agents":
        said = live.post(f"/v1/agents/{name}/generate", {"text": "Say it.", **SHORT})["text"]
    else:
        messages = [{"role": "user", "content": "Say it."}]
        body = {"messages": messages, "agent_id": name, **SHORT}
        said = live.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    listener.join()
    follows = History().digest()
    assert events[0] == ("turn", {"asked": "Say it.", "text": "", "follows": follows})
    assert events[-1] == ("end", {"history_digest": digest_of(live, name), "reason": "length"})
    text = "".join(event["text"] for kind, event in events if kind == "token")
    assert text.strip() == said.strip()
    live.until(lambda: name not in agents.live._listeners, "nobody to listen")


def test_whoever_comes_late_is_told_what_was_said_so_far():
    late = AgentRecord("late", "demo", make_key())

    async def look():
        text = LiveText()
        with text.turn(late, "Q?"):
            text.say("late", "One ")
            assert text.under_way("late") == Begun("Q?", late.history_digest, (TextPart("One "),))
            listener = text.listen("late")
            events = [await anext(listener)]
            text.say("late", "two")
            events.append(await anext(listener))
        events.append(await anext(listener))
        await listener.aclose()
        assert not text._listeners and not text._turns
        return events

    assert asyncio.run(look()) == [
        Begun("Q?", late.history_digest, (TextPart("One "),)),
        AnswerPieces((TextPart("two"),)),
        Over(late.history_digest, None),
    ]


def test_nobody_can_be_listened_to_who_is_not_there(live):
    assert live.http.get("/v1/agents/nobody/live").status_code == 404


def test_agents_are_found_by_what_was_said(live):
    make(live, "finder", "Where is the \u00dcBERMENSCH? Here.", system="You look for <things>.")
    (found,) = live.get("/v1/agents?search=%C3%BCbermensch")["data"]
    (place,) = found["found"]
    assert (found["id"], place["message"], place["text"]) == ("finder", 1, "\u00dcBERMENSCH")
    assert place["before"] == "Where is the " and place["behind"] == "? Here."
    assert [one["id"] for one in live.get("/v1/agents?search=%3Cthings%3E")["data"]] == ["finder"]
    assert live.get("/v1/agents?search=FINDE")["data"][0]["found"] == []
    assert live.get("/v1/agents?search=never-said")["data"] == []


def test_an_agent_that_goes_while_others_are_searched_is_not_found(live, monkeypatch):
    for name in ("stays", "goes"):
        make(live, name)
        live.post(f"/v1/agents/{name}/generate", {"text": "A needle.", **SHORT})
    directory = live.service.agents.directory
    agent = directory.agent

    def gone(agent_id, model=None):
        if agent_id == "goes":
            raise UnknownAgentError("no agent")
        return agent(agent_id, model)

    monkeypatch.setattr(type(directory), "agent", lambda _, *asked: gone(*asked))
    found = [one["id"] for one in live.get("/v1/agents?search=a%20needle")["data"]]
    assert "stays" in found and "goes" not in found


def test_what_a_turn_took_is_remembered_beside_it_also_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        make(live, "taker", "One. " * 40, "Two.")
        ends = [live.get("/v1/agents/taker")["turns"]]
    with serving(tmp_path) as live:
        ends.append(live.get("/v1/agents/taker")["turns"])
    first, second = ends[1]
    assert ends[0] == ends[1]
    assert first["took"]["n_cached"] == 0 and first["took"]["cause"] == ""
    assert second["took"]["n_cached"] >= first["stop"] - 1
    assert 0 < second["took"]["first_s"] <= second["took"]["total_s"] < 100
