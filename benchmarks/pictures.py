"""Ask what a screenshot costs when an agent has seen it before.

A random model of Qwen 2.5-VL's kind looks at ten screenshots of 644 by 476 pixels, 391 tokens each,
one a turn. Then it is asked about them: in the same process; in a new one, which has the agent from
disk; and in one that has nothing, and reads all of it. And what a turn takes that shows a
screenshot again, at another place, over one that shows a new one.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import median_ms, run
from PIL import Image
from random_models import random_vision
from restore import Always

from kvcellar.agents import AgentManager, ModelRegistry, Turn, TurnEnd, open_host
from kvcellar.engine import Engine, SamplingParams
from kvcellar.pictures.picture import Picture
from kvcellar.store import Store, StoreConfig

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8448,
}
TOWER = {
    "depth": 8,
    "hidden_size": 320,
    "intermediate_size": 1280,
    "num_heads": 8,
    "out_hidden_size": 512,
    "fullatt_block_indexes": [3, 7],
}
N_SCREENSHOTS, WIDTH, HEIGHT = 10, 644, 476
ANSWER = SamplingParams(max_tokens=4, ignore_eos=True)
ROUNDS = 3


def screenshot(seed: int) -> Picture:
    """Make a picture that no other seed makes."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (HEIGHT // 28, WIDTH // 28, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks.repeat(28, 0).repeat(28, 1)).save(file, "PNG")
    return Picture.read(file.getvalue())


@contextmanager
def agents_of(folder: Path, model: Path) -> Iterator[tuple[AgentManager, Engine]]:
    """Open a manager over a folder, as a process of its own has it."""
    host = open_host(str(model), backend="torch", capacity=8192)
    host.costs = Always()
    try:
        with Store(folder, StoreConfig(warm_bytes=0, queue_bytes=1 << 30)) as store:
            registry = ModelRegistry(lambda _: host)
            yield AgentManager(store, registry, default_model=host.name), host.engine
    finally:
        host.close()


async def say(agents: AgentManager, agent_id: str, text: str, *pictures: Picture) -> TurnEnd:
    """Take a turn to its end.

    Raises:
        RuntimeError: the turn failed.
    """
    placed = [{"name": agents.models.shelf.add(one).name, "at": 0} for one in pictures]
    message: dict[str, Any] = {"role": "user", "content": text, "pictures": placed}
    turn = Turn(agent_id, behind=[message], params=ANSWER)
    async for event in agents.turns.generate(turn):
        if isinstance(event, TurnEnd):
            if event.finish.error is not None:
                raise RuntimeError(f"a turn failed: {event.finish.error}")
            return event
    raise RuntimeError("a turn has no end")


def measure(quick: bool) -> dict[str, Any]:
    """Return what is reused, and what turns take."""
    rounds = 1 if quick else ROUNDS
    shots = [screenshot(seed) for seed in range(N_SCREENSHOTS)]
    warm: list[float] = []
    cold: list[float] = []
    again: list[float] = []
    new: list[float] = []
    reuse: list[float] = []
    n_encoded: list[int] = []
    with tempfile.TemporaryDirectory() as root:
        model = random_vision(Path(root) / "model", TEXT, TOWER)
        for i in range(rounds):
            folder = Path(root) / f"store-{i}"
            with agents_of(folder, model) as (agents, engine):
                asyncio.run(agents.lifecycle.create("eye"))
                for shot in shots:
                    asyncio.run(say(agents, "eye", "look at this", shot))
                n_encoded.append(engine.stats().encoded_pictures)
                ideal = len(agents.directory.agent("eye").tokens) - 1
                asyncio.run(agents.lifecycle.fork("eye", "fork"))
                end = asyncio.run(say(agents, "eye", "what has changed?"))
                warm.append(end.usage.time_to_first_token_s)
                reuse.append(end.usage.cached_tokens / ideal)
                asyncio.run(agents.lifecycle.create("other"))
                end = asyncio.run(say(agents, "other", "a new one", screenshot(100 + i)))
                new.append(end.usage.time_to_first_token_s)
                end = asyncio.run(say(agents, "other", "and again", shots[3]))
                again.append(end.usage.time_to_first_token_s)
                n_encoded.append(engine.stats().encoded_pictures - 1)
                asyncio.run(agents.sleep.pause("fork"))
            with agents_of(folder, model) as (agents, engine):
                end = asyncio.run(say(agents, "fork", "what has changed?"))
                found = end.usage.cached_tokens + end.usage.restored_tokens
                reuse.append(min(found, ideal) / ideal)
                n_encoded.append(N_SCREENSHOTS + engine.stats().encoded_pictures)
                host = agents.models.host(agents.models.names[0])
                assert host is not None
                messages = agents.directory.agent("fork").messages
            with agents_of(Path(root) / f"empty-{i}", model) as (agents, engine):
                for shot in shots:
                    agents.models.shelf.add(shot)
                asyncio.run(agents.lifecycle.create("eye"))
                cold.append(asyncio.run(_whole(agents, list(messages[:-1]))))
    print(
        f"a question behind {N_SCREENSHOTS} screenshots: {median_ms(warm):.0f} ms warm, "
        f"{median_ms(cold):.0f} ms cold; a screenshot that was seen elsewhere "
        f"{median_ms(again):.0f} ms, a new one {median_ms(new):.0f} ms"
    )
    return {
        "reuse_of_ideal": round(min(reuse), 4),
        "warm_turn_over_cold": round(median_ms(warm) / median_ms(cold), 4),
        "encoded_once": set(n_encoded) == {N_SCREENSHOTS},
        "again_over_new": round(median_ms(again) / median_ms(new), 4),
        "warm_ms": round(median_ms(warm), 1),
        "cold_ms": round(median_ms(cold), 1),
    }


async def _whole(agents: AgentManager, messages: list[dict[str, Any]]) -> float:
    """Take a turn that is given all of a conversation; return the seconds to its first token."""
    turn = Turn("eye", messages=messages, params=ANSWER)
    async for event in agents.turns.generate(turn):
        if isinstance(event, TurnEnd):
            if event.finish.error is not None:
                raise RuntimeError(f"a turn failed: {event.finish.error}")
            return event.usage.time_to_first_token_s
    raise RuntimeError("a turn has no end")


if __name__ == "__main__":
    run(__doc__ or "", measure)
