"""Rows that are not what the model computes are found before they are used, and put away."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcellar.agents import ModelHost, open_host
from kvcellar.engine import EngineConfig, Restore, SamplingParams
from kvcellar.errors import AgentError, StoreError
from kvcellar.store import StoreConfig
from tests.agents.fakes import (
    CHUNK_PARAMS,
    FULL_PARAMS,
    PARAMS,
    RowCells,
    make_host,
    manager,
    nothing_is_held,
    oracle,
    run,
    tokens_of,
    turn,
)
from tests.models.tiny_checkpoints import FAMILIES, make_checkpoint

pytestmark = pytest.mark.usefixtures("eager")
CONFIG = EngineConfig(max_num_batched_tokens=64)
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))


def misread(monkeypatch: Any, *positions: int) -> None:
    """From now on the cache hands out the rows of these positions as those of another token."""
    whole = RowCells.read_rows

    def read_rows(self: RowCells, tables: Any) -> Any:
        rows = whole(self, tables)
        for (k,), (v,) in rows:
            for position in positions:
                if k.shape[2] > position:
                    k[:, :, position] += 3
                    v[:, :, position] -= 3
        return rows

    monkeypatch.setattr(RowCells, "read_rows", read_rows)


@pytest.mark.parametrize(
    "params", [PARAMS, FULL_PARAMS, CHUNK_PARAMS], ids=["windows", "full", "chunks"]
)
@pytest.mark.parametrize("warm_bytes", [0, 1 << 24])
def test_rows_that_were_saved_wrong_are_used_without_a_canary_and_found_with_one(
    tmp_path, monkeypatch, params, warm_bytes
):
    def load(name: str) -> ModelHost:
        return make_host(name, params=params)

    prompt = [(7 * i) % 250 for i in range(90)]
    config = StoreConfig(warm_bytes=warm_bytes)
    for verify in ("checksum", "canary"):
        folder = tmp_path / verify
        with manager(folder, load, config) as agents, monkeypatch.context() as patch:
            misread(patch, 15)  # the last row of each block and boundary state that is long enough
            run(agents.lifecycle.create("a"))
            run(turn(agents, "a", tokens=prompt))
        with manager(folder, load, config, verify=verify) as agents:
            before = tokens_of(agents, "a")
            end = run(turn(agents, "a", tokens=[2]))
            want = oracle([*before, 2], 6, params)
            got = list(tokens_of(agents, "a")[-6:])
            kinds = [event.kind for event in agents.store.take_events()]
            if verify == "checksum":
                assert end.usage.restored_tokens and got != want and not kinds
                continue
            assert got == want
            assert end.usage.restored_tokens == 0
            assert "damaged" in kinds
            assert any("not what this model computes" in note for note in end.usage.notes)
            run(turn(agents, "a", tokens=[3]))  # it was saved again, and right
        with manager(folder, load, config, verify="canary") as agents:
            before = tokens_of(agents, "a")
            end = run(turn(agents, "a", tokens=[4]))
            assert end.usage.restored_tokens == len(before) - 1
            assert any("computed again and agree" in note for note in end.usage.notes)
            assert list(tokens_of(agents, "a")[-6:]) == oracle([*before, 4], 6, params)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_agrees_with_what_it_saved(family, tmp_path):
    folder = str(make_checkpoint(family, tmp_path / family))

    def load(name: str) -> ModelHost:
        return open_host(folder, capacity=1024, config=CONFIG)

    for i in range(2):
        with manager(tmp_path / "store", load, verify="canary") as agents:
            if not i:
                run(agents.lifecycle.create("a", model=folder))
            end = run(turn(agents, "a", "One thing, and another. " * 6, params=GREEDY))
            if i:
                assert end.usage.restored_tokens
                assert any("computed again and agree" in note for note in end.usage.notes)
                assert agents.store.take_events() == []


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4:rot", "int4:first4:last64"])
@pytest.mark.slow
def test_stored_types_agree_within_their_rounding(kv_dtype, tmp_path):
    def load(name: str) -> ModelHost:
        return open_host("demo", capacity=1024, kv_dtype=kv_dtype, config=CONFIG)

    for i in range(2):
        with manager(tmp_path, load, verify="canary") as agents:
            if not i:
                run(agents.lifecycle.create("a", model="demo"))
            run(turn(agents, "a", "def first(items):\n    return items[0]\n" * 30, params=GREEDY))
            run(agents.sleep.pause("a"))
            back = run(agents.sleep.resume("a"))
            assert back.n_restored == len(tokens_of(agents, "a")) - 1
            assert back.n_verified >= 2 and not back.trouble


def test_a_model_whose_weights_changed_under_the_same_name_is_found_out(tmp_path):
    def load(is_changed: bool) -> Any:
        def load_one(name: str) -> ModelHost:
            host = open_host("demo", capacity=1024, config=CONFIG, backend="torch")
            if is_changed:
                with torch.no_grad():
                    for parameter in host.engine.runner._network.parameters():
                        parameter.mul_(1 + 0.2 * torch.sin(torch.arange(parameter.shape[-1])))
            return host

        return load_one

    with manager(tmp_path, load(False)) as agents:
        run(agents.lifecycle.create("a", model="demo"))
        run(turn(agents, "a", tokens=list(range(5, 305)), params=GREEDY))
    with manager(tmp_path, load(True), verify="canary") as agents:
        end = run(turn(agents, "a", tokens=[7], params=GREEDY))
        assert end.usage.restored_tokens == 0
        assert any("not what this model computes" in note for note in end.usage.notes)


def test_what_a_canary_computes_leaves_nothing_behind(tmp_path):
    with manager(tmp_path, verify="canary") as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=list(range(100))))
        run(agents.sleep.pause("a"))
        run(agents.sleep.resume("a"))
        nothing_is_held(agents)


def test_an_unknown_way_to_verify_is_refused(tmp_path):
    with (
        pytest.raises(AgentError, match="choose one of checksum, canary"),
        manager(tmp_path, verify="hope"),
    ):
        pass


def test_errors_are_shares_of_a_rows_length():
    from kvcellar.agents.kv.verify_restore import _errors

    had = np.ones((2, 1, 3, 4), np.float32)
    got = had.copy()
    got[1, 0, 2] = 2
    assert _errors(had, got) == [0.0, 0.0, 0.5]


def exported(folder: Any, prompt: list[int], params: Any) -> Any:
    """An export of an agent that has read a prompt."""
    with manager(folder / "author", lambda name: make_host(name, params=params)) as agents:
        run(agents.lifecycle.create("a"))
        run(turn(agents, "a", tokens=prompt))
        run(agents.sleep.export("a", folder / "a.kv"))
    return folder / "a.kv"


@pytest.mark.parametrize(
    "params", [PARAMS, FULL_PARAMS, CHUNK_PARAMS], ids=["windows", "full", "chunks"]
)
@pytest.mark.parametrize("is_invented", [True, False])
def test_an_import_is_verified_before_anybody_uses_its_rows(
    tmp_path, monkeypatch, params, is_invented
):
    """Without ``--verify canary``, after a restart, and by whoever comes first."""
    prompt = [(7 * i) % 250 for i in range(90)]

    def load(name: str) -> ModelHost:
        return make_host(name, params=params)

    with monkeypatch.context() as patch:
        if is_invented:
            misread(patch, *range(90))
        file = exported(tmp_path, prompt, params)
    store, unproven = tmp_path / "store", tmp_path / "store" / "unproven"
    with manager(store, load) as agents:
        run(agents.sleep.import_file(file))
    assert list(unproven.iterdir()), "nobody has looked at any of them"
    with manager(store, load) as agents:
        run(agents.lifecycle.create("other"))
        end = run(turn(agents, "other", tokens=[*prompt, 2]))
        want = oracle([*prompt, 2], 6, params)
        assert list(tokens_of(agents, "other")[-6:]) == want
        kinds = [event.kind for event in agents.store.take_events()]
        assert ("damaged" in kinds) == is_invented
        assert bool(end.usage.restored_tokens) != is_invented
        agents.store.flush()
        other = agents.store.get(agents.directory.agent("other").name)
        used = {address.hex() for address in other.addresses}
        assert not used & {path.name for path in unproven.iterdir()}, "what agrees may be shared"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_import_that_holds_no_finite_numbers_is_refused_whole(tmp_path, monkeypatch, number):
    whole = RowCells.read_rows

    def read_rows(self: RowCells, tables: Any) -> Any:
        rows = whole(self, tables)
        for (k,), _ in rows:
            k[0, 0, -1, -1] = number
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(RowCells, "read_rows", read_rows)
        file = exported(tmp_path, list(range(60)), FULL_PARAMS)
    with manager(tmp_path / "store", lambda n: make_host(n, params=FULL_PARAMS)) as agents:
        with pytest.raises(StoreError, match="no finite number"):
            run(agents.sleep.import_file(file))
        assert not run(agents.directory.listed()) and not list(
            (tmp_path / "store/blocks").glob("*")
        )


def test_nobody_can_foretell_which_rows_of_an_import_are_looked_at(tmp_path, monkeypatch):
    """Any row may be looked at; where the rows were saved here the ends of blocks are."""
    looked: set[int] = set()
    whole = Restore.compute_again

    def compute_again(self: Restore, runner: Any, positions: Any) -> Any:
        looked.update(positions)
        return whole(self, runner, positions)

    monkeypatch.setattr(Restore, "compute_again", compute_again)
    file = exported(tmp_path, [(7 * i) % 250 for i in range(90)], FULL_PARAMS)
    for i in range(6):
        with manager(tmp_path / str(i), lambda n: make_host(n, params=FULL_PARAMS)) as agents:
            run(agents.sleep.import_file(file))
            run(agents.sleep.resume("a"))
    assert len({position % 16 for position in looked}) > 4
