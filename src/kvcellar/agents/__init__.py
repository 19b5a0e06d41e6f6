"""Agents that outlive the process: the engine and the store, joined.

Start in ``manager.py``.
"""

from kvcellar.agents.dropped import Dropped
from kvcellar.agents.gate import Gate
from kvcellar.agents.history import Message, TemplateReport, check_template
from kvcellar.agents.host import ModelHost, check_host, open_host
from kvcellar.agents.joining import Joined, n_system_of
from kvcellar.agents.manager import AgentManager, AgentUsage, TurnEnd
from kvcellar.agents.memory import Capacity, MemoryPlan, choose_capacity, planned_context
from kvcellar.agents.misses import CAUSES, Miss
from kvcellar.agents.models import ModelRegistry
from kvcellar.agents.places import Place
from kvcellar.agents.records import AgentInfo, Turn, checked_id
from kvcellar.agents.residence import BroughtBack
from kvcellar.agents.volatile import DEFAULT_RULES, RULES, RuleChange

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
    "check_host",
    "check_template",
    "checked_id",
    "choose_capacity",
    "n_system_of",
    "open_host",
    "planned_context",
]
