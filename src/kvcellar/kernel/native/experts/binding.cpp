// Mixtures of experts, for Python.

#include "experts/experts.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "core/binding.h"
#include "core/pool.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {

namespace {

ExpertGroups groups_of(const std::tuple<int64_t, int64_t, int64_t>& said, int64_t n_experts, int64_t n_chosen) {
  const auto [n_groups, n_kept, n_best] = said;
  const bool is_said = n_groups >= 1 && n_kept >= 1 && n_best >= 1 && n_kept <= n_groups;
  if (!is_said || n_experts % n_groups || n_best > n_experts / n_groups)
    throw ConfigError(
        "groups of experts are of one size, some of them are kept, and each has as many as make its score");
  if (n_chosen > n_kept * (n_experts / n_groups))
    throw ConfigError("the groups that are kept have the experts of a token");
  return {n_groups, n_kept, n_best};
}

void bind_mixture(nb::module_& m) {
  nb::class_<Router>(m, "Router", "By what the tokens of a mixture choose; ``native/experts/experts.h`` says more.")
      .def(
          "__init__",
          [](Router* self, const LinearWeights& weights, int64_t n_chosen, bool is_sigmoid, bool is_normalised,
             float scale, uintptr_t bias, uintptr_t extra, bool rounds_logits, bool rounds_shares,
             const std::tuple<int64_t, int64_t, int64_t>& groups, uintptr_t factors) {
            if (n_chosen < 1 || n_chosen > weights.n_out) throw ConfigError("a token chooses among all experts");
            new (self) Router{weights,
                              at(bias),
                              at<const float>(extra),
                              n_chosen,
                              is_sigmoid,
                              is_normalised,
                              scale,
                              rounds_logits,
                              rounds_shares,
                              groups_of(groups, weights.n_out, n_chosen),
                              at<const float>(factors)};
          },
          "weights"_a, "n_chosen"_a, nb::kw_only(), "is_sigmoid"_a, "is_normalised"_a, "scale"_a, "bias"_a, "extra"_a,
          "rounds_logits"_a, "rounds_shares"_a, "groups"_a = std::make_tuple(1, 1, 1), "factors"_a = 0,
          "Describe a router.\n\n"
          "Args:\n"
          "    weights: plain, from hidden states to a logit for each expert.\n"
          "    n_chosen: experts of a token, those with the highest scores.\n"
          "    is_sigmoid: scores are each logit's sigmoid, and else the softmax of all.\n"
          "    is_normalised: shares are divided by their sum.\n"
          "    scale: factor on shares.\n"
          "    bias: address of what is added to logits, in the type of the rows; 0: none.\n"
          "    extra: address of float32 that is added to scores only to choose; 0: none.\n"
          "    rounds_logits: logits are rounded to the type of the rows.\n"
          "    rounds_shares: shares are.\n"
          "    groups: into how many the experts are divided, among how many of them a token chooses, and how many\n"
          "        of a group's highest scores are summed to say which.\n"
          "    factors: address of float32 ``[n_experts]``, on each one's shares; 0: none.\n\n"
          "Raises:\n"
          "    ConfigError: no experts are chosen, or more than there are; or groups do not divide them.")
      .def(
          "choose",
          [](const Router& router, uintptr_t x, int64_t n_tokens, Dtype dtype, uintptr_t experts, uintptr_t shares) {
            const nb::gil_scoped_release release;
            choose(router, at(x), n_tokens, dtype, at<int64_t>(experts), at<float>(shares), 0);
          },
          "x"_a, "n_tokens"_a, "dtype"_a, "experts"_a, "shares"_a,
          "Choose for each token; experts int64 and shares float32 ``[n_tokens, n_chosen]``.");

  nb::class_<Mixture>(m, "Mixture", "A router and its experts, for one call per layer.")
      .def(
          "__init__",
          [](Mixture* self, const Router& router, const Experts& experts) { new (self) Mixture{router, experts}; },
          "router"_a, "experts"_a)
      .def(
          "run",
          [](const Mixture& mixture, uintptr_t x, int64_t n_tokens, Dtype dtype, uintptr_t out) {
            const nb::gil_scoped_release release;
            run_mixture(mixture, at(x), at(x), n_tokens, dtype, at(out), 0);
          },
          "x"_a, "n_tokens"_a, "dtype"_a, "out"_a, "Run tokens, ``[n_tokens, hidden]`` to as many.");
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<ExpertLayer>(m, "ExpertLayer", "A linear layer of each expert of a mixture, one behind the other.")
      .def(
          "__init__",
          [](ExpertLayer* self, const LinearWeights& weights, int64_t n_experts, uintptr_t bias) {
            new (self) ExpertLayer{weights, n_experts, at(bias)};
          },
          "weights"_a, "n_experts"_a, "bias"_a = 0,
          "Describe the layer.\n\n"
          "Args:\n"
          "    weights: of the first expert. The next one's begin where its last block of 16 outputs\n"
          "        ends, of bf16 its last output; its scales likewise. Escapes are all experts'.\n"
          "    n_experts: how many.\n"
          "    bias: address of ``[n_experts, n_out]`` in the type of the rows; 0: none.")
      .def(
          "linear",
          [](const ExpertLayer& layer, uintptr_t x, int64_t n_rows, uintptr_t experts, int64_t n_each, Dtype dtype,
             uintptr_t out) {
            const nb::gil_scoped_release release;
            run_expert_layer(layer, at(x), n_rows, at<const int64_t>(experts), n_each, dtype, at(out), 0);
          },
          "x"_a, "n_rows"_a, "experts"_a, "n_each"_a, "dtype"_a, "out"_a,
          "Multiply each row by the experts that it chose; each expert is read once for all.\n\n"
          "Args:\n"
          "    x: address of ``[n_rows, n_in]``.\n"
          "    n_rows: rows.\n"
          "    experts: address of int64 ``[n_rows, n_each]``; for one that is not there: zeros.\n"
          "    n_each: experts of a row.\n"
          "    dtype: float32 or bfloat16, of rows and results.\n"
          "    out: address of ``[n_rows, n_each, n_out]``.");

  nb::class_<Gate>(m, "Gate", "What a mixture computes between its layers; ``native/layers/rows.h`` says more.")
      .def(
          "__init__",
          [](Gate* self, float alpha, float cubic, float shift, float limit) {
            new (self) Gate{alpha, cubic, shift, limit};
          },
          "alpha"_a = 1.f, "cubic"_a = 0.f, "shift"_a = 0.f, "limit"_a = 0.f,
          "Describe ``(up + shift) * x * sigmoid(x * (alpha + cubic * x^2))``.\n\n"
          "Args:\n"
          "    alpha: 1 is SiLU.\n"
          "    cubic: of GELU in its form with tanh, positive.\n"
          "    shift: what is added to up.\n"
          "    limit: most of the gate, which is x, and of up's magnitude; 0: none.");

  nb::class_<Experts>(m, "Experts", "All experts of a mixture, for one call per layer.")
      .def(
          "__init__",
          [](Experts* self, const ExpertLayer& up, const ExpertLayer& down, const Gate& gate) {
            new (self) Experts{up, down, gate};
          },
          "up"_a, "down"_a, "gate"_a,
          "Describe a mixture.\n\n"
          "Args:\n"
          "    up: gate and up joined.\n"
          "    down: the last one.\n"
          "    gate: between them.")
      .def(
          "run",
          [](const Experts& experts, uintptr_t x, int64_t n_tokens, uintptr_t chosen, uintptr_t shares,
             int64_t n_chosen, Dtype dtype, uintptr_t out) {
            const nb::gil_scoped_release release;
            const Choice choice{at<const int64_t>(chosen), at<const float>(shares), n_tokens, n_chosen};
            run_experts(experts, at(x), choice, dtype, at(out), 0);
          },
          "x"_a, "n_tokens"_a, "chosen"_a, "shares"_a, "n_chosen"_a, "dtype"_a, "out"_a,
          "Sum what the experts that each token chose make of it, times their shares.\n\n"
          "Args:\n"
          "    x: address of ``[n_tokens, hidden]``.\n"
          "    n_tokens: tokens.\n"
          "    chosen: address of int64 ``[n_tokens, n_chosen]``; one that is not there adds nothing.\n"
          "    shares: address of float32 ``[n_tokens, n_chosen]``.\n"
          "    n_chosen: experts of a token.\n"
          "    dtype: float32 or bfloat16, of x and out.\n"
          "    out: address of ``[n_tokens, hidden]``.");
  bind_mixture(m);

  m.def(
      "expert_counts",
      [] {
        const ExpertCounts found = expert_counts();
        return nb::make_tuple(found.read_bytes, found.chosen_bytes);
      },
      nb::sig("def expert_counts() -> tuple[int, int]"),
      "Return what products with experts have read since the process began.\n\n"
      "Returns:\n"
      "    Bytes of weights that were read, what is read again for more rows counting again; and\n"
      "    bytes of those experts of each product that some row chose, each once.");
}

}  // namespace kvcellar
