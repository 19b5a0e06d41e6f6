"""``kvcellar deploy``: several replicas of the server at one address, under Ray Serve."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.common.commands import add_command, option
from kvcellar.cli.common.terminal import print_note, write
from kvcellar.cli.serve.offering import ServedOptions
from kvcellar.errors import BackendError, ConfigError
from kvcellar.installed import pip_command

if TYPE_CHECKING:
    from kvcellar.deploy.application import Deployment

_in_scale = partial(option, panel="Scale")

_LOOK_S = 1.0
"""How often a signal is looked for where waiting keeps it from being handled, as on Windows."""

_COUNTS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Options of how many replicas there are, and what each of them has."""

    replicas: Annotated[
        str,
        _in_scale(
            "N",
            "Replicas, each with the models in its memory. `2-8`: as many as there is work for, "
            "at least 2 and at most 8.",
        ),
    ] = "2"
    cpus: Annotated[float, _in_scale("X", "Cores of each replica.", min=0.0)] = 1.0
    gpus: Annotated[
        float, _in_scale("X", "Cards of each replica; 0.5: two share one.", min=0.0)
    ] = 0.0
    gateways: Annotated[
        int, _in_scale("N", "Processes that take requests and hand them to replicas.", min=1)
    ] = 1
    prefill: Annotated[
        int,
        _in_scale(
            "N",
            "Replicas besides that only read: prompts with 1024 tokens or more that nobody holds. "
            "The others find K and V in the store, so long prompts disturb no answers.",
            min=0,
        ),
    ] = 0
    address: Annotated[
        str | None,
        _in_scale(
            "ADDRESS",
            "A Ray cluster to run on, such as `auto`; the command ends when the deployment "
            "answers. Without it one is started on this machine, until Ctrl-C.",
        ),
    ] = None

    def counts(self) -> tuple[int, int]:
        """Return how many replicas there are at least and at most.

        Raises:
            ConfigError: these are no numbers, or in the wrong order.
        """
        found = _COUNTS.fullmatch(self.replicas)
        least = int(found[1]) if found else 0
        most = int(found[2] or least) if found else 0
        if not 1 <= least <= most:
            raise ConfigError(
                f"--replicas {self.replicas!r} is no number of replicas; give one such as 2, or "
                f"the least and the most, such as 2-8"
            )
        return least, most


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "deploy",
        deploy_command,
        "kvcellar deploy",
        "kvcellar deploy ~/models/Qwen3-0.6B --replicas 4 --cpus 2",
        "kvcellar deploy ~/models/Qwen3-8B --replicas 2-8 --gpus 1 --address auto",
    )


def deploy_command(
    context: typer.Context,
    *,
    scale: ScaleOptions,
    served: ServedOptions,
) -> None:
    """Serve models and agents from several replicas at one address, under Ray Serve.

    To clients it is `kvcellar serve`. A request goes to the replica that holds its agent, or most
    of its prompt, and to another where that one is busy. All replicas have one store, or what is
    behind theirs (--shared): an agent goes on where another replica left it. Deployed again on a
    cluster, replicas are replaced one after the other, and no agent is lost.
    """
    _check_installed(is_alone=scale.address is None)
    least, most = scale.counts()
    offer = served.offer(context)
    config = offer.config
    from kvcellar.deploy.application import Deployment
    from kvcellar.deploy.replica import ReplicaSpec
    from kvcellar.deploy.routing import RoutingPolicy
    from kvcellar.server.run import listen

    if scale.address is None:
        with contextlib.closing(listen(config.host, config.port)) as listener:
            config = replace(config, port=listener.getsockname()[1])
    folder = served.store.path.absolute()
    shared = served.store.shared
    spec = ReplicaSpec(config, offer.hosting, offer.names, folder, shared, served.idle_unload)
    policy = RoutingPolicy(busy_at=served.engine.parallel)
    plan = Deployment(
        spec, least, most, scale.gateways, scale.cpus, scale.gpus, scale.prefill, policy
    )
    _run(plan, scale.address)


def _check_installed(*, is_alone: bool) -> None:
    """Load Ray, and refuse where it is not installed.

    Args:
        is_alone: no other machine takes part, so Ray listens on the loopback device, as it does by
            itself on macOS and Windows; that is settled when it is loaded.

    Raises:
        BackendError: it is not installed.
    """
    if is_alone:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray.serve  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendError(
            f"kvcellar deploy needs {error.name}, which is not installed; install it with: "
            f"{pip_command('ray')}"
        ) from error


def _run(plan: Deployment, address: str | None) -> None:
    """Run a deployment: on a cluster, or on this machine until Ctrl-C."""
    from kvcellar.deploy.application import run, stop

    config = plan.replica.config
    url = f"http://{config.host}:{config.port}"
    try:
        run(plan, address)
        write(f"{', '.join(plan.replica.offered)} at {url}, {plan.least} replicas\n")
        print_note(f"OpenAI clients: base_url {url}/v1; Anthropic clients: {url}; look: {url}/")
        if address is not None:
            print_note("`serve status` shows it, and `serve shutdown` ends it")
            return
        stopping = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopping.set())
        while not stopping.wait(_LOOK_S):
            pass
    finally:
        if address is None:
            stop()
