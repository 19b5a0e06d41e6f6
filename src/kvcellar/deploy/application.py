"""The application of Ray Serve: replicas of the server, and gateways that hand requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to Ray's makers
# A proxy of a busy machine takes longer to start than Ray's 5 s, behind which it is killed.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "30")

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig, ProxyStatus
from starlette.types import ASGIApp, Message

from kvcellar.deploy.gateway import Gateway, ReplicaLostError
from kvcellar.deploy.reading import HttpRequest
from kvcellar.deploy.replica import Replica, ReplicaSpec
from kvcellar.deploy.router import WANTED, HoldingRouter
from kvcellar.deploy.routing import RoutingPolicy, Wanted, holdings_of
from kvcellar.errors import ConfigError, EngineClosedError

APPLICATION = "kvcellar"
REPLICAS = "replicas"
PREFILLING = "prefilling"

REPORT_S = 1.0
"""Seconds between two reports of a replica."""

_HEALTH_S = 5.0
_SAVING_S = 60.0
_CONNECT_S = 5.0
_PROXIES_S = 300.0
"""Seconds in which proxies have to answer; Ray gives up after 60, too early on a busy machine."""
_POLL_S = 0.5
_READS = 3
"""How often a replica is asked to read a prompt; one that dies meanwhile changes nothing."""


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
        n_prefilling: replicas that only read long prompts for the others.
        policy: when requests go elsewhere than to what they need.
    """

    replica: ReplicaSpec
    least: int = 1
    most: int = 1
    n_gateways: int = 1
    n_cpus: float = 1.0
    n_gpus: float = 0.0
    n_prefilling: int = 0
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)


