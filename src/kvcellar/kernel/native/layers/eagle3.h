// A level of an EAGLE-3 head for a few tokens: one decoder layer and what it says, in one call.

#pragma once

#include "attend/plan.h"
#include "linear/linear.h"

namespace kvcellar {

// Norms are folded into the matrices behind them. Nothing here is owned.
struct Eagle3Weights {
  int64_t hidden = 0, inner = 0, n_heads = 0, n_kv_heads = 0, head_dim = 0;
  int64_t n_vocab = 0, n_said = 0;  // tokens that it reads, and that it can say
  float eps = 0.f;                  // of all norms
  // 2 hidden -> (n_heads + 2 n_kv_heads) head_dim; n_heads head_dim -> hidden; hidden -> 2 inner;
  // inner -> hidden; hidden -> n_said.
  LinearWeights qkv, o, gate_up, down, lm_head;
  const float* embedding = nullptr;       // [n_vocab, hidden]
  const float* qkv_bias = nullptr;        // or null
  const float* residual_scale = nullptr;  // [hidden]: the residual is the normed input, times it; or null
};

struct Eagle3Call {
  Plan* plan;
  const Pool* pool;
  Plan* exact_plan;  // what is written to exact cells too, or null
  const Pool* exact_pool;
  const float* rope;  // [2, n_rope, head_dim]: cosines, and sines with the sign of their half
  int64_t n_rope;
  int64_t n_tokens;
  const int64_t *tokens, *positions;  // [n_tokens]
  const float* hidden;                // [n_hidden, hidden]
  int64_t n_hidden;
  const int64_t* above;  // [n_tokens]: which of those rows each token goes on from
  int64_t n_rows;
  const int64_t* rows;  // [n_rows]: the tokens behind which something is said
  int64_t k;            // guesses behind each
  float* out;           // [n_rows, hidden]
  int64_t* ids;         // [n_rows, k], the likeliest first
  float* beliefs;       // [n_rows, k]: how likely each is, among n_said
};

// Writes K and V of all tokens, attends, and says what is likeliest behind some of them.
void eagle3_level(const Eagle3Weights& weights, const Eagle3Call& call, int n_threads);

}  // namespace kvcellar
