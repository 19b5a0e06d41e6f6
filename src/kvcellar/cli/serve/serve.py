"""``kvcellar serve``: models and agents over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command
from kvcellar.cli.common.hosting import open_shown
from kvcellar.cli.common.terminal import (
    ProgressFn,
    print_note,
    print_warning,
    progress_bar,
    progress_lines,
    write,
)
from kvcellar.cli.serve.offering import Offer, ServedOptions, log, log_stage, offered_models
from kvcellar.cli.store.store import StorePlace
from kvcellar.errors import BackendError, ConfigError
from kvcellar.installed import pip_command
from kvcellar.models.options import DEMO
from kvcellar.registry import needed_packages

if TYPE_CHECKING:
    from kvcellar.agents import ModelHost
    from kvcellar.engine.embedding import TextEmbedder
    from kvcellar.server.state.models import ServedModels
    from kvcellar.server.state.service import Service
    from kvcellar.store import StoreEvent


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "serve",
        serve_command,
        "kvcellar serve",
        "kvcellar serve ~/models/Qwen3-0.6B --port 8000",
        "kvcellar serve small=~/models/Qwen3-0.6B large=~/models/Qwen3-8B --memory 24GB",
        "kvcellar serve a=~/models/Qwen3-8B b=~/models/Qwen3-4B --device a=cuda:0,b=cuda:1",
        "curl -N localhost:8642/v1/chat/completions --json "
        '\'{"stream": true, "messages": [{"role": "user", "content": "Hello"}]}\'',
    )


def serve_command(
    context: typer.Context,
    *,
    served: ServedOptions,
    embeddings: Annotated[
        str | None,
        options.in_loading(
            "[NAME=]MODEL",
            "An embedding model beside the others, on the CPU: a checkpoint's folder, or a name on "
            "the Hugging Face hub. Without it the models that answer make vectors, too.",
        ),
    ] = None,
) -> None:
    """Serve models and agents over HTTP, as OpenAI and Anthropic do, with a page to look at.

    Agents are in the store, so they are there again after a restart. On a card kernels are compiled
    before a model answers, and kept for the next start. Ctrl-C saves all agents and ends.
    """
    check_installed()
    beside, beside_bytes = _embedding_models(embeddings, served.offered())
    offer = served.offer(context, beside, beside_bytes)
    _serve(served.store, offer, lambda: _served(served, offer, beside))


def check_installed() -> None:
    """Refuse where the server's packages are not installed.

    Raises:
        BackendError: one is missing.
    """
    try:
        import kvcellar.server.run  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendError(
            f"the server needs {error.name}, which is not installed; install it with: "
            f"{pip_command()}"
        ) from error


def _embedding_models(
    text: str | None, offered: dict[str, str]
) -> tuple[dict[str, TextEmbedder], int]:
    """Load the embedding model that is wanted; return it by its name, and the bytes it takes.

    Raises:
        ConfigError: an offered model has its name.
        ModelError: it cannot be read.
        BackendError: torch is not installed.
    """
    if text is None:
        return {}, 0
    ((name, path),) = offered_models([text]).items()
    if name in offered:
        raise ConfigError(f"two models are called {name!r}; name one as NAME=MODEL")
    with (
        progress_bar(f"loading {path}", tell=log_stage) as report,
        needed_packages("torch", "an embedding model"),
    ):
        from kvcellar.backends.torch.run.embedding import WORKING_BYTES, load_embedding_model

        model = load_embedding_model(path, report)
    return {name: model}, model.size_bytes + WORKING_BYTES


def _served(served: ServedOptions, offer: Offer, beside: dict[str, TextEmbedder]) -> ServedModels:
    """Make the models that clients may name; none is loaded yet."""
    from kvcellar.server.state.models import ServedModels

    def load(path: str, progress: ProgressFn) -> ModelHost:
        opened = open_shown(offer.hosting, path, _told_twice(path, progress), is_prepared=True)
        facts = {"weights": opened.weights, "cache": str(opened.capacity)}
        if opened.resumes:
            facts["resumes"] = opened.resumes
        log("model loaded", model=path, **facts)
        return opened

    return ServedModels(
        offer.names,
        load,
        takes_any=offer.config.takes_any_model,
        idle_ttl_s=served.idle_unload,
        context_of=offer.hosting.context_of,
        embedding_models=beside,
        loading=served.loading.as_json()
        | {"speculate": served.speculate, "shared": served.store.shared},
        **offer.hosting.registry,
    )


@contextmanager
def _told_twice(path: str, progress: ProgressFn) -> Iterator[ProgressFn]:
    """Report how far loading is to whoever asks for the model's state, and to the log."""
    with progress_lines(f"loading {path}", tell=log_stage) as tell:

        def report(fraction: float, what: str) -> None:
            progress(fraction, what)
            tell(fraction, what)

        yield report


def _serve(place: StorePlace, offer: Offer, make_models: Callable[[], ServedModels]) -> None:
    """Run the server until it is stopped; then warn of what its store has met."""
    from kvcellar.server.run import serve

    def on_ready(url: str, service: Service) -> None:
        write(f"{', '.join(service.models.offered)} at {url}\n")
        print_note(f"OpenAI clients: base_url {url}/v1; Anthropic clients: {url}; look: {url}/")
        if DEMO in offer.models.values():
            print_note(options.DEMO_NOTE)

    with place.open(offer.hosting.store, _log_place) as store:
        serve(offer.config, store, make_models, on_ready=on_ready)
        for event in store.take_events():
            print_warning(f"{event.subject}: {event.detail}")


def _log_place(event: StoreEvent) -> None:
    """Log when a shared place goes away and comes back; all else is told at the end."""
    if event.kind in ("shared_away", "shared_back"):
        log(event.kind, place=event.subject, detail=event.detail)
