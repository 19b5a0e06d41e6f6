// The query rows of a job: where they lie in scratch, what each of them sees, and their softmax.

#pragma once

#include "attend/floats.h"
#include "attend/results.h"
#include "isa/ints.h"
#if defined(KVC_AVX512)
#define KVC_COLUMNS
#include "attend/floats_512.h"
#include "attend/words_512.h"
#elif defined(KVC_AVX2)
#define KVC_COLUMNS
#include "attend/floats_256.h"
#include "attend/words_256.h"
#else
#include "attend/words_none.h"
#endif
#if defined(KVC_BF16)
#include "attend/pairs.h"
#elif defined(KVC_COLUMNS)
#include "attend/columns.h"
#endif

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Scratch of one worker, cut from one piece of memory.
struct Scratch {
  float *q, *fours, *q_pairs, *k, *v, *s, *acc, *max, *sum, *base, *factor, *most, *top, *tops;
  uint32_t* weights;  // of Pairs
  TileRows* rows;     // of three tiles
  char* gathered;     // rows of 16 cells
  char* extra;
};

inline Scratch cut(char* memory, int64_t rows, int64_t k_pad, int64_t v_pad) {
  Scratch s;
  float* at = reinterpret_cast<float*>(memory);
  auto take = [&at](int64_t n) {
    float* piece = at;
    at += (n + 15) / 16 * 16;
    return piece;
  };
  s.q = take(rows * k_pad);
  s.fours = take(rows * k_pad);
  s.k = take(16 * k_pad);
  s.gathered = reinterpret_cast<char*>(take(16 * (k_pad > v_pad ? k_pad : v_pad)));
  s.v = take(kTile * v_pad);  // kDecoded decoded, or a tile's as they are
  s.s = take(2 * rows * kTile);
  s.acc = take(rows * v_pad);
  s.max = take(rows);
  s.base = take(rows);
  s.factor = take(rows);
  s.most = take(rows);
  s.top = take(rows);
  s.sum = take(rows * kLanes);
  s.tops = take((rows + kLanes) * 4);
  s.q_pairs = take(rows * k_pad / 2);
  s.weights = reinterpret_cast<uint32_t*>(take(rows * kTile / 2));
  s.rows = reinterpret_cast<TileRows*>(at);
  s.extra = reinterpret_cast<char*>(s.rows + 3);
  return s;
}

enum class Seen { nothing, some, everything };

// Cells of a whole tile. What is fetched into a first cache shall not push out what is read, and comes best not
// long before it is: where reading is all that a few float rows wait for, 8 KB of them (Zen 5, a sequence of 4
// rows: bfloat16 in a tenth less than with 256 cells, float32 in a sixth).
inline int64_t longest_tile(const Pool& pool, int64_t rows) {
#if defined(KVC_BF16)
  const Dtype k = pool.k.dtype, v = pool.v.dtype;
  const auto is_light = [](Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f32; };
  if (!is_fetched_far && rows <= 4 && is_light(k) && is_light(v)) {
    int64_t n = kTile;
    while (n > 32 && n * (pool.k.packed_bytes() + pool.v.packed_bytes()) > 8192) n /= 2;
    return n;
  }
#else
  (void)rows;
  if (!is_quantised(pool.k.dtype) && !is_quantised(pool.v.dtype)) return smaller(kTile, kMaxTile / 2);
#endif
  return kTile;
}

// Whether rows see all cells, are many enough for products in lanes of rows, and their results are
// rounded to what makes the error of these unseen.
inline bool fits_columns(const Job& job) {
  const Side &k = job.pool->k, &v = job.pool->v;
  const int64_t rows = job.n_tokens * job.n_heads;
#if defined(KVC_BF16)
  if (job.layout->in != Dtype::bf16) return false;
#endif
  return k.dtype == Dtype::bf16 && v.dtype == Dtype::bf16 && job.layout->out == Dtype::bf16 && k.dim == v.dim &&
         (k.dim == 64 || k.dim == 128) && rows > 8 && rows <= 2 * kLanes && job.kind == Kind::none &&
         job.args->softcap <= 0.f && !job.pool->exact;
}

class JobRows {
 public:
  JobRows(const Job& job, char* memory)
      : job_(job),
        k_(job.pool->k),
        v_(job.pool->v),
        rows_(job.n_tokens * job.n_heads),
        rows_pad_((rows_ + 3) / 4 * 4),
        k_pad_(padded(k_.dim)),
        v_pad_(padded(v_.dim)),
        is_k_split_(is_split(k_)),
        is_v_split_(is_split(v_)),
#if defined(KVC_AVX2)
        is_read_k_(fits_registers(*job.pool, k_, rows_)),
        is_read_v_(fits_registers(*job.pool, v_, rows_)),
#endif
        scratch_(cut(memory, rows_pad_, k_pad_, v_pad_)),
#if defined(KVC_BF16)
        has_k_pairs_(is_split(k_) && job.layout->in == Dtype::bf16),
        has_v_pairs_(is_split(v_) && job.layout->out == Dtype::bf16),
#endif
        next_(longest_tile(*job.pool, rows_)) {
  }

