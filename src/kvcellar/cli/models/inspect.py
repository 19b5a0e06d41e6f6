"""``kvcellar inspect``: what fits in memory, before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcellar.bookkeeping.cells.exact import exact_bytes
from kvcellar.budget import format_size, machine_bytes, parse_size
from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, option
from kvcellar.cli.common.terminal import print_warning, progress_bar, write
from kvcellar.cli.store.store import AsJson
from kvcellar.errors import BackendError, ConfigError
from kvcellar.kernel import levels
from kvcellar.kv_dtype import parse_kv_dtype
from kvcellar.models.backend_choice import NATIVE, TORCH, BackendChoice, choose_backend
from kvcellar.models.files.checkpoint import read_json
from kvcellar.models.options import LoadOptions
from kvcellar.models.picture_facts import has_pictures, text_alone
from kvcellar.models.sizes.sizing import find_config
from kvcellar.models.sizes.snapshots import snapshots_in
from kvcellar.models.sizes.spec_file import spec_from_file
from kvcellar.spec import AGENT_SLOTS, NATIVE_PROCESS_BYTES, PROCESS_BYTES, ModelCacheSpec, most
from kvcellar.types import LayerGroup

if TYPE_CHECKING:
    from kvcellar.agents import MemoryPlan

USUAL_CONTEXT = 4096

SHOWN = ("float32", "bfloat16", "fp8", "int8", "k8v4", "int4")
"""Types of K and V that are compared where none is asked for."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "inspect",
        inspect_command,
        "kvcellar inspect demo --memory 2GB",
        "kvcellar inspect ~/models/gemma-3-12b-it/config.json --memory 36GB --context 32768",
        "kvcellar inspect ~/models/Qwen3-0.6B --memory 8GiB --agents 8 --kv-dtype int8",
        "kvcellar inspect --spec mine.json --memory 24GB --json | jq .kv_dtypes",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Options of what is to fit, and into what."""

    memory: Annotated[
        str | None,
        option(
            "SIZE",
            "What the process may hold, such as 24GB or 8GiB. Default: this machine's memory.",
        ),
    ] = None
    context: Annotated[
        int | None,
        option(
            "TOKENS",
            f"Tokens that each agent holds. Default: {USUAL_CONTEXT}, or as many as the model "
            "was made for where that is less.",
        ),
    ] = None
    agents: Annotated[
        int | None,
        option("N", "Say whether so many fit, and how long they may be.", min=1),
    ] = None
    snapshots: Annotated[
        str | None,
        option(
            "SIZE",
            "Of a model with recurrent layers: what snapshots of their states may take. Default: "
            "a quarter of what K, V and states may.",
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        option("DTYPE", f"One type of K and V. Default: {', '.join(SHOWN)}."),
    ] = None
    spec_file: Annotated[
        Path | None,
        option(
            "FILE",
            "A JSON object whose fields replace those of the model's config; "
            "docs/spec-file.md lists them.",
            "--spec",
        ),
    ] = None

    def context_of(self, spec: ModelCacheSpec) -> int:
        """Return the tokens that each agent holds.

        Raises:
            ConfigError: the model was not made for so many.
        """
        context = min(USUAL_CONTEXT, spec.max_positions) if self.context is None else self.context
        if not 1 <= context <= spec.max_positions:
            raise ConfigError(
                f"a context of {context} tokens is asked for and {spec.name!r} was made for 1 to "
                f"{spec.max_positions}; choose a --context in between"
            )
        return context


def inspect_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="`demo`, a folder with a Hugging Face checkpoint, a config.json, or a name on the "
            "Hugging Face hub. May be left out where --spec says everything.",
        ),
    ] = None,
    *,
    asked: FitOptions,
    dtype: options.Dtype = None,
    weights: options.Weights = None,
    is_planned: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print the plan by which the native backend runs the model, and nothing else.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what fits in memory: bytes per token, per agent, and how many agents.

    It reads a model's config.json alone; the weights need not be there. Agents share nothing here:
    forks of one trunk take less. Layers with a window or chunk hold no more than that.

    With --memory pools are granted what they need; without it they double as they grow, and what
    they allocate is what is shown. All figures are there also for what does not fit: then `fits` is
    false in the object of --json, and the status is 0 all the same.
    """
    if is_planned:
        from kvcellar.cli.models.planned import show_plan

        if model is None:
            raise ConfigError("the plan of what? name a model")
        show_plan(model, as_json)
        return
    limit_bytes = machine_bytes() if asked.memory is None else parse_size(asked.memory)
    names = SHOWN if asked.kv_dtype is None else (asked.kv_dtype,)
    for name in names:
        parse_kv_dtype(name)
    with progress_bar("reading the config"):
        spec = _spec(model, asked.spec_file, dtype, weights)
    context, has_budget = asked.context_of(spec), asked.memory is not None
    snapshot_bytes = options.snapshot_bytes(asked.snapshots)
    counted = LoadOptions(spec.name, kv_dtype=asked.kv_dtype, snapshot_bytes=snapshot_bytes)
    runs = None if model is None else _runs(LoadOptions(model, dtype=dtype, weights=weights))
    pictures = "" if model is None or runs is None else _pictures(model, runs)
    view = View(spec, limit_bytes, context, asked.agents, counted, has_budget, runs, pictures)
    levels.warn_if_missing()
    if as_json:
        write(json.dumps(view.as_object(names), ensure_ascii=False) + "\n")
    else:
        _show(view, names)


