// What the kernel uses of AVX-512 on a processor that has AVX2 only: included before a translation unit
// for AVX-512, VNNI or bfloat16 that is compiled without them. For checks only.
//
// Functions of the same names as in immintrin.h, which these hide where they are called: in the
// namespace below. Results are those of the processor to the bit.

#pragma once

#define KVC_EMULATED

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Macros without optimisation.
#undef _mm512_cmp_ps_mask
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x4_ps
#undef _mm512_extractf32x8_ps
#undef _mm512_extracti64x4_epi64
#undef _mm512_inserti32x4
#undef _mm512_inserti64x4
#undef _mm512_reduce_ps
#undef _mm512_roundscale_ps
#undef _mm512_scalef_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_shuffle_i32x4
#undef _mm512_shuffle_ps
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#undef _mm512_srli_epi32

namespace kvcellar {
namespace emulated {

union Floats {
  __m512 all;
  __m256 half[2];
  __m128 quarter[4];
  float number[16];
};

union Ints {
  __m512i all;
  __m256i half[2];
  __m128i quarter[4];
  int32_t number[16];
};

// As the processor does where what it is to load or store is not aligned, or this is not written for.
inline void demand(bool is_true) {
  if (!is_true) __builtin_trap();
}
inline void demand_aligned(const void* p) { demand(reinterpret_cast<uintptr_t>(p) % 64 == 0); }

inline __m512 twice(__m256 x) {
  Floats y;
  y.half[0] = y.half[1] = x;
  return y.all;
}
inline __m512i twice(__m256i x) {
  Ints y;
  y.half[0] = y.half[1] = x;
  return y.all;
}

// All bits of a number where its bit of the mask is set.
inline __m512i spread_32(__mmask16 mask) {
  const __m256i bits = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
  Ints x;
  for (int h = 0; h < 2; ++h)
    x.half[h] = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(mask >> 8 * h), bits), bits);
  return x.all;
}
inline __m512i spread_16(__mmask32 mask) {
  const __m256i bits = _mm256_set_epi16(-32768, 16384, 8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1);
  Ints x;
  for (int h = 0; h < 2; ++h) {
    const __m256i half = _mm256_set1_epi16(static_cast<int16_t>(mask >> 16 * h));
    x.half[h] = _mm256_cmpeq_epi16(_mm256_and_si256(half, bits), bits);
  }
  return x.all;
}

// Bits of y where `spread` has them, else of x.
inline __m512i chosen(__m512i spread, __m512i x, __m512i y) {
  Ints s{spread}, a{x}, b{y};
  for (int h = 0; h < 2; ++h) a.half[h] = _mm256_blendv_epi8(a.half[h], b.half[h], s.half[h]);
  return a.all;
}

// Numbers of T of x, and of y behind them, at places `from`, which wrap around.
template <class T>
inline __m512i picked(__m512i from, __m512i x, __m512i y, int n_vectors) {
  constexpr int n = 64 / sizeof(T);
  T places[n], numbers[2 * n], to[n];
  std::memcpy(places, &from, 64);
  std::memcpy(numbers, &x, 64);
  std::memcpy(numbers + n, &y, 64);
  for (int i = 0; i < n; ++i) to[i] = numbers[places[i] & (n_vectors * n - 1)];
  std::memcpy(&x, to, 64);
  return x;
}

}  // namespace emulated

// What AVX2 has for each half.
#define KVC_BY_HALVES(Vec, Parts, name, of_half)                                    \
  inline Vec _mm512_##name(Vec x, Vec y) {                                          \
    emulated::Parts a{x}, b{y};                                                     \
    for (int h = 0; h < 2; ++h) a.half[h] = _mm256_##of_half(a.half[h], b.half[h]); \
    return a.all;                                                                   \
  }
