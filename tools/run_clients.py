#!/usr/bin/env python3
"""Run the clients that people use against the server: a coding session of 15 turns of each.

The clients are installed from npm and PyPI, in the versions that clients/known.py names, into a
folder of their own; each runs with a home of its own there, with the settings of its page in
docs/clients/, and knows no other server. The model is
a small one that is made here, and says what clients/session.py has it say: it reads a file, edits
it and runs it, five times. All else of the server is the real thing: see clients/scripted.py.

A session is played twice: with a template that drops the thoughts of earlier turns, and with one
that keeps them, under the rule `reasoning`, since half of the clients send none back. A run fails
where an answer of the server's is a 4xx or 5xx, where the file was not changed as it should be,
where a call is not what its schema allows, and where less than 95% of what could be was read from
the cache: of the tokens that a prompt has in common with what was computed before; and, where
thoughts are kept, of all that the session's last turn had computed.

    python tools/run_clients.py
    python tools/run_clients.py --folder build/clients --only codex --thoughts kept
    python tools/run_clients.py --only pi --dialect qwen3-coder
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from clients.known import CLIENTS, Client, Place, files_of
from clients.scripted import ASSISTANT, Asked, Scripted, make_model, serving
from clients.session import ASIDE, FILE, N_STEPS, PROJECT, REQUESTS, Hands, finished

from kvcellar.agents import DEFAULT_RULES
from kvcellar.dialects import DIALECTS

LEAST_REUSE = 0.95
RULES = {"dropped": DEFAULT_RULES, "kept": (*DEFAULT_RULES, "reasoning")}
"""What is done with the thoughts of old turns, and the rules of the server's that then apply."""

_SCRIPTS = {"@anthropic-ai/claude-code": "install.cjs", "opencode-ai": "postinstall.mjs"}
"""Scripts of packages that npm may not run by itself, and that are needed."""


def main() -> int:
    """Run it; 0 where all went well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/clients"))
    parser.add_argument("--only", choices=sorted(CLIENTS), action="append", help="some of them")
    parser.add_argument(
        "--thoughts", choices=sorted(RULES), help="what the template does with old ones"
    )
    dialects = sorted(name for name, one in DIALECTS.items() if not one.has_channels)
    parser.add_argument(
        "--dialect", choices=dialects, help="of a model whose template knows no tools"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = args.only or list(CLIENTS)
    if any(CLIENTS[name].is_npm for name in names) and shutil.which("npm") is None:
        print("npm is not installed; it comes with Node.js, https://nodejs.org", file=sys.stderr)
        return 2
    sessions = []
    for name in names:
        installed = install(name, folder / "installed")
        for thoughts in [args.thoughts] if args.thoughts else RULES:
            sessions.append(play(name, thoughts, args.dialect, installed, folder))
            print(sessions[-1].row(), flush=True)
            for problem in sessions[-1].problems:
                print(f"FAILED: {name}, thoughts {thoughts}: {problem}", flush=True)
    return 1 if any(session.problems for session in sessions) else 0


# What is run --------------------------------------------------------------------------------------


def install(name: str, folder: Path) -> Path:
    """Install a client, unless it is there in this version; return where it is."""
    client, place = CLIENTS[name], folder / name
    wanted = {"private": True, "dependencies": client.packages}
    manifest = place / "package.json"
    if manifest.is_file() and json.loads(manifest.read_text()) == wanted:
        return place
    print(f"installing {client.version} ...", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if client.is_npm:
        (place / "package.json").write_text(json.dumps(wanted))
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
        _run(["npm", "install", *options], place)
        for package in client.packages.keys() & _SCRIPTS:
            _run(["node", _SCRIPTS[package]], place / "node_modules" / package)
    else:
        _run([sys.executable, "-m", "venv", str(place)], place)
        pinned = [f"{package}=={version}" for package, version in client.packages.items()]
        options = ["--quiet", "--disable-pip-version-check"]
        _run([str(place / "bin" / "python"), "-m", "pip", "install", *options, *pinned], place)
    manifest.write_text(json.dumps(wanted))
    return place


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stdout[-500:]}{done.stderr[-1500:]}")


def play(name: str, thoughts: str, dialect: str | None, installed: Path, folder: Path) -> Session:
    """Play the session with one client."""
    client = CLIENTS[name]
    keeps, knows = thoughts == "kept", dialect is None
    kind = f"{thoughts}-{'tools' if knows else 'plain'}"
    model = make_model(folder / f"model-{kind}", keeps_thoughts=keeps, knows_tools=knows)
    place_folder = folder / f"{name}-{thoughts}"
    shutil.rmtree(place_folder, ignore_errors=True)
    project = place_folder / "project"
    project.mkdir(parents=True)
    (project / FILE).write_text(PROJECT)
    started = time.perf_counter()
    with serving(
        model,
        place_folder / "store",
        lambda text: client.hands.answer(text, ASSISTANT, project),
        rules=RULES[thoughts],
        dialect=dialect,
    ) as server:
        place = Place(place_folder, installed, server.url)
        for path, text in files_of(name, server.url).items():
            place.write(path, text)
        printed = "\n".join(client.play(place))
        n_computed = counted(server, "kvcellar_engine_computed_tokens_total")
    (place_folder / "printed.txt").write_text(printed)
    with (place_folder / "requests.jsonl").open("w") as file:
        for heard in server.recorder.heard:
            file.write(heard.line())
    seconds = time.perf_counter() - started
    return Session(name, client, thoughts, server, printed, finished(project), n_computed, seconds)


def counted(server: Scripted, name: str) -> int:
    """Return what the server's metrics say of all models together."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")))


