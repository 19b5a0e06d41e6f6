// Blocks of GGUF files: what each type's bytes are. Affine weights.

#include "linear/blocks.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"

namespace kvcellar {
namespace {

struct Form {
  int64_t inputs, bytes;
  WeightFormat format;
  Steps steps;
  int32_t zero;
};

const Form& form_of(BlockType type) {
  using F = WeightFormat;
  static constexpr Form kForms[] = {
      {32, 18, F::nibbles, Steps::halves, 8},       // q4_0
      {32, 20, F::nibbles, Steps::pairs, 0},        // q4_1
      {32, 22, F::bytes, Steps::halves, 16},        // q5_0
      {32, 24, F::bytes, Steps::pairs, 0},          // q5_1
      {32, 34, F::bytes, Steps::halves, 128},       // q8_0
      {256, 144, F::nibbles, Steps::counts, 0},     // q4_k
      {256, 176, F::bytes, Steps::counts, 0},       // q5_k
      {256, 210, F::fine_bytes, Steps::signs, 32},  // q6_k
      {32, 18, F::looked_up, Steps::halves, 128},   // iq4_nl
      {256, 136, F::looked_up, Steps::signs, 128},  // iq4_xs
      {32, 17, F::mxfp4, Steps::none, 12},          // mxfp4
      {1, 2, F::f16, Steps::none, 0},               // f16
      {1, 2, F::bf16, Steps::none, 0},              // bf16
  };
  return kForms[static_cast<int32_t>(type)];
}

// 32 numbers, of 16 bytes: the first half's in lower halves.
void read_halves(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    to[i] = from[i] & 15;
    to[16 + i] = from[i] >> 4;
  }
}

// Their fifth bits, 32 in a word.
void add_fifth(const uint8_t* from, uint8_t* to) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int i = 0; i < 32; ++i) to[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// Of a block of the larger types the g-th 32 numbers.
void read_k(BlockType type, const uint8_t* block, int g, uint8_t* to) {
  if (type == BlockType::q6_k) {
    const uint8_t *low = block + 64 * (g / 4) + 32 * (g % 2), *high = block + 128 + 32 * (g / 4);
    const int shift = g % 4 < 2 ? 0 : 4, shift_high = 2 * (g % 4);
    for (int i = 0; i < 32; ++i)
      to[i] = static_cast<uint8_t>((low[i] >> shift & 15) | (high[i] >> shift_high & 3) << 4);
    return;
  }
  const bool is_q5 = type == BlockType::q5_k;
  const uint8_t* low = block + (is_q5 ? 48 : 16) + 32 * (g / 2);
  const int shift = 4 * (g % 2);
  for (int i = 0; i < 32; ++i) to[i] = low[i] >> shift & 15;
  if (is_q5)
    for (int i = 0; i < 32; ++i) to[i] |= static_cast<uint8_t>((block[16 + i] >> g & 1) << 4);
}

// The g-th 32 numbers of a block.
void read_numbers(BlockType type, const uint8_t* block, int g, uint8_t* to) {
  switch (type) {
    case BlockType::q4_0:
    case BlockType::iq4_nl: return read_halves(block + 2, to);
    case BlockType::q4_1: return read_halves(block + 4, to);
    case BlockType::mxfp4: return read_halves(block + 1, to);
    case BlockType::iq4_xs: return read_halves(block + 8 + 16 * g, to);
    case BlockType::q5_0: read_halves(block + 6, to); return add_fifth(block + 2, to);
    case BlockType::q5_1: read_halves(block + 8, to); return add_fifth(block + 4, to);
    case BlockType::q8_0:
      for (int i = 0; i < 32; ++i) to[i] = static_cast<uint8_t>(block[2 + i] + 128);
      return;
    default: return read_k(type, block, g, to);
  }
}

// A group's scale and minimum of 6 bits each, of 12 bytes for 8 groups.
void read_counts(const uint8_t* from, int g, uint8_t& scale, uint8_t& least) {
  if (g < 4) {
    scale = from[g] & 63;
    least = from[4 + g] & 63;
  } else {
    scale = static_cast<uint8_t>((from[4 + g] & 15) | (from[g - 4] >> 2 & 48));
    least = static_cast<uint8_t>(from[4 + g] >> 4 | (from[g] >> 2 & 48));
  }
}

// What stands beside a block's numbers, of the r-th of 16 outputs.
void place_steps(BlockType type, Steps steps, const uint8_t* block, int64_t at, int64_t r, uint8_t* beside) {
  if (type == BlockType::mxfp4) {
    beside[at * kBlockRows + r] = block[0];
  } else if (steps == Steps::halves) {
    std::memcpy(beside + at * 2 * kBlockRows + 2 * r, block, 2);
  } else if (steps == Steps::pairs) {
    std::memcpy(beside + at * 4 * kBlockRows + 2 * r, block, 2);
    std::memcpy(beside + (at * 4 + 2) * kBlockRows + 2 * r, block + 2, 2);
  } else if (steps == Steps::counts) {
    uint8_t* to = beside + at * 20 * kBlockRows;
    std::memcpy(to + 2 * r, block, 2);
    std::memcpy(to + 2 * kBlockRows + 2 * r, block + 2, 2);
    for (int g = 0; g < 8; ++g) {
      uint8_t* counts = to + (4 + 2 * g) * kBlockRows + r;
      read_counts(block + 4, g, counts[0], counts[kBlockRows]);
    }
  } else if (type == BlockType::q6_k) {
    uint8_t* to = beside + at * 18 * kBlockRows;
    std::memcpy(to + 2 * r, block + 208, 2);
    for (int g = 0; g < 16; ++g) to[(2 + g) * kBlockRows + r] = static_cast<uint8_t>(block[192 + g] + 128);
  } else {
    uint8_t* to = beside + at * 10 * kBlockRows;
    std::memcpy(to + 2 * r, block, 2);
    for (int g = 0; g < 8; ++g) {
      const int low = block[4 + g / 2] >> (4 * (g % 2)) & 15, high = block[2 + g / 4] >> (2 * (g % 4)) & 3;
      to[(2 + g) * kBlockRows + r] = static_cast<uint8_t>((low | high << 4) - 32 + 128);
    }
  }
}

// 32 numbers of an output to every 64 bytes.
void place_numbers(const uint8_t* numbers, bool has_halves, uint8_t* to) {
  for (int q = 0; q < 8; q += has_halves ? 2 : 1, to += 64) {
    uint32_t four, more;
    std::memcpy(&four, numbers + 4 * q, 4);
    if (has_halves) {
      std::memcpy(&more, numbers + 4 * q + 4, 4);
      four |= more << 4;
    }
    std::memcpy(to, &four, 4);
  }
}

// Bytes below which one thread places: milliseconds, and where another process has a core, a second thread that
// loses it is waited for far longer.
constexpr int64_t kOfOneThread = 8 << 20;

// place(output, its place among 16, their numbers, what stands beside them) of all outputs; zeros behind the last one.
template <class Place>
void place_rows(const LinearWeights& weights, uint8_t* data, uint8_t* beside, int n_threads, const Place& place) {
  const int64_t of_block = beside_bytes_of(weights) / weights.n_blocks;
  const auto place_block = [&](int64_t block) {
    uint8_t *to = data + block * weights.block_bytes, *beside_to = beside + block * of_block;
    const int64_t first = block * kBlockRows, n_rows = std::min(kBlockRows, weights.n_out - first);
    if (n_rows < kBlockRows) {
      std::memset(to, 0, static_cast<size_t>(weights.block_bytes));
      std::memset(beside_to, 0, static_cast<size_t>(of_block));
    }
    for (int64_t r = 0; r < n_rows; ++r) place(first + r, r, to, beside_to);
  };
  const bool is_small = weights.n_blocks * weights.block_bytes < kOfOneThread;
  spread(weights.n_blocks, 8, 1, is_small ? 1 : workers_for(n_threads), [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) place_block(block);
  });
}

}  // namespace

