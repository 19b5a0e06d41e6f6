// New rows to cells, and memory read for nothing else.

#pragma once

#include "attend/numbers.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// The definition is in kvcellar/kv_dtype.py; the bytes are the same, so no operation is contracted.
void quantise(const float* row, const Side& side, uint8_t* packed, uint16_t* affine) {
  const int64_t group = side.group_size;
  const float top = side.dtype == Dtype::int8 ? 255.f : 15.f;
  const float per_step = side.dtype == Dtype::int8 ? static_cast<float>(1.0 / 255) : static_cast<float>(1.0 / 15);
  const bool is_wide = group % kLanes == 0;
  if (side.dtype == Dtype::int4 && !is_wide) std::memset(packed, 0, (side.dim + 1) / 2);
  for (int64_t g = 0; g * group < side.dim; ++g) {
    const float* x = row + g * group;
    float low = x[0], high = x[0];
    bool has_nan = false, is_found = false;
    if (is_wide) {
      Vec least = load(x), most = least, zeros = sub(least, least);
      for (int64_t i = kLanes; i < group; i += kLanes) {
        const Vec y = load(x + i);
        least = min(least, y);
        most = max(most, y);
        zeros = add(zeros, sub(y, y));
      }
      low = -highest(sub(all(0.f), least));
      high = highest(most);
      // Not so where a number is not finite, and of two zeros the first one's sign counts.
      is_found = sum(zeros) == 0.f && low != 0.f && high != 0.f;
    }
    if (!is_found) {
      low = high = x[0];
      for (int64_t i = 0; i < group; ++i) {
        has_nan |= x[i] != x[i];
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
      }
    }
    float inverse = 0.f, bias = 0.f;
    if (has_nan) {
      affine[2 * g] = affine[2 * g + 1] = 0x7E00;
    } else {
      const float lowered = low - __builtin_fabsf(low) * (1.f / 1024.f);
      affine[2 * g + 1] = float_to_half(lowered);
      bias = half_to_float(affine[2 * g + 1]);
      const float span = (high - bias) * (1025.f / 1024.f);
      affine[2 * g] = float_to_half(span * per_step);
      const float step = half_to_float(affine[2 * g]);
      inverse = step > 0.f ? 1.f / step : 0.f;
    }
    const int64_t first = g * group;
    for (int64_t i = 0; is_wide && i < group; i += kLanes) {
      Vec q = nearest(mul(sub(load(x + i), all(bias)), all(inverse)));
      q = min(max(q, all(0.f)), all(top));  // NaN too becomes 0
      if (side.dtype == Dtype::int8) {
        store_u8(packed + first + i, q);
      } else {
        uint8_t bytes[kLanes];
        store_u8(bytes, q);
        for (int j = 0; j + 3 < kLanes; j += 4) {
          uint32_t four;
          std::memcpy(&four, bytes + j, 4);
          four |= four >> 4;
          const auto both = static_cast<uint16_t>((four & 0xFF) | (four >> 8 & 0xFF00));
          std::memcpy(packed + (first + i + j) / 2, &both, 2);
        }
      }
    }
    for (int64_t i = 0; !is_wide && i < group; ++i) {
      float q = __builtin_rintf((x[i] - bias) * inverse);
      q = q > 0.f ? q : 0.f;  // NaN too becomes 0
      q = q < top ? q : top;
      const auto number = static_cast<uint8_t>(q);
      if (side.dtype == Dtype::int8) {
        packed[first + i] = number;
      } else {
        packed[(first + i) / 2] |= (first + i) % 2 ? number << 4 : number;
      }
    }
  }
}

void write(const Side& side, int64_t block_size, int64_t head, const int64_t* cells, int64_t first_cell, int64_t n,
           const void* rows, Dtype in, int64_t token_stride, float* scratch) {
  const int64_t size = in == Dtype::f32 ? 4 : 2;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t cell = cells ? cells[i] : first_cell + i;
    const int64_t block = block_size ? cell / block_size : 0;
    const int64_t inside = cell - block * block_size;
    char* to = side.data + head * side.head_stride + block * side.block_stride + inside * side.cell_stride;
    const char* from = static_cast<const char*>(rows) + i * token_stride * size;
    if (side.dtype == in) {
      std::memcpy(to, from, side.dim * size);
      continue;
    }
    load_row(from, in, side.dim, scratch);
    if (!is_quantised(side.dtype)) {
      store_row(to, side.dtype, side.dim, scratch);
      continue;
    }
    char* affine = side.affine + head * side.affine_head_stride + block * side.affine_block_stride +
                   inside * side.affine_cell_stride;
    quantise(scratch, side, reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint16_t*>(affine));
  }
}

double sum_of(const void* data, int64_t n_bytes) {
  const auto* p = static_cast<const float*>(data);
  Vec a[8];
  for (auto& x : a) x = all(0.f);
  const int64_t n = n_bytes / 4;
  for (int64_t i = 0; i + 8 * kLanes <= n; i += 8 * kLanes)
    for (int j = 0; j < 8; ++j) a[j] = add(a[j], load(p + i + j * kLanes));
  double total = 0;
  for (const auto& x : a) total += sum(x);
  return total;
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
