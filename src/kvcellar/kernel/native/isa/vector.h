// Float vectors of one instruction set, in that set's own namespace: the same names in each.
// KVC_NAMESPACE, and one of KVC_AVX512, KVC_AVX2, KVC_NEON or none, are set by the including file.
//
// Nothing here may come from a header whose inline functions are shared with other translation
// units: the linker keeps one copy of those, and it might be one that this machine cannot run.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(KVC_AVX512) || defined(KVC_AVX2)
#include <immintrin.h>
#elif defined(KVC_NEON)
#include <arm_neon.h>
#endif

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16);
}

inline float half_to_float(uint16_t half) {
#if defined(KVC_AVX512) || defined(KVC_AVX2)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, fraction = half & 1023;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000 | fraction << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    const float small = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2**-24
    std::memcpy(&bits, &small, 4);
    bits |= sign;
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

inline uint16_t float_to_half(float value) {
#if defined(KVC_AVX512) || defined(KVC_AVX2)
  return static_cast<uint16_t>(
      _mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
#else
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return sign | 0x7E00 | static_cast<uint16_t>(bits >> 13 & 1023);
  if (bits >= 0x477FF000) return sign | 0x7C00;  // rounds to 2**16 or more
  if (bits < 0x38800000) {                       // below the smallest normal half
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // the sum's last bit is 2**-24, a half's smallest step: rounds to even
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<uint16_t>(bits - 0x3F000000);
  }
  return sign | static_cast<uint16_t>((bits + 0xFFF + ((bits >> 13) & 1) - 0x38000000) >> 13);
#endif
}

#if defined(KVC_AVX512) || defined(KVC_AVX2)
// The same vector in a register, for the compiler a new one: it is not loaded again for each use, and a
// sum not made in another order.
template <class V>
inline V kept(V x) {
#if !defined(KVC_EMULATED)
  __asm__("" : "+v"(x));
#endif
  return x;
}
#endif

#if defined(KVC_AVX512)

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
inline Vec nearest(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec load_bf16(const uint16_t* p) {
  const __m512i wide =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Vec load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline Vec load_nibbles(const uint8_t* p) {
  const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i low = _mm_and_si128(both, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(both, 4), _mm_set1_epi8(15));
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)));
}
#if defined(KVC_BF16)
// Sums of products of two bfloat16 in each lane and a's.
inline Vec dot_bf16_pairs(Vec x, Vec y, Vec a) {
  return _mm512_dpbf16_ps(a, (__m512bh)(x), (__m512bh)(y));
}
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
inline void load_split(const uint16_t* p, Vec& even, Vec& odd) {
  split(_mm512_loadu_si512(p), even, odd);
}
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
  return _mm512_permutexvar_ps(
      _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), x);
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
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline void store_bf16(uint16_t* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, _mm512_srli_epi32(bits, 16),
                                 _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

#elif defined(KVC_AVX2)

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
inline Vec nearest(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec load_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Vec load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
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
  const auto in_order = [](Vec z) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(z), 0xd8));
  };
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
inline Vec all_fours(const float* p) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
}
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
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
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

#elif defined(KVC_NEON)

