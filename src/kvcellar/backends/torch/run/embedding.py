"""Embedding models of transformers: encoders, and decoders that were trained to make vectors.

They write no text and keep no K and V, so they run as transformers runs them. What follows the
network is read as sentence-transformers writes it: pooling, dense layers, and length 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from kvcellar.errors import ModelError
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.files.hub import find_checkpoint
from kvcellar.models.files.pooling import Pooling, pooling_of
from kvcellar.models.options import ProgressFn
from kvcellar.models.runner import FloatArray
from kvcellar.models.text.tokenizer import load_tokenizer, quiet

_BATCH_TOKENS = 8192
_ACTIVATIONS = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh, "ReLU": torch.nn.ReLU}
_READ = ("Transformer", "Pooling", "Dense", "Normalize")
WORKING_BYTES = 256 << 20
"""Bytes that a batch takes besides the weights, for whoever divides memory."""

Dense = tuple[torch.Tensor, torch.Tensor | None, torch.nn.Module]


class EmbeddingModel:
    """An embedding model in memory. For several threads.

    Attributes:
        name: what it was asked for by.
        tokenizer: of the model.
        pooling: how its vectors are pooled where a request does not say.
        context: the longest text that it takes, in tokens.
        vocab_size: ids from 0 to ``vocab_size - 1`` exist.
        size: numbers of a vector.
        family: ``model_type``.
    """

    def __init__(self, name: str, folder: Path) -> None:
        """Load it, in float32, on the CPU.

        Raises:
            ModelError: it cannot be read, or something follows its network that is not known here.
        """
        self.name = name
        self.tokenizer = load_tokenizer(folder)
        self.pooling: Pooling = pooling_of(folder)
        try:
            with quiet(lambda part: None):
                self._network: Any = transformers.AutoModel.from_pretrained(
                    folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
                ).eval()
        except Exception as error:  # of many kinds: missing files, unknown architectures
            raise ModelError(f"no embedding model can be read from {folder}: {error}") from error
        self._dense = list(_dense_layers(folder))
        config = self._network.config
        self.context = min(int(getattr(config, "max_position_embeddings", 512)), _BATCH_TOKENS)
        said = self.tokenizer.model_max_length
        if said < self.context:  # positions of RoBERTa's kind begin behind the padding's
            self.context = int(said)
        self.family = str(config.model_type)
        self.vocab_size = int(config.vocab_size)
        self.size = int(config.hidden_size if not self._dense else self._dense[-1][0].shape[0])

    @property
    def size_bytes(self) -> int:
        """Bytes of its weights in memory."""
        return sum(p.numel() * p.element_size() for p in self._network.parameters())

    def embed(
        self,
        texts: Sequence[Sequence[int]],
        pooling: Pooling,
        on_step: Callable[[], None] = lambda: None,
    ) -> FloatArray:
        """Return ``[n_texts, size]``: a vector of each text, of length 1; see ``Embedder.embed``.

        Args:
            texts: tokens of each; none is empty.
            pooling: ``mean`` of all tokens, the ``last`` one's, or the first one's, ``cls``.
            on_step: called before each forward; what it raises ends the call.
        """
        found = np.zeros((len(texts), self.size), np.float32)
        for numbers in _batches([len(text) for text in texts]):
            on_step()
            found[numbers] = self._forward([texts[i] for i in numbers], pooling)
        return found

    @torch.inference_mode()
    def _forward(self, texts: Sequence[Sequence[int]], pooling: Pooling) -> FloatArray:
        longest = max(map(len, texts))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(longest)[None] < lengths[:, None]
        states = self._network(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        vectors = _pooled(states, mask, lengths, pooling)
        for weight, bias, activation in self._dense:
            vectors = activation(torch.nn.functional.linear(vectors, weight, bias))
        numbers: FloatArray = torch.nn.functional.normalize(vectors, dim=-1).numpy()
        return numbers


def load_embedding_model(name: str, report: ProgressFn) -> EmbeddingModel:
    """Load an embedding model; download what is not here.

    Args:
        name: a folder of a checkpoint, or a name on the Hugging Face hub.
        report: told about the progress.

    Raises:
        ModelError: there is none, or it is not one that transformers reads.
    """
    folder = find_checkpoint(name, report)
    if folder.is_file():
        raise ModelError(
            f"{folder} is a GGUF file, and embedding models are read as checkpoints in "
            f"safetensors; give the folder of one"
        )
    return EmbeddingModel(name, folder)


def _pooled(
    states: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor, pooling: Pooling
) -> torch.Tensor:
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        return states[torch.arange(len(states)), lengths - 1]
    return (states * mask[..., None]).sum(dim=1) / lengths[:, None]


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield numbers of texts of like lengths, so many that their padded tokens are bounded."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _dense_layers(folder: Path) -> Iterator[Dense]:
    """Yield the layers behind the pooling: weight, bias, activation.

    Raises:
        ModelError: there is something else.
    """
    file = folder / "modules.json"
    modules: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind not in _READ:
            raise ModelError(f"{file} has a module {kind!r}; known are {', '.join(_READ)}")
        if kind != "Dense":
            continue
        inside = folder / str(module["path"])
        said = str(read_json(inside / "config.json").get("activation_function", "Identity"))
        activation = _ACTIVATIONS.get(said.rpartition(".")[2])
        if activation is None:
            raise ModelError(f"{inside} has the activation {said!r}, which is not known here")
        weights = load_file(inside / "model.safetensors")
        weight = weights["linear.weight"].float()
        bias = weights.get("linear.bias")
        yield weight, None if bias is None else bias.float(), activation()
