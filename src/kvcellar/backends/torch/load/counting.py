"""Parameters of a checkpoint, and what the kernel may hold of them: counted, with nothing read.

Counted on the network that transformers builds on the meta device, where tensors have shapes and no
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.backends.torch.bind.latent import bind_latents
from kvcellar.backends.torch.cpu.holdable import matrices_of
from kvcellar.backends.torch.cpu.modules.blocks import Kept, placed_bytes
from kvcellar.backends.torch.cpu.modules.linears import reads_weights
from kvcellar.backends.torch.load.affine_blocks import StoredMatrix, kept_of
from kvcellar.backends.torch.load.gguf import blocks_of
from kvcellar.backends.torch.load.networks import empty_networks
from kvcellar.models.facts import ModelFacts
from kvcellar.models.files.formats import GROUPED, format_of
from kvcellar.models.gguf.reader import read_gguf
from kvcellar.models.weights import Matrix


@dataclass(frozen=True, slots=True)
class Counted:
    """Parameters of a network by name, a tied one once.

    Attributes:
        sizes: numbers of each.
        matrices: those that the kernel can hold.
        blocks: of these, those that it multiplies as the file has them.
        keys: the file's own names of these.
    """

    sizes: Mapping[str, int]
    matrices: Mapping[str, Matrix]
    blocks: Mapping[str, Kept]
    keys: Mapping[str, str]


NOTHING = Counted({}, {}, {}, {})
"""Counts of a model none of whose matrices stay as they are stored."""


def may_keep(raw: Mapping[str, Any], checkpoint: Path) -> bool:
    """Return true if a checkpoint stores matrices in a way that the kernel may multiply."""
    format = None if checkpoint.is_file() else format_of(raw, checkpoint)
    return checkpoint.is_file() or (format is not None and format.method in GROUPED)


def count(raw: Mapping[str, Any], facts: ModelFacts, checkpoint: Path | None = None) -> Counted:
    """Count the parameters of a model.

    Args:
        raw: its ``config.json``.
        facts: of the model.
        checkpoint: a GGUF file or a folder with its weights; None: they are elsewhere.

    Raises:
        ModelError: the config's fields do not make a model, or the weights are damaged.
    """
    whole, network = empty_networks(raw)
    kept = {}
    if checkpoint is not None and reads_weights():
        kept = _kept(raw, checkpoint, whole, network)
    bind_latents(network, facts.latents)
    sizes = {name: int(weight.numel()) for name, weight in network.named_parameters()}
    matrices = matrices_of(network)
    kept = {name: one for name, one in kept.items() if name in matrices}
    for name, one in kept.items():
        matrices[name] = matrices[name]._replace(block_bytes=sum(placed_bytes(one.kept)))
    blocks = {name: one.kept for name, one in kept.items()}
    return Counted(sizes, matrices, blocks, {name: one.key for name, one in kept.items()})


def _kept(
    raw: Mapping[str, Any], checkpoint: Path, whole: Any, network: Any
) -> dict[str, StoredMatrix]:
    """Return the matrices that can stay as a checkpoint has them, by the network's names."""
    own = {id(weight): name for name, weight in network.named_parameters()}
    weights = dict(whole.named_parameters())
    if checkpoint.is_file():
        blocks = blocks_of(read_gguf(checkpoint), whole)
        found = {name: StoredMatrix(name, one) for name, one in blocks.items()}
    else:
        format = format_of(raw, checkpoint)
        found = {} if format is None else kept_of(checkpoint, format, whole)
    return {own[id(weights[name])]: one for name, one in found.items()}
