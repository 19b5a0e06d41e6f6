// Random steps over memory that ends exactly where it should: the sanitisers see every access, and
// each instruction set's results are compared with the portable path's.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "experts/experts.h"
#include "layers/decoder.h"
#include "layers/eagle3.h"
#include "core/levels.h"
#include "linear/blocks.h"
#include "linear/linear.h"
#include "recurrent/recurrent.h"

using namespace kvcellar;

namespace {

std::mt19937_64 rng;

int64_t between(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

template <typename T>
T one_of(std::initializer_list<T> all) {
  return all.begin()[between(0, static_cast<int64_t>(all.size()) - 1)];
}

// Memory of exactly n bytes, at any alignment that rows of such numbers have.
struct Memory {
  explicit Memory(int64_t n) : size(n), data(static_cast<char*>(std::malloc(n ? n : 1))) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  int64_t size;
  char* data;
};

void fill(Memory& memory, Dtype dtype) {
  std::normal_distribution<float> normal;
  if (dtype == Dtype::f32) {
    for (int64_t i = 0; i < memory.size / 4; ++i) {
      const float x = normal(rng);
      std::memcpy(memory.data + 4 * i, &x, 4);
    }
  } else if (dtype == Dtype::bf16 || dtype == Dtype::f16) {
    for (int64_t i = 0; i < memory.size / 2; ++i) {
      const float x = normal(rng);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      const auto bf16 = static_cast<uint16_t>(bits >> 16);
      const auto half = static_cast<uint16_t>(0x3000 + rng() % 0x0C00 + (rng() % 2 << 15));
      std::memcpy(memory.data + 2 * i, dtype == Dtype::bf16 ? &bf16 : &half, 2);
    }
  } else {
    for (int64_t i = 0; i < memory.size; ++i) memory.data[i] = static_cast<char>(rng());
  }
}

struct SideMemory {
  Side side;
  Memory rows, affine;
  std::vector<char> first_rows, first_affine;

  SideMemory(Side from, int64_t n_heads, int64_t n_cells)
      : side(from), rows(n_heads * n_cells * from.packed_bytes()), affine(n_heads * n_cells * from.affine_bytes()) {
    side.data = rows.data;
    side.affine = is_quantised(side.dtype) ? affine.data : nullptr;
    fill(rows, side.dtype);
    for (int64_t i = 0; i < affine.size / 2; ++i) {
      const uint16_t half = static_cast<uint16_t>(i % 2 ? 0xBC00 : 0x2000);  // -1 and 1/128
      std::memcpy(affine.data + 2 * i, &half, 2);
    }
    first_rows.assign(rows.data, rows.data + rows.size);
    first_affine.assign(affine.data, affine.data + affine.size);
  }
  void restore() {
    std::memcpy(rows.data, first_rows.data(), first_rows.size());
    if (affine.size) std::memcpy(affine.data, first_affine.data(), first_affine.size());
  }
};

// `is_long`: of integers in whole chunks.
Side random_side(int64_t n_heads, int64_t n_cells, int64_t block_size, bool is_long) {
  Side side;
  side.dtype = static_cast<Dtype>(between(is_long ? 3 : 0, 4));
  side.dim = is_long ? one_of<int64_t>({64, 128, 192, 256}) : one_of<int64_t>({1, 5, 16, 32, 33, 40, 64, 80, 128, 192});
  side.group_size = side.dim;
  for (const int64_t group : {128, 64, 32})
    if (side.dim % group == 0 && rng() % 2) side.group_size = group;
  const auto strides = [&](int64_t bytes, int64_t& head, int64_t& cell, int64_t& block) {
    cell = bytes;
    head = bytes * (block_size ? block_size : n_cells);
    block = block_size ? head * n_heads : 0;
  };
  strides(side.packed_bytes(), side.head_stride, side.cell_stride, side.block_stride);
  strides(side.affine_bytes(), side.affine_head_stride, side.affine_cell_stride, side.affine_block_stride);
  return side;
}

// The largest difference of any result from the last; NaN where one is.
double farthest(const std::vector<std::vector<float>>& results) {
  double worst = 0;
  for (const auto& result : results)
    for (size_t i = 0; i < result.size(); ++i) {
      const double d = std::fabs(double{result[i]} - results.back()[i]);
      if (std::isnan(d)) return d;
      worst = std::max(worst, d);
    }
  return worst;
}

// The same over the largest number of the last result, if that is above 1.
double worst_apart(const std::vector<std::vector<float>>& results) {
  double most = 1;
  for (const float value : results.back()) most = std::max(most, std::fabs(double{value}));
  return farthest(results) / most;
}

// Adds numbers of 4 or 2 bytes, float32 or bfloat16, to others.
void append(std::vector<float>& to, const char* data, int64_t n, int64_t size) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, data + i * size, static_cast<size_t>(size));
    float value;
    std::memcpy(&value, &bits, 4);
    to.push_back(value);
  }
}

