// Plans: from integers to jobs, and jobs to threads.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kWantedJobs = 24;    // so that the last ones end together, or
constexpr int64_t kWantedLarge = 16;   // if small ones follow
constexpr int64_t kLeastCells = 256;   // a job's cells: below, merging costs too much
constexpr int64_t kLeastLarge = 1536;  // cells of a large job: three times a small one's
constexpr int64_t kLeastShared = 64;   // cells that are worth a list of their own
constexpr double kAloneNs = 12000;     // below, waking a thread costs more than it brings

thread_local Buffer scratch_buffer;
thread_local Buffer partial_buffer;

}  // namespace

Plan::Plan(StepInput input) : input_(std::move(input)) {
  find_lists();
  for (const CellList& list : lists_) {
    row_cells_ += static_cast<double>(list.n_cells) * static_cast<double>(list.tokens.size());
    cells_ += static_cast<double>(list.n_cells);
  }
  for (const CellRun& run : input_.runs)
    if (run.start >= kExactBase) n_exact_cells_ = std::max(n_exact_cells_, run.start - kExactBase + run.length);
}

namespace {

struct Interval {
  int64_t start, stop;
  int32_t read;
};

// The fully seen part of a read: its first n_free cells, as intervals.
void add_intervals(const StepInput& input, int32_t index, int64_t n_free, std::vector<Interval>& to) {
  const Read& read = input.reads[index];
  for (int64_t i = 0; i < read.n_runs && n_free > 0; ++i) {
    const CellRun& run = input.runs[read.first_run + i];
    const int64_t n = std::min(run.length, n_free);
    if (n) to.push_back({run.start, run.start + n, index});
    n_free -= n;
  }
}

// Cells that a set of several reads sees whole.
struct SharedSet {
  std::vector<int32_t> reads;
  std::vector<CellRun> runs;
  int64_t n_cells = 0;
};

// Sweeps over all cells once. `intervals` are sorted by start.
std::vector<SharedSet> find_shared(const std::vector<Interval>& intervals, size_t n_reads) {
  std::vector<SharedSet> sets;
  std::vector<Interval> open;  // by stop
  std::vector<int32_t> live;   // reads of `open`, sorted
  std::vector<char> is_live(n_reads, 0);
  size_t next = 0, last_set = 0;
  int64_t at = 0;
  while (next < intervals.size() || !open.empty()) {
    if (open.empty()) at = intervals[next].start;
    while (next < intervals.size() && intervals[next].start == at) {
      const Interval& interval = intervals[next++];
      if (is_live[interval.read]) return {};  // a read that names a cell twice: leave it all alone
      is_live[interval.read] = 1;
      open.push_back(interval);
      live.insert(std::lower_bound(live.begin(), live.end(), interval.read), interval.read);
    }
    int64_t stop = next < intervals.size() ? intervals[next].start : INT64_MAX;
    for (const Interval& interval : open) stop = std::min(stop, interval.stop);
    if (live.size() > 1) {
      if (last_set >= sets.size() || sets[last_set].reads != live) {
        for (last_set = 0; last_set < sets.size(); ++last_set)
          if (sets[last_set].reads == live) break;
        if (last_set == sets.size()) sets.push_back({live, {}, 0});
      }
      SharedSet& set = sets[last_set];
      if (!set.runs.empty() && set.runs.back().start + set.runs.back().length == at)
        set.runs.back().length += stop - at;
      else
        set.runs.push_back({at, stop - at});
      set.n_cells += stop - at;
    }
    for (size_t i = 0; i < open.size();) {
      if (open[i].stop == stop) {
        is_live[open[i].read] = 0;
        live.erase(std::lower_bound(live.begin(), live.end(), open[i].read));
        open[i] = open.back();
        open.pop_back();
      } else {
        ++i;
      }
    }
    at = stop;
  }
  sets.erase(std::remove_if(sets.begin(), sets.end(), [](const SharedSet& set) { return set.n_cells < kLeastShared; }),
             sets.end());
  return sets;
}

void append_run(std::vector<CellRun>& runs, int64_t start, int64_t length) {
  if (length <= 0) return;
  if (!runs.empty() && runs.back().start + runs.back().length == start)
    runs.back().length += length;
  else
    runs.push_back({start, length});
}

}  // namespace

