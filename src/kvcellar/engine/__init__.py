"""Runs models over caches: sampling, text, and the loops that turn prompts into answers.

Imports prefixes and the faces of caches, and NumPy: a runner takes token ids and gives logits,
whatever its backend; no backend's tensors come in.

Start with ``Engine.step`` in ``engine.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.lazy import names_of

if TYPE_CHECKING:
    from kvcellar.engine.cell_map import CellMap, CellState
    from kvcellar.engine.config import EngineConfig
    from kvcellar.engine.engine import Engine
    from kvcellar.engine.kv.restore import HeldPrefix, Restore, RowCache
    from kvcellar.engine.loop.branches import Branch, BranchReport, branch
    from kvcellar.engine.loop.conversation import Conversation, encode_chat
    from kvcellar.engine.loop.generating import (
        Finish,
        GeneratedToken,
        Generation,
        Usage,
        generate,
        last,
    )
    from kvcellar.engine.loop.text import Detokenizer, StopMatcher, TextStream
    from kvcellar.engine.requests.request import (
        Event,
        FinishEvent,
        PromptEvent,
        PromptProgress,
        Request,
    )
    from kvcellar.engine.sampler.guide import Guide
    from kvcellar.engine.sampler.sampling import (
        DEFAULTABLE,
        Choice,
        SamplingParams,
        SamplingState,
        TokenLogprob,
        sample,
    )
    from kvcellar.engine.service import EngineService, EventStream
    from kvcellar.engine.stats import EngineStats
    from kvcellar.space import Space

_MODULES = {
    "kvcellar.engine.cell_map": "CellMap CellState",
    "kvcellar.engine.config": "EngineConfig",
    "kvcellar.engine.engine": "Engine",
    "kvcellar.engine.kv.restore": "HeldPrefix Restore RowCache",
    "kvcellar.engine.loop.branches": "Branch BranchReport branch",
    "kvcellar.engine.loop.conversation": "Conversation encode_chat",
    "kvcellar.engine.loop.generating": "Finish GeneratedToken Generation Usage generate last",
    "kvcellar.engine.loop.text": "Detokenizer StopMatcher TextStream",
    "kvcellar.engine.requests.request": "Event FinishEvent PromptEvent PromptProgress Request",
    "kvcellar.engine.sampler.guide": "Guide",
    "kvcellar.engine.sampler.sampling": (
        "Choice DEFAULTABLE SamplingParams SamplingState TokenLogprob sample"
    ),
    "kvcellar.engine.service": "EngineService EventStream",
    "kvcellar.engine.stats": "EngineStats",
    "kvcellar.space": "Space",
}
"""Names that are imported when somebody asks for them, by where they are."""

__getattr__ = names_of(__name__, _MODULES)

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
    "TokenLogprob",
    "Usage",
    "branch",
    "encode_chat",
    "generate",
    "last",
    "sample",
]
