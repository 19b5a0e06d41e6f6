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
// where an expert is not there.
void run_expert_layer(const ExpertLayer& layer, const void* x, int64_t n_rows, const int64_t* experts, int64_t n_each,
                      Dtype dtype, void* out, int n_threads);

// down(gate(up(x))) of each expert that a token chose, times its share, summed; x and out: [n_tokens, hidden]. Each
// token's result is the same whatever other tokens come with it, as far as `linear` says so.
struct Experts {
  ExpertLayer up, down;  // up: gate and up joined, 2 inner outputs
  Gate gate;
};
void run_experts(const Experts& experts, const void* x, const Choice& choice, Dtype dtype, void* out, int n_threads);

// Experts in groups, one behind the other and of one size. A token chooses among those of the `n_kept` groups that are
// the highest by the sum of their `n_best` highest scores.
struct ExpertGroups {
  int64_t n_groups = 1, n_kept = 1, n_best = 1;
};

// By what a token chooses: softmax or sigmoid of logits, of which the highest are chosen.
struct Router {
  LinearWeights weights;         // plain [n_experts, hidden]
  const void* bias = nullptr;    // of the logits, in the type of the rows, or none
  const float* extra = nullptr;  // [n_experts], added where experts are chosen and not where they are weighed, or none
  int64_t n_chosen = 0;
  bool is_sigmoid = false;
  bool is_normalised = false;                         // shares are divided by their sum
  float scale = 1.f;                                  // of shares
  bool rounds_logits = false, rounds_shares = false;  // to the type of the rows
  ExpertGroups groups;                                // by scores with `extra`
  const float* factors = nullptr;                     // [n_experts], on the shares of each, or none
};

// What tokens x [n_tokens, hidden] choose: experts and shares [n_tokens, n_chosen], the highest first.
void choose(const Router& router, const void* x, int64_t n_tokens, Dtype dtype, int64_t* experts, float* shares,
            int n_threads);

// A mixture's tokens choose, and are run: by rows `asked` [n_tokens, hidden] which experts, and x through these.
struct Mixture {
  Router router;
  Experts experts;
};
void run_mixture(const Mixture& mixture, const void* x, const void* asked, int64_t n_tokens, Dtype dtype, void* out,
                 int n_threads);

// What products with experts have read since the process began.
struct ExpertCounts {
  int64_t read_bytes;    // of weights and of what lies beside them; what was read again for more rows counts again
  int64_t chosen_bytes;  // of those experts of each product that some row chose, each once
};
ExpertCounts expert_counts();

}  // namespace kvcellar
