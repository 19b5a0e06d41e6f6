"""Run parts of ``gpu.py`` on a card, one after the other, and tell what each has found.

    python benchmarks/gpu_parts.py '{"device": "cuda", "is_dry": false, "folder": ..., ...}'

``gpu.py`` starts it. Each part is a line of JSON: its name, its seconds, and what was found or why
it failed. It ends behind a part after which the card cannot be used any more.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the parts that the only argument names; do nothing where a flag is all there is."""
    if len(sys.argv) == 2 and not sys.argv[1].startswith("-"):
        run_parts(**json.loads(sys.argv[1]))


def run_parts(device: str, is_dry: bool, folder: str, seconds: float, parts: Sequence[str]) -> None:
    """Run parts on a card; say so where there is none.

    Args:
        device: as torch names it.
        is_dry: a CPU stands in for the card.
        folder: of models.
        seconds: until all has to be done.
        parts: their names.
    """
    ends_s = time.monotonic() + seconds
    import torch

    kind = device.split(":")[0]
    if is_dry:
        import gpu_bench

        gpu_bench.stand_in()
        device = "cpu"
    elif kind == "cpu" or not torch.get_device_module(kind).is_available():
        _tell({"no_device": f"no {kind} device on this machine: nothing was measured"})
        return
    _tell({"card": _card(device, is_dry=is_dry)})
    bench = _bench(device, is_dry, Path(folder), ends_s)
    for part in parts:
        began = time.monotonic()
        said: dict[str, Any] = {"part": part}
        try:
            said["found"] = functions()[part](bench)
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            said["error"] = f"{type(error).__name__}: {error}"[:500]
        said["seconds"] = round(time.monotonic() - began, 1)
        gc.collect()
        is_usable = is_dry or _clean(device)
        _tell(said)
        if not is_usable:
            return


def _bench(*given: Any) -> Any:
    from gpu_bench import Bench

    return Bench(*given)


def functions() -> dict[str, Callable[[Any], dict[str, Any]]]:
    """Return what measures each part, by its name."""
    import gpu_checks
    import gpu_memory
    import gpu_models
    import gpu_requests
    import gpu_steps

    return {
        "engine": gpu_requests.engine,
        "decode": gpu_steps.decode,
        "branches": gpu_steps.branches,
        "kv": gpu_steps.few_bits_of_kv,
        "transfers": gpu_memory.transfers,
        "hybrid": gpu_models.hybrid,
        "serve": gpu_requests.serve,
        "mixture": gpu_models.mixture,
        "compiled": gpu_steps.compiled,
        "sampling": gpu_steps.sampling,
        "weights": gpu_steps.weights,
        "agreement": gpu_checks.agreement,
        "pictures": gpu_checks.pictures,
        "prompts": gpu_steps.prompts,
        "shortage": gpu_memory.shortage,
        "first_tokens": gpu_steps.first_tokens,
        "second_card": gpu_requests.second_card,
        "checks": gpu_checks.checks,
    }


def _clean(device: str) -> bool:
    """Give back what no part holds; False: the card is lost to this process."""
    import torch

    module = torch.get_device_module(device)
    try:
        module.synchronize()
        module.empty_cache()
    except RuntimeError as error:
        print(f"the card cannot be used any more: {error}", file=sys.stderr)
        return False
    return True


def _card(device: str, *, is_dry: bool) -> dict[str, Any]:
    """Return what the card is called, and versions of what runs there."""
    import torch

    name = "dry" if is_dry else torch.get_device_module(device).get_device_name(device)
    found = {"card": name, "cuda": torch.version.cuda}
    for package in ("triton", "flash-linear-attention"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _tell(said: dict[str, Any]) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
