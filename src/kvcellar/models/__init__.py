"""Loading checkpoints and binding their attention to the op. Nothing here writes a model again.

Importing this package needs no tensor library; loading a model does.
"""

from kvcellar.models.loading import LoadedModel, check_model, load_model
from kvcellar.models.runner import Runner

__all__ = ["LoadedModel", "Runner", "check_model", "load_model"]