# What came of it ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """One session of a client.

    Attributes:
        name: the client's.
        client: it.
        thoughts: ``dropped`` or ``kept``, by the template.
        server: what it was asked.
        printed: by the client.
        is_finished: every change was made.
        n_computed: tokens that the model has computed.
        seconds: that it took.
    """

    name: str
    client: Client
    thoughts: str
    server: Scripted
    printed: str
    is_finished: bool
    n_computed: int
    seconds: float

    @property
    def turns(self) -> list[Asked]:
        """Prompts of the session itself, not of a title or the like."""
        return [asked for asked in self.server.asked if asked.said is not ASIDE]

    @property
    def n_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(asked.prompt) for asked in self.server.asked)

    @property
    def n_cached(self) -> int:
        """Tokens of these that were not computed."""
        return sum(asked.cached for asked in self.server.asked)

    @property
    def reuse(self) -> float:
        """Share of what prompts had in common with what was computed before."""
        could = sum(asked.could for asked in self.server.asked)
        return sum(min(asked.cached, asked.could) for asked in self.server.asked) / max(1, could)

    @property
    def going_on(self) -> float:
        """Share of all that was computed for the turn before, its answer too."""
        could = sum(asked.went_on for asked in self.turns)
        return sum(min(asked.cached, asked.went_on) for asked in self.turns) / max(1, could)

    @property
    def problems(self) -> list[str]:
        """Return what is not as it should be."""
        found = [
            f"{one.method} {one.path} was answered {one.status}: {one.answer[:300]!r}"
            for one in self.server.recorder.heard
            if one.status >= 400
        ]
        found += sorted(set(self.server.troubles))
        has_tools = isinstance(self.client.hands, Hands)
        n_wanted = len(REQUESTS) * (N_STEPS if has_tools else N_STEPS - 1)
        if len(self.turns) < n_wanted:
            found.append(f"{len(self.turns)} answers of {n_wanted}; it printed {self._end!r}")
        if not self.is_finished:
            found.append(f"the file was not changed as it should be; it printed {self._end!r}")
        if REQUESTS[-1].answer not in self.printed:
            found.append(f"it does not show the last answer; it printed {self._end!r}")
        if self.reuse < LEAST_REUSE:
            found.append(f"{self.reuse:.3f} of what could be came from the cache")
        if has_tools and self.thoughts == "kept" and self.going_on < LEAST_REUSE:
            found.append(f"{self.going_on:.3f} of the turn before came from the cache")
        n_told = self.n_prompt - self.n_cached + sum(len(a.answer) for a in self.server.asked)
        if self.n_computed > n_told:
            found.append(f"{self.n_computed} tokens were computed, and {n_told} are told")
        return found

    @property
    def _end(self) -> str:
        return self.printed[-500:]

    def row(self) -> str:
        """Write what was measured as a row of Markdown."""
        share = self.n_cached / max(1, self.n_prompt)
        return (
            f"| {self.client.version} | {self.thoughts} | {len(self.server.asked)} "
            f"| {self.n_prompt:,} | {share:.3f} | {self.reuse:.3f} | {self.going_on:.3f} "
            f"| {self.seconds:.0f} s |"
        )


HEAD = (
    "| client | old thoughts | requests | prompt tokens | from cache | of what could be "
    "| of the turn before | took |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
)

if __name__ == "__main__":
    print(HEAD)
    sys.exit(main())
