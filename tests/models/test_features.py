"""Features: hidden states of some layers beside the logits."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvcellar.errors import ConfigError, PromptError
from tests.models.players import MAKE_SESSION, Player, assert_close, text


def inputs_of(modules, run) -> np.ndarray:
    """The first inputs of modules in one run, side by side."""
    seen = []
    hooks = [
        m.register_forward_pre_hook(lambda m, given: seen.append(given[0][0])) for m in modules
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return torch.cat(seen, dim=-1).numpy()


def n_hooks(model) -> int:
    return sum(len(module._forward_pre_hooks) for module in model.network.modules())


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_features_are_what_the_layers_are_given_in_transformers_own_forward(name, loaded, oracle):
    model, prompt, own = loaded(name), text(11), oracle(name).model
    middle, last = model.params.n_layers // 2, model.params.n_layers
    modules = [own.model.layers[0], own.model.layers[middle], own.model.norm]
    want = inputs_of(modules, lambda: own(torch.tensor([prompt])))
    for kind in MAKE_SESSION:
        with Player(model, kind) as player:
            runner = model.bind(player.session, feature_layers=(0, middle, last))
            parts = []
            for start, some in ((0, prompt[:7]), (7, prompt[7:])):
                if kind != "contiguous":
                    player.cache.begin_step([(0, len(some))])
                at = range(start, start + len(some))
                logits, features = runner.forward_with_features(some, list(at), [0])
                assert features.dtype == np.float32
                parts.append(features)
        assert runner.n_features == want.shape[1]
        np.testing.assert_allclose(np.concatenate(parts), want, atol=2e-4)
        assert_close(logits, oracle(name).logits(prompt)[[7]])


def test_nothing_stays_on_the_model_that_features_were_asked_of(loaded):
    model = loaded("llama")
    before = n_hooks(model)
    with Player(model, "contiguous") as player:
        runner = model.bind(player.session, feature_layers=(1, 3))
        runner.forward_with_features([1, 2], [0, 1])
        assert n_hooks(model) == before
        with pytest.raises(PromptError):
            runner.forward_with_features([-1], [2])
        assert n_hooks(model) == before
        assert player.cache.length == 2


def test_a_thread_gets_its_own_features_while_another_runs_the_same_model(loaded):
    model = loaded("llama")
    prompts = [text(5, seed) for seed in range(2)]
    both = threading.Barrier(2)
    found = {}

    def run(i: int) -> None:
        with Player(model, "contiguous") as player:
            runner = model.bind(player.session, feature_layers=(0, 3))
            both.wait()
            found[i] = [
                runner.forward_with_features([token], [at])[1]
                for at, token in enumerate(prompts[i])
            ]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    embedding = model.network.get_input_embeddings().weight.detach().numpy()
    for i, prompt in enumerate(prompts):
        features = np.concatenate(found[i])
        np.testing.assert_allclose(features[:, : embedding.shape[1]], embedding[list(prompt)])


@pytest.mark.parametrize("layers", [(0, 4), (-1, 2), (2, 1), (1, 1)])
def test_layers_that_a_model_does_not_have_are_refused(layers, loaded):
    model = loaded("llama")
    with Player(model, "seq") as player, pytest.raises(ConfigError, match="0 to 3"):
        model.bind(player.session, feature_layers=layers)