def sized(options: LoadOptions) -> ModelCacheSpec:
    """Return what a model costs; torch is imported only where a file has changed since last time.

    Raises:
        ModelError, ConfigError, BackendError: as ``size_model``.
    """
    from kvcellar.models.sizes.known_specs import known_spec

    return known_spec(options, levels.level().name if levels.is_available() else "none")


def _runs(options: LoadOptions) -> BackendChoice:
    """Return who runs a model that no backend is named for; nobody where an extra is missing."""
    try:
        return choose_backend(options)
    except BackendError as error:
        return BackendChoice("none", str(error))


def _pictures(model: str, runs: BackendChoice) -> str:
    """Say whether a model reads pictures, for people; empty: nobody would think that it does."""
    config = find_config(model)
    is_json = config.suffix == ".json"
    folder, raw = (config.parent, read_json(config)) if is_json else (config, {})
    if runs.backend != TORCH or not has_pictures(folder, raw):
        return text_alone(folder, raw, runs.backend)
    return "read, if it places them as transformers does, which is tried when it is loaded"


def _spec(
    model: str | None, spec_file: Path | None, dtype: str | None, weights: str | None
) -> ModelCacheSpec:
    if model is None and spec_file is None:
        raise ConfigError("inspect what? name a model, or give --spec with all that it needs")
    base = None
    if model is not None:
        base = sized(LoadOptions(model, dtype=dtype, weights=weights))
    if spec_file is None:
        assert base is not None
        return base
    return spec_from_file(spec_file, base)


