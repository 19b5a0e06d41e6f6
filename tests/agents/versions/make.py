"""Make the stores of this folder, by the programs that wrote such stores: git has all of them.

python tests/agents/versions/make.py

Each archive is a store's folder as a process that was killed has left it, and ``expected.json``:
what its agents had said. Made once; a store that is written from now on gets an archive of its own
when what is written changes.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

VERSIONS = {
    "first": ("33d6994c", "PARAMS"),
    "parents": ("69dcdee4", "PARAMS"),
    "journal-1": ("fefb8d11", "PARAMS"),
    "journal-2": ("5a8627ff", "PARAMS"),
    "catalogue-2": ("9187266e", "PARAMS"),
    "states": ("54f9a576", "MIXED_PARAMS"),
    "turn-costs": ("c34d544e", "PARAMS"),
    "salts": ("9665a7e7", "PARAMS"),
    "before-leases": ("b316d937", "PARAMS"),
}
"""By the name of an archive the commit that made it, and the model whose KV is in it."""

TALK = """
import asyncio, inspect, json, os, sys, threading
from functools import partial
from pathlib import Path

from tests.agents import fakes
from tests.engine import fakes as models

folder, params = Path(sys.argv[1]), getattr(models, sys.argv[2])
load = partial(fakes.make_host, params=params)
SALT = "0123456789abcdef0123456789abcdef"


async def talk(agents):
    verbs = getattr(agents, "lifecycle", agents)
    known = getattr(agents, "directory", agents)
    await verbs.create("poet", system="Write verse.")
    await fakes.turn(agents, "poet", "Rain, please, and the sea behind it.")
    await fakes.turn(agents, "poet", "And snow.")
    await verbs.fork("poet", "twin", turn=1)
    await fakes.turn(agents, "twin", "Fog, rather.")
    names = ["poet", "twin"]
    if sys.argv[3] == "salts":
        names.append(f"poet~{SALT}")
        await verbs.create(names[-1])
        await fakes.turn(agents, names[-1], "Whose is this?")
    if (folder / "journal.sqlite").exists():
        await verbs.rewind("twin", turn=1)
        await fakes.turn(agents, "twin", "Fog, rather.")
    await getattr(agents, "sleep", agents).pause("poet")
    agents.store.flush()
    if (folder / "journal.sqlite").exists():
        go, held = threading.Event(), threading.Event()
        agents.store._writer.offer(lambda: (held.set(), go.wait()), 0)
        held.wait()
        await fakes.turn(agents, "poet", "The last one.")
    said = {}
    for name in names:
        messages = known.conversation(name)
        if inspect.isawaitable(messages):
            messages = await messages
        said[name] = {"tokens": list(fakes.tokens_of(agents, name)), "messages": list(messages)}
    return said


with fakes.manager(folder, load) as agents:
    said = asyncio.run(talk(agents))
    (folder / "expected.json").write_text(json.dumps(said))
    os._exit(0)
"""


def make(name: str, commit: str, params: str) -> None:
    """Have a commit's program write a store, and pack it."""
    with tempfile.TemporaryDirectory(prefix="kvcellar-versions-") as scratch:
        tree, store = Path(scratch) / "tree", Path(scratch) / "store"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            subprocess.run(
                [sys.executable, "-c", TALK, str(store), params, name],
                check=True,
                cwd=tree,
                env={"PYTHONPATH": f"{tree / 'src'}:{tree}"},
            )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        with tarfile.open(HERE / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            archive.add(store, ".", filter=_nobodys)


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    for name in sys.argv[1:] or VERSIONS:
        make(name, *VERSIONS[name])
