"""The native part as Python sees it: C functions through ctypes, which lets go of the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcellar.backends.executorch import building
from kvcellar.errors import BackendError, ModelError, ShapeError, StepError
from kvcellar.kernel import attend, levels
from kvcellar.op import eager_update_and_attend
from kvcellar.registry import active_cache

NATIVE_VERSION = 1
"""KVC_NATIVE_VERSION of native.h."""

STEP_VERSION = 1
"""KVC_STEP_VERSION of step_call.h that the native part is compiled with."""

DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}
"""torch's types and their numbers in ExecuTorch, which are torch's own."""

TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}

NONE, TENSOR, INT, DOUBLE, BOOL, TEXT = range(6)


class Value(ctypes.Structure):
    """``KvcValue``."""

    _fields_ = (
        ("tag", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("is_planned", ctypes.c_int32),
        ("sizes", ctypes.c_int32 * 8),
        ("data", ctypes.c_void_p),
        ("n_bytes", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("real", ctypes.c_double),
    )


class Times(ctypes.Structure):
    """``KvcTimes``: nanoseconds in our op, how many calls of it, and of the whole run."""

    _fields_ = (
        ("op_ns", ctypes.c_int64),
        ("n_ops", ctypes.c_int64),
        ("run_ns", ctypes.c_int64),
    )


class ForwardRecord(ctypes.Structure):
    """``KvcForward``; the layers are an array of ``LAYER``."""

    _fields_ = (("n_layers", ctypes.c_int64), ("layers", ctypes.c_void_p))


LAYER = np.dtype(
    [
        ("plan", np.uint64),
        ("pool", np.uint64),
        ("exact_plan", np.uint64),
        ("exact_pool", np.uint64),
        ("softcap", np.float32),
        ("is_ready", np.int32),
    ]
)
"""``KvcLayer``."""


class Attend(ctypes.Structure):
    """``KvcAttend``."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("position", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("out_dtype", ctypes.c_int32),
    )


_PREPARE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_int64),
    ctypes.POINTER(ctypes.c_void_p),
)
_ATTEND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Attend))

_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kvc_built_for": (ctypes.c_char_p, ()),
    "kvc_native_version": (ctypes.c_int, ()),
    "kvc_error": (ctypes.c_char_p, ()),
    "kvc_is_shape_error": (ctypes.c_int, ()),
    "kvc_register": (ctypes.c_int, (_PREPARE, _ATTEND, ctypes.c_void_p)),
    "kvc_use_threads": (None, (ctypes.c_int,)),
    "kvc_open": (ctypes.c_void_p, (ctypes.c_char_p,)),
    "kvc_close": (None, (ctypes.c_void_p,)),
    "kvc_n_methods": (ctypes.c_int64, (ctypes.c_void_p,)),
    "kvc_method_name": (ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)),
    "kvc_load": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)),
    "kvc_call_op": (
        ctypes.c_int,
        (
            ctypes.POINTER(Value),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_double,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.POINTER(Times),
        ),
    ),
    "kvc_run": (
        ctypes.c_int64,
        (
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.POINTER(Value),
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.POINTER(Value),
            ctypes.c_int64,
            ctypes.POINTER(Times),
        ),
    ),
}


class Shape(NamedTuple):
    """Sizes of the q, k and v that reach the op."""

    n_tokens: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    v_head_dim: int


Planner = Callable[[int, Shape, Sequence[int]], int]
"""(layer, shape, positions) -> the address of what was planned."""

_lock = threading.Lock()


class _Kept(threading.local):
    """State of the op's Python side for one thread."""

    error: BaseException | None = None
    plan: Planner | None = None


_kept = _Kept()


def library() -> Any:
    """Load the native part, once, and register the op's kernels in ExecuTorch's runtime.

    Programs use as many threads as ExecuTorch likes, or the caller's alone where the environment
    has ``OMP_NUM_THREADS=1``.

    From here on programs of the official Python runtime meet the cache that is active in their
    thread, too.

    Raises:
        BackendError: it is not there and cannot be built, is not of the ExecuTorch that is
            installed, or another library has registered the op.
    """
    with _lock:
        return _loaded()


COMPONENTS = ("kernels_optimized", "kernels_quantized", "backend_xnnpack")
"""Libraries of ExecuTorch with what programs are made of, beside the runtime itself."""

_components: list[ctypes.CDLL] = []