class _Replica:
    """A replica as an actor of Ray Serve."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, spec: ReplicaSpec, role: str
    ) -> None:
        context = serve.get_replica_context()
        place = f"{role}-{context.rank.rank}"
        self._replica = Replica(spec, context.replica_tag, place)
        await self._replica.start()

    async def read(self, asked: HttpRequest, *, wanted: Wanted) -> Wanted:
        return await self._replica.read(asked)

    async def prepare(self, asked: HttpRequest, *, wanted: Wanted) -> None:
        await self._replica.prepare(asked)

    async def answer(
        self, asked: HttpRequest, *, wanted: Wanted
    ) -> AsyncGenerator[list[Message], None]:
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

    def __init__(
        self, plan: Deployment, replicas: DeploymentHandle, prefilling: DeploymentHandle | None
    ) -> None:
        least = None if prefilling is None else plan.policy.prefill_tokens
        way = _Handles(replicas, prefilling)
        self._app = Gateway(plan.replica.config, way, holdings_of(REPLICAS), least)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


class _Handles:
    """The way to the replicas through Ray Serve."""

    def __init__(self, replicas: DeploymentHandle, prefilling: DeploymentHandle | None) -> None:
        self._replicas = replicas
        self._prefilling = prefilling

    async def read(self, asked: HttpRequest) -> Wanted:
        for _ in range(_READS):
            with contextlib.suppress(RayActorError):
                found: Wanted = await _called(self._replicas.read, asked, Wanted())
                return found
        return Wanted()

    async def prepare(self, asked: HttpRequest, wanted: Wanted) -> None:
        assert self._prefilling is not None
        try:
            await _called(self._prefilling.prepare, asked, wanted)
        except (RayActorError, RayTaskError) as error:
            raise ReplicaLostError(str(error)) from error

    async def answer(
        self, asked: HttpRequest, wanted: Wanted
    ) -> AsyncGenerator[list[Message], None]:
        answers = self._replicas.options(stream=True).answer
        stream = answers.remote(asked, **{WANTED: wanted})
        try:
            async for batch in stream:
                yield batch
        except RayActorError as error:
            raise ReplicaLostError(str(error)) from error
        finally:
            stream.cancel()


async def _called(method: Any, asked: HttpRequest, wanted: Wanted) -> Any:
    """Return what a replica returns; who stops waiting ends it there, too."""
    response = method.remote(asked, **{WANTED: wanted})
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


def application_of(plan: Deployment) -> serve.Application:
    """Return what Ray Serve is to run."""
    scaling: dict[str, Any] = {"num_replicas": plan.least}
    if plan.most > plan.least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=plan.least,
                max_replicas=plan.most,
                target_ongoing_requests=plan.policy.busy_at / 2,
            )
        }
    prefilling = None
    if plan.n_prefilling:
        prefilling = _replicas(plan, PREFILLING, {"num_replicas": plan.n_prefilling})
    gateways = serve.deployment(
        serve.ingress()(_Gateway),
        name="gateways",
        num_replicas=plan.n_gateways,
        max_ongoing_requests=4 * plan.replica.config.max_requests,
        ray_actor_options={"num_cpus": 0},
    )
    return gateways.bind(plan, _replicas(plan, REPLICAS, scaling), prefilling)


def _replicas(plan: Deployment, name: str, scaling: dict[str, Any]) -> serve.Application:
    """Return replicas of one role."""
    config = plan.replica.config
    return serve.deployment(
        _Replica,
        name=name,
        max_ongoing_requests=config.max_requests,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_timeout_s=config.shutdown_s + _SAVING_S,
        request_router_config=RequestRouterConfig(
            request_router_class=HoldingRouter,
            request_router_kwargs=asdict(plan.policy),
            request_routing_stats_period_s=REPORT_S,
        ),
        ray_actor_options={"num_cpus": plan.n_cpus, "num_gpus": plan.n_gpus},
        **scaling,
    ).bind(plan.replica, name)


def run(plan: Deployment, address: str | None = None) -> None:
    """Run a deployment, or replace what runs of it, replica by replica; return when it answers.

    Args:
        plan: what runs.
        address: of a cluster of Ray; None: one is started on this machine, for this process.

    Raises:
        ConfigError: this machine has too little for it, or there is no cluster.
        EngineClosedError: Ray Serve did not start.
    """
    if address is None:
        ray.init(include_dashboard=False)
        _check_room(plan)
    else:
        _join(address)
    config = plan.replica.config
    quiet = LoggingConfig(enable_access_log=False)  # replicas log each request by themselves
    try:
        with contextlib.suppress(TimeoutError):  # of proxies, which are waited for below
            serve.start(http_options={"host": config.host, "port": config.port})
        with contextlib.suppress(TimeoutError):  # the same
            serve.run(application_of(plan), name=APPLICATION, logging_config=quiet)
        _wait_for_proxies()
    except (RayError, TimeoutError) as error:
        raise EngineClosedError(
            f"Ray Serve did not start at {config.host}:{config.port} ({type(error).__name__}); "
            f"where this machine is busy, try again; its logs are in /tmp/ray/session_latest/logs"
        ) from error


def _wait_for_proxies() -> None:
    """Return when proxies of the cluster answer and none is starting; at once where it has none.

    Raises:
        TimeoutError: they do not within ``_PROXIES_S``.
    """
    deadline = time.monotonic() + _PROXIES_S
    while states := set(serve.status().proxies.values()):
        if ProxyStatus.HEALTHY in states and ProxyStatus.STARTING not in states:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray's proxies do not answer within {_PROXIES_S:.0f} s")
        time.sleep(_POLL_S)


def _join(address: str) -> None:
    """Connect to a cluster.

    Raises:
        ConfigError: there is none at that address.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal() and "/" not in host:  # of which Ray itself waits for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        ray.init(address)
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster at {address!r} can be reached ({error}); start one with `ray start "
            f"--head`, set RAY_AUTH_MODE=token where it wants a token, or leave --address out"
        ) from error


def _check_room(plan: Deployment) -> None:
    """Refuse what would wait for ever to be started.

    Raises:
        ConfigError: there are too few cores or cards.
    """
    n = plan.least + plan.n_prefilling
    there = ray.cluster_resources()
    for name, what, each in (("CPU", "cores", plan.n_cpus), ("GPU", "cards", plan.n_gpus)):
        if n * each > there.get(name, 0.0):
            raise ConfigError(
                f"{n} replicas of {each:g} {what} need {n * each:g}, and this machine has "
                f"{there.get(name, 0.0):g}; give fewer --replicas, or less --{name.lower()}s"
            )


def stop() -> None:
    """End what runs: each replica saves its agents first. A no-op where nothing does."""
    if ray.is_initialized():
        serve.shutdown()
        ray.shutdown()
