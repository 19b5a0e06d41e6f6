// Decoder layers for a few tokens.

#include "decoder.h"

#include <cstring>

#include "buffer.h"
#include "isa.h"

namespace kvcellar {
namespace {

thread_local Buffer rows_buffer, attention_buffer;

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

void run(const LinearLayer& layer, const void* x, int64_t n_tokens, Dtype dtype, void* out,
         int n_threads) {
  linear({layer.weights, x, out, n_tokens, dtype, dtype}, n_threads);
  if (!layer.bias) return;
  const int64_t n = layer.weights.n_out, bytes = n * size_of(dtype);
  for (int64_t t = 0; t < n_tokens; ++t)
    ops().linear.rows.add(static_cast<char*>(out) + t * bytes, layer.bias, n, dtype);
}

}  // namespace

void before_attention(const DecoderLayer& layer, const void* x, int64_t n_tokens, const void* cos,
                      const void* sin, void* qkv, int n_threads) {
  const int64_t n_in = layer.qkv.weights.n_in, n_out = layer.qkv.weights.n_out;
  const int64_t dim = layer.head_dim, n_rotated = layer.n_heads + layer.n_kv_heads;
  const Dtype dtype = layer.dtype;
  void* normed = Pieces(dtype, n_tokens * n_in, 1).take(n_tokens * n_in);
  norm({const_cast<void*>(x), n_tokens, 1, n_in, n_in, dtype}, layer.before.weight,
       layer.before.eps, normed, n_in, n_threads);
  run(layer.qkv, normed, n_tokens, dtype, qkv, n_threads);
  void* k = static_cast<char*>(qkv) + layer.n_heads * dim * size_of(dtype);
  if (layer.q.weight)
    norm({qkv, n_tokens, layer.n_heads, dim, n_out, dtype}, layer.q.weight, layer.q.eps, qkv, n_out,
         n_threads);
  if (layer.k.weight)
    norm({k, n_tokens, layer.n_kv_heads, dim, n_out, dtype}, layer.k.weight, layer.k.eps, k, n_out,
         n_threads);
  rotate({qkv, n_tokens, n_rotated, dim, n_out, dtype}, cos, sin, n_threads);
}

void after_attention(const DecoderLayer& layer, const void* x, const void* attended,
                     int64_t n_tokens, void* out, int n_threads) {
  const int64_t hidden = layer.o.weights.n_out, inner = layer.down.weights.n_in;
  const int64_t n = n_tokens * hidden;
  const Dtype dtype = layer.dtype;
  Pieces pieces(dtype, 2 * n + 3 * n_tokens * inner, 4);
  void *mid = pieces.take(n), *normed = pieces.take(n);
  void *both = pieces.take(2 * n_tokens * inner), *gated = pieces.take(n_tokens * inner);
  const RowOps& rows = ops().linear.rows;
  run(layer.o, attended, n_tokens, dtype, mid, n_threads);
  rows.add(mid, x, n, dtype);
  norm({mid, n_tokens, 1, hidden, hidden, dtype}, layer.between.weight, layer.between.eps, normed,
       hidden, n_threads);
  run(layer.gate_up, normed, n_tokens, dtype, both, n_threads);
  gate({both, n_tokens, 2, inner, 2 * inner, dtype}, gated, n_threads);
  run(layer.down, gated, n_tokens, dtype, out, n_threads);
  rows.add(out, mid, n, dtype);
}

void run_layers(const std::vector<LayerCall>& calls, const void* x, int64_t n_tokens, const void* cos,
                const void* sin, void* out, int n_threads) {
  for (const LayerCall& call : calls) {
    const DecoderLayer& layer = *call.layer;
    const int64_t dim = layer.head_dim, n_out = layer.n_heads * dim;
    const int64_t n_joined = n_out + 2 * layer.n_kv_heads * dim;
    const Dtype dtype = layer.dtype;
    Pieces pieces(dtype, n_tokens * (n_joined + n_out), 2, attention_buffer);
    char* q = static_cast<char*>(pieces.take(n_tokens * n_joined));
    void* attended = pieces.take(n_tokens * n_out);
    const char* k = q + n_out * size_of(dtype);
    const char* v = k + layer.n_kv_heads * dim * size_of(dtype);
    const Strides joined{dim, n_joined};
    const Layout layout{layer.n_heads, dtype, dtype, joined, joined, joined, {dim, n_out}};
    before_attention(layer, x, n_tokens, cos, sin, q, n_threads);
    call.plan->write(*call.pool, layout, k, v, n_threads);
    call.plan->attend(*call.pool, layout, {q, attended, call.scale, call.softcap, nullptr},
                      n_threads);
    after_attention(layer, x, attended, n_tokens, out, n_threads);
    x = out;
  }
}

}  // namespace kvcellar
