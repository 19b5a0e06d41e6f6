"""``kvcellar store``: look after the KV on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.cli.common.commands import add_command, examples, option
from kvcellar.cli.common.exits import ExitCode
from kvcellar.cli.common.terminal import print_warning, progress_bar, write
from kvcellar.errors import ConfigError
from kvcellar.home import default_store

if TYPE_CHECKING:
    from kvcellar.store import Store, StoreConfig, StoreEvent


Folder = Annotated[
    Path | None,
    option(
        "FOLDER",
        "The store. Default: `store` in KVCELLAR_HOME, else in kvcellar's folder of the "
        "user's data (XDG_DATA_HOME, ~/.local/share).",
        "--store",
    ),
]
Shared = Annotated[
    str | None,
    option(
        "URL",
        "A place that several machines share, behind the store: s3://bucket/prefix, gs:// and "
        "az:// likewise, file:///mnt/share/folder, valkey://host:6379/0. Default: none.",
        "--shared",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Limit = Annotated[
    str | None,
    option("SIZE", "Bytes on disk, such as 20G or 500M. Default: 20G.", show_default=False),
]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """Options of a store: its folder, and what it shares with other machines."""

    store: Folder = None
    shared: Shared = None

    @property
    def path(self) -> Path:
        """Folder of the store; the user's where none was given."""
        return (self.store or default_store()).expanduser()

    def open(
        self, config: StoreConfig, on_event: Callable[[StoreEvent], None] | None = None
    ) -> Store:
        """Open the store, or make one; ``on_event`` is told what happens in it.

        Raises:
            StoreError: the folder cannot hold one.
            ConfigError: what is to be shared is no place.
        """
        from kvcellar.store import Store

        return Store(self.path, config, shared=self.shared, on_event=on_event)


HOME_STORE = StorePlace()
"""The user's own store, which shares nothing."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(
        name="store", help="Look after the KV on disk: verify it, free room, count it."
    )
    add_command(
        group,
        "stats",
        stats_command,
        "kvcellar store stats",
        "kvcellar store stats --json | jq .cold",
    )
    add_command(group, "verify", verify_command, "kvcellar store verify")
    add_command(
        group,
        "gc",
        gc_command,
        "kvcellar store gc",
        "kvcellar store gc --limit 5G",
        "kvcellar store gc --grace 3600",
    )
    add_command(
        group,
        "gc-shared",
        gc_shared_command,
        "kvcellar store gc-shared --shared s3://team/kvcellar --limit 200G",
        "kvcellar store gc-shared --shared file:///mnt/share/kvcellar --keep-days 30",
    )
    app.add_typer(
        group,
        epilog=examples("kvcellar store stats", "kvcellar store verify", "kvcellar store gc"),
        no_args_is_help=True,
    )


def stats_command(store: StorePlace = HOME_STORE, as_json: AsJson = False) -> None:
    """Count blocks, histories and bytes.

    What histories share is stored once; `unshared` is what they would take without that. With
    --shared all that lies in that place is counted, too.
    """
    from kvcellar.store.shared import upkeep

    with _opened(store) as opened:
        shared = None if opened.shared is None else upkeep.count(opened.shared.place)
        stats = opened.stats()
        rows = opened.references()
        path = opened.path
    if as_json:
        value = dataclasses.asdict(stats) | {"path": str(path)}
        value["place"] = None if shared is None else dataclasses.asdict(shared)
        value["references"] = [dataclasses.asdict(row) for row in rows]
        write(json.dumps(value) + "\n")
        return
    lines = [
        ("folder", str(path)),
        ("on disk", f"{size_text(stats.cold.size_bytes)} in {stats.cold.n_blocks} blocks"),
        ("histories", str(stats.n_references)),
        ("needed by them", size_text(stats.referenced_bytes)),
        ("unshared", size_text(stats.unshared_bytes)),
        ("pictures", f"{size_text(stats.picture_bytes)} in {stats.n_pictures} files"),
        ("quarantine", size_text(stats.quarantined_bytes)),
    ]
    if shared is not None and stats.shared is not None:
        there = f"{size_text(shared.size_bytes)} in {shared.n_blocks} blocks"
        lines += [
            ("shared place", stats.shared.title),
            ("in it", f"{there}, {shared.n_agents} histories"),
        ]
    for name, text in lines:
        write(f"{name:<16}{text}\n")


def verify_command(store: Folder = None, as_json: AsJson = False) -> None:
    """Read every byte and check it.

    Damaged files go to the folder `quarantine`; what they held is computed again when it is
    wanted. Ends with exit code 1 where something was wrong.
    """
    from kvcellar.agents.records.checking import check_agent

    with _opened(StorePlace(store=store)) as opened:
        with progress_bar("verifying") as report:
            found = opened.verify(check=check_agent, on_progress=report)
        events = [dataclasses.asdict(event) for event in opened.take_events()]
    if as_json:
        value = dataclasses.asdict(found) | {"is_good": found.is_good, "events": events}
        write(json.dumps(value) + "\n")
    else:
        write(
            f"{found.n_blocks} blocks ({size_text(found.size_bytes)}) and {found.n_references} "
            f"histories are good\n"
        )
        for event in events:
            print_warning(f"{event['subject']}: {event['detail']}")
        for name, n in found.incomplete.items():
            print_warning(f"{name}: {n} tokens can be restored, the rest is computed again")
    if not found.is_good:
        raise typer.Exit(ExitCode.FOUND)


def gc_command(
    store: Folder = None,
    limit: Limit = None,
    grace: Annotated[
        float,
        option("SECONDS", "Keep what was used in the last so many.", min=0),
    ] = 0.0,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Empty the quarantine too.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove blocks that no history needs, and what interrupted writers left behind.

    Where more than the limit remains, the KV of whole histories is given up, least recently used
    first; their tokens remain.
    """
    with _opened(StorePlace(store=store), limit) as opened:
        report = opened.gc(grace_s=grace, is_emptying_quarantine=quarantine)
    if as_json:
        write(json.dumps(dataclasses.asdict(report)) + "\n")
        return
    write(
        f"{report.n_blocks} blocks removed, {size_text(report.freed_bytes)} freed, "
        f"{size_text(report.size_bytes)} remain\n"
    )
    for name in report.evicted:
        write(f"gave up the KV of {name}; its tokens remain\n")


