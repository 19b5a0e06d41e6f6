// Decoder layers for a few tokens.

#include "layers/decoder.h"

#include <cstring>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

thread_local Buffer rows_buffer, attention_buffer, model_buffer;

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
  norm({const_cast<void*>(x), n_tokens, 1, n_in, n_in, dtype}, layer.before.weight, layer.before.eps, normed, n_in,
       n_threads);
  run(layer.qkv, normed, n_tokens, dtype, qkv, n_threads);
  void* k = static_cast<char*>(qkv) + layer.n_heads * dim * size_of(dtype);
  if (layer.q.weight)
    norm({qkv, n_tokens, layer.n_heads, dim, n_out, dtype}, layer.q.weight, layer.q.eps, qkv, n_out, n_threads);
  if (layer.k.weight)
    norm({k, n_tokens, layer.n_kv_heads, dim, n_out, dtype}, layer.k.weight, layer.k.eps, k, n_out, n_threads);
  rotate({qkv, n_tokens, n_rotated, dim, n_out, dtype}, cos, sin, n_threads);
}

void after_attention(const DecoderLayer& layer, const void* x, const void* attended, int64_t n_tokens, void* out,
                     int n_threads) {
  const int64_t hidden = layer.o.weights.n_out, inner = layer.has_mixture ? 0 : layer.down.weights.n_in;
  const int64_t n = n_tokens * hidden;
  const Dtype dtype = layer.dtype;
  Pieces pieces(dtype, 2 * n + 3 * n_tokens * inner, 4);
  void *mid = pieces.take(n), *normed = pieces.take(n);
  void *both = pieces.take(2 * n_tokens * inner), *gated = pieces.take(n_tokens * inner);
  const RowOps& rows = *ops().rows;
  run(layer.o, attended, n_tokens, dtype, mid, n_threads);
  rows.add(mid, x, n, dtype);
  norm({mid, n_tokens, 1, hidden, hidden, dtype}, layer.between.weight, layer.between.eps, normed, hidden, n_threads);
  if (layer.has_mixture) {
    run_mixture(layer.mixture, normed, n_tokens, dtype, out, n_threads);
  } else {
    run(layer.gate_up, normed, n_tokens, dtype, both, n_threads);
    gate({both, n_tokens, 2, inner, 2 * inner, dtype}, gated, n_threads);
    run(layer.down, gated, n_tokens, dtype, out, n_threads);
  }
  rows.add(out, mid, n, dtype);
}

namespace {

// From x to x, with the layer's attention.
void run_layer(const DecoderLayer& layer, const LayerStep& step, const DecoderCall& call, void* x, int n_threads) {
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
  before_attention(layer, x, n_tokens, call.cos, call.sin, q, n_threads);
  if (step.exact_plan) step.exact_plan->write(*step.exact_pool, layout, k, v, n_threads);
  step.plan->write(*step.pool, layout, k, v, n_threads);
  step.plan->attend(*step.pool, layout, {q, attended, layer.scale, step.softcap, nullptr}, n_threads);
  after_attention(layer, x, attended, n_tokens, x, n_threads);
}

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
  const auto n_layers = static_cast<int64_t>(decoder.layers.size());
  for (int64_t layer = 0; layer <= n_layers; ++layer) {
    for (int64_t i = 0; i < call.n_features; ++i)
      for (int64_t t = 0; t < call.n_tokens && call.feature_layers[i] == layer; ++t)
        to_floats(x + t * row_bytes, dtype, hidden, call.features + (t * call.n_features + i) * hidden);
    if (layer < n_layers) run_layer(decoder.layers[static_cast<size_t>(layer)], call.steps[layer], call, x, n_threads);
  }
  if (call.n_rows == 0) return;
  for (int64_t r = 0; r < call.n_rows; ++r)
    std::memcpy(last + r * row_bytes, x + call.rows[r] * row_bytes, static_cast<size_t>(row_bytes));
  norm({last, call.n_rows, 1, hidden, hidden, dtype}, decoder.norm.weight, decoder.norm.eps, last, hidden, n_threads);
  run(decoder.head, last, call.n_rows, dtype, logits, n_threads);
  constexpr int64_t kPiece = 1 << 15;
  spread(n_logits, kPiece, kPiece, workers_for(n_threads), [&](int64_t first, int64_t stop) {
    to_floats(static_cast<const char*>(logits) + first * size_of(dtype), dtype, stop - first, call.logits + first);
  });
}

}  // namespace kvcellar