@functools.cache
def _loaded() -> Any:
    path = building.native_library()
    # They register themselves; ExecuTorch's own Python module, which loads them too, takes seconds.
    for name in COMPONENTS:
        files = sorted(building.library_folder().glob(f"libexecutorch_{name}.*"))
        _components.extend(ctypes.CDLL(str(file)) for file in files)
    return load_library(path)


def load_library(path: Path) -> Any:
    """Load the native part in ``path``, check it and register it.

    Raises:
        BackendError: as ``library``.
    """
    wanted = building.executorch_version()
    try:
        lib = ctypes.CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        built_for = lib.kvc_built_for().decode()
        version = lib.kvc_native_version()
    except (OSError, AttributeError) as error:
        raise BackendError(
            f"kvcellar's native part {path} cannot be loaded with ExecuTorch {wanted} ({error}); "
            f"remove the file, and it is built again"
        ) from error
    if built_for != wanted or version != NATIVE_VERSION:
        raise BackendError(
            f"kvcellar's native part {path} was built for ExecuTorch {built_for} (interface "
            f"{version}); installed is {wanted} (interface {NATIVE_VERSION}); remove the file, and "
            f"it is built again"
        )
    step = None
    if levels.is_available() and attend.STEP_VERSION == STEP_VERSION:
        step = attend.step_address()
    if lib.kvc_register(_PREPARE_CALLBACK, _ATTEND_CALLBACK, step):
        raise BackendError(
            f"{lib.kvc_error().decode()}; one of the two can run in a process: do not load the "
            f"other library here"
        )
    lib.kvc_use_threads(os.environ.get("OMP_NUM_THREADS") != "1")
    return lib


def fail(lib: Any, what: str) -> ModelError:
    """Make an error of the last call in this thread, where a program was opened or loaded."""
    return ModelError(f"{what}: {lib.kvc_error().decode(errors='replace')}")


def run_error(lib: Any, what: str) -> BaseException:
    """Make an error of the last run in this thread: Python's own from inside, or the runtime's."""
    raised = take_error()
    if raised is not None:
        return raised
    kind = ShapeError if lib.kvc_is_shape_error() else StepError
    return kind(f"{what}: {lib.kvc_error().decode(errors='replace')}")


@contextlib.contextmanager
def planning(plan: Planner | None) -> Iterator[None]:
    """While it lasts the op asks ``plan`` in this thread where nothing is planned.

    Args:
        plan: returns the address of a ``ForwardRecord``. None: the cache attends in Python.
    """
    before, _kept.plan, _kept.error = _kept.plan, plan, None
    try:
        yield
    finally:
        _kept.plan = before


def take_error() -> BaseException | None:
    """Return what the op's Python side raised in this thread since ``planning`` began."""
    error, _kept.error = _kept.error, None
    return error


def _prepare(layer: int, shape: Any, positions: Any, forward: Any) -> int:
    try:
        if _kept.plan is not None:
            forward[0] = _kept.plan(layer, Shape(*shape[:5]), positions[: shape[0]])
        return 0
    except BaseException as error:  # it cannot pass through the runtime
        _kept.error = error
        return 1


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def _tensor(address: int) -> torch.Tensor:
    """Wrap the runtime's tensor as torch's; it must not outlive the call of the op."""
    capsule = _new_capsule(address, b"dltensor", None)
    tensor: torch.Tensor = torch._C._from_dlpack(capsule)
    return tensor


def _attend(call: Any) -> int:
    """Run the op on a cache in Python: the one that is active in this thread."""
    try:
        at = call[0]
        q, k, v, position, out = (_tensor(a) for a in (at.q, at.k, at.v, at.position, at.out))
        sinks = _tensor(at.sinks) if at.sinks else None
        if active_cache() is None:
            raise StepError(
                f"layer {at.layer} of a program attends and no cache is active in this thread; "
                f"load the program with a cache_key, or run it inside "
                f"'with use_cache(session.cache)'"
            )
        dtype = TORCH_DTYPES[at.out_dtype]
        with torch.inference_mode():
            out.copy_(eager_update_and_attend(q, k, v, position, at.layer, at.scale, dtype, sinks))
        return 0
    except BaseException as error:  # it cannot pass through the runtime
        _kept.error = error
        return 1


_PREPARE_CALLBACK = _PREPARE(_prepare)
_ATTEND_CALLBACK = _ATTEND(_attend)
"""Kept for as long as the process lives: the runtime has their addresses."""
