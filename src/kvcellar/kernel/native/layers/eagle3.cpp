// What is no product here takes some microseconds; it is written so that any compiler vectorises it.

#include "layers/eagle3.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/buffer.h"

namespace kvcellar {
namespace {

constexpr int64_t kAtOnce = 16;  // partial sums

thread_local Buffer scratch;

// e^x for x <= 88, to two units in the last place; 0 far below.
inline float exponential(float x) {
  x = x < -87.f ? -87.f : x;
  const float shifted = x * 1.44269504f + 12582912.f;  // rounds to an integer in the low bits
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  uint32_t bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += static_cast<uint32_t>(static_cast<int32_t>(n)) << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

// Sum of fn(i) for i in [0, n).
template <typename Fn>
inline float sum_of(int64_t n, const Fn& fn) {
  float sums[kAtOnce] = {};
  int64_t i = 0;
  for (; i + kAtOnce <= n; i += kAtOnce)
    for (int64_t j = 0; j < kAtOnce; ++j) sums[j] += fn(i + j);
  for (; i < n; ++i) sums[0] += fn(i);
  float total = 0.f;
  for (const float sum : sums) total += sum;
  return total;
}

// An RMS norm without weights.
void norm(const float* x, int64_t n, float eps, float* to) {
  const float squares = sum_of(n, [x](int64_t i) { return x[i] * x[i]; });
  const float scale = 1.f / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) to[i] = x[i] * scale;
}

void rotate(float* x, const float* cosines, const float* sines, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cosines[i] + b * sines[i];
    x[half + i] = b * cosines[half + i] + a * sines[half + i];
  }
}

void product(const LinearWeights& weights, const float* x, int64_t n_rows, float* to, int n_threads) {
  linear({weights, x, to, n_rows, Dtype::f32, Dtype::f32}, n_threads);
}

// The k highest of n, falling, and what the softmax gives them. The first of equals comes first.
void say(const float* logits, int64_t n, int64_t k, int64_t* ids, float* beliefs) {
  int64_t n_found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (n_found == k && !(logits[i] > beliefs[k - 1])) continue;
    int64_t at = n_found < k ? n_found++ : k - 1;
    for (; at > 0 && logits[i] > beliefs[at - 1]; --at) {
      ids[at] = ids[at - 1];
      beliefs[at] = beliefs[at - 1];
    }
    ids[at] = i;
    beliefs[at] = logits[i];
  }
  const float most = beliefs[0];
  const float total = sum_of(n, [=](int64_t i) { return exponential(logits[i] - most); });
  for (int64_t i = 0; i < k; ++i) beliefs[i] = exponential(beliefs[i] - most) / total;
}

void check_all(const char* what, const int64_t* values, int64_t n, int64_t stop) {
  for (int64_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= stop)
      throw std::invalid_argument(std::string(what) + " " + std::to_string(values[i]) + " is not in [0, " +
                                  std::to_string(stop) + ")");
}

void check(const Eagle3Weights& weights, const Eagle3Call& call) {
  if (call.n_tokens != call.plan->n_tokens())
    throw std::invalid_argument("the level brings " + std::to_string(call.n_tokens) +
                                " tokens; the step was planned for " + std::to_string(call.plan->n_tokens()));
  if (weights.n_kv_heads != call.pool->n_kv_heads || weights.head_dim != call.pool->k.dim ||
      weights.head_dim != call.pool->v.dim)
    throw std::invalid_argument("the cache was made for rows of another shape");
  if (call.k < 1 || call.k > weights.n_said)
    throw std::invalid_argument(std::to_string(call.k) + " guesses of a head that can say " +
                                std::to_string(weights.n_said));
  check_all("token", call.tokens, call.n_tokens, weights.n_vocab);
  check_all("position", call.positions, call.n_tokens, call.n_rope);
  check_all("hidden row", call.above, call.n_tokens, call.n_hidden);
  check_all("row", call.rows, call.n_rows, call.n_tokens);
}

}  // namespace

