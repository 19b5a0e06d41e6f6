// Whole numbers in vectors of one instruction set, as vector.h has floats: the same names in each.

#pragma once

#include "isa/vector.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

#if defined(KVC_AVX512)
using Ints = __m512i;
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints x) { _mm512_storeu_si512(p, x); }
inline Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints all_bytes(int8_t x) { return _mm512_set1_epi8(x); }
inline Ints both(Ints x, Ints y) { return _mm512_and_si512(x, y); }
inline Ints add_16(Ints x, Ints y) { return _mm512_add_epi16(x, y); }
inline Ints add_32(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
inline Ints load_u8_ints(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints max_u16(Ints x, Ints y) { return _mm512_max_epu16(x, y); }
inline Ints max_32(Ints x, Ints y) { return _mm512_max_epi32(x, y); }
inline Ints left_32(Ints x, int n) { return _mm512_slli_epi32(x, n); }
inline Ints right_16(Ints x, int n) { return _mm512_srli_epi16(x, n); }
inline Ints right_32(Ints x, int n) { return _mm512_srli_epi32(x, n); }
inline Ints dot_bytes(Ints x, Ints y) { return _mm512_maddubs_epi16(x, y); }
inline Ints dot_words(Ints x, Ints y) { return _mm512_madd_epi16(x, y); }
// Of 16 bytes in all lanes those at `places`; bytes of x and y by turns, of each lane's lower or upper half.
inline Ints all_16_bytes(const void* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Ints look_up(Ints bytes, Ints places) { return _mm512_shuffle_epi8(bytes, places); }
inline Ints mix_lower(Ints x, Ints y) { return _mm512_unpacklo_epi8(x, y); }
inline Ints mix_upper(Ints x, Ints y) { return _mm512_unpackhi_epi8(x, y); }
// Words at even places of x, those at odd ones of y.
inline Ints words_by_turns(Ints x, Ints y) { return _mm512_mask_mov_epi16(x, 0xAAAAAAAA, y); }
inline Vec to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Vec x) { return _mm512_cvtps_epi32(x); }  // the nearest
inline Vec bits_as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints bits_as_ints(Vec x) { return _mm512_castps_si512(x); }

// a[i] + x[2 i] * y[0] + x[2 i + 1] * y[1].
inline Ints dot_pair(Ints a, Ints x, const int32_t& y) {
#if !defined(KVC_EMULATED)
  // The compiler would load y and copy the sum.
  __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(a) : "v"(x), "m"(y));
  return a;
#else
  return kept(add_32(a, dot_words(x, kept(all_ints(y)))));
#endif
}

#elif defined(KVC_AVX2)
using Ints = __m256i;
inline Ints load_ints(const void* p) { return _mm256_loadu_si256(static_cast<const Ints*>(p)); }
inline void store_ints(void* p, Ints x) { _mm256_storeu_si256(static_cast<Ints*>(p), x); }
inline Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints all_bytes(int8_t x) { return _mm256_set1_epi8(x); }
inline Ints both(Ints x, Ints y) { return _mm256_and_si256(x, y); }
inline Ints add_16(Ints x, Ints y) { return _mm256_add_epi16(x, y); }
inline Ints add_32(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
inline Ints load_u8_ints(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Ints max_u16(Ints x, Ints y) { return _mm256_max_epu16(x, y); }
inline Ints max_32(Ints x, Ints y) { return _mm256_max_epi32(x, y); }
inline Ints left_32(Ints x, int n) { return _mm256_slli_epi32(x, n); }
inline Ints right_16(Ints x, int n) { return _mm256_srli_epi16(x, n); }
inline Ints right_32(Ints x, int n) { return _mm256_srli_epi32(x, n); }
inline Ints dot_bytes(Ints x, Ints y) { return _mm256_maddubs_epi16(x, y); }
inline Ints dot_words(Ints x, Ints y) { return _mm256_madd_epi16(x, y); }
inline Ints all_16_bytes(const void* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}
inline Ints look_up(Ints bytes, Ints places) { return _mm256_shuffle_epi8(bytes, places); }
inline Ints mix_lower(Ints x, Ints y) { return _mm256_unpacklo_epi8(x, y); }
inline Ints mix_upper(Ints x, Ints y) { return _mm256_unpackhi_epi8(x, y); }
// Words at even places of x, those at odd ones of y.
inline Ints words_by_turns(Ints x, Ints y) { return _mm256_blend_epi16(x, y, 0xAA); }
inline Vec to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Ints to_ints(Vec x) { return _mm256_cvtps_epi32(x); }  // the nearest
inline Vec bits_as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints bits_as_ints(Vec x) { return _mm256_castps_si256(x); }

// a[i] + x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1].
inline Ints dot_pairs(Ints a, Ints x, Ints y) {
#if defined(KVC_VNNI) && !defined(KVC_EMULATED)
  // For the intrinsic function GCC copies every sum.
  __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(a) : "x"(x), "x"(y));
  return a;
#elif defined(KVC_VNNI)
  return _mm256_dpwssd_avx_epi32(a, x, y);
#else
  // GCC would add products to each other first, for which there are not enough registers, or copy every sum.
  __asm__("vpaddd %1, %0, %0" : "+x"(a) : "x"(dot_words(x, y)));
  return a;
#endif
}
#if defined(KVC_VNNI)
// a[i] + x[4 i] * y[4 i] + ... + x[4 i + 3] * y[4 i + 3], of bytes of which those of y are signed.
inline Ints dot_fours(Ints a, Ints x, Ints y) {
#if !defined(KVC_EMULATED)
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(a) : "x"(x), "x"(y));
  return a;
#else
  return _mm256_dpbusd_avx_epi32(a, x, y);
#endif
}
#endif
#endif

#if defined(KVC_AVX512) || defined(KVC_AVX2)
// Floats times `scale` as integers, x[i] beside y[i]: the lower bits of a sum.
inline Ints whole_pairs(Vec x, Vec y, Vec scale) {
  const Vec whole = all(12582912.f);
  const Ints low = bits_as_ints(fma(x, scale, whole)), high = bits_as_ints(fma(y, scale, whole));
  return words_by_turns(low, left_32(high, 16));
}
// The same where 65536 times the scale, `high_scale`, is a number too: with AVX-512 a conversion waits for fewer
// others than a shift, with AVX2 it does not.
inline Ints whole_pairs(Vec x, Vec y, Vec scale, [[maybe_unused]] Vec high_scale) {
#if defined(KVC_AVX512)
  const Ints low = bits_as_ints(fma(x, scale, all(12582912.f)));
  return words_by_turns(low, to_ints(fma(y, high_scale, all(32768.f))));
#else
  return whole_pairs(x, y, scale);
#endif
}
#endif

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
