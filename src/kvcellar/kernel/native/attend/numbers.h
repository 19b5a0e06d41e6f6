// Stored rows as float32, and back.

#pragma once

#include "attend/tiles.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline float load_one(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return dtype == Dtype::bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

inline void load_row(const void* from, Dtype dtype, int64_t n, float* to) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(static_cast<const float*>(from) + i));
  } else if (dtype == Dtype::bf16) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, load_bf16(static_cast<const uint16_t*>(from) + i));
  } else {
    for (; i + kLanes <= n; i += kLanes) store(to + i, load_half(static_cast<const uint16_t*>(from) + i));
  }
  for (; i < n; ++i) to[i] = load_one(from, dtype, i);
}

inline void store_row(void* to, Dtype dtype, int64_t n, const float* from) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    for (; i + kLanes <= n; i += kLanes) store(static_cast<float*>(to) + i, load(from + i));
    for (; i < n; ++i) static_cast<float*>(to)[i] = from[i];
    return;
  }
  auto* half = static_cast<uint16_t*>(to);
  if (dtype == Dtype::bf16) {
    for (; i + kLanes <= n; i += kLanes) store_bf16(half + i, load(from + i));
    for (; i < n; ++i) half[i] = float_to_bf16(from[i]);
  } else {
    for (; i + kLanes <= n; i += kLanes) store_half(half + i, load(from + i));
    for (; i < n; ++i) half[i] = float_to_half(from[i]);
  }
}

// A stored row as float32, padded with zeros to `pad` numbers.
inline void decode_row(const Side& side, const char* row, const char* affine, int64_t pad, float* to) {
  const int64_t dim = side.dim;
  if (!is_quantised(side.dtype)) {
    load_row(row, side.dtype, dim, to);
  } else {
    const auto* bytes = reinterpret_cast<const uint8_t*>(row);
    const auto* halves = reinterpret_cast<const uint16_t*>(affine);
    const int64_t group = side.group_size;
    for (int64_t g = 0; g * group < dim; ++g) {
      const float scale = half_to_float(halves[2 * g]), bias = half_to_float(halves[2 * g + 1]);
      int64_t i = g * group;
      const int64_t stop = i + group;
      if (side.dtype == Dtype::int8) {
        for (; i + kLanes <= stop; i += kLanes) store(to + i, fma(load_u8(bytes + i), all(scale), all(bias)));
        for (; i < stop; ++i) to[i] = static_cast<float>(bytes[i]) * scale + bias;
      } else {
        for (; i % 2 == 0 && i + kLanes <= stop; i += kLanes)
          store(to + i, fma(load_nibbles(bytes + i / 2), all(scale), all(bias)));
        for (; i < stop; ++i) {
          const uint8_t byte = bytes[i / 2];
          to[i] = static_cast<float>(i % 2 ? byte >> 4 : byte & 15) * scale + bias;
        }
      }
    }
  }
  for (int64_t i = dim; i < pad; ++i) to[i] = 0.f;
}

// Rows of bfloat16 are cheapest to read in the order of load_split: so they stay within each
// 2 * kLanes, and queries and results are put in that order instead.
inline bool is_split(const Side& side) {
  return side.dtype == Dtype::bf16 && side.dim % (2 * kLanes) == 0 && side.dim == padded(side.dim);
}

// n rows `step` bytes apart, to rows of dim floats.
inline void split_rows(const char* rows, int64_t step, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i, rows += step, to += dim) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
      Vec even, odd;
      load_split(reinterpret_cast<const uint16_t*>(rows) + d, even, odd);
      store(to + d, even);
      store(to + d + kLanes, odd);
    }
  }
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
