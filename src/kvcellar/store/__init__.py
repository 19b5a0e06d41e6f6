"""KV outside of the cache: content-addressed blocks in RAM and on disk, and named histories.

Imports NumPy, files, and how ``backends.reference`` stores numbers; no tensor and no engine comes
in.

Start in ``store.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcellar.lazy import names_of

if TYPE_CHECKING:
    from kvcellar.backends.host_memory import Landing
    from kvcellar.home import default_home, default_store
    from kvcellar.models.fingerprint import Fingerprint, fingerprint_checkpoint, fingerprint_of
    from kvcellar.store.config import StoreConfig
    from kvcellar.store.disk.catalogue import RefRow
    from kvcellar.store.disk.leases import Lease, Leases
    from kvcellar.store.matching import BoundaryState, Loaded, Match
    from kvcellar.store.store import Store
    from kvcellar.store.tickets import RowSource, SaveState, SaveTicket
    from kvcellar.store.values.layout import (
        BLOCK_TOKENS,
        GroupRows,
        ModelKey,
        RowLayout,
        Rows,
        Side,
        States,
        WindowRows,
    )
    from kvcellar.store.values.references import DROPPED, Boundary, Reference
    from kvcellar.store.values.reports import (
        EventKind,
        GcReport,
        StoreEvent,
        StoreStats,
        TierStats,
        VerifyReport,
    )

_MODULES = {
    "kvcellar.backends.host_memory": "Landing",
    "kvcellar.home": "default_home default_store",
    "kvcellar.models.fingerprint": "Fingerprint fingerprint_checkpoint fingerprint_of",
    "kvcellar.store.config": "StoreConfig",
    "kvcellar.store.disk.catalogue": "RefRow",
    "kvcellar.store.disk.leases": "Lease Leases",
    "kvcellar.store.matching": "BoundaryState Loaded Match",
    "kvcellar.store.store": "Store",
    "kvcellar.store.tickets": "RowSource SaveState SaveTicket",
    "kvcellar.store.values.layout": (
        "BLOCK_TOKENS GroupRows ModelKey RowLayout Rows Side States WindowRows"
    ),
    "kvcellar.store.values.references": "Boundary DROPPED Reference",
    "kvcellar.store.values.reports": (
        "EventKind GcReport StoreEvent StoreStats TierStats VerifyReport"
    ),
}
"""Names that are imported when somebody asks for them, by where they are."""

__getattr__ = names_of(__name__, _MODULES)

__all__ = [
    "BLOCK_TOKENS",
    "DROPPED",
    "Boundary",
    "BoundaryState",
    "EventKind",
    "Fingerprint",
    "GcReport",
    "GroupRows",
    "Landing",
    "Lease",
    "Leases",
    "Loaded",
    "Match",
    "ModelKey",
    "RefRow",
    "Reference",
    "RowLayout",
    "RowSource",
    "Rows",
    "SaveState",
    "SaveTicket",
    "Side",
    "States",
    "Store",
    "StoreConfig",
    "StoreEvent",
    "StoreStats",
    "TierStats",
    "VerifyReport",
    "WindowRows",
    "default_home",
    "default_store",
    "fingerprint_checkpoint",
    "fingerprint_of",
]
