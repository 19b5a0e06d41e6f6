// What this thread is doing in the runtime, and what went wrong.

#pragma once

#include <cstdint>
#include <string>

#include "native.h"

namespace kvcellar {

// One of our calls into the runtime; while there is one, the thread's log goes into its error.
struct Call {
  KvcForward* forward = nullptr;
  KvcTimes times{};
  int64_t n_kernel_times = 1;  // more: to measure
  std::string error;           // the op's own
  bool is_shape_error = false;
  std::string log;  // the runtime's
};

// The innermost call of this thread; null outside of ours: then the official runtime runs.
Call*& current_call();

// Whether the runtime's threads are to be used.
bool uses_threads();

// Where ExecuTorch would end the process, in one of our calls.
struct RuntimeAbort {};

// Have the runtime's log and its last resort go through us. Once.
void watch_runtime();

bool register_ops(KvcPrepare prepare, KvcAttendInPython attend, void* step);

int64_t now_ns();

}  // namespace kvcellar
