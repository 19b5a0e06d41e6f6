// kvcache::update_and_attend.out and its form with attention sinks: the one place where an exported
// program meets a cache.
//
// A step that was planned for this run is done here, layer by layer, by the CPU attention kernel. Any
// other cache is one in Python and gets the tensors through DLPack.

#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/kernel/kernel_includes.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <vector>

#include "../../../kernel/native/attend/step_call.h"
#include "call.h"
#include "dlpack.h"

namespace kvcellar {
namespace {

using executorch::aten::ArrayRef;
using executorch::aten::optional;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using executorch::runtime::KernelRuntimeContext;
using executorch::runtime::Span;

KvcPrepare prepare_in_python = nullptr;
KvcAttendInPython attend_in_python = nullptr;
KvcStep kernel_step = nullptr;

Tensor& failed(KernelRuntimeContext& context, Tensor& out, const char* why) {
  if (Call* call = current_call())
    call->error = why;
  else if (*why)
    ET_LOG(Error, "kvcellar: %s", why);
  context.fail(Error::InvalidArgument);
  return out;
}

Tensor& misshapen(KernelRuntimeContext& context, Tensor& out, const char* why) {
  failed(context, out, why);
  if (Call* call = current_call()) call->is_shape_error = true;
  return out;
}

bool is_bhsd(const Tensor& tensor) { return tensor.dim() == 4 && tensor.size(0) == 1; }

// The kernel's number of a type; -1: it does not take it.
int32_t kernel_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return 0;
    case ScalarType::BFloat16: return 1;
    case ScalarType::Half: return 2;
    default: return -1;
  }
}

void parallel_for(int n_workers, void (*work)(void*, int), void* data) {
  executorch::extension::parallel_for(0, n_workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) work(data, static_cast<int>(i));
  });
}

// A tensor of the runtime for another library, for as long as the op lasts.
struct Lent {
  DLManagedTensor managed{};
  std::vector<int64_t> sizes, strides;
};

DLManagedTensor* lend(const Tensor& tensor) {
  auto* lent = new Lent;
  for (ssize_t i = 0; i < tensor.dim(); ++i) {
    lent->sizes.push_back(tensor.size(i));
    lent->strides.push_back(tensor.strides()[i]);
  }
  DLTensor& to = lent->managed.dl_tensor;
  to.data = const_cast<void*>(tensor.const_data_ptr());
  to.device = {kDLCPU, 0};
  to.ndim = static_cast<int32_t>(tensor.dim());
  uint8_t code = kDLFloat;
  if (tensor.scalar_type() == ScalarType::BFloat16) code = kDLBfloat;
  if (executorch::runtime::isIntegralType(tensor.scalar_type(), false)) code = kDLInt;
  to.dtype = {code, static_cast<uint8_t>(8 * tensor.element_size()), 1};
  to.shape = lent->sizes.data();
  to.strides = lent->strides.data();
  lent->managed.manager_ctx = lent;
  lent->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Lent*>(self->manager_ctx); };
  return &lent->managed;
}

bool copy_positions(const Tensor& position, std::vector<int64_t>& to) {
  to.resize(static_cast<size_t>(position.numel()));
  if (position.scalar_type() == ScalarType::Long) {
    const auto* from = position.const_data_ptr<int64_t>();
    std::copy(from, from + position.numel(), to.begin());
  } else if (position.scalar_type() == ScalarType::Int) {
    const auto* from = position.const_data_ptr<int32_t>();
    std::copy(from, from + position.numel(), to.begin());
  } else {
    return false;
  }
  return true;
}

