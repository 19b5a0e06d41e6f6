"""RoPE whose factors depend on the length, held still by sessions, against transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import kvcellar as kv
from kvcellar.backends.torch.bind.positions import Positions
from kvcellar.backends.torch.bind.ropes import SessionRope, hold_ropes
from kvcellar.backends.torch.cpu.modules.rotations import Rotations
from kvcellar.engine import Engine, EngineConfig, FinishEvent, Request, SamplingParams
from kvcellar.engine.loop.generating import generate, last
from kvcellar.engine.loop.sequence import SequenceView
from kvcellar.errors import ConfigError
from kvcellar.hosting.host import ModelHost, open_host
from kvcellar.models import LoadedModel, load_model
from tests.agents.fakes import Eager, manager, run, tokens_of, turn
from tests.models.players import Oracle, Player, assert_close, text
from tests.models.tiny_checkpoints import COMMON, randomize, save

ORIGINAL, LONGEST = 32, 128

FACTORS = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 10 for i in range(8)],
        "long_factor": [1.5 + i for i in range(8)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": LONGEST / ORIGINAL},
}
SAID = {"longrope": LONGEST, "dynamic": ORIGINAL}
"""Positions as published configs have them: with what longrope adds, without what dynamic does."""


@pytest.fixture(scope="module", params=FACTORS)
def kind(request: Any) -> str:
    return request.param


def config(kind: str, **fields: Any) -> Any:
    positions = {"max_position_embeddings": SAID[kind]}
    rope = {"rope_parameters": dict(FACTORS[kind])}
    return transformers.LlamaConfig(**COMMON | positions | rope | fields, num_hidden_layers=3)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: Any) -> Path:
    model = transformers.LlamaForCausalLM(config(kind))
    randomize(model)
    path = tmp_path_factory.mktemp(kind)
    save(model, path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def in_chunks(player: Player, tokens: tuple[int, ...]) -> np.ndarray:
    """The logits of every token, fed in pieces of 1, 7, and the rest."""
    pieces = tokens[:1], tokens[1:8], tokens[8:30], tokens[30:]
    return np.concatenate([player.feed(piece, rows="all") for piece in pieces if piece])


def test_a_short_session_is_as_short_texts_are(model, oracle):
    tokens = text(ORIGINAL)
    with Player(model, "seq", ORIGINAL) as player:
        assert_close(in_chunks(player, tokens), oracle.logits(tokens))


@pytest.mark.parametrize("capacity", [70, LONGEST, 1000])
def test_a_long_session_is_as_texts_of_its_length_are_from_its_first_token_on(
    capacity, model, oracle
):
    tokens = text(min(capacity, LONGEST))
    assert len(tokens) > ORIGINAL
    want = oracle.logits(tokens)
    with Player(model, "seq", capacity) as player:
        got = in_chunks(player, tokens[:50])
        player.cache.seq_cp(0, 1)
        rest = player.feed(tokens[50:], 1, rows="all")
        assert_close(np.concatenate([got, rest]), want)
        player.cut(60, 1)
        assert_close(player.feed(tokens[60:], 1, rows="all"), want[60:])
        player.cut(60, 1)
        both = player.batch([(0, tokens[50]), (1, tokens[60])], rows="all")
        assert_close(both, want[[50, 60]])


def test_sessions_of_one_model_may_differ_at_the_same_time(model, oracle):
    short, long = text(ORIGINAL - 1, 1), text(70, 2)  # transformers forgets 70 below ORIGINAL
    with Player(model, "seq", ORIGINAL) as a, Player(model, "tree", 70) as b:
        got_short, got_long = [], []
        for at in range(0, 70, 10):
            if short[at : at + 10]:
                got_short.append(a.feed(short[at : at + 10], rows="all"))
            got_long.append(b.feed(long[at : at + 10], rows="all"))
    assert_close(np.concatenate(got_short), oracle.logits(short))
    assert_close(np.concatenate(got_long), oracle.logits(long))


def test_k_of_other_factors_is_another_models(model):
    lengths = [
        model.rope_length_for(kv.make_config(model.params, capacity)) for capacity in (8, 32, 70)
    ]
    assert lengths[0] == lengths[1] != lengths[2]
    prints = [model.fingerprint(rope_length=length).of_kv for length in lengths]
    assert prints[0] == prints[1] != prints[2]
    with pytest.raises(ConfigError, match="depends on the capacity of its session"):
        model.fingerprint()


def test_a_host_keeps_k_of_its_capacity_apart(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("KVCELLAR_HOME", str(tmp_path))
    keys = []
    for capacity in (32, 100):
        host = open_host(folder, capacity=capacity)
        keys.append(host.key.fingerprint)
        host.close()
    assert keys[0] != keys[1]


def test_the_kernels_rotations_are_the_sessions(kind):
    network = transformers.LlamaForCausalLM(config(kind))
    hold_ropes(network)
    rotary = network.model.rotary_emb
    assert isinstance(rotary, SessionRope)
    found, like = Rotations(rotary, torch.float32), torch.empty(0)
    for length in (0, 33, 70):
        for positions in ([3], [3, 100, 31], [60]):
            with Positions(torch.tensor([positions]), length):
                want = torch.cat(rotary(like, torch.tensor([positions])))
            assert torch.equal(found.of(np.array(positions), length), want)
    assert not torch.equal(found.of(np.array([60]), 0), found.of(np.array([60]), 70))
    at, lengths = [3, 100, 31], (32, 70, 32)  # texts of several lengths in one forward
    with Positions(torch.tensor([at]), lengths):
        want = torch.cat(rotary(like, torch.tensor([at])))
    assert torch.equal(found.of(np.array(at), lengths), want)
    for i, length in enumerate(lengths):
        assert torch.equal(want[:, i], found.of(np.array(at), length)[:, i])


def test_a_model_that_the_kernel_runs_as_one_call_has_the_sessions_factors(folder, oracle):
    held = load_model(folder, weights="int8", dtype="float32")
    if held.decoder is None:
        pytest.skip("the kernel is not built")
    plain = load_model(folder, weights="int8", dtype="float32")
    object.__setattr__(plain, "decoder", None)
    tokens = text(70)
    with Player(held, "seq", 70) as player, Player(plain, "seq", 70) as other:
        got = np.concatenate([player.feed(tokens[at : at + 2]) for at in range(0, 70, 2)])
        want = np.concatenate([other.feed(tokens[at : at + 2]) for at in range(0, 70, 2)])
    np.testing.assert_allclose(got, want, atol=2e-3, rtol=0)


def test_layers_of_several_kinds_have_each_its_own_factors():
    rope = {
        "full_attention": FACTORS["dynamic"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    small = transformers.Gemma3TextConfig(
        **COMMON | {"max_position_embeddings": ORIGINAL},
        head_dim=16,
        num_hidden_layers=2,
        layer_types=list(reversed(rope)),
        rope_parameters=rope,
    )
    network = transformers.Gemma3ForCausalLM(small)
    hold_ropes(network)
    rotary, at = network.model.rotary_emb, torch.arange(4)[None]
    full, sliding = (
        [torch.cat(rotary.at(length)(torch.empty(0), at, layer_type)) for length in (0, 100)]
        for layer_type in ("full_attention", "sliding_attention")
    )
    assert not torch.equal(*full)
    assert torch.equal(*sliding)


def test_other_networks_are_left_as_they_are():
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_hidden_layers=1))
    hold_ropes(network)
    assert not any(isinstance(module, SessionRope) for module in network.modules())


# Each text by its own length ------------------------------------------------------------------


def engine_of(model: LoadedModel, session: Any, **config: Any) -> Engine:
    return Engine(model.bind(session), session.cache, config=EngineConfig(**config))


def greedy(oracle: Oracle, tokens: tuple[int, ...], n: int) -> list[int]:
    """What transformers answers without a cache, by a forward of the whole text for each token."""
    found = list(tokens)
    for _ in range(n):
        found.append(int(oracle.logits(tuple(found))[-1].argmax()))
    return found[len(tokens) :]


def asked(tokens: tuple[int, ...], n: int) -> Request:
    return Request(tokens, SamplingParams(max_tokens=n, ignore_eos=True))


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: Any) -> Any:
    """A model of two sets of factors, and what transformers says of it."""
    model = transformers.LlamaForCausalLM(config("longrope"))
    randomize(model)
    path = tmp_path_factory.mktemp("longrope")
    save(model, path)
    return load_model(path), Oracle(path)


def test_each_text_of_a_large_engine_is_turned_by_its_own_length(longrope):
    model, oracle = longrope
    prompts = [text(n, seed) for seed, n in enumerate((5, 20, ORIGINAL, ORIGINAL + 1, 70))]
    with kv.make_seq_session("torch", kv.make_config(model.params, 400, "float32")) as session:
        engine = engine_of(model, session, max_num_batched_tokens=16)
        ids = [engine.submit(asked(prompt, 3)) for prompt in prompts]
        ended = {e.request_id: e for e in engine.run() if isinstance(e, FinishEvent)}
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert list(ended[request_id].token_ids) == greedy(oracle, prompt, 3), len(prompt)


def test_a_text_that_grows_over_the_border_is_read_anew_and_goes_back_to_what_it_was(longrope):
    model, oracle = longrope
    prompt, stranger = text(ORIGINAL - 3), text(70, 2)
    with kv.make_seq_session("torch", kv.make_config(model.params, 400, "float32")) as session:
        engine = engine_of(model, session)
        engine.submit(asked(stranger, 12))
        over = engine.generate(asked(prompt, 8))
        want = greedy(oracle, prompt, 8)
        assert list(over.token_ids) == want
        assert over.usage.cached_tokens == 0
        longer = (*prompt, *want)
        again = engine.generate(asked(longer, 2))
        assert list(again.token_ids) == greedy(oracle, longer, 2)
        assert again.usage.cached_tokens == len(longer) - 1
        back = engine.generate(asked(prompt[:20], 2))  # its K of short factors is still there
        assert list(back.token_ids) == greedy(oracle, prompt[:20], 2)
        assert back.usage.cached_tokens == 19


@pytest.mark.parametrize("kind_of_cache", ["contiguous", "seq"])
def test_the_plain_loop_goes_over_the_border_and_back(kind_of_cache, longrope):
    model, oracle = longrope
    make = kv.make_decode_session if kind_of_cache == "contiguous" else kv.make_seq_session
    prompt = text(ORIGINAL - 3)
    with make("torch", kv.make_config(model.params, 200, "float32")) as session:
        runner = model.bind(session)

        def said(tokens: tuple[int, ...], n: int) -> list[int]:
            settings = SamplingParams(max_tokens=n, ignore_eos=True)
            return list(last(generate(runner, session.cache, NoText(), tokens, settings)).token_ids)

        assert said(prompt, 8) == greedy(oracle, prompt, 8)
        view = SequenceView(session.cache)
        view.cut(10)  # of K that was turned as that of a long text
        assert said(prompt[:20], 3) == greedy(oracle, prompt[:20], 3)
        view.cut(10)
        assert said(text(70), 2) != []
        view.cut(0)
        assert said(text(70), 2) == greedy(oracle, text(70), 2)


class NoText:
    """A tokenizer of tokens without text."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return ""


