// Work spread over threads that are already there where possible.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvcellar {

// How many. 0: as many as OpenMP would use.
void set_num_threads(int n);
int num_threads();
using ParallelFor = void (*)(int n_workers, void (*work)(void*, int), void* data);
void set_parallel_for(ParallelFor run);  // another runtime's pool; nullptr: ours
enum class Threads : int32_t { openmp, given, own };
Threads threads_of();  // whose they are: OpenMP's, which torch brings; those of `set_parallel_for`; ours

// Calls work(data, worker) for some workers, worker 0 on this thread. How many there are is up to the
// pool and to how busy the machine is: the work is taken from a shared counter.
void run_workers(int n_workers, void (*work)(void*, int), void* data);

int workers_for(int n_threads);

// Of [0, n), what a worker of `spread` has left to do.
class alignas(64) WorkRange {
 public:
  void set(int64_t first, int64_t stop) { at_.store(pack(first, stop), std::memory_order_relaxed); }

  // Up to n from the front; false if nothing is left.
  bool take(int64_t n, int64_t& first, int64_t& stop) {
    return take([n](int64_t) { return n; }, true, first, stop);
  }

  // Half of what is left, from the end, and at least n.
  bool take_half(int64_t n, int64_t& first, int64_t& stop) {
    return take([n](int64_t left) { return std::max((left + 1) / 2, n); }, false, first, stop);
  }

 private:
  static uint64_t pack(int64_t first, int64_t stop) {
    return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(stop);
  }

  template <typename Share>
  bool take(const Share& share, bool is_front, int64_t& first, int64_t& stop) {
    uint64_t seen = at_.load(std::memory_order_relaxed);
    for (;;) {
      const auto from = static_cast<int64_t>(seen >> 32), until = static_cast<int64_t>(seen & 0xFFFFFFFF);
      if (from >= until) return false;
      const int64_t taken = std::min(share(until - from), until - from);
      first = is_front ? from : until - taken;
      stop = first + taken;
      const uint64_t left = is_front ? pack(stop, until) : pack(from, first);
      if (at_.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return true;
    }
  }

  std::atomic<uint64_t> at_{0};  // both ends in one; nothing is done twice, so none comes back
};

// fn(first, stop) for pieces of [0, n), on some threads. Each has a range of its own and goes through it from
// the front, so that what is fetched behind a piece is the next one's; who is done takes half of what another
// has left, and at the end `least`. n fits into 32 bits.
template <typename Fn>
void spread(int64_t n, int64_t per_piece, int64_t least, int n_workers, const Fn& fn) {
  constexpr int kMostRanges = 64;
  struct Work {
    const Fn* fn;
    int64_t per_piece, least;
    int n_ranges;
    WorkRange ranges[kMostRanges];

    static void work(void* raw, int worker) {
      auto* self = static_cast<Work*>(raw);
      WorkRange* const own = worker < self->n_ranges ? self->ranges + worker : nullptr;
      int64_t first, stop;
      for (bool is_found = true; is_found;) {
        while (own && own->take(self->per_piece, first, stop)) (*self->fn)(first, stop);
        is_found = false;
        for (int turn = 1; turn <= self->n_ranges && !is_found; ++turn)
          is_found = self->ranges[(worker + turn) % self->n_ranges].take_half(self->least, first, stop);
        if (!is_found) continue;
        if (own)
          own->set(first, stop);
        else
          (*self->fn)(first, stop);
      }
    }
  };
  const int64_t n_pieces = (n + per_piece - 1) / per_piece;
  const int n_ranges = static_cast<int>(std::min<int64_t>({n_workers, n_pieces, kMostRanges}));
  if (n_ranges < 2) {
    if (n > 0) fn(int64_t{0}, n);
    return;
  }
  Work work{&fn, per_piece, least, n_ranges, {}};
  for (int64_t i = 0; i < n_ranges; ++i) work.ranges[i].set(n * i / n_ranges, n * (i + 1) / n_ranges);
  run_workers(std::min<int64_t>(n_workers, n_pieces), Work::work, &work);
}

// While it lives, calls of this thread use these threads; nullptr: whose they would be anyway.
class CallersThreads {
 public:
  explicit CallersThreads(ParallelFor run);
  ~CallersThreads();
  CallersThreads(const CallersThreads&) = delete;
  CallersThreads& operator=(const CallersThreads&) = delete;

 private:
  ParallelFor before_;
};

}  // namespace kvcellar
