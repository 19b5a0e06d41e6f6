// Decoder layers for a few tokens.

#include "layers/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

thread_local Buffer rows_buffer, attention_buffer, model_buffer, floats_buffer;

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// A call's memory, one piece behind the other.
class Pieces {
 public:
  Pieces(Dtype dtype, int64_t n_numbers, int n_pieces, Buffer& buffer = rows_buffer)
      : size_(size_of(dtype)), at_(buffer.get(n_numbers * size_ + 64 * n_pieces)) {}
  void* take(int64_t n_numbers) {
    char* piece = at_;
    at_ += (n_numbers * size_ + 63) / 64 * 64;
    return piece;
  }

 private:
  int64_t size_;
  char* at_;
};

void to_floats(const void* from, Dtype dtype, int64_t n, float* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  const auto* numbers = static_cast<const uint16_t*>(from);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(numbers[i]) << 16;
    std::memcpy(to + i, &bits, sizeof bits);
  }
}

void to_halves(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    to[i] = static_cast<uint16_t>(from[i] == from[i] ? rounded : bits >> 16 | 0x40);
  }
}

// Of rows in place, or to others; nothing where there is no norm.
void apply(const Norm& by, const Rows& x, void* out, int64_t out_token_stride, int n_threads) {
  if (!by.in_floats || x.dtype == Dtype::f32) return norm(x, by.weight, by.eps, out, out_token_stride, n_threads);
  constexpr int64_t kPiece = 1 << 14;
  const int64_t n = x.n_rows * x.dim, tokens = std::max<int64_t>(1, kPiece / n);
  spread(x.n_tokens, tokens, 1, x.n_tokens > tokens ? workers_for(n_threads) : 1, [&](int64_t first, int64_t stop) {
    auto* row = reinterpret_cast<float*>(floats_buffer.get(n * static_cast<int64_t>(sizeof(float))));
    for (int64_t t = first; t < stop; ++t) {
      to_floats(static_cast<const uint16_t*>(x.data) + t * x.token_stride, x.dtype, n, row);
      ops().rows->norm({row, 1, x.n_rows, x.dim, n, Dtype::f32}, by.weight, by.eps, row, n, 0, 1);
      to_halves(row, n, static_cast<uint16_t*>(out) + t * out_token_stride);
    }
  });
}

void multiply_by(void* x, float factor, int64_t n, Dtype dtype) {
  if (factor != 1.f) ops().rows->weigh(&x, &factor, 1, n, dtype, x);
}

// Multiplies rows x [n_tokens, dim] with the sigmoid of their logits.
void multiply_by_sigmoid(const void* logits, void* x, int64_t n_tokens, int64_t dim, Dtype dtype) {
  for (int64_t t = 0; t < n_tokens; ++t) {
    float logit;
    to_floats(static_cast<const char*>(logits) + t * size_of(dtype), dtype, 1, &logit);
    multiply_by(static_cast<char*>(x) + t * dim * size_of(dtype), 1.f / (1.f + std::exp(-logit)), dim, dtype);
  }
}

bool is_silu(const Gate& gate) {
  return gate.alpha == 1.f && gate.cubic == 0.f && gate.shift == 0.f && gate.limit == 0.f;
}

// x [n_tokens, 2, dim] -> [n_tokens, dim].
void gate_by(const Gate& by, const Rows& x, void* out, int n_threads) {
  if (is_silu(by)) return gate(x, out, n_threads);
  constexpr int64_t kPiece = 1 << 15;
  const int64_t tokens = std::max<int64_t>(1, kPiece / (2 * x.dim));
  spread(x.n_tokens, tokens, 1, x.n_tokens > tokens ? workers_for(n_threads) : 1,
         [&](int64_t first, int64_t stop) { ops().rows->gate_by(x, by, out, first, stop); });
}

}  // namespace

int64_t LinearLayer::n_out() const {
  int64_t n = weights.n_out;
  for (const LinearWeights& each : more) n += each.n_out;
  return n;
}

