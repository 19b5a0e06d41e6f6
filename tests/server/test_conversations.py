"""Whose history a request goes on with: a name is a promise, a session id is a hint."""

from __future__ import annotations

import json
import threading

import pytest

from kvcellar.agents import leasing, open_host
from kvcellar.agents.kv.residence import MIN_GAIN
from kvcellar.hosting import messages as messages_module
from kvcellar.hosting.messages import Messages
from kvcellar.hosting.models import ModelRegistry
from kvcellar.models.text import prompts
from kvcellar.server.state import conversations
from tests.server.live import serving

SHORT = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
NO = {"role": "assistant", "content": "No!"}
SYSTEM = {"role": "system", "content": "You write verse."}


def user(text):
    return {"role": "user", "content": text}


def make(live, name, *texts, system=SYSTEM["content"]):
    """An agent that was made on purpose; returns its messages."""
    live.post("/v1/agents", {"id": name, "system": system})
    for text in texts:
        live.post(f"/v1/agents/{name}/generate", {"text": text, **SHORT})
    return messages_of(live, name)


def messages_of(live, name):
    return live.get(f"/v1/agents/{name}")["messages"]


def say(live, messages, name=None, headers=None, **more):
    headers = {"X-Agent-Id": name, **(headers or {})} if name else headers
    body = {"messages": messages, **SHORT, **more}
    return live.http.post("/v1/chat/completions", json=body, headers=headers)


def anthropic(live, messages, name, headers=None, **more):
    body = {"model": "demo", "messages": messages, "max_tokens": 6, "temperature": 0, **more}
    headers = {"X-Agent-Id": name, "anthropic-version": "2023-06-01", **(headers or {})}
    return live.http.post("/v1/messages", json=body, headers=headers)


def responses(live, text, name, headers=None, **more):
    body = {"input": text, "max_output_tokens": 6, "temperature": 0, **more}
    return live.http.post(
        "/v1/responses", json=body, headers={"X-Agent-Id": name, **(headers or {})}
    )


def test_a_turn_whose_agent_another_process_is_using_is_answered_by_a_branch_with_a_notice(
    live, monkeypatch
):
    monkeypatch.setattr(leasing, "PATIENCE_S", 0.0)
    before = make(live, "shared", "One.")
    leases = live.service.store.leases
    lease = leases.take(live.service.agents.directory.agent("shared").name)
    try:
        for number, sent in ((2, [user("Hello")]), (3, [*before, user("Hello")])):
            value = say(live, sent, "shared").json()["kvcellar"]
            assert value["agent_id"] == f"shared.{number}"
            assert "agent 'shared' is in use by process" in value["notice"]
            assert messages_of(live, f"shared.{number}")[:-1] == [*before, user("Hello")]
        raw = {"prompt": "def", "max_tokens": 4}
        said = live.http.post("/v1/completions", json=raw, headers={"X-Agent-Id": "shared"})
        assert said.headers["x-agent-id"] == "shared.4"
        assert "in use by process" in said.headers["x-agent-notice"]
        said = live.http.post("/v1/agents/shared/generate", json={"text": "Hello", **SHORT})
        assert said.headers["x-agent-id"] == said.json()["id"] == "shared.5"
        refused = live.http.post("/v1/agents/shared/rewind", json={"turn": 0})
        assert refused.status_code == 409 and "in use by process" in refused.text
        assert live.http.delete("/v1/agents/shared").status_code == 409
    finally:
        leases.release(lease)
    assert messages_of(live, "shared") == before
    assert say(live, [user("Hello")], "shared").json()["kvcellar"]["agent_id"] == "shared"


# A name is a promise -------------------------------------------------------------------------


def test_messages_that_are_new_alone_become_a_turn_behind_the_history(live):
    before = make(live, "poet", "One.", "Two.")
    answer = say(live, [user("Hello")], "poet")
    assert answer.status_code == 200
    after = messages_of(live, "poet")
    assert after[: len(before)] == before and after[len(before)] == user("Hello")
    assert len(after) == len(before) + 2 == 7
    value = answer.json()
    assert value["kvcellar"]["agent_id"] == answer.headers["x-agent-id"] == "poet"
    assert "put behind the history of agent poet" in value["kvcellar"]["notice"]
    assert answer.headers["x-agent-notice"] == value["kvcellar"]["notice"]
    n = live.get("/v1/agents/poet")["turns"][1]["stop"]
    assert value["usage"]["prompt_tokens"] > n, "the model reads all of it"
    same = say(live, [SYSTEM, user("Again")], "poet")  # with its own system message
    assert len(messages_of(live, "poet")) == 9 and same.json()["kvcellar"]["agent_id"] == "poet"