#define KVC_FLOATS(name) KVC_BY_HALVES(__m512, Floats, name, name)
#define KVC_INTS(name) KVC_BY_HALVES(__m512i, Ints, name, name)
KVC_FLOATS(add_ps)
KVC_FLOATS(sub_ps)
KVC_FLOATS(mul_ps)
KVC_FLOATS(div_ps)
KVC_FLOATS(min_ps)
KVC_FLOATS(max_ps)
KVC_FLOATS(unpacklo_ps)
KVC_FLOATS(unpackhi_ps)
KVC_INTS(add_epi16)
KVC_INTS(add_epi32)
KVC_INTS(sub_epi32)
KVC_INTS(subs_epu16)
KVC_INTS(max_epu16)
KVC_INTS(max_epi32)
KVC_INTS(madd_epi16)
KVC_INTS(maddubs_epi16)
KVC_INTS(packs_epi32)
KVC_INTS(unpacklo_epi8)
KVC_INTS(unpackhi_epi8)
KVC_INTS(shuffle_epi8)
KVC_INTS(unpacklo_epi16)
KVC_INTS(unpackhi_epi16)
KVC_INTS(unpacklo_epi32)
KVC_INTS(unpackhi_epi32)
KVC_INTS(unpacklo_epi64)
KVC_INTS(unpackhi_epi64)
KVC_BY_HALVES(__m512i, Ints, and_si512, and_si256)
KVC_BY_HALVES(__m512i, Ints, or_si512, or_si256)
#undef KVC_INTS
#undef KVC_FLOATS
#undef KVC_BY_HALVES

// The same, by a number that all of them are shifted by.
#define KVC_SHIFT(name)                                                           \
  inline __m512i _mm512_##name(__m512i x, unsigned n) {                           \
    emulated::Ints a{x};                                                          \
    for (__m256i& half : a.half) half = _mm256_##name(half, static_cast<int>(n)); \
    return a.all;                                                                 \
  }
KVC_SHIFT(slli_epi32)
KVC_SHIFT(srai_epi32)
KVC_SHIFT(srli_epi32)
KVC_SHIFT(srli_epi16)
KVC_SHIFT(slli_epi16)
#undef KVC_SHIFT

inline __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) {
  emulated::Floats a{x}, b{y}, c{z};
  for (int h = 0; h < 2; ++h) c.half[h] = _mm256_fmadd_ps(a.half[h], b.half[h], c.half[h]);
  return c.all;
}

// Loads, stores and constants.

inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 x;
  std::memcpy(&x, p, 64);
  return x;
}
inline __m512i _mm512_loadu_si512(const void* p) {
  __m512i x;
  std::memcpy(&x, p, 64);
  return x;
}
inline __m512i _mm512_broadcast_i32x4(__m128i x) {
  emulated::Ints a;
  for (__m256i& half : a.half) half = _mm256_broadcastsi128_si256(x);
  return a.all;
}
inline __m512 _mm512_load_ps(const void* p) {
  emulated::demand_aligned(p);
  return _mm512_loadu_ps(p);
}
inline __m512i _mm512_load_si512(const void* p) {
  emulated::demand_aligned(p);
  return _mm512_loadu_si512(p);
}
inline void _mm512_storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, 64); }
inline void _mm512_storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, 64); }
inline void _mm512_store_si512(void* p, __m512i x) {
  emulated::demand_aligned(p);
  _mm512_storeu_si512(p, x);
}

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512i _mm512_setzero_si512() { return __m512i{}; }
inline __m512 _mm512_set1_ps(float x) { return emulated::twice(_mm256_set1_ps(x)); }
inline __m512i _mm512_set1_epi8(char x) { return emulated::twice(_mm256_set1_epi8(x)); }
inline __m512i _mm512_set1_epi16(short x) { return emulated::twice(_mm256_set1_epi16(x)); }
inline __m512i _mm512_set1_epi32(int x) { return emulated::twice(_mm256_set1_epi32(x)); }
inline __m512i _mm512_set_epi32(int p, int o, int n, int m, int l, int k, int j, int i, int h, int g, int f, int e,
                                int d, int c, int b, int a) {
  emulated::Ints x;
  x.half[0] = _mm256_set_epi32(h, g, f, e, d, c, b, a);
  x.half[1] = _mm256_set_epi32(p, o, n, m, l, k, j, i);
  return x.all;
}
inline __m512i _mm512_set_epi64(int64_t h, int64_t g, int64_t f, int64_t e, int64_t d, int64_t c, int64_t b,
                                int64_t a) {
  emulated::Ints x;
  x.half[0] = _mm256_set_epi64x(d, c, b, a);
  x.half[1] = _mm256_set_epi64x(h, g, f, e);
  return x.all;
}
inline __m512 _mm512_broadcast_f32x4(__m128 x) { return emulated::twice(_mm256_set_m128(x, x)); }
inline __m512i _mm512_broadcastd_epi32(__m128i x) { return emulated::twice(_mm256_broadcastd_epi32(x)); }
inline __m512i _mm512_broadcastq_epi64(__m128i x) { return emulated::twice(_mm256_broadcastq_epi64(x)); }

