"""The ExecuTorch backend: programs exported once, run on the CPU with any cache.

Its runtime's tensors lie in host memory and ExecuTorch needs torch anyway, so its caches are those
of the torch backend. What is its own is how a program meets them: see ``program`` and ``native``.
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
from kvcellar.registry import CacheBuilderRegistry

if TYPE_CHECKING:
    from kvcellar.backends.executorch.exporting import ExportReport

if importlib.util.find_spec("executorch") is None:
    raise ModuleNotFoundError("No module named 'executorch'", name="executorch")

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("executorch", "contiguous", TorchContiguousCache)
_builders.register_builder("executorch", "seq", TorchSeqCache)
_builders.register_builder("executorch", "paged", TorchPagedCache)
_builders.register_builder("executorch", "tree", TorchTreeCache)

from kvcellar.backends.executorch.loading import (  # noqa: E402
    ExecutorchModel,
    check_model,
    load_model,
    size_program,
)
from kvcellar.backends.executorch.program import Method, Program  # noqa: E402

__all__ = [
    "ExecutorchModel",
    "Method",
    "Program",
    "check_model",
    "export_program",
    "load_model",
    "size_program",
]


def export_program(name_or_path: str | Path, to: str | Path, **options: Any) -> ExportReport:
    """A checkpoint as one file; see ``exporting.export_program``. Who only runs imports less."""
    from kvcellar.models.tokenizer import quiet

    with quiet(lambda part: None):
        from kvcellar.backends.executorch.exporting import export_program

    return export_program(name_or_path, to, **options)
