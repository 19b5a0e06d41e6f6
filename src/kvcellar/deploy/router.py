"""The request router of Ray Serve that sends requests to the replicas that hold what they need."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from kvcellar.deploy.routing import Report, RoutingPolicy, Wanted, holdings_of, rank
from kvcellar.errors import PrefixError

WANTED = "wanted"
"""The keyword by which calls of replicas say what they want."""


class HoldingRouter(RequestRouter):
    """Ranks replicas by what they report to hold and by the requests that they have."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Take the policy, as ``RoutingPolicy`` has it."""
        self._policy = RoutingPolicy(**kwargs)
        self._holdings = holdings_of(self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take in which replicas there are and what they report."""
        super().update_replicas(replicas)
        self._holdings.keep([str(one.replica_id.unique_id) for one in replicas])
        for one in replicas:
            if one.routing_stats:
                try:
                    report = Report.from_stats(one.routing_stats)
                except PrefixError:
                    continue  # of another version, while one replaces the other
                self._holdings.learn(str(one.replica_id.unique_id), report)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas one by one, in the order in which a request may go to them."""
        wanted = Wanted()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            wanted = pending_request.kwargs.get(WANTED, wanted)
        # What wants nothing in particular goes anywhere: not always to the first that is as good.
        mixed = random.sample(candidate_replicas, len(candidate_replicas))
        known = {str(one.replica_id.unique_id): one for one in mixed}
        lengths = self.replica_queue_len_cache
        loads = {name: lengths.get(one.replica_id) or 0 for name, one in known.items()}
        return [[known[name]] for name in rank(wanted, self._holdings, loads, self._policy)]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Count what a request brings as held by its replica, before that reports it."""
        wanted = pending_request.kwargs.get(WANTED)
        if wanted is not None:
            self._holdings.sent(wanted, str(replica_id.unique_id))
