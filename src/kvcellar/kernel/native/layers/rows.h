// What a model does between its linear layers, one pass over the memory each: norms, rotations by
// position, gates. In bfloat16 results are rounded where transformers rounds them.

#pragma once

#include "core/pool.h"

namespace kvcellar {

// Rows of `dim` numbers, `n_rows` of them one behind the other per token. Strides are in numbers.
struct Rows {
  void* data = nullptr;
  int64_t n_tokens = 0, n_rows = 0, dim = 0, token_stride = 0;
  Dtype dtype = Dtype::f32;  // f32 or bf16
};

// (up + shift) * x sigmoid(x (alpha + cubic x^2)), of x = gate up to `limit` and up from -limit to limit: SiLU, GELU in
// its form with tanh, and what gpt-oss makes of them.
struct Gate {
  float alpha = 1.f, cubic = 0.f, shift = 0.f;
  float limit = 0.f;  // 0: none
};

struct RowOps {
  // Tokens [first, stop) of x / sqrt(mean(x^2) + eps) * weight; x itself may be the result.
  void (*norm)(const Rows& x, const void* weight, float eps, void* out, int64_t out_token_stride, int64_t first,
               int64_t stop);
  // In place: (a, b) -> (a cos - b sin, b cos + a sin) of a row's halves. cos, sin: [n_tokens, dim].
  void (*rotate)(const Rows& x, const void* cos, const void* sin, int64_t first, int64_t stop);
  // x [n_tokens, 2, dim] -> silu(x[0]) * x[1], [n_tokens, dim].
  void (*gate)(const Rows& x, void* out, int64_t first, int64_t stop);
  // The same of any gate.
  void (*gate_by)(const Rows& x, const Gate& gate, void* out, int64_t first, int64_t stop);
  // to += x, n numbers.
  void (*add)(void* to, const void* x, int64_t n, Dtype dtype);
  // Sum of n_rows rows of `dim` numbers, each times its share; those of which `rows` is null count as none.
  void (*weigh)(const void* const* rows, const float* shares, int64_t n_rows, int64_t dim, Dtype dtype, void* out);
};

void norm(const Rows& x, const void* weight, float eps, void* out, int64_t out_token_stride, int n_threads);
void rotate(const Rows& x, const void* cos, const void* sin, int n_threads);
void gate(const Rows& x, void* out, int n_threads);

}  // namespace kvcellar