  JobRows(const JobRows&) = delete;

 protected:
  // run(row, token, head) for each row: its token in the batch, and the query head.
  template <class Run>
  void for_rows(const Run& run) const {
    const int64_t group = job_.layout->n_heads / job_.pool->n_kv_heads;
    const int64_t first = job_.kv_head * group + job_.first_head;
    for (int64_t t = 0, row = 0; t < job_.n_tokens; ++t)
      for (int64_t h = 0; h < job_.n_heads; ++h, ++row) run(row, job_.tokens[job_.first_token + t], first + h);
  }
  int64_t token_index(int64_t row) const { return job_.first_token + row / job_.n_heads; }

  void load_queries(float factor) {
    const Layout& layout = *job_.layout;
    const int64_t size = layout.in == Dtype::f32 ? 4 : 2;
    for_rows([&](int64_t r, int64_t token, int64_t head) {
      float* q = scratch_.q + r * k_pad_;
      const int64_t at = head * layout.q.head + token * layout.q.token;
      load_row(static_cast<const char*>(job_.args->q) + at * size, layout.in, k_.dim, q);
      for (int64_t d = 0; d < k_.dim; ++d) q[d] *= factor;
      for (int64_t d = k_.dim; d < k_pad_; ++d) q[d] = 0.f;
    });
    for (int64_t r = rows_; r < rows_pad_; ++r) std::memset(scratch_.q + r * k_pad_, 0, sizeof(float) * k_pad_);
  }

#if defined(KVC_BF16)
  // The same of bfloat16 as they are, in the order of `logits_of`.
  void load_query_pairs() {
    const Strides& strides = job_.layout->q;
    const auto place = [&](int64_t r) { return scratch_.q_pairs + r / 4 * 2 * k_.dim + r % 4 * 4; };
    for_rows([&](int64_t r, int64_t token, int64_t head) {
      const auto* from = static_cast<const uint16_t*>(job_.args->q) + head * strides.head + token * strides.token;
      float* to = place(r);
      for (int64_t d = 0; d < k_.dim; d += 8) std::memcpy(to + 2 * d, from + d, 16);
    });
    for (int64_t r = rows_; r < rows_pad_; ++r)
      for (int64_t d = 0; d < k_.dim; d += 8) std::memset(place(r) + 2 * d, 0, 16);
  }
#endif

  // Before a tile's logits.
  void clear_tops() {
    const int64_t n_rows = (rows_ + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < 4 * n_rows; i += kLanes) store(scratch_.tops + i, all(kMinusInfinity));
  }

  // The queries as `logits_of` reads them, when it first does.
  void order_queries() {
    if (has_fours_) return;
    has_fours_ = true;
    for (int64_t r = 0; r < rows_pad_; ++r) {
      float* q = scratch_.q + r * k_pad_;
      if (is_k_split_) split_floats(q, k_.dim, false);
#if defined(KVC_AVX2)
      if (is_read_k_) {
        float* to = scratch_.fours + r / 4 * 4 * k_pad_;
        for (int64_t d = 0; d < k_pad_; d += 4)
          std::memcpy(to + place_of_four(k_.dtype, r % 4, d), q + d, 4 * sizeof(float));
        continue;
      }
#endif
      float* to = scratch_.fours + r / kRowsAtOnce * kRowsAtOnce * k_pad_ + r % kRowsAtOnce * 4;
      for (int64_t d = 0; d < k_pad_; d += 4) std::memcpy(to + d * kRowsAtOnce, q + d, 4 * sizeof(float));
    }
  }

  // How many of the list's cells, from the first on, a token may see (causal), by its index.
  int64_t seen_until(int64_t token) const { return job_.n_free + token + 1; }

  const uint8_t* mask_row(int64_t token) const { return job_.mask + token * (job_.list_cells - job_.n_free); }

  Seen what_is_seen(int64_t first, int64_t n) const {
    if (job_.kind == Kind::none || first + n <= job_.n_free) return Seen::everything;
    const int64_t last_token = job_.first_token + job_.n_tokens - 1;
    if (job_.kind == Kind::causal) {
      if (first + n <= seen_until(job_.first_token)) return Seen::everything;
      return first < seen_until(last_token) ? Seen::some : Seen::nothing;
    }
    bool any = first < job_.n_free, every = true;
    const int64_t from = first < job_.n_free ? job_.n_free : first;
    for (int64_t t = job_.first_token; t <= last_token; ++t) {
      const uint8_t* mask = mask_row(t) - job_.n_free;
      for (int64_t c = from; c < first + n; ++c) {
        any |= mask[c] != 0;
        every &= mask[c] != 0;
      }
    }
    return every ? Seen::everything : any ? Seen::some : Seen::nothing;
  }

  bool is_seen(int64_t token, int64_t cell) const {
    if (cell < job_.n_free) return true;
    if (job_.kind == Kind::causal) return cell < seen_until(token);
    return mask_row(token)[cell - job_.n_free] != 0;
  }

