// What both products of integer rows need on x86 with 512 bits: which rows fit, and their scales and
// biases side by side.
//
// Only included by attend_impl.h.

#include <immintrin.h>

#include "isa.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int64_t kMaxGroups = 16;  // of a row

inline int64_t groups(const Side& side) {
  return is_quantised(side.dtype) ? side.dim / side.group_size : 0;
}

// Whether a row is whole chunks of 64 numbers, of one group or of two halves.
inline bool fits_chunks(const Side& side) {
  if (!is_quantised(side.dtype) || side.dim % 64 || groups(side) > kMaxGroups) return false;
  return side.group_size == 32 || side.group_size % 64 == 0;
}

// 16 cells of 4 numbers each to 4 vectors of 16 cells.
inline void transpose4(__m512* x) {
  const __m512i low = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i high = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
  const __m512 a = x[0], b = x[1], c = x[2], d = x[3];
  const __m512 ab0 = _mm512_permutex2var_ps(a, low, b), ab1 = _mm512_permutex2var_ps(a, high, b);
  const __m512 cd0 = _mm512_permutex2var_ps(c, low, d), cd1 = _mm512_permutex2var_ps(c, high, d);
  x[0] = _mm512_shuffle_f32x4(ab0, cd0, 0x44);
  x[1] = _mm512_shuffle_f32x4(ab0, cd0, 0xee);
  x[2] = _mm512_shuffle_f32x4(ab1, cd1, 0x44);
  x[3] = _mm512_shuffle_f32x4(ab1, cd1, 0xee);
}

// For each group kTile scales, then kTile biases, as float32; zeros behind the n-th up to the next
// multiple of 64.
inline void load_affine(int64_t n_groups, const TileRows& rows, Part part, int64_t n, float* to) {
  const int64_t stop = (n + 63) / 64 * 64, n_bytes = 4 * n_groups;
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  for (int64_t c = 0; c < stop; c += 16) {
    alignas(64) char room[16 * 4 * kMaxGroups];
    const char* from = room;
    if (c < n && rows.is_whole[c / 16] && rows.stride[part] == n_bytes) {
      from = rows.first[part][c / 16];
    } else {
      std::memset(room, 0, static_cast<size_t>(16 * n_bytes));
      for (int64_t i = 0; i < 16 && c + i < n; ++i)
        std::memcpy(room + i * n_bytes, rows.row(part, c + i), static_cast<size_t>(n_bytes));
    }
    const auto halves = [from](int64_t i) {
      return load_half(reinterpret_cast<const uint16_t*>(from) + 16 * i);
    };
    if (n_groups == 1) {
      const __m512 a = halves(0), b = halves(1);
      _mm512_store_ps(to + c, _mm512_permutex2var_ps(a, evens, b));
      _mm512_store_ps(to + kTile + c, _mm512_permutex2var_ps(a, odds, b));
    } else if (n_groups == 2) {
      __m512 x[4] = {halves(0), halves(1), halves(2), halves(3)};
      transpose4(x);
      for (int i = 0; i < 4; ++i) _mm512_store_ps(to + i * kTile + c, x[i]);
    } else {
      for (int64_t i = 0; i < 16; ++i)
        for (int64_t j = 0; j < 2 * n_groups; ++j)
          to[j * kTile + c + i] =
              half_to_float(reinterpret_cast<const uint16_t*>(from)[i * 2 * n_groups + j]);
    }
  }
}

// Each group's scales, as shares of the largest; that goes to `largest`.
inline void share_scales(int64_t n_groups, int64_t n, float* affine, float* largest) {
  for (int64_t g = 0; g < n_groups; ++g) {
    float* scales = affine + g * 2 * kTile;
    __m512 most = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += 16) most = _mm512_max_ps(most, _mm512_load_ps(scales + c));
    const float top = _mm512_reduce_max_ps(most);
    const __m512 inverse = all(top > 0.f ? 1.f / top : 0.f);
    for (int64_t c = 0; c < n; c += 16)
      _mm512_store_ps(scales + c, _mm512_mul_ps(_mm512_load_ps(scales + c), inverse));
    largest[g] = top;
  }
}

// Two rows of 32 bytes in one vector.
inline __m512i two_halves(const char* a, const char* b) {
  const auto* low = reinterpret_cast<const __m256i*>(a);
  const auto* high = reinterpret_cast<const __m256i*>(b);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)),
                            _mm256_loadu_si256(high), 1);
}

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
