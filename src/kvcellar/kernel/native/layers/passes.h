// Norms, rotations and gates, once for each instruction set that includes it; after vector.h.

#pragma once

#include "isa/vector.h"
#include "layers/rows.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Numbers of one type; `rounded` is what storing and loading makes of a number.
struct Floats {
  using Number = float;
  static Vec get(const float* p) { return load(p); }
  static void put(float* p, Vec x) { store(p, x); }
  static Vec rounded(Vec x) { return x; }
  static float get_one(const float* p) { return *p; }
  static void put_one(float* p, float x) { *p = x; }
  static float rounded_one(float x) { return x; }
};

struct Halves {
  using Number = uint16_t;
  static Vec get(const uint16_t* p) { return load_bf16(p); }
  static void put(uint16_t* p, Vec x) { store_bf16(p, x); }
  static Vec rounded(Vec x) {
    uint16_t lanes[kLanes];
    store_bf16(lanes, x);
    return load_bf16(lanes);
  }
  static float get_one(const uint16_t* p) { return bf16_to_float(*p); }
  static void put_one(uint16_t* p, float x) { *p = float_to_bf16(x); }
  static float rounded_one(float x) { return bf16_to_float(float_to_bf16(x)); }
};

template <typename T>
void norm_rows(const Rows& x, const void* weight, float eps, void* out, int64_t out_token_stride, int64_t first,
               int64_t stop) {
  using Number = typename T::Number;
  const auto* w = static_cast<const Number*>(weight);
  const int64_t n = x.dim;
  for (int64_t i = first * x.n_rows; i < stop * x.n_rows; ++i) {
    const int64_t token = i / x.n_rows, at = i % x.n_rows * n;
    const Number* row = static_cast<const Number*>(x.data) + token * x.token_stride + at;
    Number* to = static_cast<Number*>(out) + token * out_token_stride + at;
    Vec sums[4] = {all(0.f), all(0.f), all(0.f), all(0.f)};
    int64_t j = 0;
    for (; j + 4 * kLanes <= n; j += 4 * kLanes)
      for (int s = 0; s < 4; ++s) {
        const Vec value = T::get(row + j + s * kLanes);
        sums[s] = fma(value, value, sums[s]);
      }
    float total = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    for (; j < n; ++j) total += T::get_one(row + j) * T::get_one(row + j);
    const float factor = 1.f / __builtin_sqrtf(total / static_cast<float>(n) + eps);
    for (j = 0; j + kLanes <= n; j += kLanes)
      T::put(to + j, mul(T::get(w + j), T::rounded(mul(T::get(row + j), all(factor)))));
    for (; j < n; ++j) T::put_one(to + j, T::get_one(w + j) * T::rounded_one(T::get_one(row + j) * factor));
  }
}

template <typename T>
void rotate_rows(const Rows& x, const void* cos, const void* sin, int64_t first, int64_t stop) {
  using Number = typename T::Number;
  const int64_t half = x.dim / 2;
  for (int64_t token = first; token < stop; ++token) {
    const Number* c = static_cast<const Number*>(cos) + token * x.dim;
    const Number* s = static_cast<const Number*>(sin) + token * x.dim;
    for (int64_t row = 0; row < x.n_rows; ++row) {
      Number* a = static_cast<Number*>(x.data) + token * x.token_stride + row * x.dim;
      Number* b = a + half;
      int64_t i = 0;
      for (; i + kLanes <= half; i += kLanes) {
        const Vec left = T::get(a + i), right = T::get(b + i);
        T::put(a + i, sub(T::rounded(mul(left, T::get(c + i))), T::rounded(mul(right, T::get(s + i)))));
        T::put(b + i, add(T::rounded(mul(right, T::get(c + half + i))), T::rounded(mul(left, T::get(s + half + i)))));
      }
      for (; i < half; ++i) {
        const float left = T::get_one(a + i), right = T::get_one(b + i);
        T::put_one(a + i, T::rounded_one(left * T::get_one(c + i)) - T::rounded_one(right * T::get_one(s + i)));
        T::put_one(b + i,
                   T::rounded_one(right * T::get_one(c + half + i)) + T::rounded_one(left * T::get_one(s + half + i)));
      }
    }
  }
}

template <typename T>
void gate_rows(const Rows& x, void* out, int64_t first, int64_t stop) {
  using Number = typename T::Number;
  for (int64_t token = first; token < stop; ++token) {
    const Number* gates = static_cast<const Number*>(x.data) + token * x.token_stride;
    const Number* ups = gates + x.dim;
    Number* to = static_cast<Number*>(out) + token * x.dim;
    // With e = exp(-|x|), which never overflows, x sigmoid(x) is x / (1 + e), or x e / (1 + e) below 0.
    const Vec zero = all(0.f), one = all(1.f);
    int64_t i = 0;
    for (; i + kLanes <= x.dim; i += kLanes) {
      const Vec value = T::get(gates + i);
      const Vec e = exp2_below_1(mul(min(value, sub(zero, value)), all(kLog2e)));
      const Vec silu = div(fma(min(value, zero), e, max(value, zero)), add(one, e));
      T::put(to + i, mul(T::rounded(silu), T::get(ups + i)));
    }
    for (; i < x.dim; ++i) {
      const float value = T::get_one(gates + i);
      const float e = exp2_one((value < 0.f ? value : -value) * kLog2e);
      const float silu = value * (value < 0.f ? e : 1.f) / (1.f + e);
      T::put_one(to + i, T::rounded_one(silu) * T::get_one(ups + i));
    }
  }
}

