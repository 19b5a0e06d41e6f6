// Powers of two: what a softmax is made of.
//
// Only included by isa/vector.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

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
      0x3F7504F3, 0x3F7508A4, 0x3F75672A, 0x3F76248C, 0x3F7744FD, 0x3F78CCDF, 0x3F7AC0C7, 0x3F7D257D};
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
      1.0f,        1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
      1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f,  1.91520655f};
  alignas(64) static constexpr float slopes[16] = {
      0.693147182f, 0.723835409f, 0.755882382f, 0.789348125f, 0.82429558f, 0.860790253f, 0.898900688f, 0.938698411f,
      0.980258167f, 1.02365792f,  1.06897914f,  1.11630678f,  1.16573f,    1.21734118f,  1.27123749f,  1.32752001f};
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
