// Attention over runs of cells on a CPU: what callers see.
//
// A Plan is built once per forward and layer group from integers. Per layer one call of `write` and one of
// `attend` puts this step's K and V into the pool's cells and attends.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/pool.h"

namespace kvcellar {

struct CellRun {
  int64_t start, length;
};

enum class Kind : int32_t { none = 0, causal = 1, explicit_mask = 2 };

struct Write {
  int64_t q_start, start, length;
};

struct Read {
  int64_t q_start, q_len;
  int64_t first_run, n_runs;  // into StepInput::runs
  Kind kind;
  int64_t first_mask, n_masked;  // bytes [q_len, n_masked] from first_mask in StepInput::masks
};

// One StepPlan, flattened.
struct StepInput {
  int64_t n_tokens = 0, n_cells = 0;
  std::vector<Write> writes;
  std::vector<Read> reads;
  std::vector<CellRun> runs;
  std::vector<uint8_t> masks;
};

struct AttendArgs {
  const void* q;
  void* out;
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // [n_heads] or nullptr
};

// Cells that some tokens attend together: runs in order, of which all tokens see the first n_free.
struct CellList {
  std::vector<CellRun> runs;
  std::vector<int64_t> ends;    // ends[i]: cells in runs[0..i]
  std::vector<int32_t> tokens;  // of the flat batch, in order
  int64_t n_cells = 0, n_free = 0;
  Kind kind = Kind::none;
  const uint8_t* mask = nullptr;  // explicit_mask: [tokens, n_cells - n_free]
};

class Plan {
 public:
  explicit Plan(StepInput input);

  int64_t n_tokens() const { return input_.n_tokens; }
  int64_t n_cells() const { return input_.n_cells; }
  int64_t n_exact_cells() const { return n_exact_cells_; }
  int64_t n_shared_cells() const { return n_shared_cells_; }
  const std::vector<CellList>& lists() const { return lists_; }

  void write(const Pool& pool, const Layout& layout, const void* k, const void* v, int n_threads);
  void attend(const Pool& pool, const Layout& layout, const AttendArgs& args, int n_threads);

  // A rough count of nanoseconds on one core: what decides on threads, and on the lock around it.
  double cost_ns(const Pool& pool, const Layout& layout) const;

 private:
  struct JobSpec {
    int32_t list, first_token, n_tokens, first_head, n_heads;
    int64_t first_cell, n_cells, run, run_offset;
    int64_t slot;  // offset in floats of its partial result; -1: the job's result is final
  };
  struct Part {
    int64_t slot;
    int32_t row, n_rows;
  };
  struct alignas(64) Counter {  // a line of the cache for each
    std::atomic<int64_t> n{0};
  };
  struct Schedule {
    int64_t n_kv_heads = -1, group = -1, v_pad = -1;
    bool is_by_size = false;           // the large jobs first, where no two read the same cells
    std::vector<JobSpec> jobs;         // of one KV head; the same for all
    std::vector<int32_t> merged_rows;  // token * group + head
    std::vector<int64_t> part_ends;    // per merged row, into parts
    std::vector<Part> parts;
    int64_t n_floats = 0;  // partial results of one head
    int64_t max_rows = 0;
    std::unique_ptr<Counter[]> remaining;  // jobs of each head
    // Jobs of all heads, head * jobs.size() + job, in queues: one for each worker if they go by size, else one.
    std::vector<int64_t> order, queue_ends;
    std::unique_ptr<Counter[]> taken;  // of each queue
  };

  void find_lists();
  void schedule(int64_t n_kv_heads, int64_t group, int64_t v_pad);
  void share_out(int n_workers);

  StepInput input_;
  std::vector<CellList> lists_;
  int64_t n_shared_cells_ = 0, n_exact_cells_ = 0;
  double row_cells_ = 0, cells_ = 0;
  Schedule schedule_;
};

// Rows of K and V to cells, in any order.
void write_cells(const Pool& pool, const Layout& layout, const int64_t* cells, int64_t n, const void* k, const void* v,
                 int n_threads);

// src cells to [base, base + n); all are read before any is written.
void move_cells(const Pool& pool, int64_t base, const int64_t* src, int64_t n);

}  // namespace kvcellar
