// Recurrent layers, once for each instruction set that includes it; after vector.h.

#pragma once

#include "isa/vector.h"
#include "layers/passes.h"
#include "recurrent/recurrent.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float div(float a, float b) { return a / b; }
inline float fma(float a, float b, float c) { return a * b + c; }
inline float min(float a, float b) { return a < b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
inline float exp2_below_1(float x) { return exp2_one(x); }

// Vectors, and single numbers where they do not fill one.
struct Wide {
  using V = Vec;
  static constexpr int n = kLanes;
  static V all(float x) { return KVC_NAMESPACE::all(x); }
  static V load(const float* p) { return KVC_NAMESPACE::load(p); }
  static void store(float* p, V x) { KVC_NAMESPACE::store(p, x); }
  template <class T>
  static V get(const typename T::Number* p) {
    return T::get(p);
  }
  template <class T>
  static void put(typename T::Number* p, V x) {
    T::put(p, x);
  }
  template <class T>
  static V rounded(V x) {
    return T::rounded(x);
  }
};

struct Single {
  using V = float;
  static constexpr int n = 1;
  static V all(float x) { return x; }
  static V load(const float* p) { return *p; }
  static void store(float* p, V x) { *p = x; }
  template <class T>
  static V get(const typename T::Number* p) {
    return T::get_one(p);
  }
  template <class T>
  static void put(typename T::Number* p, V x) {
    T::put_one(p, x);
  }
  template <class T>
  static V rounded(V x) {
    return T::rounded_one(x);
  }
};

// run(Wide or Single, i) for [first, stop), as many as fill a vector and then one by one.
template <class Run>
inline void over(int64_t first, int64_t stop, const Run& run) {
  int64_t i = first;
  for (; i + kLanes <= stop; i += kLanes) run(Wide(), i);
  for (; i < stop; ++i) run(Single(), i);
}

// sigmoid(x), or x times it. With e = exp(-|x|), which never overflows.
template <class L>
inline typename L::V gate_of(typename L::V x, bool is_sigmoid) {
  using V = typename L::V;
  const V zero = L::all(0.f), one = L::all(1.f), e = exp2_below_1(mul(min(x, sub(zero, x)), L::all(kLog2e)));
  // Of silu x / (1 + e) above 0 and x e / (1 + e) below it.
  if (!is_sigmoid) return div(fma(min(x, zero), e, max(x, zero)), add(one, e));
  const V above = div(one, add(one, e));
  // The sign of x decides between 1 / (1 + e) and e / (1 + e), which are 1 together.
  float lanes[L::n], ups[L::n], es[L::n];
  L::store(lanes, x);
  L::store(ups, above);
  L::store(es, e);
  for (int i = 0; i < L::n; ++i) ups[i] *= lanes[i] < 0.f ? es[i] : 1.f;
  return L::load(ups);
}

template <typename T>
inline const typename T::Number* row_of(const TokenRows& rows, int64_t token) {
  return static_cast<const typename T::Number*>(rows.data) + token * rows.stride;
}

// Convolutions -----------------------------------------------------------------------------------

template <typename T, int kWidth, class L>
void convolve_channels(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int64_t c) {
  using V = typename L::V;
  using Number = typename T::Number;
  V weights[kWidth], window[kWidth];
  for (int w = 0; w < kWidth; ++w) weights[w] = L::load(of.weight + w * of.n_channels + c);
  const V bias = of.bias ? L::load(of.bias + c) : L::all(0.f);
  const int64_t slot = of.n_channels * kWidth;
  for (int64_t a = 0; a < batch.n_advances; ++a) {
    const Advance& at = batch.advances[a];
    float columns[kWidth][L::n] = {};
    if (at.src >= 0)
      for (int w = 0; w < kWidth; ++w)
        for (int i = 0; i < L::n; ++i) columns[w][i] = call.states[at.src * slot + (c + i) * kWidth + w];
    for (int w = 0; w < kWidth; ++w) window[w] = L::load(columns[w]);
    for (int64_t t = at.first; t < at.first + at.n_tokens; ++t) {
      const int64_t place = t * call.x.stride + c;
      V x = L::template get<T>(static_cast<const Number*>(call.x.data) + place);
      if (call.in) x = L::template rounded<T>(mul(L::template get<T>(static_cast<const Number*>(call.in) + place), x));
      for (int w = 0; w + 1 < kWidth; ++w) window[w] = window[w + 1];
      window[kWidth - 1] = x;
      V y = bias;
      for (int w = 0; w < kWidth; ++w) y = fma(window[w], weights[w], y);
      y = L::template rounded<T>(y);
      if (of.has_silu) y = gate_of<L>(y, false);
      if (call.by) y = mul(L::template get<T>(static_cast<const Number*>(call.by) + place), y);
      L::template put<T>(static_cast<Number*>(call.out) + t * of.n_channels + c, y);
    }
    for (int w = 0; w < kWidth; ++w) L::store(columns[w], window[w]);
    for (int w = 0; w < kWidth; ++w)
      for (int i = 0; i < L::n; ++i) call.states[at.dst * slot + (c + i) * kWidth + w] = columns[w][i];
  }
}

template <typename T>
void convolve_type(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int64_t first,
                   int64_t stop) {
  with_number<kMostWidth>(of.width, [&](auto width) {
    over(first, stop, [&](auto lanes, int64_t c) {
      convolve_channels<T, decltype(width)::of, decltype(lanes)>(of, call, batch, c);
    });
  });
}

void convolve(const Convolution& of, const ConvolutionCall& call, const Batch& batch, int64_t first, int64_t stop) {
  (batch.dtype == Dtype::f32 ? convolve_type<Floats> : convolve_type<Halves>)(of, call, batch, first, stop);
}

// The gated delta rule ---------------------------------------------------------------------------

constexpr int64_t kHeadNumbers = 2048;  // of some tokens' keys: at most kMostInner of one
constexpr int64_t kMostTokens = 16;
constexpr int kColumnVecs = 4;

// What some tokens bring to a head. Behind the decay, the old state is read by keys and queries times it.
struct HeadTokens {
  float k[kHeadNumbers], decay[kHeadNumbers], decayed_k[kHeadNumbers], decayed_q[kHeadNumbers];
  float k_by_q[kMostTokens];
};

template <typename T>
void load_heads(const DeltaRule& of, const DeltaCall& call, const Factors& factors, int64_t head, int64_t token,
                int64_t n, HeadTokens& to) {
  const int64_t dim = of.k_dim, at = head / (of.n_heads / of.n_key_heads) * dim;
  constexpr float kEps = 1e-6f;
  for (int64_t t = 0; t < n; ++t) {
    const auto *q = row_of<T>(call.q, token + t) + at, *k = row_of<T>(call.k, token + t) + at;
    float* const keys = to.k + t * dim;
    float qs[kMostInner];
    Vec wide_q = all(0.f), wide_k = all(0.f), wide_both = all(0.f);
    float sum_q = 0.f, sum_k = 0.f, both = 0.f;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const Vec x = T::get(q + i), y = T::get(k + i);
      store(qs + i, x);
      store(keys + i, y);
      wide_q = fma(x, x, wide_q);
      wide_k = fma(y, y, wide_k);
      wide_both = fma(x, y, wide_both);
    }
    for (; i < dim; ++i) {
      qs[i] = T::get_one(q + i), keys[i] = T::get_one(k + i);
      sum_q += qs[i] * qs[i], sum_k += keys[i] * keys[i], both += qs[i] * keys[i];
    }
    const float by_q = 1.f / __builtin_sqrtf((sum_q + sum(wide_q) + kEps) * static_cast<float>(dim));
    const float by_k = 1.f / __builtin_sqrtf(sum_k + sum(wide_k) + kEps);
    to.k_by_q[t] = (both + sum(wide_both)) * by_q * by_k;
    const float* decays = factors.decay + ((token + t) * of.n_heads + head) * of.n_decays;
    over(0, dim, [&](auto lanes, int64_t j) {
      using L = decltype(lanes);
      const auto decay = of.n_decays == 1 ? L::all(*decays) : L::load(decays + j);
      const auto key = mul(L::load(keys + j), L::all(by_k));
      L::store(keys + j, key);
      L::store(to.decay + t * dim + j, decay);
      L::store(to.decayed_k + t * dim + j, mul(key, decay));
      L::store(to.decayed_q + t * dim + j, mul(mul(L::load(qs + j), L::all(by_q)), decay));
    });
  }
}

