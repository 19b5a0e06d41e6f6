"""A real deployment of the bundled model on this machine, and clients that play traces on it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from simulated import Costs
from traces import AgentTrace, Turn

import kvcellar
from kvcellar.models.files.hub import DEMO_FOLDER
from kvcellar.models.text.tokenizer import load_tokenizer

SOURCE = Path(kvcellar.__file__).parents[1]
READY_S = 240.0
ANSWER_S = 120.0

CONTEXT = 2048
KV_BYTES = 6144
"""K and V of one token of the bundled model, in float32."""

PIECE, BESIDE, RUNNING = 512, 32, 8
"""Settings of the server, as `kvcellar serve` has them."""


@contextlib.contextmanager
def deployment(n_replicas: int, *more: str) -> Iterator[str]:
    """Run ``kvcellar deploy demo`` with so many replicas of one core each; yield its URL."""
    command = [sys.executable, "-W", "ignore", "-m", "kvcellar", "deploy", "demo", "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="kvcellar-scale-") as folder:
        scale = ("--replicas", str(n_replicas), "--cpus", "1", "--store", f"{folder}/store")
        said = Path(folder, "log")
        where = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "KVCELLAR_HOME": folder}
        with said.open("w") as log:
            process = subprocess.Popen(
                [*command, *scale, *more],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | where,
                start_new_session=True,
            )
        try:
            yield _url_of(process, said)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _url_of(process: subprocess.Popen[str], said: Path) -> str:
    """Return the URL of a deployment when it answers."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        until = time.monotonic() + READY_S
        while ready.select(max(0.0, until - time.monotonic())):
            line = process.stdout.readline()
            if " at http://" in line:
                return line.split(" at ")[1].split(",")[0]
            if not line:
                break
    raise RuntimeError(f"the deployment did not start: {said.read_text()[-2000:]}")


@dataclass(frozen=True)
class Answered:
    """One turn as its client saw it, in tokens and seconds."""

    agent: str
    turn: int
    replica: str
    n_prompt: int
    n_cached: int
    n_out: int
    first_s: float
    took_s: float


