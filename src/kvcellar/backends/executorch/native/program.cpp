// Programs: opened, loaded and run without the GIL, and without ending the process.

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/core/hierarchical_allocator.h>
#include <executorch/runtime/kernel/kernel_runtime_context.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "call.h"

namespace kvcellar {
namespace {

using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::HierarchicalAllocator;
using executorch::runtime::PalImpl;
using executorch::runtime::Program;
using executorch::runtime::Span;

thread_local std::string last_error;
thread_local bool is_shape_error = false;
thread_local Call* call_of_thread = nullptr;

std::atomic<bool> use_threads{true};

PalImpl kept{};  // what the runtime had

constexpr size_t kLogBytes = 2000;

void emit(et_timestamp_t at, et_pal_log_level_t level, const char* file, const char* function, size_t line,
          const char* message, size_t length) {
  if (Call* call = call_of_thread) {
    if ((level == kError || level == kFatal) && call->log.size() < kLogBytes) {
      if (!call->log.empty()) call->log += "; ";
      call->log.append(message, length);
    }
    return;
  }
  if (kept.emit_log_message) kept.emit_log_message(at, level, file, function, line, message, length);
}

void last_resort() {
  if (call_of_thread) throw RuntimeAbort{};
  std::abort();
}

// Planned memory that is not touched before it is used: the logits of all rows would be resident.
struct Planned {
  std::vector<void*> blocks;
  std::vector<Span<uint8_t>> spans;
  std::unique_ptr<HierarchicalAllocator> allocator;

  ~Planned() {
    for (void* block : blocks) std::free(block);
  }
};

struct OpenProgram {
  std::unique_ptr<Module> module;
  std::vector<std::string> methods;
  std::map<std::string, std::unique_ptr<Planned>> planned;
  std::vector<EValue> outputs;
};

std::string why(const Call& call, const std::string& what, Error error) {
  std::string text = call.error;
  if (text.empty() && !call.log.empty()) text = call.log;
  std::string name = executorch::runtime::to_string(error);
  return what + ": " + name + (text.empty() ? "" : " (" + text + ")");
}

// Runs `work`, which returns an Error; what it leaves in the call and whatever it throws become a text.
template <class Work>
bool guarded(Call& call, const std::string& what, const Work& work) {
  Call* const outer = call_of_thread;
  call_of_thread = &call;
  bool is_ok = false;
  last_error.clear();
  try {
    const Error error = work();
    is_ok = error == Error::Ok;
    if (!is_ok) last_error = why(call, what, error);
  } catch (const RuntimeAbort&) {
    last_error = what + ": the runtime gave up (" + call.log + ")";
  } catch (const std::exception& error) {
    last_error = what + ": " + error.what();
  }
  call_of_thread = outer;
  is_shape_error = call.is_shape_error;
  return is_ok;
}

OpenProgram& opened(void* program) { return *static_cast<OpenProgram*>(program); }

Error make_planned(OpenProgram& program, const std::string& method, Planned& to) {
  const auto meta = program.module->method_meta(method);
  if (!meta.ok()) return meta.error();
  const size_t n = meta->num_memory_planned_buffers();
  for (size_t i = 0; i < n; ++i) {
    const auto size = meta->memory_planned_buffer_size(i);
    if (!size.ok()) return size.error();
    const auto n_bytes = static_cast<size_t>(size.get());
    void* block = std::calloc((n_bytes + 127) / 64, 64);
    if (!block) return Error::MemoryAllocationFailed;
    to.blocks.push_back(block);
    void* aligned = block;
    size_t space = n_bytes + 64;
    std::align(64, n_bytes, aligned, space);
    to.spans.emplace_back(static_cast<uint8_t*>(aligned), n_bytes);
  }
  to.allocator = std::make_unique<HierarchicalAllocator>(Span<Span<uint8_t>>(to.spans.data(), to.spans.size()));
  return Error::Ok;
}

TensorPtr tensor_of(const KvcValue& from) {
  std::vector<executorch::aten::SizesType> sizes(from.sizes, from.sizes + from.n_dims);
  return executorch::extension::make_tensor_ptr(std::move(sizes), from.data, {}, {},
                                                static_cast<executorch::aten::ScalarType>(from.dtype));
}

void describe(const EValue& value, KvcValue& to) {
  to = KvcValue{};
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    to.tag = kvc_tensor;
    to.dtype = static_cast<int32_t>(tensor.scalar_type());
    to.n_dims = static_cast<int32_t>(tensor.dim());
    for (ssize_t i = 0; i < tensor.dim() && i < 8; ++i) to.sizes[i] = tensor.size(i);
    to.data = const_cast<void*>(tensor.const_data_ptr());
    to.n_bytes = static_cast<int64_t>(tensor.nbytes());
  } else if (value.isInt()) {
    to.tag = kvc_int;
    to.number = value.toInt();
  } else if (value.isDouble()) {
    to.tag = kvc_double;
    to.real = value.toDouble();
  } else if (value.isBool()) {
    to.tag = kvc_bool;
    to.number = value.toBool();
  } else if (value.isString()) {
    const auto text = value.toString();
    to.tag = kvc_text;
    to.data = const_cast<char*>(text.data());
    to.n_bytes = static_cast<int64_t>(text.size());
  }
}

}  // namespace

