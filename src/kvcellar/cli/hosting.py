"""Shows how the models of commands that run agents are loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from kvcellar.cli.terminal import ProgressFn, print_note, progress_bar, shown_warnings

if TYPE_CHECKING:
    from kvcellar.agents import Hosting, ModelHost
    from kvcellar.engine import EngineConfig
    from kvcellar.models import LoadOptions


def hosting_of(
    loading: LoadOptions, memory: str | None, config: EngineConfig | None = None
) -> Hosting:
    """Divide the memory that a command's option gives; without it nothing is bounded.

    Raises:
        ConfigError: it is no size, or too small for any model.
    """
    with progress_bar(f"starting {loading.backend}"):
        from kvcellar.agents import Hosting
        from kvcellar.agents.hosting import limit_of

        return Hosting.within(limit_of(memory, loading), loading, config)


def open_shown(hosting: Hosting, name: str, bar: AbstractContextManager[ProgressFn]) -> ModelHost:
    """Load a model and start its engine; what was found on the way is told behind the bar."""
    with shown_warnings(), bar as report:
        opened = hosting.open(name, report)
    for found in opened.template.findings if opened.template is not None else ():
        print_note(f"chat template: {found}")
    if opened.resumes:
        print_note(opened.resumes)
    return opened
