// What the kernel uses of AVX-VNNI on a processor that has AVX2 only: included before its translation unit, which
// is compiled without it. For checks only.
//
// Functions of the same names as in immintrin.h, which these hide where they are called. Results are those of the
// processor to the bit.

#pragma once

#define KVC_EMULATED

#include <immintrin.h>

namespace kvcellar {

inline __m256i _mm256_dpwssd_avx_epi32(__m256i a, __m256i x, __m256i y) {
  return _mm256_add_epi32(a, _mm256_madd_epi16(x, y));
}

inline __m256i _mm256_dpbusd_avx_epi32(__m256i a, __m256i x, __m256i y) {
  const __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
  return _mm256_add_epi32(a, _mm256_add_epi32(even, odd));
}

}  // namespace kvcellar
