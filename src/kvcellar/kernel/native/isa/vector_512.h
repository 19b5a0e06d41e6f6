// Floats in vectors of AVX-512.
// Only included by isa/vector.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int kLanes = 16;
using Vec = __m512;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec all(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum(Vec x) { return _mm512_reduce_add_ps(x); }
inline float highest(Vec x) { return _mm512_reduce_max_ps(x); }
inline Vec nearest(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_nibbles(const uint8_t* p) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i low = _mm_and_si128(both, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
}
#if defined(KVC_BF16)
// Sums of products of two bfloat16 in each lane and a's.
inline Vec dot_bf16_pairs(Vec x, Vec y, Vec a) { return _mm512_dpbf16_ps(a, (__m512bh)(x), (__m512bh)(y)); }
inline Vec all_pairs(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*p))); }
// Of two rows of 32 bfloat16, the second's are 0 without it.
inline void load_pairs(const char* p, const char* q, Vec& even, Vec& odd) {
  const __m512i x = _mm512_loadu_si512(p), y = q ? _mm512_loadu_si512(q) : _mm512_setzero_si512();
  even = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y));
  odd = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y));
}
// a, and x times the two numbers at p.
inline Vec add_pair(Vec a, Vec x, const char* p) {
  const auto* pair = reinterpret_cast<const uint32_t*>(p);
#if defined(KVC_EMULATED)
  return dot_bf16_pairs(x, all_pairs(pair), a);
#else
  __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(a) : "v"(x), "m"(*pair));
  return a;
#endif
}
inline bool is_any_above(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ); }
// Floats as bfloat16, x[i] beside y[i]; `total` and what they add to it.
inline Vec store_by_turns(uint32_t* p, Vec x, Vec y, Vec total) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(x), half), 16);
  const __m512i high = _mm512_add_epi32(_mm512_castps_si512(y), half);
  const __m512i pairs = _mm512_mask_mov_epi16(low, 0xAAAAAAAA, high);
  _mm512_storeu_si512(p, pairs);
  return _mm512_dpbf16_ps(total, (__m512bh)(pairs), (__m512bh)(_mm512_set1_epi32(0x3F803F80)));
}
// 32 floats as bfloat16; `total` and what they add to it.
inline Vec store_pairs(uint32_t* p, Vec x, Vec y, Vec total) {
  const __m512bh pairs = _mm512_cvtne2ps_pbh(y, x);
  _mm512_storeu_si512(p, (__m512i)(pairs));
  return _mm512_dpbf16_ps(total, pairs, (__m512bh)(_mm512_set1_epi32(0x3F803F80)));
}
inline void split(__m512i both, Vec& even, Vec& odd) {
  const __m512i zero = _mm512_setzero_si512();
  even = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, both));
  odd = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, both));
}
#else
inline void split(__m512i both, Vec& even, Vec& odd) {
  even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(-65536)));
}
#endif
inline void load_split(const uint16_t* p, Vec& even, Vec& odd) { split(_mm512_loadu_si512(p), even, odd); }
inline Vec all_fours(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }
inline Vec sum_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}
inline void sum_4(Vec a, Vec b, Vec c, Vec d, float* to) {
  const Vec fours = sum_fours(a, b, c, d);
  const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(fours), _mm512_extractf32x8_ps(fours, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
}
inline void store_fours(Vec x, float* to, int64_t step) {
  _mm_storeu_ps(to, _mm512_castps512_ps128(x));
  _mm_storeu_ps(to + step, _mm512_extractf32x4_ps(x, 1));
  _mm_storeu_ps(to + 2 * step, _mm512_extractf32x4_ps(x, 2));
  _mm_storeu_ps(to + 3 * step, _mm512_extractf32x4_ps(x, 3));
}
inline Vec transposed_fours(Vec x) {
  return _mm512_permutexvar_ps(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), x);
}
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = max(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = max(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec tops = max(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  return transposed_fours(tops);
}
// 16 vectors of 16: rows to columns.
inline void transpose16(Vec* x) {
  Vec t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      x[i + 2 * j + 1] = _mm512_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    x[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    x[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}
inline void store_u8(uint8_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
inline void store_half(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
