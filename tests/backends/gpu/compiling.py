"""Kernels compiled for GPUs that are not there: what the interpreter forgives, a compiler does not.

    python -m tests.backends.gpu.compiling cuda 90 large

Prints one JSON line for each kernel: its name, what it is for, the bytes of shared memory that it
takes, how often its machine code goes through memory that is a thread's own (spilled), and how many
loads of 16 bytes it has (wide).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcellar import LayerGroup, ModelCacheParams, make_config, make_paged_session, make_seq_session
from kvcellar.backends.torch.cpu.modules.rotations import Rotation
from kvcellar.backends.torch.gpu import choice
from kvcellar.backends.torch.gpu.attend import kernels, launch, stores
from kvcellar.backends.torch.gpu.attend.steps import placed_of
from kvcellar.backends.torch.gpu.sampler import draws, sampling, settings
from kvcellar.backends.torch.gpu.weights import between, layers, linears, multiply, products
from kvcellar.backends.torch.gpu.weights.matrices import (
    FORMS,
    PACKED,
    CardMatrices,
    MatrixForm,
    Parts,
)
from kvcellar.backends.torch.gpu.weights.ways import SIZES
from kvcellar.models.kept_logits import RowSampling
from kvcellar.sampler_settings import SamplerSettings
from tests.stretches import stretches

CASES: dict[str, tuple[LayerGroup, int, str, torch.dtype, bool]] = {
    "bf16": (LayerGroup((0,), 2, 64, 64), 8, "bfloat16", torch.bfloat16, False),
    "int4-window-sinks-cap": (
        LayerGroup((0,), 2, 128, 64, window=512, softcap=30.0), 6, "int4", torch.bfloat16, True
    ),
    "int8-rows-of-128": (LayerGroup((0,), 2, 128, 128), 8, "int8", torch.bfloat16, False),
    "fp8": (LayerGroup((0,), 2, 64, 64), 8, "fp8", torch.bfloat16, False),
    "bf16-rows-of-256": (LayerGroup((0,), 1, 256, 256), 8, "bfloat16", torch.bfloat16, False),
    "fp16-odd-rows": (LayerGroup((0,), 2, 80, 96), 2, "float16", torch.float16, True),
    "k8v4-of-float32": (LayerGroup((0,), 2, 64, 64), 4, "k8v4", torch.float32, False),
    "float32-rows-of-128": (LayerGroup((0,), 2, 128, 128), 4, "float32", torch.float32, False),
    "exact": (
        LayerGroup((0,), 2, 64, 64), 8, "int8:first4:last64", torch.bfloat16, False
    ),
    "latent": (
        LayerGroup((0,), 1, 64, 512, is_latent=True), 16, "bfloat16", torch.bfloat16, False
    ),
}  # fmt: skip
"""(layer group, query heads, storage, type of the model, whether it has sinks) by name."""

QUICK = ("bf16", "fp8", "int4-window-sinks-cap")

WEIGHTS: dict[str, tuple[MatrixForm, torch.dtype]] = {
    "weights-int8": (PACKED[8], torch.bfloat16),
    "weights-q4_k": (FORMS["Q4_K"], torch.bfloat16),
    "weights-q6_k": (FORMS["Q6_K"], torch.bfloat16),
    "weights-iq4_xs": (FORMS["IQ4_XS"], torch.bfloat16),
    "weights-mxfp4": (FORMS["MXFP4"], torch.bfloat16),
    "weights-bf16": (FORMS["BF16"], torch.bfloat16),
    "weights-q4_k-of-float32": (FORMS["Q4_K"], torch.float32),
}
"""(form of a matrix, type of its inputs) by name."""

OTHER_SIZES = {
    "sizes-bf16": FORMS["BF16"], "sizes-int8": PACKED[8], "sizes-q4_k": FORMS["Q4_K"]
}  # fmt: skip
"""Form of a matrix whose products of one row are tried in several sizes of programs, by name."""

SAMPLING = {"sampling": 128_256, "sampling-of-few": 1000}
"""Tokens of a vocabulary, by name."""

KERNELS = (
    (kernels, "attend_lists"),
    (kernels, "merge_parts"),
    (stores, "write_rows"),
    (stores, "move_rows"),
    (stores, "copy_planes"),
    (products, "multiply_few"),
    (products, "multiply_packed"),
    (products, "multiply_tiles"),
    (products, "sum_parts"),
    (products, "take_rows"),
    (draws, "take_likeliest"),
    (draws, "adjust_tiles"),
    (draws, "weigh_tiles"),
    (draws, "choose_rows"),
    (between, "norm_rows"),
    (between, "turn_heads"),
    (between, "gate_rows"),
)
PLAIN = {name: getattr(module, name) for module, name in KERNELS}


@dataclass
class Recorder:
    """Stands for a kernel: compiles what it is launched with."""

    kernel: Any
    target: GPUTarget
    case: str

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        signature, fixed, aligned = {}, {}, {}
        for at, (param, given) in enumerate(zip(self.kernel.params, args, strict=True)):
            kind = "constexpr" if param.is_constexpr else _type_of(given)
            signature[param.name] = kind
            if kind == "constexpr":
                fixed[(at,)] = given
            elif isinstance(given, torch.Tensor) or (isinstance(given, int) and given % 16 == 0):
                aligned[(at,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, aligned)
        made = triton.compile(source, target=self.target, options=options)
        ptx = made.asm.get("ptx", "")
        spilled = sum(ptx.count(word) for word in ("ld.local", "st.local"))
        name = self.kernel.fn.__name__
        found = {
            "kernel": name,
            "case": self.case,
            "shared": made.metadata.shared,
            "spilled": spilled,
            "wide": ptx.count("ld.global.v4"),
        }
        print(json.dumps(found), flush=True)


def _type_of(given: Any) -> str:
    if isinstance(given, torch.Tensor):
        return triton.runtime.jit.mangle_type(given)
    if isinstance(given, float):
        return "fp32"
    if given == 1:
        return "constexpr"  # as Triton has it
    return "i32" if -(2**31) <= given < 2**31 else "i64"


def compile_case(name: str, target: GPUTarget) -> None:
    """Run a prompt and a token, or products, whose launches are compiled and not made."""
    for module, kernel in KERNELS:
        setattr(module, kernel, Recorder(PLAIN[kernel], target, name))
    if name in WEIGHTS:
        multiply_all(*WEIGHTS[name])
        lay_between(WEIGHTS[name][1])
        return
    if name in OTHER_SIZES:
        multiply_in_sizes(OTHER_SIZES[name])
        return
    if name in SAMPLING:
        sample_all(SAMPLING[name])
        return
    group, n_heads, kv_dtype, dtype, has_sinks = CASES[name]
    config = make_config(ModelCacheParams(1, groups=(group,)), capacity=2048, kv_dtype=kv_dtype)
    make = make_paged_session if "window" in name else make_seq_session
    sinks = torch.zeros(n_heads, dtype=dtype) if has_sinks else None
    with make("torch", config) as session:
        for seq_ids in ([0] * 1024, [0]):
            n = len(seq_ids)
            session.cache.begin_step(stretches(seq_ids))
            q, k, v = (
                torch.zeros((1, n, heads, dim), dtype=dtype).transpose(1, 2)
                for heads, dim in (
                    (n_heads, group.q_dim), (group.n_kv_heads, group.head_dim),
                    (group.n_kv_heads, group.v_head_dim),
                )
            )  # fmt: skip
            session.cache.update_and_attend(q, k, v, None, 0, 0.1, dtype, sinks)
        placed, _ = placed_of(session.cache.pools.of_layer[0])
        launch.move(launch.pool_arguments(placed), 5, torch.tensor([9, 11, 10]))
        rows = session.cache.read_rows([np.array([7, 8])])
        session.cache.write_rows([np.array([3, 4])], rows)


def multiply_all(form: MatrixForm, dtype: torch.dtype) -> None:
    """Multiply from one to many rows by a matrix, and by experts."""
    weights = matrices_of(form, 4, 256, 512)
    for n_rows in (1, 4, 16, 64, 300):
        multiply.multiply(weights, torch.zeros(n_rows, 512, dtype=dtype), None)
    norm = multiply.Norm(torch.zeros(512, dtype=dtype), 1e-5)
    for is_gated in (False, True):
        x = torch.zeros(2, 512, dtype=dtype)
        multiply.multiply(weights, x, norm=norm, is_gated=is_gated)
    sides = torch.zeros(2, 64, dtype=dtype)
    if form.bits == 16:
        turn = multiply.HeadTurn(sides, sides, 3, 64, False, 1)
        multiply.multiply(matrices_of(form, 1, 256, 512), x, norm=norm, turn=turn)
    multiply.take(weights, torch.zeros(3, dtype=torch.int64), dtype)
    bias = torch.zeros(4, 256, dtype=dtype)
    for n_rows in (2, 400):
        x, chosen = torch.zeros(n_rows, 512, dtype=dtype), torch.zeros(n_rows, dtype=torch.int64)
        rows = multiply.sorted_rows(chosen, 4, x) if n_rows > 2 else None
        multiply.multiply_chosen(weights, x, chosen, bias, rows)


def multiply_in_sizes(form: MatrixForm) -> None:
    """Multiply a row in all sizes of programs: plain, gated, and turned where bits are 16."""
    weights, x = matrices_of(form, 1, 512, 4096), torch.zeros(1, 4096, dtype=torch.bfloat16)
    norm = multiply.Norm(torch.zeros(4096, dtype=torch.bfloat16), 1e-5)
    sides = torch.zeros(1, 64, dtype=torch.bfloat16)
    turn = multiply.HeadTurn(sides, sides, 3, 64, False, 1)
    for way in SIZES:
        multiply.multiply(weights, x, None, x[:, :512], way=way)
        multiply.multiply(weights, x, norm=norm, is_gated=True, way=way)
        if form.bits == 16:
            multiply.multiply(weights, x, norm=norm, turn=turn, way=way)


def sample_all(n_vocab: int) -> None:
    """Take the likeliest tokens, adjust and draw."""
    logits = torch.zeros(2, n_vocab, dtype=torch.bfloat16)
    sampling.likeliest(logits, torch.zeros(2, dtype=torch.int32))
    for draw in (None, 0.5):
        asked = RowSampling(0, SamplerSettings(temperature=1.0, top_p=0.9), draw)
        sent = settings.sent([asked], n_vocab, logits.device)
        sampling.sampled(logits, sent, 0)


def lay_between(dtype: torch.dtype) -> None:
    """Normalise rows, turn heads with and without norms, gate rows."""
    norm, heads = linears.CardNorm(torch.zeros(128, dtype=dtype), 1e-5), (8, 2, 128)
    norm(torch.zeros(1, 3, 128, dtype=dtype))
    joined, sides = torch.zeros(1, 3, 12 * 128, dtype=dtype), torch.zeros(1, 3, 128, dtype=dtype)
    for rotation in (Rotation(128, False, "doubled", True, False),
                     Rotation(64, True, "once", False, True)):  # fmt: skip
        for norms in (None, (norm, norm)):
            layers.turn(joined, rotation, (sides, sides), norms, heads)
    linears.gate(torch.zeros(3, 256, dtype=dtype))


def matrices_of(form: MatrixForm, n_experts: int, n_out: int, n_in: int) -> CardMatrices:
    """Zeros of a form."""
    n_groups, n_each = n_in // form.group if form.group else 0, 1 + form.has_minima
    shape, number = (n_experts, n_out), torch.bfloat16 if form.bits == 16 else torch.int32
    step = torch.uint8 if form.has_exponents else torch.float16
    step = (torch.uint8 if form.has_minima else torch.int8) if form.top else step
    numbers = torch.zeros(*shape, n_in if form.bits == 16 else n_in * form.bits // 32, dtype=number)
    steps = torch.zeros(*shape, n_groups, n_each, dtype=step)
    n_tops = n_groups // form.top if form.top else 0
    tops = torch.zeros(*shape, n_tops, n_each, dtype=torch.float16)
    return CardMatrices(form, n_in, Parts(numbers, steps, tops))


def main() -> None:
    """Compile all cases, or those that are named, for a target."""
    backend, arch, size, *names = sys.argv[1:]
    target = GPUTarget(
        backend, int(arch) if backend == "cuda" else arch, 32 if backend == "cuda" else 64
    )
    choice.ON_CPU = True
    launch.shared_bytes = lambda device: 232_448 if size == "large" else 101_376
    launch.has_fp8 = lambda device: backend == "cuda" and int(arch) >= 89
    sizes = OTHER_SIZES if "KVCELLAR_ALL_CASES" in os.environ else ()
    for name in names or (*CASES, *WEIGHTS, *sizes, *SAMPLING):
        compile_case(name, target)


if __name__ == "__main__":
    main()