// Some columns of a head's state: moved on by one token, and read for the next one.
template <class L, int kVecs, bool moves, bool reads>
inline void pass_state(const float* from, float* to, const DeltaRule& of, const HeadTokens& tokens, int64_t now,
                       int64_t next, const typename L::V* delta, typename L::V* by_k, typename L::V* by_q) {
  const float *k = tokens.k + now * of.k_dim, *decay = tokens.decay + now * of.k_dim;
  const float *next_k = tokens.decayed_k + next * of.k_dim, *next_q = tokens.decayed_q + next * of.k_dim;
  typename L::V sum_k[kVecs], sum_q[kVecs];
  for (int v = 0; v < kVecs; ++v) sum_k[v] = sum_q[v] = L::all(0.f);
  for (int64_t i = 0; i < of.k_dim; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      typename L::V s = L::load(from + i * of.v_dim + v * L::n);
      if constexpr (moves) {
        s = fma(L::all(k[i]), delta[v], mul(s, L::all(decay[i])));
        L::store(to + i * of.v_dim + v * L::n, s);
      }
      if constexpr (reads) {
        sum_k[v] = fma(s, L::all(next_k[i]), sum_k[v]);
        sum_q[v] = fma(s, L::all(next_q[i]), sum_q[v]);
      }
    }
  }
  if constexpr (reads)
    for (int v = 0; v < kVecs; ++v) by_k[v] = sum_k[v], by_q[v] = sum_q[v];
}

