"""Tokens that are guessed and verified: who guesses, and how many guesses pay.

Imports sampling and sequences of the engine; no scheduler and no runtime come in.

Start in ``speculator.py``.
"""

from kvcellar.engine.requests.draft import Draft
from kvcellar.engine.speculate.draft_model import DraftModel
from kvcellar.engine.speculate.drafter import Drafter, DraftRequest, FeatureReader
from kvcellar.engine.speculate.eagle3 import Eagle3Drafter
from kvcellar.engine.speculate.ngram import NgramDrafter
from kvcellar.engine.speculate.speculator import Speculator
from kvcellar.engine.speculate.step_costs import StepCosts
from kvcellar.engine.speculate.verify import verify

__all__ = [
    "Draft",
    "DraftModel",
    "DraftRequest",
    "Drafter",
    "Eagle3Drafter",
    "FeatureReader",
    "NgramDrafter",
    "Speculator",
    "StepCosts",
    "verify",
]
