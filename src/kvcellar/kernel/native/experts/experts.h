// Mixtures of experts: of each token a few of many MLPs, whose weights are read once for all tokens that chose them.

#pragma once

#include "layers/rows.h"
#include "linear/linear.h"

namespace kvcellar {

// A linear layer of each expert, one behind the other as `weights`, which are the first one's, and their biases or none.
struct ExpertLayer {
  LinearWeights weights;
  int64_t n_experts = 0;
  const void* bias = nullptr;  // [n_experts, n_out], in the type of the rows
};

// What tokens chose: `experts` and `shares` are [n_tokens, n_chosen]. An expert that is not there adds nothing.
struct Choice {
  const int64_t* experts;
  const float* shares;
  int64_t n_tokens, n_chosen;
};

// Each row of x [n_rows, n_in] through the experts [n_rows, n_each] that it chose, to [n_rows, n_each, n_out]; zeros
// where an expert is not there. Returns how many bytes of weights were read.
int64_t run_experts(const ExpertLayer& layer, const void* x, int64_t n_rows, const int64_t* experts, int64_t n_each,
                    Dtype dtype, void* out, int n_threads);

// down(gate(up(x))) of each expert that a token chose, times its share, summed; x and out: [n_tokens, hidden]. Each
// token's result is the same whatever other tokens come with it, as far as `linear` says so.
struct Experts {
  ExpertLayer up, down;  // up: gate and up joined, 2 inner outputs
  Gate gate;
};
int64_t run_mixture(const Experts& experts, const void* x, const Choice& choice, Dtype dtype, void* out, int n_threads);

}  // namespace kvcellar