template <typename T, class L, int kVecs>
void delta_columns(const DeltaRule& of, const DeltaCall& call, const Factors& factors, const HeadTokens& tokens,
                   int64_t head, int64_t token, int64_t n, const float* from, float* to, int64_t column) {
  using Number = typename T::Number;
  typename L::V by_k[kVecs], by_q[kVecs], delta[kVecs];
  pass_state<L, kVecs, false, true>(from + column, nullptr, of, tokens, 0, 0, delta, by_k, by_q);
  for (int64_t t = 0; t < n; ++t) {
    const int64_t place = head * of.v_dim + column;
    const Number* values = row_of<T>(call.v, token + t) + place;
    Number* out = static_cast<Number*>(call.out) + (token + t) * of.n_heads * of.v_dim + place;
    const float beta = factors.step[(token + t) * of.n_heads + head];
    for (int v = 0; v < kVecs; ++v) {
      delta[v] = mul(L::all(beta), sub(L::template get<T>(values + v * L::n), by_k[v]));
      L::template put<T>(out + v * L::n, fma(L::all(tokens.k_by_q[t]), delta[v], by_q[v]));
    }
    if (t + 1 < n)
      pass_state<L, kVecs, true, true>(from + column, to + column, of, tokens, t, t + 1, delta, by_k, by_q);
    else
      pass_state<L, kVecs, true, false>(from + column, to + column, of, tokens, t, t, delta, by_k, by_q);
    from = to;
  }
}

