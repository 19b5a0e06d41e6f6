"""A card for tests that know of none: ``pytest --card`` has all models run there.

With a card and ``TRITON_INTERPRET=0`` it is that one. Elsewhere the CPU stands in for it: Triton's
interpreter runs the kernels, a device that records Python's calls has the graphs, logits stay where
they are, and the bundled model has one layer, since an interpreted step takes 30 ms for each.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

_ONE = threading.RLock()
"""Held while a kernel is interpreted: the interpreter has one grid for all threads."""


def use_card() -> None:
    """Have models of this process run on a card from now on, or on what stands in for one."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        _with_short_demo()
        stand_in(pytest.MonkeyPatch())
    else:
        _on_card_by_default()


def _on_card_by_default() -> None:
    from kvcellar.models import LoadOptions

    own: Any = LoadOptions.__init__

    def init(self: Any, *args: Any, **fields: Any) -> None:
        own(self, *args, **fields)
        if self.device is None and self.backend in (None, "torch"):
            object.__setattr__(self, "device", "cuda")

    LoadOptions.__init__ = init  # type: ignore[method-assign]


def _with_short_demo() -> None:
    from kvcellar.models.files import hub

    hub.DEMO_FOLDER = _short_demo(hub.DEMO_FOLDER)  # before anybody takes its name from there

    from tests.server import live

    live.PATIENCE_S = 600.0


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Have the CPU stand in for a card until a patch is undone."""
    import numpy as np
    from triton.runtime import interpreter

    from kvcellar.backends.torch import loading
    from kvcellar.backends.torch.gpu import choice
    from kvcellar.backends.torch.gpu.attend import launch, lists, plans
    from kvcellar.backends.torch.gpu.record import graphs
    from kvcellar.backends.torch.gpu.sampler import logits
    from kvcellar.backends.torch.gpu.weights import multiply
    from kvcellar.backends.torch.learn import picture_checking
    from tests.backends.gpu.fake_device import FakeDevice
    from tests.backends.gpu.interpreter import hasten

    def tiling(n_heads: int, pool: Any, dtype: Any, device: Any) -> plans.Tiling:
        n_kv_heads = pool.k.data.shape[1]
        return plans.Tiling(n_heads // n_kv_heads, n_kv_heads, 64, 64, 64, 2, 1)

    hasten()
    patch.setattr(loading, "_prove", lambda *_: None)  # it runs a model's twin on the CPU
    check = picture_checking.check_pictures

    def check_on_cpu(*given: Any) -> Any:  # as where there is a card
        with pytest.MonkeyPatch.context() as there:
            there.setattr(choice, "ON_CPU", False)
            return check(*given)

    patch.setattr(picture_checking, "check_pictures", check_on_cpu)
    patch.setattr(choice, "ON_CPU", True)
    patch.setattr(choice, "has_graphs", lambda device: True)
    patch.setattr(logits, "ON_CPU", True)
    patch.setattr(graphs, "CudaGraphs", lambda device: FakeDevice())
    patch.setattr(launch, "tiling_of", tiling)
    patch.setattr(lists, "LEAST_SHARED", 64)
    patch.setattr(multiply, "OUTPUTS_AT_ONCE", 256)  # few programs, which take long here
    run = interpreter.GridExecutor.__call__

    def run_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _ONE, np.errstate(all="ignore"):  # of what tiles throw away, and NaN
            return run(self, *args, **kwargs)

    patch.setattr(interpreter.GridExecutor, "__call__", run_alone)


def _short_demo(folder: Path) -> Path:
    """Write the bundled model with its first layer alone; return its folder."""
    from safetensors.torch import load_file, save_file

    short = Path(tempfile.mkdtemp(prefix="kvcellar-demo-"))
    atexit.register(shutil.rmtree, short, ignore_errors=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copy(path, short)
    config = json.loads((short / "config.json").read_text()) | {"num_hidden_layers": 1}
    (short / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: one for name, one in weights.items() if ".layers." not in name or ".layers.0." in name
    }
    save_file(kept, short / "model.safetensors", metadata={"format": "pt"})
    return short


def with_short_steps() -> None:
    """Have engines run 8 tokens in a step where nobody says how many, and prepare greedy ones."""
    from kvcellar.engine import EngineConfig, first_use

    init: Any = EngineConfig.__init__
    assert init.__defaults__[0] == EngineConfig().max_num_batched_tokens
    init.__defaults__ = (8, *init.__defaults__[1:])
    settings: Any = first_use._settings
    first_use._settings = lambda n_rows: itertools.islice(settings(n_rows), 1)


if __name__ == "__main__":  # python -m tests.card serve MODEL: a command of kvcellar's, there
    os.environ["TRITON_INTERPRET"] = "1"
    stand_in(pytest.MonkeyPatch())
    with_short_steps()

    from kvcellar.cli import main

    main()
