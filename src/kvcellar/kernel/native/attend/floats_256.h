// A few query rows over rows of floats as they lie, with 256 bits: what was read is decoded in registers,
// once for each four of them. Decoding into scratch first takes as long as half of four rows' products.
//
// Only included by attend/attention.h.

#pragma once

#include <immintrin.h>

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// run(Number<dtype>()).
template <class Run>
inline void with_float(Dtype dtype, const Run& run) {
  constexpr auto number = [](Dtype of) { return static_cast<int>(of); };
  dtype == Dtype::bf16  ? run(Number<number(Dtype::bf16)>())
  : dtype == Dtype::f16 ? run(Number<number(Dtype::f16)>())
                        : run(Number<number(Dtype::f32)>());
}

// Whether rows are read so.
inline bool fits_registers(const Pool& pool, const Side& side, int64_t rows) {
  return rows <= 16 && !is_quantised(side.dtype) && side.dim % 16 == 0 && !pool.exact;
}

// Lines of memory that 32 numbers are.
constexpr int64_t lines_of_32(Dtype dtype) { return dtype == Dtype::f32 ? 2 : 1; }

// 16 numbers of a row from the d-th on: bfloat16 in the order of load_split.
template <Dtype dtype>
inline void load_16(const char* row, int64_t d, Vec* x) {
  const auto* halves = reinterpret_cast<const uint16_t*>(row) + d;
  if (dtype == Dtype::bf16) {
    load_split(halves, x[0], x[1]);
  } else if (dtype == Dtype::f16) {
    x[0] = load_half(halves);
    x[1] = load_half(halves + 8);
  } else {
    x[0] = load(reinterpret_cast<const float*>(row) + d);
    x[1] = load(reinterpret_cast<const float*>(row) + d + 8);
  }
}

// 8 numbers of a row from the d-th on, in vectors that have four of them twice: of bfloat16 those at even places,
// then those at odd ones.
template <Dtype dtype>
inline void load_8_twice(const char* row, int64_t d, Vec* x) {
  if (dtype == Dtype::bf16) {
    const auto* eight = reinterpret_cast<const __m128i*>(row + 2 * d);
    split(kept(_mm256_broadcastsi128_si256(_mm_loadu_si128(eight))), x[0], x[1]);
  } else {
    for (int i = 0; i < 2; ++i) x[i] = all_fours(reinterpret_cast<const float*>(row) + d + 4 * i);
  }
}

// Where numbers [i, i + 4) of the r-th of 4 queries lie for what follows; those of bfloat16 come in the order of
// load_split.
inline int64_t place_of_four(Dtype dtype, int64_t r, int64_t i) {
  if (dtype == Dtype::f16) return i / 16 * 64 + r * 16 + i % 16;
  const bool is_split = dtype == Dtype::bf16;
  return (is_split ? i / 16 * 2 + i % 8 / 4 : i / 8) * 32 + i % (is_split ? 16 : 8) / (is_split ? 8 : 4) * 16 + r * 4;
}

// s[r][c] = q[r] . k[c] for 4 rows and 16 cells whose K rows lie `step` bytes apart, four cells at a time: a vector
// is four numbers of each of two queries. `tops`, `kPad` and `given` as of logits_of.
template <Dtype dtype, int kPad, bool is_fetching>
inline void logits_of_twos(const float* queries, int64_t any_pad, const char* row, int64_t step, float* s, float* tops,
                           const Lines& given) {
  Lines lines = given;
  const int64_t k_pad = kPad ? kPad : any_pad;
  constexpr int64_t kLines = lines_of_32(dtype);
  Vec most[2] = {load(tops), load(tops + 8)};
  for (int64_t c = 0; c < 16; c += 4, row += 4 * step) {
    Vec a[4][2];
    for (auto& cell : a)
      for (Vec& x : cell) x = all(0.f);
    const float* q = queries;
    __asm__("" : "+r"(q));  // or all queries would be kept, on the stack
#pragma GCC unroll 8
    for (int64_t d = 0; d < k_pad; d += 8, q += 32) {
      Vec x[4][2];
      for (int half = 0; half < 2; ++half) {
        const Vec y = kept(load(q + half * 16)), z = kept(load(q + half * 16 + 8));
        for (int i = 0; i < 4; ++i) {
          if (half == 0) load_8_twice<dtype>(row + i * step, d, x[i]);
          a[i][0] = fma(x[i][half], y, a[i][0]);
          a[i][1] = fma(x[i][half], z, a[i][1]);
        }
      }
      for (int64_t i = 0; is_fetching && kPad && i < kLines; ++i) lines.one(d / 8 * kLines + i);
    }
    for (int k = 0; k < 2; ++k) {
      const Vec logits = sum_fours(a[0][k], a[1][k], a[2][k], a[3][k]);
      most[k] = max(most[k], logits);
      store_fours(logits, s + 2 * k * kTile + c, kTile);
    }
  }
  for (int k = 0; k < 2; ++k) store(tops + 8 * k, most[k]);
}