template <typename T>
void delta_head(const DeltaRule& of, const DeltaCall& call, const Batch& batch, const Factors& factors, int64_t head,
                int64_t first, int64_t stop) {
  const int64_t size = of.k_dim * of.v_dim, most = smaller(kMostTokens, kHeadNumbers / of.k_dim);
  alignas(64) HeadTokens tokens;
  for (int64_t a = 0; a < batch.n_advances; ++a) {
    const Advance& at = batch.advances[a];
    float* const to = call.states + (at.dst * of.n_heads + head) * size;
    const float* from = to;
    if (at.src >= 0)
      from = call.states + (at.src * of.n_heads + head) * size;
    else
      for (int64_t i = 0; i < of.k_dim; ++i)
        std::memset(to + i * of.v_dim + first, 0, static_cast<size_t>(4 * (stop - first)));
    for (int64_t t = 0; t < at.n_tokens; t += most) {
      const int64_t n = smaller(most, at.n_tokens - t), token = at.first + t;
      load_heads<T>(of, call, factors, head, token, n, tokens);
      int64_t c = first;
      for (; c + kColumnVecs * kLanes <= stop; c += kColumnVecs * kLanes)
        delta_columns<T, Wide, kColumnVecs>(of, call, factors, tokens, head, token, n, from, to, c);
      over(c, stop, [&](auto lanes, int64_t column) {
        delta_columns<T, decltype(lanes), 1>(of, call, factors, tokens, head, token, n, from, to, column);
      });
      from = to;
    }
  }
}

void delta(const DeltaRule& of, const DeltaCall& call, const Batch& batch, const Factors& factors, int64_t first,
           int64_t stop) {
  [[maybe_unused]] const FlushToZero flush;
  for (int64_t i = first; i < stop;) {
    const int64_t head = i / of.v_dim, from = i - head * of.v_dim, until = smaller(of.v_dim, from + stop - i);
    (batch.dtype == Dtype::f32 ? delta_head<Floats> : delta_head<Halves>)(of, call, batch, factors, head, from, until);
    i += until - from;
  }
}

// Mamba 2 ----------------------------------------------------------------------------------------

constexpr int64_t kGroupNumbers = 4096;  // of some tokens' B, and as many of C

// kRows rows of a head's state through n tokens.
template <typename T, int kRows>
void scan_rows(const Scan& of, const ScanCall& call, const Factors& factors, const float* b, const float* c,
               int64_t head, int64_t row, int64_t token, int64_t n, const float* from, float* to) {
  using Number = typename T::Number;
  const int64_t dim = of.state_dim;
  for (int64_t t = 0; t < n; ++t, from = to, b += dim, c += dim) {
    const int64_t factor = (token + t) * of.n_heads + head, place = head * of.head_dim + row;
    const float decay = factors.decay[factor], step = factors.step[factor];
    const Number* x = row_of<T>(call.x, token + t) + place;
    float values[kRows], steps[kRows], sums[4] = {};
    for (int r = 0; r < kRows; ++r) values[r] = T::get_one(x + r), steps[r] = step * values[r];
    Vec wide[4] = {all(0.f), all(0.f), all(0.f), all(0.f)};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
      const Vec bs = load(b + i), cs = load(c + i);
      for (int r = 0; r < kRows; ++r) {
        const Vec s = fma(all(steps[r]), bs, mul(load(from + r * dim + i), all(decay)));
        store(to + r * dim + i, s);
        wide[r] = fma(s, cs, wide[r]);
      }
    }
    sum_4(wide[0], wide[1], wide[2], wide[3], sums);
    for (; i < dim; ++i)
      for (int r = 0; r < kRows; ++r) {
        const float s = steps[r] * b[i] + from[r * dim + i] * decay;
        to[r * dim + i] = s;
        sums[r] += s * c[i];
      }
    Number* out = static_cast<Number*>(call.out) + (token + t) * of.n_heads * of.head_dim + place;
    for (int r = 0; r < kRows; ++r) T::put_one(out + r, sums[r] + of.skips[head] * values[r]);
  }
}

