"""The ExecuTorch backend: programs exported once, run on the CPU with any cache.

Its runtime's tensors lie in host memory and ExecuTorch needs torch anyway, so its caches are those
of the torch backend. What is its own is how a program meets them: see ``program`` and ``native``.
"""

import importlib.util

from kvcellar.backends.torch import (
    TorchContiguousCache,
    TorchPagedCache,
    TorchSeqCache,
    TorchTreeCache,
)
from kvcellar.registry import CacheBuilderRegistry

if importlib.util.find_spec("executorch") is None:
    raise ModuleNotFoundError("No module named 'executorch'", name="executorch")

_builders = CacheBuilderRegistry.instance()
_builders.register_builder("executorch", "contiguous", TorchContiguousCache)
_builders.register_builder("executorch", "seq", TorchSeqCache)
_builders.register_builder("executorch", "paged", TorchPagedCache)
_builders.register_builder("executorch", "tree", TorchTreeCache)

from kvcellar.backends.executorch.exporting import ExportReport, export_program  # noqa: E402
from kvcellar.backends.executorch.loading import ExecutorchModel, load_model  # noqa: E402
from kvcellar.backends.executorch.program import Method, Program  # noqa: E402

__all__ = [
    "ExecutorchModel",
    "ExportReport",
    "Method",
    "Program",
    "export_program",
    "load_model",
]
