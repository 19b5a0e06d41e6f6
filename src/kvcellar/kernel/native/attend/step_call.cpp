#include "attend/step_call.h"

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#include "attend/plan.h"
#include "attend/step.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

void check(const KvcStepCall& call, const Plan& plan, const Pool& pool) {
  if (call.n_tokens != plan.n_tokens())
    throw ConfigError("the forward brings " + std::to_string(call.n_tokens) + " tokens; the step was planned for " +
                      std::to_string(plan.n_tokens()));
  if (call.n_kv_heads != pool.n_kv_heads || call.head_dim != pool.k.dim || call.v_head_dim != pool.v.dim)
    throw ConfigError("k has " + std::to_string(call.n_kv_heads) + " heads of " + std::to_string(call.head_dim) +
                      " and v rows of " + std::to_string(call.v_head_dim) + "; the cache holds " +
                      std::to_string(pool.n_kv_heads) + " heads of " + std::to_string(pool.k.dim) + " and " +
                      std::to_string(pool.v.dim));
}

}  // namespace

int step(const KvcStepCall* call, char* error, int64_t error_size) {
  try {
    auto& plan = *static_cast<Plan*>(call->plan);
    const auto& pool = *static_cast<const Pool*>(call->pool);
    check(*call, plan, pool);
    const Layout layout{call->n_heads,
                        static_cast<Dtype>(call->in_dtype),
                        static_cast<Dtype>(call->out_dtype),
                        {call->q_strides[0], call->q_strides[1]},
                        {call->k_strides[0], call->k_strides[1]},
                        {call->v_strides[0], call->v_strides[1]},
                        {call->out_strides[0], call->out_strides[1]}};
    const CallersThreads threads(call->parallel_for);
    if (call->exact_plan)
      static_cast<Plan*>(call->exact_plan)
          ->write(*static_cast<const Pool*>(call->exact_pool), layout, call->k, call->v, call->n_threads);
    plan.write(pool, layout, call->k, call->v, call->n_threads);
    plan.attend(pool, layout, {call->q, call->out, call->scale, call->softcap, call->sinks}, call->n_threads);
    return 0;
  } catch (const std::exception& wrong) {
    std::snprintf(error, static_cast<size_t>(error_size), "%s", wrong.what());
    return 1;
  }
}

}  // namespace kvcellar