// One random step on every level; returns the largest difference from the last one. `is_long`: over two whole tiles
// of integer rows and more that follow on each other.
double one_step(bool is_long) {
  const int64_t n_kv_heads = between(1, 3), group = one_of<int64_t>({1, 2, 4, 5, 8, 70});
  const int64_t block_size = is_long ? 0 : one_of<int64_t>({0, 0, 4, 16});
  const int64_t n_cells = 16 * (is_long ? between(40, 60) : between(3, 40));
  SideMemory k(random_side(n_kv_heads, n_cells, block_size, is_long), n_kv_heads, n_cells);
  SideMemory v(random_side(n_kv_heads, n_cells, block_size, is_long), n_kv_heads, n_cells);
  // Beside it cells in float32, at the same indices from kExactBase on.
  const auto exact_side = [&](int64_t dim) {
    Side side;
    side.dim = dim;
    side.cell_stride = side.packed_bytes();
    side.head_stride = side.cell_stride * n_cells;
    return side;
  };
  SideMemory exact_k(exact_side(k.side.dim), n_kv_heads, n_cells);
  SideMemory exact_v(exact_side(v.side.dim), n_kv_heads, n_cells);
  const Pool exact{n_kv_heads, n_cells, 0, exact_k.side, exact_v.side, nullptr};
  const Pool pool{n_kv_heads, n_cells, block_size, k.side, v.side, &exact};
  const int64_t n_first = is_long ? 0 : one_of<int64_t>({0, 4, 70});
  const int64_t n_last = is_long ? 0 : one_of<int64_t>({0, 1, 32});

  StepInput input;
  input.n_cells = n_cells;
  const int64_t run = is_long ? n_cells : one_of<int64_t>({1, 4, 16});
  std::vector<int64_t> order(static_cast<size_t>(n_cells / run));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng() % i]);
  const auto cell = [&](int64_t i) { return order[static_cast<size_t>(i / run)] * run + i % run; };
  int64_t at = is_long ? n_cells - between(1, 90) : between(0, n_cells / 2);
  const int64_t trunk = at;
  for (int64_t reads = between(1, 4); reads && at < n_cells; --reads) {
    Read read{};
    const int64_t own = std::min<int64_t>(between(1, 60), n_cells - at);
    read.q_start = input.n_tokens;
    read.q_len = std::min<int64_t>(one_of<int64_t>({1, 1, 3, 40}), own);
    read.first_run = static_cast<int64_t>(input.runs.size());
    for (int64_t i = 0; i < trunk + own; ++i) {
      const bool is_exact = i < n_first || i >= trunk + own - n_last;
      const int64_t index = cell(i < trunk ? i : at + i - trunk);
      if (is_long && i && i != trunk)
        ++input.runs.back().length;
      else
        input.runs.push_back({is_exact ? kExactBase + index : index, 1});
    }
    read.n_runs = static_cast<int64_t>(input.runs.size()) - read.first_run;
    read.kind = static_cast<Kind>(between(0, 2));
    if (read.kind == Kind::explicit_mask) {
      read.n_masked = between(1, trunk + own);
      read.first_mask = static_cast<int64_t>(input.masks.size());
      for (int64_t i = 0; i < read.q_len * read.n_masked; ++i)
        input.masks.push_back(rng() % 2 || i % read.n_masked == read.n_masked - 1);
    }
    for (int64_t i = 0; i < read.q_len; ++i)
      input.writes.push_back({read.q_start + i, cell(at + own - read.q_len + i), 1});
    input.n_tokens += read.q_len;
    at += own;
    input.reads.push_back(read);
  }

  const int64_t n = input.n_tokens, n_heads = n_kv_heads * group;
  Layout layout;
  layout.n_heads = n_heads;
  layout.in = static_cast<Dtype>(between(0, 2));
  layout.out = Dtype::f32;
  const int64_t size = layout.in == Dtype::f32 ? 4 : 2;
  layout.q = {k.side.dim, n_heads * k.side.dim};
  layout.k = {n * k.side.dim, k.side.dim};
  layout.v = {v.side.dim, n_kv_heads * v.side.dim};
  layout.o = {n * v.side.dim, v.side.dim};
  Memory q(n * n_heads * k.side.dim * size), new_k(n * n_kv_heads * k.side.dim * size);
  Memory new_v(n * n_kv_heads * v.side.dim * size), sinks(n_heads * 4);
  for (Memory* memory : {&q, &new_k, &new_v}) fill(*memory, layout.in);
  fill(sinks, Dtype::f32);
  Memory out(n * n_heads * v.side.dim * 4);
  const AttendArgs args{q.data, out.data, 0.2f, rng() % 3 ? 0.f : 2.f,
                        rng() % 2 ? reinterpret_cast<const float*>(sinks.data) : nullptr};

  Plan plan(input);
  std::vector<std::vector<float>> results;
  for (const Level now : levels()) {
    set_level(now);
    k.restore();
    v.restore();
    plan.write(pool, layout, new_k.data, new_v.data, 2);
    plan.attend(pool, layout, args, 2);
    const auto* from = reinterpret_cast<const float*>(out.data);
    results.emplace_back(from, from + n * n_heads * v.side.dim);
  }
  const double worst = farthest(results);
  std::vector<int64_t> src(static_cast<size_t>(between(0, n_cells / 2)));
  for (int64_t& from : src) from = between(0, n_cells - 1);
  const auto n_moved = static_cast<int64_t>(src.size());
  move_cells(pool, between(0, n_cells - n_moved), src.data(), n_moved);
  write_cells(pool, layout, src.data(), std::min(n_moved, n), new_k.data, new_v.data, 2);
  return worst;
}

// Exponents of 2^-3 to 2^3.
void fill_exponents(Memory& memory, LinearWeights& weights) {
  for (int64_t i = 0; i < memory.size; ++i) memory.data[i] = static_cast<char>(between(124, 130));
  weights.exponents = reinterpret_cast<const uint8_t*>(memory.data);
}