void run(const LinearLayer& layer, const void* x, int64_t n_tokens, Dtype dtype, void* out, int n_threads) {
  const int64_t n = layer.n_out(), bytes = n * size_of(dtype);
  linear({layer.weights, x, out, n_tokens, dtype, dtype, layer.more.empty() ? 0 : n}, n_threads);
  int64_t first = layer.weights.n_out;
  for (const LinearWeights& weights : layer.more) {
    linear({weights, x, static_cast<char*>(out) + first * size_of(dtype), n_tokens, dtype, dtype, n}, n_threads);
    first += weights.n_out;
  }
  if (!layer.bias) return;
  for (int64_t t = 0; t < n_tokens; ++t) ops().rows->add(static_cast<char*>(out) + t * bytes, layer.bias, n, dtype);
}

void before_attention(const DecoderLayer& layer, const void* x, int64_t n_tokens, const void* cos, const void* sin,
                      void* qkv, int n_threads) {
  const int64_t n_in = layer.qkv.weights.n_in, n_out = layer.qkv.n_out();
  const int64_t dim = layer.head_dim, n_rotated = layer.n_heads + layer.n_kv_heads;
  const Dtype dtype = layer.dtype;
  void* normed = Pieces(dtype, n_tokens * n_in, 1).take(n_tokens * n_in);
  const Rows rows{const_cast<void*>(x), n_tokens, 1, n_in, n_in, dtype};
  if (layer.before.weight) apply(layer.before, rows, normed, n_in, n_threads);
  run(layer.qkv, layer.before.weight ? normed : x, n_tokens, dtype, qkv, n_threads);
  void* k = static_cast<char*>(qkv) + layer.n_heads * dim * size_of(dtype);
  const auto norm_heads = [&](const Norm& by, void* heads, int64_t n_heads) {
    const int64_t n_rows = layer.norms_together ? 1 : n_heads, width = layer.norms_together ? n_heads * dim : dim;
    if (by.weight) apply(by, {heads, n_tokens, n_rows, width, n_out, dtype}, heads, n_out, n_threads);
  };
  norm_heads(layer.q, qkv, layer.n_heads);
  norm_heads(layer.k, k, layer.n_kv_heads);
  void* v = static_cast<char*>(k) + layer.n_kv_heads * dim * size_of(dtype);
  if (layer.v.weight) apply(layer.v, {v, n_tokens, layer.n_kv_heads, dim, n_out, dtype}, v, n_out, n_threads);
  if (layer.n_turned < 0 || layer.n_turned == dim) {
    rotate({qkv, n_tokens, n_rotated, dim, n_out, dtype}, cos, sin, n_threads);
    return;
  }
  for (int64_t head = 0; layer.n_turned && head < n_rotated; ++head) {
    void* first = static_cast<char*>(qkv) + head * dim * size_of(dtype);
    rotate({first, n_tokens, 1, layer.n_turned, n_out, dtype}, cos, sin, n_threads);
  }
}