  // Queries for products of another kind come without the factor.
  void multiply_logits(int64_t n, float factor) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < n; ++c) s_[r * kTile + c] *= factor;
  }

  // softcap * tanh(x), in powers of two: tanh(x) = 1 - 2 / (exp(2x) + 1), odd.
  void cap(int64_t n) {
    const float softcap = job_.args->softcap * kLog2e;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      for (int64_t c = 0; c < n; ++c) s[c] = softcap * __builtin_tanhf(s[c]);
    }
  }

  void hide(int64_t first, int64_t n) {
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      const int64_t token = token_index(r);
      for (int64_t c = 0; c < n; ++c)
        if (!is_seen(token, first + c)) s[c] = kMinusInfinity;
    }
  }

  // Logits up to a multiple of `multiple` become weights: `weigh` is given a row, its logits, what
  // to take from each, what earlier weights are multiplied by and what the largest will be, and
  // gives their sums.
  template <class Weigh>
  void softmax(int64_t n, int64_t multiple, const Weigh& weigh) {
    const auto [base, factor, most, top] = start_softmax(n, multiple);
    for (int64_t r = 0; r < rows_; ++r) {
      float* sums = scratch_.sum + r * kLanes;
      const Vec total = weigh(r, s_ + r * kTile, base[r], factor[r], most[r]);
      store(sums, fma(load(sums), all(factor[r]), total));
    }
  }

  // What it begins with.
  Maxima start_softmax(int64_t n, int64_t multiple) {
    const int64_t wide = (n + multiple - 1) / multiple * multiple;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      for (int64_t c = n; c < wide; ++c) s[c] = kMinusInfinity;
      if (has_tops_) continue;
      Vec tops = load(s);
      for (int64_t c = kLanes; c < wide; c += kLanes) tops = max(tops, load(s + c));
      scratch_.most[r] = highest(tops);
    }
    const Maxima maxima = raise_maxima();
    for (int64_t r = 0; r < rows_; ++r) {
      const float factor = maxima.factor[r];
      if (factor == 1.f) continue;
      float* acc = scratch_.acc + r * v_pad_;
      for (int64_t d = 0; d < v_pad_; d += kLanes) store(acc + d, mul(load(acc + d), all(factor)));
    }
    return maxima;
  }

  // All rows at once, up to a multiple of the lanes: from `tops`, or else the tile's highest logits in
  // `most`.
  Maxima raise_maxima() const {
    float *base = scratch_.base, *factor = scratch_.factor, *most = scratch_.most;
    constexpr float kLowest = -3e38f;
    for (int64_t r = 0; r < rows_; r += kLanes) {
      const float* tops = scratch_.tops + 4 * r;
      const Vec top =
          has_tops_ ? highest_fours(load(tops), load(tops + kLanes), load(tops + 2 * kLanes), load(tops + 3 * kLanes))
                    : load(most + r);
      const Vec old = load(scratch_.max + r), now = max(old, top);
      const Vec from = max(all(kLowest), now);  // where nothing is seen, x - from is minus infinity
      store(scratch_.max + r, now);
      store(base + r, from);
      store(factor + r, exp2_below_1(sub(old, from)));
      store(most + r, exp2_below_1(sub(top, from)));
      store(scratch_.top + r, max(all(kLowest), top));
    }
    return {base, factor, most, scratch_.top};
  }

  // `is_split`: whether results are in the order of `is_split` rows.
  void finish(bool is_split);

  const Job& job_;
  const Side &k_, &v_;
  const int64_t rows_, rows_pad_, k_pad_, v_pad_;
  const bool is_k_split_, is_v_split_;
#if defined(KVC_AVX2)
  const bool is_read_k_, is_read_v_;  // whether all numbers are decoded in registers
#endif
  Scratch scratch_;
#if defined(KVC_BF16)
  const bool has_k_pairs_, has_v_pairs_;  // whether products are of pairs
  static_assert(kRowsAtOnce == 4);
#endif
  float factor_ = 1.f;  // of logits
  bool has_fours_ = false, has_tops_ = false;
  float* s_ = nullptr;  // the tile's logits, then weights
  Next next_;
};

inline void JobRows::finish(bool is_split) {
  for (int64_t r = 0; r < rows_; ++r) {
    scratch_.sum[r] = sum(load(scratch_.sum + r * kLanes));
    if (is_split) split_floats(scratch_.acc + r * v_pad_, v_.dim, true);
  }
  if (job_.partial) {
    std::memcpy(job_.partial, scratch_.max, sizeof(float) * rows_);
    std::memcpy(job_.partial + rows_, scratch_.sum, sizeof(float) * rows_);
    std::memcpy(job_.partial + 2 * rows_, scratch_.acc, sizeof(float) * rows_ * v_pad_);
    return;
  }
  for_rows([&](int64_t r, int64_t token, int64_t head) {
    write_result(job_, token, head, scratch_.max[r], scratch_.sum[r], scratch_.acc + r * v_pad_);
  });
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
