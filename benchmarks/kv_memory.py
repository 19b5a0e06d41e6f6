"""Ask how much memory the same tokens take in each storage type: as counted, and as resident.

Every type gets a process of its own, which fills a cache of the shape of a 1B model and reads its
own resident size before and after.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from harness import run

KV_DTYPES = ("bfloat16", "int8", "int4", "k8v4")
GOALS = {"int8": 0.55, "int4": 0.32}

CHILD = """
import sys
import torch
import kvcellar as kv

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

name, n_tokens = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
params = kv.ModelCacheParams(16, 8, 64)
with kv.make_seq_session("torch", kv.make_config(params, n_tokens, name)) as session:
    cache, k = session.cache, torch.randn(1, 8, 256, 64, dtype=torch.bfloat16)
    def fill(n):
        for _ in range(0, n, 256):
            cache.begin_step([(0, 256)])
            for layer in range(16):
                cache.update_and_fetch(layer, None, k, k)
    fill(256)
    cache.clear()
    before = resident() - cache.usage().size_bytes
    fill(n_tokens)
    print(cache.usage().size_bytes, resident() - before)
"""


def measure(quick: bool) -> Mapping[str, Any]:
    """Measure a model of 16 layers, 8 KV heads and head_dim 64."""
    n_tokens = 16384 if quick else 65536
    sizes: dict[str, tuple[int, int]] = {}
    for name in KV_DTYPES:
        command = [sys.executable, "-c", CHILD, name, str(n_tokens)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        sizes[name] = int(out[0]), int(out[1])
    found: dict[str, Any] = {"n_tokens": n_tokens}
    base = sizes["bfloat16"]
    for name, (counted, resident) in sizes.items():
        of_counted, of_resident = counted / base[0], resident / base[1]
        goal = f" (goal {GOALS[name]})" if name in GOALS else ""
        print(
            f"  {name:9} {counted / 2**20:6.1f} MiB counted, {resident / 2**20:6.1f} MiB resident: "
            f"{of_counted:.3f} and {of_resident:.3f} of bfloat16{goal}"
        )
        if name != "bfloat16":
            found[f"{name}_of_bf16_bytes"] = round(of_counted, 4)
            found[f"{name}_of_bf16_resident"] = round(of_resident, 4)
    return found


if __name__ == "__main__":
    run(__doc__ or "", measure)