class Clients:
    """Clients of one deployment."""

    def __init__(self, url: str, seed: int = 1) -> None:
        """Prepare texts; nothing is asked."""
        self.url, self.rng = url, random.Random(seed)
        self._tokenizer = load_tokenizer(DEMO_FOLDER)
        self._words = sorted(
            word
            for word, at in self._tokenizer.get_vocab().items()
            if word.startswith("Ġ") and word[1:].isalpha() and at > 300
        )

    def text(self, n_tokens: int, seed: str) -> str:
        """Make a text of about so many tokens; the same seed gives the same."""
        words = random.Random(seed).choices(self._words, k=n_tokens)
        return "".join(word.replace("Ġ", " ") for word in words).strip()

    def play(self, trace: list[AgentTrace], policy: str = "") -> list[Answered]:
        """Play a trace; with a policy this client says which replica is to answer."""
        return asyncio.run(self._play(trace, policy))

    async def _play(self, trace: list[AgentTrace], policy: str) -> list[Answered]:
        found: list[Answered] = []
        replicas: list[str] = []
        children: dict[tuple[str, int], list[AgentTrace]] = {}
        for one in trace:
            if one.parent_turn is not None:
                children.setdefault((one.trunk, one.parent_turn), []).append(one)
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, limits=limits) as client:
            if policy:
                replicas = await self._replicas(client)

            async def agent(one: AgentTrace) -> None:
                await asyncio.sleep(one.start_s)
                if one.parent_turn is not None:
                    made = await client.post(f"/v1/agents/{one.trunk}/fork", json={"id": one.name})
                    made.raise_for_status()
                waiting = []
                for at, turn in enumerate(one.turns):
                    to = self.rng.choice(replicas) if policy == "random" else ""
                    found.append(await self._turn(client, one, at, turn, to))
                    waiting += [
                        asyncio.create_task(agent(child))
                        for child in children.get((one.name, at), ())
                    ]
                    await asyncio.gather(*[task for task in waiting if task.done()])
                    await asyncio.sleep(turn.pause_s)
                await asyncio.gather(*waiting)

            await asyncio.gather(*(agent(one) for one in trace if one.parent_turn is None))
        return found

    async def _replicas(self, client: httpx.AsyncClient) -> list[str]:
        """Find out what the replicas are called."""
        names: set[str] = set()
        for n in range(64):
            one = AgentTrace(f"asked-{n}", f"asked-{n}", 8, None, 0.0, (Turn(8, 4, 0.0),))
            names.add((await self._turn(client, one, 0, one.turns[0])).replica)
            if len(names) == 2:
                break
        return sorted(names)

    async def _turn(
        self, client: httpx.AsyncClient, one: AgentTrace, at: int, turn: Turn, to: str = ""
    ) -> Answered:
        """Take a turn of an agent, which begins with its trunk."""
        messages = [{"role": "user", "content": self.text(turn.n_in, f"{one.name} {at}")}]
        headers = {"X-Agent-Id": one.name} | ({"X-Replica": to} if to else {})
        if not at and one.parent_turn is None:
            trunk = {"role": "system", "content": self.text(one.n_trunk, one.trunk)}
            messages.insert(0, trunk)
            headers["X-Agent-Create"] = "true"
        body = {
            "model": "demo",
            "messages": messages,
            "max_tokens": turn.n_out,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": at,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        begun, first_s, usage = time.perf_counter(), 0.0, {}
        async with client.stream(
            "POST", "/v1/chat/completions", json=body, headers=headers
        ) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                told = json.loads(line[6:])
                usage = told.get("usage") or usage
                is_text = any(choice["delta"].get("content") for choice in told["choices"])
                if is_text and not first_s:
                    first_s = time.perf_counter() - begun
            replica = answer.headers["x-replica"]
        return Answered(
            one.name,
            at,
            replica,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            first_s,
            time.perf_counter() - begun,
        )

    def tokens_per_s(self, round_: int, n: int, n_out: int, *, is_one: bool) -> float:
        """Return the tokens per second of so many answers at once, of one replica or of all."""
        return asyncio.run(self._tokens_per_s(round_, n, n_out, is_one))

    async def _tokens_per_s(self, round_: int, n: int, n_out: int, is_one: bool) -> float:
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as client:
            replicas = await self._replicas(client)

            async def ask(i: int) -> int:
                said = self.text(16, f"{round_} {is_one} {i}")
                body = {"model": "demo", "prompt": said, "max_tokens": n_out, "ignore_eos": True}
                headers = {"X-Replica": replicas[0] if is_one else replicas[i % len(replicas)]}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                answer.raise_for_status()
                return int(answer.json()["usage"]["completion_tokens"])

            begun = time.perf_counter()
            n_tokens = sum(await asyncio.gather(*map(ask, range(n))))
            return n_tokens / (time.perf_counter() - begun)

    def moved(self, name: str) -> tuple[float, int]:
        """Move an agent to the other replica; return seconds to its first token, and its length."""
        return asyncio.run(self._moved(name))

    async def _moved(self, name: str) -> tuple[float, int]:
        turns = (Turn(8, 8, 0.0), Turn(8, 8, 0.0))
        one = AgentTrace(name, name, 1400, None, 0.0, turns)
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S) as client:
            here, there = await self._replicas(client)
            await self._turn(client, one, 0, turns[0], here)
            found = await self._turn(client, one, 1, turns[1], there)
            return found.first_s, found.n_prompt

    def costs(self, cells: int) -> Costs:
        """Measure what a replica can do, one request after the other and eight at once."""

        def ask(name: str, *turns: Turn, n_trunk: int = 8, n: int = 1) -> list[Answered]:
            trace = [
                AgentTrace(f"{name}-{i}", f"{name}-{i}", n_trunk, None, 0.0, turns)
                for i in range(n)
            ]
            return self.play(trace)

        ask("warm", Turn(64, 16, 0.0))
        short = [ask(f"short-{i}", Turn(8, 96, 0.0))[0] for i in range(5)]
        long = [ask(f"long-{i}", Turn(8, 8, 0.0), n_trunk=1500)[0] for i in range(3)]
        many = ask("many", Turn(8, 96, 0.0), n=RUNNING)
        moved = [self.moved(f"moved-{i}") for i in range(3)]
        door_s = statistics.median(one.first_s for one in short)
        read_s = statistics.median((one.first_s - door_s) / one.n_prompt for one in long)
        step_s = statistics.median((one.took_s - one.first_s) / one.n_out for one in short)
        moved_s = statistics.median(max(1e-6, s - door_s) / n for s, n in moved)
        step_of_many_s = statistics.median((one.took_s - one.first_s) / one.n_out for one in many)
        sequence_s = max(0.0, (step_of_many_s - step_s) / (RUNNING - 1))
        return Costs(
            read_per_s=1.0 / read_s,
            step_s=max(1e-4, step_s - sequence_s),
            sequence_s=sequence_s,
            piece=PIECE,
            beside=BESIDE,
            running=RUNNING,
            cells=cells,
            kv_bytes=KV_BYTES,
            tier_bytes_per_s=KV_BYTES / moved_s,
            tier_s=0.0,
            door_s=door_s,
        )


def as_played(trace: list[AgentTrace], found: list[Answered]) -> list[AgentTrace]:
    """Return a trace with the sizes that its turns had when they were played."""
    sizes = {(one.agent, one.turn): one for one in found}
    made: list[AgentTrace] = []
    for one in trace:
        first = sizes[one.name, 0]
        n_trunk = length = first.n_prompt - one.turns[0].n_in
        turns = []
        for at, turn in enumerate(one.turns):
            seen = sizes[one.name, at]
            turns.append(Turn(seen.n_prompt - length, seen.n_out, turn.pause_s))
            length = seen.n_prompt + seen.n_out
        made.append(
            AgentTrace(one.name, one.trunk, n_trunk, one.parent_turn, one.start_s, tuple(turns))
        )
    return made


def affinity(found: list[Answered]) -> float:
    """Return the share of turns that went where their agent's last one went."""
    where = {(one.agent, one.turn): one.replica for one in found}
    stayed = [where[one.agent, one.turn - 1] == one.replica for one in found if one.turn]
    return statistics.fmean(stayed)
