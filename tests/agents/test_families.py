"""Where the histories of a family part, held against comparing every two of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.agents.records.agent import AgentRecord
from kvcellar.agents.records.families import partings
from kvcellar.history import History
from tests.agents.fakes import manager, run, turn
from tests.agents.test_state_keys import KEY

TOKENS = st.lists(st.integers(0, 2), max_size=8)


def family(histories, parents):
    agents = []
    for i, (tokens, parent) in enumerate(zip(histories, parents, strict=True)):
        one = AgentRecord(f"a{i}", "m", KEY, tokens=History(tokens), created_s=float(i))
        if i and parent is not None:
            above = agents[parent % i]
            one.parent, one.parent_created_s = above.name, above.created_s
        agents.append(one)
    return agents


@given(st.lists(st.tuples(TOKENS, st.integers(0, 9)), min_size=2, max_size=8))
def test_each_parts_from_the_earlier_one_with_which_it_has_most_in_common(made):
    agents = family(*zip(*made, strict=True))
    found = partings(agents)
    assert set(found) == {agent.name for agent in agents[1:]}
    for i, agent in enumerate(agents[1:], 1):
        beside, at = found[agent.name]
        shared = [one.tokens.common_prefix(agent.tokens) for one in agents[:i]]
        assert at == max(shared) == shared[agents.index(beside)]
        parent = next(one for one in agents if one.name == agent.parent)
        if shared[agents.index(parent)] == at:
            assert beside is parent, "the parent, where others have no more"


def test_strangers_are_no_family():
    assert partings(family([[1, 2], [1, 2]], [None, None])) == {}


def test_those_whose_parent_is_gone_part_from_each_other(tmp_path):
    with manager(tmp_path / "store") as agents:
        run(agents.lifecycle.create("poet"))
        run(turn(agents, "poet", "One. " * 9))
        for name in ("left", "right"):
            run(agents.lifecycle.fork("poet", name, turn=0))
            run(turn(agents, name, "One. " * 9))
        run(agents.lifecycle.delete("poet", is_final=True))
        left, right = sorted(agents.directory.parted(), key=lambda info: info.created_s)
        assert left.parted_at is None and right.parent_position == 0
        assert (right.parted_from, right.parted_at) == ("left", right.n_tokens)