bool uses_threads() { return use_threads.load(std::memory_order_relaxed); }

Call*& current_call() { return call_of_thread; }

void watch_runtime() {
  static std::once_flag once;
  std::call_once(once, [] {
    executorch::runtime::pal_init();
    if (const PalImpl* before = executorch::runtime::get_pal_impl()) kept = *before;
    executorch::runtime::register_pal(
        PalImpl::create(nullptr, last_resort, nullptr, nullptr, emit, nullptr, nullptr, __FILE__));
  });
}

}  // namespace kvcellar

using namespace kvcellar;

extern "C" {

const char* kvc_built_for(void) { return KVC_EXECUTORCH_VERSION; }

int kvc_native_version(void) { return KVC_NATIVE_VERSION; }

const char* kvc_error(void) { return last_error.c_str(); }

int kvc_is_shape_error(void) { return is_shape_error; }

int kvc_register(KvcPrepare prepare, KvcAttendInPython attend, void* step) {
  Call call;  // what the runtime says of kernels that are not there yet is no news
  bool is_ours = false;
  guarded(call, "registering the op", [&] {
    watch_runtime();
    is_ours = register_ops(prepare, attend, step);
    return Error::Ok;
  });
  if (is_ours) return 0;
  last_error = "another library has registered kvcache::update_and_attend.out in this process";
  return 1;
}

void kvc_use_threads(int use) { use_threads.store(use != 0); }

void* kvc_open(const char* path) {
  auto program = std::make_unique<OpenProgram>();
  Call call;
  const bool is_ok = guarded(call, "opening the file", [&] {
    program->module = std::make_unique<Module>(path, Module::LoadMode::Mmap);
    const Error error = program->module->load(Program::Verification::InternalConsistency);
    if (error != Error::Ok) return error;
    const auto names = program->module->method_names();
    if (!names.ok()) return names.error();
    program->methods.assign(names->begin(), names->end());
    return Error::Ok;
  });
  return is_ok ? program.release() : nullptr;
}

void kvc_close(void* program) { delete static_cast<OpenProgram*>(program); }

int64_t kvc_n_methods(void* program) { return static_cast<int64_t>(opened(program).methods.size()); }

const char* kvc_method_name(void* program, int64_t index) {
  return opened(program).methods[static_cast<size_t>(index)].c_str();
}

int kvc_load(void* raw, const char* method) {
  OpenProgram& program = opened(raw);
  if (program.planned.count(method)) return 0;
  Call call;
  auto planned = std::make_unique<Planned>();
  const bool is_ok = guarded(call, std::string("loading method ") + method, [&] {
    const Error error = make_planned(program, method, *planned);
    if (error != Error::Ok) return error;
    return program.module->load_method(method, planned->allocator.get());
  });
  if (is_ok) program.planned[method] = std::move(planned);
  return is_ok ? 0 : 1;
}

int kvc_backends(void* program, const char* method, const char** names, int64_t n) {
  int found = -1;
  Call call;
  guarded(call, "reading what the method uses", [&] {
    const auto meta = opened(program).module->method_meta(method);
    if (!meta.ok()) return meta.error();
    found = static_cast<int>(meta->num_backends());
    for (int i = 0; i < found && i < n; ++i) {
      const auto name = meta->get_backend_name(static_cast<size_t>(i));
      names[i] = name.ok() ? name.get() : "";
    }
    return Error::Ok;
  });
  return found;
}

int kvc_call_op(const KvcValue* values, int64_t n_values, int64_t layer, double scale, KvcForward* forward,
                int64_t n_times, int64_t n_kernel_times, KvcTimes* times) {
  Call call;
  call.forward = forward;
  call.n_kernel_times = n_kernel_times;
  const int64_t start_ns = now_ns();
  const bool is_ok = guarded(call, "the op", [&] {
    const bool has_sinks = n_values == 6;
    const auto op = executorch::runtime::get_op_function_from_registry(
        has_sinks ? "kvcache::update_and_attend_sinks.out" : "kvcache::update_and_attend.out");
    if (!op.ok()) return op.error();
    std::vector<TensorPtr> tensors;
    for (int64_t i = 0; i < n_values; ++i) tensors.push_back(tensor_of(values[i]));
    std::vector<EValue> args{
        *tensors[0], *tensors[1], *tensors[2], *tensors[3], layer, scale, static_cast<int64_t>(values[4].dtype)};
    if (has_sinks) args.emplace_back(*tensors[5]);
    args.emplace_back(*tensors[4]);
    args.emplace_back(*tensors[4]);
    std::vector<EValue*> pointers;
    for (EValue& arg : args) pointers.push_back(&arg);
    for (int64_t i = 0; i < n_times; ++i) {
      if (i) forward->layers[layer].is_ready = 1;
      executorch::runtime::KernelRuntimeContext context;
      op.get()(context, Span<EValue*>(pointers.data(), pointers.size()));
      if (context.failure_state() != Error::Ok) return context.failure_state();
    }
    return Error::Ok;
  });
  *times = call.times;
  times->run_ns = now_ns() - start_ns;
  return is_ok ? 0 : 1;
}

int64_t kvc_run(void* raw, const char* method, const KvcValue* inputs, int64_t n_inputs, KvcForward* forward,
                KvcValue* outputs, int64_t n_outputs, KvcTimes* times) {
  OpenProgram& program = opened(raw);
  Call call;
  call.forward = forward;
  const int64_t start_ns = now_ns();
  const bool is_ok = guarded(call, std::string("running method ") + method, [&] {
    program.outputs.clear();
    std::vector<TensorPtr> tensors;
    std::vector<EValue> values;
    for (int64_t i = 0; i < n_inputs; ++i) {
      const KvcValue& from = inputs[i];
      if (from.tag == kvc_tensor) {
        tensors.push_back(tensor_of(from));
        values.emplace_back(*tensors.back());
      } else if (from.tag == kvc_int) {
        values.emplace_back(from.number);
      } else if (from.tag == kvc_double) {
        values.emplace_back(from.real);
      } else if (from.tag == kvc_bool) {
        values.emplace_back(from.number != 0);
      } else {
        return Error::InvalidArgument;
      }
    }
    using executorch::extension::threadpool::NoThreadPoolGuard;
    std::optional<NoThreadPoolGuard> alone;
    if (!uses_threads()) alone.emplace();
    auto result = program.module->execute(method, values);
    if (!result.ok()) return result.error();
    program.outputs = std::move(result.get());
    return Error::Ok;
  });
  if (times) {
    *times = call.times;
    times->run_ns = now_ns() - start_ns;
  }
  if (!is_ok) return -1;
  const auto n = static_cast<int64_t>(program.outputs.size());
  for (int64_t i = 0; i < n && i < n_outputs; ++i) describe(program.outputs[static_cast<size_t>(i)], outputs[i]);
  return n;
}

}  // extern "C"
