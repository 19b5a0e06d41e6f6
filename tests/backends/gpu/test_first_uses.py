"""Kernels and graphs of the first requests on a card: made before these come, and kept on disk."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcellar.home import default_home

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: it comes with torch for CUDA"
)

from kvcellar.backends.torch.gpu.compiled import keep_compiled  # noqa: E402
from kvcellar.backends.torch.learn.shrink.checkpoints import write_tiny  # noqa: E402
from kvcellar.backends.torch.load import recurrent_kernels  # noqa: E402
from kvcellar.kernel import levels  # noqa: E402


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_nothing_is_compiled_or_recorded_for_what_was_prepared(
    tmp_path: Path, weights: Any
) -> None:
    if weights is not None and not levels.is_available():
        pytest.skip(levels.why_not())
    write_tiny("llama", tmp_path, num_hidden_layers=1)
    command = [sys.executable, "-m", "tests.backends.gpu.first_uses", str(tmp_path)]
    command += [weights] if weights else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    n_compiled, n_recorded = found["prepared"]
    assert n_compiled > 0 and n_recorded > 0
    assert found["decoded"] == found["prepared"]
    assert found["new"] == []
    assert found["stages"][-1] == "preparing steps of 8 sequences"


def test_what_is_compiled_is_kept_where_the_user_says_or_in_our_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # whatever is set is gone at the end
    keep_compiled()
    assert triton.knobs.cache.dir == str(default_home() / "triton")
    assert triton.knobs.autotuning.cache
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled()
    assert triton.knobs.cache.dir == "/elsewhere"


def test_kernels_of_other_packages_choose_between_few_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import triton

    def kernel(x: Any, SIZE: Any) -> None: ...  # noqa: N803 - as Triton has it

    configs = [triton.Config({"SIZE": 1 << i}) for i in range(20)]
    few = triton.autotune(configs[:3], key=["x"])(triton.jit(kernel))
    many = triton.heuristics({})(triton.autotune(configs, key=["x"])(triton.jit(kernel)))
    other = triton.autotune(configs, key=["x"])(triton.jit(kernel))
    package, module = ModuleType("fla"), ModuleType("fla.ops")
    foreign = ModuleType("flat")
    module.few, module.many, foreign.kernel = few, many, other  # type: ignore[attr-defined]
    for one in (package, module, foreign):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    for _ in range(2):
        recurrent_kernels.bound_tuning()
    assert few.configs == configs[:3] and other.configs == configs
    assert len(many.fn.configs) == recurrent_kernels.MOST_TUNED
    assert many.fn.configs[0] is configs[0] and many.fn.configs[-1] is configs[-1]
