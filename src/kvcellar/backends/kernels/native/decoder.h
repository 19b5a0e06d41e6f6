// Decoder layers for a few tokens: what comes before the attention of one, and after it, or all of many in
// one call. From Python the same is dozens of calls for each, and they find their code and data gone from
// the caches: a layer's weights are larger.

#pragma once

#include "kernel.h"
#include "linear.h"
#include "rows.h"

#include <vector>

namespace kvcellar {

struct LinearLayer {
  LinearWeights weights;
  const void* bias = nullptr;  // in the layer's type, or none
};

struct Norm {
  const void* weight = nullptr;  // none: no norm
  float eps = 0.f;
};

// x + o(attention(rotate(qkv(norm(x))))), and of that x + down(gate(gate_up(norm(x)))).
struct DecoderLayer {
  LinearLayer qkv, o, gate_up, down;
  Norm before, between, q, k;
  int64_t n_heads, n_kv_heads, head_dim;
  Dtype dtype;  // f32 or bf16, of everything but packed weights
};

// x [n_tokens, hidden] -> q, k and v [n_tokens, n_heads + 2 n_kv_heads, head_dim], rotated.
void before_attention(const DecoderLayer& layer, const void* x, int64_t n_tokens, const void* cos,
                      const void* sin, void* qkv, int n_threads);

// x and attended [n_tokens, n_heads * head_dim] -> the layer's result [n_tokens, hidden].
void after_attention(const DecoderLayer& layer, const void* x, const void* attended,
                     int64_t n_tokens, void* out, int n_threads);

// A layer with its attention: the plan's writes to a pool and its reads, of heads of one size.
struct LayerCall {
  const DecoderLayer* layer;
  Plan* plan;
  const Pool* pool;
  float scale, softcap;  // of logits
};

// Layers that follow on each other: from x to out, which may be the same.
void run_layers(const std::vector<LayerCall>& calls, const void* x, int64_t n_tokens, const void* cos,
                const void* sin, void* out, int n_threads);

}  // namespace kvcellar
