// The matrix unit in plain C++: included before a translation unit for AMX, it takes the place of its intrinsics.
// Slow; for checks only.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace kvcellar_emulated {

struct Tile {
  int rows, bytes;
  alignas(64) uint8_t data[16][64];
};

inline Tile* tiles() {
  thread_local Tile all[8];
  return all;
}

inline void load_config(const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  for (int t = 0; t < 8; ++t) {
    uint16_t n_bytes;
    std::memcpy(&n_bytes, bytes + 16 + 2 * t, 2);
    tiles()[t].rows = bytes[48 + t];
    tiles()[t].bytes = n_bytes;
    std::memset(tiles()[t].data, 0, sizeof tiles()[t].data);
  }
}

inline void release() {
  for (int t = 0; t < 8; ++t) tiles()[t].rows = tiles()[t].bytes = 0;
}

inline void zero(int t) { std::memset(tiles()[t].data, 0, sizeof tiles()[t].data); }

// A tile that is not configured has no rows: an access to it is a fault, as in the processor.
inline Tile& configured(int t) {
  if (!tiles()[t].rows) __builtin_trap();
  return tiles()[t];
}

inline void load(int t, const void* base, int64_t stride) {
  Tile& tile = configured(t);
  zero(t);
  for (int r = 0; r < tile.rows; ++r)
    std::memcpy(tile.data[r], static_cast<const char*>(base) + r * stride, tile.bytes);
}

inline void store(int t, void* base, int64_t stride) {
  const Tile& tile = configured(t);
  for (int r = 0; r < tile.rows; ++r) std::memcpy(static_cast<char*>(base) + r * stride, tile.data[r], tile.bytes);
}

inline float wide(uint16_t bits) {
  const uint32_t all = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &all, 4);
  return value;
}

// c[m][n] += sum over k and i of a[m][2 * k + i] * b[k][2 * n + i].
inline void multiply_bf16(int to, int left, int right) {
  Tile& c = configured(to);
  const Tile &a = configured(left), &b = configured(right);
  if (a.rows != c.rows || b.bytes != c.bytes || a.bytes / 4 != b.rows) __builtin_trap();
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.bytes / 4; ++n) {
      float sum;
      std::memcpy(&sum, c.data[m] + 4 * n, 4);
      for (int k = 0; k < a.bytes / 4; ++k)
        for (int i = 0; i < 2; ++i) {
          uint16_t x, y;
          std::memcpy(&x, a.data[m] + 2 * (2 * k + i), 2);
          std::memcpy(&y, b.data[k] + 2 * (2 * n + i), 2);
          sum += wide(x) * wide(y);
        }
      std::memcpy(c.data[m] + 4 * n, &sum, 4);
    }
}

}  // namespace kvcellar_emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) kvcellar_emulated::load_config(from)
#define _tile_release() kvcellar_emulated::release()
#define _tile_zero(tile) kvcellar_emulated::zero(tile)
#define _tile_loadd(tile, base, stride) kvcellar_emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) kvcellar_emulated::store(tile, base, stride)
#define _tile_dpbf16ps(c, a, b) kvcellar_emulated::multiply_bf16(c, a, b)