// Linear layers over memory of exact sizes; how far levels are apart, as a share of the largest.
double one_linear() {
  const auto format = static_cast<WeightFormat>(between(0, 4));
  const bool is_coded = format == WeightFormat::coded;
  const int64_t n_in = format == WeightFormat::bf16 ? between(1, 200)
                       : is_coded                   ? 128 * between(1, 20)
                                                    : 32 * between(1, 10);
  const int64_t n_out = between(1, 70), n_tokens = is_coded ? between(1, 110) : between(1, 20);
  LinearWeights weights = make_linear_weights(format, n_in, n_out, nullptr, nullptr);
  Memory data(format != WeightFormat::bf16 ? weights.n_blocks * weights.block_bytes : 2 * n_out * n_in);
  Memory scales(weights.n_blocks * weights.n_scales * kBlockRows * (format == WeightFormat::mxfp4 ? 1 : 2));
  const Dtype plain_in = weights.is_packed && rng() % 2 ? Dtype::f32 : Dtype::bf16;
  Memory plain(format == WeightFormat::bf16 ? 0 : n_out * n_in * (plain_in == Dtype::f32 ? 4 : 2));
  fill(data, weights.is_packed ? Dtype::int8 : Dtype::bf16);
  fill(scales, Dtype::f16);
  fill(plain, plain_in);
  weights.data = data.data;
  const bool is_mxfp4 = format == WeightFormat::mxfp4;
  if (is_mxfp4)
    fill_exponents(scales, weights);
  else
    weights.scales = reinterpret_cast<const uint16_t*>(scales.data);
  std::vector<Escape> escapes;
  for (int64_t i = 0; is_coded && i < plain.size / 2; ++i)  // some far from all others
    if (rng() % 50 == 0) {
      const auto number = static_cast<uint16_t>(rng() % 0x3F80 + (rng() % 2 << 15));
      std::memcpy(plain.data + 2 * i, &number, 2);
    }
  if (is_coded) escapes = code(reinterpret_cast<const uint16_t*>(plain.data), n_in, n_out, data.data, 0, 2);
  Memory beside(static_cast<int64_t>(escapes.size() * sizeof(Escape)));
  if (!escapes.empty()) std::memcpy(beside.data, escapes.data(), static_cast<size_t>(beside.size));
  weights.escapes = reinterpret_cast<const Escape*>(beside.data);
  const Dtype in = rng() % 2 ? Dtype::f32 : Dtype::bf16;
  Memory x(n_tokens * n_in * (in == Dtype::f32 ? 4 : 2)), out(n_tokens * n_out * 4);
  Memory short_out(n_tokens * n_out * 2), expanded(n_out * n_in * 2);
  std::vector<int64_t> asked(static_cast<size_t>(n_tokens));
  for (int64_t& output : asked) output = between(0, n_out - 1);
  const Dtype found_in = weights.is_packed ? in : Dtype::bf16;
  Memory found(n_tokens * n_in * (found_in == Dtype::f32 ? 4 : 2));
  fill(x, in);
  std::vector<std::vector<float>> results;
  std::vector<std::vector<char>> rows, packed;
  for (const Level now : levels()) {
    set_level(now);
    if (weights.is_packed && !is_mxfp4) {
      Memory numbers(data.size), steps(scales.size);
      pack({weights, plain.data, plain_in, reinterpret_cast<uint8_t*>(numbers.data),
            reinterpret_cast<uint16_t*>(steps.data)},
           2);
      packed.emplace_back(numbers.data, numbers.data + numbers.size);
      packed.back().insert(packed.back().end(), steps.data, steps.data + steps.size);
      if (packed.back() != packed.front()) return 1;
    }
    linear({weights, x.data, short_out.data, n_tokens, in, Dtype::bf16}, 2);
    linear({weights, x.data, out.data, n_tokens, in, Dtype::f32}, 2);
    const auto* from = reinterpret_cast<const float*>(out.data);
    results.emplace_back(from, from + n_tokens * n_out);
    if (can_multiply(weights)) {
      Memory many_x(17 * n_tokens * n_in * 2), many_out(17 * n_tokens * n_out * 2);
      fill(many_x, Dtype::bf16);
      multiply(weights, many_x.data, 17 * n_tokens, many_out.data, 2);
    }
    if (!weights.is_packed && !is_coded) continue;
    unpack(weights, 0, weights.n_blocks, expanded.data, 2);
    rows.emplace_back(expanded.data, expanded.data + expanded.size);
    if (rows.back() != rows.front()) return 1;
    if (is_coded && std::memcmp(plain.data, expanded.data, static_cast<size_t>(plain.size)) != 0) return 1;
    gather(weights, asked.data(), n_tokens, found_in, found.data, 2);
    for (int64_t t = 0; found_in == Dtype::bf16 && t < n_tokens; ++t) {
      const size_t bytes = static_cast<size_t>(2 * n_in);
      if (std::memcmp(found.data + t * 2 * n_in, expanded.data + asked[t] * 2 * n_in, bytes) != 0) return 1;
    }
  }
  return worst_apart(results);
}

