// Linear layers on the matrix unit; after linear/product.h.
//
// 16 outputs' weights are a tile as they lie; tokens are the other operand, interleaved by 2. A panel
// of 32 outputs meets 32 tokens at a time, so that 4 results share 4 operands. Tokens of a block and two
// panels stay in the core's cache: while one is multiplied, the next one's weights become bfloat16, a few at
// a time. Each token's sums are taken in one order, whatever other tokens come with it.

#pragma once

#include <immintrin.h>

#include "linear/linear.h"
#include "linear/tiles.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// 16 rows of 16 pairs: rows to columns.
inline void turn_16(__m512i* x) {
  __m512 rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castsi512_ps(x[i]);
  transpose16(rows);
  for (int i = 0; i < 16; ++i) x[i] = _mm512_castps_si512(rows[i]);
}

void pack_tokens(const ManyTokens& call, int64_t first, int64_t stop) {
  const int64_t n = call.weights.n_in, steps = n / 32;
  for (int64_t tile = first; tile < stop; ++tile) {
    const int64_t there = call.n_tokens - 16 * tile;
    const uint16_t* from = call.x + 16 * tile * n;
    uint16_t* to = call.tokens + tile * steps * 512;
    for (int64_t k = 0; k < steps; ++k, to += 512) {
      __m512i rows[16];
      for (int64_t t = 0; t < 16; ++t)
        rows[t] = t < there ? _mm512_loadu_si512(from + t * n + 32 * k) : _mm512_setzero_si512();
      turn_16(rows);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, rows[i]);
    }
  }
}

constexpr int64_t kOutputsNear = 1 << 19;  // of all tokens: 1 MiB

// Packed weights of 16 outputs as rows of bfloat16: up to two groups of 32 inputs.
template <WeightFormat kFormat>
inline void unpack_groups(const LinearWeights& weights, int64_t block, int64_t group, int64_t n_groups, uint16_t* to) {
  const int64_t group_bytes = weights.block_bytes / weights.n_groups;
  const char* data = static_cast<const char*>(weights.data) + block * weights.block_bytes;
  const auto* scales = scales_of<kFormat>(weights, block);
  const __m512 zero = _mm512_set1_ps(static_cast<float>(zero_of(kFormat)));
  __m512i fours[16];  // 4 inputs of 16 outputs each
  alignas(64) float steps[2][16];
  for (int64_t g = 0; g < 2; ++g) {
    const char* from = data + (group + (g < n_groups ? g : 0)) * group_bytes;
    for (int v = 0; v < 8; v += has_halves(kFormat) ? 2 : 1, from += 64) {
      fetch_packed(from);
      fours[8 * g + v] = _mm512_loadu_si512(from);
      if (!has_halves(kFormat)) continue;
      fours[8 * g + v + 1] = high_halves<kFormat>(fours[8 * g + v]);
      fours[8 * g + v] = low_halves<kFormat>(fours[8 * g + v]);
    }
    const int64_t shared = shared_of<kFormat>(group + (g < n_groups ? g : 0));
    _mm512_store_ps(steps[g], load_scales(scales + shared * kBlockRows));
  }
  turn_16(fours);
  for (int64_t r = 0; r < kBlockRows; ++r)
    for (int64_t g = 0; g < n_groups; ++g) {
      const __m256i bytes = g ? _mm512_extracti64x4_epi64(fours[r], 1) : _mm512_castsi512_si256(fours[r]);
      const __m512 step = _mm512_set1_ps(steps[g][r]);
      const auto number = [&](__m128i sixteen) {
        return _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen)), zero), step);
      };
      const __m512bh row =
          _mm512_cvtne2ps_pbh(number(_mm256_extracti128_si256(bytes, 1)), number(_mm256_castsi256_si128(bytes)));
      _mm512_store_si512(to + r * kPanelRow + g * kGroupInputs, reinterpret_cast<const __m512i&>(row));
    }
}