// The layer in the step that was planned for this run; asks Python for a plan where there is none.
// false: failed. *layer stays null where the cache is one in Python.
bool find_layer(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& position, int64_t layer_id,
                KvcLayer** layer) {
  Call* call = current_call();
  if (!call || !kernel_step) return true;
  const auto ready = [&]() -> KvcLayer* {
    KvcForward* forward = call->forward;
    if (!forward || layer_id < 0 || layer_id >= forward->n_layers) return nullptr;
    return forward->layers[layer_id].is_ready ? &forward->layers[layer_id] : nullptr;
  };
  if ((*layer = ready())) return true;
  std::vector<int64_t> positions;
  if (!copy_positions(position, positions)) {
    call->error = "position is not of ints";
    return false;
  }
  call->forward = nullptr;
  const int64_t shape[] = {k.size(2), q.size(1), k.size(1), k.size(3), v.size(3)};
  if (prepare_in_python(layer_id, shape, positions.data(), &call->forward)) return false;
  *layer = ready();
  return true;
}

Tensor& attend_natively(KernelRuntimeContext& context, KvcLayer& layer, const Tensor& q, const Tensor& k,
                        const Tensor& v, double scale, const optional<Tensor>& sinks, Tensor& out) {
  std::vector<float> as_floats;
  KvcStepCall call{};
  call.plan = layer.plan;
  call.pool = layer.pool;
  call.exact_plan = layer.exact_plan;
  call.exact_pool = layer.exact_pool;
  call.n_tokens = k.size(2);
  call.n_heads = q.size(1);
  call.n_kv_heads = k.size(1);
  call.head_dim = k.size(3);
  call.v_head_dim = v.size(3);
  call.in_dtype = kernel_dtype(q.scalar_type());
  call.out_dtype = kernel_dtype(out.scalar_type());
  const auto strides = [](const Tensor& tensor, int64_t (&to)[2]) {
    to[0] = tensor.strides()[1];
    to[1] = tensor.strides()[2];
  };
  strides(q, call.q_strides);
  strides(k, call.k_strides);
  strides(v, call.v_strides);
  strides(out, call.out_strides);
  call.q = q.const_data_ptr();
  call.k = k.const_data_ptr();
  call.v = v.const_data_ptr();
  call.out = out.mutable_data_ptr();
  call.scale = static_cast<float>(scale);
  call.softcap = layer.softcap;
  if (sinks.has_value()) {
    if (sinks->scalar_type() != ScalarType::Float || sinks->numel() != call.n_heads)
      return failed(context, out, "sinks are not float32, one per query head");
    call.sinks = sinks->const_data_ptr<float>();
  }
  call.parallel_for = parallel_for;
  call.n_threads = uses_threads() ? static_cast<int32_t>(executorch::extension::get_thread_count()) : 1;
  char error[400];
  for (int64_t i = current_call()->n_kernel_times; i > 0; --i)
    if (kernel_step(&call, error, sizeof error)) return failed(context, out, error);
  layer.is_ready = 0;
  return out;
}

Tensor& attend(KernelRuntimeContext& context, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& position,
               int64_t layer_id, double scale, ScalarType out_dtype, const optional<Tensor>& sinks, Tensor& out) {
  const bool is_plain = q.dim() == 4 && k.dim() == 4 && q.size(3) == k.size(3);  // else of latent rows
  if (!is_bhsd(q) || !is_bhsd(k) || !is_bhsd(v) || q.size(2) != k.size(2) || k.size(2) != v.size(2) ||
      k.size(1) != v.size(1) || (!is_plain && q.size(3) != k.size(3) + v.size(3)) || position.numel() != k.size(2))
    return misshapen(context, out,
                     "q, k and v are not [1, heads, T, dim] of one T, with as many positions: the "
                     "program is not one for caches with all tokens on one axis");
  if (out_dtype != out.scalar_type())
    return failed(context, out, "the result is planned in another type than out_dtype");
  const SizesType sizes[4] = {1, static_cast<SizesType>(q.size(1)), static_cast<SizesType>(q.size(2)),
                              static_cast<SizesType>(v.size(3))};
  if (executorch::runtime::resize_tensor(out, ArrayRef<SizesType>(sizes, 4)) != Error::Ok)
    return failed(context, out, "the result does not fit where it is planned");
  KvcLayer* layer = nullptr;
  if (!find_layer(q, k, v, position, layer_id, &layer)) {
    context.fail(Error::InvalidState);
    return out;
  }
  const bool is_float = kernel_dtype(q.scalar_type()) >= 0 && q.scalar_type() == k.scalar_type() &&
                        k.scalar_type() == v.scalar_type() && kernel_dtype(out.scalar_type()) >= 0 &&
                        q.strides()[3] == 1 && k.strides()[3] == 1 && v.strides()[3] == 1 && out.strides()[3] == 1;
  if (layer) {
    if (!is_plain) return failed(context, out, "queries of latent rows meet a cache that has none");
    if (!is_float) return failed(context, out, "q, k and v are not of one float type, without gaps");
    return attend_natively(context, *layer, q, k, v, scale, sinks, out);
  }
  const KvcAttend call{lend(q),
                       lend(k),
                       lend(v),
                       lend(position),
                       sinks.has_value() ? lend(*sinks) : nullptr,
                       lend(out),
                       layer_id,
                       scale,
                       static_cast<int32_t>(out_dtype)};
  if (attend_in_python(&call)) return failed(context, out, "");
  return out;
}