void Plan::find_lists() {
  const size_t n_reads = input_.reads.size();
  std::vector<int64_t> n_cells(n_reads), n_free(n_reads);
  size_t n_runs = 0;
  for (size_t i = 0; i < n_reads; ++i) {
    const Read& read = input_.reads[i];
    for (int64_t j = 0; j < read.n_runs; ++j) n_cells[i] += input_.runs[read.first_run + j].length;
    int64_t n_masked = 0;
    if (read.kind == Kind::causal && read.q_len > 1) n_masked = read.q_len;
    if (read.kind == Kind::explicit_mask) n_masked = read.n_masked;
    if (n_masked > n_cells[i])
      throw ConfigError("a read masks " + std::to_string(n_masked) + " cells and has " + std::to_string(n_cells[i]) +
                        "; a mask covers the last cells of its read");
    n_free[i] = n_cells[i] - n_masked;
    n_runs += read.n_runs;
  }

  // What several reads see whole gets a list of its own, with the tokens of all of them.
  std::vector<SharedSet> sets;
  if (n_reads > 1) {
    std::vector<Interval> intervals;
    intervals.reserve(n_runs);
    std::vector<size_t> bounds{0};
    for (size_t i = 0; i < n_reads; ++i) {
      add_intervals(input_, static_cast<int32_t>(i), n_free[i], intervals);
      const auto from = intervals.begin() + static_cast<int64_t>(bounds.back());
      const auto by_start = [](const Interval& a, const Interval& b) { return a.start < b.start; };
      if (!std::is_sorted(from, intervals.end(), by_start)) std::sort(from, intervals.end(), by_start);
      bounds.push_back(intervals.size());
    }
    // A sequence's cells mostly ascend: merge the sorted stretches, pair by pair.
    while (bounds.size() > 2) {
      std::vector<size_t> merged{0};
      for (size_t i = 2; i < bounds.size() + 1; i += 2) {
        if (i < bounds.size()) {
          std::inplace_merge(intervals.begin() + static_cast<int64_t>(bounds[i - 2]),
                             intervals.begin() + static_cast<int64_t>(bounds[i - 1]),
                             intervals.begin() + static_cast<int64_t>(bounds[i]),
                             [](const Interval& a, const Interval& b) { return a.start < b.start; });
          merged.push_back(bounds[i]);
        } else {
          merged.push_back(bounds[i - 1]);
        }
      }
      bounds = std::move(merged);
    }
    sets = find_shared(intervals, n_reads);
  }

  lists_.reserve(sets.size() + n_reads);
  for (SharedSet& set : sets) {
    CellList list;
    for (int32_t index : set.reads) {
      const Read& read = input_.reads[index];
      for (int64_t t = 0; t < read.q_len; ++t) list.tokens.push_back(static_cast<int32_t>(read.q_start + t));
    }
    list.runs = std::move(set.runs);
    list.n_cells = list.n_free = set.n_cells;
    n_shared_cells_ += set.n_cells;
    lists_.push_back(std::move(list));
  }
  for (size_t i = 0; i < n_reads; ++i) {
    const Read& read = input_.reads[i];
    std::vector<CellRun> shared;
    for (size_t s = 0; s < sets.size(); ++s)
      if (std::binary_search(sets[s].reads.begin(), sets[s].reads.end(), static_cast<int32_t>(i)))
        shared.insert(shared.end(), lists_[s].runs.begin(), lists_[s].runs.end());
    std::sort(shared.begin(), shared.end(), [](const CellRun& a, const CellRun& b) { return a.start < b.start; });
    CellList list;
    int64_t left = n_free[i], n_removed = 0;
    for (int64_t j = 0; j < read.n_runs; ++j) {
      const CellRun& run = input_.runs[read.first_run + j];
      const int64_t whole = std::min(run.length, left);  // of this run, seen whole
      left -= whole;
      int64_t at = run.start;
      if (whole && !shared.empty()) {
        const int64_t stop = run.start + whole;
        auto cut = std::upper_bound(shared.begin(), shared.end(), at,
                                    [](int64_t x, const CellRun& r) { return x < r.start + r.length; });
        for (; cut != shared.end() && cut->start < stop; ++cut) {
          const int64_t from = std::max(at, cut->start);
          const int64_t to = std::min(stop, cut->start + cut->length);
          append_run(list.runs, at, from - at);
          n_removed += to - from;
          at = to;
        }
      }
      append_run(list.runs, at, run.start + run.length - at);
    }
    list.n_cells = n_cells[i] - n_removed;
    list.n_free = n_free[i] - n_removed;
    if (!list.n_cells) continue;
    if (list.n_free < list.n_cells) {
      list.kind = read.kind;
      if (read.kind == Kind::explicit_mask) list.mask = input_.masks.data() + read.first_mask;
    }
    list.tokens.resize(static_cast<size_t>(read.q_len));
    for (int64_t t = 0; t < read.q_len; ++t)
      list.tokens[static_cast<size_t>(t)] = static_cast<int32_t>(read.q_start + t);
    lists_.push_back(std::move(list));
  }
  for (CellList& list : lists_) {
    list.ends.resize(list.runs.size());
    int64_t end = 0;
    for (size_t i = 0; i < list.runs.size(); ++i) list.ends[i] = end += list.runs[i].length;
  }
}

