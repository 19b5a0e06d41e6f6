// Floats in vectors of NEON.
// Only included by isa/vector.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

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
inline Vec load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline Vec load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
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
inline Vec sum_fours(Vec a, Vec b, Vec c, Vec d) { return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)); }
inline void sum_4(Vec a, Vec b, Vec c, Vec d, float* to) { vst1q_f32(to, sum_fours(a, b, c, d)); }
inline void store_fours(Vec x, float* to, int64_t) { vst1q_f32(to, x); }
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) { return vpmaxq_f32(vpmaxq_f32(a, b), vpmaxq_f32(c, d)); }
inline void store_u8(uint8_t* p, Vec x) {
  const uint16x4_t words = vmovn_u32(vcvtq_u32_f32(x));
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(words, words));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(bytes), 0);
  std::memcpy(p, &four, 4);
}
inline void store_half(uint16_t* p, Vec x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
inline void store_bf16(uint16_t* p, Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(lanes[i]);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
