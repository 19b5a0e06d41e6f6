// Work spread over threads that are already there where possible.

#pragma once

namespace kvcellar {

// Calls work(data, worker) once for each worker in [0, n_workers), one of them on this thread.
// Fewer calls may come where the pool gives fewer workers: the work is taken from a shared counter.
void run_workers(int n_workers, void (*work)(void*, int), void* data);

int workers_for(int n_threads);

}  // namespace kvcellar
