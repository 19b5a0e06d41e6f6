"""Checkpoints and what runs them, whatever the runtime: files, facts, prompts, sizes.

Imports settings and types; no tensor library is imported here.

Start in ``loading.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.lazy import names_of

if TYPE_CHECKING:
    from kvcellar.models.loading import check_model, load_model
    from kvcellar.models.model import LoadedModel, ModelLoader
    from kvcellar.models.options import LoadOptions
    from kvcellar.models.runner import Runner

_MODULES = {
    "kvcellar.models.loading": "check_model load_model",
    "kvcellar.models.model": "LoadedModel ModelLoader",
    "kvcellar.models.options": "LoadOptions",
    "kvcellar.models.runner": "Runner",
}
"""Names that are imported when somebody asks for them, by where they are."""

__getattr__ = names_of(__name__, _MODULES)

__all__ = ["LoadOptions", "LoadedModel", "ModelLoader", "Runner", "check_model", "load_model"]