// Weights that files have in groups, over memory of exact sizes; `held` keeps it.
LinearWeights some_groups(int64_t n_out, int64_t most, std::vector<std::unique_ptr<Memory>>& held) {
  const auto memory = [&](int64_t n_bytes, Dtype of) {
    held.push_back(std::make_unique<Memory>(n_bytes));
    fill(*held.back(), of);
    return held.back()->data;
  };
  const auto bytes_at = [](char* p) { return reinterpret_cast<uint8_t*>(p); };
  const auto type = static_cast<BlockType>(between(0, 15));
  if (type > BlockType::bf16) {
    const int64_t bits = rng() % 2 ? 4 : 8, group = 32 * between(1, 3), n_in = group * between(1, most);
    LinearWeights weights = make_affine_weights(bits, group, n_in, n_out, nullptr, nullptr);
    uint8_t* numbers = bytes_at(memory(n_out * n_in, Dtype::int8));
    for (int64_t i = 0; bits == 4 && i < n_out * n_in; ++i) numbers[i] &= 15;
    const auto floats = [&] { return reinterpret_cast<const float*>(memory(n_out * n_in / group * 4, Dtype::f32)); };
    const AffineRows rows{numbers, floats(), floats()};
    uint8_t* data = bytes_at(memory(weights.n_blocks * weights.block_bytes, Dtype::int8));
    uint8_t* beside = bytes_at(memory(beside_bytes_of(weights), Dtype::int8));
    place_affine(rows, weights, data, beside, 2);
    return make_affine_weights(bits, group, n_in, n_out, data, beside);
  }
  const bool is_plain = type == BlockType::f16 || type == BlockType::bf16;
  const int64_t n_in = inputs_of(type) * between(1, is_plain ? 90 : most);
  const LinearWeights weights = make_block_weights(type, n_in, n_out, nullptr, nullptr);
  const int64_t n_stored = n_out * (n_in / inputs_of(type)), bytes = bytes_of(type);
  char* stored = memory(n_stored * bytes, !is_plain ? Dtype::int8 : type == BlockType::f16 ? Dtype::f16 : Dtype::bf16);
  const char* halves = memory(4 * n_stored, Dtype::f16);
  const int64_t at = type == BlockType::q6_k ? 208 : 0, n_halves = weights.has_minima ? 2 : 1;
  for (int64_t i = 0; !is_plain && i < n_stored; ++i) {
    if (type == BlockType::mxfp4)
      stored[i * bytes] = static_cast<char>(between(124, 130));
    else
      std::memcpy(stored + i * bytes + at, halves + 4 * i, static_cast<size_t>(2 * n_halves));
  }
  uint8_t* data = bytes_at(memory(data_bytes_of(weights), Dtype::int8));
  uint8_t* beside = bytes_at(memory(beside_bytes_of(weights), Dtype::int8));
  place_blocks(type, bytes_at(stored), weights, data, beside, 2);
  return make_block_weights(type, n_in, n_out, data, beside);
}

// Linear layers of such weights over memory of exact sizes; how far levels are apart, as a share of the largest.
double one_of_blocks() {
  const int64_t n_out = between(1, 40), n_tokens = between(1, 12);
  std::vector<std::unique_ptr<Memory>> held;
  const LinearWeights weights = some_groups(n_out, 4, held);
  const int64_t n_in = weights.n_in;
  const Dtype in = rng() % 2 ? Dtype::f32 : Dtype::bf16;
  Memory x(n_tokens * n_in * (in == Dtype::f32 ? 4 : 2)), out(n_tokens * n_out * 4), expanded(n_out * n_in * 2);
  Memory found(n_out * n_in * 4);
  fill(x, in);
  std::vector<int64_t> asked(static_cast<size_t>(n_out));
  for (int64_t& output : asked) output = between(0, n_out - 1);
  std::vector<std::vector<float>> results;
  std::vector<std::vector<char>> rows;
  for (const Level now : levels()) {
    set_level(now);
    linear({weights, x.data, out.data, n_tokens, in, Dtype::f32}, 2);
    const auto* from = reinterpret_cast<const float*>(out.data);
    results.emplace_back(from, from + n_tokens * n_out);
    gather(weights, asked.data(), n_out, Dtype::f32, found.data, 2);
    if (!weights.is_plain) unpack(weights, 0, weights.n_blocks, expanded.data, 2);
    rows.emplace_back(found.data, found.data + found.size);
    rows.back().insert(rows.back().end(), expanded.data, expanded.data + expanded.size);
    if (rows.back() != rows.front()) return 1;
  }
  return worst_apart(results);
}

