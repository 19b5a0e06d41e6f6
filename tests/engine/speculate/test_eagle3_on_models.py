"""The bundled head on the bundled model, and random heads on others: the text stays what it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvcellar as kv
from kvcellar.agents import open_host
from kvcellar.backends.torch.eagle3.loading import load_eagle3
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny
from kvcellar.engine import Engine, EngineConfig, Request, SamplingParams
from kvcellar.engine.speculate import Eagle3Drafter
from kvcellar.errors import ConfigError
from kvcellar.kernel import levels
from kvcellar.models import load_model
from kvcellar.models.eagle3.finding import DEMO_HEAD_FOLDER, size_eagle3
from tests.models.eagle3_heads import head_config, head_tensors, write_head
from tests.models.tiny_checkpoints import make_checkpoint

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, seed=7)
TEXTS = (
    'import os\n\n\ndef walk(top):\n    """Go through a folder."""\n    for name in ',
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n        ",
    "from collections import ",
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_model("demo")


BOTH = (GREEDY, SAMPLED)


def run(
    model: Any,
    head: Any,
    prompts: Any,
    kind: Any = kv.make_tree_session,
    settings: Any = BOTH,
) -> Any:
    """Tokens of each prompt, in all settings, side by side; and the engine's counts."""
    with (
        kind(model.backend, kv.make_config(model.params, 2048)) as session,
        kv.make_tree_session("torch", kv.make_config(head.params, 2048)) as own,
    ):
        drafter = Eagle3Drafter(head.bind(own), own.cache)
        engine = Engine(
            model.bind(session, feature_layers=head.feature_layers),
            session.cache,
            config=EngineConfig(verify_all_drafts=True, max_drafted=12),
            drafter=drafter,
        )
        ids = [engine.submit(Request(p, s)) for p in prompts for s in settings]
        ends = {e.request_id: e for e in engine.run() if hasattr(e, "reason")}
        assert own.cache.n_free == own.cache.capacity
        return [ends[i].token_ids for i in ids], engine.stats()


def plain(model: Any, prompts: Any, settings: Any = BOTH) -> list[tuple[int, ...]]:
    """Answers without guesses, one after the other."""
    with kv.make_seq_session(model.backend, kv.make_config(model.params, 2048)) as session:
        engine = Engine(model.bind(session), session.cache)
        return [engine.generate(Request(p, s)).token_ids for p in prompts for s in settings]


@pytest.mark.slow
def test_the_bundled_head_is_right_often_and_changes_nothing(demo):
    head = load_eagle3(None, demo)
    prompts = [tuple(demo.tokenizer(text)["input_ids"]) for text in TEXTS]
    want = plain(demo, prompts)
    tokens, stats = run(demo, head, prompts)
    assert tokens == want
    n_forwards = sum(map(len, tokens)) - stats.accepted_tokens
    assert stats.accepted_tokens > 0.4 * n_forwards
    chains, stats = run(demo, head, prompts, kv.make_seq_session)
    assert chains == want
    assert stats.accepted_tokens > 0.2 * n_forwards


def test_the_bundled_head_is_small(demo):
    assert sum(path.stat().st_size for path in DEMO_HEAD_FOLDER.iterdir()) < 6_000_000
    head = load_eagle3(None, demo)
    spec = size_eagle3(None, "demo", dtype="float32")
    n_bytes = sum(matrix.nbytes for matrix in head.matrices)
    assert n_bytes <= spec.weight_bytes, "what the kernel holds besides is counted in any case"
    if levels.is_available():
        n_bytes += head.kernel.size_bytes
        assert n_bytes <= spec.weight_bytes <= 1.01 * n_bytes + 8 * 320 * 4


def test_a_host_speculates_by_the_heads_name(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    for speculate in ("eagle3", f"eagle3:{DEMO_HEAD_FOLDER}"):
        host = open_host("demo", capacity=512, speculate=speculate)
        assert host.engine.generate(Request((5, 6, 7), GREEDY)).usage.completion_tokens == 40
        host.close()
    with pytest.raises(ConfigError, match="made for another model"):
        other = make_checkpoint("qwen3", tmp_path / "qwen3")
        open_host(str(other), capacity=512, speculate="eagle3:demo")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.slow
def test_a_head_that_knows_nothing_changes_nothing(tmp_path, family):
    model = load_model(make_checkpoint(family, tmp_path / family))
    config = head_config()
    head = load_eagle3(write_head(tmp_path / "head", config, head_tensors(config)), model)
    prompts = [tuple(range(i, 3 * i + 7)) for i in (5, 20)]
    tokens, stats = run(model, head, prompts)
    assert tokens == plain(model, prompts)
    assert stats.drafted_tokens > 100


@pytest.mark.card
@pytest.mark.parametrize("weights", ["none", "int8"])
def test_a_few_guesses_are_verified(tmp_path, weights):
    """Where each step takes long: its path on a card, beside weights that are held otherwise."""
    folder = write_tiny("llama", tmp_path / "model", num_hidden_layers=2)
    model = load_model(folder, weights=weights, dtype="float32")
    config = head_config(vocab_size=model.vocab_size)
    head = load_eagle3(write_head(tmp_path / "head", config, head_tensors(config)), model)
    few = [replace(one, max_tokens=4) for one in BOTH]
    tokens, stats = run(model, head, [tuple(range(5, 12))], settings=few)
    assert tokens == plain(model, [tuple(range(5, 12))], few)
    assert stats.drafted_tokens > 4


def test_the_head_guesses_for_the_model_on_mlx_too(demo):
    pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")
    model = load_model("demo", backend="mlx")
    head = load_eagle3(None, model)
    prompts = [tuple(demo.tokenizer(text)["input_ids"]) for text in TEXTS[:2]]
    tokens, stats = run(model, head, prompts)
    assert [t for i, t in enumerate(tokens) if i % 2 == 0] == plain(model, prompts)[::2]
    assert stats.accepted_tokens > 0.2 * (sum(map(len, tokens)) - stats.accepted_tokens)