int64_t inputs_of(BlockType type) { return form_of(type).inputs; }
int64_t bytes_of(BlockType type) { return form_of(type).bytes; }

LinearWeights make_block_weights(BlockType type, int64_t n_in, int64_t n_out, const void* data, const void* beside) {
  const Form& form = form_of(type);
  if (form.steps == Steps::none) return make_linear_weights(form.format, n_in, n_out, data, beside);
  return make_grouped_weights(form.format, form.steps, form.zero, n_in, n_out, data, beside);
}

int64_t data_bytes_of(const LinearWeights& weights) {
  return weights.is_plain ? weights.plain_bytes * weights.n_out * weights.n_in : weights.n_blocks * weights.block_bytes;
}

int64_t beside_bytes_of(const LinearWeights& weights) {
  const int64_t of_block = weights.is_grouped ? weights.beside_bytes : weights.n_scales * kBlockRows;
  return weights.n_blocks * of_block;
}

void place_blocks(BlockType type, const uint8_t* rows, const LinearWeights& weights, uint8_t* data, uint8_t* beside,
                  int n_threads) {
  if (weights.is_plain) {
    std::memcpy(data, rows, static_cast<size_t>(data_bytes_of(weights)));
    return;
  }
  const Form& form = form_of(type);
  const int64_t n_of_row = weights.n_in / form.inputs, n_each = form.inputs / kGroupInputs;
  const int64_t group_bytes = weights.block_bytes / weights.n_groups;
  const bool has_halves = group_bytes == kBlockRows * kGroupInputs / 2;
  place_rows(weights, data, beside, n_threads, [&](int64_t output, int64_t r, uint8_t* to, uint8_t* beside_to) {
    const uint8_t* from = rows + output * n_of_row * form.bytes;
    for (int64_t b = 0; b < n_of_row; ++b, from += form.bytes) {
      place_steps(type, form.steps, from, b, r, beside_to);
      for (int64_t g = 0; g < n_each; ++g, to += group_bytes) {
        uint8_t numbers[kGroupInputs];
        read_numbers(type, from, static_cast<int>(g), numbers);
        place_numbers(numbers, has_halves, to + 4 * r);
      }
    }
  });
}