@pytest.mark.parametrize("has_system", [True, False])
def test_a_whole_conversation_goes_on_whether_or_not_it_repeats_the_agents_system_message(
    live, has_system
):
    name = f"whole-{has_system}"
    make(live, name, "One.")
    for text in ("Two.", "Three."):
        known = messages_of(live, name)
        answer = say(live, [*(known if has_system else known[1:]), user(text)], name)
        assert answer.json()["kvcellar"]["agent_id"] == name
        assert "notice" not in answer.json()["kvcellar"]
        assert messages_of(live, name)[: len(known)] == known
    assert live.get(f"/v1/agents/{name}")["n_turns"] == 3


OTHERS = {
    "another answer": lambda known: [*known[:2], NO, user("?")],
    "a shorter history": lambda known: known[:-1],
    "the first request again": lambda known: known[:2],
    "another first message": lambda known: [known[0], user("Else."), *known[2:], user("?")],
    "another system message": lambda known: [{"role": "system", "content": "Else."}, user("Hello")],
    "messages dropped": lambda known: [known[0], *known[3:], user("?")],
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.slow
def test_what_does_not_continue_it_is_answered_by_a_branch_and_the_agent_is_as_it_was(live, what):
    name = "b." + what.replace(" ", "-")
    known = make(live, name, "One.", "Two.")
    tokens = live.get(f"/v1/agents/{name}")["n_tokens"]
    sent = OTHERS[what](known)
    answer = say(live, sent, name, temperature=1.5, seed=3)  # or it would say the same again
    assert answer.status_code == 200
    value = answer.json()["kvcellar"]
    assert value["agent_id"] == f"{name}.2" == answer.headers["x-agent-id"]
    assert f"does not continue the history of agent {name}" in value["notice"]
    assert messages_of(live, name) == known
    assert live.get(f"/v1/agents/{name}")["n_tokens"] == tokens
    branch = live.get(f"/v1/agents/{name}.2")
    assert branch["messages"][:-1] == sent and branch["parent"] == name
    # The client goes on from the answer under the name that it knows: no branch of the branch.
    more = say(live, [*branch["messages"], user("And?")], name).json()["kvcellar"]
    assert more["agent_id"] == f"{name}.2" and more["notice"] == value["notice"]
    assert len(messages_of(live, f"{name}.2")) == len(branch["messages"]) + 2
    assert messages_of(live, name) == known


def test_a_branch_shares_what_is_common(live):
    make(live, "sharing", "One. " * 40, "Two.")
    known = messages_of(live, "sharing")
    at = live.get("/v1/agents/sharing")["turns"][0]["stop"]
    value = say(live, [*known[:3], user("Else.")], "sharing").json()
    assert live.get("/v1/agents/sharing.2")["parent_position"] == at
    assert value["usage"]["prompt_tokens_details"]["cached_tokens"] >= at - 1


def test_a_branch_that_was_named_itself_is_a_promise_too(live):
    known = make(live, "trunk", "One.")
    say(live, [*known[:2], NO, user("Else.")], "trunk")
    assert "trunk.2" in {agent["id"] for agent in live.get("/v1/agents")["data"]}
    other = say(live, [SYSTEM, user("More."), known[2], user("?")], "trunk.2").json()["kvcellar"]
    assert other["agent_id"] == "trunk.2.2"


def test_a_persons_fork_is_never_gone_on_from_under_another_name(live):
    make(live, "own", "One.")
    live.post("/v1/agents/own/fork", {"id": "own.2"})
    live.post("/v1/agents/own.2/generate", {"text": "Mine.", **SHORT})
    mine = messages_of(live, "own.2")
    live.post("/v1/agents/own/generate", {"text": "Two.", **SHORT})
    value = say(live, [*mine, user("Go on.")], "own").json()["kvcellar"]
    assert value["agent_id"] == "own.3" and messages_of(live, "own.2") == mine


def test_every_protocol_says_where_its_answer_is(live):
    known = make(live, "spoken", "One.")
    said = anthropic(live, [user("Hello")], "spoken")
    assert said.headers["x-agent-id"] == said.json()["kvcellar"]["agent_id"] == "spoken"
    assert "put behind" in said.json()["kvcellar"]["notice"]
    assert messages_of(live, "spoken")[: len(known)] == known
    said = anthropic(live, [user("One.")], "spoken")
    assert said.headers["x-agent-id"] == said.json()["kvcellar"]["agent_id"] == "spoken.2"
    assert said.headers["x-agent-notice"] == said.json()["kvcellar"]["notice"]
    said = responses(live, "Hello", "spoken")
    assert said.headers["x-agent-id"] == said.json()["kvcellar"]["agent_id"] == "spoken"
    said = responses(live, "Hello", "spoken", instructions="Be another.")
    assert said.headers["x-agent-id"] == said.json()["kvcellar"]["agent_id"] == "spoken.3"
    n = len(messages_of(live, "spoken"))
    said = live.http.post(
        "/v1/completions", json={"prompt": " and", **SHORT}, headers={"X-Agent-Id": "spoken"}
    )
    assert said.headers["x-agent-id"] == "spoken" and len(messages_of(live, "spoken")) == n


def events(response):
    lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_a_stream_says_it_too(live):
    make(live, "streamed", "One.")
    headers = {"X-Agent-Id": "streamed"}
    body = {"messages": [user("One.")], "stream": True, **SHORT}
    with live.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.headers["x-agent-id"] == "streamed.2"
        assert "does not continue" in response.headers["x-agent-notice"]
        first, *rest = events(response)
    assert first["kvcellar"]["agent_id"] == "streamed.2" and "notice" in first["kvcellar"]
    assert all("kvcellar" not in one for one in rest)
    body = {"model": "demo", "max_tokens": 6, "messages": [user("Hello")], "stream": True}
    with live.http.stream("POST", "/v1/messages", json=body, headers=headers) as response:
        assert response.headers["x-agent-id"] == "streamed"
        assert events(response)[0]["message"]["kvcellar"]["agent_id"] == "streamed"
    body = {"input": "Hello", "stream": True, "max_output_tokens": 6}
    with live.http.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        assert response.headers["x-agent-id"] == "streamed"
        assert events(response)[0]["response"]["kvcellar"]["agent_id"] == "streamed"


def test_tokens_behind_the_messages_are_not_lost_to_a_conversation(live):
    known = make(live, "mixed", "One.")
    body = {"prompt": " and so on", "agent_id": "mixed", **SHORT}
    live.post("/v1/completions", body)
    n = live.get("/v1/agents/mixed")["n_tokens"]
    value = say(live, [*known, user("Two.")], "mixed").json()["kvcellar"]
    assert value["agent_id"] == "mixed.2"
    assert live.get("/v1/agents/mixed")["n_tokens"] == n


def test_requests_for_one_name_at_once_lose_nothing(live):
    make(live, "busy", "One.")
    answers = []

    def ask(text):
        answers.append(say(live, [user(text)], "busy"))

    threads = [threading.Thread(target=ask, args=(f"{i}?",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.status_code for a in answers] == [200] * 4
    texts = [m["content"] for m in messages_of(live, "busy") if m["role"] == "user"]
    assert texts[0] == "One." and sorted(texts[1:]) == ["0?", "1?", "2?", "3?"]


def test_the_same_continuation_twice_at_once_is_a_turn_and_a_branch(live):
    known = make(live, "twice", "One.")
    answers = []

    def ask():
        answers.append(say(live, [*known, user("Two.")], "twice").json()["kvcellar"]["agent_id"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["twice", "twice.2", "twice.3"]
    for name in answers:
        assert len(messages_of(live, name)) == len(known) + 2


def test_an_agent_gives_one_answer_in_a_turn(live):
    make(live, "single", "One.")
    refused = say(live, [user("Hello")], "single", n=2)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


# A name has to be there, or asked for --------------------------------------------------------


def test_a_misspelt_name_makes_no_agent_in_any_protocol(live):
    answers = [
        say(live, [user("Hello")], "nobody"),
        anthropic(live, [user("Hello")], "nobody"),
        responses(live, "Hello", "nobody"),
        live.http.post("/v1/completions", json={"prompt": "a", "agent_id": "nobody"}),
        say(live, [user("Hello")], agent_id="nobody"),
        say(live, [user("Hello")], "nobody", stream=True),
    ]
    for answer in answers:
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert "POST /v1/agents" in error["message"] and "X-Agent-Create" in error["message"]
    assert answers[1].json()["error"]["type"] == "not_found_error"
    assert answers[0].json()["error"]["code"] == "agent_not_found"
    assert "nobody" not in {agent["id"] for agent in live.get("/v1/agents")["data"]}


@pytest.mark.parametrize("protocol", ["chat", "anthropic", "responses", "completions"])
def test_it_is_made_on_first_use_where_that_is_asked_for(live, protocol):
    name, wish = f"asked-{protocol}", {"X-Agent-Create": "true"}
    for n in (1, 2):
        if protocol == "chat":
            answer = say(live, [user(f"Hello {n}")], name, wish)
        elif protocol == "anthropic":
            answer = anthropic(live, [user(f"Hello {n}")], name, wish)
        elif protocol == "responses":
            answer = responses(live, f"Hello {n}", name, wish)
        else:
            body = {"prompt": "a", **SHORT}
            answer = live.http.post(
                "/v1/completions", json=body, headers={"X-Agent-Id": name, **wish}
            )
        assert answer.status_code == 200, answer.text
        assert live.get(f"/v1/agents/{name}")["n_turns"] == n


def test_a_name_that_cannot_be_one_is_not_made(live):
    for bad in ("../etc", "a b", "x" * 129):
        refused = say(live, [user("Hello")], bad, {"X-Agent-Create": "true"})
        assert refused.status_code == 400 and "cannot name an agent" in refused.text


def test_a_refused_first_turn_leaves_no_agent(live):
    wish = {"X-Agent-Create": "true"}
    refused = say(live, [user("word " * 5000)], "stillborn", wish)
    assert refused.status_code == 400
    assert live.http.get("/v1/agents/stillborn").status_code == 404
    known = make(live, "fertile", "One.")
    refused = say(live, [known[0], user("word " * 5000)], "fertile")
    assert refused.status_code == 400
    say(live, [known[0], user("word " * 5000), known[2], user("?")], "fertile")
    assert live.http.get("/v1/agents/fertile.2").status_code == 404
    assert messages_of(live, "fertile") == known


def test_header_and_body_name_one_agent(live):
    make(live, "first")
    make(live, "second")
    both = say(live, [user("Hello")], "first", agent_id="second")
    assert both.status_code == 400 and both.json()["error"]["code"] == "two_agents"
    assert say(live, [user("Hello")], "first", agent_id="first").status_code == 200


def test_the_headers_are_in_the_openapi_of_every_route_that_reads_them(live):
    paths = live.get("/openapi.json")["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
        headers = {
            one["name"].lower(): one["description"]
            for one in paths[path]["post"]["parameters"]
            if one["in"] == "header"
        }
        assert {"x-agent-id", "x-agent-create", "x-session-id"} <= headers.keys(), path
        assert "never replaced" in headers["x-agent-id"]


# Why something was computed again --------------------------------------------------------------

LONG = " ".join(f"Rule {i}: never do what is forbidden by rule {i + 1}." for i in range(40))


def dated(day):
    return {"role": "system", "content": f"You are careful.\nToday is {day}.\n{LONG}"}


def miss_of(answer):
    return answer.json()["kvcellar"]["miss"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_changed_date_at_the_top_of_an_unnamed_conversation_is_a_miss_with_a_cause(live, is_new):
    talk = [dated(f"Monday {is_new}"), user(f"First of all {is_new}.")]
    first = say(live, talk)
    assert miss_of(first) is None or miss_of(first)["cause"] == "system"
    talk[0] = dated(f"Tuesday {is_new}")
    if not is_new:
        talk += [first.json()["choices"][0]["message"], user("And?")]
    second = say(live, talk)
    miss, usage = miss_of(second), second.json()["usage"]
    assert miss["cause"] == "system" and miss["advice"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 200 < miss["tokens_lost"] <= usage["prompt_tokens"] - cached
    assert "Monday" in miss["was"] and "Tuesday" in miss["became"]
    agent = second.json()["kvcellar"]["agent_id"]
    why = live.get(f"/v1/agents/{agent}/why")
    assert why["miss"]["cause"] == "system" and why["said"] == miss["advice"]


def test_unlike_conversations_do_not_miss_each_other(live):
    say(live, [{"role": "system", "content": "One thing " * 50}, user("a")])
    other = say(live, [{"role": "system", "content": "Quite another matter " * 50}, user("a")])
    assert miss_of(other) is None


def test_an_edited_beginning_is_a_miss_and_asking_again_is_none(live):
    known = make(live, "edited", "One. " * 30, "Two. " * 30)
    again = say(live, known[:-1], "edited", temperature=1.5, seed=4)
    assert again.json()["kvcellar"]["agent_id"] == "edited.2" and miss_of(again) is None
    changed = [known[0], user("Else! " + known[1]["content"]), *known[2:], user("?")]
    edited = say(live, changed, "edited")
    assert miss_of(edited)["cause"] == "edited" and miss_of(edited)["tokens_lost"] > 50
    other = say(
        live, [{"role": "system", "content": "You write prose."}, *known[1:], user("?")], "edited"
    )
    assert miss_of(other)["cause"] == "system"
    assert live.get("/v1/agents/edited/why")["miss"] is None


def test_a_few_tokens_that_are_not_worth_loading_are_not_said_to_be_evicted(live):
    live.post("/v1/agents", {"id": "brief"})
    short = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for text in ("One.", "Two."):
        live.post("/v1/agents/brief/generate", {"text": text, **short})
    live.post("/v1/agents/brief/rewind", {})
    live.post("/v1/agents/brief/undo", {})
    live.post("/v1/agents/brief/generate", {"text": "Three.", **short})
    miss = live.get("/v1/agents/brief/why")["miss"]
    assert 0 < miss["tokens_lost"] < MIN_GAIN
    assert miss["cause"] == "recomputed"


def test_changed_tools_are_a_miss(live):
    def tool(name):
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    talk = [{"role": "system", "content": f"With tools. {LONG}"}, user("Go.")]
    say(live, talk, tools=[tool("alpha")], tool_choice="none")
    other = say(live, talk, tools=[tool("omega")], tool_choice="none")
    assert miss_of(other)["cause"] in ("tools", "system"), "or in the system message, as text"


def test_why_says_what_there_is_to_say_of_an_agent_that_lost_nothing(live):
    make(live, "clear")
    assert "has taken no turn yet" in live.get("/v1/agents/clear/why")["said"]
    live.post("/v1/agents/clear/generate", {"text": "One.", **SHORT})
    assert "it was the first turn" in live.get("/v1/agents/clear/why")["said"]
    live.post("/v1/agents/clear/generate", {"text": "Two.", **SHORT})
    assert "reused all of the history" in live.get("/v1/agents/clear/why")["said"]
    for left in ("it has 1 turn left", "it has no turn left"):
        live.post("/v1/agents/clear/rewind")
        why = live.get("/v1/agents/clear/why")
        assert why["miss"] is None and "went back since its last turn" in why["said"]
        assert left in why["said"]


# A session id is a hint ----------------------------------------------------------------------

HINTS = {
    "header": lambda one: {"headers": {"X-Session-Id": one}},
    "opencode": lambda one: {"headers": {"x-session-affinity": one}},
    "body": lambda one: {"session_id": one},
    "cache key": lambda one: {"prompt_cache_key": one},
}


@pytest.mark.parametrize("how", HINTS)
def test_one_session_id_for_a_title_and_a_conversation_replaces_nothing(live, how):
    """OpenCode sends them so: other system messages, one id."""
    hint = HINTS[how](f"ses {how}")
    talk = [{"role": "system", "content": f"You code. {how}"}, user("Fix it.")]
    first = say(live, talk, **hint).json()
    title = [{"role": "system", "content": "You make titles."}, user("Fix it.")]
    second = say(live, title, **hint).json()
    assert first["kvcellar"]["agent_id"].startswith("chat-")
    assert second["kvcellar"]["agent_id"] != first["kvcellar"]["agent_id"]
    talk += [first["choices"][0]["message"], user("And?")]
    third = say(live, talk, **hint).json()
    assert third["kvcellar"]["agent_id"] == first["kvcellar"]["agent_id"]
    assert "notice" not in third["kvcellar"]
    cached = third["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["total_tokens"] - 2


def test_anthropics_user_id_is_a_hint(live):
    body = {"metadata": {"user_id": "user_1_session_2"}}
    said = anthropic(live, [user("Hi there")], "", **body).json()
    assert said["kvcellar"]["agent_id"].startswith("chat-")


def test_of_two_that_said_the_same_each_session_goes_on_with_its_own(live):
    talk = [user("The same words.")]
    first = {name: say(live, talk, session_id=name).json() for name in ("s1", "s2")}
    mine = {name: value["kvcellar"]["agent_id"] for name, value in first.items()}
    assert mine["s1"] != mine["s2"]
    talk += [first["s1"]["choices"][0]["message"], user("And?")]
    for name in ("s1", "s2"):
        assert say(live, talk, session_id=name).json()["kvcellar"]["agent_id"] == mine[name]


def test_a_session_id_that_is_an_agents_name_names_nobody(live):
    known = make(live, "honest", "One.")
    value = say(live, [user("Hello")], headers={"X-Session-Id": "honest"}).json()
    assert value["kvcellar"]["agent_id"].startswith("chat-")
    assert messages_of(live, "honest") == known


def test_a_response_that_was_deleted_is_gone_for_good(live):
    value = live.post("/v1/responses", {"input": "Forget it.", "max_output_tokens": 4})
    before = live.get("/v1/agents?dropped=true")["data"]
    assert live.http.delete(f"/v1/responses/{value['id']}").json()["deleted"] is True
    assert live.get("/v1/agents?dropped=true")["data"] == before


@pytest.mark.slow
def test_branches_and_what_is_behind_the_history_are_there_after_a_restart(tmp_path):
    with serving(tmp_path) as live:
        known = make(live, "poet", "One.")
        say(live, [user("Hello")], "poet")
        say(live, [*known[:2], NO, user("Else.")], "poet")
        mine, branch = messages_of(live, "poet"), messages_of(live, "poet.2")
    with serving(tmp_path) as live:
        assert messages_of(live, "poet") == mine and messages_of(live, "poet.2") == branch
        value = say(live, [*branch, user("And?")], "poet").json()["kvcellar"]
        assert value["agent_id"] == "poet.2"


# What it costs ------------------------------------------------------------------------------

LOOK = {
    "name": "look",
    "description": "Look something up.",
    "input_schema": {"type": "object", "properties": {"what": {"type": "string"}}},
}
KNOWS_TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls or '' }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """A model whose template is given tools as they are."""

    def load(path, progress):
        return open_host(path, capacity=4096, chat_template=KNOWS_TOOLS, progress=progress)

    with serving(tmp_path_factory.mktemp("knowing"), load=load) as server:
        yield server


def counted_and_billed(live, name, messages, headers=None, **more):
    """The tokens that are counted for a turn, and those that it is billed."""
    headers = {"X-Agent-Id": name, **(headers or {})}
    counted = live.post(
        "/v1/messages/count_tokens", {"messages": messages, **more}, headers=headers
    )
    answer = anthropic(live, messages, name, headers, **more).json()
    kinds = ("", "cache_read_", "cache_creation_")
    billed = sum(answer["usage"][f"{kind}input_tokens"] for kind in kinds)
    return counted["input_tokens"], billed, answer["kvcellar"]


@pytest.mark.parametrize("which", ["live", "knowing"])
@pytest.mark.slow
def test_what_is_counted_for_an_agent_is_what_its_turn_is_billed(which, request):
    live, name = request.getfixturevalue(which), f"counted-{which}"
    live.post("/v1/agents", {"id": name, "system": "Be kind."})
    n = 0
    for text in ("One.", "Two.", "Three."):  # what is new alone
        counted, billed, _ = counted_and_billed(live, name, [user(text)])
        assert counted == billed > n
        n = billed
    known = messages_of(live, name)[1:]
    counted, billed, said = counted_and_billed(live, name, [*known, user("All.")])
    assert counted == billed > n and said["agent_id"] == name
    n_before = len(messages_of(live, name))
    for sent in ([known[0], NO, user("?")], [known[0], NO, user("?"), NO, user("!")]):
        counted, billed, said = counted_and_billed(live, name, sent, system="Be kind.")
        assert counted == billed and said["agent_id"] != name
    counted, billed, _ = counted_and_billed(live, name, [known[0], NO, user("?")])
    assert counted == billed, "with the agent's own system message"
    assert len(messages_of(live, name)) == n_before
    new = f"{name}-new"
    counted, billed, _ = counted_and_billed(live, new, [user("Hi")], {"X-Agent-Create": "true"})
    assert counted == billed


def test_counting_for_an_agent_makes_and_changes_nothing(live):
    known = make(live, "quiet", "One.")
    names = {agent["id"] for agent in live.get("/v1/agents")["data"]}
    path, body = "/v1/messages/count_tokens", {"messages": [user("Hello")]}
    counted = live.post(path, body, headers={"X-Agent-Id": "quiet"})
    assert counted == live.post(path, {**body, "agent_id": "quiet"})
    assert counted["input_tokens"] > live.post(path, body)["input_tokens"]
    live.post(path, body, headers={"X-Agent-Id": "made-later", "X-Agent-Create": "true"})
    live.post(path, {"messages": [user("Else"), NO, user("?")]}, headers={"X-Agent-Id": "quiet"})
    missing = live.http.post(path, json=body, headers={"X-Agent-Id": "nobody"})
    assert missing.status_code == 404 and "no agent 'nobody'" in missing.text
    bad = {"X-Agent-Id": "../etc", "X-Agent-Create": "true"}
    assert live.http.post(path, json=body, headers=bad).status_code == 400
    assert messages_of(live, "quiet") == known
    assert {agent["id"] for agent in live.get("/v1/agents")["data"]} == names


@pytest.mark.parametrize("system", [None, "Be kind."])
@pytest.mark.parametrize("which", ["live", "knowing"])
def test_whoever_sends_what_is_new_alone_keeps_the_agents_tools(which, system, request):
    live, name = request.getfixturevalue(which), f"tooled-{which}-{system is None}"
    own = {} if system is None else {"system": system}
    live.post("/v1/agents", {"id": name, **own})
    counted, n, _ = counted_and_billed(live, name, [user("One.")], tools=[LOOK])
    assert counted == n
    counted, billed, said = counted_and_billed(live, name, [user("Two.")])
    assert counted == billed > n, "the tools, the turn before and this one"
    assert said["agent_id"] == name and said["miss"] is None
    n = billed
    counted, billed, said = counted_and_billed(live, name, [user("Three.")], tools=[LOOK])
    assert counted == billed > n, "also where it sends them again"
    assert said["agent_id"] == name and said["miss"] is None


def test_a_prompt_behind_an_agents_history_is_billed_with_it(live):
    make(live, "continued", "One.")
    n = live.get("/v1/agents/continued")["n_tokens"]
    body = {"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
    alone = live.post("/v1/completions", body)["usage"]["prompt_tokens"]
    for is_streamed in (False, True):
        n = live.get("/v1/agents/continued")["n_tokens"]
        if is_streamed:
            more = {"stream": True, "stream_options": {"include_usage": True}}
            headers = {"X-Agent-Id": "continued"}
            said = live.http.post("/v1/completions", json={**body, **more}, headers=headers).text
            usage = json.loads(said.split("data: ")[-2])["usage"]
        else:
            usage = live.post("/v1/completions", body, headers={"X-Agent-Id": "continued"})["usage"]
        assert usage["prompt_tokens"] == n + alone
        assert n - 1 <= usage["prompt_tokens_details"]["cached_tokens"] < n + alone
        assert usage["total_tokens"] == n + alone + usage["completion_tokens"]


def test_a_response_that_an_agent_gave_is_gone_on_from_with_the_agents_history(live):
    make(live, "answering", "One.", "Two.")
    first = responses(live, "Three.", "answering").json()
    at_its_end = messages_of(live, "answering")
    n = first["usage"]["total_tokens"]
    for text in ("Four.", "Five."):  # also from what has gone on so
        body = {"input": text, "previous_response_id": first["id"], "max_output_tokens": 6}
        first = live.post("/v1/responses", {**body, "temperature": 0})  # read as it was sampled
        agent_id = first["kvcellar"]["agent_id"]
        assert agent_id != "answering"
        assert messages_of(live, agent_id)[: len(at_its_end)] == at_its_end
        assert first["usage"]["input_tokens"] > n
        assert first["usage"]["input_tokens_details"]["cached_tokens"] >= n - 1
        n = first["usage"]["total_tokens"]
    sent = live.get(f"/v1/responses/{first['id']}/input_items?order=asc")["data"]
    assert [i["content"][0]["text"] for i in sent if i["role"] == "user"] == [
        "Three.",
        "Four.",
        "Five.",
    ]
    assert messages_of(live, "answering") == at_its_end


def test_an_agent_whose_name_looks_like_one_that_the_server_gives_is_a_promise_too(tmp_path):
    names = ("chat-bot", "resp_onse", "chat-0123456789abc")
    with serving(tmp_path, max_unnamed=2) as live:
        known = {name: make(live, name, f"{name}?") for name in names}
        for name in names:  # what nobody named never goes on in it
            answer = say(live, [*known[name], user("And?")])
            assert answer.json()["kvcellar"]["agent_id"] != name
        for i in range(5):
            say(live, [user(f"Conversation {i}.")])
        assert live.http.delete("/v1/responses/resp_onse").status_code == 404
        assert {name: messages_of(live, name) for name in names} == known


def test_of_what_nobody_named_the_oldest_are_forgotten_also_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "MOST_DOCUMENTS", 2)
    with serving(tmp_path, max_unnamed=2) as live:
        make(live, "named", "Stay.")

        def chat(i):
            return say(live, [user(f"Number {i}.")]).json()["kvcellar"]["agent_id"]

        def response(i):
            body = {"input": f"Number {i}.", "max_output_tokens": 6, "temperature": 0}
            return live.post("/v1/responses", body)["id"]

        titled = chat(6)
        live.post(f"/v1/agents/{titled}/rename", {"title": "Somebody wants it"})
        told = [(chat(i), response(i)) for i in range(6)]

        def on_disk():
            live.service.store.flush()
            names = {*live.service.store.recorded_serials(), *live.service.store.reference_names()}
            return {name.partition("@")[0] for name in names}

        def is_pruned():
            chat(5)
            return not {name for pair in told[:3] for name in pair} & on_disk()

        live.until(is_pruned, "the oldest on disk are gone")
        assert {"named", titled} <= on_disk()
        assert len(on_disk()) <= 2 + 2 * 3  # the last is not silent yet


# What a turn that goes on costs ----------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """Count the calls that render, compare and key messages, and those that lend a model."""
    done = {"rendered": [], "compared": [], "keyed": [], "lent": []}
    use = ModelRegistry.use
    render, compare, key = prompts._apply, Messages.n_matched, messages_module.match_key

    def rendered(*args):
        done["rendered"].append(len(args[1]))
        return render(*args)

    def compared(self, other, rules):
        done["compared"].append((len(self), len(other)))
        return compare(self, other, rules)

    def keyed(message, rules):
        done["keyed"].append(message["content"])
        return key(message, rules)

    def lent(self, name):
        done["lent"].append(name)
        return use(self, name)

    monkeypatch.setattr(ModelRegistry, "use", lent)
    monkeypatch.setattr(prompts, "_apply", rendered)
    monkeypatch.setattr(Messages, "n_matched", compared)
    monkeypatch.setattr(messages_module, "match_key", keyed)
    yield done


def worked(done):
    found = {name: list(values) for name, values in done.items()}
    for values in done.values():
        values.clear()
    return found


@pytest.mark.parametrize("sends", ["all", "what is new", "text"])
def test_a_named_turn_that_goes_on_is_lent_its_model_rendered_and_compared_once_and_keys_only_new(
    live, work, sends
):
    name = f"once-{sends.replace(' ', '-')}"
    known = make(live, name, "One.", "Two.", "Three.")
    worked(work)
    if sends == "text":
        live.post(f"/v1/agents/{name}/generate", {"text": "Four.", **SHORT})
    else:
        said = say(live, [*(known if sends == "all" else []), user("Four.")], name)
        assert said.json()["kvcellar"]["agent_id"] == name
    found = worked(work)
    assert len(messages_of(live, name)) == len(known) + 2 == 9
    assert found["rendered"] == [8] and len(found["lent"]) == 1
    assert len(found["compared"]) == 1
    new = ["One.", "Four."]  # what is new might be the conversation from its beginning
    assert found["keyed"] == (new if sends == "what is new" else [])


def test_only_an_answer_that_comes_back_in_other_words_is_keyed_once_in_either(live, work):
    known = make(live, "trimmed", "One.", "Two.")
    for text in ("Three.", "Four."):
        worked(work)
        answer = known[-1]["content"]
        sent = [*known[:-1], {"role": "assistant", "content": f"{answer}  "}]
        assert say(live, [*sent, user(text)], "trimmed").json()["kvcellar"]["agent_id"] == "trimmed"
        found = worked(work)
        assert found["keyed"] == [answer, f"{answer}  "], "and none of those before it"
        assert len(found["rendered"]) == len(found["compared"]) == 1
        known = messages_of(live, "trimmed")


def test_a_conversation_of_nobody_is_compared_by_keys_that_are_made_once(live, work):
    """It is looked for among all agents, by what each of its messages says."""
    sent = [user("Once upon a time")]
    for text in ("And then?", "And then?!", "And so?"):
        known = say(live, sent).json()["choices"][0]["message"]
        sent = [*sent, {"role": "assistant", "content": known["content"]}, user(text)]
        worked(work)
    say(live, sent)
    found = worked(work)
    assert len(found["rendered"]) == len(found["compared"]) == 1
    mine = [message["content"] for message in sent[:-1]]
    assert sorted(found["keyed"]) == sorted([*mine, *mine[-2:]]), "and the agent's last turn"
