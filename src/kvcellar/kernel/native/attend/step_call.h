// One layer's step for callers in other shared objects. Plain C: they use this kernel, its instruction
// set and its plans, and have no copy of it.

#pragma once

#include <stdint.h>

#define KVC_STEP_VERSION 1

extern "C" {

struct KvcStepCall {
  void* plan;                                                   // kvcellar::Plan
  const void* pool;                                             // kvcellar::Pool
  void* exact_plan;                                             // what is written to exact cells too, or null
  const void* exact_pool;                                       // and where they are
  int64_t n_tokens, n_heads, n_kv_heads, head_dim, v_head_dim;  // of q, k and v
  int32_t in_dtype, out_dtype;                                  // kvcellar::Dtype
  // In numbers: from head to head, from token to token.
  int64_t q_strides[2], k_strides[2], v_strides[2], out_strides[2];
  const void *q, *k, *v;
  void* out;
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // [n_heads] or null
  // The caller's threads, for this call: null for the kernel's own.
  void (*parallel_for)(int n_workers, void (*work)(void*, int), void* data);
  int32_t n_threads;  // 0: as many as the kernel would use
};

// Writes k and v and attends q. 0, or 1 with a text in `error`; then the result is undefined.
typedef int (*KvcStep)(const struct KvcStepCall* call, char* error, int64_t error_size);

}  // extern "C"