// A mixture over memory of exact sizes, some of whose tokens chose experts that are not there.
double one_mixture() {
  using F = WeightFormat;
  const F format = one_of({F::bf16, F::f16, F::f32, F::int8, F::int4, F::coded, F::mxfp4, F::nibbles, F::bytes});
  const Steps steps = one_of({Steps::halves, Steps::pairs, Steps::counts, Steps::floats});
  const bool is_grouped = format == F::nibbles || format == F::bytes;
  const Dtype dtype = rng() % 2 ? Dtype::f32 : Dtype::bf16;
  const int64_t size = dtype == Dtype::f32 ? 4 : 2;
  const int64_t step = is_grouped && steps == Steps::counts ? 256 : format == F::coded ? 128 : 32;
  const int64_t hidden = step * between(1, 3), inner = step * between(1, 3), n_experts = between(1, 6);
  const int64_t n_tokens = between(1, 20), n_chosen = between(1, 4);
  std::vector<std::unique_ptr<Memory>> held;
  const auto memory = [&](int64_t n_bytes, Dtype of) {
    held.push_back(std::make_unique<Memory>(n_bytes));
    fill(*held.back(), of);
    return held.back()->data;
  };
  const auto layer = [&](int64_t n_in, int64_t n_out) {
    if (is_grouped) {
      const LinearWeights one = make_grouped_weights(format, steps, 8, n_in, n_out, nullptr, nullptr);
      const char* data = memory(n_experts * one.n_blocks * one.block_bytes, Dtype::int8);
      const char* beside =
          memory(n_experts * one.n_blocks * one.beside_bytes, steps == Steps::floats ? Dtype::f32 : Dtype::f16);
      return ExpertLayer{make_grouped_weights(format, steps, 8, n_in, n_out, data, beside), n_experts, nullptr};
    }
    LinearWeights weights = make_linear_weights(format, n_in, n_out, nullptr, nullptr);
    const int64_t n_scales = n_experts * weights.n_blocks * weights.n_scales * kBlockRows;
    if (weights.is_plain) {
      const Dtype of = format == F::f16 ? Dtype::f16 : format == F::f32 ? Dtype::f32 : Dtype::bf16;
      weights.data = memory(weights.plain_bytes * n_experts * n_in * n_out, of);
    } else {
      const int64_t bytes = weights.n_blocks * weights.block_bytes;
      char* data = memory(n_experts * bytes, Dtype::int8);
      weights.data = data;
      std::vector<Escape> escapes;
      for (int64_t e = 0; format == WeightFormat::coded && e < n_experts; ++e) {
        const auto* plain = reinterpret_cast<const uint16_t*>(memory(2 * n_in * n_out, Dtype::bf16));
        const std::vector<Escape> more =
            code(plain, n_in, n_out, data + e * bytes, static_cast<int64_t>(escapes.size()), 2);
        escapes.insert(escapes.end(), more.begin(), more.end());
      }
      char* beside = memory(static_cast<int64_t>(escapes.size() * sizeof(Escape)), Dtype::int8);
      if (!escapes.empty()) std::memcpy(beside, escapes.data(), escapes.size() * sizeof(Escape));
      weights.escapes = reinterpret_cast<const Escape*>(beside);
      char* scales = memory(n_scales * (format == WeightFormat::mxfp4 ? 1 : 2), Dtype::f16);
      if (format == WeightFormat::mxfp4)
        fill_exponents(*held.back(), weights);
      else if (weights.is_packed)
        weights.scales = reinterpret_cast<const uint16_t*>(scales);
    }
    return ExpertLayer{weights, n_experts, rng() % 2 ? memory(n_experts * n_out * size, dtype) : nullptr};
  };
  const ExpertLayer up = layer(hidden, 2 * inner), down = layer(inner, hidden);
  const Gate gate = one_of({Gate{}, Gate{1.702f, 0.f, 1.f, 7.f}, Gate{1.6f, .07f, 0.f, 0.f}});
  std::vector<int64_t> chosen(static_cast<size_t>(n_tokens * n_chosen));
  for (int64_t& expert : chosen) expert = between(0, n_experts);
  const Memory x(n_tokens * hidden * size), out(n_tokens * hidden * size);
  const auto* shares = reinterpret_cast<const float*>(memory(4 * n_tokens * n_chosen, Dtype::f32));
  fill(const_cast<Memory&>(x), dtype);
  std::vector<std::vector<float>> results;
  for (const Level now : levels()) {
    set_level(now);
    run_experts({up, down, gate}, x.data, {chosen.data(), shares, n_tokens, n_chosen}, dtype, out.data, 2);
    results.emplace_back();
    append(results.back(), out.data, n_tokens * hidden, size);
  }
  // The matrix unit's inputs are not rounded to 8 bits: of 32 of them alone results are up to 4% apart.
  return worst_apart(results) / (dtype == Dtype::f32 ? 1 : 60);
}

// A level of an EAGLE-3 head over memory of exact sizes: whether all that it says is in range.
bool one_level() {
  const int64_t n_kv_heads = between(1, 2), n_heads = n_kv_heads * between(1, 3);
  const int64_t dim = 32 * between(1, 2), hidden = 32 * between(1, 4), inner = 32 * between(1, 4);
  const int64_t n_vocab = between(1, 90), n_said = between(1, 90), n_rope = between(20, 40);
  const int64_t n = between(1, 6), n_cells = between(n, 20), n_hidden = between(1, 4);
  std::vector<std::unique_ptr<Memory>> held;
  const auto memory = [&](int64_t n_bytes, Dtype dtype) {
    held.push_back(std::make_unique<Memory>(n_bytes));
    fill(*held.back(), dtype);
    return held.back()->data;
  };
  const auto floats = [&](int64_t size) { return reinterpret_cast<float*>(memory(4 * size, Dtype::f32)); };
  const auto matrix = [&](int64_t n_in, int64_t n_out) {
    LinearWeights weights = make_linear_weights(WeightFormat::int8, n_in, n_out, nullptr, nullptr);
    weights.data = memory(weights.n_blocks * weights.block_bytes, Dtype::int8);
    weights.scales =
        reinterpret_cast<const uint16_t*>(memory(weights.n_blocks * weights.n_scales * kBlockRows * 2, Dtype::f16));
    return weights;
  };
  const int64_t width = (n_heads + 2 * n_kv_heads) * dim;
  const Eagle3Weights weights{hidden,
                              inner,
                              n_heads,
                              n_kv_heads,
                              dim,
                              n_vocab,
                              n_said,
                              1e-5f,
                              matrix(2 * hidden, width),
                              matrix(n_heads * dim, hidden),
                              matrix(hidden, 2 * inner),
                              matrix(inner, hidden),
                              matrix(hidden, n_said),
                              floats(n_vocab * hidden),
                              rng() % 2 ? floats(width) : nullptr,
                              rng() % 2 ? floats(hidden) : nullptr};
  Side side;
  side.dim = dim;
  side.cell_stride = side.packed_bytes();
  side.head_stride = side.cell_stride * n_cells;
  const SideMemory k(side, n_kv_heads, n_cells), v(side, n_kv_heads, n_cells);
  const Pool pool{n_kv_heads, n_cells, 0, k.side, v.side, nullptr};
  StepInput input;
  input.n_tokens = n;
  input.n_cells = n_cells;
  input.writes.push_back({0, n_cells - n, n});
  input.runs.push_back({0, n_cells});
  input.reads.push_back({0, n, 0, 1, Kind::causal, 0, 0});
  Plan plan(input);
  const auto indices = [&](int64_t size, int64_t stop) {
    std::vector<int64_t> found(static_cast<size_t>(size));
    for (int64_t& index : found) index = between(0, stop - 1);
    return found;
  };
  const std::vector<int64_t> tokens = indices(n, n_vocab), positions = indices(n, n_rope);
  const std::vector<int64_t> above = indices(n, n_hidden), rows = indices(between(0, n), n);
  const auto n_rows = static_cast<int64_t>(rows.size());
  const int64_t most = between(1, n_said);
  float *out = floats(n_rows * hidden), *beliefs = floats(n_rows * most);
  auto* ids = reinterpret_cast<int64_t*>(memory(n_rows * most * 8, Dtype::int8));
  const Eagle3Call call{&plan,
                        &pool,
                        nullptr,
                        nullptr,
                        floats(2 * n_rope * dim),
                        n_rope,
                        n,
                        tokens.data(),
                        positions.data(),
                        floats(n_hidden * hidden),
                        n_hidden,
                        above.data(),
                        n_rows,
                        rows.data(),
                        most,
                        out,
                        ids,
                        beliefs};
  for (const Level now : levels()) {
    set_level(now);
    eagle3_level(weights, call, 2);
    for (int64_t i = 0; i < n_rows * hidden; ++i)
      if (!std::isfinite(out[i])) return false;
    for (int64_t i = 0; i < n_rows * most; ++i)
      if (ids[i] < 0 || ids[i] >= n_said || !(beliefs[i] >= 0.f && beliefs[i] <= 1.f)) return false;
  }
  return true;
}

