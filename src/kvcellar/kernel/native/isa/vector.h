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
  return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)));
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

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar

#if defined(KVC_AVX512)
#include "isa/vector_512.h"
#elif defined(KVC_AVX2)
#include "isa/vector_256.h"
#elif defined(KVC_NEON)
#include "isa/vector_neon.h"
#else
#include "isa/vector_plain.h"
#endif

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

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
    for (int i = 0; i < 2 * kLanes; ++i) row[d + (is_back ? i : split_place(i))] = was[is_back ? split_place(i) : i];
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

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar

#include "isa/exp2.h"
