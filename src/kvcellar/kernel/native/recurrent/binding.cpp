// Recurrent layers, for Python.

#include "recurrent/recurrent.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>

#include "core/binding.h"
#include "core/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {

namespace {

using AdvanceTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;

// A batch that owns its advances.
struct StateBatch {
  std::vector<Advance> advances;
  Batch batch;
  int64_t n_slots = 0;

  StateBatch(int64_t n_tokens, Dtype dtype, const std::vector<AdvanceTuple>& all) {
    if (dtype != Dtype::f32 && dtype != Dtype::bf16) throw ConfigError("rows are float32 or bfloat16");
    for (const auto& [first, n, src, dst] : all) {
      if (first < 0 || n < 1 || first + n > n_tokens || src < -1 || dst < 0)
        throw ConfigError("an advance has tokens of the batch and slots, got " + std::to_string(first) + ", " +
                          std::to_string(n) + ", " + std::to_string(src) + ", " + std::to_string(dst));
      advances.push_back({first, n, src, dst});
      n_slots = std::max({n_slots, src + 1, dst + 1});
    }
    batch = {advances.data(), static_cast<int64_t>(advances.size()), n_tokens, dtype};
  }

  float* states(uintptr_t data, int64_t n) const {
    if (n < n_slots)
      throw ConfigError("the batch needs " + std::to_string(n_slots) + " slots of states, and there are " +
                        std::to_string(n));
    return at<float>(data);
  }
};

void bind_convolution(nb::module_& m) {
  nb::class_<Convolution>(m, "Convolution", "Each channel's weighted sum over its last inputs.")
      .def(
          "__init__",
          [](Convolution* self, int64_t n_channels, int64_t width, uintptr_t weight, uintptr_t bias, bool has_silu) {
            if (width < 1 || width > kMostWidth)
              throw ConfigError("a convolution is over 1 to " + std::to_string(kMostWidth) + " inputs, got " +
                                std::to_string(width));
            new (self) Convolution{n_channels, width, at<const float>(weight), at<const float>(bias), has_silu};
          },
          "n_channels"_a, "width"_a, "weight"_a, "bias"_a = 0, nb::kw_only(), "has_silu"_a,
          "Describe a convolution.\n\n"
          "Args:\n"
          "    n_channels: channels.\n"
          "    width: inputs of a sum, at most 8.\n"
          "    weight: address of float32 ``[width, n_channels]``, for the oldest input first.\n"
          "    bias: address of float32 ``[n_channels]``; 0: none.\n"
          "    has_silu: results go through SiLU.\n\n"
          "Raises:\n"
          "    ConfigError: a width that the kernel does not have.")
      .def(
          "run",
          [](const Convolution& of, const StateBatch& batch, uintptr_t states, int64_t n_slots, uintptr_t x,
             int64_t stride, uintptr_t out, uintptr_t times_in, uintptr_t times_out) {
            const ConvolutionCall call{
                {at(x), stride}, at(times_in), at(times_out), batch.states(states, n_slots), at(out)};
            const nb::gil_scoped_release release;
            convolve(of, call, batch.batch, 0);
          },
          "batch"_a, "states"_a, "n_slots"_a, "x"_a, "stride"_a, "out"_a, "times_in"_a = 0, "times_out"_a = 0,
          "Run the batch's tokens; slots that it names as targets are written.\n\n"
          "Args:\n"
          "    batch: tokens and slots.\n"
          "    states: address of float32 ``[n_slots, n_channels, width]``, the last inputs.\n"
          "    n_slots: of them.\n"
          "    x: address of inputs, ``n_channels`` for each token.\n"
          "    stride: numbers from token to token.\n"
          "    out: address of ``[n_tokens, n_channels]``.\n"
          "    times_in: address of factors on inputs, at the same stride; 0: none.\n"
          "    times_out: address of factors on results, at the same stride; 0: none.\n\n"
          "Raises:\n"
          "    ConfigError: fewer slots than the batch names.");
}

void bind_delta(nb::module_& m) {
  nb::class_<DeltaRule>(m, "DeltaRule", "The gated delta rule; ``native/recurrent/recurrent.h`` says what it computes.")
      .def(
          "__init__",
          [](DeltaRule* self, int64_t n_heads, int64_t n_key_heads, int64_t k_dim, int64_t v_dim, uintptr_t rates,
             uintptr_t shifts, int64_t n_decays, float beta_scale) {
            if (n_key_heads < 1 || n_heads % n_key_heads) throw ConfigError("value heads are a multiple of key heads");
            if (k_dim < 1 || k_dim > kMostInner)
              throw ConfigError("keys have 1 to " + std::to_string(kMostInner) + " numbers, got " +
                                std::to_string(k_dim));
            if (n_decays != 1 && n_decays != k_dim) throw ConfigError("a head has one decay, or one for each key");
            new (self) DeltaRule{
                n_heads,   n_key_heads, k_dim, v_dim, n_decays, at<const float>(rates), at<const float>(shifts),
                beta_scale};
          },
          "n_heads"_a, "n_key_heads"_a, "k_dim"_a, "v_dim"_a, "rates"_a, "shifts"_a, nb::kw_only(), "n_decays"_a,
          "beta_scale"_a,
          "Describe a layer.\n\n"
          "Args:\n"
          "    n_heads: of values.\n"
          "    n_key_heads: of queries and keys; each serves as many value heads that follow each other.\n"
          "    k_dim: numbers of a key, at most 512.\n"
          "    v_dim: numbers of a value.\n"
          "    rates: address of float32 ``[n_heads]``.\n"
          "    shifts: address of float32 ``[n_heads, n_decays]``.\n"
          "    n_decays: of each head: 1, or ``k_dim``.\n"
          "    beta_scale: factor on what is written.\n\n"
          "Raises:\n"
          "    ConfigError: heads or sizes that the kernel does not have.")
      .def(
          "run",
          [](const DeltaRule& of, const StateBatch& batch, uintptr_t states, int64_t n_slots, uintptr_t q, uintptr_t k,
             uintptr_t v, int64_t stride, uintptr_t a, int64_t a_stride, uintptr_t b, int64_t b_stride, uintptr_t out) {
            const DeltaCall call{{at(q), stride},
                                 {at(k), stride},
                                 {at(v), stride},
                                 {at(a), a_stride},
                                 {at(b), b_stride},
                                 batch.states(states, n_slots),
                                 at(out)};
            const nb::gil_scoped_release release;
            delta(of, call, batch.batch, 0);
          },
          "batch"_a, "states"_a, "n_slots"_a, "q"_a, "k"_a, "v"_a, "stride"_a, "a"_a, "a_stride"_a, "b"_a, "b_stride"_a,
          "out"_a,
          "Run the batch's tokens; slots that it names as targets are written.\n\n"
          "Args:\n"
          "    batch: tokens and slots.\n"
          "    states: address of float32 ``[n_slots, n_heads, k_dim, v_dim]``.\n"
          "    n_slots: of them.\n"
          "    q: address of queries, ``[n_key_heads, k_dim]`` for each token.\n"
          "    k: address of keys.\n"
          "    v: address of values, ``[n_heads, v_dim]``.\n"
          "    stride: numbers from token to token, of all three.\n"
          "    a: address of what decays are made of, ``[n_heads, n_decays]``.\n"
          "    a_stride: numbers from token to token.\n"
          "    b: address of what beta is made of, ``[n_heads]``.\n"
          "    b_stride: numbers from token to token.\n"
          "    out: address of ``[n_tokens, n_heads, v_dim]``.\n\n"
          "Raises:\n"
          "    ConfigError: fewer slots than the batch names.");
}

void bind_scan(nb::module_& m) {
  nb::class_<Scan>(m, "Scan", "The state update of Mamba 2; ``native/recurrent/recurrent.h`` says what it computes.")
      .def(
          "__init__",
          [](Scan* self, int64_t n_heads, int64_t n_groups, int64_t head_dim, int64_t state_dim, uintptr_t rates,
             uintptr_t shifts, uintptr_t skips) {
            if (n_groups < 1 || n_heads % n_groups) throw ConfigError("heads are a multiple of groups");
            if (state_dim < 1 || state_dim > kMostInner)
              throw ConfigError("states have 1 to " + std::to_string(kMostInner) + " numbers, got " +
                                std::to_string(state_dim));
            new (self) Scan{n_heads,
                            n_groups,
                            head_dim,
                            state_dim,
                            at<const float>(rates),
                            at<const float>(shifts),
                            at<const float>(skips)};
          },
          "n_heads"_a, "n_groups"_a, "head_dim"_a, "state_dim"_a, "rates"_a, "shifts"_a, "skips"_a,
          "Describe a layer.\n\n"
          "Args:\n"
          "    n_heads: heads.\n"
          "    n_groups: of heads that follow each other and share B and C.\n"
          "    head_dim: numbers of a head.\n"
          "    state_dim: numbers of B and C, at most 512.\n"
          "    rates: address of float32 ``[n_heads]``.\n"
          "    shifts: address of float32 ``[n_heads]``, rounded as rows are.\n"
          "    skips: address of float32 ``[n_heads]``.\n\n"
          "Raises:\n"
          "    ConfigError: heads or sizes that the kernel does not have.")
      .def(
          "run",
          [](const Scan& of, const StateBatch& batch, uintptr_t states, int64_t n_slots, uintptr_t x, uintptr_t b,
             uintptr_t c, int64_t stride, uintptr_t dt, int64_t dt_stride, uintptr_t out) {
            const ScanCall call{
                {at(x), stride}, {at(b), stride}, {at(c), stride}, {at(dt), dt_stride}, batch.states(states, n_slots),
                at(out)};
            const nb::gil_scoped_release release;
            scan(of, call, batch.batch, 0);
          },
          "batch"_a, "states"_a, "n_slots"_a, "x"_a, "b"_a, "c"_a, "stride"_a, "dt"_a, "dt_stride"_a, "out"_a,
          "Run the batch's tokens; slots that it names as targets are written.\n\n"
          "Args:\n"
          "    batch: tokens and slots.\n"
          "    states: address of float32 ``[n_slots, n_heads, head_dim, state_dim]``.\n"
          "    n_slots: of them.\n"
          "    x: address of inputs, ``[n_heads, head_dim]`` for each token.\n"
          "    b: address of ``[n_groups, state_dim]`` for each token.\n"
          "    c: address of as many.\n"
          "    stride: numbers from token to token, of all three.\n"
          "    dt: address of what steps are made of, ``[n_heads]``.\n"
          "    dt_stride: numbers from token to token.\n"
          "    out: address of ``[n_tokens, n_heads, head_dim]``.\n\n"
          "Raises:\n"
          "    ConfigError: fewer slots than the batch names.");
}

void bind_gated_norm(nb::module_& m) {
  nb::class_<GatedNorm>(m, "GatedNorm", "RMSNorm of groups of numbers, with a gate before it or behind.")
      .def(
          "__init__",
          [](GatedNorm* self, int64_t dim, int64_t group, uintptr_t weight, int64_t n_weights, float eps,
             bool gates_first, bool is_sigmoid, bool rounds) {
            if (group < 1 || dim % group || (weight && (n_weights < group || dim % n_weights)))
              throw ConfigError("groups divide what is normalised, and weights cover whole groups");
            new (self) GatedNorm{dim, group, at<const float>(weight), n_weights, eps, gates_first, is_sigmoid, rounds};
          },
          "dim"_a, "group"_a, "weight"_a, "n_weights"_a, nb::kw_only(), "eps"_a, "gates_first"_a, "is_sigmoid"_a,
          "rounds"_a,
          "Describe a norm.\n\n"
          "Args:\n"
          "    dim: numbers of a token.\n"
          "    group: numbers that are normalised together.\n"
          "    weight: address of float32 ``[n_weights]``; 0: there is a gate alone.\n"
          "    n_weights: ``group``, or ``dim``.\n"
          "    eps: what is added to the mean of squares.\n"
          "    gates_first: the gate comes before the norm.\n"
          "    is_sigmoid: the gate is a sigmoid, and else SiLU.\n"
          "    rounds: what is normalised is rounded to the type of the rows, and so is its product with the\n"
          "        weight.\n\n"
          "Raises:\n"
          "    ConfigError: groups that do not fit.")
      .def(
          "run",
          [](const GatedNorm& of, int64_t n_tokens, Dtype dtype, uintptr_t x, uintptr_t gates, int64_t stride,
             uintptr_t out) {
            const nb::gil_scoped_release release;
            gated_norm(of, at(x), {at(gates), stride}, n_tokens, dtype, at(out), 0);
          },
          "n_tokens"_a, "dtype"_a, "x"_a, "gates"_a, "stride"_a, "out"_a,
          "Run tokens ``[n_tokens, dim]``; gates lie ``stride`` numbers apart. x itself may be the result.");
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  nb::class_<StateBatch>(m, "StateBatch", "Tokens of one forward, and the slots that they read and write.")
      .def(nb::init<int64_t, Dtype, const std::vector<AdvanceTuple>&>(), "n_tokens"_a, "dtype"_a, "advances"_a,
           "Take a plan's advances: first token, number of tokens, and slots; from slot -1 come zeros.\n\n"
           "Raises:\n"
           "    ConfigError: rows of another type, or an advance beyond the batch.")
      .def_ro("n_slots", &StateBatch::n_slots, "Slots that a pool needs.");
  bind_convolution(m);
  bind_delta(m);
  bind_scan(m);
  bind_gated_norm(m);
}

}  // namespace kvcellar
