"""``kvcellar export``: a checkpoint as one program for ExecuTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcellar.budget import format_size
from kvcellar.cli.common import options
from kvcellar.cli.common.commands import add_command, option
from kvcellar.cli.common.terminal import progress_bar, write
from kvcellar.cli.store.store import AsJson
from kvcellar.errors import ConfigError
from kvcellar.registry import load_backend

if TYPE_CHECKING:
    from kvcellar.backends.executorch.exporting import ExportReport

N_SHOWN = 8
"""Operators that the report names on each side."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        "export",
        export_command,
        "kvcellar export demo -o demo.pte",
        "kvcellar export ~/models/Qwen3-0.6B -o qwen.pte --quantize 8da4w",
        "kvcellar generate qwen.pte --backend executorch --chat --prompt 'Hello'",
    )


def export_command(
    model: options.Model,
    *,
    output: Annotated[Path, option("FILE", "The .pte file to write.", "--output", "-o")],
    quantize: Annotated[
        str,
        option(
            "SCHEME",
            "Weights: none, 8da4w (4 bits, the smallest and fastest) or 8da8w; the embedding "
            "is then in 8 bits.",
        ),
    ] = "none",
    dtype: Annotated[
        str,
        option(
            "DTYPE",
            "Type of what is not quantised: float32, float16 or bfloat16. XNNPACK leaves the "
            "last one to slower kernels.",
        ),
    ] = "float32",
    max_tokens_per_step: Annotated[
        int,
        option("N", "Tokens of one forward at most; memory is planned for as many."),
    ] = 512,
    method: Annotated[str, option("NAME", "What the method is called inside.")] = "forward",
    features: Annotated[
        str | None,
        option(
            "LAYERS",
            "Tell what these layers are given beside the logits, for --speculate eagle3: "
            "numbers with commas between, or eagle3 for those that heads read by default.",
        ),
    ] = None,
    is_unchecked: options.Unchecked = False,
    as_json: AsJson = False,
) -> None:
    """Export a model as one ExecuTorch program, lowered to XNNPACK.

    The program has no cache and no context length inside: which cache it runs on is chosen when it
    is used. Tokenizer and chat template travel in the file. The report says what XNNPACK took and
    what the runtime's own kernels run.
    """
    layers = None if features is None else _layers(features)
    with progress_bar("starting executorch") as report:
        load_backend("executorch")
        from kvcellar.backends.executorch import export_program

        found = export_program(
            model,
            output,
            quantize=quantize,
            dtype=dtype,
            max_tokens_per_step=max_tokens_per_step,
            method=method,
            feature_layers=layers,
            is_unchecked=is_unchecked,
            progress=report,
        )
    if as_json:
        write(json.dumps(asdict(found) | {"path": str(found.path)}) + "\n")
    else:
        _show(found)


def _layers(text: str) -> list[int]:
    """Numbers of layers; none where the default ones are asked for."""
    if text == "eagle3":
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--features takes numbers of layers with commas between, or eagle3; got {text!r}"
        ) from error


def _show(found: ExportReport) -> None:
    weights = found.dtype if found.quantize == "none" else found.quantize
    write(
        f"{found.path}: {format_size(found.size_bytes)}, weights in {weights}, up to "
        f"{found.max_tokens_per_step} tokens per step\n"
        f"cache: {found.n_op_calls} calls of kvcache::update_and_attend, one per layer\n"
        f"XNNPACK: {found.n_delegates} parts with {sum(found.delegated.values())} operators: "
        f"{_few(found.delegated)}\n"
        f"own kernels: {sum(found.kept.values())} operators: {_few(found.kept)}\n"
    )
    if found.feature_layers:
        write(f"features: what layers {', '.join(map(str, found.feature_layers))} are given\n")
    if found.n_products_kept:
        write(
            f"slow: XNNPACK left {found.n_products_kept} matrix products to own kernels; it takes "
            f"them in float32, float16 and quantised, this program is in {weights}\n"
        )
    if found.n_linears_kept:
        write(
            f"not quantised: {found.n_linears_kept} linear layers whose input is no multiple of "
            f"the group size\n"
        )


def _few(counts: Mapping[str, int]) -> str:
    """Name the most frequent operators, without what their names have in common."""
    merged: dict[str, int] = {}
    for name, count in counts.items():
        short = name.split(".")[-2] if name.count(".") else name
        merged[short] = merged.get(short, 0) + count
    ranked = sorted(merged.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {count}" for name, count in ranked[:N_SHOWN])
    return shown + (", ..." if len(ranked) > N_SHOWN else "")
