// How rows lie in memory: a pool's cells, and the rows of a forward. No Python, no torch.

#pragma once

#include <cstdint>
#include <stdexcept>

namespace kvcellar {

// What a caller asked for cannot be: the message says why.
struct ConfigError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2, int8 = 3, int4 = 4 };

inline bool is_quantised(Dtype dtype) { return dtype >= Dtype::int8; }

// How K, or V, of one layer lies in memory. Strides are in bytes. Cell c lies at
// c * cell_stride, or in pages at (c / block_size) * block_stride + (c % block_size) * cell_stride.
struct Side {
  Dtype dtype = Dtype::f32;
  int64_t dim = 0;
  char* data = nullptr;
  int64_t head_stride = 0, cell_stride = 0, block_stride = 0;
  char* affine = nullptr;  // float16 scale and bias per group; quantised sides only
  int64_t affine_head_stride = 0, affine_cell_stride = 0, affine_block_stride = 0;
  int64_t group_size = 0;

  int64_t packed_bytes() const {
    switch (dtype) {
      case Dtype::f32: return dim * 4;
      case Dtype::bf16:
      case Dtype::f16: return dim * 2;
      case Dtype::int8: return dim;
      default: return (dim + 1) / 2;
    }
  }
  int64_t affine_bytes() const { return is_quantised(dtype) ? dim / group_size * 4 : 0; }
};

// Runs of reads from this index on are cells of the pool's exact one, counted from there. The same
// number as kvcellar.bookkeeping.cells.exact.BASE; no run has cells of both.
constexpr int64_t kExactBase = int64_t{1} << 40;

// One layer's K and V. `block_size` 0: all cells at one stride.
struct Pool {
  int64_t n_kv_heads = 0, n_cells = 0, block_size = 0;
  Side k, v;
  const Pool* exact = nullptr;  // float rows of the same dims, or none
};

// Rows of a model's projection or of the result: element [head, token, 0] lies at
// data + (head * head_stride + token * token_stride) numbers; the last dimension is contiguous.
struct Strides {
  int64_t head = 0, token = 0;
};

// What stays the same in all layers of a forward.
struct Layout {
  int64_t n_heads = 0;  // query heads
  Dtype in = Dtype::f32, out = Dtype::f32;
  Strides q, k, v, o;
};

}  // namespace kvcellar