def test_an_agent_goes_over_the_border_is_told_why_and_comes_back_from_disk(longrope, tmp_path):
    model, oracle = longrope
    settings = EngineConfig(max_num_batched_tokens=16)

    def load(name: str) -> ModelHost:
        host = open_host(model.path, capacity=400, dtype="float32", config=settings)
        host.costs = Eager()  # whatever is stored is loaded
        return host

    parts, said = (text(ORIGINAL - 12), text(4, 1), text(30, 2)), [6, 6, 6]
    causes, tokens = [], []
    for part, n in zip(parts, said, strict=True):  # each in a process of its own, as it were
        with manager(tmp_path / "store", load, verify="canary") as agents:
            if not tokens:
                run(agents.lifecycle.create("a", model=str(model.path)))
            params = SamplingParams(max_tokens=n, ignore_eos=True)
            end = run(turn(agents, "a", tokens=list(part), params=params))
            causes.append(None if end.usage.miss is None else end.usage.miss.cause)
            before, tokens = len(tokens), [*tokens, *part]
            tokens += greedy(oracle, tuple(tokens), n)
            assert list(tokens_of(agents, "a")) == tokens
            assert agents.store.take_events() == []
    assert causes == [None, "rope", None]
    assert end.usage.restored_tokens == before - 1
    assert any("computed again and agree" in note for note in end.usage.notes)
