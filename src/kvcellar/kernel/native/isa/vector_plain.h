// Floats in vectors of plain C++.
// Only included by isa/vector.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

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
inline Vec load_u8(const uint8_t* p) { return __builtin_convertvector(Whole{p[0], p[1], p[2], p[3]}, Vec); }
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
inline Vec highest_fours(Vec a, Vec b, Vec c, Vec d) { return Vec{highest(a), highest(b), highest(c), highest(d)}; }
inline void store_u8(uint8_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(x[i]);
}
inline void store_half(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(x[i]);
}
inline void store_bf16(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = float_to_bf16(x[i]);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