// The split depends on the plan and the heads alone, so that results do not change with the number
// of threads.
void Plan::schedule(int64_t n_kv_heads, int64_t group, int64_t v_pad) {
  Schedule& made = schedule_;
  if (made.n_kv_heads == n_kv_heads && made.group == group && made.v_pad == v_pad) return;
  made = Schedule();
  made.n_kv_heads = n_kv_heads;
  made.group = group;
  made.v_pad = v_pad;

  const int64_t heads = std::min(group, kMaxRows);  // query heads of a job
  const int64_t tokens = std::max<int64_t>(1, kMaxRows / heads);
  int64_t work = 0;
  made.is_by_size = heads == group;
  for (const CellList& list : lists_) {
    const auto n = static_cast<int64_t>(list.tokens.size());
    made.is_by_size &= n <= tokens;
    work += (n + tokens - 1) / tokens * ((group + heads - 1) / heads) * list.n_cells;
  }
  work *= n_kv_heads;
  const bool is_small_last = made.is_by_size && work / kWantedLarge >= kLeastLarge;
  int64_t target = std::max(kLeastCells, work / (is_small_last ? kWantedLarge : kWantedJobs));
  target = (target + kRound - 1) / kRound * kRound;

  std::vector<int32_t> n_parts(static_cast<size_t>(input_.n_tokens * group), 0);
  for (size_t i = 0; i < lists_.size(); ++i) {
    const CellList& list = lists_[i];
    const auto n = static_cast<int64_t>(list.tokens.size());
    for (int64_t t = 0; t < n; t += tokens) {
      for (int64_t h = 0; h < group; h += heads) {
        JobSpec job{};
        job.list = static_cast<int32_t>(i);
        job.first_token = static_cast<int32_t>(t);
        job.n_tokens = static_cast<int32_t>(std::min(tokens, n - t));
        job.first_head = static_cast<int32_t>(h);
        job.n_heads = static_cast<int32_t>(std::min(heads, group - h));
        // A causal list ends, for these tokens, behind the last one's own cell.
        const int64_t n_cells = list.kind == Kind::causal ? list.n_free + t + job.n_tokens : list.n_cells;
        const int64_t n_pieces = std::max<int64_t>(1, (n_cells + target / 2) / target);
        const auto rounded = [](int64_t n) { return (n + kRound - 1) / kRound * kRound; };
        int64_t piece = rounded((n_cells + n_pieces - 1) / n_pieces), large = n_cells;
        if (is_small_last && n_pieces > 1) {  // two of a third in the last one's place
          piece = rounded(3 * n_cells / (3 * n_pieces - 1));
          large = (n_pieces - 1) * piece;
        }
        for (int64_t c = 0; c < n_cells; c += job.n_cells) {
          if (c == large) piece = rounded((n_cells - large + 1) / 2);
          job.first_cell = c;
          job.n_cells = std::min(piece, n_cells - c);
          const auto run = std::upper_bound(list.ends.begin(), list.ends.end(), c);
          job.run = run - list.ends.begin();
          job.run_offset = c - (job.run ? list.ends[static_cast<size_t>(job.run - 1)] : 0);
          made.jobs.push_back(job);
          for (int64_t row = 0; row < job.n_tokens; ++row)
            for (int64_t head = 0; head < job.n_heads; ++head)
              ++n_parts[static_cast<size_t>(list.tokens[static_cast<size_t>(t + row)] * group + h + head)];
        }
        made.max_rows = std::max<int64_t>(made.max_rows, job.n_tokens * job.n_heads);
      }
    }
  }

  // Rows with one part are final; the others go through partial results.
  std::vector<int32_t> at(n_parts.size(), -1);
  int64_t n_all = 0;
  for (size_t row = 0; row < n_parts.size(); ++row) {
    if (n_parts[row] < 2) continue;
    at[row] = static_cast<int32_t>(made.merged_rows.size());
    made.merged_rows.push_back(static_cast<int32_t>(row));
    made.part_ends.push_back(n_all += n_parts[row]);
  }
  made.parts.resize(static_cast<size_t>(n_all));
  std::vector<int64_t> filled(made.merged_rows.size());
  for (size_t i = 1; i < filled.size(); ++i) filled[i] = made.part_ends[i - 1];
  for (JobSpec& job : made.jobs) {
    const CellList& list = lists_[static_cast<size_t>(job.list)];
    const int32_t n_rows = job.n_tokens * job.n_heads;
    job.slot = -1;
    bool is_partial = false;
    for (int32_t r = 0; r < n_rows && !is_partial; ++r)
      is_partial = at[static_cast<size_t>(list.tokens[static_cast<size_t>(job.first_token + r / job.n_heads)] * group +
                                          job.first_head + r % job.n_heads)] >= 0;
    if (!is_partial) continue;
    job.slot = made.n_floats;
    made.n_floats += (n_rows * (2 + v_pad) + 15) / 16 * 16;
    for (int32_t r = 0; r < n_rows; ++r) {
      const size_t row =
          static_cast<size_t>(list.tokens[static_cast<size_t>(job.first_token + r / job.n_heads)] * group +
                              job.first_head + r % job.n_heads);
      if (at[row] < 0) {  // a single part beside rows with several: merged alone
        at[row] = static_cast<int32_t>(made.merged_rows.size());
        made.merged_rows.push_back(static_cast<int32_t>(row));
        made.part_ends.push_back(++n_all);
        made.parts.push_back({});
        filled.push_back(n_all - 1);
      }
      made.parts[static_cast<size_t>(filled[static_cast<size_t>(at[row])]++)] = {job.slot, r, n_rows};
    }
  }
  made.remaining.reset(new Counter[static_cast<size_t>(n_kv_heads)]);
}

