"""States of hybrid checkpoints on MLX: those of transformers, in transformers' layout."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcellar as kv

mx = pytest.importorskip("mlx.core", reason="needs mlx: pip install 'kvcellar[mlx]'")
pytest.importorskip("mlx_lm", reason="needs mlx-lm: pip install 'kvcellar[mlx]'")
torch = pytest.importorskip("torch")

from transformers import DynamicCache  # noqa: E402

from kvcellar.backends.mlx.learn.learning import learn  # noqa: E402
from kvcellar.backends.mlx.loading import load_weights  # noqa: E402
from kvcellar.backends.mlx.loading import model_facts as mlx_facts  # noqa: E402
from kvcellar.backends.mlx.runner import MlxRunner  # noqa: E402
from kvcellar.backends.mlx.words import text_config  # noqa: E402
from kvcellar.backends.torch.loading import model_facts as torch_facts  # noqa: E402
from kvcellar.models.files.checkpoint import read_config  # noqa: E402
from tests.models.hybrid_checkpoints import FAMILIES, hybrid_raw, write_hybrid  # noqa: E402
from tests.models.players import text  # noqa: E402


def states_of(past: Any) -> list[list[Any]]:
    """The states of transformers' own cache, per recurrent layer: views."""
    layers = [layer for layer in past.layers if hasattr(layer, "conv_states")]
    return [
        [state for state in (layer.conv_states[0], layer.recurrent_states[0]) if state is not None]
        for layer in layers
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers_and_go_on_in_its_modules(
    family: str, tmp_path: Path
) -> None:
    network = write_hybrid(family, tmp_path)
    past = DynamicCache(config=network.config.get_text_config(decoder=True))
    tokens, more = list(text(40)), list(text(6, 2))

    def on_torch(tokens: list[int], past: Any) -> np.ndarray:
        with torch.no_grad():
            logits = network(torch.tensor([tokens]), past_key_values=past, use_cache=True).logits
        return logits[0].numpy()

    want = on_torch(tokens, past)
    theirs, other = [[s.numpy().copy() for s in of] for of in states_of(past)], deepcopy(past)
    want_more = [on_torch([token], past) for token in more]
    raw = read_config(tmp_path)
    model = load_weights(tmp_path, raw, text_config(raw))
    learnt = learn(model, family)
    with kv.make_seq_session("mlx", kv.make_config(learnt.params, 160)) as session:
        cache, runner = session.cache, MlxRunner(model, learnt, session)

        def on_mlx(tokens: list[int]) -> np.ndarray:
            return runner.forward(tokens, cache.begin_step([(0, len(tokens))]), range(len(tokens)))

        np.testing.assert_allclose(on_mlx(tokens), want, atol=1e-3)
        slot = cache.seq_table(0)[-1][-1:]
        mine = cache.read_states(slot)
        shapes = [tuple(state.shape for state in of) for of in learnt.params.state.layers]
        assert [tuple(s.shape[1:] for s in of) for of in theirs] == shapes
        for got, state in zip(chain(*mine), chain(*theirs), strict=True):
            first = 1 if got.ndim == 3 and got.shape[-1] < 8 else 0  # nobody reads the oldest input
            np.testing.assert_allclose(got[..., first:], state[..., first:], atol=1e-3)
        for got, state in zip(chain(*mine), chain(*states_of(other)), strict=True):
            state.copy_(torch.tensor(got))
        again = [on_torch([token], other) for token in more]
        np.testing.assert_allclose(again, want_more, atol=1e-3)
        cache.write_states(slot, theirs)
        np.testing.assert_allclose(on_mlx(more), np.concatenate(want_more), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_backends_learn_the_same_of_a_checkpoint(family: str) -> None:
    raw = hybrid_raw(family)
    on_torch, on_mlx = torch_facts(raw), mlx_facts(raw)
    assert on_mlx.params == on_torch.params and on_mlx.n_layers == on_torch.n_layers
    for mine, other in ((on_mlx.layers, on_torch.layers), (on_mlx.states, on_torch.states)):
        assert [at.layer for at in mine] == [at.layer for at in other]


def test_a_config_in_the_words_of_its_hub_is_the_same_model() -> None:
    raw = hybrid_raw("granitemoehybrid")
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    hub = {
        **raw,
        "layer_types": [words[kind] for kind in raw["layer_types"]],
        "position_embedding_type": "nope",
    }
    assert hub["layer_types"] == ["mamba", "attention"] * 2
    assert mlx_facts(hub) == mlx_facts(raw)
