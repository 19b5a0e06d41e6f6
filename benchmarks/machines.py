"""Ask how much sooner an agent goes on that another machine left in a shared place.

An agent is paused on one machine; on machines that have nothing of it yet its next turn's first
token is timed, and that of a machine without a shared place, which computes the history again. The
places are a folder, and where the packages are installed an S3-compatible server and Valkey, all
on this machine. The bundled model; with --large, one of 100 million random weights in float32.
Every case's tokens have to be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness import run
from restore import Always, make_model, turn

from kvcellar.agents import AgentManager, ModelHost, ModelRegistry, open_host
from kvcellar.store import Store

N_TOKENS = 4000


@contextmanager
def machine(folder: Path, host: ModelHost, shared: str | None) -> Iterator[AgentManager]:
    """Open the agents of a machine whose disk is one folder; the model is loaded already."""
    with Store(folder, shared=shared) as store:
        yield AgentManager(store, ModelRegistry(lambda _: host), default_model=host.name)


@contextmanager
def places(root: Path) -> Iterator[dict[str, str]]:
    """Start what can be started; gives the URLs of empty places, by kind."""
    import pytest

    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.store.shared.servers import S3_KEYS, s3_server, valkey_server

    found = {"folder": f"file://{root}/share"}
    with ExitStack() as stack:
        try:
            os.environ |= {**S3_KEYS, "AWS_ENDPOINT_URL": stack.enter_context(s3_server())}
            found["s3"] = f"s3://cellar/{uuid.uuid4().hex}"
        except pytest.skip.Exception as error:
            print(error)
        try:
            found["valkey"] = f"valkey://127.0.0.1:{stack.enter_context(valkey_server(root))}/0"
        except pytest.skip.Exception as error:
            print(error)
        yield found


async def resumed(agents: AgentManager) -> tuple[float, int]:
    """Return the seconds to an agent's next token, and the token; it was left elsewhere."""
    seconds, end = await turn(agents, "poet", [7])
    assert set(end.usage.restored_from) == {"shared"}, end.usage
    assert end.usage.restored_tokens > N_TOKENS - 256, end.usage
    await agents.sleep.pause("poet")
    return seconds, end.finish.token_ids[0]


async def recomputed(agents: AgentManager, history: list[int]) -> tuple[float, int]:
    """Return the seconds to the next token of a history that is nowhere, and the token."""
    await agents.lifecycle.create("poet")
    seconds, end = await turn(agents, "poet", history)
    assert not end.usage.cached_tokens, end.usage
    await agents.lifecycle.delete("poet", is_final=True)
    return seconds, end.finish.token_ids[0]


def resume_over_recompute(
    root: Path, host: ModelHost, urls: Mapping[str, str], rounds: int
) -> dict[str, float]:
    """Return per place how much sooner an agent goes on, as the median of rounds."""
    prompt = [(i * 7919 + 3) % 4000 for i in range(N_TOKENS)]
    answers = set()
    for kind, url in urls.items():
        with machine(root / f"left-{kind}", host, url) as agents:
            asyncio.run(agents.lifecycle.create("poet"))
            _, end = asyncio.run(turn(agents, "poet", prompt))
            answers.add(end.finish.token_ids[0])
            asyncio.run(agents.sleep.pause("poet"))
    (answer,) = answers
    times: dict[str, list[float]] = {kind: [] for kind in (*urls, "computed")}
    tokens = set()
    for at in range(rounds):
        for kind, url in urls.items():
            with machine(root / f"{kind}-{at}", host, url) as agents:
                seconds, token = asyncio.run(resumed(agents))
                asyncio.run(agents.lifecycle.rewind("poet", turn=1))
                asyncio.run(agents.sleep.pause("poet"))
            times[kind].append(seconds)
            tokens.add(token)
        with machine(root / f"computed-{at}", host, None) as agents:
            seconds, token = asyncio.run(recomputed(agents, [*prompt, answer, 7]))
        times["computed"].append(seconds)
        tokens.add(token)
    assert len(tokens) == 1, f"every case says the same, these said {tokens}"
    for kind, seconds_of in times.items():
        print(f"{kind:10} {statistics.median(seconds_of) * 1e3:8.1f} ms to the first token")
    return {
        kind: statistics.median(c / r for c, r in zip(times["computed"], times[kind], strict=True))
        for kind in urls
    }


def measure(quick: bool, large: bool) -> Mapping[str, Any]:
    """Measure all places."""
    with tempfile.TemporaryDirectory(prefix="kvcellar-machines-") as name:
        root = Path(name)
        os.environ["KVCELLAR_HOME"] = str(root / "home")
        if large:
            make_model(root / "model")
        host = open_host(str(root / "model") if large else "demo", capacity=2 * N_TOKENS)
        host.costs = Always()
        try:
            with places(root) as urls:
                found = resume_over_recompute(root, host, urls, 3 if quick else 7)
        finally:
            host.close()
    return {f"resume_over_recompute_{kind}": round(ratio, 1) for kind, ratio in found.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a model."""
    parser.add_argument("--large", action="store_true", help="100 million random weights")


if __name__ == "__main__":
    run(__doc__ or "", measure, add_options)