void after_attention(const DecoderLayer& layer, const void* x, const void* attended, int64_t n_tokens, void* out,
                     int n_threads, const OwnRows& own) {
  const bool has_mlp = layer.gate_up.weights.data != nullptr, has_both = has_mlp && layer.has_mixture;
  const bool is_apart = layer.apart.router.weight && layer.apart.experts.weight;
  const int64_t hidden = layer.o.weights.n_out, n_own = layer.own.gate.weights.data ? layer.own.gate.n_out() : 0;
  const int64_t inner = has_mlp ? layer.down.weights.n_in : 0, widest = std::max(inner, n_own), n = n_tokens * hidden;
  const Dtype dtype = layer.dtype;
  Pieces pieces(dtype, 2 * n + 3 * n_tokens * widest + (has_both ? n + n_tokens : 0) + (is_apart ? n : 0), 7);
  void *mid = pieces.take(n), *normed = pieces.take(n);
  void *both = pieces.take(2 * n_tokens * widest), *gated = pieces.take(n_tokens * widest);
  const RowOps& rows = *ops().rows;
  const auto norm_said = [&](const Norm& by, void* said) {
    if (by.weight) apply(by, {said, n_tokens, 1, hidden, hidden, dtype}, said, hidden, n_threads);
  };
  const auto add_to_sum = [&](void* said, const Norm& by, const void* sum) {
    norm_said(by, said);
    multiply_by(said, layer.residual, n, dtype);
    rows.add(said, sum, n, dtype);
  };
  run(layer.o, attended, n_tokens, dtype, mid, n_threads);
  add_to_sum(mid, layer.attended, x);
  const Rows of_mid{mid, n_tokens, 1, hidden, hidden, dtype};
  if (layer.has_mixture && is_apart) {
    void* asked = pieces.take(n);
    apply(layer.apart.router, of_mid, asked, hidden, n_threads);
    apply(layer.apart.experts, of_mid, normed, hidden, n_threads);
    run_mixture(layer.mixture, normed, asked, n_tokens, dtype, out, n_threads);
    norm_said(layer.apart.experts_said, out);
  }
  if (layer.between.weight)
    apply(layer.between, of_mid, normed, hidden, n_threads);
  else
    normed = mid;
  if (layer.has_mixture && !is_apart) run_mixture(layer.mixture, normed, normed, n_tokens, dtype, out, n_threads);
  if (has_mlp) {
    void* said = has_both ? pieces.take(n) : out;
    run(layer.gate_up, normed, n_tokens, dtype, both, n_threads);
    gate_by(layer.gate, {both, n_tokens, 2, inner, 2 * inner, dtype}, gated, n_threads);
    run(layer.down, gated, n_tokens, dtype, said, n_threads);
    norm_said(layer.apart.mlp_said, said);
    if (layer.share.weights.data) {
      void* logits = pieces.take(n_tokens);
      run(layer.share, normed, n_tokens, dtype, logits, n_threads);
      multiply_by_sigmoid(logits, said, n_tokens, hidden, dtype);
    }
    if (has_both) rows.add(out, said, n, dtype);
  }
  add_to_sum(out, layer.mixed, mid);
  if (n_own) {
    const int64_t bytes = n_own * size_of(dtype);
    run(layer.own.gate, out, n_tokens, dtype, gated, n_threads);
    for (int64_t t = 0; t < n_tokens; ++t) {
      const char* from = static_cast<const char*>(own.data) + t * own.stride * size_of(dtype);
      char* to = static_cast<char*>(both) + 2 * t * bytes;
      std::memcpy(to, static_cast<char*>(gated) + t * bytes, static_cast<size_t>(bytes));
      std::memcpy(to + bytes, from, static_cast<size_t>(bytes));
    }
    gate_by(layer.gate, {both, n_tokens, 2, n_own, 2 * n_own, dtype}, gated, n_threads);
    run(layer.own.out, gated, n_tokens, dtype, mid, n_threads);
    norm_said(layer.own.norm, mid);
    rows.add(out, mid, n, dtype);
  }
  multiply_by(out, layer.result, n, dtype);
}

namespace {

// From x to x, with the layer's attention.
void run_layer(const DecoderLayer& layer, const LayerStep& step, const DecoderCall& call, const OwnRows& own, void* x,
               int n_threads) {
  const int64_t dim = layer.head_dim, n_out = layer.n_heads * dim, n_tokens = call.n_tokens;
  const int64_t n_joined = n_out + 2 * layer.n_kv_heads * dim;
  const Dtype dtype = layer.dtype;
  Pieces pieces(dtype, n_tokens * (n_joined + n_out), 2, attention_buffer);
  char* q = static_cast<char*>(pieces.take(n_tokens * n_joined));
  void* attended = pieces.take(n_tokens * n_out);
  const char* k = q + n_out * size_of(dtype);
  const char* v = k + layer.n_kv_heads * dim * size_of(dtype);
  const Strides joined{dim, n_joined};
  const Layout layout{layer.n_heads, dtype, dtype, joined, joined, joined, {dim, n_out}};
  const Sides sides = layer.n_turned ? call.ropes[layer.rope] : Sides{nullptr, nullptr};
  before_attention(layer, x, n_tokens, sides.cos, sides.sin, q, n_threads);
  if (step.exact_plan) step.exact_plan->write(*step.exact_pool, layout, k, v, n_threads);
  step.plan->write(*step.pool, layout, k, v, n_threads);
  step.plan->attend(*step.pool, layout, {q, attended, layer.scale, step.softcap, layer.sinks}, n_threads);
  after_attention(layer, x, attended, n_tokens, x, n_threads, own);
}

}  // namespace