template <typename T>
void scan_head(const Scan& of, const ScanCall& call, const Batch& batch, const Factors& factors, int64_t head,
               int64_t first, int64_t stop) {
  const int64_t dim = of.state_dim, size = of.head_dim * dim, most = smaller(32, kGroupNumbers / dim);
  const int64_t group = head / (of.n_heads / of.n_groups) * dim;
  alignas(64) float b[kGroupNumbers], c[kGroupNumbers];
  for (int64_t a = 0; a < batch.n_advances; ++a) {
    const Advance& at = batch.advances[a];
    float* const to = call.states + (at.dst * of.n_heads + head) * size;
    const float* from = to;
    if (at.src >= 0)
      from = call.states + (at.src * of.n_heads + head) * size;
    else
      std::memset(to + first * dim, 0, static_cast<size_t>(4 * (stop - first) * dim));
    for (int64_t done = 0; done < at.n_tokens; done += most, from = to) {
      const int64_t n = smaller(most, at.n_tokens - done), token = at.first + done;
      for (int64_t t = 0; t < n; ++t) {
        const auto *bs = row_of<T>(call.b, token + t) + group, *cs = row_of<T>(call.c, token + t) + group;
        over(0, dim, [&](auto lanes, int64_t i) {
          using L = decltype(lanes);
          L::store(b + t * dim + i, L::template get<T>(bs + i));
          L::store(c + t * dim + i, L::template get<T>(cs + i));
        });
      }
      int64_t r = first;
      for (; r + 4 <= stop; r += 4)
        scan_rows<T, 4>(of, call, factors, b, c, head, r, token, n, from + r * dim, to + r * dim);
      for (; r < stop; ++r) scan_rows<T, 1>(of, call, factors, b, c, head, r, token, n, from + r * dim, to + r * dim);
    }
  }
}

void scan(const Scan& of, const ScanCall& call, const Batch& batch, const Factors& factors, int64_t first,
          int64_t stop) {
  [[maybe_unused]] const FlushToZero flush;
  for (int64_t i = first; i < stop;) {
    const int64_t head = i / of.head_dim, from = i - head * of.head_dim;
    const int64_t until = smaller(of.head_dim, from + stop - i);
    (batch.dtype == Dtype::f32 ? scan_head<Floats> : scan_head<Halves>)(of, call, batch, factors, head, from, until);
    i += until - from;
  }
}

// The norm behind --------------------------------------------------------------------------------

template <typename T>
void gated_norm_rows(const GatedNorm& of, const void* x, const TokenRows& gates, void* out, int64_t first,
                     int64_t stop) {
  using Number = typename T::Number;
  for (int64_t i = first * of.dim / of.group; i < stop * of.dim / of.group; ++i) {
    const int64_t token = i * of.group / of.dim, at = i * of.group % of.dim;
    const Number* row = static_cast<const Number*>(x) + i * of.group;
    const Number* gate = row_of<T>(gates, token) + at;
    Number* to = static_cast<Number*>(out) + i * of.group;
    const float* weight = of.weight ? of.weight + at % of.n_weights : nullptr;
    const auto value = [&](auto lanes, int64_t j) {
      using L = decltype(lanes);
      const auto own = L::template get<T>(row + j);
      return of.gates_first ? mul(own, gate_of<L>(L::template get<T>(gate + j), of.is_sigmoid)) : own;
    };
    Vec wide = all(0.f);
    float total = 0.f;
    int64_t j = 0;
    for (; weight && j + kLanes <= of.group; j += kLanes) {
      const Vec v = value(Wide(), j);
      wide = fma(v, v, wide);
    }
    for (; weight && j < of.group; ++j) total += value(Single(), j) * value(Single(), j);
    const float factor = 1.f / __builtin_sqrtf((total + sum(wide)) / static_cast<float>(of.group) + of.eps);
    over(0, of.group, [&](auto lanes, int64_t p) {
      using L = decltype(lanes);
      auto y = value(lanes, p);
      if (weight) {
        y = mul(y, L::all(factor));
        if (of.rounds) y = L::template rounded<T>(y);
        y = mul(L::load(weight + p), y);
        if (of.rounds) y = L::template rounded<T>(y);
      }
      if (!of.gates_first) y = mul(y, gate_of<L>(L::template get<T>(gate + p), of.is_sigmoid));
      L::template put<T>(to + p, y);
    });
  }
}

void gated_norm(const GatedNorm& of, const void* x, const TokenRows& gates, void* out, Dtype dtype, int64_t first,
                int64_t stop) {
  (dtype == Dtype::f32 ? gated_norm_rows<Floats> : gated_norm_rows<Halves>)(of, x, gates, out, first, stop);
}

constexpr RecurrentOps kRecurrentOps = {convolve, delta, scan, gated_norm};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
