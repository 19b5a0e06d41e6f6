"""Where requests go: what replicas hold, and who is chosen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.deploy.routing import (
    SETTLE_S,
    ReplicaHoldings,
    Report,
    RoutingPolicy,
    Wanted,
    agent_hash,
    digest_of_models,
    prompt_hashes,
    rank,
)
from kvcellar.prefix import RadixIndex, digest_of
from kvcellar.prefix.digest import CHUNK
from kvcellar.sight import FULL

POLICY = RoutingPolicy(busy_at=4, request_tokens=64)


def report(prompts, agents=(), revision=1, model="m"):
    """What a replica says that has read these prompts and served these agents (name, second)."""
    index = RadixIndex((FULL,))
    for prompt in prompts:
        index.insert_prefix(prompt, [np.arange(len(prompt))])
    digest = digest_of_models({model: digest_of(index)}, revision)
    said = [[agent_hash(name), second] for name, second in agents]
    made = Report(digest, np.array(said, dtype=np.uint64).reshape(-1, 2))
    return Report.from_stats(made.to_stats())


def wanted(prompt=(), agent="", model="m"):
    tokens = np.array(prompt, dtype=np.int64)
    return Wanted(agent, prompt_hashes(tokens, model), len(tokens))


def chosen(asked, holdings, **loads):
    return rank(asked, holdings, loads, POLICY)[0]


def test_a_request_goes_where_its_agent_was_served_last():
    holdings = ReplicaHoldings()
    holdings.learn("a", report([], [("poet", 10)]))
    holdings.learn("b", report([], [("poet", 20), ("cook", 5)]))
    assert chosen(wanted(agent="poet"), holdings, a=0, b=3) == "b"
    holdings.learn("a", report([], [("poet", 30)], revision=2))
    assert chosen(wanted(agent="poet"), holdings, a=3, b=0) == "a"


def test_a_request_goes_where_most_of_its_prompt_is():
    prompt = list(range(10 * CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt[: 3 * CHUNK]]))
    holdings.learn("b", report([prompt[: 8 * CHUNK]]))
    holdings.keep(["a", "b", "c"])
    assert holdings.matched(wanted(prompt).hashes) == {"a": 3 * CHUNK, "b": 8 * CHUNK}
    assert rank(wanted(prompt), holdings, {"a": 0, "b": 0, "c": 0}, POLICY) == ["b", "a", "c"]


def test_it_spills_over_where_the_one_that_holds_it_is_busy():
    prompt = list(range(8 * CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt], [("poet", 1)]))
    holdings.keep(["a", "b"])
    asked = wanted(prompt, "poet")
    assert rank(asked, holdings, {"a": 3, "b": 0}, POLICY) == ["a", "b"]
    assert rank(asked, holdings, {"a": 4, "b": 0}, POLICY) == ["b", "a"]
    assert rank(asked, holdings, {"a": 9, "b": 4}, POLICY) == ["a", "b"]


def test_what_costs_more_to_wait_for_than_to_compute_is_computed_elsewhere():
    prompt = list(range(CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt]))
    holdings.keep(["a", "b"])
    assert chosen(wanted(prompt), holdings, a=0, b=0) == "a"
    assert chosen(wanted(prompt), holdings, a=2, b=0) == "b"


def test_what_was_sent_counts_as_held_until_a_later_report_does_not_have_it():
    prompt = list(range(2 * CHUNK))
    holdings = ReplicaHoldings()
    holdings.keep(["a", "b"])
    holdings.sent(wanted(prompt, "poet"), "b", 100.0)
    assert holdings.holder("poet") == "b"
    assert holdings.matched(wanted(prompt).hashes) == {"b": 2 * CHUNK}
    holdings.learn("b", report([], revision=1), 101.0)
    assert holdings.matched(wanted(prompt).hashes) == {"b": 2 * CHUNK}
    holdings.learn("b", report([], revision=2), 100.0 + SETTLE_S)
    assert holdings.matched(wanted(prompt).hashes) == {}


def test_who_is_gone_holds_nothing():
    prompt = list(range(CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt], [("poet", 1)]))
    holdings.keep(["b"])
    assert holdings.replicas == ["b"]
    assert holdings.holder("poet") == ""
    assert holdings.matched(wanted(prompt).hashes) == {}


def test_an_older_report_changes_nothing():
    prompt = list(range(CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt], revision=2))
    holdings.learn("a", report([], revision=1))
    assert holdings.matched(wanted(prompt).hashes) == {"a": CHUNK}


def test_another_models_prompt_of_the_same_tokens_is_another():
    prompt = list(range(CHUNK))
    holdings = ReplicaHoldings()
    holdings.learn("a", report([prompt], model="small"))
    assert holdings.matched(wanted(prompt, model="large").hashes) == {}
    assert holdings.matched(wanted(prompt, model="small").hashes) == {"a": CHUNK}


def test_several_who_decide_send_a_new_agent_to_the_same_replica_and_agents_to_all():
    loads = {f"r{i}": 0 for i in range(4)}
    asked = [wanted(agent=f"agent-{i}") for i in range(100)]
    first = [rank(one, ReplicaHoldings(), loads, POLICY)[0] for one in asked]
    again = [
        rank(one, ReplicaHoldings(), dict(reversed(loads.items())), POLICY)[0] for one in asked
    ]
    assert first == again
    assert set(first) == set(loads)


def test_a_replica_that_is_named_gets_the_request_however_busy():
    assert rank(Wanted(replica="b"), ReplicaHoldings(), {"a": 0, "b": 99}, POLICY) == ["b"]
    assert rank(Wanted(replica="gone"), ReplicaHoldings(), {"a": 0, "b": 99}, POLICY) == ["a", "b"]


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), max_size=4)


@given(st.lists(st.tuples(st.sampled_from("ab"), PROMPTS), max_size=6), PROMPTS)
def test_what_is_matched_is_what_the_last_reports_say(reports, prompts):
    holdings, last = ReplicaHoldings(), {}
    for revision, (replica, told) in enumerate(reports):
        last[replica] = [[one for one in prompt for _ in range(CHUNK)] for prompt in told]
        holdings.learn(replica, report(last[replica], revision=revision))
    for prompt in prompts:
        tokens = [one for one in prompt for _ in range(CHUNK)]
        want = {
            replica: max((common(tokens, one) for one in told), default=0)
            for replica, told in last.items()
        }
        found = holdings.matched(wanted(tokens).hashes)
        assert found == {replica: n for replica, n in want.items() if n}


def common(a, b):
    n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return n - n % CHUNK
