"""Runs models over caches: sampling, text, and the loops that turn prompts into answers.

Imports prefixes and the faces of caches, and NumPy: a runner takes token ids and gives logits,
whatever its backend; no backend's tensors come in.

Start with ``Engine.step`` in ``engine.py``.
"""

from kvcellar.engine.branches import Branch, BranchReport, branch
from kvcellar.engine.cell_map import CellMap, CellState
from kvcellar.engine.conversation import Conversation, encode_chat
from kvcellar.engine.engine import Engine, EngineConfig
from kvcellar.engine.generate import Finish, GeneratedToken, Generation, Usage, generate, last
from kvcellar.engine.guide import Guide
from kvcellar.engine.request import (
    Event,
    FinishEvent,
    PromptEvent,
    PromptProgress,
    Request,
    TokenEvent,
)
from kvcellar.engine.restore import HeldPrefix, Restore, RowCache
from kvcellar.engine.sampling import (
    DEFAULTABLE,
    Choice,
    SamplingParams,
    SamplingState,
    TokenLogprob,
    sample,
)
from kvcellar.engine.service import EngineService, EventStream
from kvcellar.engine.stats import EngineStats
from kvcellar.engine.text import Detokenizer, StopMatcher, TextStream
from kvcellar.space import Space

__all__ = [
    "DEFAULTABLE",
    "Branch",
    "BranchReport",
    "CellMap",
    "CellState",
    "Choice",
    "Conversation",
    "Detokenizer",
    "Engine",
    "EngineConfig",
    "EngineService",
    "EngineStats",
    "Event",
    "EventStream",
    "Finish",
    "FinishEvent",
    "GeneratedToken",
    "Generation",
    "Guide",
    "HeldPrefix",
    "PromptEvent",
    "PromptProgress",
    "Request",
    "Restore",
    "RowCache",
    "SamplingParams",
    "SamplingState",
    "Space",
    "StopMatcher",
    "TextStream",
    "TokenEvent",
    "TokenLogprob",
    "Usage",
    "branch",
    "encode_chat",
    "generate",
    "last",
    "sample",
]
