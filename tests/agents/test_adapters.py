"""Agents of a model and of its adapters: one engine, and histories that are each one's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcellar.agents import AgentManager, Hosting, ModelRegistry
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.engine import EngineConfig, Request, SamplingParams
from kvcellar.errors import ModelError
from kvcellar.models import LoadOptions
from kvcellar.models.adapter_names import adapted
from kvcellar.store import Store
from tests.agents.fakes import run, turn
from tests.models.adapters import logits_of, merged, write_adapter

pytestmark = pytest.mark.usefixtures("eager")

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
CONFIG = EngineConfig(max_num_batched_tokens=24)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """A model and two adapters of it."""
    root = tmp_path_factory.mktemp("made")
    base = write_tiny("llama", root / "llama")
    adapters = {name: write_adapter(root / name, base, seed=i) for i, name in enumerate("ab")}
    return str(base), adapters


@contextmanager
def managed(folder: Path, made: Any, **options: Any) -> Iterator[AgentManager]:
    base, adapters = made
    options = {"capacity": 512, "dtype": "float32", "adapters": adapters, **options}
    hosting = Hosting(LoadOptions(base, **options), CONFIG)
    with Store(folder) as store:
        registry = ModelRegistry(hosting.open, **hosting.registry)
        try:
            yield AgentManager(store, registry, default_model=base, verify="canary")
        finally:
            registry.close()


def greedy(made: Any, name: str, prompt: list[int], n: int) -> list[int]:
    """The oracle: what the model with an adapter's weights merged in goes on with."""
    base, adapters = made
    model, tokens = merged(Path(base), adapters.get(name)), list(prompt)
    for _ in range(n):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_one_host_is_loaded_for_a_model_and_all_of_its_adapters(made, tmp_path):
    base, _ = made
    with managed(tmp_path, made) as agents:

        async def look() -> None:
            use = agents.models.use
            async with use(adapted(base, "a")) as a, use(base) as plain:
                assert agents.models.names == [base]
                b = agents.models.host(adapted(base, "b"))
                assert b is not None
                assert a.engine is plain.engine is b.engine
                assert len({one.key for one in (a, b, plain)}) == 3
                names = [one.name for one in (plain, a, b)]
                assert names == [base, f"{base}+a", f"{base}+b"]

        run(look())
        assert run(agents.models.release(adapted(base, "b")))
        assert agents.models.names == []


@pytest.mark.card
@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_requests_of_several_adapters_are_batched_and_say_what_merged_models_say(
    speculate, made, tmp_path
):
    base, _ = made
    prompt = [7, 8, 9, 7, 8, 9, 7, 8, 9, 30, 31, 7, 8]
    with managed(tmp_path, made, speculate=speculate) as agents:

        async def ask() -> None:
            async with agents.models.use(base) as host:
                hosts = [host, *host.adapters.values(), host]
                engine = host.engine
                for one in hosts:
                    engine.submit(Request(prompt, GREEDY, space=one.space))
                ends = [event for event in engine.run() if hasattr(event, "reason")]
                said = {event.request_id: list(event.token_ids) for event in ends}
                found = [said[at] for at in sorted(said)]
                wants = [greedy(made, name, prompt, 6) for name in ("", "a", "b")]
                assert found == [*wants, wants[0]]
                assert len({tuple(want) for want in wants}) == 3

        run(ask())


@pytest.mark.card
def test_an_agent_reads_its_history_anew_on_another_adapter(made, tmp_path):
    base, _ = made
    text = list(range(3, 60))
    with managed(tmp_path, made) as agents:
        run(agents.lifecycle.create("poet", model=base))
        run(turn(agents, "poet", tokens=text, params=GREEDY))
        model = adapted(base, "a")
        run(agents.lifecycle.create("other", model=model))
        end = run(turn(agents, "other", tokens=text, params=GREEDY))
        assert end.usage.cached_tokens == 0
        assert list(end.finish.token_ids) == greedy(made, "a", text, 6)
        more = run(turn(agents, "other", tokens=[5, 6], params=GREEDY))
        assert more.usage.cached_tokens == len(text) + 5
        assert run(agents.directory.describe("other")).n_cached > len(text)


@pytest.mark.card(first=True)
def test_what_an_adapter_has_computed_comes_back_to_it_alone(made, tmp_path):
    base, _ = made
    text, model = list(range(3, 60)), adapted(base, "a")
    with managed(tmp_path, made) as agents:
        run(agents.lifecycle.create("poet", model=model))
        run(turn(agents, "poet", tokens=text, params=GREEDY))
        run(agents.sleep.pause("poet"))
        host, tokens = agents.models.host(model), agents.directory.agent("poet").tokens.tokens
        assert host is not None
        assert host.engine.match(tokens, host.space) == 0  # its cells are free
    with managed(tmp_path, made) as agents:
        back = run(agents.sleep.resume("poet"))
        assert back.n_restored >= len(text)
        assert back.n_verified, back.trouble  # by the adapter's own weights
        run(agents.lifecycle.create("plain", model=base))
        end = run(turn(agents, "plain", tokens=text, params=GREEDY))
        assert end.usage.cached_tokens == 0
        assert list(end.finish.token_ids) == greedy(made, "", text, 6)


def test_the_agent_of_an_adapter_that_is_not_there_names_what_is_missing(made, tmp_path):
    base, _ = made
    with managed(tmp_path, made) as agents:
        run(agents.lifecycle.create("poet", model=adapted(base, "a")))
    refused = pytest.raises(ModelError, match="--adapter a=FOLDER")
    with managed(tmp_path, made, adapters={}) as agents, refused:
        run(turn(agents, "poet", tokens=[1, 2, 3], params=GREEDY))
