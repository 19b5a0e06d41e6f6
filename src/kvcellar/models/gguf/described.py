"""Quantisation of a GGUF file: its name, and what tensors of each type take."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from kvcellar.models.gguf.reader import GgufFile, read_gguf

_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4",
}
"""Numbers in ``general.file_type`` -> names that people know files by."""


def type_bytes(file: GgufFile) -> dict[str, int]:
    """Return the bytes of a file's tensors by their type, the most first."""
    found: Counter[str] = Counter()
    for tensor in file.tensors.values():
        found[tensor.type_name] += tensor.n_bytes
    return dict(found.most_common())


def quantisation_of(path: Path) -> str:
    """Return the name of a file's quantisation, such as ``Q4_K_M``.

    Where the file has no such name it is the type that most of its bytes are of.
    """
    file = read_gguf(path)
    named = file.metadata.get("general.file_type")
    of_bytes = next(iter(type_bytes(file)), "empty")
    return _FILE_TYPES.get(named, of_bytes) if type(named) is int else of_bytes