LinearWeights make_affine_weights(int64_t bits, int64_t group, int64_t n_in, int64_t n_out, const void* data,
                                  const void* beside) {
  const WeightFormat format = bits == 4 ? WeightFormat::nibbles : WeightFormat::bytes;
  return make_grouped_weights(format, Steps::floats, 0, n_in, n_out, data, beside, group / kGroupInputs);
}

void place_affine(const AffineRows& rows, const LinearWeights& weights, uint8_t* data, uint8_t* beside, int n_threads) {
  const int64_t n_in = weights.n_in, n_steps = weights.n_groups / weights.n_together;
  const bool has_halves = weights.format == WeightFormat::nibbles;
  const int64_t group_bytes = weights.block_bytes / weights.n_groups;
  place_rows(weights, data, beside, n_threads, [&](int64_t output, int64_t r, uint8_t* to, uint8_t* beside_to) {
    for (int64_t s = 0; s < n_steps; ++s, beside_to += 8 * kBlockRows) {
      std::memcpy(beside_to + 4 * r, rows.scales + output * n_steps + s, 4);
      std::memcpy(beside_to + 4 * (kBlockRows + r), rows.minima + output * n_steps + s, 4);
    }
    const uint8_t* from = rows.numbers + output * n_in;
    for (int64_t g = 0; g < weights.n_groups; ++g, to += group_bytes, from += kGroupInputs)
      place_numbers(from, has_halves, to + 4 * r);
  });
}

}  // namespace kvcellar
