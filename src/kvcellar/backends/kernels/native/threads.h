// Work spread over threads that are already there where possible.

#pragma once

#include "kernel.h"

namespace kvcellar {

// Calls work(data, worker) for some workers, worker 0 on this thread. How many there are is up to the
// pool and to how busy the machine is: the work is taken from a shared counter.
void run_workers(int n_workers, void (*work)(void*, int), void* data);

int workers_for(int n_threads);

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