// A layer's weights, of exactly their size, in bfloat16.
struct LayerMemory {
  LayerMemory(int64_t n_in, int64_t n_out, Dtype dtype)
      : data(2 * n_in * n_out), bias(rng() % 2 ? n_out * (dtype == Dtype::f32 ? 4 : 2) : 0) {
    fill(data, Dtype::bf16);
    fill(bias, dtype);
    layer = {make_linear_weights(WeightFormat::bf16, n_in, n_out, data.data, nullptr), bias.size ? bias.data : nullptr};
  }
  Memory data, bias;
  LinearLayer layer;
};

// A model of two such layers, behind cells of another one: all that it says is finite, and what its layers
// are given begins with the embedding.
bool one_model(const DecoderLayer& layer, const Memory& cos, const Memory& sin, int64_t n_tokens) {
  const Dtype dtype = layer.dtype;
  const int64_t size = dtype == Dtype::f32 ? 4 : 2, hidden = layer.qkv.weights.n_in;
  const int64_t n_vocab = between(1, 40), n_cells = 16 * between(3, 6), n_rows = between(0, n_tokens);
  Memory embedding(n_vocab * hidden * size), norm(hidden * size), ids(8 * n_tokens), rows(8 * n_rows);
  Memory logits(4 * n_rows * n_vocab), features(4 * n_tokens * 2 * hidden);
  Memory own(n_tokens * 2 * (layer.own.gate.weights.data ? layer.own.gate.n_out() : 1) * size);
  fill(own, dtype);
  LayerMemory head(hidden, n_vocab, dtype);
  fill(embedding, dtype);
  fill(norm, dtype);
  auto* id = reinterpret_cast<int64_t*>(ids.data);
  auto* row = reinterpret_cast<int64_t*>(rows.data);
  for (int64_t t = 0; t < n_tokens; ++t) id[t] = between(0, n_vocab - 1);
  for (int64_t r = 0; r < n_rows; ++r) row[r] = between(0, n_tokens - 1);
  Side side;
  side.dtype = dtype;
  side.dim = layer.head_dim;
  side.cell_stride = side.packed_bytes();
  side.head_stride = side.cell_stride * n_cells;
  SideMemory k(side, layer.n_kv_heads, n_cells), v(side, layer.n_kv_heads, n_cells);
  SideMemory exact_k(side, layer.n_kv_heads, n_cells), exact_v(side, layer.n_kv_heads, n_cells);
  const Pool pool{layer.n_kv_heads, n_cells, 0, k.side, v.side, nullptr};
  const Pool exact{layer.n_kv_heads, n_cells, 0, exact_k.side, exact_v.side, nullptr};
  StepInput input;
  input.n_cells = n_cells;
  input.n_tokens = n_tokens;
  input.writes = {{0, n_cells - n_tokens, n_tokens}};
  Plan exact_plan(input);
  input.runs = {{0, n_cells}};
  input.reads = {{0, n_tokens, 0, 1, Kind::causal, 0, 0}};
  Plan plan(input);
  const bool has_exact = rng() % 2;
  const LayerStep step{&plan, &pool, has_exact ? &exact_plan : nullptr, has_exact ? &exact : nullptr, 0.f};
  const LayerStep steps[2] = {step, step};
  const int64_t feature_layers[2] = {0, 2};
  const float cap = rng() % 2 ? 3.f : 0.f;
  const Decoder decoder{{layer, layer}, embedding.data, {norm.data, 1e-5f}, head.layer, 1.f, 0.5f, cap};
  auto* said = reinterpret_cast<float*>(logits.data);
  auto* seen = reinterpret_cast<float*>(features.data);
  const Sides sides{cos.data, sin.data};
  const DecoderCall call{steps, n_tokens, id, &sides, n_rows, row, said, 2, feature_layers, seen, own.data};
  for (const Level now : levels()) {
    set_level(now);
    run_decoder(decoder, call, 2);
    for (int64_t i = 0; i < n_rows * n_vocab; ++i)
      if (!std::isfinite(said[i]) || (cap != 0.f && std::fabs(said[i]) > cap)) return false;
    for (int64_t t = 0; t < n_tokens; ++t)
      for (int64_t i = 0; i < hidden; ++i) {
        uint32_t bits = 0;
        std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, embedding.data + (id[t] * hidden + i) * size,
                    static_cast<size_t>(size));
        if (std::memcmp(&bits, seen + t * 2 * hidden + i, 4) != 0) return false;
        if (!std::isfinite(seen[(2 * t + 1) * hidden + i])) return false;
      }
  }
  return true;
}