// Whose turn each job is. A worker has a queue of its own, of heads that follow on each other, and takes from
// others' when that is empty: so what a head's jobs leave for each other, their results and who is the last,
// is mostly in its core's own cache, where cores are far from each other as well.
void Plan::share_out(int n_workers) {
  Schedule& made = schedule_;
  const auto n_queues = static_cast<size_t>(made.is_by_size ? n_workers : 1);
  if (made.queue_ends.size() == n_queues) return;
  const auto n_jobs = static_cast<int64_t>(made.jobs.size()), n = n_jobs * made.n_kv_heads;
  const auto cells = [&](int64_t i) { return made.jobs[static_cast<size_t>(i % n_jobs)].n_cells; };
  int64_t all = 0, before = 0;
  for (int64_t i = 0; i < n; ++i) all += cells(i);
  made.order.resize(static_cast<size_t>(n));
  made.queue_ends.assign(n_queues, 0);
  for (int64_t i = 0; i < n; ++i) {
    made.order[static_cast<size_t>(i)] = i;
    // By where a job's middle lies among all cells.
    ++made.queue_ends[static_cast<size_t>(2 * before + cells(i)) * n_queues / static_cast<size_t>(2 * all)];
    before += cells(i);
  }
  auto first = made.order.begin();
  for (size_t q = 0; q < n_queues; ++q) {
    if (q) made.queue_ends[q] += made.queue_ends[q - 1];
    const auto stop = made.order.begin() + made.queue_ends[q];
    if (made.is_by_size) std::stable_sort(first, stop, [&](int64_t a, int64_t b) { return cells(a) > cells(b); });
    first = stop;
  }
  made.taken.reset(new Counter[n_queues]);
}

