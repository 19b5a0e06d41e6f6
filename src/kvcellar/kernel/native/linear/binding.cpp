// Linear layers for Python.

#include <nanobind/nanobind.h>

#include "core/binding.h"
#include "linear/blocks.h"
#include "linear/fitting.h"
#include "linear/linear.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {

namespace {

LinearWeights describe_blocks(BlockType type, int64_t n_in, int64_t n_out, uintptr_t data, uintptr_t beside) {
  return make_block_weights(type, n_in, n_out, at(data), at(beside));
}

// Affine weights, of what there are.
LinearWeights describe_affine(int64_t bits, int64_t group, int64_t n_in, int64_t n_out, uintptr_t data,
                              uintptr_t beside) {
  if ((bits != 4 && bits != 8) || group < kGroupInputs || group % kGroupInputs || n_in % group)
    throw ConfigError("affine weights have 4 or 8 bits, groups of a multiple of 32 inputs, and whole groups");
  return make_affine_weights(bits, group, n_in, n_out, at(data), at(beside));
}

}  // namespace

void bind_linear(nb::module_& m) {
  nb::enum_<WeightFormat>(m, "WeightFormat", "How weights are written; ``native/linear/linear.h`` says how they lie.")
      .value("bf16", WeightFormat::bf16)
      .value("int8", WeightFormat::int8)
      .value("int4", WeightFormat::int4)
      .value("coded", WeightFormat::coded)
      .value("mxfp4", WeightFormat::mxfp4)
      .value("f32", WeightFormat::f32);  // grouped ones are described by block_weights

  nb::enum_<BlockType>(m, "BlockType", "Types of blocks of GGUF files.")
      .value("q4_0", BlockType::q4_0)
      .value("q4_1", BlockType::q4_1)
      .value("q5_0", BlockType::q5_0)
      .value("q5_1", BlockType::q5_1)
      .value("q8_0", BlockType::q8_0)
      .value("q4_k", BlockType::q4_k)
      .value("q5_k", BlockType::q5_k)
      .value("q6_k", BlockType::q6_k)
      .value("iq4_nl", BlockType::iq4_nl)
      .value("iq4_xs", BlockType::iq4_xs)
      .value("mxfp4", BlockType::mxfp4)
      .value("f16", BlockType::f16)
      .value("bf16", BlockType::bf16);

  nb::class_<LinearWeights>(m, "LinearWeights", "Weights of a linear layer. Inputs and outputs are addresses.")
      .def(
          "__init__",
          [](LinearWeights* self, WeightFormat format, int64_t n_in, int64_t n_out, uintptr_t data, uintptr_t beside) {
            new (self) LinearWeights(make_linear_weights(format, n_in, n_out, at(data), at(beside)));
          },
          "format"_a, "n_in"_a, "n_out"_a, "data"_a, "beside"_a = 0,
          "Describe the weights.\n\n"
          "Args:\n"
          "    format: how they are written.\n"
          "    n_in: inputs, of int8, int4 and mxfp4 a multiple of 32.\n"
          "    n_out: outputs.\n"
          "    data: address of the weights.\n"
          "    beside: address of the float16 scales of int8 and int4, the exponents of mxfp4, or\n"
          "        what :func:`code` returned.")
      .def(
          "linear",
          [](const LinearWeights& weights, uintptr_t x, int64_t n_tokens, Dtype dtype, uintptr_t out, Dtype out_dtype) {
            const nb::gil_scoped_release release;
            linear({weights, at(x), at(out), n_tokens, dtype, out_dtype}, 0);
          },
          "x"_a, "n_tokens"_a, "dtype"_a, "out"_a, "out_dtype"_a,
          "Multiply rows ``[n_tokens, n_in]`` to ``[n_tokens, n_out]``, float32 or bfloat16.\n\n"
          "For int8, int4 and mxfp4 each group of 32 inputs is rounded to 8 bits. A token's result\n"
          "does not depend on others.")
      .def_prop_ro("can_multiply", &can_multiply, "True if the level in use has a matrix unit for these weights.")
      .def(
          "multiply",
          [](const LinearWeights& weights, uintptr_t x, int64_t n_tokens, uintptr_t out) {
            const nb::gil_scoped_release release;
            multiply(weights, at(x), n_tokens, at(out), 0);
          },
          "x"_a, "n_tokens"_a, "out"_a,
          "Multiply many tokens on the matrix unit, all in bfloat16; weights are rounded to it.")
      .def(
          "unpack",
          [](const LinearWeights& weights, int64_t first, int64_t stop, uintptr_t to) {
            const nb::gil_scoped_release release;
            unpack(weights, first, stop, at(to), 0);
          },
          "first"_a, "stop"_a, "to"_a,
          "Write blocks [first, stop) of 16 outputs as bfloat16 ``[outputs, n_in]``; not of bf16.")
      .def(
          "gather",
          [](const LinearWeights& weights, uintptr_t outputs, int64_t n, Dtype dtype, uintptr_t to) {
            const nb::gil_scoped_release release;
            gather(weights, at<const int64_t>(outputs), n, dtype, at(to), 0);
          },
          "outputs"_a, "n"_a, "dtype"_a, "to"_a,
          "Write the weights of n outputs, int64, as ``[n, n_in]``.\n\n"
          "In bfloat16, all but coded ones also in float32. The outputs have to be there.");

  m.def(
      "pack",
      [](uintptr_t rows, Dtype dtype, WeightFormat format, int64_t n_in, int64_t n_out, uintptr_t data,
         uintptr_t scales) {
        const nb::gil_scoped_release release;
        pack({make_linear_weights(format, n_in, n_out, nullptr, nullptr), at(rows), dtype, at<uint8_t>(data),
              at<uint16_t>(scales)},
             0);
      },
      "rows"_a, "dtype"_a, "format"_a, "n_in"_a, "n_out"_a, "data"_a, "scales"_a,
      "Write weights in int8 or int4 and their float16 scales.\n\n"
      "Symmetric around 0, with a scale for each 128 inputs, or of int4 32: of int8 the largest\n"
      "magnitude is 127 steps, of int4 the number of the largest magnitude is -8 of them. Where\n"
      "not all that share a scale are finite it is NaN.\n\n"
      "Args:\n"
      "    rows: address of ``[n_out, n_in]``.\n"
      "    dtype: of them, float32 or bfloat16.\n"
      "    format: int8 or int4.\n"
      "    n_in: inputs, a multiple of 32.\n"
      "    n_out: outputs.\n"
      "    data: address of as many bytes as blocks of 16 outputs take.\n"
      "    scales: address of float16 ``[n_blocks, n_scales, 16]``.");

  m.def("block_weights", &describe_blocks, "type"_a, "n_in"_a, "n_out"_a, "data"_a, "beside"_a,
        "Describe weights that :func:`place_blocks` has placed; addresses as it takes them.");

  m.def(
      "block_sizes",
      [](BlockType type, int64_t n_in, int64_t n_out) {
        const LinearWeights weights = make_block_weights(type, n_in, n_out, nullptr, nullptr);
        return nb::make_tuple(n_out * (n_in / inputs_of(type)) * bytes_of(type), data_bytes_of(weights),
                              beside_bytes_of(weights));
      },
      "type"_a, "n_in"_a, "n_out"_a,
      nb::sig("def block_sizes(type: BlockType, n_in: int, n_out: int) -> tuple[int, int, int]"),
      "Return how many bytes weights take in a file, and as numbers and beside them here.");

  m.def(
      "place_blocks",
      [](BlockType type, uintptr_t rows, int64_t n_in, int64_t n_out, uintptr_t data, uintptr_t beside) {
        const nb::gil_scoped_release release;
        place_blocks(type, at<const uint8_t>(rows), make_block_weights(type, n_in, n_out, nullptr, nullptr),
                     at<uint8_t>(data), at<uint8_t>(beside), 0);
      },
      "type"_a, "rows"_a, "n_in"_a, "n_out"_a, "data"_a, "beside"_a,
      "Put blocks of a GGUF file where products take them; nothing is lost.\n\n"
      "Args:\n"
      "    type: of the blocks.\n"
      "    rows: address of them, one output's after the other's.\n"
      "    n_in: inputs, a multiple of a block's.\n"
      "    n_out: outputs.\n"
      "    data: address of as many bytes as :func:`block_sizes` says, for the numbers.\n"
      "    beside: address of those for scales and minima.");

  m.def("affine_weights", &describe_affine, "bits"_a, "group"_a, "n_in"_a, "n_out"_a, "data"_a, "beside"_a,
        "Describe weights that :func:`place_affine` has placed; addresses as it takes them.\n\n"
        "Raises:\n"
        "    ConfigError: not 4 or 8 bits, groups of no multiple of 32 inputs, or not whole groups.");

  m.def(
      "affine_sizes",
      [](int64_t bits, int64_t group, int64_t n_in, int64_t n_out) {
        const LinearWeights weights = describe_affine(bits, group, n_in, n_out, 0, 0);
        return nb::make_tuple(weights.n_blocks * weights.block_bytes, beside_bytes_of(weights));
      },
      "bits"_a, "group"_a, "n_in"_a, "n_out"_a,
      nb::sig("def affine_sizes(bits: int, group: int, n_in: int, n_out: int) -> tuple[int, int]"),
      "Return how many bytes affine weights take as numbers and beside them.\n\n"
      "Raises:\n"
      "    ConfigError: as of :func:`affine_weights`.");

  m.def(
      "place_affine",
      [](int64_t bits, int64_t group, uintptr_t numbers, uintptr_t scales, uintptr_t minima, int64_t n_in,
         int64_t n_out, uintptr_t data, uintptr_t beside) {
        const LinearWeights weights = describe_affine(bits, group, n_in, n_out, 0, 0);
        const nb::gil_scoped_release release;
        place_affine({at<const uint8_t>(numbers), at<const float>(scales), at<const float>(minima)}, weights,
                     at<uint8_t>(data), at<uint8_t>(beside), 0);
      },
      "bits"_a, "group"_a, "numbers"_a, "scales"_a, "minima"_a, "n_in"_a, "n_out"_a, "data"_a, "beside"_a,
      "Put affine weights, ``scale * number + minimum``, where products take them; nothing is lost.\n\n"
      "Args:\n"
      "    bits: of a number, 4 or 8.\n"
      "    group: inputs that share a scale and a minimum, a multiple of 32.\n"
      "    numbers: address of uint8 ``[n_out, n_in]``, each of so many bits.\n"
      "    scales: address of float32 ``[n_out, n_in / group]``.\n"
      "    minima: address of as many.\n"
      "    n_in: inputs, a multiple of the group.\n"
      "    n_out: outputs.\n"
      "    data: address of as many bytes as :func:`affine_sizes` says, for the numbers.\n"
      "    beside: address of those for scales and minima.\n\n"
      "Raises:\n"
      "    ConfigError: as of :func:`affine_weights`.");

  m.def(
      "fit_q4_k",
      [](uintptr_t rows, Dtype dtype, int64_t n_in, int64_t n_out, uintptr_t to) {
        const nb::gil_scoped_release release;
        fit_q4_k(at(rows), dtype, n_in, n_out, at<uint8_t>(to), 0);
      },
      "rows"_a, "dtype"_a, "n_in"_a, "n_out"_a, "to"_a,
      "Make weights blocks of Q4_K, for :func:`place_blocks`; scales and minima are searched.\n\n"
      "The same bytes come out on every machine. Of weights that are not all finite a block's\n"
      "are NaN.\n\n"
      "Args:\n"
      "    rows: address of ``[n_out, n_in]``.\n"
      "    dtype: of them, float32 or bfloat16.\n"
      "    n_in: inputs, a multiple of 256.\n"
      "    n_out: outputs.\n"
      "    to: address of ``[n_out, n_in / 256, 144]`` bytes.");

  m.def(
      "place_mxfp4",
      [](uintptr_t blocks, uintptr_t exponents, int64_t n_in, int64_t n_out, uintptr_t data, uintptr_t to) {
        const nb::gil_scoped_release release;
        place_mxfp4(at<const uint8_t>(blocks), at<const uint8_t>(exponents), n_in, n_out, at<uint8_t>(data),
                    at<uint8_t>(to), 0);
      },
      "blocks"_a, "exponents"_a, "n_in"_a, "n_out"_a, "data"_a, "to"_a,
      "Put weights of MXFP4, as checkpoints have them, where products take them; nothing is lost.\n\n"
      "Args:\n"
      "    blocks: address of ``[n_out, n_in / 32, 16]`` bytes, the first input in a lower half.\n"
      "    exponents: address of ``[n_out, n_in / 32]`` bytes, 127 for a scale of 1.\n"
      "    n_in: inputs, a multiple of 32.\n"
      "    n_out: outputs.\n"
      "    data: address of as many bytes as blocks of 16 outputs take.\n"
      "    to: address of the exponents ``[n_blocks, n_in / 32, 16]``.");

  m.def(
      "code",
      [](uintptr_t rows, int64_t n_in, int64_t n_out, uintptr_t to, int64_t n_before) {
        std::vector<Escape> escapes;
        {
          const nb::gil_scoped_release release;
          escapes = code(at<const uint16_t>(rows), n_in, n_out, at(to), n_before, 0);
        }
        return nb::bytes(escapes.data(), escapes.size() * sizeof(Escape));
      },
      "rows"_a, "n_in"_a, "n_out"_a, "to"_a, "n_before"_a = 0,
      "Write bfloat16 weights in 12 bits, of which nothing is lost.\n\n"
      "Args:\n"
      "    rows: address of ``[n_out, n_in]``.\n"
      "    n_in: inputs, a multiple of 128.\n"
      "    n_out: outputs.\n"
      "    to: address of as many bytes as ``models.weights.coded_bytes`` says.\n"
      "    n_before: such numbers of other weights, after which this one's will be put.\n\n"
      "Returns:\n"
      "    The numbers that do not fit into 12 bits, 8 bytes each.");
}

}  // namespace kvcellar
