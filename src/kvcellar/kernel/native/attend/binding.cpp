// Attention for Python: pools, rows and plans.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <string>

#include "attend/plan.h"
#include "attend/step.h"
#include "core/binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {
namespace {

// Long enough that other Python threads should run meanwhile.
constexpr double kReleaseNs = 50000;

// What a StepPlan is asked for, looked up once.
struct Names {
  PyObject *n_tokens, *n_cells, *writes, *reads, *q_start, *q_len, *runs, *kind, *mask;
  nb::object causal, explicit_mask;  // members of AttendKind
  Names() {
    const nb::object kinds = nb::module_::import_("kvcellar.types").attr("AttendKind");
    causal = kinds.attr("CAUSAL");
    explicit_mask = kinds.attr("EXPLICIT");
    n_tokens = PyUnicode_InternFromString("n_tokens");
    n_cells = PyUnicode_InternFromString("n_cells");
    writes = PyUnicode_InternFromString("writes");
    reads = PyUnicode_InternFromString("reads");
    q_start = PyUnicode_InternFromString("q_start");
    q_len = PyUnicode_InternFromString("q_len");
    runs = PyUnicode_InternFromString("runs");
    kind = PyUnicode_InternFromString("kind");
    mask = PyUnicode_InternFromString("mask");
  }
};

nb::object get(PyObject* from, PyObject* name) {
  PyObject* value = PyObject_GetAttr(from, name);
  if (!value) throw nb::python_error();
  return nb::steal(value);
}

int64_t integer(PyObject* value) {
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

int64_t get_integer(PyObject* from, PyObject* name) { return integer(get(from, name).ptr()); }

PyObject* tuple(const nb::object& value) {
  if (!PyTuple_Check(value.ptr())) throw nb::type_error("a StepPlan keeps its parts in tuples");
  return value.ptr();
}

// Run is a pair.
CellRun run_of(PyObject* pair) {
  if (!PyTuple_Check(pair) || NB_TUPLE_GET_SIZE(pair) != 2) throw nb::type_error("a run is a pair (start, length)");
  return {integer(NB_TUPLE_GET_ITEM(pair, 0)), integer(NB_TUPLE_GET_ITEM(pair, 1))};
}

void copy_mask(PyObject* mask, int64_t q_len, Read& read, std::vector<uint8_t>& masks) {
  Py_buffer view;
  if (PyObject_GetBuffer(mask, &view, PyBUF_STRIDED_RO)) throw nb::python_error();
  const bool fits = view.ndim == 2 && view.itemsize == 1 && view.shape[0] == q_len;
  if (fits) {
    read.first_mask = static_cast<int64_t>(masks.size());
    read.n_masked = view.shape[1];
    masks.resize(masks.size() + static_cast<size_t>(q_len * read.n_masked));
    uint8_t* to = masks.data() + read.first_mask;
    for (int64_t i = 0; i < q_len; ++i)
      for (int64_t j = 0; j < read.n_masked; ++j)
        *to++ = static_cast<const uint8_t*>(view.buf)[i * view.strides[0] + j * view.strides[1]];
  }
  PyBuffer_Release(&view);
  if (!fits) throw nb::value_error("an EXPLICIT read needs a boolean mask [q_len, n_masked]");
}

StepInput flatten(nb::handle plan) {
  static const Names& names = *new Names;  // never destroyed: the interpreter may be gone by then
  StepInput input;
  input.n_tokens = get_integer(plan.ptr(), names.n_tokens);
  input.n_cells = get_integer(plan.ptr(), names.n_cells);
  const nb::object writes = get(plan.ptr(), names.writes), reads = get(plan.ptr(), names.reads);
  PyObject* items = tuple(writes);
  input.writes.reserve(static_cast<size_t>(NB_TUPLE_GET_SIZE(items)));
  for (Py_ssize_t i = 0; i < NB_TUPLE_GET_SIZE(items); ++i) {
    PyObject* write = NB_TUPLE_GET_ITEM(items, i);
    if (!PyTuple_Check(write) || NB_TUPLE_GET_SIZE(write) != 2)
      throw nb::type_error("a write is a pair (q_start, run)");
    const CellRun run = run_of(NB_TUPLE_GET_ITEM(write, 1));
    input.writes.push_back({integer(NB_TUPLE_GET_ITEM(write, 0)), run.start, run.length});
  }
  items = tuple(reads);
  input.reads.reserve(static_cast<size_t>(NB_TUPLE_GET_SIZE(items)));
  for (Py_ssize_t i = 0; i < NB_TUPLE_GET_SIZE(items); ++i) {
    PyObject* spec = NB_TUPLE_GET_ITEM(items, i);
    Read read{};
    read.q_start = get_integer(spec, names.q_start);
    read.q_len = get_integer(spec, names.q_len);
    read.first_run = static_cast<int64_t>(input.runs.size());
    const nb::object runs = get(spec, names.runs), kind = get(spec, names.kind);
    PyObject* pairs = tuple(runs);
    read.n_runs = NB_TUPLE_GET_SIZE(pairs);
    for (Py_ssize_t j = 0; j < read.n_runs; ++j) input.runs.push_back(run_of(NB_TUPLE_GET_ITEM(pairs, j)));
    if (kind.is(names.causal)) {
      read.kind = Kind::causal;
    } else if (kind.is(names.explicit_mask)) {
      read.kind = Kind::explicit_mask;
      copy_mask(get(spec, names.mask).ptr(), read.q_len, read, input.masks);
    }
    input.reads.push_back(read);
  }
  return input;
}

const char* name_of(Dtype dtype) {
  constexpr const char* names[] = {"float32", "bfloat16", "float16", "int8", "int4"};
  return names[static_cast<int>(dtype)];
}

void check_side(const Side& side) {
  const bool is_grouped = side.affine && side.group_size > 0 && side.dim % side.group_size == 0;
  if (is_quantised(side.dtype) && !is_grouped)
    throw ConfigError(std::string(name_of(side.dtype)) + " in groups of " + std::to_string(side.group_size) +
                      " for rows of " + std::to_string(side.dim) + " with its scales at address " +
                      std::to_string(reinterpret_cast<uintptr_t>(side.affine)) +
                      "; groups must divide the row, and scales must be somewhere");
}

void check_rows(Dtype dtype, const char* what) {
  if (is_quantised(dtype))
    throw ConfigError(std::string(what) + " " + name_of(dtype) + "; the kernel takes float32, bfloat16, float16");
}

void attend(Plan& plan, const Pool& pool, const Layout& layout, uintptr_t q, uintptr_t out, float scale, float softcap,
            uintptr_t sinks) {
  const AttendArgs args{at(q), at(out), scale, softcap, at<const float>(sinks)};
  if (plan.cost_ns(pool, layout) > kReleaseNs) {
    const nb::gil_scoped_release release;
    plan.attend(pool, layout, args, 0);
  } else {
    plan.attend(pool, layout, args, 0);
  }
}

using Cells = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

void bind_attend(nb::module_& m) {
  nb::class_<Side>(m, "Side",
                   "Where K, or V, of one layer lies. Strides in bytes.\n\n"
                   "Head h of cell c is at ``data + h * head_stride + c * cell_stride``; in blocks of\n"
                   "``block_size`` cells at ``data + h * head_stride + (c // block_size) * block_stride\n"
                   "+ (c % block_size) * cell_stride``. The ``affine`` fields say the same of the\n"
                   "float16 (scale, bias) pairs, ``[dim // group_size, 2]`` for each row, of a\n"
                   "quantised side.")
      .def(
          "__init__",
          [](Side* self, Dtype dtype, int64_t dim, uintptr_t data, int64_t head_stride, int64_t cell_stride,
             int64_t block_stride, uintptr_t affine, int64_t affine_head_stride, int64_t affine_cell_stride,
             int64_t affine_block_stride, int64_t group_size) {
            const Side side{dtype,
                            dim,
                            at<char>(data),
                            head_stride,
                            cell_stride,
                            block_stride,
                            at<char>(affine),
                            affine_head_stride,
                            affine_cell_stride,
                            affine_block_stride,
                            group_size};
            check_side(side);
            new (self) Side(side);
          },
          "dtype"_a, "dim"_a, "data"_a, "head_stride"_a, "cell_stride"_a, "block_stride"_a = 0, "affine"_a = 0,
          "affine_head_stride"_a = 0, "affine_cell_stride"_a = 0, "affine_block_stride"_a = 0, "group_size"_a = 0,
          "Describe one side.\n\nRaises:\n    ConfigError: a quantised side without scales or with groups that miss "
          "numbers.");

  nb::class_<Pool>(m, "Pool", "Where one layer's K and V lie; made anew when they are allocated anew.")
      .def(
          "__init__",
          [](Pool* self, int64_t n_kv_heads, int64_t n_cells, const Side& k, const Side& v, int64_t block_size,
             const Pool* exact) {
            if (exact && (exact->n_kv_heads != n_kv_heads || exact->k.dim != k.dim || exact->v.dim != v.dim ||
                          is_quantised(exact->k.dtype) || is_quantised(exact->v.dtype)))
              throw ConfigError("an exact pool has rows of floats, as many heads and numbers as its main one");
            new (self) Pool{n_kv_heads, n_cells, block_size, k, v, exact};
          },
          "n_kv_heads"_a, "n_cells"_a, "k"_a, "v"_a, "block_size"_a = 0, "exact"_a = nb::none(), nb::keep_alive<1, 7>(),
          "Describe one layer's bytes.\n\n"
          "Args:\n"
          "    n_kv_heads: KV heads.\n"
          "    n_cells: cells that are allocated; nothing past them is read or written.\n"
          "    k: where K lies.\n"
          "    v: where V lies.\n"
          "    block_size: cells of a block; 0: all cells at one stride.\n"
          "    exact: a pool of float rows, of as many heads and numbers. Runs of reads that start\n"
          "        at ``bookkeeping.cells.exact.BASE`` or later are its cells, counted from there. Writes\n"
          "        never go to it: a plan of their own does those.\n\n"
          "Raises:\n"
          "    ConfigError: an exact pool of other rows.")
      .def_prop_ro(
          "address", [](const Pool& pool) { return reinterpret_cast<uintptr_t>(&pool); },
          "Where it lies, for ``step_address()``.")
      .def(
          "write_cells",
          [](const Pool& pool, const Layout& layout, const Cells& cells, uintptr_t k, uintptr_t v) {
            write_cells(pool, layout, cells.data(), static_cast<int64_t>(cells.size()), at(k), at(v), 0);
          },
          "layout"_a, "cells"_a, "k"_a, "v"_a,
          nb::sig("def write_cells(self, layout: Layout, cells: numpy.typing.NDArray[numpy.int64], k: int, v: int) "
                  "-> None"),
          "Write one row of k and v to each of these cells, int64, in order.")
      .def(
          "move_cells",
          [](const Pool& pool, int64_t base, const Cells& src) {
            move_cells(pool, base, src.data(), static_cast<int64_t>(src.size()));
          },
          "base"_a, "src"_a, nb::sig("def move_cells(self, base: int, src: numpy.typing.NDArray[numpy.int64]) -> None"),
          "Copy cells ``src``, int64, to those from base on; all are read before any is written.");

  nb::class_<Layout>(m, "Layout",
                     "How a forward's q, k, v and result lie. Strides in numbers: from head to head, from\n"
                     "token to token; the last dimension is contiguous everywhere.")
      .def(
          "__init__",
          [](Layout* self, int64_t n_heads, Dtype dtype, Dtype out_dtype, std::pair<int64_t, int64_t> q,
             std::pair<int64_t, int64_t> k, std::pair<int64_t, int64_t> v, std::pair<int64_t, int64_t> out) {
            check_rows(dtype, "q, k and v are");
            check_rows(out_dtype, "the result is");
            new (self) Layout{n_heads,
                              dtype,
                              out_dtype,
                              {q.first, q.second},
                              {k.first, k.second},
                              {v.first, v.second},
                              {out.first, out.second}};
          },
          "n_heads"_a, "dtype"_a, "out_dtype"_a, "q"_a, "k"_a, "v"_a, "out"_a,
          "Describe the rows of a forward.\n\nRaises:\n    ConfigError: a type that the kernel does not take.");

  nb::class_<Plan>(m, "Plan",
                   "A ``StepPlan`` flattened, with its work already split; made once per forward and layer\n"
                   "group. Cells that several reads see whole are read once.")
      .def(
          "__init__", [](Plan* self, nb::handle plan) { new (self) Plan(flatten(plan)); }, "plan"_a,
          nb::sig("def __init__(self, plan: kvcellar.types.StepPlan) -> None"), "Flatten a plan.")
      .def_prop_ro(
          "address", [](const Plan& plan) { return reinterpret_cast<uintptr_t>(&plan); },
          "Where it lies, for ``step_address()``.")
      .def_prop_ro("n_tokens", &Plan::n_tokens, "Tokens of the forward.")
      .def_prop_ro("n_cells", &Plan::n_cells, "Cells that a pool needs.")
      .def_prop_ro("n_exact_cells", &Plan::n_exact_cells, "Cells that an exact pool needs.")
      .def_prop_ro("n_shared_cells", &Plan::n_shared_cells, "Cells that are read once for several reads.")
      .def(
          "step",
          [](Plan& plan, const Pool& pool, const Layout& layout, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out,
             float scale, float softcap, uintptr_t sinks) {
            plan.write(pool, layout, at(k), at(v), 0);
            attend(plan, pool, layout, q, out, scale, softcap, sinks);
          },
          "pool"_a, "layout"_a, "q"_a, "k"_a, "v"_a, "out"_a, "scale"_a, "softcap"_a, "sinks"_a,
          "Write one layer's k and v, and attend. All rows are addresses.\n\n"
          "Args:\n"
          "    pool: the layer's.\n"
          "    layout: how rows lie.\n"
          "    q: queries.\n"
          "    k: new keys.\n"
          "    v: new values.\n"
          "    out: where results go.\n"
          "    scale: factor on logits.\n"
          "    softcap: their cap; 0.0: none.\n"
          "    sinks: float32 ``[n_heads]``; 0: none.\n\n"
          "Raises:\n"
          "    ConfigError: the plan reaches past the pool's cells, or heads do not fit.")
      .def(
          "write",
          [](Plan& plan, const Pool& pool, const Layout& layout, uintptr_t k, uintptr_t v) {
            plan.write(pool, layout, at(k), at(v), 0);
          },
          "pool"_a, "layout"_a, "k"_a, "v"_a, "Write one layer's k and v.")
      .def("attend", &attend, "pool"_a, "layout"_a, "q"_a, "out"_a, "scale"_a, "softcap"_a, "sinks"_a,
           "Attend, of what is written already; arguments as of :meth:`step`.");

  m.attr("STEP_VERSION") = KVC_STEP_VERSION;
  m.def(
      "step_address", [] { return reinterpret_cast<uintptr_t>(static_cast<KvcStep>(&step)); },
      "Return the address of the C function ``KvcStep`` of ``native/attend/step_call.h``.\n\n"
      "Shared objects of other runtimes call it with the addresses of a plan and of a pool,\n"
      "without Python.");
}

}  // namespace kvcellar
