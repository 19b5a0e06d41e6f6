"""Agents on a model with recurrent layers: from where they go on, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from kvcellar.agents.kv.residence import MIN_GAIN
from kvcellar.store import StoreConfig
from tests.agents.fakes import (
    engine_of,
    make_host,
    manager,
    nothing_is_held,
    oracle,
    run,
    tokens_of,
    turn,
)
from tests.agents.test_conversation import Thinking, n_tokens, user
from tests.engine.fakes import MIXED_PARAMS, STATE_PARAMS

LONG = "A long question about the sea, and about all that lives in it. "


def load(name: str, **more: Any) -> Any:
    more.setdefault("params", STATE_PARAMS)
    return make_host(name, tokenizer=Thinking(), **more)


@pytest.fixture(params=[STATE_PARAMS, MIXED_PARAMS], ids=["states", "states and a window"])
def agents(tmp_path, request):
    with manager(tmp_path / "store", lambda name: load(name, params=request.param)) as agents:
        yield agents


async def say(agents: Any, agent_id: str, *said: Any, **more: Any) -> Any:
    """A turn whose tokens are those of the model alone, and whose accounts are true."""
    engine = None if agents.models.host("hash") is None else engine_of(agents)
    before = engine.stats().computed_tokens if engine else 0
    end = await turn(agents, agent_id, *said, **more)
    engine, usage = engine_of(agents), end.usage
    n_sampled = len(end.finish.token_ids)
    n_computed = engine.stats().computed_tokens - before
    assert n_computed == usage.prompt_tokens - usage.cached_tokens + n_sampled - 1
    prompt = tokens_of(agents, agent_id)[:-n_sampled]
    assert list(end.finish.token_ids) == oracle(prompt, n_sampled, engine.cache.config.params)
    return end


def opened(agents: Any, agent_id: str) -> int:
    """Tokens of a conversation up to where its last answer was opened."""
    return n_tokens(agents.directory.conversation(agent_id)[:-1])


def test_a_turn_goes_on_from_before_the_opening_whose_thoughts_are_dropped(agents):
    run(agents.lifecycle.create("a", system=LONG))
    for i in range(4):
        known = opened(agents, "a") if i else 0
        end = run(say(agents, "a", f"{i}: {LONG}"))
        assert end.usage.cached_tokens == known
    assert agents.directory.why("a").cause == "template"
    nothing_is_held(agents)


def test_behind_calls_of_tools_it_goes_on_from_the_end_of_what_the_user_said_last(agents):
    run(agents.lifecycle.create("a"))
    messages = [user(LONG)]
    run(say(agents, "a", messages=messages))
    asked = n_tokens(messages)
    for i in range(3):  # thoughts stay as long as the user does not speak
        messages += [
            {"role": "assistant", "content": f"so</think>\nlook {i}"},
            {"role": "system", "content": f"seen: {LONG}"},
        ]
        run(say(agents, "a", messages=messages))
    messages += [{"role": "assistant", "content": "so</think>\nthat is it"}, user("Thanks.")]
    end = run(say(agents, "a", messages=messages))
    assert end.usage.cached_tokens == asked


def test_forks_go_on_from_where_they_were_made_and_copy_nothing(agents):
    run(agents.lifecycle.create("a", system=LONG))
    run(say(agents, "a", LONG))
    run(say(agents, "a", "Two."))
    n = len(tokens_of(agents, "a"))
    live = engine_of(agents).stats().cache.groups[0].live
    for name in "bc":
        run(agents.lifecycle.fork("a", name))
    assert engine_of(agents).stats().cache.groups[0].live == live
    for name, known in (("b", n - 1), ("c", n)):  # whose last token was sampled, not computed
        end = run(say(agents, name, tokens=[ord(name), 7]))
        assert end.usage.cached_tokens == known


def test_a_fork_in_a_middle_computes_from_the_nearest_snapshot_and_the_next_one_from_there(agents):
    run(agents.lifecycle.create("a", system=LONG))
    run(say(agents, "a", LONG))
    at = len(tokens_of(agents, "a")) - 9
    for name in "bc":
        run(agents.lifecycle.fork("a", name, position=at))
    first, second = (run(say(agents, name, tokens=[ord(name), 66])) for name in "bc")
    assert first.usage.cached_tokens < at
    assert second.usage.cached_tokens == at


def test_rewind_and_undo_keep_tokens_and_messages_as_with_any_model(agents):
    run(agents.lifecycle.create("a", system=LONG))
    for text in ("One.", "Two.", "Three."):
        run(say(agents, "a", f"{text} {LONG}"))

    def state() -> Any:
        return tokens_of(agents, "a"), agents.directory.conversation("a")

    before = state()
    run(agents.lifecycle.rewind("a", turn=-2))
    run(agents.dropped.undo("a"))
    assert state() == before
    end = run(say(agents, "a", "Four."))
    assert end.usage.cached_tokens <= n_tokens(before[1][:-1])

    run(agents.lifecycle.rewind("a", turn=-3))
    assert before[0][: len(state()[0])] == state()[0]
    assert state()[1] == before[1][:3]
    known = opened(agents, "a")
    end = run(say(agents, "a", f"Otherwise. {LONG}"))
    assert known <= end.usage.cached_tokens <= known + 1  # where the turns before parted, too


def test_an_answer_that_is_asked_for_again_reads_the_opening_alone(agents):
    run(agents.lifecycle.create("a", system=LONG))
    messages = [user(LONG)]
    run(say(agents, "a", messages=messages))
    end = run(say(agents, "a", messages=messages))
    assert end.usage.cached_tokens == n_tokens(messages)
    run(agents.lifecycle.fork("a", "b", turn=0))
    end = run(say(agents, "b", tokens=list(range(97, 120))))
    again = run(say(agents, "b", tokens=[98]))
    run(agents.lifecycle.rewind("b", turn=1))
    assert again.usage.cached_tokens == len(tokens_of(agents, "b")) - 1


def test_keeping_one_of_several_branches_frees_the_snapshots_of_the_others(agents):
    run(agents.lifecycle.create("a", system=LONG))
    run(say(agents, "a", LONG))
    for name in "bcd":
        run(agents.lifecycle.fork("a", name))
        run(say(agents, name, f"{name}: {LONG}"))
    n_snapshots = engine_of(agents).stats().snapshots
    assert sorted(run(agents.lifecycle.keep("c"))) == ["b", "d"]
    assert engine_of(agents).stats().snapshots < n_snapshots
    known = opened(agents, "c")
    assert run(say(agents, "c", "Go on.")).usage.cached_tokens == known
    nothing_is_held(agents)


def test_why_says_that_no_snapshot_was_left(tmp_path):
    none_in_ram = StoreConfig(warm_bytes=0)
    with manager(tmp_path / "store", lambda name: load(name, n_slots=8), none_in_ram) as agents:
        run(agents.lifecycle.create("a", system=LONG))
        run(say(agents, "a", LONG))
        engine_of(agents)
        agents.store.flush()
        for file in (tmp_path / "store" / "windows").rglob("*.safetensors"):
            file.unlink()
        for i in range(8):  # each of them has snapshots of its own
            run(agents.lifecycle.create(f"other-{i}", system=f"{i}{8 * LONG}"))
            run(say(agents, f"other-{i}", LONG))
        end = run(say(agents, "a", "Go on."))
        miss = end.usage.miss
        assert miss.cause == "snapshot"
        assert miss.position == end.usage.cached_tokens
        assert miss.tokens_lost >= MIN_GAIN
        assert f"at or after position {miss.position}" in miss.advice
        assert "--snapshots" in miss.advice
        assert agents.directory.why("a") == miss
