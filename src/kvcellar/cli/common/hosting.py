"""Shows how the models of commands that run agents are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvcellar.budget import format_size
from kvcellar.cli.common.terminal import ProgressFn, print_note, progress_bar, shown_warnings
from kvcellar.errors import ConfigError

if TYPE_CHECKING:
    from kvcellar.agents import Hosting, ModelHost
    from kvcellar.engine import EngineConfig
    from kvcellar.models import LoadOptions


def hosting_of(
    loading: LoadOptions,
    memory: str | None,
    config: EngineConfig | None = None,
    beside_bytes: int = 0,
    models: Sequence[LoadOptions] = (),
) -> Hosting:
    """Divide the memory that a command's option gives; without it nothing is bounded.

    Args:
        loading: options of the models.
        memory: a size as a text; None: no limit.
        config: policy of their engines.
        beside_bytes: main memory that others take, of which the models get nothing.
        models: options of all that will be loaded, where they are known.

    Raises:
        ConfigError: it is no size, or too small for any model.
    """
    with progress_bar("starting"):
        from kvcellar.agents import Hosting
        from kvcellar.hosting.loader import limit_of

        limit_bytes = limit_of(memory, loading)
        if limit_bytes is not None and loading.device in (None, "cpu"):
            limit_bytes -= beside_bytes
            if limit_bytes <= 0:
                raise ConfigError(
                    f"the embedding model takes {format_size(beside_bytes)} of --memory {memory} "
                    f"and nothing is left; give more, or leave it out"
                )
        return Hosting.within(limit_bytes, loading, config, models)


def open_shown(
    hosting: Hosting,
    name: str,
    bar: AbstractContextManager[ProgressFn],
    *,
    is_prepared: bool = False,
) -> ModelHost:
    """Load a model and start its engine; what was found on the way is told behind the bar.

    Args:
        hosting: which loads it.
        name: of the model.
        bar: that shows how far it is.
        is_prepared: true to compile and record what the first requests need on a card.
    """
    with shown_warnings(), bar as report:
        opened = hosting.open(name, report)
        if is_prepared:
            opened.prepare(lambda part, what: report(part, f"{name}: {what}"))
    for found in opened.template.findings if opened.template is not None else ():
        print_note(f"chat template: {found}")
    if opened.resumes:
        print_note(opened.resumes)
    return opened