double Plan::cost_ns(const Pool& pool, const Layout& layout) const {
  const double heads = static_cast<double>(layout.n_heads);
  const double kv_heads = static_cast<double>(pool.n_kv_heads);
  const double bytes = static_cast<double>(pool.k.packed_bytes() + pool.v.packed_bytes());
  const double dims = static_cast<double>(pool.k.dim + pool.v.dim);
  return cells_ * kv_heads * bytes * 0.05 + row_cells_ * heads * dims * 0.02;
}

namespace {

struct Shared {
  std::atomic<int64_t> next{0};
  int64_t n = 0;
};

void check(const Pool& pool, const Layout& layout) {
  if (layout.n_heads < 1 || layout.n_heads % pool.n_kv_heads)
    throw ConfigError("q has " + std::to_string(layout.n_heads) + " heads, which the pool's " +
                      std::to_string(pool.n_kv_heads) + " KV heads do not divide");
}

void check_cells(const Pool& pool, int64_t n_cells) {
  if (n_cells > pool.n_cells)
    throw ConfigError("cells up to " + std::to_string(n_cells) + " are asked for, the pool holds " +
                      std::to_string(pool.n_cells) + "; grow it before the step");
}

void check_exact_cells(const Pool& pool, int64_t n_cells) {
  if (!n_cells) return;
  if (!pool.exact)
    throw ConfigError(
        "exact cells are read and the pool has none beside it; make it "
        "with exact=");
  if (n_cells > pool.exact->n_cells)
    throw ConfigError("exact cells up to " + std::to_string(n_cells) + " are asked for, the exact pool holds " +
                      std::to_string(pool.exact->n_cells));
}

struct WriteCall : Shared {
  const Pool* pool;
  const Layout* layout;
  const void *k, *v;
  const Write* writes;   // n_pieces of them, or
  const int64_t* cells;  // one cell for each token
  int64_t n_pieces;

