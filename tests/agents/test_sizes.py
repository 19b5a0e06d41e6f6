"""What forks cost, in cells and on disk, before they part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvcellar.agents import open_host
from kvcellar.engine import SamplingParams
from tests.agents.fakes import manager, run, turn


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_eight_forks_of_a_4k_trunk_take_no_more_than_a_tenth_on_top(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path / "home"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    async def main(agents: Any) -> None:
        await agents.lifecycle.create("trunk", model="demo")
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        await turn(agents, "trunk", tokens=[5 + i % 900 for i in range(4096)], params=params)
        cache = agents.models.host("demo").engine.cache
        agents.store.flush()
        cells, size = cache.usage().groups[0].live, disk_bytes(tmp_path / "store")
        for i in range(8):
            await agents.lifecycle.fork("trunk", f"fork-{i}")
        for i in range(8):
            assert (await agents.directory.describe(f"fork-{i}")).n_cached == 4096
        agents.store.flush()
        assert cache.usage().groups[0].live <= 1.1 * cells
        assert disk_bytes(tmp_path / "store") <= 1.1 * size
        for i in range(8):
            await agents.sleep.pause(f"fork-{i}")
        assert disk_bytes(tmp_path / "store") <= 1.1 * size

    try:
        with manager(tmp_path / "store", lambda name: open_host(name, capacity=6000)) as agents:
            run(main(agents))
        with manager(tmp_path / "store", lambda name: open_host(name, capacity=6000)) as agents:
            for i in range(2):  # also those that were made and never spoke
                assert run(agents.sleep.resume(f"fork-{i}")).n_restored == 4096 * (not i)
    finally:
        torch.set_num_threads(before)
