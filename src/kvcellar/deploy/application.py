"""The application of Ray Serve: replicas of the server, and gateways that hand requests to them."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to Ray's makers

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message

from kvcellar.deploy.gateway import Gateway, ReplicaLostError
from kvcellar.deploy.reading import Asked
from kvcellar.deploy.replica import Replica, ReplicaSpec
from kvcellar.deploy.router import WANTED, HoldingRouter
from kvcellar.deploy.routing import Policy, Wanted, holdings_of
from kvcellar.server.config import ServerConfig

APPLICATION = "kvcellar"
REPLICAS = "replicas"

REPORT_S = 1.0
"""Seconds between two reports of a replica."""

_HEALTH_S = 5.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan of what runs where.

    Attributes:
        replica: what each replica is.
        least: replicas that are always there.
        most: replicas at most; more than ``least``: as many as there is work for.
        n_gateways: gateways in front of them.
        n_cpus: cores of a replica.
        n_gpus: cards of a replica; a part of one where several share it.
        policy: when requests go elsewhere than to what they need.
    """

    replica: ReplicaSpec
    least: int = 1
    most: int = 1
    n_gateways: int = 1
    n_cpus: float = 1.0
    n_gpus: float = 0.0
    policy: Policy = field(default_factory=Policy)


class _Replica:
    """A replica as an actor of Ray Serve."""

    async def __init__(self, spec: ReplicaSpec) -> None:  # type: ignore[misc]  # Ray awaits it
        context = serve.get_replica_context()
        self._replica = Replica(spec, context.replica_tag, context.rank.rank)
        await self._replica.start()

    async def read(self, asked: Asked, *, wanted: Wanted) -> Wanted:
        return await self._replica.read(asked)

    async def answer(self, asked: Asked, *, wanted: Wanted) -> AsyncGenerator[list[Message], None]:
        async for batch in self._replica.answer(asked, wanted):
            yield batch

    async def record_routing_stats(self) -> dict[str, Any]:
        return await self._replica.report()

    def check_health(self) -> None:
        self._replica.check_health()

    async def __del__(self) -> None:
        await self._replica.close()


class _Gateway:
    """A gateway as an actor of Ray Serve."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig) -> None:
        self._app = Gateway(config, _Handle(replicas), holdings_of(REPLICAS))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class _Handle:
    """The way to the replicas through Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def read(self, asked: Asked) -> Wanted:
        found: Wanted = await self._handle.read.remote(asked, **{WANTED: Wanted()})
        return found

    async def answer(self, asked: Asked, wanted: Wanted) -> AsyncGenerator[list[Message], None]:
        answers = self._handle.options(stream=True).answer
        stream = answers.remote(asked, **{WANTED: wanted})
        try:
            async for batch in stream:
                yield batch
        except RayActorError as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            stream.cancel()


def application_of(plan: Deployment) -> serve.Application:
    """Return what Ray Serve is to run."""
    config = plan.replica.config
    scaling: dict[str, Any] = {"num_replicas": plan.least}
    if plan.most > plan.least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.least,
                max_replicas=plan.most,
                target_ongoing_requests=plan.policy.busy_at / 2,
            )
        }
    router = RequestRouterConfig(
        request_router_class=HoldingRouter,
        request_router_kwargs=asdict(plan.policy),
        request_routing_stats_period_s=REPORT_S,
    )
    replicas = serve.deployment(
        _Replica,
        name=REPLICAS,
        max_ongoing_requests=config.max_requests,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=config.shutdown_s + 60,
        request_router_config=router,
        ray_actor_options={"num_cpus": plan.n_cpus, "num_gpus": plan.n_gpus},
        **scaling,
    )
    gateways = serve.deployment(
        serve.ingress()(_Gateway),
        name="gateways",
        num_replicas=plan.n_gateways,
        max_ongoing_requests=4 * config.max_requests,
        ray_actor_options={"num_cpus": 0},
    )
    return gateways.bind(replicas.bind(plan.replica), config)


def run(plan: Deployment, address: str | None = None) -> None:
    """Run a deployment, or replace what runs of it, replica by replica; return when it answers.

    Args:
        plan: what runs.
        address: of a cluster of Ray; None: one is started on this machine, for this process.
    """
    if not ray.is_initialized():
        ray.init(address, include_dashboard=False, log_to_driver=True)
    config = plan.replica.config
    serve.start(http_options={"host": config.host, "port": config.port})
    quiet = LoggingConfig(enable_access_log=False)  # replicas log each request by themselves
    serve.run(application_of(plan), name=APPLICATION, logging_config=quiet)


def stop() -> None:
    """End what runs: each replica saves its agents first."""
    serve.shutdown()
    ray.shutdown()