// A decoder layer around an attention that says what came in; how far levels are apart.
double one_decoder() {
  const Dtype dtype = rng() % 2 ? Dtype::f32 : Dtype::bf16;
  const int64_t size = dtype == Dtype::f32 ? 4 : 2, n_tokens = between(1, 40);
  const int64_t hidden = between(1, 90), inner = between(1, 70), dim = 2 * between(1, 40);
  const int64_t n_kv_heads = between(1, 3), n_heads = n_kv_heads * between(1, 3);
  const int64_t n_joined = (n_heads + 2 * n_kv_heads) * dim;
  LayerMemory qkv(hidden, n_joined, dtype), o(n_heads * dim, hidden, dtype);
  LayerMemory gate_up(hidden, 2 * inner, dtype), down(inner, hidden, dtype);
  Memory norms[4] = {Memory(hidden * size), Memory(hidden * size), Memory(dim * size), Memory(dim * size)};
  Memory x(n_tokens * hidden * size), cos(n_tokens * dim * size), sin(n_tokens * dim * size);
  for (Memory* memory : {&norms[0], &norms[1], &norms[2], &norms[3], &x, &cos, &sin}) fill(*memory, dtype);
  const bool has_norms = rng() % 2, together = rng() % 2, is_behind = rng() % 2;
  Memory floats(hidden * 4), of_q(n_heads * dim * size), of_k(n_kv_heads * dim * size);
  fill(floats, Dtype::f32);
  for (Memory* memory : {&of_q, &of_k}) fill(*memory, dtype);
  DecoderLayer layer{qkv.layer,
                     o.layer,
                     gate_up.layer,
                     down.layer,
                     {norms[0].data, 1e-5f},
                     {norms[1].data, 1e-5f},
                     {has_norms ? norms[2].data : nullptr, 1e-5f},
                     {has_norms ? norms[3].data : nullptr, 1e-5f},
                     n_heads,
                     n_kv_heads,
                     dim,
                     dtype,
                     0.2f};
  if (is_behind) {  // norms behind, which round once, in the place of those before
    layer.before = layer.between = {};
    layer.attended = layer.mixed = {floats.data, 1e-5f, true};
  }
  if (has_norms && together) {
    layer.norms_together = true;
    layer.q = {of_q.data, 1e-5f};
    layer.k = {of_k.data, 1e-5f};
  }
  if (rng() % 2) layer.n_turned = 2 * between(0, dim / 2);
  if (rng() % 2) layer.gate = {1.59577f, 0.0713548f, 0.f, 0.f};
  if (rng() % 2) layer.residual = 0.25f;
  const int64_t n_experts = between(1, 4);  // all of which a token chooses: no rounding decides which
  LayerMemory router(hidden, n_experts, dtype), share(hidden, 1, dtype);
  const int64_t n_own = between(1, 70);
  LayerMemory own_gate(hidden, n_own, dtype), own_out(n_own, hidden, dtype);
  Memory factors(n_experts * 4), own(n_tokens * n_own * size);
  fill(factors, Dtype::f32);
  fill(own, dtype);
  LayerMemory ups(hidden, n_experts * 2 * inner, dtype), downs(inner, n_experts * hidden, dtype);
  if (rng() % 2) {
    const auto bf16 = [](int64_t n_in, int64_t n_out, const Memory& data) {
      return make_linear_weights(WeightFormat::bf16, n_in, n_out, data.data, nullptr);
    };
    layer.has_mixture = true;
    layer.mixture.router.weights = router.layer.weights;
    layer.mixture.router.n_chosen = n_experts;
    layer.mixture.experts = {{bf16(hidden, 2 * inner, ups.data), n_experts, ups.layer.bias},
                             {bf16(inner, hidden, downs.data), n_experts, downs.layer.bias},
                             layer.gate};
    if (rng() % 2) layer.share = share.layer;
    if (!layer.share.weights.data && rng() % 2) layer.gate_up = layer.down = {};
    if (rng() % 2) layer.mixture.router.factors = reinterpret_cast<float*>(factors.data);
    const Norm by{norms[0].data, 1e-5f};
    if (layer.gate_up.weights.data && rng() % 2) layer.apart = {by, {norms[1].data, 1e-5f}, by, by};
  }
  if (rng() % 2) layer.v = {norms[2].data, 1e-5f};
  if (rng() % 2) layer.result = 0.75f;
  if (rng() % 2) layer.own = {own_gate.layer, own_out.layer, {norms[1].data, 1e-5f}};
  if (!one_model(layer, cos, sin, n_tokens)) return 1;
  Memory joined(n_tokens * n_joined * size), attended(n_tokens * n_heads * dim * size);
  Memory out(n_tokens * hidden * size);
  std::vector<std::vector<float>> results;
  for (const Level now : levels()) {
    set_level(now);
    before_attention(layer, x.data, n_tokens, cos.data, sin.data, joined.data, 2);
    for (int64_t t = 0; t < n_tokens; ++t)
      std::memcpy(attended.data + t * n_heads * dim * size, joined.data + t * n_joined * size,
                  static_cast<size_t>(n_heads * dim * size));
    after_attention(layer, x.data, attended.data, n_tokens, out.data, 2, {own.data, n_own});
    results.emplace_back();
    append(results.back(), out.data, n_tokens * hidden, size);
  }
  return worst_apart(results) / (dtype == Dtype::f32 ? 1 : 100);
}

