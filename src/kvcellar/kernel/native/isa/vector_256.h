// Floats in vectors of AVX2.
// Only included by isa/vector.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int kLanes = 8;
using Vec = __m256;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec all(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline float sum(Vec x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float highest(Vec x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Vec nearest(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Vec load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_nibbles(const uint8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  const __m128i both = _mm_cvtsi32_si128(four);
  const __m128i low = _mm_and_si128(both, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15));
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
}
// Numbers at even places of 16 and those at odd ones.
inline void part_pairs(Vec x, Vec y, Vec& even, Vec& odd) {
  const auto in_order = [](Vec z) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(z), 0xd8)); };
  even = in_order(_mm256_shuffle_ps(x, y, 0x88));
  odd = in_order(_mm256_shuffle_ps(x, y, 0xdd));
}
inline Vec even_of(__m256i both) { return _mm256_castsi256_ps(_mm256_slli_epi32(both, 16)); }
inline Vec odd_of(__m256i both) { return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(-65536))); }
inline void split(__m256i both, Vec& even, Vec& odd) {
  even = even_of(both);
  odd = odd_of(both);
}
inline void load_split(const uint16_t* p, Vec& even, Vec& odd) {
  split(kept(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), even, odd);
}
inline Vec all_fours(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
inline Vec sum_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
inline void sum_4(Vec a, Vec b, Vec c, Vec d, float* to) {
  const Vec fours = sum_fours(a, b, c, d);
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(fours), _mm256_extractf128_ps(fours, 1)));
}
inline void store_fours(Vec x, float* to, int64_t step) {
  _mm_storeu_ps(to, _mm256_castps256_ps128(x));
  _mm_storeu_ps(to + step, _mm256_extractf128_ps(x, 1));
}
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = max(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = max(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const Vec tops = max(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm256_permutevar8x32_ps(tops, _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0));
}
inline void store_u8(uint8_t* p, Vec x) {
  const __m256i whole = _mm256_cvtps_epi32(x);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
inline void store_half(uint16_t* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_bf16(uint16_t* p, Vec x) {
  alignas(32) float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(lanes[i]);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