@dataclass(frozen=True)
class View:
    """A model's cache facts, the memory, context and agents to size it for, and who runs it."""

    spec: ModelCacheSpec
    limit_bytes: int
    context: int
    agents: int | None
    counted: LoadOptions
    has_budget: bool
    runs: BackendChoice | None = None
    pictures: str = ""

    @property
    def is_native(self) -> bool:
        """True if the model runs without torch."""
        return self.runs is not None and self.runs.backend == NATIVE

    @property
    def process_bytes(self) -> int:
        """Bytes that a process holds beside models: an estimate."""
        return NATIVE_PROCESS_BYTES if self.is_native else PROCESS_BYTES

    @property
    def plan(self) -> MemoryPlan:
        """Shares of a process with this limit, as every command that runs a model divides it."""
        from kvcellar.hosting.memory import MemoryPlan  # here, since most figures need no engine

        return MemoryPlan.divide(self.limit_bytes, self.process_bytes)

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes that forwards and restores take and give back, of as long a context as fits."""
        from kvcellar.hosting.memory import least_cells, parts_of

        left = self.plan.models_bytes - self.spec.weight_bytes

        def fits(context: int) -> bool:
            return sum(parts_of(self.spec, context, self.counted, keeps_windows=True)) <= left

        context = max(most(self.context, fits), least_cells(self.context))
        return parts_of(self.spec, context, self.counted)[0]

    @property
    def cache_bytes(self) -> int:
        """Bytes left for KV and states; 0 or less where the model itself does not fit."""
        taken = self.process_bytes + self.plan.store_bytes + self.spec.weight_bytes
        return self.limit_bytes - taken - self.scratch_bytes

    @property
    def n_snapshots(self) -> int:
        """Snapshots of the states of recurrent layers that have room beside what agents run on."""
        return snapshots_in(self.spec.params, self.cache_bytes, self.counted.snapshot_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for agents; 0 or less where they have none."""
        return self.cache_bytes - self.n_snapshots * self.spec.slot_bytes

    @cached_property
    def why_not(self) -> str:
        """That the model itself does not fit, with what would do; empty where it does."""
        from kvcellar.hosting.memory import least_cells, parts_of

        spec = self.spec
        if self.n_snapshots and self.kv_bytes <= 0:
            return (
                f"{self.n_snapshots:,} snapshots of {format_size(spec.slot_bytes)} leave nothing "
                f"of {format_size(self.cache_bytes)} for agents; give --snapshots less"
            )
        n_cells = least_cells(spec.max_positions)
        least_bytes = spec.weight_bytes + sum(parts_of(spec, n_cells, self.counted))
        said = self.plan.lack_of(spec, least_bytes, n_cells)
        if said and spec.stored_bytes != spec.weight_bytes:
            said += f" (its files hold {format_size(spec.stored_bytes)}; {spec.counted})"
        return said

    def row(self, name: str) -> dict[str, Any]:
        """Return what one type of K and V takes, and what fits."""
        kv, spec = parse_kv_dtype(name), self.spec
        for_exact = exact_bytes(spec.params.groups, kv)
        n_bytes = 0 if self.why_not else self.kv_bytes - for_exact
        n_agents = spec.n_agents(n_bytes, self.context, kv, has_budget=self.has_budget)
        if self.has_budget:
            one, growth = spec.agent_bytes(self.context, kv), spec.growth_bytes(self.context, kv)
        else:
            one = spec.pool_bytes(self.context, kv)
            growth = spec.peak_bytes(self.context, kv) - one
        return {
            "kv_dtype": name,
            "bytes_per_token": spec.token_bytes(kv),
            "group_bytes_per_token": list(spec.group_bytes(kv)),
            "agent_bytes": one,
            "exact_bytes": for_exact,
            "growth_bytes": growth,
            "agents_fit": n_agents,
            "longest_context": spec.most_context(
                n_bytes, self.agents or 1, kv, has_budget=self.has_budget
            ),
            "fits": n_agents >= (self.agents or 1),
        }

    @property
    def states(self) -> dict[str, int] | None:
        """Figures of the recurrent layers, as ``--json`` prints them; None: there are none."""
        state = self.spec.params.state
        if state is None:
            return None
        return {
            "n_layers": len(state.layers),
            "bytes_per_slot": state.slot_bytes,
            "slots_per_agent": AGENT_SLOTS,
            "snapshots_fit": self.n_snapshots,
            "snapshot_bytes": self.n_snapshots * state.slot_bytes,
        }

    def as_object(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        spec = self.spec
        return {
            "model": spec.name,
            "family": spec.family,
            "max_positions": spec.max_positions,
            "exact_to": spec.exact_to,
            "backend": None if self.runs is None else self.runs._asdict(),
            "pictures": self.pictures,
            "memory_bytes": self.limit_bytes,
            "fits": not self.why_not,
            "why_not": self.why_not,
            "weights": {
                "stored_bytes": spec.stored_bytes,
                "loaded_bytes": spec.weight_bytes,
                "dtype": spec.dtype,
                "quantisation": spec.quantisation,
                "stored_types": dict(spec.stored_types),
                "counted": spec.counted,
            },
            "process_bytes": self.process_bytes,
            "store_bytes": self.plan.store_bytes,
            "scratch_bytes": self.scratch_bytes,
            "kv_bytes": self.kv_bytes,
            "context": self.context,
            "agents": self.agents,
            "n_layers": spec.params.n_layers,
            "groups": [
                {
                    "layers": list(group.layers),
                    "window": group.window,
                    "chunk": group.chunk,
                    "is_latent": group.is_latent,
                    "n_kv_heads": group.n_kv_heads,
                    "head_dim": group.head_dim,
                    "v_head_dim": group.v_head_dim,
                    "agent_tokens": n_tokens,
                }
                for group, n_tokens in zip(
                    spec.params.groups, spec.agent_cells(self.context), strict=True
                )
            ],
            "shared": [list(pair) for pair in spec.params.shared],
            "states": self.states,
            "kv_dtypes": [self.row(name) for name in names],
        }


def _narrow(group: LayerGroup) -> str:
    """Return how much of its history a layer group sees, where that is not all."""
    return f"window {group.window}" if group.chunk is None else f"chunk {group.chunk}"


def _show(view: View, names: tuple[str, ...]) -> None:
    from rich.console import Console, Group
    from rich.table import Table

    spec = view.spec
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column()
    layers = f"{spec.params.n_layers} layers" + (" of attention" if spec.slot_bytes else "")
    facts.add_row("model", "", f"{spec.name} ({spec.family}), {layers}")
    if view.runs is not None:
        facts.add_row("backend", view.runs.backend, view.runs.why)
    if view.pictures:
        facts.add_row("pictures", "", view.pictures)
    for group, n_tokens in zip(spec.params.groups, spec.agent_cells(view.context), strict=True):
        dims = f"{group.n_kv_heads} KV heads of {group.head_dim}"
        if group.is_latent:
            dims = f"latents of {group.v_head_dim} and {group.head_dim} rotary numbers"
        elif group.v_head_dim != group.head_dim:
            dims += f" (V {group.v_head_dim})"
        history = (
            "full history"
            if group.is_full
            else f"{_narrow(group)}: at most {n_tokens} tokens an agent"
        )
        facts.add_row("", f"{len(group.layers)} layers", f"{dims}, {history}")
    if spec.params.shared:
        facts.add_row("", f"{len(spec.params.shared)} layers", "share the rows of others")
    if spec.params.state is not None:
        facts.add_row(
            "",
            f"{len(spec.params.state.layers)} layers",
            f"recurrent: a slot of states takes {format_size(spec.slot_bytes)} however long a "
            f"conversation is; an agent has {AGENT_SLOTS}",
        )
    if spec.exact_to is not None:
        facts.add_row(
            "exact",
            f"{spec.exact_to:,}",
            "tokens at most: dynamic RoPE has other factors for each length beyond",
        )
    facts.add_row("memory", format_size(view.limit_bytes), "what the process may hold")
    facts.add_row("- weights", format_size(spec.weight_bytes), f"{spec.held_in}; {spec.counted}")
    if spec.stored_bytes != spec.weight_bytes:
        types = [f"{format_size(n)} {name}" for name, n in spec.stored_types.items()]
        said = f", {spec.quantisation}: {', '.join(types)}" if types else ""
        facts.add_row("", "", f"{format_size(spec.stored_bytes)} in files{said}")
    holds = "Python and the kernel" if view.is_native else "Python and torch"
    facts.add_row("- process", format_size(view.process_bytes), f"{holds}: an estimate")
    store = "the store's blocks in RAM, and what waits to be written"
    facts.add_row("- store", format_size(view.plan.store_bytes), store)
    facts.add_row(
        "- forwards",
        format_size(view.scratch_bytes),
        "set aside for activations and logits: an upper estimate",
    )
    if view.n_snapshots:
        facts.add_row(
            "- snapshots",
            format_size(view.n_snapshots * spec.slot_bytes),
            f"{view.n_snapshots:,} slots, from which conversations go on",
        )
    if view.why_not:
        what = "the model itself does not fit" if view.cache_bytes <= 0 else "all is for snapshots"
        facts.add_row("= KV", "none", what, style="bold red")
    else:
        facts.add_row("= KV", format_size(view.kv_bytes), "for all agents", style="bold")

    table = Table()
    table.add_column("K and V")
    n_agents = view.agents or 1
    table.add_column("a token", justify="right")
    table.add_column(f"an agent of {view.context:,}", justify="right")
    table.add_column("agents that fit", justify="right")
    table.add_column("tokens for " + ("one" if n_agents == 1 else f"{n_agents}"), justify="right")
    if view.agents is not None:
        table.add_column(f"{view.agents} agents", justify="right")
    for name in names:
        row = view.row(name)
        cells = [
            name,
            f"{row['bytes_per_token']:,} B",
            format_size(row["agent_bytes"]),
            f"{row['agents_fit']:,}",
            f"{row['longest_context']:,}",
        ]
        if view.agents is not None:
            cells.append("fit" if row["fits"] else "do not fit")
        table.add_row(*cells, style=None if row["agents_fit"] >= n_agents else "red")
    Console(highlight=False).print(Group(facts, "", table))
    if view.why_not:
        print_warning(view.why_not)
