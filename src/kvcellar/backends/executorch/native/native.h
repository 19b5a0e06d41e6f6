// What Python sees of the native part: plain C, called through ctypes.
//
// Nothing here throws and nothing aborts: a call that fails returns a number other than 0 and leaves a
// text for kvc_error() in its thread.

#pragma once

#include <stdint.h>

extern "C" {

// The version of everything below.
#define KVC_NATIVE_VERSION 1

enum KvcTag { kvc_none = 0, kvc_tensor = 1, kvc_int = 2, kvc_double = 3, kvc_bool = 4, kvc_text = 5 };

// A value that goes in or comes out. `dtype` is ExecuTorch's ScalarType.
struct KvcValue {
  int32_t tag, dtype, n_dims, is_planned;
  int32_t sizes[8];
  void* data;  // of a tensor or a text; `n_bytes` of them
  int64_t n_bytes;
  int64_t number;
  double real;
};

// One layer in one forward; see kernel/native/attend/step_call.h.
struct KvcLayer {
  void* plan;
  const void* pool;
  void* exact_plan;
  const void* exact_pool;
  float softcap;
  int32_t is_ready;  // set by whoever planned the step, taken back when the layer has run
};

// One forward that the kernel does without Python.
struct KvcForward {
  int64_t n_layers;
  struct KvcLayer* layers;
};

// A call of the op for a cache in Python. Tensors are DLManagedTensor*, owned by who is called.
struct KvcAttend {
  void *q, *k, *v, *position, *sinks, *out;  // sinks may be null
  int64_t layer;
  double scale;
  int32_t out_dtype;
};

// What a run took.
struct KvcTimes {
  int64_t op_ns, n_ops, run_ns;
};

// Both are called with the GIL by ctypes; other than 0: they failed and have kept the exception.
// prepare: a forward reached `layer` and nothing is planned for it. shape: tokens, query heads, KV
// heads, head_dim, v_head_dim. *forward is null where the cache is one in Python.
typedef int (*KvcPrepare)(int64_t layer, const int64_t* shape, const int64_t* positions, struct KvcForward** forward);
typedef int (*KvcAttendInPython)(const struct KvcAttend* call);

const char* kvc_built_for(void);  // the version of ExecuTorch
int kvc_native_version(void);
const char* kvc_error(void);
int kvc_is_shape_error(void);  // whether the last one was of q, k or v

// Registers both ops' kernels unless they are there, and says whom they call. `step` is a KvcStep, or
// null where there is no CPU attention kernel.
int kvc_register(KvcPrepare prepare, KvcAttendInPython attend, void* step);

// Whether programs and the op use the runtime's threads (they do), or the caller's alone.
void kvc_use_threads(int use);

void* kvc_open(const char* path);  // null: failed
void kvc_close(void* program);
int64_t kvc_n_methods(void* program);
const char* kvc_method_name(void* program, int64_t index);
int kvc_load(void* program, const char* method);
int kvc_backends(void* program, const char* method, const char** names, int64_t n);  // how many

// Runs a loaded method. Outputs point into the program and are valid until its next run; returns how
// many there are, or -1. `forward` is what was planned for it, or null.
int64_t kvc_run(void* program, const char* method, const struct KvcValue* inputs, int64_t n_inputs,
                struct KvcForward* forward, struct KvcValue* outputs, int64_t n_outputs, struct KvcTimes* times);

// Calls the op `n_times` as a program does, through the runtime's registry. values: q, k, v, position,
// out and, where there are sinks, those. `forward` as in kvc_run; it counts as not run before each call.
// Each call runs the kernel `n_kernel_times`: what is measured is then the kernel alone.
int kvc_call_op(const struct KvcValue* values, int64_t n_values, int64_t layer, double scale,
                struct KvcForward* forward, int64_t n_times, int64_t n_kernel_times, struct KvcTimes* times);

}  // extern "C"
