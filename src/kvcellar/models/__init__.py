"""Checkpoints and what runs them, whatever the runtime: no tensor library is imported here."""

from kvcellar.models.loading import ModelLoader, check_model, load_model
from kvcellar.models.model import LoadedModel
from kvcellar.models.options import LoadOptions
from kvcellar.models.runner import Runner

__all__ = ["LoadOptions", "LoadedModel", "ModelLoader", "Runner", "check_model", "load_model"]