// Recurrent layers over memory of exact sizes, for sequences that go on from a slot, from zeros, and from each other.
double one_recurrent() {
  const Dtype dtype = rng() % 2 ? Dtype::f32 : Dtype::bf16;
  const int64_t size = dtype == Dtype::f32 ? 4 : 2, n_slots = 4;
  std::vector<std::unique_ptr<Memory>> held;
  const auto memory = [&](int64_t n, Dtype of) {
    held.push_back(std::make_unique<Memory>(n * (of == Dtype::f32 ? 4 : 2)));
    fill(*held.back(), of);
    return held.back()->data;
  };
  const auto floats = [&](int64_t n) { return reinterpret_cast<float*>(memory(n, Dtype::f32)); };
  const auto positive = [&](int64_t n) {
    float* made = floats(n);
    for (int64_t i = 0; i < n; ++i) made[i] = std::fabs(made[i]);
    return made;
  };
  std::vector<Advance> advances;
  int64_t n = 0;
  for (const auto& [src, dst] : {std::pair{0, 1}, {-1, 2}, {2, 3}}) {
    const int64_t own = one_of<int64_t>({1, 1, 3, 40});
    advances.push_back({n, own, src, dst});
    n += own;
  }
  const Batch batch{advances.data(), static_cast<int64_t>(advances.size()), n, dtype};
  const auto rows = [&](int64_t width) { return TokenRows{memory(n * width, dtype), width}; };

  const int64_t channels = between(1, 70), width = between(1, 8);
  const Convolution convolution{channels, width, floats(width * channels), rng() % 2 ? floats(channels) : nullptr,
                                rng() % 2 == 0};
  const TokenRows x = rows(channels), in = rows(channels), by = rows(channels);
  const bool has_factors = rng() % 2;
  const ConvolutionCall convolved{x, has_factors ? in.data : nullptr, has_factors ? by.data : nullptr,
                                  floats(n_slots * channels * width), memory(n * channels, dtype)};

  const int64_t key_heads = between(1, 2), heads = key_heads * between(1, 3), k_dim = one_of<int64_t>({5, 16, 33, 256});
  const int64_t v_dim = one_of<int64_t>({7, 64, 100, 128}), n_decays = rng() % 2 ? 1 : k_dim;
  const DeltaRule rule{heads, key_heads, k_dim, v_dim, n_decays, positive(heads), floats(heads * n_decays), 1.f};
  const DeltaCall ruled{rows(key_heads * k_dim),
                        rows(key_heads * k_dim),
                        rows(heads * v_dim),
                        rows(heads * n_decays),
                        rows(heads),
                        floats(n_slots * heads * k_dim * v_dim),
                        memory(n * heads * v_dim, dtype)};

  const int64_t head_dim = between(1, 20), state_dim = one_of<int64_t>({3, 16, 50, 128});
  const Scan scanned{heads, key_heads, head_dim, state_dim, positive(heads), floats(heads), floats(heads)};
  const ScanCall scans{rows(heads * head_dim),
                       rows(key_heads * state_dim),
                       rows(key_heads * state_dim),
                       rows(heads),
                       floats(n_slots * heads * head_dim * state_dim),
                       memory(n * heads * head_dim, dtype)};

  const bool has_norm = rng() % 3 != 0;
  const int64_t dim = heads * v_dim, n_weights = rng() % 2 ? v_dim : dim;
  const GatedNorm norm{
      dim,           v_dim, has_norm ? floats(n_weights) : nullptr, n_weights, 1e-5f, rng() % 2 == 0, rng() % 2 == 0,
      rng() % 2 == 0};
  const TokenRows gates = rows(dim);
  const Memory normed(n * dim * size);

  const std::vector<std::pair<float*, int64_t>> states = {{convolved.states, n_slots * channels * width},
                                                          {ruled.states, n_slots * heads * k_dim * v_dim},
                                                          {scans.states, n_slots * heads * head_dim * state_dim}};
  std::vector<std::vector<float>> before, results;
  for (const auto& [data, count] : states) before.emplace_back(data, data + count);
  for (const Level now : levels()) {
    set_level(now);
    for (size_t i = 0; i < states.size(); ++i) std::copy(before[i].begin(), before[i].end(), states[i].first);
    convolve(convolution, convolved, batch, 2);
    delta(rule, ruled, batch, 2);
    scan(scanned, scans, batch, 2);
    gated_norm(norm, ruled.out, gates, n, dtype, normed.data, 2);
    results.emplace_back();
    for (const auto& [data, count] : states) results.back().insert(results.back().end(), data, data + count);
    append(results.back(), normed.data, n * dim, size);
  }
  return worst_apart(results) / (dtype == Dtype::f32 ? 1 : 100);
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 200;
  for (int i = 0; i < steps; ++i) {
    rng.seed(static_cast<uint64_t>(i));
    const double worst = one_step(i % 4 == 3);
    if (!(worst < 5e-3)) {
      std::printf("step %d: levels differ by %g\n", i, worst);
      return 1;
    }
    const double apart = one_linear();
    if (!(apart < 1e-4)) {
      std::printf("linear layer %d: levels differ by %g\n", i, apart);
      return 1;
    }
    const double of_blocks = one_of_blocks();
    if (!(of_blocks < 1e-4)) {
      std::printf("blocks %d: levels differ by %g\n", i, of_blocks);
      return 1;
    }
    const double off = one_mixture();
    if (!(off < 1e-3)) {
      std::printf("mixture %d: levels differ by %g\n", i, off);
      return 1;
    }
    if (!one_level()) {
      std::printf("level %d: out of range\n", i);
      return 1;
    }
    const double far = one_decoder();
    if (!(far < 1e-3)) {
      std::printf("decoder layer %d: levels differ by %g\n", i, far);
      return 1;
    }
    const double wide = one_recurrent();
    if (!(wide < 1e-3)) {
      std::printf("recurrent layer %d: levels differ by %g\n", i, wide);
      return 1;
    }
  }
  for (const Level now : levels()) std::printf("%s: %d steps\n", name_of(now), steps);
  return 0;
}
