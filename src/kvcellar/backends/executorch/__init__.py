"""The ExecuTorch backend: programs exported once, run on the CPU with any cache.

Imports the torch backend's caches and networks, since the runtime's tensors lie in host memory;
nothing else imports this room.

Start in ``program.py`` for what is exported, in ``native/`` for how it meets a cache.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcellar.backends.torch import (
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
    TorchTreeCache,
)
from kvcellar.models.model import ModelLoader
from kvcellar.registry import Backend

if TYPE_CHECKING:
    from kvcellar.backends.executorch.exporting import ExportReport

if importlib.util.find_spec("executorch") is None:
    raise ModuleNotFoundError("No module named 'executorch'", name="executorch")

from kvcellar.backends.executorch.program import Method, Program

__all__ = ["BACKEND", "Method", "Program", "export_program"]


def _loader() -> ModelLoader:
    from kvcellar.backends.executorch import loading

    return loading


BACKEND = Backend(
    {
        "contiguous": TorchContiguousCache,
        "seq": TorchSeqCache,
        "paged": TorchPagedCache,
        "tree": TorchTreeCache,
    },
    _loader,
)


def export_program(name_or_path: str | Path, to: str | Path, **options: Any) -> ExportReport:
    """Export a checkpoint as one file; see ``exporting.export_program``, imported when called."""
    from kvcellar.models.text.tokenizer import quiet

    with quiet(lambda part: None):
        from kvcellar.backends.executorch.exporting import export_program

    return export_program(name_or_path, to, **options)
