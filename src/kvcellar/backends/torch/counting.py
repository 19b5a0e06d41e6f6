"""Parameters of a checkpoint, and what the kernel may hold of them: counted, with nothing read.

Counted on the network that transformers builds on the meta device, where tensors have shapes and no
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.backends.torch.fast.blocks import Kept, placed_bytes
from kvcellar.backends.torch.fast.holdable import matrices_of
from kvcellar.backends.torch.fast.linears import reads_weights
from kvcellar.backends.torch.gguf import blocks_of
from kvcellar.backends.torch.latent import bind_latents
from kvcellar.backends.torch.networks import empty_network
from kvcellar.models.facts import ModelFacts
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.weights import Matrix


@dataclass(frozen=True, slots=True)
class Counted:
    """Parameters of a network by name, a tied one once.

    Attributes:
        sizes: numbers of each.
        matrices: those that the kernel can hold.
        blocks: of these, those that it multiplies as the file has them.
    """

    sizes: Mapping[str, int]
    matrices: Mapping[str, Matrix]
    blocks: Mapping[str, Kept]


def count(raw: Mapping[str, Any], facts: ModelFacts, file: Path | None = None) -> Counted:
    """Count the parameters of a model.

    Args:
        raw: its ``config.json``.
        facts: of the model.
        file: a GGUF file with its weights; None: they are elsewhere.

    Raises:
        ModelError: the config's fields do not make a model.
    """
    network = empty_network(raw)
    has_blocks = file is not None and reads_weights()
    stored = blocks_of(read_gguf(file), network) if file is not None and has_blocks else {}
    bind_latents(network, facts.latents)
    sizes = {name: int(weight.numel()) for name, weight in network.named_parameters()}
    matrices = matrices_of(network)
    blocks = {name: one for name, one in stored.items() if name in matrices}
    for name, one in blocks.items():
        matrices[name] = matrices[name]._replace(block_bytes=sum(placed_bytes(one)))
    return Counted(sizes, matrices, blocks)