// Some inputs of a panel's 32 outputs on their way to rows of bfloat16, in units: some of an output's bf16 and
// coded weights, two groups of 16 outputs' packed ones.
class PanelUnits {
 public:
  PanelUnits() = default;
  PanelUnits(const LinearWeights& weights, int64_t panel, int64_t first, int64_t stop, uint16_t* to)
      : weights_(&weights), first_block_(2 * panel), first_(first), stop_(stop), to_(to) {
    const int64_t n = stop - first;
    per_row_ = weights.is_packed ? 1 : (n + kUnitInputs - 1) / kUnitInputs;
    per_half_ = weights.is_packed ? (n + 2 * kGroupInputs - 1) / (2 * kGroupInputs) : kBlockRows * per_row_;
    left_ = 2 * per_half_;
  }

  int64_t left() const { return left_; }

  __attribute__((noinline)) void next() {
    const int64_t unit = 2 * per_half_ - left_--, half = unit / per_half_, i = unit % per_half_;
    const int64_t block = first_block_ + half;
    uint16_t* to = to_ + half * kBlockRows * kPanelRow;
    const LinearWeights& weights = *weights_;
    if (weights.is_packed) {
      to += 2 * i * kGroupInputs;
      const int64_t group = first_ / kGroupInputs + 2 * i, n_groups = smaller(stop_ / kGroupInputs - group, 2);
      if (block >= weights.n_blocks)
        for (int64_t r = 0; r < kBlockRows; ++r) std::memset(to + r * kPanelRow, 0, static_cast<size_t>(n_groups * 64));
      else if (weights.format == WeightFormat::int4)
        unpack_groups<WeightFormat::int4>(weights, block, group, n_groups, to);
      else if (weights.format == WeightFormat::mxfp4)
        unpack_groups<WeightFormat::mxfp4>(weights, block, group, n_groups, to);
      else
        unpack_groups<WeightFormat::int8>(weights, block, group, n_groups, to);
      return;
    }
    const int64_t r = i / per_row_, output = block * kBlockRows + r, first = first_ + i % per_row_ * kUnitInputs;
    const int64_t stop = smaller(first + kUnitInputs, stop_);
    to += r * kPanelRow + first - first_;
    if (output >= weights.n_out)
      std::memset(to, 0, static_cast<size_t>(2 * (stop - first)));
    else if (weights.format == WeightFormat::coded)
      // One stream, or these inputs of the next row.
      decode_inputs(weights, block, r, first, stop,
                    (is_one_stream() ? kAheadBytes : weights.n_in * 3 / 2) +
                        (r == kBlockRows - 1 ? static_cast<int64_t>(sizeof(CodedHead)) : 0),
                    to);
    else
      copy(weights, output, first, stop, to);
  }

 private:
  static constexpr int64_t kUnitInputs = 512;

  bool is_one_stream() const { return first_ == 0 && stop_ == weights_->n_in; }

  void copy(const LinearWeights& weights, int64_t output, int64_t first, int64_t stop, uint16_t* to) const {
    const uint16_t* row = static_cast<const uint16_t*>(weights.data) + output * weights.n_in;
    const int64_t ahead = is_one_stream() ? kAheadBytes : 2 * weights.n_in;
    for (int64_t k = first; k < stop; k += 32, to += 32) {
      const auto* line = reinterpret_cast<const uint8_t*>(row + k);
      __m512i x = _mm512_loadu_si512(line);
      fetch_line(line + ahead, line + kNearBytes, x);
      _mm512_store_si512(to, x);
    }
  }

  const LinearWeights* weights_ = nullptr;
  int64_t first_block_ = 0, first_ = 0, stop_ = 0, per_row_ = 1, per_half_ = 1, left_ = 0;
  uint16_t* to_ = nullptr;
};