// The same bits as another type.

inline __m512i _mm512_castps_si512(__m512 x) { return reinterpret_cast<__m512i>(x); }
inline __m512 _mm512_castsi512_ps(__m512i x) { return reinterpret_cast<__m512>(x); }
inline __m256 _mm512_castps512_ps256(__m512 x) { return emulated::Floats{x}.half[0]; }
inline __m128 _mm512_castps512_ps128(__m512 x) { return emulated::Floats{x}.quarter[0]; }
inline __m512i _mm512_castsi128_si512(__m128i x) {
  emulated::Ints to{_mm512_setzero_si512()};
  to.quarter[0] = x;
  return to.all;
}
inline __m512i _mm512_castsi256_si512(__m256i x) {
  emulated::Ints y;
  y.half[0] = x;
  y.half[1] = _mm256_set1_epi8(0x5A);  // undefined
  return y.all;
}
inline __m128 _mm512_extractf32x4_ps(__m512 x, int i) { return emulated::Floats{x}.quarter[i & 3]; }
inline __m256 _mm512_extractf32x8_ps(__m512 x, int i) { return emulated::Floats{x}.half[i & 1]; }
inline __m512i _mm512_inserti32x4(__m512i x, __m128i y, int i) {
  emulated::Ints to{x};
  to.quarter[i] = y;
  return to.all;
}
inline __m512i _mm512_inserti64x4(__m512i x, __m256i y, int i) {
  emulated::Ints a{x};
  a.half[i & 1] = y;
  return a.all;
}

// Other orders, and numbers that a mask chooses.

inline __m512 _mm512_shuffle_ps(__m512 x, __m512 y, int order) {
  const emulated::Floats a{x}, b{y};
  emulated::Floats to;
  for (int i = 0; i < 16; ++i) to.number[i] = (i % 4 < 2 ? a : b).number[i / 4 * 4 + (order >> i % 4 * 2 & 3)];
  return to.all;
}
inline __m512 _mm512_shuffle_f32x4(__m512 x, __m512 y, int order) {
  const emulated::Floats a{x}, b{y};
  emulated::Floats to;
  for (int i = 0; i < 4; ++i) to.quarter[i] = (i < 2 ? a : b).quarter[order >> i * 2 & 3];
  return to.all;
}
inline __m512i _mm512_shuffle_i32x4(__m512i x, __m512i y, int order) {
  return _mm512_castps_si512(_mm512_shuffle_f32x4(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), order));
}
inline __m512i _mm512_permutexvar_epi16(__m512i from, __m512i x) { return emulated::picked<uint16_t>(from, x, x, 1); }
inline __m512 _mm512_permutexvar_ps(__m512i from, __m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  return _mm512_castsi512_ps(emulated::picked<uint32_t>(from, bits, bits, 1));
}
inline __m512i _mm512_permutexvar_epi32(__m512i from, __m512i x) { return emulated::picked<uint32_t>(from, x, x, 1); }
inline __m512i _mm512_permutex2var_epi16(__m512i x, __m512i from, __m512i y) {
  return emulated::picked<uint16_t>(from, x, y, 2);
}
inline __m512i _mm512_permutex2var_epi32(__m512i x, __m512i from, __m512i y) {
  return emulated::picked<uint32_t>(from, x, y, 2);
}
inline __m512i _mm512_permutex2var_epi64(__m512i x, __m512i from, __m512i y) {
  return emulated::picked<uint64_t>(from, x, y, 2);
}
inline __m512 _mm512_permutex2var_ps(__m512 x, __m512i from, __m512 y) {
  return _mm512_castsi512_ps(emulated::picked<uint32_t>(from, _mm512_castps_si512(x), _mm512_castps_si512(y), 2));
}
inline __m512i _mm512_mask_mov_epi16(__m512i x, __mmask32 mask, __m512i y) {
  return emulated::chosen(emulated::spread_16(mask), x, y);
}
inline __m512 _mm512_mask_mov_ps(__m512 x, __mmask16 mask, __m512 y) {
  return _mm512_castsi512_ps(
      emulated::chosen(emulated::spread_32(mask), _mm512_castps_si512(x), _mm512_castps_si512(y)));
}
inline __m512 _mm512_maskz_mul_ps(__mmask16 mask, __m512 x, __m512 y) {
  return _mm512_mask_mov_ps(_mm512_setzero_ps(), mask, _mm512_mul_ps(x, y));
}
inline __m512i _mm512_mask_broadcastd_epi32(__m512i x, __mmask16 mask, __m128i y) {
  return emulated::chosen(emulated::spread_32(mask), x, _mm512_broadcastd_epi32(y));
}
inline __m512i _mm512_mask_or_epi32(__m512i old, __mmask16 mask, __m512i x, __m512i y) {
  emulated::Ints a{x}, b{y};
  for (int h = 0; h < 2; ++h) a.half[h] = _mm256_or_si256(a.half[h], b.half[h]);
  return emulated::chosen(emulated::spread_32(mask), old, a.all);
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int predicate) {
  emulated::demand(predicate == _CMP_UNORD_Q || predicate == _CMP_NLT_UQ);
  const emulated::Floats a{x}, b{y};
  int mask = 0;
  for (int h = 0; h < 2; ++h) {
    const __m256 is_true = predicate == _CMP_UNORD_Q ? _mm256_cmp_ps(a.half[h], b.half[h], _CMP_UNORD_Q)
                                                     : _mm256_cmp_ps(a.half[h], b.half[h], _CMP_NLT_UQ);
    mask |= _mm256_movemask_ps(is_true) << 8 * h;
  }
  return static_cast<__mmask16>(mask);
}

