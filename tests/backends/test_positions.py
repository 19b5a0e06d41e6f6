"""Layers that ask a cache how much came before are told each token's own position."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvcellar.backends.torch.bind.positions import Positions, tell_past_lengths


class Counting(nn.Module):
    """A layer that counts its tokens behind what a cache says it has, as Llama 4's do."""

    layer_idx = 3

    def forward(self, hidden: Any, past_key_values: Any = None) -> Any:
        seen = past_key_values.get_seq_length(self.layer_idx) if past_key_values is not None else 0
        return torch.arange(hidden.shape[1]) + seen


def test_each_token_of_a_flat_batch_is_at_its_own_position():
    layer = Counting()
    tell_past_lengths(layer)
    at = torch.tensor([[7, 8, 0, 30]])
    with Positions(at):
        assert torch.equal(layer(torch.zeros(1, 4, 2)), at[0])


def test_a_forward_whose_positions_nobody_said_is_left_alone():
    layer = Counting()
    tell_past_lengths(layer)
    assert layer(torch.zeros(1, 4, 2)).tolist() == [0, 1, 2, 3]
