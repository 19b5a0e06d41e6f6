"""Agents that outlive the process: the engine and the store, joined.

Start in ``manager.py`` for what there is, in ``turn.py`` for what a turn does.
"""

from kvcellar.agents.accounting import AgentUsage, TurnEnd
from kvcellar.agents.conversation import Message
from kvcellar.agents.dropped import Dropped
from kvcellar.agents.gate import Gate
from kvcellar.agents.host import ModelHost, check_host, open_host
from kvcellar.agents.hosting import Hosting
from kvcellar.agents.infos import AgentInfo, TurnRecord
from kvcellar.agents.joining import Joined, n_system_of
from kvcellar.agents.manager import AgentManager
from kvcellar.agents.memory import Capacity, MemoryPlan, choose_capacity, planned_context
from kvcellar.agents.misses import CAUSES, Miss
from kvcellar.agents.models import ModelRegistry
from kvcellar.agents.names import (
    checked_id,
    is_unnamed,
    salt_of,
    salted_id,
    unnamed_id,
    without_salt,
)
from kvcellar.agents.places import Place
from kvcellar.agents.planning import Turn
from kvcellar.agents.residence import BroughtBack
from kvcellar.agents.templates import TemplateReport, check_template
from kvcellar.agents.volatile import DEFAULT_RULES, RULES, RuleChange, in_order

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
