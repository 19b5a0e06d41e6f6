"""What torch.export sees of a model: one op per layer, no mask, no cache, no buffers of one."""

from __future__ import annotations

import pytest
import torch

import kvcellar as kv
from kvcellar.registry import use_cache
from tests.models.players import assert_close, text


class Flat(torch.nn.Module):
    """A model as an exporter takes it: tensors in, tensors out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits


def export(model: torch.nn.Module) -> torch.export.ExportedProgram:
    length = torch.export.Dim("length", min=1, max=64)
    example = (torch.tensor([[1, 2, 3, 4]]), torch.arange(4)[None])
    with torch.no_grad():
        return torch.export.export(
            Flat(model), example, dynamic_shapes=({1: length}, {1: length}), strict=False
        )


@pytest.mark.parametrize(
    ("family", "op"),
    [
        ("llama", "kvcache.update_and_attend.default"),
        ("gpt_oss", "kvcache.update_and_attend_sinks.default"),
    ],
)
@pytest.mark.slow
def test_the_graph_has_one_op_node_per_layer_and_runs_on_our_caches(loaded, oracle, family, op):
    model = loaded(family)
    program = export(model.network)
    nodes = [node for node in program.graph.nodes if "update_and_attend" in str(node.target)]
    assert [str(node.target) for node in nodes] == [op] * model.params.n_layers
    assert [node.args[4] for node in nodes] == list(range(model.params.n_layers))
    targets = " ".join(str(node.target) for node in program.graph.nodes)
    assert "scaled_dot_product" not in targets
    assert not program.graph_signature.buffers_to_mutate

    prompt = text(20, seed=3)
    run = program.module()
    got = []
    config = kv.make_config(model.params, 64)
    with kv.make_decode_session("torch", config) as session, use_cache(session.cache):
        for start, stop in ((0, 13), (13, 14), (14, 20)):
            at = torch.arange(start, stop)[None]
            got.append(run(torch.tensor([prompt[start:stop]]), at)[0])
    assert_close(torch.cat(got).detach().numpy(), oracle(family).logits(prompt))
