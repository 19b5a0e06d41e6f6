// Attention over runs of cells on a CPU: what callers see. No Python, no torch.
//
// A Plan is built once per forward and layer group from integers. Per layer one call of `step`
// writes this step's K and V into the pool's cells and attends.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvcellar {

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
// number as kvcellar.bookkeeping.exact.BASE; no run has cells of both.
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
    bool is_by_size = false;  // the large jobs first, where no two read the same cells
    std::vector<JobSpec> jobs;          // of one KV head; the same for all
    std::vector<int32_t> merged_rows;   // token * group + head
    std::vector<int64_t> part_ends;     // per merged row, into parts
    std::vector<Part> parts;
    int64_t n_floats = 0;               // partial results of one head
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
void write_cells(const Pool& pool, const Layout& layout, const int64_t* cells, int64_t n,
                 const void* k, const void* v, int n_threads);

// src cells to [base, base + n); all are read before any is written.
void move_cells(const Pool& pool, int64_t base, const int64_t* src, int64_t n);

// Instruction sets. Levels of this build that this machine can run, the best first.
std::vector<const char*> levels();
const char* level();
bool set_level(const char* name);  // false: not there

// Threads: see threads.cpp. 0: as many as OpenMP would use.
void set_num_threads(int n);
int num_threads();
using ParallelFor = void (*)(int n_workers, void (*work)(void*, int), void* data);
void set_parallel_for(ParallelFor run);  // another runtime's pool; nullptr: ours
const char* threads_of();                // whose pool it is

// Sum of n_bytes read with all threads: what the memory gives.
double stream_read(const void* data, int64_t n_bytes, int n_threads);

}  // namespace kvcellar