void run_decoder(const Decoder& decoder, const DecoderCall& call, int n_threads) {
  const Dtype dtype = decoder.layers.front().dtype;
  const int64_t hidden = decoder.head.weights.n_in, n_vocab = decoder.head.weights.n_out;
  const int64_t row_bytes = hidden * size_of(dtype), n_logits = call.n_rows * n_vocab;
  Pieces pieces(dtype, (call.n_tokens + call.n_rows) * hidden + n_logits, 3, model_buffer);
  char* x = static_cast<char*>(pieces.take(call.n_tokens * hidden));
  char* last = static_cast<char*>(pieces.take(call.n_rows * hidden));
  void* logits = pieces.take(n_logits);
  const auto* embedding = static_cast<const char*>(decoder.embedding);
  if (!embedding) gather(decoder.head.weights, call.ids, call.n_tokens, dtype, x, n_threads);
  for (int64_t t = 0; embedding && t < call.n_tokens; ++t)
    std::memcpy(x + t * row_bytes, embedding + call.ids[t] * row_bytes, static_cast<size_t>(row_bytes));
  multiply_by(x, decoder.embedding_scale, call.n_tokens * hidden, dtype);
  const auto n_layers = static_cast<int64_t>(decoder.layers.size());
  for (int64_t layer = 0; layer <= n_layers; ++layer) {
    for (int64_t i = 0; i < call.n_features; ++i)
      for (int64_t t = 0; t < call.n_tokens && call.feature_layers[i] == layer; ++t)
        to_floats(x + t * row_bytes, dtype, hidden, call.features + (t * call.n_features + i) * hidden);
    if (layer == n_layers) break;
    const DecoderLayer& one = decoder.layers[static_cast<size_t>(layer)];
    const int64_t n_own = one.own.gate.weights.data ? one.own.gate.n_out() : 0;
    const char* first = static_cast<const char*>(call.own) + (n_own ? layer * n_own * size_of(dtype) : 0);
    run_layer(one, call.steps[layer], call, {first, n_layers * n_own}, x, n_threads);
  }
  if (call.n_rows == 0) return;
  for (int64_t r = 0; r < call.n_rows; ++r)
    std::memcpy(last + r * row_bytes, x + call.rows[r] * row_bytes, static_cast<size_t>(row_bytes));
  apply(decoder.norm, {last, call.n_rows, 1, hidden, hidden, dtype}, last, hidden, n_threads);
  run(decoder.head, last, call.n_rows, dtype, logits, n_threads);
  constexpr int64_t kPiece = 1 << 15;
  spread(n_logits, kPiece, kPiece, workers_for(n_threads), [&](int64_t first, int64_t stop) {
    float* to = call.logits + first;
    to_floats(static_cast<const char*>(logits) + first * size_of(dtype), dtype, stop - first, to);
    const float scale = decoder.logit_scale, cap = decoder.logit_cap;
    for (int64_t i = 0; scale != 1.f && i < stop - first; ++i) to[i] *= scale;
    for (int64_t i = 0; cap != 0.f && i < stop - first; ++i) to[i] = cap * std::tanh(to[i] / cap);
  });
}

}  // namespace kvcellar