  void one(int64_t i) {
    float* scratch =
        reinterpret_cast<float*>(scratch_buffer.get(4 * (padded(std::max(pool->k.dim, pool->v.dim)) + kPad)));
    const int64_t piece = i % n_pieces, head = i / n_pieces % pool->n_kv_heads;
    const bool is_v = i / n_pieces >= pool->n_kv_heads;
    const Side& side = is_v ? pool->v : pool->k;
    const Strides& strides = is_v ? layout->v : layout->k;
    const Write& w = writes[piece];
    const int64_t size = layout->in == Dtype::f32 ? 4 : 2;
    const char* rows =
        static_cast<const char*>(is_v ? v : k) + (head * strides.head + w.q_start * strides.token) * size;
    ops().attend->write(side, pool->block_size, head, cells ? cells + w.q_start : nullptr, w.start, w.length, rows,
                        layout->in, strides.token, scratch);
  }
  static void work(void* data, int) {
    auto* call = static_cast<WriteCall*>(data);
    for (int64_t i; (i = call->next.fetch_add(1, std::memory_order_relaxed)) < call->n;) call->one(i);
  }
};

void run_writes(WriteCall& call, int64_t n_tokens, int n_threads) {
  call.n = call.n_pieces * call.pool->n_kv_heads * 2;
  const bool is_cast = call.pool->k.dtype != call.layout->in || call.pool->v.dtype != call.layout->in;
  const double numbers = static_cast<double>(n_tokens * call.pool->n_kv_heads * (call.pool->k.dim + call.pool->v.dim));
  const int workers = static_cast<int>(std::min<int64_t>(workers_for(n_threads), call.n));
  if (workers > 1 && numbers * (is_cast ? 0.5 : 0.1) > kAloneNs)
    run_workers(workers, WriteCall::work, &call);
  else
    WriteCall::work(&call, 0);
}

}  // namespace

void Plan::write(const Pool& pool, const Layout& layout, const void* k, const void* v, int n_threads) {
  check_cells(pool, input_.n_cells);
  WriteCall call;
  call.pool = &pool;
  call.layout = &layout;
  call.k = k;
  call.v = v;
  call.writes = input_.writes.data();
  call.cells = nullptr;
  call.n_pieces = static_cast<int64_t>(input_.writes.size());
  if (call.n_pieces) run_writes(call, input_.n_tokens, n_threads);
}

void write_cells(const Pool& pool, const Layout& layout, const int64_t* cells, int64_t n, const void* k, const void* v,
                 int n_threads) {
  for (int64_t i = 0; i < n; ++i) {
    check_cells(pool, cells[i] + 1);
    if (cells[i] < 0) throw ConfigError("cell -1 is no cell; leave it out");
  }
  const int64_t length = 256;
  std::vector<Write> writes;
  for (int64_t at = 0; at < n; at += length) writes.push_back({at, 0, std::min(length, n - at)});
  WriteCall call;
  call.pool = &pool;
  call.layout = &layout;
  call.k = k;
  call.v = v;
  call.writes = writes.data();
  call.cells = cells;
  call.n_pieces = static_cast<int64_t>(writes.size());
  if (n) run_writes(call, n, n_threads);
}

namespace {

void move_part(char* data, int64_t head_stride, int64_t cell_stride, int64_t block_stride, int64_t bytes,
               int64_t n_heads, int64_t block_size, int64_t base, const int64_t* src, int64_t n,
               std::vector<char>& rows) {
  rows.resize(static_cast<size_t>(bytes * n));
  const auto place = [&](int64_t cell) {
    if (!block_size) return cell * cell_stride;
    return cell / block_size * block_stride + cell % block_size * cell_stride;
  };
  for (int64_t head = 0; head < n_heads; ++head) {
    char* from = data + head * head_stride;
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(rows.data() + i * bytes, from + place(src[i]), static_cast<size_t>(bytes));
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(from + place(base + i), rows.data() + i * bytes, static_cast<size_t>(bytes));
  }
}

}  // namespace

void move_cells(const Pool& pool, int64_t base, const int64_t* src, int64_t n) {
  check_cells(pool, base + n);
  for (int64_t i = 0; i < n; ++i) check_cells(pool, src[i] + 1);
  std::vector<char> rows;
  for (const Side* side : {&pool.k, &pool.v}) {
    move_part(side->data, side->head_stride, side->cell_stride, side->block_stride, side->packed_bytes(),
              pool.n_kv_heads, pool.block_size, base, src, n, rows);
    if (is_quantised(side->dtype))
      move_part(side->affine, side->affine_head_stride, side->affine_cell_stride, side->affine_block_stride,
                side->affine_bytes(), pool.n_kv_heads, pool.block_size, base, src, n, rows);
  }
}

