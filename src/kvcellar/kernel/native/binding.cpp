// The kernel for Python: integers in, addresses as integers, no tensors.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "eagle3.h"
#include "kernel.h"
#include "linear.h"
#include "step.h"

namespace nb = nanobind;
using namespace kvcellar;

namespace {

// Long enough that other Python threads should run meanwhile.
constexpr double kReleaseNs = 50000;

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

Rows rows_at(uintptr_t data, int64_t n_tokens, int64_t n_rows, int64_t dim, int64_t token_stride,
             int dtype) {
  return {reinterpret_cast<void*>(data), n_tokens,     n_rows, dim,
          token_stride,                  static_cast<Dtype>(dtype)};
}

// Attribute names, made once.
struct Names {
  PyObject *n_tokens, *n_cells, *writes, *reads, *q_start, *q_len, *runs, *kind, *mask;
  Names() {
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
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
    throw nb::type_error("a run is a pair (start, length)");
  return {integer(PyTuple_GET_ITEM(pair, 0)), integer(PyTuple_GET_ITEM(pair, 1))};
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

// `causal` and `explicit_mask` are AttendKind's members.
StepInput flatten(nb::handle plan, nb::handle causal, nb::handle explicit_mask) {
  static const Names names;
  StepInput input;
  input.n_tokens = get_integer(plan.ptr(), names.n_tokens);
  input.n_cells = get_integer(plan.ptr(), names.n_cells);
  const nb::object writes = get(plan.ptr(), names.writes), reads = get(plan.ptr(), names.reads);
  PyObject* items = tuple(writes);
  input.writes.reserve(static_cast<size_t>(PyTuple_GET_SIZE(items)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    PyObject* write = PyTuple_GET_ITEM(items, i);
    if (!PyTuple_Check(write) || PyTuple_GET_SIZE(write) != 2)
      throw nb::type_error("a write is a pair (q_start, run)");
    const CellRun run = run_of(PyTuple_GET_ITEM(write, 1));
    input.writes.push_back({integer(PyTuple_GET_ITEM(write, 0)), run.start, run.length});
  }
  items = tuple(reads);
  input.reads.reserve(static_cast<size_t>(PyTuple_GET_SIZE(items)));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); ++i) {
    PyObject* spec = PyTuple_GET_ITEM(items, i);
    Read read{};
    read.q_start = get_integer(spec, names.q_start);
    read.q_len = get_integer(spec, names.q_len);
    read.first_run = static_cast<int64_t>(input.runs.size());
    const nb::object runs = get(spec, names.runs), kind = get(spec, names.kind);
    PyObject* pairs = tuple(runs);
    read.n_runs = PyTuple_GET_SIZE(pairs);
    for (Py_ssize_t j = 0; j < read.n_runs; ++j)
      input.runs.push_back(run_of(PyTuple_GET_ITEM(pairs, j)));
    if (kind.is(causal)) {
      read.kind = Kind::causal;
    } else if (kind.is(explicit_mask)) {
      read.kind = Kind::explicit_mask;
      copy_mask(get(spec, names.mask).ptr(), read.q_len, read, input.masks);
    }
    input.reads.push_back(read);
  }
  return input;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Attention over runs of cells on a CPU.";
  nb::set_leak_warnings(false);

  nb::class_<Side>(m, "Side")
      .def("__init__",
           [](Side* self, int dtype, int64_t dim, uintptr_t data, int64_t head_stride,
              int64_t cell_stride, int64_t block_stride, uintptr_t affine,
              int64_t affine_head_stride, int64_t affine_cell_stride, int64_t affine_block_stride,
              int64_t group_size) {
             new (self) Side{static_cast<Dtype>(dtype),
                             dim,
                             reinterpret_cast<char*>(data),
                             head_stride,
                             cell_stride,
                             block_stride,
                             reinterpret_cast<char*>(affine),
                             affine_head_stride,
                             affine_cell_stride,
                             affine_block_stride,
                             group_size};
           });

  nb::class_<Pool>(m, "Pool")
      .def("__init__",
           [](Pool* self, int64_t n_kv_heads, int64_t n_cells, int64_t block_size, const Side& k,
              const Side& v, const Pool* exact) {
             if (exact && (exact->n_kv_heads != n_kv_heads || exact->k.dim != k.dim ||
                           exact->v.dim != v.dim || is_quantised(exact->k.dtype) ||
                           is_quantised(exact->v.dtype)))
               throw std::invalid_argument(
                   "an exact pool has rows of floats, as many heads and numbers as its main one");
             new (self) Pool{n_kv_heads, n_cells, block_size, k, v, exact};
           },
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::keep_alive<1, 7>())
      .def_prop_ro("address",
                   [](const Pool& pool) { return reinterpret_cast<uintptr_t>(&pool); })
      .def("write_cells",
           [](const Pool& pool, const Layout& layout, uintptr_t cells, int64_t n, uintptr_t k,
              uintptr_t v) {
             write_cells(pool, layout, static_cast<const int64_t*>(at(cells)), n, at(k), at(v), 0);
           })
      .def("move_cells", [](const Pool& pool, int64_t base, uintptr_t src, int64_t n) {
        move_cells(pool, base, static_cast<const int64_t*>(at(src)), n);
      });

  nb::class_<Layout>(m, "Layout")
      .def("__init__", [](Layout* self, int64_t n_heads, int in, int out, int64_t q_head,
                          int64_t q_token, int64_t k_head, int64_t k_token, int64_t v_head,
                          int64_t v_token, int64_t o_head, int64_t o_token) {
        new (self) Layout{n_heads,
                          static_cast<Dtype>(in),
                          static_cast<Dtype>(out),
                          {q_head, q_token},
                          {k_head, k_token},
                          {v_head, v_token},
                          {o_head, o_token}};
      });

  const auto attend = [](Plan& plan, const Pool& pool, const Layout& layout, uintptr_t q,
                         uintptr_t out, float scale, float softcap, uintptr_t sinks) {
    const AttendArgs args{at(q), reinterpret_cast<void*>(out), scale, softcap,
                          static_cast<const float*>(at(sinks))};
    if (plan.cost_ns(pool, layout) > kReleaseNs) {
      nb::gil_scoped_release release;
      plan.attend(pool, layout, args, 0);
    } else {
      plan.attend(pool, layout, args, 0);
    }
  };

  nb::class_<Plan>(m, "Plan")
      .def("__init__",
           [](Plan* self, nb::handle plan, nb::handle causal, nb::handle explicit_mask) {
             new (self) Plan(flatten(plan, causal, explicit_mask));
           })
      .def_prop_ro("address", [](const Plan& plan) { return reinterpret_cast<uintptr_t>(&plan); })
      .def_prop_ro("n_tokens", &Plan::n_tokens)
      .def_prop_ro("n_cells", &Plan::n_cells)
      .def_prop_ro("n_exact_cells", &Plan::n_exact_cells)
      .def_prop_ro("n_shared_cells", &Plan::n_shared_cells)
      .def("step",
           [attend](Plan& plan, const Pool& pool, const Layout& layout, uintptr_t q, uintptr_t k,
                    uintptr_t v, uintptr_t out, float scale, float softcap, uintptr_t sinks) {
             plan.write(pool, layout, at(k), at(v), 0);
             attend(plan, pool, layout, q, out, scale, softcap, sinks);
           })
      .def("write",
           [](Plan& plan, const Pool& pool, const Layout& layout, uintptr_t k, uintptr_t v) {
             plan.write(pool, layout, at(k), at(v), 0);
           })
      .def("attend", attend);

  nb::class_<LinearWeights>(m, "LinearWeights")
      .def("__init__",
           [](LinearWeights* self, int format, int64_t n_in, int64_t n_out, uintptr_t data,
              uintptr_t beside) {
             new (self) LinearWeights(make_linear_weights(static_cast<WeightFormat>(format), n_in,
                                                          n_out, at(data), at(beside)));
           })
      .def("linear", [](const LinearWeights& weights, uintptr_t x, int64_t n_tokens, int in,
                        uintptr_t out, int result) {
        const LinearCall call{weights,  at(x), reinterpret_cast<void*>(out), n_tokens,
                              static_cast<Dtype>(in), static_cast<Dtype>(result)};
        nb::gil_scoped_release release;
        linear(call, 0);
      })
      .def_prop_ro("can_multiply", &can_multiply)
      .def("multiply", [](const LinearWeights& weights, uintptr_t x, int64_t n_tokens,
                          uintptr_t out) {
        nb::gil_scoped_release release;
        multiply(weights, at(x), n_tokens, reinterpret_cast<void*>(out), 0);
      })
      .def("unpack", [](const LinearWeights& weights, int64_t first, int64_t stop, uintptr_t to) {
        nb::gil_scoped_release release;
        unpack(weights, first, stop, reinterpret_cast<void*>(to), 0);
      })
      .def("gather", [](const LinearWeights& weights, uintptr_t outputs, int64_t n, int dtype, uintptr_t to) {
        nb::gil_scoped_release release;
        gather(weights, static_cast<const int64_t*>(at(outputs)), n, static_cast<Dtype>(dtype),
               reinterpret_cast<void*>(to), 0);
      });

  m.def("pack", [](uintptr_t rows, int dtype, int format, int64_t n_in, int64_t n_out, uintptr_t data,
                   uintptr_t scales) {
    const nb::gil_scoped_release release;
    const auto what = static_cast<WeightFormat>(format);
    pack({make_linear_weights(what, n_in, n_out, nullptr, nullptr), at(rows), static_cast<Dtype>(dtype),
          reinterpret_cast<uint8_t*>(data), reinterpret_cast<uint16_t*>(scales)}, 0);
  });

  m.def("code", [](uintptr_t rows, int64_t n_in, int64_t n_out, uintptr_t to) {
    std::vector<Escape> escapes;
    {
      nb::gil_scoped_release release;
      escapes = code(static_cast<const uint16_t*>(at(rows)), n_in, n_out, reinterpret_cast<void*>(to), 0);
    }
    return nb::bytes(escapes.data(), escapes.size() * sizeof(Escape));
  });

  nb::class_<Eagle3Weights>(m, "Eagle3Weights")
      .def("__init__",
           [](Eagle3Weights* self, int64_t hidden, int64_t inner, int64_t n_heads,
              int64_t n_kv_heads, int64_t head_dim, int64_t n_vocab, int64_t n_said, float eps,
              const LinearWeights& qkv, const LinearWeights& o, const LinearWeights& gate_up,
              const LinearWeights& down, const LinearWeights& lm_head, uintptr_t embedding,
              uintptr_t qkv_bias, uintptr_t residual_scale) {
             const auto floats = [](uintptr_t from) { return static_cast<const float*>(at(from)); };
             new (self) Eagle3Weights{hidden,  inner,  n_heads, n_kv_heads,
                                      head_dim, n_vocab, n_said, eps,
                                      qkv,     o,      gate_up, down,
                                      lm_head, floats(embedding), floats(qkv_bias),
                                      floats(residual_scale)};
           })
      .def("level",
           [](const Eagle3Weights& weights, Plan& plan, const Pool& pool, Plan* exact_plan,
              const Pool* exact_pool, uintptr_t rope, int64_t n_rope,
              const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions,
              uintptr_t hidden, int64_t n_hidden, const std::vector<int64_t>& above,
              const std::vector<int64_t>& rows, int64_t k, uintptr_t out, uintptr_t ids,
              uintptr_t beliefs) {
             if (positions.size() != tokens.size() || above.size() != tokens.size())
               throw nb::value_error("a level needs a position and a hidden row for each token");
             const Eagle3Call call{&plan,
                                   &pool,
                                   exact_plan,
                                   exact_pool,
                                   static_cast<const float*>(at(rope)),
                                   n_rope,
                                   static_cast<int64_t>(tokens.size()),
                                   tokens.data(),
                                   positions.data(),
                                   static_cast<const float*>(at(hidden)),
                                   n_hidden,
                                   above.data(),
                                   static_cast<int64_t>(rows.size()),
                                   rows.data(),
                                   k,
                                   reinterpret_cast<float*>(out),
                                   reinterpret_cast<int64_t*>(ids),
                                   reinterpret_cast<float*>(beliefs)};
             nb::gil_scoped_release release;
             eagle3_level(weights, call, 0);
           },
           nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg());

  nb::class_<LinearLayer>(m, "LinearLayer")
      .def("__init__", [](LinearLayer* self, const LinearWeights& weights, uintptr_t bias) {
        new (self) LinearLayer{weights, at(bias)};
      });

  nb::class_<Norm>(m, "Norm").def("__init__", [](Norm* self, uintptr_t weight, float eps) {
    new (self) Norm{at(weight), eps};
  });

  nb::class_<DecoderLayer>(m, "DecoderLayer")
      .def("__init__",
           [](DecoderLayer* self, const LinearLayer& qkv, const LinearLayer& o,
              const LinearLayer& gate_up, const LinearLayer& down, const Norm& before,
              const Norm& between, const Norm& q, const Norm& k, int64_t n_heads,
              int64_t n_kv_heads, int64_t head_dim, int dtype, float scale) {
             new (self) DecoderLayer{qkv, o, gate_up, down, before, between, q, k,
                                     n_heads, n_kv_heads, head_dim, static_cast<Dtype>(dtype), scale};
           })
      .def("before",
           [](const DecoderLayer& layer, uintptr_t x, int64_t n_tokens, uintptr_t cos,
              uintptr_t sin, uintptr_t qkv) {
             const nb::gil_scoped_release release;
             before_attention(layer, at(x), n_tokens, at(cos), at(sin),
                              reinterpret_cast<void*>(qkv), 0);
           })
      .def("after", [](const DecoderLayer& layer, uintptr_t x, uintptr_t attended,
                       int64_t n_tokens, uintptr_t out) {
        const nb::gil_scoped_release release;
        after_attention(layer, at(x), at(attended), n_tokens, reinterpret_cast<void*>(out), 0);
      });

  nb::class_<Decoder>(m, "Decoder")
      .def("__init__",
           [](Decoder* self, const nb::sequence& layers, uintptr_t embedding, const Norm& norm,
              const LinearLayer& head) {
             new (self) Decoder{{}, at(embedding), norm, head};
             for (const nb::handle layer : layers)
               self->layers.push_back(nb::cast<const DecoderLayer&>(layer));
             if (self->layers.empty()) throw nb::value_error("a decoder has layers");
           })
      .def("run", [](const Decoder& decoder, const nb::sequence& steps, uintptr_t ids, int64_t n_tokens,
                     uintptr_t cos, uintptr_t sin, uintptr_t rows, int64_t n_rows, uintptr_t logits,
                     const std::vector<int64_t>& feature_layers, uintptr_t features) {
        std::vector<LayerStep> found;
        found.reserve(decoder.layers.size());
        for (const nb::handle step : steps)
          found.push_back({nb::cast<Plan*>(step[0]), nb::cast<const Pool*>(step[1]),
                           nb::cast<Plan*>(step[2]), nb::cast<const Pool*>(step[3]),
                           nb::cast<float>(step[4])});
        if (found.size() != decoder.layers.size())
          throw nb::value_error("a forward needs a step for each layer");
        const auto numbers = [](uintptr_t from) { return static_cast<const int64_t*>(at(from)); };
        const DecoderCall call{found.data(), n_tokens, numbers(ids), at(cos), at(sin), n_rows,
                               numbers(rows), reinterpret_cast<float*>(logits),
                               static_cast<int64_t>(feature_layers.size()), feature_layers.data(),
                               reinterpret_cast<float*>(features)};
        const nb::gil_scoped_release release;
        run_decoder(decoder, call, 0);
      });
  m.def("norm", [](uintptr_t x, int64_t n_tokens, int64_t n_rows, int64_t dim, int64_t token_stride,
                   int dtype, uintptr_t weight, float eps, uintptr_t out) {
    const nb::gil_scoped_release release;
    norm(rows_at(x, n_tokens, n_rows, dim, token_stride, dtype), at(weight), eps,
         reinterpret_cast<void*>(out), n_rows * dim, 0);
  });
  m.def("rotate", [](uintptr_t x, int64_t n_tokens, int64_t n_rows, int64_t dim,
                     int64_t token_stride, int dtype, uintptr_t cos, uintptr_t sin) {
    const nb::gil_scoped_release release;
    rotate(rows_at(x, n_tokens, n_rows, dim, token_stride, dtype), at(cos), at(sin), 0);
  });
  m.def("gate", [](uintptr_t x, int64_t n_tokens, int64_t dim, int dtype, uintptr_t out) {
    const nb::gil_scoped_release release;
    gate(rows_at(x, n_tokens, 2, dim, 2 * dim, dtype), reinterpret_cast<void*>(out), 0);
  });

  m.def("levels", [] {
    std::vector<std::string> names;
    for (const char* name : levels()) names.emplace_back(name);
    return names;
  });
  m.def("level", [] { return std::string(level()); });
  m.def("set_level", [](const std::string& name) { return set_level(name.c_str()); });
  m.def("set_num_threads", &set_num_threads);
  m.def("num_threads", &num_threads);
  m.def("threads_of", [] { return std::string(threads_of()); });
  m.def("set_parallel_for",
        [](uintptr_t run) { set_parallel_for(reinterpret_cast<ParallelFor>(run)); });
  m.attr("STEP_VERSION") = KVC_STEP_VERSION;
  m.def("step_address", [] { return reinterpret_cast<uintptr_t>(static_cast<KvcStep>(&step)); });
  m.def("stream_read", [](uintptr_t data, int64_t n_bytes) {
    nb::gil_scoped_release release;
    return stream_read(at(data), n_bytes, 0);
  });
}
