"""A gateway before two replicas: requests find what they need, and clients see one server."""

from __future__ import annotations

import json

import pytest

from kvcellar.deploy.gateway import ReplicaLostError
from kvcellar.deploy.reading import PROMPTS, HttpRequest
from kvcellar.prefix.digest import CHUNK

LONG = "The cellar keeps what was read once, so that nobody has to read it again. " * 12


def read(loop, replica, path, body, **headers):
    raw = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    raw += [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": raw}
    return loop.run(replica.read(HttpRequest(scope, body)))


def test_all_turns_of_an_agent_go_to_one_replica_and_agents_to_both(loop, local):
    found = {}
    for n in range(12):
        name = f"walker-{n}"
        first = loop.run(local.chat("Hello.", x_agent_id=name, x_agent_create="true"))
        then = loop.run(local.chat("Go on.", x_agent_id=name))
        assert then.headers["x-agent-id"] == name
        found[name] = {first.replica, then.replica}
    assert all(len(where) == 1 for where in found.values())
    assert {one for where in found.values() for one in where} == {"left", "right"}


def test_a_conversation_without_a_name_goes_where_its_prefix_is(loop, local):
    for n in range(4):
        said = [f"{n} {LONG}"]
        first = loop.run(local.chat(*said))
        for _ in range(2):
            said += [loop.run(local.chat(*said)).json["choices"][0]["message"]["content"], "Go on."]
            then = loop.run(local.chat(*said))
            assert then.replica == first.replica
            cached = then.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > then.json["usage"]["prompt_tokens"] - CHUNK


def test_what_replicas_report_is_what_another_gateway_goes_by(loop, local, replicas, config):
    first = loop.run(local.chat(f"reported {LONG}"))
    agent = loop.run(local.chat("Hi.", x_agent_id="reported", x_agent_create="true"))
    other = type(local)(replicas, config)
    assert other.holdings.holder("reported") == ""
    loop.run(other.told())
    assert other.holdings.holder("reported") == agent.replica
    again = loop.run(other.chat(f"reported {LONG}", "Yes.", "Go on."))
    assert again.replica == first.replica


def test_a_busy_replica_is_passed_over_and_the_agent_goes_on_where_its_turn_is(loop, local):
    first = loop.run(local.chat("Hello.", x_agent_id="busy", x_agent_create="true"))
    local.loads[first.replica] = 2
    then = loop.run(local.chat("Go on.", x_agent_id="busy"))
    assert then.replica != first.replica
    assert then.headers["x-agent-id"] == "busy"
    said = loop.run(local.ask("GET", "/v1/agents/busy")).json
    assert said["n_turns"] == 2


def test_a_lost_replica_loses_no_agent_and_the_other_gives_the_same_tokens(loop, local):
    say = [("Tell me of the sea.",), ("And of the wind?",), ("Go on.",)]
    alone = [
        loop.run(local.chat(*text, x_agent_id="alone", x_agent_create="true")).json for text in say
    ]
    found = [
        loop.run(local.chat(*text, x_agent_id="moved", x_agent_create="true")) for text in say[:2]
    ]
    local.lost.add(found[0].replica)
    body = {"messages": [{"role": "user", "content": say[2][0]}], "temperature": 0}
    named = {"x-agent-id": "moved"}
    gone = loop.run(local.ask("POST", "/v1/chat/completions", body, headers=named))
    assert gone.status == 503 and gone.headers["retry-after"] == "1"
    assert gone.json["error"]["code"] == "replica_lost"
    local.holdings.keep([name for name in local.replicas if name not in local.lost])
    found.append(loop.run(local.chat(*say[2], x_agent_id="moved")))
    assert found[2].replica != found[1].replica
    assert [one.json["choices"][0]["message"] for one in found] == [
        one["choices"][0]["message"] for one in alone
    ]


def test_an_answer_whose_replica_dies_in_the_middle_breaks_off_and_is_not_begun_again(loop, local):
    body = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
    local.dies = True
    with pytest.raises(ReplicaLostError):
        loop.run(local.ask("POST", "/v1/chat/completions", body))
    for replica in local.replicas.values():
        assert replica.service.n_active == 0


@pytest.mark.parametrize("path", sorted(PROMPTS))
def test_every_protocols_prompt_is_read_as_it_is_answered(loop, local, replicas, path):
    said = [{"role": "user", "content": f"{path} {LONG}"}]
    chat = {"messages": said, "max_tokens": 1, "model": "demo", "stream": False}
    bodies = {
        "/api/chat": {"messages": said, "model": "demo", "stream": False},
        "/v1/responses": {"input": f"{path} {LONG}", "max_output_tokens": 1},
        "/v1/completions": {"prompt": f"{path} {LONG}", "max_tokens": 1},
        "/api/generate": {"prompt": f"{path} {LONG}", "model": "demo", "stream": False},
        "/infill": {"input_prefix": f"{path} {LONG}", "input_suffix": "", "n_predict": 1},
    }
    body = bodies.get(path, chat)
    if path.startswith("/api"):
        body["options"] = {"num_predict": 1}
    before = [replica.service.n_active for replica in replicas]
    asked = json.dumps(body).encode()
    found = read(loop, replicas[0], path, asked)
    assert [replica.service.n_active for replica in replicas] == before
    answer = loop.run(local.ask("POST", path, body))
    if path == "/infill":  # the bundled model has no tokens for it
        assert (answer.status, found.n_tokens) == (400, 0)
        return
    assert answer.status == 200, answer.body
    usage = answer.json.get("usage", answer.json)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    counted = sum(usage.get(name) or 0 for name in names)
    counted += usage.get("cache_read_input_tokens", 0) + usage.get("cache_creation_input_tokens", 0)
    assert found.n_tokens == counted
    assert len(found.hashes) == found.n_tokens // CHUNK
    (host,) = replicas[0].service.models.hosts()
    assert host.engine.stats().running == 0


def test_reading_makes_no_agent_and_computes_nothing(loop, replicas):
    service = replicas[0].service
    (host,) = service.models.hosts()
    before = host.engine.stats().requests
    body = b'{"messages": [{"role": "user", "content": "Only looking."}]}'
    found = read(loop, replicas[0], "/v1/chat/completions", body, x_agent_id="nobody-made-me")
    assert found.agent == "nobody-made-me" and found.n_tokens
    assert host.engine.stats().requests == before
    assert found.agent not in {info.agent_id for info in service.agents.directory.infos()}


def test_what_cannot_be_answered_wants_nothing(loop, replicas):
    for body in (b"", b"{", b'{"messages": 3}', b'{"messages": [], "model": "other"}'):
        assert read(loop, replicas[0], "/v1/chat/completions", body).n_tokens == 0


def test_strangers_are_told_apart_by_what_they_share(loop, local):
    ours = loop.run(local.chat(f"salted {LONG}", x_cache_salt="ours"))
    again = loop.run(local.chat(f"salted {LONG}", "Yes.", "Go on.", x_cache_salt="ours"))
    assert again.replica == ours.replica
    seen = {}
    for key in ("owner", "guest"):
        named = {"x-api-key": key, "x-agent-id": "same-name", "x-agent-create": "true"}
        where = [loop.run(local.chat(text, **named)) for text in ("Hello.", "Go on.")]
        assert [one.headers["x-agent-id"] for one in where] == ["same-name"] * 2
        assert where[0].replica == where[1].replica
        told = loop.run(local.ask("GET", "/v1/agents/same-name", headers={"x-api-key": key})).json
        seen[key] = told["n_turns"], told["created_s"]
    assert seen["owner"][0] == seen["guest"][0] == 2
    assert seen["owner"][1] != seen["guest"][1]


def test_who_is_refused_is_refused_in_the_servers_words(loop, local):
    body = {"messages": [{"role": "user", "content": "Hello."}]}
    wrong = loop.run(
        local.ask("POST", "/v1/chat/completions", body, headers={"x-api-key": "wrong"})
    )
    assert (wrong.status, wrong.json["error"]["code"]) == (401, "invalid_api_key")
    large = loop.run(local.ask("POST", "/v1/completions", b"x" * (1 << 17)))
    assert (large.status, large.json["error"]["code"]) == (413, "body_too_large")
    lying = loop.run(
        local.ask("POST", "/v1/completions", b"x" * (1 << 17), headers={"content-length": "5"})
    )
    assert lying.status == 413


def test_a_client_that_leaves_ends_its_answer(loop, local):
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 1500, "stream": True}
    got = loop.run(local.ask("POST", "/v1/chat/completions", body, until=b'"content"'))
    assert b"[DONE]" not in got.body
    for replica in local.replicas.values():
        assert replica.service.n_active == 0


