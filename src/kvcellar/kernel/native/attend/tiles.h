// Tiles: some cells of a job at a time, and where their rows lie.

#pragma once

#include "attend/job.h"
#include "isa/vector.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Cells that are attended at a time, at most: each such tile has a start and an end. Twice as many take a
// twentieth less of int4's time on Zen 4, and with 256 bits a tenth more.
#if defined(KVC_AVX512)
constexpr int64_t kTile = kMaxTile;
#else
constexpr int64_t kTile = kMaxTile / 2;
#endif
constexpr int64_t kShortTile = 64;

// Where a tile's rows lie: K, V, and their scales and biases. 16 cells that follow on each other
// have one address, so that the core's first cache is left to what the addresses lead to.
enum Part { kKRows = 0, kVRows = 1, kKAffine = 2, kVAffine = 3 };

struct TileRows {
  const Pool* pool;  // whose rows they are: the job's, or its exact one
  bool is_run;       // whether all cells follow on each other
  bool is_whole[kTile / 16];
  int64_t stride[4];
  const char* first[4][kTile / 16];  // of 16 that are whole
  const char* at[4][kTile];          // of the others

  const char* row(Part part, int64_t c) const {
    return is_whole[c / 16] ? first[part][c / 16] + c % 16 * stride[part] : at[part][c];
  }
  // 16 addresses from cell c on, a multiple of 16; `room` is for those that are not listed.
  const char* const* sixteen(Part part, int64_t c, const char** room) const {
    if (!is_whole[c / 16]) return at[part] + c;
    const char* from = first[part][c / 16];
    const int64_t step = stride[part];
    for (int64_t i = 0; i < 16; ++i) room[i] = from + i * step;
    return room;
  }
  // The first of 16 rows from cell c on, a multiple of 16, that lie `step` bytes apart: in the pool,
  // or m of them copied to `room`.
  const char* together(Part part, int64_t c, int64_t m, int64_t n_bytes, char* room, int64_t& step) const {
    step = is_whole[c / 16] ? stride[part] : n_bytes;
    if (is_whole[c / 16]) return first[part][c / 16];
    for (int64_t i = 0; i < m; ++i) std::memcpy(room + i * n_bytes, at[part][c + i], static_cast<size_t>(n_bytes));
    return room;
  }
};

struct Walk {
  const Job& job;
  int64_t run, offset;

  explicit Walk(const Job& from) : job(from), run(from.run), offset(from.run_offset) {}

  // Addresses of up to n next cells of one pool; how many they are.
  int64_t next(int64_t n, TileRows& to) {
    const bool is_exact = job.runs[run].start >= kExactBase;
    const int64_t base = is_exact ? kExactBase : 0;
    look_at(is_exact ? *job.pool->exact : *job.pool);
    to.pool = pool_;
    std::memcpy(to.stride, strides_, sizeof strides_);
    const int64_t block_size = pool_->block_size;
    if (!block_size && job.runs[run].length - offset >= n) {
      one_run(job.runs[run].start - base + offset, n, to);
      advance(n);
      return n;
    }
    to.is_run = true;
    for (bool& is_whole : to.is_whole) is_whole = false;
    int64_t i = 0;
    while (i < n) {
      const CellRun& cells = job.runs[run];
      if ((cells.start >= kExactBase) != is_exact) break;
      int64_t cell = cells.start - base + offset;
      int64_t length = smaller(cells.length - offset, n - i);
      advance(length);
      while (length) {
        int64_t block = 0, inside = cell, piece = length;
        if (block_size) {
          block = cell / block_size;
          inside = cell - block * block_size;
          piece = smaller(length, block_size - inside);
        }
        to.is_run &= i == 0;
        const int64_t head = smaller(piece, -i & 15), tail = piece - (piece - head) % 16;
        for (int64_t j = head; j < tail; j += 16) to.is_whole[(i + j) / 16] = true;
        for (int part = 0; part < n_parts_; ++part) {
          if (!data_[part]) continue;
          const int64_t step = strides_[part];
          const char* from = data_[part] + block * block_strides_[part] + inside * step;
          const char** at = to.at[part] + i;
          const char** first = to.first[part] + (i + 15) / 16;
          int64_t j = 0;
          for (; j < head; ++j, from += step) at[j] = from;
          for (; j < tail; j += 16, from += 16 * step) *first++ = from;
          for (; j < piece; ++j, from += step) at[j] = from;
        }
        i += piece;
        cell += piece;
        length -= piece;
      }
    }
    return i;
  }

 private:
  void advance(int64_t n) {
    offset += n;
    if (offset < job.runs[run].length) return;
    ++run;
    offset = 0;
  }

  void look_at(const Pool& pool) {
    if (pool_ == &pool) return;
    pool_ = &pool;
    const Side &k = pool.k, &v = pool.v;
    data_[kKRows] = k.data + job.kv_head * k.head_stride;
    data_[kVRows] = v.data + job.kv_head * v.head_stride;
    data_[kKAffine] = k.affine ? k.affine + job.kv_head * k.affine_head_stride : nullptr;
    data_[kVAffine] = v.affine ? v.affine + job.kv_head * v.affine_head_stride : nullptr;
    strides_[kKRows] = k.cell_stride;
    strides_[kVRows] = v.cell_stride;
    strides_[kKAffine] = k.affine_cell_stride;
    strides_[kVAffine] = v.affine_cell_stride;
    block_strides_[kKRows] = k.block_stride;
    block_strides_[kVRows] = v.block_stride;
    block_strides_[kKAffine] = k.affine_block_stride;
    block_strides_[kVAffine] = v.affine_block_stride;
    n_parts_ = k.affine || v.affine ? 4 : 2;
  }

  // The same of cells that follow on each other, as most do.
  void one_run(int64_t cell, int64_t n, TileRows& to) const {
    to.is_run = true;
    const int64_t n_whole = n / 16;
    for (int64_t g = 0; g < kTile / 16; ++g) to.is_whole[g] = g < n_whole;
    for (int part = 0; part < n_parts_; ++part) {
      if (!data_[part]) continue;
      const int64_t step = strides_[part];
      const char* from = data_[part] + cell * step;
      // Of all, also behind the n-th: as many each time are a few vectors of addresses.
      for (int64_t g = 0; g < kTile / 16; ++g) to.first[part][g] = from + g * 16 * step;
      from += 16 * n_whole * step;
      for (int64_t i = 16 * n_whole; i < n; ++i, from += step) to.at[part][i] = from;
    }
  }

  const Pool* pool_ = nullptr;  // where the following lead to
  const char* data_[4];
  int64_t strides_[4], block_strides_[4];
  int n_parts_ = 0;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
