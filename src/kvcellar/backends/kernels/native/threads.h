// Work spread over threads that are already there where possible.

#pragma once

#include <algorithm>
#include <atomic>

#include "kernel.h"

namespace kvcellar {

// Calls work(data, worker) for some workers, worker 0 on this thread. How many there are is up to the
// pool and to how busy the machine is: the work is taken from a shared counter.
void run_workers(int n_workers, void (*work)(void*, int), void* data);

int workers_for(int n_threads);

// fn(first, stop) for pieces of [0, n), on some threads. The last pieces are smaller, down to
// `least`: whoever is done waits for the others.
template <typename Fn>
void spread(int64_t n, int64_t per_piece, int64_t least, int n_workers, const Fn& fn) {
  struct Work {
    const Fn* fn;
    int64_t n, per_piece, least, n_shares;
    std::atomic<int64_t> next;
    static void work(void* raw, int) {
      auto* self = static_cast<Work*>(raw);
      int64_t first = self->next.load(std::memory_order_relaxed);
      while (first < self->n) {
        const int64_t fair = std::max((self->n - first) / self->n_shares, self->least);
        const int64_t stop = std::min(first + std::min(fair, self->per_piece), self->n);
        if (!self->next.compare_exchange_weak(first, stop, std::memory_order_relaxed)) continue;
        (*self->fn)(first, stop);
        first = self->next.load(std::memory_order_relaxed);
      }
    }
  } work{&fn, n, per_piece, least, 2 * n_workers, {0}};
  const int64_t n_pieces = (n + per_piece - 1) / per_piece;
  run_workers(static_cast<int>(std::min<int64_t>(n_workers, n_pieces)), Work::work, &work);
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
