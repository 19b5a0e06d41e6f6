// From sums of weighted values to results, and results of parts to one.

#pragma once

#include "attend/numbers.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Weights of a result, and its sink's, to one.
inline void write_result(const Job& job, int64_t token, int64_t head, float max, float sum, float* row) {
  const Layout& layout = *job.layout;
  const int64_t dim = job.pool->v.dim;
  float factor = 1.f;
  if (job.args->sinks) {
    const float sink = job.args->sinks[head] * kLog2e;
    const float top = sink > max ? sink : max;
    if (top != kMinusInfinity) {
      factor = exp2_or_0(max - top);
      sum = sum * factor + exp2_or_0(sink - top);
    }
  }
  factor = sum == 0.f ? 0.f : factor / sum;
  for (int64_t d = 0; d < dim; ++d) row[d] *= factor;
  const int64_t size = layout.out == Dtype::f32 ? 4 : 2;
  char* out = static_cast<char*>(job.args->out) + (head * layout.o.head + token * layout.o.token) * size;
  store_row(out, layout.out, dim, row);
}

void merge(const Job& job, int64_t token, int64_t head, int n_parts, const float* const* maxima,
           const float* const* sums, const float* const* rows, float* scratch) {
  const int64_t v_pad = padded(job.pool->v.dim);
  float top = kMinusInfinity;
  for (int i = 0; i < n_parts; ++i)
    if (*maxima[i] > top) top = *maxima[i];
  const float base = top == kMinusInfinity ? 0.f : top;
  float total = 0.f;
  std::memset(scratch, 0, sizeof(float) * v_pad);
  for (int first = 0; first < n_parts; first += kLanes) {
    const int n = n_parts - first < kLanes ? n_parts - first : kLanes;
    float factors[kLanes];
    for (int i = 0; i < kLanes; ++i) factors[i] = i < n ? *maxima[first + i] - base : kMinusInfinity;
    store(factors, exp2_below_1(load(factors)));
    for (int i = 0; i < n; ++i) total += *sums[first + i] * factors[i];
    for (int64_t d = 0; d < v_pad; d += kLanes) {
      Vec y = load(scratch + d);
      for (int i = 0; i < n; ++i) y = fma(all(factors[i]), load(rows[first + i] + d), y);
      store(scratch + d, y);
    }
  }
  write_result(job, token, head, top, total, scratch);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
