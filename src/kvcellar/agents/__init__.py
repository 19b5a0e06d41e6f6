"""Agents that outlive the process: named histories, the engine and the store, joined.

Imports hosting, the store and dialects; no protocol of a server and no terminal come in.

Start in ``turn.py`` for a turn, in ``lifecycle.py`` for create, fork and rewind, in ``manager.py``
for how they hang together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.lazy import names_of

if TYPE_CHECKING:
    from kvcellar.agents.accounting import AgentUsage, TurnEnd
    from kvcellar.agents.dropped import Dropped
    from kvcellar.agents.kv.residence import BroughtBack
    from kvcellar.agents.manager import AgentManager
    from kvcellar.agents.planning import PlannedTurn, Turn
    from kvcellar.agents.records.misses import CAUSES, Miss
    from kvcellar.agents.records.names import (
        checked_id,
        is_unnamed,
        salt_of,
        salted_id,
        unnamed_id,
        without_salt,
    )
    from kvcellar.agents.records.views import AgentInfo, TurnRecord
    from kvcellar.agents.text.find_by_text import Place
    from kvcellar.agents.text.match_messages import Joined, n_system_of
    from kvcellar.hosting.fair_lock import Gate
    from kvcellar.hosting.host import ModelHost, check_host, open_host
    from kvcellar.hosting.loader import Hosting
    from kvcellar.hosting.memory import Capacity, MemoryPlan, choose_capacity, planned_context
    from kvcellar.hosting.messages import Message
    from kvcellar.hosting.models import ModelRegistry
    from kvcellar.hosting.templates import TemplateReport, check_template
    from kvcellar.hosting.volatile import DEFAULT_RULES, RULES, RuleChange, in_order

_MODULES = {
    "kvcellar.agents.accounting": "AgentUsage TurnEnd",
    "kvcellar.agents.dropped": "Dropped",
    "kvcellar.agents.kv.residence": "BroughtBack",
    "kvcellar.agents.manager": "AgentManager",
    "kvcellar.agents.planning": "PlannedTurn Turn",
    "kvcellar.agents.records.misses": "CAUSES Miss",
    "kvcellar.agents.records.names": (
        "checked_id is_unnamed salt_of salted_id unnamed_id without_salt"
    ),
    "kvcellar.agents.records.views": "AgentInfo TurnRecord",
    "kvcellar.agents.text.find_by_text": "Place",
    "kvcellar.agents.text.match_messages": "Joined n_system_of",
    "kvcellar.hosting.fair_lock": "Gate",
    "kvcellar.hosting.host": "ModelHost check_host open_host",
    "kvcellar.hosting.loader": "Hosting",
    "kvcellar.hosting.memory": "Capacity MemoryPlan choose_capacity planned_context",
    "kvcellar.hosting.messages": "Message",
    "kvcellar.hosting.models": "ModelRegistry",
    "kvcellar.hosting.templates": "TemplateReport check_template",
    "kvcellar.hosting.volatile": "DEFAULT_RULES RULES RuleChange in_order",
}
"""Names that are imported when somebody asks for them, by where they are."""

__getattr__ = names_of(__name__, _MODULES)

__all__ = [
    "CAUSES",
    "DEFAULT_RULES",
    "RULES",
    "AgentInfo",
    "AgentManager",
    "AgentUsage",
    "BroughtBack",
    "Capacity",
    "Dropped",
    "Gate",
    "Hosting",
    "Joined",
    "MemoryPlan",
    "Message",
    "Miss",
    "ModelHost",
    "ModelRegistry",
    "Place",
    "PlannedTurn",
    "RuleChange",
    "TemplateReport",
    "Turn",
    "TurnEnd",
    "TurnRecord",
    "check_host",
    "check_template",
    "checked_id",
    "choose_capacity",
    "in_order",
    "is_unnamed",
    "n_system_of",
    "open_host",
    "planned_context",
    "salt_of",
    "salted_id",
    "unnamed_id",
    "without_salt",
]