void eagle3_level(const Eagle3Weights& weights, const Eagle3Call& call, int n_threads) {
  check(weights, call);
  const int64_t hidden = weights.hidden, inner = weights.inner, dim = weights.head_dim;
  const int64_t n_rotated = weights.n_heads + weights.n_kv_heads;
  const int64_t width = (n_rotated + weights.n_kv_heads) * dim, out_width = weights.n_heads * dim;
  const int64_t n = call.n_tokens, n_rows = call.n_rows;

  const int64_t widest = std::max({2 * hidden, 2 * inner, out_width, weights.n_said});
  const int64_t n_most = std::max(n, n_rows);
  auto* a = reinterpret_cast<float*>(scratch.get(4 * (n * width + n_most * (2 * widest + 2 * hidden + out_width))));
  float* b = a + n_most * widest;
  float* qkv = b + n_most * widest;
  float* attended = qkv + n * width;
  float* residual = attended + n_most * out_width;
  float* chosen = residual + n_most * hidden;

  for (int64_t t = 0; t < n; ++t) {
    norm(weights.embedding + call.tokens[t] * hidden, hidden, weights.eps, a + 2 * t * hidden);
    const float* before = call.hidden + call.above[t] * hidden;
    float* normed = a + (2 * t + 1) * hidden;
    norm(before, hidden, weights.eps, normed);
    float* to = residual + t * hidden;
    for (int64_t i = 0; i < hidden; ++i)
      to[i] = weights.residual_scale ? normed[i] * weights.residual_scale[i] : before[i];
  }
  product(weights.qkv, a, n, qkv, n_threads);
  for (int64_t t = 0; t < n; ++t) {
    float* row = qkv + t * width;
    if (weights.qkv_bias)
      for (int64_t i = 0; i < width; ++i) row[i] += weights.qkv_bias[i];
    const float* cosines = call.rope + call.positions[t] * dim;
    for (int64_t head = 0; head < n_rotated; ++head)
      rotate(row + head * dim, cosines, cosines + call.n_rope * dim, dim);
  }

  const Layout layout{weights.n_heads, Dtype::f32,   Dtype::f32,      {dim, width},
                      {dim, width},    {dim, width}, {dim, out_width}};
  const float* keys = qkv + weights.n_heads * dim;
  const float* values = keys + weights.n_kv_heads * dim;
  if (call.exact_plan) call.exact_plan->write(*call.exact_pool, layout, keys, values, n_threads);
  call.plan->write(*call.pool, layout, keys, values, n_threads);
  if (!n_rows) return;
  const float scale = 1.f / std::sqrt(static_cast<float>(dim));
  call.plan->attend(*call.pool, layout, {qkv, attended, scale, 0.f, nullptr}, n_threads);

  for (int64_t r = 0; r < n_rows; ++r) {
    std::memcpy(a + r * out_width, attended + call.rows[r] * out_width, 4 * out_width);
    std::memcpy(chosen + r * hidden, residual + call.rows[r] * hidden, 4 * hidden);
  }
  product(weights.o, a, n_rows, b, n_threads);
  for (int64_t r = 0; r < n_rows; ++r) {
    float* row = chosen + r * hidden;
    for (int64_t i = 0; i < hidden; ++i) row[i] += b[r * hidden + i];
    norm(row, hidden, weights.eps, a + r * hidden);
  }
  product(weights.gate_up, a, n_rows, b, n_threads);
  for (int64_t r = 0; r < n_rows; ++r) {
    const float *gate = b + 2 * r * inner, *up = gate + inner;
    float* to = a + r * inner;
    for (int64_t i = 0; i < inner; ++i) {
      const float x = gate[i] < -80.f ? -80.f : gate[i];
      to[i] = gate[i] / (1.f + exponential(-x)) * up[i];
    }
  }
  product(weights.down, a, n_rows, b, n_threads);
  for (int64_t r = 0; r < n_rows; ++r) {
    float* row = call.out + r * hidden;
    for (int64_t i = 0; i < hidden; ++i) row[i] = chosen[r * hidden + i] + b[r * hidden + i];
    norm(row, hidden, weights.eps, a + r * hidden);
  }
  product(weights.lm_head, a, n_rows, b, n_threads);
  for (int64_t r = 0; r < n_rows; ++r)
    say(b + r * weights.n_said, weights.n_said, call.k, call.ids + r * call.k, call.beliefs + r * call.k);
}

}  // namespace kvcellar