inline float clamped(float x, float low, float high) { return x < low ? low : x > high ? high : x; }  // NaN stays

template <typename T>
void gate_rows_by(const Rows& x, const Gate& gate, void* out, int64_t first, int64_t stop) {
  using Number = typename T::Number;
  const float limit = gate.limit > 0.f ? gate.limit : __builtin_inff();
  const Vec zero = all(0.f), one = all(1.f), high = all(limit), low = all(-limit);
  for (int64_t token = first; token < stop; ++token) {
    const Number* gates = static_cast<const Number*>(x.data) + token * x.token_stride;
    const Number* ups = gates + x.dim;
    Number* to = static_cast<Number*>(out) + token * x.dim;
    int64_t i = 0;
    for (; i + kLanes <= x.dim; i += kLanes) {
      const Vec value = min(high, T::get(gates + i)), up = max(low, min(high, T::get(ups + i)));
      const Vec z = mul(value, fma(mul(value, value), all(gate.cubic), all(gate.alpha)));
      const Vec e = exp2_below_1(mul(min(z, sub(zero, z)), all(kLog2e)));
      // The sign of z is that of the value.
      const Vec gated = div(fma(min(value, zero), e, max(value, zero)), add(one, e));
      T::put(to + i, mul(T::rounded(gated), add(up, all(gate.shift))));
    }
    for (; i < x.dim; ++i) {
      const float value = clamped(T::get_one(gates + i), -__builtin_inff(), limit);
      const float z = value * (value * value * gate.cubic + gate.alpha);
      const float e = exp2_one((z < 0.f ? z : -z) * kLog2e);
      const float gated = value * (value < 0.f ? e : 1.f) / (1.f + e);
      T::put_one(to + i, T::rounded_one(gated) * (clamped(T::get_one(ups + i), -limit, limit) + gate.shift));
    }
  }
}

template <typename T>
void weigh_rows(const void* const* rows, const float* shares, int64_t n_rows, int64_t dim, void* out) {
  using Number = typename T::Number;
  auto* to = static_cast<Number*>(out);
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    Vec total = all(0.f);
    for (int64_t r = 0; r < n_rows; ++r)
      if (rows[r]) total = fma(T::get(static_cast<const Number*>(rows[r]) + i), all(shares[r]), total);
    T::put(to + i, total);
  }
  for (; i < dim; ++i) {
    float total = 0.f;
    for (int64_t r = 0; r < n_rows; ++r)
      if (rows[r]) total += T::get_one(static_cast<const Number*>(rows[r]) + i) * shares[r];
    T::put_one(to + i, total);
  }
}

template <typename T>
void add_numbers(void* to, const void* x, int64_t n) {
  using Number = typename T::Number;
  auto* sums = static_cast<Number*>(to);
  const auto* more = static_cast<const Number*>(x);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) T::put(sums + i, add(T::get(sums + i), T::get(more + i)));
  for (; i < n; ++i) T::put_one(sums + i, T::get_one(sums + i) + T::get_one(more + i));
}

void norm(const Rows& x, const void* weight, float eps, void* out, int64_t out_token_stride, int64_t first,
          int64_t stop) {
  (x.dtype == Dtype::f32 ? norm_rows<Floats> : norm_rows<Halves>)(x, weight, eps, out, out_token_stride, first, stop);
}

void rotate(const Rows& x, const void* cos, const void* sin, int64_t first, int64_t stop) {
  (x.dtype == Dtype::f32 ? rotate_rows<Floats> : rotate_rows<Halves>)(x, cos, sin, first, stop);
}

void gate(const Rows& x, void* out, int64_t first, int64_t stop) {
  (x.dtype == Dtype::f32 ? gate_rows<Floats> : gate_rows<Halves>)(x, out, first, stop);
}

void gate_by(const Rows& x, const Gate& gate, void* out, int64_t first, int64_t stop) {
  (x.dtype == Dtype::f32 ? gate_rows_by<Floats> : gate_rows_by<Halves>)(x, gate, out, first, stop);
}

void weigh(const void* const* rows, const float* shares, int64_t n_rows, int64_t dim, Dtype dtype, void* out) {
  (dtype == Dtype::f32 ? weigh_rows<Floats> : weigh_rows<Halves>)(rows, shares, n_rows, dim, out);
}

void add_to(void* to, const void* x, int64_t n, Dtype dtype) {
  (dtype == Dtype::f32 ? add_numbers<Floats> : add_numbers<Halves>)(to, x, n);
}

constexpr RowOps kRowOps = {norm, rotate, gate, gate_by, add_to, weigh};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