// 32 outputs of 32 tokens: 4 tiles to rows of bfloat16. A token's are a line of the cache: what is too much to stay
// there goes to memory as a whole, which need not be read first.
inline void put_tiles(const ManyTokens& call, const float* tiles, int64_t panel, int64_t pair) {
  const int64_t n = call.weights.n_out, output = 32 * panel, there = smaller(n - output, 32);
  const bool is_far = there == 32 && call.n_tokens * n >= kOutputsNear && n % 32 == 0 &&
                      reinterpret_cast<uintptr_t>(call.out) % 64 == 0;
  const auto mask = static_cast<__mmask32>((uint64_t{1} << there) - 1);
  for (int64_t side = 0; side < 2; ++side) {
    const int64_t token = 32 * pair + 16 * side, n_tokens = smaller(call.n_tokens - token, 16);
    __m512i rows[2][16];
    for (int64_t half = 0; half < 2; ++half) {
      for (int i = 0; i < 16; ++i) rows[half][i] = _mm512_load_si512(tiles + 512 * half + 256 * side + 16 * i);
      turn_16(rows[half]);
    }
    for (int64_t t = 0; t < n_tokens; ++t) {
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(rows[1][t]), _mm512_castsi512_ps(rows[0][t]));
      const auto line = reinterpret_cast<const __m512i&>(both);
      uint16_t* to = call.out + (token + t) * n + output;
      if (is_far)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line);
      else
        _mm512_mask_storeu_epi16(to, mask, line);
    }
  }
}

// Panels [first, stop) of the block of tokens and inputs that the call is at.
void multiply_panels(const ManyTokens& call, char* scratch, int64_t first, int64_t stop) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, all_steps = n / 32;
  uint16_t* panels[2];
  for (int64_t i = 0; i < 2; ++i) panels[i] = reinterpret_cast<uint16_t*>(scratch) + i * 32 * kPanelRow;
  auto* tiles = reinterpret_cast<float*>(scratch + 2 * 32 * kPanelRow * 2);
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = 16;
    shapes.bytes[tile] = 64;
  }
  load_shapes(shapes);
  int64_t panel = first, input = call.first_input;
  const auto units_at = [&](int64_t panel, int64_t input, int64_t buffer) {
    return PanelUnits(weights, panel, input, smaller(input + kInputsOfBlock, call.stop_input), panels[buffer]);
  };
  PanelUnits units = units_at(panel, input, 0);
  while (units.left()) units.next();
  for (int64_t buffer = 0; panel < stop; buffer ^= 1) {
    const int64_t stop_input = smaller(input + kInputsOfBlock, call.stop_input), steps = (stop_input - input) / 32;
    const bool is_first = input == 0, is_last = stop_input == n;
    int64_t next_panel = panel, next_input = stop_input;
    if (next_input == call.stop_input) {
      ++next_panel;
      next_input = call.first_input;
    }
    units = next_panel < stop ? units_at(next_panel, next_input, buffer ^ 1) : PanelUnits();
    keep_order();
    const int64_t n_units = units.left(), all = (call.stop_pair - call.first_pair) * steps;
    int64_t due = 0;
    for (int64_t pair = call.first_pair; pair < call.stop_pair; ++pair) {
      float* sums = call.sums ? call.sums + (panel * call.n_pairs + pair) * 1024 : tiles;
      if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
      }
      const uint16_t *upper = panels[buffer], *lower = upper + 16 * kPanelRow;
      const uint16_t* left = call.tokens + (2 * pair * all_steps + input / 32) * 512;
      const uint16_t* right = left + all_steps * 512;
      const bool is_half = call.n_tokens - 32 * pair <= 16;
      for (int64_t k = 0; k < steps; ++k, upper += 32, lower += 32, left += 512, right += 512) {
        _tile_loadd(4, upper, 2 * kPanelRow);
        _tile_loadd(6, left, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, lower, 2 * kPanelRow);
        _tile_dpbf16ps(2, 5, 6);
        if (!is_half) {
          _tile_loadd(7, right, 64);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
        for (due += n_units; due >= all; due -= all) units.next();
      }
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + 256, 64);
      _tile_stored(2, sums + 512, 64);
      _tile_stored(3, sums + 768, 64);
      keep_order();
      if (is_last) put_tiles(call, sums, panel, pair);
    }
    panel = next_panel;
    input = next_input;
  }
  _mm_sfence();  // who waits for this worker sees the lines that went past the caches
  _tile_release();
}

constexpr LinearOps kMatrixOps = {prepare_linear, run_linear,      unpack_linear, pack_linear, gather_rows,
                                  pack_tokens,    multiply_panels, false,         kHasWords};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
