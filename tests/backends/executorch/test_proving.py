"""Which models export: a graph that is the model's and is lowered, and why another is not."""

from __future__ import annotations

from unittest.mock import MagicMock

import torch

from kvcellar.backends.executorch import proving
from kvcellar.backends.executorch.proving import why_not_exported
from kvcellar.backends.torch.learn.shrink.checkpoints import default_raw
from tests.backends.executorch.programs import quietly


def why_not(family: str) -> str | None:
    with quietly():
        return why_not_exported(default_raw(family))


def test_a_model_that_views_what_its_attention_returns_exports(monkeypatch):
    with quietly():
        from kvcellar.backends.executorch import lowering
    lowered = MagicMock()
    monkeypatch.setattr(lowering, "lower", lowered)  # tests of whole programs do it
    monkeypatch.setattr(proving, "compare", lambda subject: {"seq": {"decode": 0.0}})
    assert why_not("afmoe") is None
    lowered.return_value.to_executorch.assert_called_once()


def test_a_graph_that_is_not_lowered_says_why(monkeypatch):
    with quietly():
        from kvcellar.backends.executorch import lowering
    monkeypatch.setattr(lowering, "lower", MagicMock(side_effect=ValueError("no such operator")))
    assert "cannot be exported: ValueError: no such operator" in str(why_not("qwen3"))


def test_a_graph_that_is_not_the_model_is_found(monkeypatch):
    def spoil(network: torch.nn.Module) -> None:
        with torch.no_grad():
            next(iter(network.model.layers[0].parameters())).add_(0.5)

    monkeypatch.setattr(proving, "rewrite", spoil)
    assert "is not the model: logits differ by" in str(why_not("qwen3"))


def test_a_graph_that_cannot_be_traced_says_why(monkeypatch):
    monkeypatch.setattr(proving, "trace", MagicMock(side_effect=ValueError("it branches")))
    assert "cannot be exported: ValueError: it branches" in str(why_not("qwen3"))


def test_a_model_whose_sessions_choose_its_factors_does_not_export():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    with quietly():
        why = why_not_exported(default_raw("llama", rope_parameters=rope))
    assert "RoPE of type 'dynamic'" in str(why)


def test_a_model_with_recurrent_layers_does_not_export():
    assert "has 2 recurrent layers, whose states a program" in str(why_not("falcon_h1"))