// Adds to what the run took.
class Timed {
 public:
  Timed() : call_(current_call()), start_ns_(call_ ? now_ns() : 0) {}
  ~Timed() {
    if (!call_) return;
    call_->times.op_ns += now_ns() - start_ns_;
    ++call_->times.n_ops;
  }

 private:
  Call* call_;
  int64_t start_ns_;
};

// Arguments as the schema has them: q, k, v, position, layer_id, scale, out_dtype, [sinks], out, and once
// more what is returned. They come from a file, so they are looked at before they are taken.
void boxed(KernelRuntimeContext& context, Span<EValue*> args, bool has_sinks) {
  const Timed timed;
  const size_t n = has_sinks ? 9 : 8;
  bool fits = args.size() >= n;
  for (size_t i = 0; fits && i < n; ++i) {
    const bool is_number = i >= 4 && i <= 6;
    fits = is_number ? args[i]->isInt() || (i == 5 && args[i]->isDouble()) : args[i]->isTensor();
  }
  if (!fits) {
    if (Call* call = current_call()) call->error = "the op is called with other arguments";
    return context.fail(Error::InvalidArgument);
  }
  const double scale = args[5]->isDouble() ? args[5]->toDouble() : static_cast<double>(args[5]->toInt());
  optional<Tensor> sinks;
  if (has_sinks) sinks = args[7]->toTensor();
  attend(context, args[0]->toTensor(), args[1]->toTensor(), args[2]->toTensor(), args[3]->toTensor(), args[4]->toInt(),
         scale, static_cast<ScalarType>(args[6]->toInt()), sinks, args[n - 1]->toTensor());
}

void plain_op(KernelRuntimeContext& context, Span<EValue*> args) { boxed(context, args, false); }

void sinks_op(KernelRuntimeContext& context, Span<EValue*> args) { boxed(context, args, true); }

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A second registration of a name would end the process.
bool register_ops(KvcPrepare prepare, KvcAttendInPython in_python, void* step) {
  using executorch::runtime::Kernel;
  prepare_in_python = prepare;
  attend_in_python = in_python;
  kernel_step = reinterpret_cast<KvcStep>(step);
  static bool is_ours = false;
  if (is_ours) return true;
  constexpr const char* plain = "kvcache::update_and_attend.out";
  constexpr const char* sinks = "kvcache::update_and_attend_sinks.out";
  if (executorch::runtime::registry_has_op_function(plain) || executorch::runtime::registry_has_op_function(sinks))
    return false;
  static const Kernel kernels[] = {
      Kernel(plain, plain_op),
      Kernel(sinks, sinks_op),
  };
  is_ours = executorch::runtime::register_kernels({kernels, 2}) == Error::Ok;
  return is_ours;
}

}  // namespace kvcellar
