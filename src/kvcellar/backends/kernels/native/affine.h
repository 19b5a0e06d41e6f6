// What products of integer rows need on x86: which rows fit, and their scales and biases side by side.
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

#if defined(KVC_AVX512)
// Numbers at even places of 32 and those at odd ones.
inline void part_pairs(Vec x, Vec y, Vec& even, Vec& odd) {
  const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  even = _mm512_permutex2var_ps(x, evens, y);
  odd = _mm512_permutex2var_ps(x, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), y);
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
// Numbers at even places of 16 and those at odd ones.
inline void part_pairs(Vec x, Vec y, Vec& even, Vec& odd) {
  const auto in_order = [](Vec z) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(z), 0xd8));
  };
  even = in_order(_mm256_shuffle_ps(x, y, 0x88));
  odd = in_order(_mm256_shuffle_ps(x, y, 0xdd));
}

// 8 cells of 4 numbers each to 4 vectors of 8 cells.
inline void transpose4(Vec* x) {
  Vec even[2], odd[2];
  for (int i = 0; i < 2; ++i) part_pairs(x[2 * i], x[2 * i + 1], even[i], odd[i]);
  part_pairs(even[0], even[1], x[0], x[2]);
  part_pairs(odd[0], odd[1], x[1], x[3]);
}
#endif

// See `load_affine`: for kGroups, or up to as many if these are the most.
template <int kGroups>
inline void load_affine_of(int64_t any_groups, const TileRows& rows, Part part, int64_t n, float middle,
                           float* to, float* largest) {
  const int64_t n_groups = kGroups == kMaxGroups ? any_groups : kGroups;
  const int64_t stop = (n + 63) / 64 * 64, n_bytes = 4 * n_groups;
  Vec most[kGroups];
  for (int64_t g = 0; g < n_groups; ++g) most[g] = all(0.f);
  const auto put = [&](int64_t g, int64_t c, Vec scales, Vec biases) {
    most[g] = max(most[g], scales);
    store(to + g * 2 * kTile + c, scales);
    store(to + (g * 2 + 1) * kTile + c, fma(scales, all(middle), biases));
  };
  for (int64_t c = 0; c < stop; c += 16) {
    alignas(64) char room[16 * 4 * kGroups];
    const char* from = room;
    if (c < n && rows.is_whole[c / 16] && rows.stride[part] == n_bytes) {
      from = rows.first[part][c / 16];
    } else {
      std::memset(room, 0, static_cast<size_t>(16 * n_bytes));
      for (int64_t i = 0; i < 16 && c + i < n; ++i)
        std::memcpy(room + i * n_bytes, rows.row(part, c + i), static_cast<size_t>(n_bytes));
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < 16; i += kLanes) {
      const auto* bits = reinterpret_cast<const uint16_t*>(from + i * n_bytes);
      const auto halves = [bits](int64_t j) { return load_half(bits + j * kLanes); };
      if (kGroups == 1) {
        Vec scales, biases;
        part_pairs(halves(0), halves(1), scales, biases);
        put(0, c + i, scales, biases);
      } else if (kGroups == 2) {
        Vec x[4] = {halves(0), halves(1), halves(2), halves(3)};
        transpose4(x);
        put(0, c + i, x[0], x[1]);
        put(kGroups - 1, c + i, x[2], x[3]);
      } else {
        for (int64_t g = 0; g < n_groups; ++g) {
          float x[2][kLanes];
          for (int64_t l = 0; l < kLanes; ++l)
            for (int64_t j = 0; j < 2; ++j) x[j][l] = half_to_float(bits[(l * n_groups + g) * 2 + j]);
          put(g, c + i, load(x[0]), load(x[1]));
        }
      }
    }
  }
  for (int64_t g = 0; largest && g < n_groups; ++g) largest[g] = highest(most[g]);
}

// For each group kTile scales, then kTile biases, as float32; zeros behind the n-th up to the next
// multiple of 64. Biases are those of numbers that are counted from `middle`. `largest`: each group's
// largest scale, if wanted.
inline void load_affine(int64_t n_groups, const TileRows& rows, Part part, int64_t n, float middle,
                        float* to, float* largest = nullptr) {
  n_groups == 1   ? load_affine_of<1>(n_groups, rows, part, n, middle, to, largest)
  : n_groups == 2 ? load_affine_of<2>(n_groups, rows, part, n, middle, to, largest)
                  : load_affine_of<kMaxGroups>(n_groups, rows, part, n, middle, to, largest);
}

#if defined(KVC_AVX512)
// Two rows of 32 bytes in one vector.
inline __m512i two_halves(const char* a, const char* b) {
  const auto* low = reinterpret_cast<const __m256i*>(a);
  const auto* high = reinterpret_cast<const __m256i*>(b);
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)),
                            _mm256_loadu_si256(high), 1);
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