// Numbers of one type to another.

inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
  emulated::Ints y;
  y.half[0] = _mm256_cvtepu8_epi32(x);
  y.half[1] = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(x, x));
  return y.all;
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  emulated::Ints y;
  y.half[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(x));
  y.half[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1));
  return y.all;
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  const emulated::Ints a{x};
  const __m256i low = _mm256_set1_epi32(0xFFFF);
  const __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.half[0], low), _mm256_and_si256(a.half[1], low));
  return _mm256_permute4x64_epi64(words, 0xD8);
}
inline __m256i _mm512_cvtepi16_epi8(__m512i x) {
  const emulated::Ints a{x};
  const __m256i low = _mm256_set1_epi16(0xFF);
  const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(a.half[0], low), _mm256_and_si256(a.half[1], low));
  return _mm256_permute4x64_epi64(bytes, 0xD8);
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  const __m256i low = _mm256_set1_epi16(0xFF);
  const __m256i words = _mm256_and_si256(_mm512_cvtepi32_epi16(x), low);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
inline __m512 _mm512_cvtepi32_ps(__m512i x) {
  const emulated::Ints a{x};
  emulated::Floats y;
  for (int h = 0; h < 2; ++h) y.half[h] = _mm256_cvtepi32_ps(a.half[h]);
  return y.all;
}
inline __m512i _mm512_cvtps_epi32(__m512 x) {
  const emulated::Floats a{x};
  emulated::Ints y;
  for (int h = 0; h < 2; ++h) y.half[h] = _mm256_cvtps_epi32(a.half[h]);
  return y.all;
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  emulated::Floats y;
  y.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  y.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  return y.all;
}
inline __m256i _mm512_cvtps_ph(__m512 x, int rounding) {
  emulated::demand(rounding == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  const emulated::Floats a{x};
  return _mm256_set_m128i(_mm256_cvtps_ph(a.half[1], _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(a.half[0], _MM_FROUND_TO_NEAREST_INT));
}

// What only the matrix unit's code wants.
inline void _mm512_store_ps(void* p, __m512 x) {
  emulated::demand_aligned(p);
  std::memcpy(p, &x, 64);
}
inline void _mm512_stream_si512(void* p, __m512i x) {
  emulated::demand_aligned(p);
  std::memcpy(p, &x, 64);
}
inline void _mm512_mask_storeu_epi16(void* p, __mmask32 mask, __m512i x) {
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 2 * i, reinterpret_cast<const char*>(&x) + 2 * i, 2);
}
inline __m256i _mm512_extracti64x4_epi64(__m512i x, int half) { return emulated::Ints{x}.half[half]; }
inline __m256i _mm512_castsi512_si256(__m512i x) { return emulated::Ints{x}.half[0]; }

// Arithmetic.

inline __m512 _mm512_abs_ps(__m512 x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF)));
}
inline __m512 _mm512_roundscale_ps(__m512 x, int how) {
  emulated::demand(how == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  emulated::Floats a{x};
  for (__m256& half : a.half) half = _mm256_round_ps(half, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return a.all;
}
inline __m512 _mm512_reduce_ps(__m512 x, int how) {
  emulated::demand(how == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  emulated::Floats a{x};
  for (float& number : a.number) number = __builtin_isinf(number) ? 0.f : number - __builtin_floorf(number);
  return a.all;
}
inline __m512 _mm512_scalef_ps(__m512 x, __m512 y) {
  emulated::Floats a{x}, b{y};
  for (int i = 0; i < 16; ++i) {
    const float power = __builtin_floorf(b.number[i]);
    if (power != power)
      a.number[i] = power;
    else
      a.number[i] = __builtin_ldexpf(a.number[i], power < -1000.f  ? -1000
                                                  : power > 1000.f ? 1000
                                                                   : static_cast<int>(power));
  }
  return a.all;
}
// Of x bytes without a sign; what is beyond 32 bits is lost.
inline __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i x, __m512i y) {
  emulated::Ints to{sum}, a{x}, b{y};
  for (int h = 0; h < 2; ++h) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a.half[h], _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(b.half[h], 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a.half[h], 8), _mm256_srai_epi16(b.half[h], 8));
    to.half[h] = _mm256_add_epi32(to.half[h], _mm256_add_epi32(even, odd));
  }
  return to.all;
}