// The same of float16, whose conversions give eight numbers: two cells at a time, a vector is eight of one query.
template <Dtype dtype, int kPad, bool is_fetching>
inline void logits_of_ones(const float* queries, int64_t any_pad, const char* row, int64_t step, float* s, float* tops,
                           const Lines& given) {
  Lines lines = given;
  const int64_t k_pad = kPad ? kPad : any_pad;
  constexpr int64_t kLines = lines_of_32(dtype);
  alignas(32) float found[16 * 4];  // [cell][row]
  for (int64_t c = 0; c < 16; c += 2, row += 2 * step) {
    Vec a[2][4];
    for (auto& cell : a)
      for (Vec& x : cell) x = all(0.f);
    const float* q = queries;
    __asm__("" : "+r"(q));  // or all queries would be kept, on the stack
#pragma GCC unroll 8
    for (int64_t d = 0; d < k_pad; d += 16, q += 64) {
      Vec x[2][2];
      for (int i = 0; i < 2; ++i) load_16<dtype>(row + i * step, d, x[i]);
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 4; ++r) {
          const Vec y = kept(load(q + r * 16 + half * 8));
          for (int i = 0; i < 2; ++i) a[i][r] = fma(x[i][half], y, a[i][r]);
        }
      }
      for (int64_t i = 0; is_fetching && kPad && i < kLines; ++i) lines.one(d / 16 * kLines + i);
    }
    Vec sums[2];
    for (int i = 0; i < 2; ++i) sums[i] = sum_fours(a[i][0], a[i][1], a[i][2], a[i][3]);
    store(found + 4 * c,
          add(_mm256_permute2f128_ps(sums[0], sums[1], 0x20), _mm256_permute2f128_ps(sums[0], sums[1], 0x31)));
  }
  Vec most[4];
  for (int64_t c = 0; c < 16; c += 8) {
    Vec x[4], y[4];
    for (int i = 0; i < 4; ++i)
      x[i] = _mm256_set_m128(_mm_load_ps(found + 4 * (c + i + 4)), _mm_load_ps(found + 4 * (c + i)));
    for (int i = 0; i < 4; i += 2) {
      y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
      y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int r = 0; r < 4; ++r) {
      const Vec logits =
          r % 2 ? _mm256_shuffle_ps(y[r / 2], y[r / 2 + 2], 0xee) : _mm256_shuffle_ps(y[r / 2], y[r / 2 + 2], 0x44);
      store(s + r * kTile + c, logits);
      most[r] = c ? max(most[r], logits) : logits;
    }
  }
  for (int r = 0; r < 4; ++r) {
    const __m128 top = _mm_max_ps(_mm256_castps256_ps128(most[r]), _mm256_extractf128_ps(most[r], 1));
    _mm_storeu_ps(tops + 4 * r, _mm_max_ps(top, _mm_loadu_ps(tops + 4 * r)));
  }
}

template <Dtype dtype, int kPad, bool is_fetching>
inline void logits_of_rows(const float* queries, int64_t k_pad, const char* row, int64_t step, float* s, float* tops,
                           const Lines& given) {
  if constexpr (dtype == Dtype::f16)
    logits_of_ones<dtype, kPad, is_fetching>(queries, k_pad, row, step, s, tops, given);
  else
    logits_of_twos<dtype, kPad, is_fetching>(queries, k_pad, row, step, s, tops, given);
}

// acc[r] += s[r][c] * v[c] for 4 rows and the n cells of a tile: V rows from `at` on, `steps` bytes apart,
// for each 16.
template <Dtype dtype, bool is_fetching>
inline void values_of_rows(const float* s, const char* const* at, const int64_t* steps, int64_t n, int64_t v_pad,
                           float* acc, const Next& next) {
  constexpr int64_t kLines = lines_of_32(dtype);
  Lines lines = Next::nothing();
  int64_t turn = 0, left = 0;
  for (int64_t d = 0; d < v_pad; d += 16, acc += 16) {
    Vec a[4][2];
    for (int r = 0; r < 4; ++r)
      for (int j = 0; j < 2; ++j) a[r][j] = load(acc + r * v_pad + j * 8);
    for (int64_t first = 0; first < n; first += 16) {
      if (is_fetching && !left) {
        lines = next.turn_of_values(turn++, v_pad / 2 * kLines);
        left = v_pad / 16;
      }
      --left;
      const char* row = at[first / 16];
      const int64_t step = steps[first / 16];
      const auto add = [&](int64_t c) {
        Vec x[2];
        load_16<dtype>(row, d, x);
        row += step;
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          const Vec p = all(s[r * kTile + c]);
          for (int j = 0; j < 2; ++j) a[r][j] = fma(p, x[j], a[r][j]);
        }
      };
      if (first + 16 <= n) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) {
          for (int64_t j = 0; is_fetching && i % 2 && j < kLines; ++j) lines.one(i / 2 * kLines + j);
          add(first + i);
        }
      } else {
        for (int64_t c = first; c < n; ++c) add(c);
      }
    }
    for (int r = 0; r < 4; ++r)
      for (int j = 0; j < 2; ++j) store(acc + r * v_pad + j * 8, a[r][j]);
  }
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
