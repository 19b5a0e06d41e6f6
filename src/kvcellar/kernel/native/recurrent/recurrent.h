// Recurrent layers: short convolutions, the gated delta rule, the state update of Mamba 2, and the norm behind them.
// Each reads the states of one slot and writes those of another, once for all tokens of a sequence.

#pragma once

#include "core/pool.h"

namespace kvcellar {

// Consecutive tokens of one sequence take its states from one slot to another. In their order: one may go on from what
// an earlier one has written.
struct Advance {
  int64_t first, n_tokens;
  int64_t src, dst;  // src below 0: zeros
};

// What the layers of one forward share.
struct Batch {
  const Advance* advances = nullptr;
  int64_t n_advances = 0, n_tokens = 0;
  Dtype dtype = Dtype::f32;  // f32 or bf16, of all rows; states are f32
};

// Numbers of each token at data + token * stride.
struct TokenRows {
  const void* data = nullptr;
  int64_t stride = 0;
};

constexpr int64_t kMostWidth = 8, kMostInner = 512;

// Each channel's sum over its last `width` inputs, the oldest first. Its state is [n_channels, width].
struct Convolution {
  int64_t n_channels = 0, width = 0;
  const float* weight = nullptr;  // [width, n_channels]
  const float* bias = nullptr;    // [n_channels], or none
  bool has_silu = false;
};

// `in` and `by` are factors on the inputs and on the results, or null; all three have one stride.
struct ConvolutionCall {
  TokenRows x;
  const void *in, *by;
  float* states;
  void* out;  // [n_tokens, n_channels]
};

// S = decay S + k (beta (v - k decay S)), and q S: S [k_dim, v_dim] for each head. decay = exp(-rate softplus(a +
// shift)), beta = beta_scale sigmoid(b). With an eps q and k are divided by their lengths; q also by sqrt(k_dim).
struct DeltaRule {
  int64_t n_heads = 0, n_key_heads = 0, k_dim = 0, v_dim = 0;
  int64_t n_decays = 1;           // of a head: 1 or k_dim
  const float* rates = nullptr;   // [n_heads]
  const float* shifts = nullptr;  // [n_heads, n_decays]
  float beta_scale = 1.f;
};

struct DeltaCall {
  TokenRows q, k, v, a, b;
  float* states;
  void* out;  // [n_tokens, n_heads, v_dim]
};

// S = decay S + dt x B, and S C + skip x: S [head_dim, state_dim] for each head. dt = softplus(dt + shift), decay =
// exp(-rate dt).
struct Scan {
  int64_t n_heads = 0, n_groups = 0, head_dim = 0, state_dim = 0;
  const float* rates = nullptr;   // [n_heads]
  const float* shifts = nullptr;  // [n_heads]
  const float* skips = nullptr;   // [n_heads]
};

struct ScanCall {
  TokenRows x, b, c, dt;
  float* states;
  void* out;  // [n_tokens, n_heads, head_dim]
};

// RMSNorm of groups of numbers, and a gate before or behind it.
struct GatedNorm {
  int64_t dim = 0, group = 0;
  const float* weight = nullptr;  // [n_weights]; none: the gate alone
  int64_t n_weights = 0;          // group, or dim
  float eps = 0.f;
  bool gates_first = false;
  bool is_sigmoid = false;  // else silu
  bool rounds = false;      // to the type of the rows, before the weight and behind it
};

// Factors of all tokens, made before heads are spread over threads.
struct Factors {
  const float* decay;  // [n_tokens, n_heads, n_decays]
  const float* step;   // beta or dt, [n_tokens, n_heads]
};

struct RecurrentOps {
  // Channels [first, stop).
  void (*convolve)(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int64_t first, int64_t stop);
  // Columns [first, stop) of all heads' states one behind the other; of a head all or whole 64s.
  void (*delta)(const DeltaRule& of, const DeltaCall& call, const Batch& batch, const Factors& factors, int64_t first,
                int64_t stop);
  // Rows [first, stop) of all heads' states one behind the other.
  void (*scan)(const Scan& of, const ScanCall& call, const Batch& batch, const Factors& factors, int64_t first,
               int64_t stop);
  // Tokens [first, stop). x: [n_tokens, dim].
  void (*gated_norm)(const GatedNorm& of, const void* x, const TokenRows& gates, void* out, Dtype dtype, int64_t first,
                     int64_t stop);
};

void convolve(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int n_threads);
void delta(const DeltaRule& of, const DeltaCall& call, const Batch& batch, int n_threads);
void scan(const Scan& of, const ScanCall& call, const Batch& batch, int n_threads);
void gated_norm(const GatedNorm& of, const void* x, const TokenRows& gates, int64_t n_tokens, Dtype dtype, void* out,
                int n_threads);

}  // namespace kvcellar