def test_requests_for_nobody_are_answered_by_one_replica_unless_they_name_one(loop, local):
    seen = {loop.run(local.ask("GET", path)).replica for path in ("/v1/cache", "/health", "/ready")}
    assert len(seen) == 1
    for name in local.replicas:
        assert loop.run(local.ask("GET", "/health", headers={"x-replica": name})).replica == name


def engine_of(loop, replica):
    (host,) = replica.service.models.hosts()
    return loop.run(host.between_steps(lambda engine: engine.stats()))


def test_a_long_prompt_is_read_by_one_replica_and_answered_by_another(loop, split, local):
    answering, reading = split.replicas["left"], split.prefilling
    alone = loop.run(local.chat(f"split {LONG}", x_cache_salt="alone", x_replica="right"))
    before = engine_of(loop, answering).computed_tokens
    found = loop.run(split.chat(f"split {LONG}"))
    assert split.prepared == [found.json["usage"]["prompt_tokens"]]
    assert found.replica == "left"
    assert found.json["choices"][0]["message"] == alone.json["choices"][0]["message"]
    assert engine_of(loop, answering).computed_tokens - before < 64
    assert engine_of(loop, reading).running == 0
    names = reading.service.store.reference_names()
    assert "right-0" in names  # where nothing that is an agent's stands
    assert all("right-" not in info.agent_id for info in answering.service.agents.directory.infos())


def test_what_the_one_that_answers_holds_is_not_read_elsewhere(loop, split):
    loop.run(split.chat(f"held {LONG}"))
    loop.run(split.chat(f"held {LONG}", "Yes.", "Go on."))
    loop.run(split.chat("Short."))
    assert len(split.prepared) == 1


def test_where_nobody_reads_the_one_that_answers_does(loop, split):
    split.prefilling = None
    assert loop.run(split.chat(f"nobody {LONG}")).status == 200
    assert len(split.prepared) == 1
