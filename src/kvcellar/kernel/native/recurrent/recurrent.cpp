// Recurrent layers: factors of all tokens, and heads spread over threads.

#include "recurrent/recurrent.h"

#include <cmath>
#include <cstring>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kAlone = 1 << 15;  // numbers below which waking a thread costs more

float bf16_as_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

float rounded(float value, Dtype dtype) {
  if (dtype == Dtype::f32 || value != value) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits += ((bits >> 16) & 1) + 0x7FFF;
  return bf16_as_float(static_cast<uint16_t>(bits >> 16));
}

float number(const TokenRows& rows, int64_t token, int64_t i, Dtype dtype) {
  const int64_t at = token * rows.stride + i;
  if (dtype == Dtype::f32) return static_cast<const float*>(rows.data)[at];
  return bf16_as_float(static_cast<const uint16_t*>(rows.data)[at]);
}

float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// fn(first, stop) over [0, n) in whole pieces, on some threads where there is enough to do.
template <typename Fn>
void over_pieces(int64_t n, int64_t piece, int64_t numbers, int n_threads, const Fn& fn) {
  const int64_t n_pieces = (n + piece - 1) / piece;
  const auto run = [&](int64_t first, int64_t stop) { fn(first * piece, std::min(stop * piece, n)); };
  spread(n_pieces, 1, 1, numbers < kAlone ? 1 : workers_for(n_threads), run);
}

Buffer& scratch() {
  static thread_local Buffer buffer;
  return buffer;
}

}  // namespace

void convolve(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int n_threads) {
  const int64_t numbers = of.n_channels * of.width * (batch.n_tokens + batch.n_advances);
  over_pieces(of.n_channels, 64, numbers, n_threads,
              [&](int64_t first, int64_t stop) { ops().recurrent->convolve(of, call, batch, first, stop); });
}

void delta(const DeltaRule& of, const DeltaCall& call, const Batch& batch, int n_threads) {
  const int64_t n = batch.n_tokens, width = of.n_heads * of.n_decays;
  auto* decay = reinterpret_cast<float*>(scratch().get(4 * n * (width + of.n_heads)));
  float* step = decay + n * width;
  over_pieces(n, 8, n * width * 16, n_threads, [&](int64_t first, int64_t stop) {
    for (int64_t t = first; t < stop; ++t) {
      for (int64_t i = 0; i < width; ++i)
        decay[t * width + i] =
            std::exp(-of.rates[i / of.n_decays] * softplus(number(call.a, t, i, batch.dtype) + of.shifts[i]));
      for (int64_t h = 0; h < of.n_heads; ++h)
        step[t * of.n_heads + h] =
            of.beta_scale * rounded(1.f / (1.f + std::exp(-number(call.b, t, h, batch.dtype))), batch.dtype);
    }
  });
  const int64_t numbers = of.n_heads * of.k_dim * of.v_dim * n;
  // Few heads are split: a column's result does not depend on it.
  const int64_t piece = of.n_heads < 4 * workers_for(n_threads) ? 64 : of.v_dim;
  const bool is_split = of.v_dim % 64 == 0;
  over_pieces(of.n_heads * of.v_dim, is_split ? piece : of.v_dim, numbers, n_threads, [&](int64_t first, int64_t stop) {
    ops().recurrent->delta(of, call, batch, {decay, step}, first, stop);
  });
}

void scan(const Scan& of, const ScanCall& call, const Batch& batch, int n_threads) {
  const int64_t n = batch.n_tokens;
  auto* decay = reinterpret_cast<float*>(scratch().get(8 * n * of.n_heads));
  float* step = decay + n * of.n_heads;
  over_pieces(n, 8, n * of.n_heads * 16, n_threads, [&](int64_t first, int64_t stop) {
    for (int64_t t = first; t < stop; ++t)
      for (int64_t h = 0; h < of.n_heads; ++h) {
        const float x = rounded(number(call.dt, t, h, batch.dtype) + of.shifts[h], batch.dtype);
        const float dt = rounded(softplus(x), batch.dtype);
        step[t * of.n_heads + h] = dt;
        decay[t * of.n_heads + h] = std::exp(-of.rates[h] * dt);
      }
  });
  const int64_t piece = of.head_dim % 16 == 0 && of.n_heads < 4 * workers_for(n_threads) ? 16 : of.head_dim;
  const int64_t numbers = of.n_heads * of.head_dim * of.state_dim * n;
  over_pieces(of.n_heads * of.head_dim, piece, numbers, n_threads,
              [&](int64_t first, int64_t stop) { ops().recurrent->scan(of, call, batch, {decay, step}, first, stop); });
}

void gated_norm(const GatedNorm& of, const void* x, const TokenRows& gates, int64_t n_tokens, Dtype dtype, void* out,
                int n_threads) {
  over_pieces(n_tokens, 8, 2 * n_tokens * of.dim, n_threads,
              [&](int64_t first, int64_t stop) { ops().recurrent->gated_norm(of, x, gates, out, dtype, first, stop); });
}

}  // namespace kvcellar
