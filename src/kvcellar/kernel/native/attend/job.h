// A piece of attention, and what each level's translation unit gives for it.

#pragma once

#include "attend/plan.h"

namespace kvcellar {

constexpr int64_t kRound = 256;    // a job's cells are a multiple of this, but the last one's
constexpr int64_t kMaxTile = 256;  // cells that are attended at a time, at most
constexpr int64_t kDecoded = 64;   // V rows decoded at a time: few enough for a core's first cache
constexpr int64_t kMaxRows = 64;   // query rows of a job: tokens x heads of one KV head
constexpr int64_t kPad = 16;       // rows in scratch are padded to this many numbers

inline int64_t padded(int64_t dim) { return (dim + kPad - 1) / kPad * kPad; }

// Some rows (tokens x query heads) over some cells of one KV head.
struct Job {
  const Pool* pool;
  const Layout* layout;
  const AttendArgs* args;
  int64_t kv_head;
  // Of a CellList, as plain pointers: its members' inline functions are everyone's.
  const CellRun* runs;
  const int32_t* tokens;
  const uint8_t* mask;
  Kind kind;
  int64_t list_cells, n_free;
  int64_t first_token, n_tokens;  // into tokens
  int64_t first_head, n_heads;    // query heads within the KV head's group
  int64_t first_cell, n_cells;    // of the list
  int64_t run, run_offset;        // where first_cell lies
  const Job* following;           // what this worker does next, or nullptr: its first cells are fetched
  float* partial;                 // [rows] max, [rows] sum, [rows, v_pad]; nullptr: write the result itself
};

// What a level gives for attention.
struct AttendOps {
  void (*attend)(const Job& job, char* scratch);
  // A merged row: parts are (max, sum, row) triples.
  void (*merge)(const Job& job, int64_t token, int64_t head, int n_parts, const float* const* max,
                const float* const* sum, const float* const* rows, float* scratch);
  // Rows [0, n) of one head to cells, `token_stride` in numbers of dtype `in`.
  void (*write)(const Side& side, int64_t block_size, int64_t head, const int64_t* cells, int64_t first_cell, int64_t n,
                const void* rows, Dtype in, int64_t token_stride, float* scratch);
  double (*sum)(const void* data, int64_t n_bytes);
};

// Bytes of scratch for a job of so many rows: every worker has its own.
int64_t scratch_bytes(int64_t rows, int64_t k_pad, int64_t v_pad);

}  // namespace kvcellar
