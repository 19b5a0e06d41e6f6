"""Two replicas of the bundled model with one store, in this process, and a gateway before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvcellar.agents import Hosting
from kvcellar.deploy.gateway import Gateway, ReplicaLostError
from kvcellar.deploy.replica import Replica, ReplicaSpec
from kvcellar.deploy.routing import ReplicaHoldings, Report, RoutingPolicy, rank
from kvcellar.models import LoadOptions
from kvcellar.server.config import ServerConfig

POLICY = RoutingPolicy(busy_at=2, request_tokens=64)


@dataclass
class Answer:
    """What a client got."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def replica(self):
        return self.headers["x-replica"]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Local:
    """Replicas of this process behind a gateway: what Ray does for a deployment, in a few lines."""

    def __init__(self, replicas, config, prefill_tokens=None):
        self.replicas = {one.name: one for one in replicas}
        self.loads = dict.fromkeys(self.replicas, 0)
        self.holdings = ReplicaHoldings()
        self.holdings.keep(self.replicas)
        self.lost = set()
        self.dies = False
        self.prefilling, self.prepared = None, []
        self.gateway = Gateway(config, self, self.holdings, prefill_tokens)

    async def read(self, asked):
        return await next(iter(self.replicas.values())).read(asked)

    async def prepare(self, asked, wanted):
        self.prepared.append(wanted.n_tokens)
        if self.prefilling is None:
            raise ReplicaLostError("prefilling")
        await self.prefilling.prepare(asked)

    async def answer(self, asked, wanted):
        there = {name: n for name, n in self.loads.items() if name in self.holdings.replicas}
        name = rank(wanted, self.holdings, there, POLICY)[0]
        if name in self.lost:
            raise ReplicaLostError(name)
        self.holdings.sent(wanted, name)
        async with contextlib.aclosing(self.replicas[name].answer(asked, wanted)) as batches:
            async for batch in batches:
                yield batch
                if self.dies:
                    raise ReplicaLostError(name)

    async def told(self):
        """Every replica has reported."""
        for name, replica in self.replicas.items():
            self.holdings.learn(name, Report.from_stats(await replica.report()))

    async def ask(self, method, path, body=None, until=None, headers=None):
        """Ask as a client does, which leaves as soon as ``until`` is in what it got."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        said = {"host": "localhost", "content-type": "application/json", "x-api-key": "owner"}
        said |= headers or {}
        said.setdefault("content-length", str(len(data)))
        raw = [(key.lower().encode(), value.encode()) for key, value in said.items()]
        scope = {"type": "http", "http_version": "1.1", "method": method, "path": path}
        scope |= {"scheme": "http", "query_string": b"", "root_path": "", "headers": raw}
        scope |= {
            "raw_path": path.encode(),
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        got, gone, sent = Answer(), asyncio.Event(), iter([data])

        async def receive():
            part = next(sent, None)
            if part is None:
                await gone.wait()
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": part, "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            got.body += message.get("body", b"")
            if until is not None and until in got.body:
                gone.set()

        await self.gateway(scope, receive, send)
        return got

    async def chat(self, *texts, **headers):
        """Ask for the next turn of a conversation of these texts, user and assistant by turns."""
        roles = ("user", "assistant")
        said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"messages": said, "max_tokens": 8, "temperature": 0}
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        answer = await self.ask("POST", "/v1/chat/completions", body, headers=named)
        assert answer.status == 200, answer.body
        return answer


@pytest.fixture(scope="session")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def config():
    return ServerConfig(api_key="owner", guest_keys=("guest",), max_body_bytes=1 << 16)


@pytest.fixture(scope="session")
def replicas(loop, config, tmp_path_factory):
    hosting = Hosting(LoadOptions("demo", capacity=2048, dtype="float32"))
    spec = ReplicaSpec(
        config, hosting, {"demo": "demo"}, tmp_path_factory.mktemp("stored") / "store"
    )
    found = [Replica(spec, name, name) for name in ("left", "right")]
    for replica in found:
        loop.run(replica.start())
    yield found
    for replica in found:
        loop.run(replica.close())


@pytest.fixture
def split(replicas, config):
    """One replica that answers, and one that only reads."""
    answering, reading = replicas
    found = Local([answering], config, prefill_tokens=100)
    found.prefilling = reading
    return found


@pytest.fixture
def local(replicas, config):
    """The replicas, of which a new gateway knows nothing yet."""
    return Local(replicas, config)
