"""Models with recurrent layers behind our caches: trees, drops, other networks, packed weights."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import kvcellar as kv
from kvcellar.backends.torch.bind.mixers import Mixer, bind_states
from kvcellar.backends.torch.cpu.hold import hold_weights
from kvcellar.backends.torch.cpu.modules.linears import KernelLinear
from kvcellar.errors import ModelError
from kvcellar.kernel import levels
from tests.models.players import TOLERANCE, assert_close
from tests.models.recurrent_pairs import pair
from tests.stretches import stretches

FAMILIES = ("qwen3_5", "falcon_h1", "kimi_linear", "lfm2", "zaya")
"""A gated delta net, Mamba 2 with attention, another delta rule, a convolution, delayed values."""


@pytest.mark.parametrize("family", FAMILIES)
def test_the_nodes_of_a_tree_go_on_from_their_parents(family):
    model = pair(family)
    config = kv.make_config(model.facts.params, 64)
    with kv.make_tree_session("torch", config) as session:
        runner, cache = model.bind(session), session.cache
        prompt = [3, 1, 4, 1, 5]
        runner.forward(prompt, cache.begin_step([(0, 5)]))
        tokens, parents = [9, 2, 6, 5, 3], [-1, -1, 0, 2, 2]
        got = runner.forward(tokens, cache.propose(parents), range(5))
        chains = [[9], [2], [9, 6], [9, 6, 5], [9, 6, 3]]
        for row, chain in zip(got, chains, strict=True):
            assert_close(row, model.want(*prompt, *chain)[-1])
        cache.commit([0, 2, 4])
        got = runner.forward([7], cache.begin_step([(0, 1)]))[0]
        assert_close(got, model.want(*prompt, 9, 6, 3, 7)[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_that_is_taken_back_leaves_the_states_as_they_were(family):
    model = pair(family)
    with kv.make_seq_session("torch", kv.make_config(model.facts.params, 64)) as session:
        runner, cache = model.bind(session), session.cache
        runner.forward([3, 1, 4], cache.begin_step([(0, 3)]))
        runner.forward([8], cache.begin_step([(0, 1)]))
        cache.cancel_step()
        got = runner.forward([1, 5], cache.begin_step([(0, 2)]), range(2))
        assert_close(got, model.want(3, 1, 4, 1, 5)[3:])


def test_tokens_of_one_sequence_may_be_spread_over_a_batch():
    model = pair("qwen3_5")
    with kv.make_seq_session("torch", kv.make_config(model.facts.params, 64)) as session:
        runner, cache = model.bind(session), session.cache
        seq_ids, tokens = [0, 0, 1, 0, 1], [3, 1, 2, 4, 7]
        got = runner.forward(tokens, cache.begin_step(stretches(seq_ids)), range(5))
        assert_close(got[[0, 1, 3]], model.want(3, 1, 4))
        assert_close(got[[2, 4]], model.want(2, 7))


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_outside_of_a_runner_do_as_before(family):
    model = pair(family)
    path, argument = model.facts.states[0].askers[0]
    ours, theirs = (network.get_submodule(path) for network in (model.ours, model.theirs))
    assert isinstance(ours.forward, Mixer)
    x = torch.randn(2, 3, model.facts.hidden_size)
    caches = [DynamicCache(config=model.theirs.config) for _ in range(2)]
    with torch.inference_mode():
        for part in (x, x[:, :1]):
            got, want = (
                module(part, **{argument: cache})
                for module, cache in zip((ours, theirs), caches, strict=True)
            )
            pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
            for one, other in pairs:
                assert torch.equal(one, other)


def test_a_copy_of_a_network_runs_its_own_weights():
    model = pair("qwen3_5")
    network = copy.deepcopy(model.ours)
    with torch.no_grad():
        network.get_submodule(model.facts.states[0].askers[0][0]).out_proj.weight.mul_(2)
    said = []
    for one in (network, model.ours):
        with kv.make_decode_session("torch", kv.make_config(model.facts.params, 64)) as session:
            said.append(model.bind(session, one).forward([3, 1, 4], range(3), range(3)))
    assert np.abs(said[0] - said[1]).max() > 1e-2
    assert_close(said[1], model.want(3, 1, 4))


def test_a_network_without_the_modules_that_were_seen_is_refused():
    with pytest.raises(ModelError, match="was found to keep its states in"):
        bind_states(torch.nn.Linear(1, 1), pair("lfm2").facts)


@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2", "jamba"])
def test_linear_layers_of_recurrent_modules_hold_packed_weights(family):
    model = pair(family)
    network = copy.deepcopy(model.ours)
    held = hold_weights(network, "int8")
    assert held.decoder is None
    for at in model.facts.states:
        inside = network.get_submodule(at.askers[0][0]).modules()
        assert sum(isinstance(module, KernelLinear) for module in inside) >= 2
    with kv.make_seq_session("torch", kv.make_config(model.facts.params, 64)) as session:
        runner, cache = model.bind(session, network), session.cache
        whole = runner.forward([3, 1, 4, 1, 5], cache.begin_step([(0, 5)]), range(5))
        pieces = [runner.forward([3, 1, 4], cache.begin_step([(1, 3)]), range(3))]
        pieces += [runner.forward([token], cache.begin_step([(1, 1)])) for token in (1, 5)]
        other = runner.forward([3], cache.begin_step([(2, 1)]))
        both = runner.forward([1, 4], cache.begin_step([(2, 1), (3, 1)]), range(2))
        cache.seq_cp(1, 4)
        alike = runner.forward([9, 9], cache.begin_step([(1, 1), (4, 1)]), range(2))
    assert_near(np.concatenate(pieces), whole)
    assert_close(alike[0], alike[1])
    assert_near(other, whole[:1])
    assert_near(both[0], whole[1])


def assert_near(got: np.ndarray, want: np.ndarray) -> None:
    """Equal but for inputs that round to another of 255 numbers now and then."""
    assert np.abs(got - want).mean() < 100 * TOLERANCE