def gc_shared_command(
    shared: Shared = None,
    limit: Annotated[
        str | None,
        option("SIZE", "Bytes that KV may take there, such as 200G. Default: any."),
    ] = None,
    keep_days: Annotated[
        float | None,
        option("DAYS", "Give up KV of agents that were silent for longer. Default: never.", min=0),
    ] = None,
    grace: Annotated[
        float,
        option("SECONDS", "Keep what was written in the last so many.", min=0),
    ] = 3600.0,
    as_json: AsJson = False,
) -> None:
    """Free room in a place that several machines share; they may go on meanwhile.

    Blocks that no agent needs go, then KV of agents that were silent longest; what they have said
    stays. To be run by one machine, such as once a day.
    """
    from kvcellar.store.shared import upkeep
    from kvcellar.store.shared.opening import open_place
    from kvcellar.store.shared.tier import TIMEOUT_S

    if shared is None:
        raise ConfigError("there is no place to free; give one with --shared URL")
    report = upkeep.collect(
        open_place(shared, timeout_s=TIMEOUT_S),
        limit_bytes=None if limit is None else parse_size(limit),
        keep_s=None if keep_days is None else keep_days * 86400,
        grace_s=grace,
    )
    if as_json:
        write(json.dumps(dataclasses.asdict(report)) + "\n")
        return
    write(
        f"{report.n_blocks} blocks removed, {size_text(report.freed_bytes)} freed, "
        f"{size_text(report.size_bytes)} remain; KV of {report.n_agents} agents given up\n"
    )


@contextmanager
def _opened(place: StorePlace, limit: str | None = None) -> Iterator[Store]:
    """Open the store in that folder, which has to be there already."""
    from kvcellar.store import StoreConfig

    config = StoreConfig(warm_bytes=0)
    if limit is not None:
        config = dataclasses.replace(config, cold_bytes=parse_size(limit))
    if not place.path.is_dir():
        raise ConfigError(
            f"there is no store in {place.path}; it is made when the first history is saved, or "
            f"give another folder with --store"
        )
    with place.open(config) as store:
        yield store


def parse_size(text: str) -> int:
    """Bytes that ``20G``, ``1.5M`` or ``4096`` say.

    Raises:
        ConfigError: it is no size.
    """
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        value = float(number.removesuffix(unit) if unit else number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 62:
        raise ConfigError(f"{text!r} is no size; give a number and K, M, G or T, such as 20G")
    return int(value)


def size_text(size_bytes: int) -> str:
    """``1.5 GiB``: bytes for people."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{size_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