namespace {

struct AttendCall {
  void (*run_job)(const AttendCall&, int64_t, int64_t);
  int64_t (*take)(const AttendCall&, int worker);  // a job, or -1
  // A worker knows its next job before it begins one, and can fetch what that begins with.
  static void work(void* data, int worker) {
    const auto& call = *static_cast<AttendCall*>(data);
    int64_t i = call.take(call, worker);
    while (i >= 0) {
      const int64_t following = call.take(call, worker);
      call.run_job(call, i, following);
      i = following;
    }
  }
};

}  // namespace

void Plan::attend(const Pool& pool, const Layout& layout, const AttendArgs& args, int n_threads) {
  check(pool, layout);
  check_cells(pool, input_.n_cells);
  check_exact_cells(pool, n_exact_cells_);
  const int64_t group = layout.n_heads / pool.n_kv_heads;
  const int64_t k_pad = padded(pool.k.dim), v_pad = padded(pool.v.dim);
  schedule(pool.n_kv_heads, group, v_pad);
  Schedule& made = schedule_;
  const auto n_jobs = static_cast<int64_t>(made.jobs.size());

  struct Call : AttendCall {
    const Pool* pool;
    const Layout* layout;
    const AttendArgs* args;
    const std::vector<CellList>* lists;
    Schedule* made;
    float* partials;
    int64_t scratch_size, group, v_pad;
    const AttendOps* ops;

    Job job_of(const JobSpec& spec, int64_t kv_head) const {
      const CellList& list = (*lists)[static_cast<size_t>(spec.list)];
      Job job;
      job.pool = pool;
      job.layout = layout;
      job.args = args;
      job.kv_head = kv_head;
      job.runs = list.runs.data();
      job.tokens = list.tokens.data();
      job.mask = list.mask;
      job.kind = list.kind;
      job.list_cells = list.n_cells;
      job.n_free = list.n_free;
      job.first_token = spec.first_token;
      job.n_tokens = spec.n_tokens;
      job.first_head = spec.first_head;
      job.n_heads = spec.n_heads;
      job.first_cell = spec.first_cell;
      job.n_cells = spec.n_cells;
      job.run = spec.run;
      job.run_offset = spec.run_offset;
      job.following = nullptr;
      job.partial = spec.slot < 0 ? nullptr : partials + kv_head * made->n_floats + spec.slot;
      return job;
    }

    Job job_of(int64_t i) const {
      const auto n_jobs = static_cast<int64_t>(made->jobs.size());
      return job_of(made->jobs[static_cast<size_t>(i % n_jobs)], i / n_jobs);
    }

    void merge_head(int64_t kv_head) const {
      float* scratch = reinterpret_cast<float*>(scratch_buffer.get(scratch_size));
      const Job job = job_of(made->jobs[0], kv_head);
      const float* base = partials + kv_head * made->n_floats;
      std::vector<const float*> pointers;
      for (size_t i = 0; i < made->merged_rows.size(); ++i) {
        const int64_t first = i ? made->part_ends[i - 1] : 0;
        const int64_t n = made->part_ends[i] - first;
        pointers.resize(static_cast<size_t>(3 * n));
        const float** maxima = pointers.data();
        for (int64_t p = 0; p < n; ++p) {
          const Part& part = made->parts[static_cast<size_t>(first + p)];
          const float* at = base + part.slot;
          maxima[p] = at + part.row;
          maxima[n + p] = at + part.n_rows + part.row;
          maxima[2 * n + p] = at + 2 * part.n_rows + part.row * v_pad;
        }
        const int64_t token = made->merged_rows[i] / group;
        const int64_t head = kv_head * group + made->merged_rows[i] % group;
        ops->merge(job, token, head, static_cast<int>(n), maxima, maxima + n, maxima + 2 * n, scratch);
      }
    }
  } call;
  call.pool = &pool;
  call.layout = &layout;
  call.args = &args;
  call.lists = &lists_;
  call.made = &made;
  call.group = group;
  call.v_pad = v_pad;
  call.ops = ops().attend;
  call.scratch_size = scratch_bytes((made.max_rows + 3) / 4 * 4, k_pad, v_pad);
  call.partials = reinterpret_cast<float*>(partial_buffer.get(4 * made.n_floats * pool.n_kv_heads + 64));
  for (int64_t h = 0; h < pool.n_kv_heads; ++h)
    made.remaining[static_cast<size_t>(h)].n.store(n_jobs, std::memory_order_relaxed);
  call.run_job = [](const AttendCall& raw, int64_t i, int64_t following) {
    const auto& self = static_cast<const Call&>(raw);
    Job job = self.job_of(i), next;
    if (following >= 0) {
      next = self.job_of(following);
      job.following = &next;
    }
    self.ops->attend(job, scratch_buffer.get(self.scratch_size));
    auto& left = self.made->remaining[static_cast<size_t>(job.kv_head)].n;
    if (!self.made->merged_rows.empty() && left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      self.merge_head(job.kv_head);
  };
  call.take = [](const AttendCall& raw, int worker) {
    const Schedule& made = *static_cast<const Call&>(raw).made;
    const size_t n_queues = made.queue_ends.size();
    for (size_t turn = 0; turn < n_queues; ++turn) {
      const size_t q = (static_cast<size_t>(worker) + turn) % n_queues;
      const int64_t first = q ? made.queue_ends[q - 1] : 0, n = made.queue_ends[q] - first;
      auto& taken = made.taken[q].n;
      if (taken.load(std::memory_order_relaxed) >= n) continue;
      const int64_t i = taken.fetch_add(1, std::memory_order_relaxed);
      if (i < n) return made.order[static_cast<size_t>(first + i)];
    }
    return int64_t{-1};
  };
  int workers = static_cast<int>(std::min<int64_t>(workers_for(n_threads), n_jobs * pool.n_kv_heads));
  if (cost_ns(pool, layout) <= kAloneNs) workers = 1;
  share_out(workers);
  for (size_t q = 0; q < made.queue_ends.size(); ++q) made.taken[q].n.store(0, std::memory_order_relaxed);
  if (workers > 1)
    run_workers(workers, AttendCall::work, &call);
  else
    AttendCall::work(static_cast<AttendCall*>(&call), 0);
}

int64_t scratch_bytes(int64_t rows, int64_t k_pad, int64_t v_pad) {
  const int64_t floats = rows * (2 * k_pad + v_pad + 2 * kMaxTile) + rows * (k_pad + kMaxTile) / 2 + 32 +
                         16 * (2 * k_pad + v_pad) + kMaxTile * v_pad + (rows + 16) * 24 + 8 * 16;
  // What products of another kind want beside it: see words_base.h. Integers
  // have two groups in 64 numbers at most.
  const int64_t k = (k_pad + 63) / 64 * 64, v = (v_pad + 63) / 64 * 64, r = (rows + 15) / 16 * 16;
  const int64_t matrix = 512 * kMaxTile + 8 * kMaxTile * (k + v) / 32 + 2 * kMaxTile * (k + v) +
                         r * (8 * k + k / 2 + 8 + 64) + r * kMaxTile * (v / 16 + 4) + 16384 + r * (4 + 64) * (v / 32) +
                         4 * r * v + 16 * 64;
  return 4 * floats + 3 * (4 * 9 * kMaxTile + 256) + 64 + matrix;
}

}  // namespace kvcellar
