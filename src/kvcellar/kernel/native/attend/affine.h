// What products of integer rows need on x86: which rows fit, and their scales and biases side by side.
//
// Only included by attend/attention.h.

#pragma once

#include <immintrin.h>

#include "core/levels.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int64_t kMaxGroups = 16;  // of a row

inline int64_t groups(const Side& side) { return is_quantised(side.dtype) ? side.dim / side.group_size : 0; }

// Whether a row is whole chunks of 64 numbers, of one group or of two halves.
inline bool fits_chunks(const Side& side) {
  if (!is_quantised(side.dtype) || side.dim % 64 || groups(side) > kMaxGroups) return false;
  return side.group_size == 32 || side.group_size % 64 == 0;
}

#if defined(KVC_AVX512)
// kGroups scales and biases of each of 16 cells, side by side as halves, to vectors of 16 cells: scale
// and bias of the first group, and of the second. They are sorted as halves, which are fewer vectors.
template <int kGroups>
inline void part_affine(const char* from, Vec* to) {
  constexpr int kParts = 2 * kGroups, kCells = 32 / kParts;  // of a vector
  struct Order {
    uint16_t of[32];
    constexpr Order() : of{} {
      for (int i = 0; i < 32; ++i) of[i] = static_cast<uint16_t>(i % kCells * kParts + i / kCells);
    }
  };
  alignas(64) static constexpr Order order;
  alignas(64) uint16_t halves[kParts][16];
  const __m512i places = _mm512_load_si512(order.of);
  const __m512i x = _mm512_permutexvar_epi16(places, _mm512_loadu_si512(from));
  if (kGroups == 1) {
    _mm512_store_si512(halves, x);
  } else {
    const __m512i y = _mm512_permutexvar_epi16(places, _mm512_loadu_si512(from + 64));
    const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
    const __m512i high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    _mm512_store_si512(halves, _mm512_permutex2var_epi64(x, low, y));
    _mm512_store_si512(halves[kParts / 2], _mm512_permutex2var_epi64(x, high, y));
  }
  for (int i = 0; i < kParts; ++i) to[i] = load_half(halves[i]);
}

// Lane i (of 4 numbers) of all four vectors to vector i.
inline void transpose_lanes(const __m512* x, __m512* y) {
  const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
  const __m512 b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  const __m512 d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  y[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  y[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  y[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  y[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

#else
// kGroups scales and biases of each of 8 cells, side by side as halves, to vectors of 8 cells: scale
// and bias of the first group, and of the second.
template <int kGroups>
inline void part_affine(const char* from, Vec* to) {
  constexpr int kParts = 2 * kGroups;
  const auto* bits = reinterpret_cast<const uint16_t*>(from);
  Vec even[kGroups], odd[kGroups];
  for (int i = 0; i < kGroups; ++i) part_pairs(load_half(bits + i * 16), load_half(bits + i * 16 + 8), even[i], odd[i]);
  if (kGroups == 1) {
    to[0] = even[0];
    to[1] = odd[0];
  } else {
    part_pairs(even[0], even[kGroups - 1], to[0], to[kParts - 2]);
    part_pairs(odd[0], odd[kGroups - 1], to[1], to[kParts - 1]);
  }
}
#endif

// See `load_affine`: kGroups groups at a time.
template <int kGroups, Part part, bool is_shifted>
inline void load_affine_of(int64_t n_groups, const TileRows& rows, int64_t n, float* to, float middle, float* largest) {
  constexpr int64_t n_bytes = 4 * kGroups;
  const int64_t stop = (n + 63) / 64 * 64, step = rows.stride[part];
  for (int64_t g = 0; g < n_groups; g += kGroups, to += kGroups * 2 * kTile) {
    Vec most[kGroups];
    for (Vec& x : most) x = all(0.f);
    for (int64_t c = 0; c < stop; c += 16) {
      alignas(64) char room[16 * n_bytes];
      const char* from = room;
      const bool is_whole = c < n && rows.is_whole[c / 16];
      if (is_whole && step == n_bytes) {
        from = rows.first[part][c / 16];
      } else if (is_whole) {
        const char* row = rows.first[part][c / 16] + 4 * g;
        for (int64_t i = 0; i < 16; ++i, row += step) std::memcpy(room + i * n_bytes, row, n_bytes);
      } else {
        std::memset(room, 0, sizeof room);
        for (int64_t i = 0; i < 16 && c + i < n; ++i)
          std::memcpy(room + i * n_bytes, rows.row(part, c + i) + 4 * g, n_bytes);
      }
#pragma GCC unroll 2
      for (int64_t i = 0; i < 16; i += kLanes) {
        Vec x[2 * kGroups];
        part_affine<kGroups>(from + i * n_bytes, x);
        for (int64_t j = 0; j < kGroups; ++j) {
          float* scales = to + j * 2 * kTile + c + i;
          store(scales, x[2 * j]);
          store(scales + kTile, is_shifted ? fma(x[2 * j], all(middle), x[2 * j + 1]) : x[2 * j + 1]);
          most[j] = max(most[j], x[2 * j]);
        }
      }
    }
    for (int64_t j = 0; is_shifted && j < kGroups; ++j) largest[g + j] = highest(most[j]);
  }
}

// For each group kTile scales, then kTile biases, as float32; zeros behind the n-th up to the next
// multiple of 64.
template <Part part>
inline void load_affine(int64_t n_groups, const TileRows& rows, int64_t n, float* to) {
  n_groups % 2 ? load_affine_of<1, part, false>(n_groups, rows, n, to, 0.f, nullptr)
               : load_affine_of<2, part, false>(n_groups, rows, n, to, 0.f, nullptr);
}

// The same with biases of numbers that are counted from `middle`. `largest`: each group's largest scale.
template <Part part>
inline void load_affine(int64_t n_groups, const TileRows& rows, int64_t n, float* to, float middle, float* largest) {
  n_groups % 2 ? load_affine_of<1, part, true>(n_groups, rows, n, to, middle, largest)
               : load_affine_of<2, part, true>(n_groups, rows, n, to, middle, largest);
}

#if defined(KVC_AVX512)
// Two rows of 32 bytes in one vector.
inline __m512i two_halves(const char* a, const char* b) {
  const auto* low = reinterpret_cast<const __m256i*>(a);
  const auto* high = reinterpret_cast<const __m256i*>(b);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)), _mm256_loadu_si256(high), 1);
}
#endif

// Whether weights of 0 silence all of these rows.
inline bool has_finite_affine(const Side& side, const TileRows& rows, Part part, int64_t n) {
  bool found = false;
  for (int64_t c = 0; c < n; ++c) {
    const auto* bits = reinterpret_cast<const uint16_t*>(rows.row(part, c));
    for (int64_t d = 0; d < 2 * groups(side); ++d) found |= (bits[d] & 0x7C00) == 0x7C00;
  }
  return !found;
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
