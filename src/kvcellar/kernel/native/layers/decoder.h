// Decoder layers for a few tokens: what comes before the attention of one, and after it, or a whole model in
// one call. From Python the same is dozens of calls for each, and they find their code and data gone from
// the caches: a layer's weights are larger.

#pragma once

#include "attend/plan.h"
#include "experts/experts.h"
#include "linear/linear.h"
#include "layers/rows.h"

#include <vector>

namespace kvcellar {

struct LinearLayer {
  LinearWeights weights;
  const void* bias = nullptr;         // in the layer's type, or none
  std::vector<LinearWeights> more{};  // packed, as `weights` are then: their outputs come behind

  int64_t n_out() const;
};

void run(const LinearLayer& layer, const void* x, int64_t n_tokens, Dtype dtype, void* out, int n_threads);

struct Norm {
  const void* weight = nullptr;  // none: no norm
  float eps = 0.f;
  bool in_floats = false;  // the weight is f32 whatever the rows are, and results are rounded once
};

// Norms of a mixture beside an MLP: of what its router and its experts read, in place of what the MLP does, and of what
// experts and MLP say, before both are summed.
struct ApartNorms {
  Norm router, experts, experts_said, mlp_said;
};

// What a layer makes of rows of its own, [n_tokens, size] that come with a call: x + norm(out(gate(gate(x), rows))).
struct OwnInputs {
  LinearLayer gate, out;  // no data: the layer has none
  Norm norm{};
};

// x + o(attention(rotate(qkv(norm(x))))), and of that x + down(gate(gate_up(norm(x)))), or x + mixture(norm(x)), or both
// summed. What is added to x is normed, where there are such norms, and multiplied before. The result, with what comes
// of the layer's own inputs, is multiplied once more.
struct DecoderLayer {
  LinearLayer qkv, o, gate_up, down;  // no data in the last two: no MLP
  Norm before, between, q, k;
  int64_t n_heads, n_kv_heads, head_dim;  // no KV heads: the layer attends over what an earlier one has written
  Dtype dtype;                            // f32 or bf16, of everything but packed weights
  float scale;                            // of the attention's logits
  bool has_mixture = false;               // in place of gate_up and down, or beside them
  Mixture mixture{};
  LinearLayer share{};          // beside a mixture: a logit, whose sigmoid the MLP is multiplied with; no data: none
  Norm attended{}, mixed{};     // of what the attention says, and of what the MLP says
  bool norms_together = false;  // all heads of q together, and all of k, and else each by itself
  int64_t n_turned = -1;        // of a head's numbers the first so many are rotated; -1: all
  int64_t rope = 0;             // which of a call's rotations
  float residual = 1.f;         // factor on what is added to x
  Gate gate{};
  const float* sinks = nullptr;  // [n_heads], or none
  Norm v{};                      // of v's heads
  ApartNorms apart{};
  OwnInputs own{};
  float result = 1.f;  // factor on what the layer says
};

// Rows of a layer's own, `stride` numbers from token to token; or none.
struct OwnRows {
  const void* data = nullptr;
  int64_t stride = 0;
};

// x [n_tokens, hidden] -> q, k and v [n_tokens, n_heads + 2 n_kv_heads, head_dim], rotated.
void before_attention(const DecoderLayer& layer, const void* x, int64_t n_tokens, const void* cos, const void* sin,
                      void* qkv, int n_threads);

// x and attended [n_tokens, n_heads * head_dim] -> the layer's result [n_tokens, hidden].
void after_attention(const DecoderLayer& layer, const void* x, const void* attended, int64_t n_tokens, void* out,
                     int n_threads, const OwnRows& own = {});

// A causal model: what a layer makes of the one before, from an embedding to logits.
struct Decoder {
  std::vector<DecoderLayer> layers;
  const void* embedding;  // [n_vocab, hidden], in the layers' type, or none: the head's weights, packed or coded
  Norm norm;
  LinearLayer head;
  float embedding_scale = 1.f;             // in the layers' type
  float logit_scale = 1.f, logit_cap = 0;  // of the head's results; cap tanh(x / cap), 0: none
};

// What one layer writes and reads in a forward, of heads of one size; exact cells beside it or none.
struct LayerStep {
  Plan* plan;
  const Pool* pool;
  Plan* exact_plan;
  const Pool* exact_pool;
  float softcap;  // of the attention's logits, 0: none
};

// Cosines and sines [n_tokens, numbers of a head that are rotated], in the layers' type.
struct Sides {
  const void *cos, *sin;
};

struct DecoderCall {
  const LayerStep* steps;  // one per layer
  int64_t n_tokens;
  const int64_t* ids;  // [n_tokens], in the vocabulary
  const Sides* ropes;  // what layers may be rotated by
  int64_t n_rows;
  const int64_t* rows;  // [n_rows], tokens whose logits are wanted
  float* logits;        // [n_rows, n_vocab]
  int64_t n_features;
  const int64_t* feature_layers;  // [n_features], layers whose input is wanted; behind the last its result
  float* features;                // [n_tokens, n_features, hidden]
  const void* own = nullptr;      // [n_tokens, layers, size], rows of each layer's own in the layers' type, or none
};

void run_decoder(const Decoder& decoder, const DecoderCall& call, int n_threads);

}  // namespace kvcellar