constexpr int kLanes = 4;
using Vec = float32x4_t;
inline Vec load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, Vec x) { vst1q_f32(p, x); }
inline Vec all(float x) { return vdupq_n_f32(x); }
inline Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
inline Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
inline Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
inline Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
inline Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
inline float sum(Vec x) { return vaddvq_f32(x); }
inline float highest(Vec x) { return vmaxvq_f32(x); }
inline Vec nearest(Vec x) { return vrndnq_f32(x); }
inline Vec times_power_of_2(Vec x, Vec n) {  // -126 <= n <= 127
  const int32x4_t bits = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  return vmulq_f32(x, vreinterpretq_f32_s32(bits));
}
inline Vec zero_far_below(Vec x, Vec y) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(y), vcltq_f32(x, all(-126.f))));
}
inline Vec load_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}
inline Vec load_half(const uint16_t* p) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
inline Vec load_u8(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
}
inline Vec load_nibbles(const uint8_t* p) {
  const uint8_t spread[4] = {static_cast<uint8_t>(p[0] & 15), static_cast<uint8_t>(p[0] >> 4),
                             static_cast<uint8_t>(p[1] & 15), static_cast<uint8_t>(p[1] >> 4)};
  return load_u8(spread);
}
inline void load_split(const uint16_t* p, Vec& even, Vec& odd) {
  const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(p));
  even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
  odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xFFFF0000)));
}
inline Vec all_fours(const float* p) { return vld1q_f32(p); }
inline Vec sum_fours(Vec a, Vec b, Vec c, Vec d) {
  return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
}
inline void sum_4(Vec a, Vec b, Vec c, Vec d, float* to) { vst1q_f32(to, sum_fours(a, b, c, d)); }
inline void store_fours(Vec x, float* to, int64_t) { vst1q_f32(to, x); }
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) {
  return vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d));
}
inline void store_u8(uint8_t* p, Vec x) {
  const uint16x4_t words = vmovn_u32(vcvtq_u32_f32(x));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  std::memcpy(p, &four, 4);
}
inline void store_half(uint16_t* p, Vec x) {
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
inline void store_bf16(uint16_t* p, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(lanes[i]);
}

#else

constexpr int kLanes = 4;  // the compiler makes of it what the processor has in any case
using Vec = float __attribute__((vector_size(16)));
using Whole = int32_t __attribute__((vector_size(16)));
inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, 16);
  return x;
}
inline void store(float* p, Vec x) { std::memcpy(p, &x, 16); }
inline Vec all(float x) { return Vec{x, x, x, x}; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline float sum(Vec x) { return (x[0] + x[1]) + (x[2] + x[3]); }
inline float highest(Vec x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}
inline Vec nearest(Vec x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_rintf(x[i]);
  return x;
}
inline Vec times_power_of_2(Vec x, Vec n) {  // -126 <= n <= 127
  const Whole bits = (__builtin_convertvector(n, Whole) + 127) << 23;
  Vec power;
  std::memcpy(&power, &bits, 16);
  return x * power;
}
inline Vec zero_far_below(Vec x, Vec y) { return x < -126.f ? all(0.f) : y; }
inline Vec load_bf16(const uint16_t* p) {
  return Vec{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
inline Vec load_half(const uint16_t* p) {
  return Vec{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
inline Vec load_u8(const uint8_t* p) {
  return __builtin_convertvector(Whole{p[0], p[1], p[2], p[3]}, Vec);
}
inline Vec load_nibbles(const uint8_t* p) {
  return __builtin_convertvector(Whole{p[0] & 15, p[0] >> 4, p[1] & 15, p[1] >> 4}, Vec);
}
inline void load_split(const uint16_t* p, Vec& even, Vec& odd) {
  Whole both;
  std::memcpy(&both, p, 16);
  const Whole low = both << 16, high = both & -65536;
  std::memcpy(&even, &low, 16);
  std::memcpy(&odd, &high, 16);
}
inline Vec all_fours(const float* p) { return load(p); }
inline Vec sum_fours(Vec a, Vec b, Vec c, Vec d) { return Vec{sum(a), sum(b), sum(c), sum(d)}; }
inline void sum_4(Vec a, Vec b, Vec c, Vec d, float* to) { store(to, sum_fours(a, b, c, d)); }
inline void store_fours(Vec x, float* to, int64_t) { store(to, x); }
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) {
  return Vec{highest(a), highest(b), highest(c), highest(d)};
}
inline void store_u8(uint8_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
inline void store_half(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(x[i]);
}
inline void store_bf16(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x[i]);
}

#endif

// Of all: load_split gives 2 * kLanes numbers in the order that is cheapest: those at even places, then
// those at odd ones, but with products of bfloat16 four numbers to each vector by turns. Fours are the
// kLanes / 4 parts of a vector: all_fours loads the same 4 numbers into each, sum_fours gives of each the
// sums in a, b, c and d, sum_4 their sums, store_fours puts them `step` numbers apart, highest_fours gives
// the highest of each of a's, then of b's, c's and d's.

#if defined(KVC_BF16)
constexpr int split_place(int i) { return i % 8 / 4 * kLanes + i / 8 * 4 + i % 4; }
#else
constexpr int split_place(int i) { return i % 2 * kLanes + i / 2; }
#endif
#if defined(KVC_AVX512)
struct SplitOrder {
  int32_t forth[2 * kLanes], back[2 * kLanes];
  constexpr SplitOrder() : forth{}, back{} {
    for (int i = 0; i < 2 * kLanes; ++i) forth[split_place(i)] = i, back[i] = split_place(i);
  }
};
#endif

// A multiple of 2 * kLanes numbers in the order of load_split, or back from it, in place.
inline void split_floats(float* row, int64_t n, [[maybe_unused]] bool is_back) {
#if defined(KVC_AVX512)
  alignas(64) static constexpr SplitOrder order;
  const auto* places = is_back ? order.back : order.forth;
  const __m512i low = _mm512_load_si512(places), high = _mm512_load_si512(places + kLanes);
#endif
  for (int64_t d = 0; d < n; d += 2 * kLanes) {
#if defined(KVC_AVX512)
    const Vec x = load(row + d), y = load(row + d + kLanes);
    store(row + d, _mm512_permutex2var_ps(x, low, y));
    store(row + d + kLanes, _mm512_permutex2var_ps(x, high, y));
#elif defined(KVC_AVX2)
    const Vec x = load(row + d), y = load(row + d + kLanes);
    if (is_back) {
      const Vec low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
      store(row + d, _mm256_permute2f128_ps(low, high, 0x20));
      store(row + d + kLanes, _mm256_permute2f128_ps(low, high, 0x31));
    } else {
      Vec even, odd;
      part_pairs(x, y, even, odd);
      store(row + d, even);
      store(row + d + kLanes, odd);
    }
#else
    float was[2 * kLanes];
    std::memcpy(was, row + d, sizeof was);
    for (int i = 0; i < 2 * kLanes; ++i)
      row[d + (is_back ? i : split_place(i))] = was[is_back ? split_place(i) : i];
#endif
  }
}

// A number that is known when this is compiled.
template <int value>
struct Number {
  static constexpr int of = value;
};

// run(Number<n>()), for n from 1 to kMost.
template <int kMost, class Run>
inline void with_number(int64_t n, const Run& run) {
  if constexpr (kMost > 1)
    if (n < kMost) return with_number<kMost - 1>(n, run);
  run(Number<kMost>());
}

// While it lives, numbers below the normal ones are 0 where they would cost hundreds of cycles: as results, and
// as what happens to lie in scratch behind a tile's last rows.
struct FlushToZero {
#if defined(KVC_AVX512)
  const unsigned was = _mm_getcsr();
  FlushToZero() { _mm_setcsr(was | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushToZero() { _mm_setcsr(was); }
  FlushToZero(const FlushToZero&) = delete;
#endif
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kMinusInfinity = -__builtin_inff();

#if defined(KVC_AVX512)
inline Vec fraction(Vec x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
#endif

// 2**x for x <= 100 with a relative error of some 5e-7 at most; 0 far below, NaN for NaN.
#if defined(KVC_AVX512) && !defined(KVC_BF16)
// Intel's processors take fractions and set exponents in one operation each, as fast as any other.
inline Vec exp2_below_1(Vec x) {
  const Vec f = fraction(x);
  Vec y = all(1.86713007e-3f);
  y = fma(y, f, all(9.01703032e-3f));
  y = fma(y, f, all(5.57999131e-2f));
  y = fma(y, f, all(2.40164450e-1f));
  y = fma(y, f, all(6.93151312e-1f));
  y = fma(y, f, all(1.f));
  return _mm512_scalef_ps(y, x);
}
#elif defined(KVC_AVX512)
inline Vec exp2_below_1(Vec x) {
  // In sixteenths, which are the last bits of a sum, and what is left: a root of 2 by the lowest four, less
  // what these add when all of them go to the exponent, and two terms of a series. Few of these are
  // multiplications, which the loops around have enough of.
  alignas(64) static constexpr uint32_t roots[16] = {
      0x3F800000, 0x3F7DAAC3, 0x3F7B95C2, 0x3F79C3D3, 0x3F7837F0, 0x3F76F532, 0x3F75FED7, 0x3F75583F,
      0x3F7504F3, 0x3F7508A4, 0x3F75672A, 0x3F76248C, 0x3F7744FD, 0x3F78CCDF, 0x3F7AC0C7, 0x3F7D257D
  };
  const Vec large = all(786432.f), shifted = add(x, large), rest = sub(x, sub(shifted, large));
  const __m512i bits = _mm512_castps_si512(shifted);
  const __m512i root = _mm512_permutexvar_epi32(bits, _mm512_load_si512(roots));
  const __m512i power = _mm512_add_epi32(root, _mm512_slli_epi32(bits, 19));
  const Vec y = fma(fma(all(0.24023516f), rest, all(0.69318777f)), rest, all(1.f));
  const __mmask16 is_normal = _mm512_cmp_ps_mask(x, all(-126.f), _CMP_NLT_UQ);
  return _mm512_maskz_mul_ps(is_normal, y, _mm512_castsi512_ps(power));
}
#elif defined(KVC_AVX2)
inline Vec exp2_below_1(Vec x) {
  // The sum's last bits are the nearest whole number plus 127: an exponent, which is 0 at the least. Max
  // gives its second argument where one is NaN.
  const Vec large = all(12582912.f + 127.f), clipped = max(all(-127.f), x);
  const Vec shifted = add(clipped, large), f = sub(clipped, sub(shifted, large));
  Vec y = all(1.3264632e-3f);
  y = fma(y, f, all(9.6714869e-3f));
  y = fma(y, f, all(5.5507336e-2f));
  y = fma(y, f, all(2.4022242e-1f));
  y = fma(y, f, all(6.9314700e-1f));
  y = fma(y, f, all(1.f));
  return mul(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
#else
inline Vec exp2_below_1(Vec x) {
  // A number below the normal ones would cost hundreds of cycles.
  const Vec clipped = max(all(-126.f), x);
  const Vec whole = nearest(clipped), f = sub(clipped, whole);
  Vec y = all(1.5403530e-4f);
  y = fma(y, f, all(1.3333558e-3f));
  y = fma(y, f, all(9.6181291e-3f));
  y = fma(y, f, all(5.5504109e-2f));
  y = fma(y, f, all(2.4022651e-1f));
  y = fma(y, f, all(6.9314718e-1f));
  y = fma(y, f, all(1.f));
  return zero_far_below(x, times_power_of_2(y, whole));
}
#endif

// The same for x <= 100 with a relative error of 2.4e-4, none at whole numbers, for weights that become
// bfloat16 or meet rows that were rounded to more than that; 2**-120 or 0 far below.
#if defined(KVC_AVX512)
inline Vec exp2_rough(Vec x) {
  const Vec f = fraction(x);
  const Vec y = fma(fma(all(7.7067042e-2f), f, all(2.27644991e-1f)), f, all(6.95116786e-1f));
  return _mm512_scalef_ps(fma(y, f, all(1.f)), x);
}
#elif defined(KVC_AVX2)
inline Vec exp2_rough(Vec x) {
  const Vec large = all(12582912.f + 127.f), clipped = max(all(-127.f), x);
  const Vec shifted = add(clipped, large), f = sub(clipped, sub(shifted, large));
  const Vec y = fma(fma(all(5.5008700e-2f), f, all(2.42210660e-1f)), f, all(6.93282920e-1f));
  return mul(fma(y, f, all(1.f)), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
}
#endif
#if defined(KVC_BF16)
// The same with more operations, of which fewer wait for the units that multiply.
inline Vec exp2_beside_products(Vec x) {
  // Of sixteenths the power's first and second term lie in tables: products take the same parts of Zen 4 as
  // multiplications do, and leave free what adds, shifts and looks up.
  alignas(64) static constexpr float roots[16] = {
      1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f,
      1.29683959f, 1.35425556f, 1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f,
      1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f};
  alignas(64) static constexpr float slopes[16] = {
      0.693147182f, 0.723835409f, 0.755882382f, 0.789348125f, 0.82429558f, 0.860790253f,
      0.898900688f, 0.938698411f, 0.980258167f, 1.02365792f, 1.06897914f, 1.11630678f,
      1.16573f, 1.21734118f, 1.27123749f, 1.32752001f};
  const Vec large = all(786432.f), clipped = max(all(-120.f), x);  // NaN stays
  const Vec shifted = add(clipped, large), rest = sub(clipped, sub(shifted, large));
  const __m512i bits = _mm512_castps_si512(shifted);
  const Vec slope = _mm512_permutexvar_ps(bits, _mm512_load_ps(slopes));
  const Vec y = fma(slope, rest, _mm512_permutexvar_ps(bits, _mm512_load_ps(roots)));
  const __m512i whole = _mm512_slli_epi32(_mm512_and_si512(bits, _mm512_set1_epi32(-16)), 19);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), whole));
}
#endif

inline float exp2_one(float x) {
  float lanes[kLanes];
  store(lanes, exp2_below_1(all(x)));
  return lanes[0];
}

inline float exp2_or_0(float x) { return x == kMinusInfinity ? 0.f : exp2_one(x); }

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
