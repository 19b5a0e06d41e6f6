"""What a model of gpt-oss-20b's shape takes once it is loaded, asked of the system."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvcellar.kernel import levels
from kvcellar.models.sizes.sizing import size_model
from tests.models.tiny_checkpoints import make_tokenizer

CONFIG = Path(__file__).parent / "configs" / "gpt-oss-20b.json"

WRITE = """
import json, sys, torch, safetensors.torch, transformers
from kvcellar.backends.torch.load.networks import empty_network
from kvcellar.models.files.formats import without_format
folder, raw = sys.argv[1], json.loads(open(sys.argv[1] + "/config.json").read())
network = empty_network(without_format(raw), attention="eager")
tensors = {}
for name, parameter in network.named_parameters():
    if name.endswith(("gate_up_proj", "down_proj")):
        n_experts, n_in, n_out = parameter.shape
        one = torch.randint(0, 256, (1, n_out, n_in // 32, 16), dtype=torch.uint8)
        tensors[name + "_blocks"] = one.expand(n_experts, -1, -1, -1).contiguous()
        steps = torch.full((n_experts, n_out, n_in // 32), 119, dtype=torch.uint8)
        tensors[name + "_scales"] = steps
    else:
        tensors[name] = torch.randn(parameter.shape).mul(0.02).bfloat16()
safetensors.torch.save_file(tensors, folder + "/model.safetensors", metadata={"format": "pt"})
"""

LOAD = """
import json, sys, threading, time
import kvcellar as kv
from kvcellar.models import load_model
def held():  # what no file gives back
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])
load_model("demo", backend=sys.argv[2])
before, most, is_done = held(), 0, False
def watch():
    global most
    while not is_done:
        most = max(most, held())
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[1], backend=sys.argv[2])
is_done = True
thread.join()
after = held()
config = kv.make_config(model.params, 64, kv_dtype="bfloat16")
with kv.make_decode_session(sys.argv[2], config) as s:
    logits = model.bind(s).forward([1, 2, 3], range(3))
    finite = bool((logits == logits).all())
print(json.dumps([after - before, most - before, model.size_bytes, finite]))
"""


@pytest.mark.slow
@pytest.mark.kernel
@pytest.mark.skipif(not levels.is_available(), reason=levels.why_not())
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_model_of_gpt_oss_s_shape_takes_what_was_counted_before(tmp_path, backend):
    raw = json.loads(CONFIG.read_text())
    types = raw["layer_types"][:2]
    raw |= {"num_hidden_layers": 2, "layer_types": types, "vocab_size": 1024}
    raw |= {"eos_token_id": 1, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    make_tokenizer().save_pretrained(tmp_path)
    run = [sys.executable, "-c"]
    subprocess.run([*run, WRITE, str(tmp_path)], check=True, timeout=300)
    spec = size_model(tmp_path, backend=backend)
    said = subprocess.run(
        [*run, LOAD, str(tmp_path), backend],
        check=True,
        timeout=300,
        capture_output=True,
        text=True,
    ).stdout
    after, most, size_bytes, is_finite = json.loads(said.splitlines()[-1])
    assert is_finite
    one_layer = 32 * (2880 * 5760 + 2880 * 2880) * 17 // 32
    assert abs(size_bytes - spec.weight_bytes) < 1 << 20  # escapes and rotations
    assert after < 1.1 * spec.weight_bytes
    # While it is loaded a layer is there twice: as it was read, and as it is placed.
    assert most < 1.1 * spec.weight_bytes + one_layer
