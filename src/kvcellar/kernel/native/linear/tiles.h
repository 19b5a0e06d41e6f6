// What all code for the matrix unit needs: the shapes of its tiles.
//
// KVC_NAMESPACE is set by the including file, which is compiled for that unit.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The compiler does not know what tile loads and stores touch: it moves no access across this.
inline void keep_order() { __asm__ volatile("" : : : "memory"); }

inline void load_shapes(const TileShapes& shapes) {
  __asm__ volatile("" : : "r"(&shapes) : "memory");  // all of it is there before it is loaded
  _tile_loadconfig(&shapes);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
