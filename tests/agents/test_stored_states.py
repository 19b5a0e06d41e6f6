"""Agents of models with recurrent layers, asleep on disk and awake where their states are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcellar.agents import ModelHost
from kvcellar.agents.kv.residence import MIN_GAIN
from kvcellar.hosting.costs import Costs
from kvcellar.hosting.templates import check_template
from kvcellar.store import StoreConfig
from tests.agents.fakes import (
    ByteTokenizer,
    RowCells,
    make_host,
    manager,
    nothing_is_held,
    oracle,
    run,
    tokens_of,
    turn,
)
from tests.agents.test_conversation import SYSTEM, Thinking, user
from tests.engine.fakes import MIXED_PARAMS, STATE_PARAMS

COLD = StoreConfig(warm_bytes=0)
MODELS = pytest.mark.parametrize(
    "params", [STATE_PARAMS, MIXED_PARAMS], ids=["states", "windows and states"]
)
PROMPT = [(7 * i) % 250 for i in range(90)]


def loader(params: Any = STATE_PARAMS, **more: Any) -> Any:
    def load(name: str) -> ModelHost:
        return make_host(name, params=params, **more)

    return load


def said(agents: Any, tokens: list[int], params: Any = STATE_PARAMS) -> Any:
    """One turn of agent a, whose answer is what a model without a cache says."""
    before = tokens_of(agents, "a")
    end = run(turn(agents, "a", tokens=tokens))
    now = [*before, *tokens]
    assert list(tokens_of(agents, "a")) == [*now, *oracle(now, 6, params)]
    return end


def boundaries(agents: Any) -> list[int]:
    agents.store.flush()
    return [b.length for b in agents.store.get(agents.directory.agent("a").name).boundaries]


def harm(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@MODELS
@pytest.mark.parametrize("warm_bytes", [0, 1 << 24])
def test_an_agent_that_was_closed_computes_nothing_of_its_history_again(
    tmp_path, params, warm_bytes
):
    config = StoreConfig(warm_bytes=warm_bytes)
    for i in range(4):
        with manager(tmp_path, loader(params), config) as agents:
            if not i:
                run(agents.lifecycle.create("a"))
            before = len(tokens_of(agents, "a"))
            end = said(agents, [*PROMPT, i] if not i else [2, 3, i], params)
            assert end.usage.restored_tokens == max(0, before - 1)
            run(agents.sleep.pause("a"))
            assert run(agents.sleep.resume("a")).n_restored == len(tokens_of(agents, "a")) - 1
            nothing_is_held(agents)
            assert agents.store.take_events() == []


@MODELS
def test_a_template_that_drops_thoughts_costs_a_restarted_agent_its_newest_answer_alone(
    tmp_path, params
):
    messages = [SYSTEM, user("A question that is long enough to be worth its while.")]
    for _ in range(4):
        with manager(tmp_path, loader(params, tokenizer=Thinking())) as agents:
            if len(messages) == 2:
                run(agents.lifecycle.create("a"))
            turns = agents.directory.agent("a").turns
            end = run(turn(agents, "a", messages=messages))
            if turns:
                opening = len(b"<think>\n") + 1  # the next turn differs behind the answer's role
                assert end.usage.restored_tokens >= turns[-1].n_prompt - opening - 1
            prompt = tokens_of(agents, "a")[: agents.directory.agent("a").turns[-1].n_prompt]
            assert list(tokens_of(agents, "a")) == [*prompt, *oracle(prompt, 6, params)]
            messages = [*agents.directory.conversation("a"), user("And another one, please?")]


def test_answers_that_come_back_in_other_tokens_cost_a_restarted_agent_the_history_once(tmp_path):
    class Pairs(ByteTokenizer):
        """Says each letter alone, and reads two of them as capitals of its own."""

        def encode(self, text: str, **more: Any) -> list[int]:
            ids = super().encode(text, **more)
            return [i - 32 if 97 <= i <= 122 and n % 2 else i for n, i in enumerate(ids)]

        def decode(self, token_ids: Any, **more: Any) -> str:
            return super().decode(token_ids, **more).lower()

    class Stable(ByteTokenizer):
        """Writes old turns as they were."""

        def apply_chat_template(self, conversation: Any, **more: Any) -> str:
            text = "".join(f"<{m['role']}>{m['content']}<end>" for m in conversation)
            return text + ("<assistant>" if more["add_generation_prompt"] else "")

    def load(name: str) -> ModelHost:
        host = make_host(name, params=STATE_PARAMS, tokenizer=Pairs())
        return replace(host, template=check_template(Stable()))

    restored = []
    for i in range(4):
        with manager(tmp_path, load) as agents:
            if not i:
                run(agents.lifecycle.create("a"))
            turns = agents.directory.agent("a").turns
            end = run(turn(agents, "a", f"{i}: a question that is worth its while, and then some"))
            restored.append(end.usage.restored_tokens)
    assert end.usage.miss.cause == "retokenised"
    assert restored[:2] == [0, 0]
    assert restored[3] >= turns[-1].n_prompt - MIN_GAIN > restored[2] > 0


@MODELS
@pytest.mark.parametrize("what", ["state", "rows"])
def test_damage_costs_the_tokens_since_the_boundary_before_and_never_a_token(
    tmp_path, params, what
):
    with manager(tmp_path, loader(params), COLD) as agents:
        run(agents.lifecycle.create("a"))
        for tokens in (PROMPT, PROMPT, PROMPT):
            said(agents, tokens, params)
        ends = boundaries(agents)
        ref = agents.store.get(agents.directory.agent("a").name)
    if what == "state":
        harm(tmp_path / "windows" / f"{ref.boundaries[-1].address.hex()}.safetensors")
    else:  # the states at the end are whole, and of no use
        harm(tmp_path / "blocks" / f"{ref.blocks[-2].hex()}.safetensors")
    with manager(tmp_path, loader(params), COLD) as agents:
        end = said(agents, [5], params)
        assert end.usage.restored_tokens == ends[-2]
        assert [event.kind for event in agents.store.take_events()] == ["damaged"]
    with manager(tmp_path, loader(params), COLD) as agents:
        before = len(tokens_of(agents, "a"))
        assert said(agents, [6], params).usage.restored_tokens == before - 1  # it was saved again


def test_a_turn_writes_the_states_at_its_end_and_no_others(tmp_path):
    with manager(tmp_path, loader(), COLD) as agents:
        run(agents.lifecycle.create("a"))
        for n in range(1, 7):
            said(agents, PROMPT)
            run(agents.sleep.pause("a"))
            assert boundaries(agents)[-1] == len(tokens_of(agents, "a")) - 1
            assert len(boundaries(agents)) == min(n, 4)
            assert len(list((tmp_path / "windows").iterdir())) == min(n, 4)


def test_a_fork_shares_states_and_both_go_on(tmp_path):
    with manager(tmp_path, loader(), COLD) as agents:
        run(agents.lifecycle.create("a"))
        said(agents, PROMPT)
        run(agents.sleep.pause("a"))
        run(agents.lifecycle.fork("a", "b"))
        agents.store.flush()
        assert len(list((tmp_path / "windows").iterdir())) == 1
    for agent_id, token in (("a", 5), ("b", 6)):
        with manager(tmp_path, loader(), COLD) as agents:
            before = tokens_of(agents, agent_id)
            end = run(turn(agents, agent_id, tokens=[token]))
            assert end.usage.restored_tokens == len(before) - 1
            want = oracle([*before, token], 6, STATE_PARAMS)
            assert list(tokens_of(agents, agent_id)[-6:]) == want


def test_an_exported_agent_brings_its_states_along(tmp_path):
    with manager(tmp_path / "one", loader(), COLD) as agents:
        run(agents.lifecycle.create("a"))
        said(agents, PROMPT)
        run(agents.sleep.export("a", tmp_path / "a.kv"))
    with manager(tmp_path / "two", loader(), COLD) as agents:
        run(agents.sleep.import_file(tmp_path / "a.kv"))
        before = len(tokens_of(agents, "a"))
        assert said(agents, [5]).usage.restored_tokens == before - 1


def misread_states(monkeypatch: Any) -> None:
    """From now on the cache hands out states that are not the ones that it has."""
    whole = RowCells.read_states

    def read_states(self: RowCells, slots: Any) -> Any:
        return [[2 * state + 1 for state in layer] for layer in whole(self, slots)]

    monkeypatch.setattr(RowCells, "read_states", read_states)


@MODELS
def test_states_that_were_saved_wrong_are_used_without_a_canary_and_found_with_one(
    tmp_path, monkeypatch, params
):
    for verify in ("checksum", "canary"):
        folder = tmp_path / verify
        with manager(folder, loader(params), COLD) as agents, monkeypatch.context() as patch:
            run(agents.lifecycle.create("a"))
            said(agents, PROMPT, params)
            run(agents.sleep.pause("a"))
            misread_states(patch)
            run(turn(agents, "a", tokens=PROMPT))
        with manager(folder, loader(params), COLD, verify=verify) as agents:
            before = tokens_of(agents, "a")
            end = run(turn(agents, "a", tokens=[2]))
            is_right = list(tokens_of(agents, "a")[-6:]) == oracle([*before, 2], 6, params)
            kinds = [event.kind for event in agents.store.take_events()]
            if verify == "checksum":
                assert end.usage.restored_tokens and not is_right and not kinds
                continue
            assert is_right and end.usage.restored_tokens == 0 and kinds == ["damaged"]
            assert any("not what this model computes" in note for note in end.usage.notes)
            said(agents, [3], params)
        with manager(folder, loader(params), COLD, verify="canary") as agents:
            before = tokens_of(agents, "a")
            end = said(agents, [4], params)
            assert end.usage.restored_tokens == len(before) - 1
            assert any("computed again and agree" in note for note in end.usage.notes)
            nothing_is_held(agents)


def test_bytes_of_states_count_where_loading_is_weighed_against_computing(tmp_path):
    def load(name: str) -> ModelHost:
        host = make_host(name, params=STATE_PARAMS)
        host.costs = Costs()
        return host

    with manager(tmp_path, load) as agents:
        run(agents.lifecycle.create("a"))
        said(agents, [1] * 300)
        host = agents.models.host("hash")
        match = agents.store.match(host.key, tokens_of(agents, "a"))
        stop = match.n_resumable
        ((tier, n_bytes),) = match.boundary_bytes(stop).items()
        rows_s = match.warm_bytes * host.costs.s_per_byte["warm"]
        states_s = n_bytes * host.costs.s_per_byte[tier]
        costs = host.costs
        assert costs.estimate(match, 0, 0, stop).load_s == pytest.approx(0.002 + rows_s + states_s)
        assert costs.estimate(match, 0, stop, stop).load_s == pytest.approx(0.002 + states_s)
        for prefill, is_restored in ((1e-9, False), (1.0, True)):
            run(agents.sleep.pause("a"))
            host.costs.prefill_s_per_token = prefill
            end = said(agents, [2])
            assert bool(end.usage.restored_tokens) == is_restored


@pytest.mark.parametrize("verify", ["checksum", "canary"])
def test_states_that_were_given_up_come_back_from_the_store_and_their_rows_stayed(
    tmp_path, monkeypatch, verify
):
    with manager(tmp_path, loader(), COLD, verify=verify) as agents:
        run(agents.lifecycle.create("a"))
        said(agents, PROMPT)
        run(agents.sleep.pause("a"))
        run(agents.sleep.resume("a"))

        def give_up(engine: Any) -> int:
            n = 0
            while len((evicted := engine.index.evict_states(1)).cells[-1]):
                engine.cache.release_cells(evicted.cells)
                n += 1
            return n

        host = agents.models.host("hash")
        assert host.service.run(give_up).result()
        before = len(tokens_of(agents, "a"))
        written: list[int] = []
        write_rows = RowCells.write_rows

        def count(self: RowCells, tables: Any, rows: Any) -> None:
            written.extend(map(len, tables))
            write_rows(self, tables, rows)

        monkeypatch.setattr(RowCells, "write_rows", count)
        end = said(agents, [5])
        assert end.usage.restored_tokens == before - 1
        assert end.usage.restored_from == {"cold": before - 1}
        assert not any(written)
        nothing_is_held(agents)