// bfloat16, whose numbers below the normal ones are 0. The two products of a lane are added one by one.
inline __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
  uint32_t from[32];
  std::memcpy(from, &low, 64);
  std::memcpy(from + 16, &high, 64);
  uint16_t to[32];
  for (int i = 0; i < 32; ++i) {
    const uint32_t bits = from[i], magnitude = bits & 0x7FFFFFFF;
    to[i] = static_cast<uint16_t>(magnitude > 0x7F800000   ? bits >> 16 | 0x40
                                  : magnitude < 0x00800000 ? bits >> 16 & 0x8000
                                                           : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  __m512bh result;
  std::memcpy(&result, to, 64);
  return result;
}
inline __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh x, __m512bh y) {
  emulated::Ints a, b;
  std::memcpy(&a, &x, 64);
  std::memcpy(&b, &y, 64);
  emulated::Floats to{sum};
  const auto number = [](uint32_t bits) {
    if (!(bits & 0x7F800000)) bits &= 0x80000000;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  };
  for (int i = 0; i < 16; ++i) {
    const auto left = static_cast<uint32_t>(a.number[i]), right = static_cast<uint32_t>(b.number[i]);
    to.number[i] += number(left & 0xFFFF0000) * number(right & 0xFFFF0000);
    to.number[i] += number(left << 16) * number(right << 16);
  }
  return to.all;
}

// Of all numbers: halves, quarters and so on meet in the compiler's order.
inline float _mm512_reduce_add_ps(__m512 x) {
  const emulated::Floats a{x};
  const __m256 b = _mm256_add_ps(a.half[1], a.half[0]);
  const __m128 c = _mm_add_ps(_mm256_extractf128_ps(b, 1), _mm256_castps256_ps128(b));
  const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
inline float _mm512_reduce_max_ps(__m512 x) {
  const emulated::Floats a{x};
  const __m256 b = _mm256_max_ps(a.half[1], a.half[0]);
  const __m128 c = _mm_max_ps(_mm256_extractf128_ps(b, 1), _mm256_castps256_ps128(b));
  const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
inline int _mm512_reduce_add_epi32(__m512i x) {
  const emulated::Ints a{x};
  uint32_t sum = 0;
  for (const int32_t number : a.number) sum += static_cast<uint32_t>(number);
  return static_cast<int>(sum);
}

}  // namespace kvcellar
