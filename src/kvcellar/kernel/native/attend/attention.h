// Attention, once for each level.
//
// A job is some query rows over some cells of one KV head. It goes through the cells in tiles of
// kTile at most: logits of all rows, online softmax, values. Rows whose layout has a direct loop are
// read where they lie; all others are decoded into scratch first, a tile at a time.

#pragma once

#include "attend/job_rows.h"
#include "attend/write.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

class Attention : JobRows {
 public:
  using JobRows::JobRows;

  void run() {
    if (job_.n_cells <= kFewCells && job_.kind == Kind::none && job_.args->softcap <= 0.f) return run_few();
    if (fits_columns(job_) && run_columns()) return;
    const float softcap = job_.args->softcap;
    // Without a cap the softmax works in powers of two, and the factor is in the logits already.
    const float factor = softcap > 0.f ? job_.args->scale / softcap : job_.args->scale * kLog2e;
    const bool has_k = fits_chunks(k_), has_v = fits_chunks(v_);
    factor_ = factor;
#if defined(KVC_BF16)
    if (has_k_pairs_) load_query_pairs();
    if (!has_k_pairs_ || job_.pool->exact)
#endif
      load_queries(has_k ? 1.f : factor);
    Words words(has_k, has_v, k_, v_, rows_, k_pad_, v_pad_, scratch_.q, factor, scratch_.extra);
    // Jobs are whole tiles: what lies in one is the same whatever else is attended, and so are the
    // bits of a row.
    static_assert(kRound % kTile == 0);
    const int64_t longest = next_.longest();
    for (int64_t r = 0; r < (rows_ + 15) / 16 * 16; ++r) scratch_.max[r] = scratch_.most[r] = kMinusInfinity;
    for (int64_t r = 0; r < rows_; ++r) {
      store(scratch_.sum + r * kLanes, all(0.f));
    }
    std::memset(scratch_.acc, 0, sizeof(float) * rows_pad_ * v_pad_);
    // Three tiles at a time: one is attended, of the next the logits are made meanwhile if the matrix
    // unit makes them, and what is behind is fetched.
    Walk walk(job_);
    int64_t left = job_.n_cells;
    const auto take = [&](TileRows& rows) {
      const int64_t n = left ? walk.next(smaller(longest, left), rows) : 0;
      left -= n;
      return n;
    };
    Walk following(job_.following ? *job_.following : job_);
    int64_t following_left = following.job.n_cells;
    TileRows *rows = scratch_.rows, *next = rows + 1, *third = next + 1;
    int64_t n = take(*rows), n_next = take(*next), n_third = 0;
    s_ = scratch_.s;
    float* next_s = s_ + rows_pad_ * kTile;
    for (int64_t first = job_.first_cell; n; first += n, n = n_next, n_next = n_third) {
      n_third = take(*third);
      // Of a last tile with a few cells, as what was just written is, all comes now: while it is attended there
      // is no time to fetch a whole one.
      const bool is_short = n_next && 8 * n_next <= longest, has_room = !n_third && (!n_next || is_short);
      const bool evenly = words.fetches_evenly(*rows, n);
      next_.start(*next, n_next, evenly);
      if (has_room && job_.following && following_left) {  // its first tiles, in the free room
        const int64_t n_following = following.next(smaller(longest, following_left), *third);
        if (is_short) next_.now();
        next_.start(*third, n_following, evenly);
        following_left = 0;
      }
      const Seen seen = what_is_seen(first, n);
      clear_tops();
      // Whether `tops` will say which logits are the highest: of whole blocks of cells, as they come.
      has_tops_ = n % 32 == 0 && seen == Seen::everything && job_.args->softcap <= 0.f;
      const bool is_main = rows->pool == job_.pool;
      if (seen != Seen::nothing && words.has_k && is_main) {
        words.logits(*rows, n, s_, scratch_.tops, next_);
      } else if (seen != Seen::nothing) {
        logits(*rows, n);
        if (words.has_k) multiply_logits(n, factor);
        has_tops_ &= !words.has_k;
      }
      if (job_.args->softcap > 0.f) cap(n);
      if (seen == Seen::some) hide(first, n);
      const bool by_words =
          words.has_v && is_main && seen != Seen::nothing && (seen == Seen::everything || words.is_finite(*rows, n));
      if (by_words) {
        const Maxima maxima = start_softmax(n, 32);  // one step waits for the other: so meanwhile
        words.prepare(*rows, n);
        words.weigh(s_, maxima, scratch_.sum, n, next_);
        words.values(*rows, n, next_);
      }
      const bool is_done = by_words || seen == Seen::nothing;
#if defined(KVC_BF16)
      const bool by_pairs = has_v_pairs_ && is_main && seen == Seen::everything;
      if (by_pairs) {
        softmax(n, 2 * kLanes, [&](int64_t r, const float* s, float base, float, float) {
          uint32_t* to = scratch_.weights + r * kTile / 2;
          Vec total = all(0.f);
          for (int64_t c = 0; c < n; c += 2 * kLanes) {
            const Vec p = exp2_below_1(sub(load(s + c), all(base)));
            const Vec q = exp2_below_1(sub(load(s + c + kLanes), all(base)));
            total = store_pairs(to + c / 2, p, q, total);
          }
          return total;
        });
        values_of_pairs(*rows, n);
      }
#else
      constexpr bool by_pairs = false;
#endif
      if (!is_done && !by_pairs) {
        softmax(n, kLanes, [&](int64_t r, float* s, float base, float factor, float) {
          words.scale_results(r, factor);
          Vec total = all(0.f);
          for (int64_t c = 0; c < n; c += kLanes) {
            const Vec p = exp2_below_1(sub(load(s + c), all(base)));
            store(s + c, p);
            total = add(total, p);
          }
          return total;
        });
        values(*rows, first, n, seen);
      }
      TileRows* const done = rows;
      rows = next;
      next = third;
      third = done;
      s_ = next_s;
      next_s = s_ == scratch_.s ? s_ + rows_pad_ * kTile : scratch_.s;
    }
    words.finish(scratch_.acc);
    finish(is_v_split_);
  }

 private:
  // Cells for which making operands takes longer than what they are for, as a branch's own one.
  static constexpr int64_t kFewCells = 4;

  void run_few() {
    load_queries(job_.args->scale * kLog2e);
    float *logits = scratch_.s, *values = scratch_.v;
    Walk walk(job_);
    TileRows& rows = *scratch_.rows;
    for (int64_t first = 0, n; first < job_.n_cells; first += n) {
      n = walk.next(job_.n_cells - first, rows);
      const Side &k = rows.pool->k, &v = rows.pool->v;
      for (int64_t c = 0; c < n; ++c) {
        decode_row(k, rows.row(kKRows, c), k.affine ? rows.row(kKAffine, c) : nullptr, k_pad_, scratch_.k);
        decode_row(v, rows.row(kVRows, c), v.affine ? rows.row(kVAffine, c) : nullptr, v_pad_,
                   values + (first + c) * v_pad_);
        for (int64_t r = 0; r < rows_; ++r) {
          Vec products = all(0.f);
          for (int64_t d = 0; d < k_pad_; d += kLanes)
            products = fma(load(scratch_.q + r * k_pad_ + d), load(scratch_.k + d), products);
          logits[r * kFewCells + first + c] = sum(products);
        }
      }
    }
    for (int64_t r = 0; r < rows_; ++r) {
      float* of_row = logits + r * kFewCells;
      float top = kMinusInfinity, total = 0.f;
      for (int64_t c = 0; c < job_.n_cells; ++c) top = of_row[c] > top ? of_row[c] : top;
      const float base = top == kMinusInfinity ? 0.f : top;
      for (int64_t c = 0; c < job_.n_cells; ++c) {
        const float below = of_row[c] - base;  // NaN of two infinite ones
        total += of_row[c] = below == 0.f ? 1.f : exp2_or_0(below);
      }
      scratch_.max[r] = top;
      store(scratch_.sum + r * kLanes, all(0.f));
      scratch_.sum[r * kLanes] = total;
      for (int64_t d = 0; d < v_pad_; d += kLanes) {
        Vec y = mul(all(of_row[0]), load(values + d));
        for (int64_t c = 1; c < job_.n_cells; ++c) y = fma(all(of_row[c]), load(values + c * v_pad_ + d), y);
        store(scratch_.acc + r * v_pad_ + d, y);
      }
    }
    finish(false);
  }

#if defined(KVC_COLUMNS)
  // False if they cannot: nothing has happened then.
  bool run_columns() {
#if defined(KVC_AVX512)
    if (rows_ <= kLanes) return k_.dim == 64 ? run_columns<64, 1>() : run_columns<128, 1>();
#endif
    return k_.dim == 64 ? run_columns<64, 2>() : run_columns<128, 2>();
  }
  template <int kDim, int kVecs>
  bool run_columns() {
    const float factor = job_.args->scale * kLog2e;
#if defined(KVC_BF16)
    load_query_pairs();
    Columns<kDim, kVecs> columns(rows_, scratch_.q_pairs, factor, scratch_.extra);
#else
    load_queries(1.f);
    Columns<kDim, kVecs> columns(rows_, scratch_.q, k_pad_, factor, scratch_.extra);
#endif
    if (!columns.is_finite()) return false;
    Walk walk(job_);
    const int64_t longest = next_.longest();
    int64_t left = job_.n_cells;
    const auto take = [longest](Walk& from, int64_t& left, TileRows& rows) {
      const int64_t n = left ? from.next(smaller(longest, left), rows) : 0;
      left -= n;
      return n;
    };
    TileRows *rows = scratch_.rows, *next = rows + 1;
    for (int64_t n = take(walk, left, *rows); n;) {
      const int64_t n_next = take(walk, left, *next);
      next_.start(*next, n_next);
      if (!n_next && job_.following) {
        Walk following(*job_.following);
        int64_t following_left = job_.following->n_cells;
        next_.start(*next, take(following, following_left, *next));
      }
      for (int64_t c = 0; c < n; c += columns.kCells)
        if (!columns.attend(*rows, c, smaller(n - c, columns.kCells), next_)) return false;
      TileRows* const done = rows;
      rows = next;
      next = done;
      n = n_next;
    }
    columns.finish(rows_, v_pad_, scratch_.max, scratch_.sum, scratch_.acc);
#if defined(KVC_BF16)
    finish(is_v_split_);
#else
    finish(false);
#endif
    return true;
  }
#else
  bool run_columns() { return false; }
#endif

  // Rows from cell c on, of 16 cells or those up to the n-th, as padded float32: where they lie, if
  // they are that already, or at `to`.
  const float* as_floats(const TileRows& rows, bool is_v, int64_t c, int64_t n, float* to) {
    const Side& side = is_v ? rows.pool->v : rows.pool->k;
    const bool is_split = is_v ? is_v_split_ : is_k_split_;
    const int64_t pad = is_v ? v_pad_ : k_pad_, m = smaller(n - c, 16);
    int64_t step;
    const char* row = rows.together(is_v ? kVRows : kKRows, c, m, side.packed_bytes(), scratch_.gathered, step);
    if (side.dtype == Dtype::f32 && !is_split && step == 4 * pad) return reinterpret_cast<const float*>(row);
    if (is_split && side.dtype == Dtype::bf16) {
      split_rows(row, step, m, pad, to);
      return to;
    }
    const char* affine = nullptr;
    for (int64_t i = 0; i < m; ++i, row += step) {
      if (side.affine) affine = rows.row(is_v ? kVAffine : kKAffine, c + i);
      decode_row(side, row, affine, pad, to + i * pad);
      if (is_split) split_floats(to + i * pad, side.dim, false);
    }
    return to;
  }

  void logits(const TileRows& rows, int64_t n) {
#if defined(KVC_BF16)
    if (has_k_pairs_ && rows.pool == job_.pool) {
      logits_of_pairs(rows, n);
      return;
    }
#endif
    order_queries();
#if defined(KVC_AVX2)
    if (is_read_k_) {
      logits_of_few(rows, n);
      return;
    }
#elif defined(KVC_AVX512)
    if (rows.pool == job_.pool && is_decoded_ahead(*rows.pool, rows_)) {
      logits_of_few(rows, n);
      return;
    }
#endif
    for (int64_t c = 0; c < n; c += 16) {
      const float* k = as_floats(rows, false, c, n, scratch_.k);
      if (rows.pool->k.affine) next_.affine(kKAffine, c / 16);
      k_pad_ == 64    ? logits_of_16<Singles, 64>(scratch_.fours, k_pad_, k, c)
      : k_pad_ == 128 ? logits_of_16<Singles, 128>(scratch_.fours, k_pad_, k, c)
                      : logits_of_16<Singles, 0>(scratch_.fours, k_pad_, k, c);
    }
  }

#if defined(KVC_BF16)
  void logits_of_pairs(const TileRows& rows, int64_t n) {
    const float* queries = scratch_.q_pairs;
    const int64_t n_bytes = k_.packed_bytes(), pad = k_.dim / 2;
    for (int64_t c = 0; c < n; c += 16) {
      int64_t step;
      const char* row = rows.together(kKRows, c, smaller(n - c, 16), n_bytes, scratch_.gathered, step);
      if (step != n_bytes) {
        for (int64_t i = 0; i < 16; ++i)
          std::memcpy(scratch_.gathered + i * n_bytes, row + i * step, static_cast<size_t>(n_bytes));
        row = scratch_.gathered;
      }
      const auto* k = reinterpret_cast<const float*>(row);
      pad == 32   ? logits_of_16<Pairs, 32>(queries, pad, k, c)
      : pad == 64 ? logits_of_16<Pairs, 64>(queries, pad, k, c)
                  : logits_of_16<Pairs, 0>(queries, pad, k, c);
    }
  }

  void values_of_pairs(const TileRows& rows, int64_t n) const {
    const char* at[kTile / 16];
    int64_t steps[kTile / 16];
    const int64_t n_bytes = v_.packed_bytes();
    for (int64_t c = 0; c < n; c += 16)
      at[c / 16] = rows.together(kVRows, c, smaller(n - c, 16), n_bytes,
                                 reinterpret_cast<char*>(scratch_.v) + c * n_bytes, steps[c / 16]);
    for (int64_t r = 0; r < rows_pad_; r += 4) {
      const uint32_t* weights = scratch_.weights + r * kTile / 2;
      int64_t d = 0;
      const auto part = [&](auto n_vecs) {
        constexpr int kVecs = decltype(n_vecs)::of;
        pairs_of_4<kVecs>(weights, at, steps, n, v_pad_, scratch_.acc + r * v_pad_ + d,
                          [&](int64_t c) { return r || d ? Next::nothing() : next_.turn_of_values(c / 16, 32); });
        d += kVecs * kLanes;
        for (int64_t i = 0; i < n; i += 16) at[i / 16] += kVecs * kLanes * 2;
      };
      while (d + 4 * kLanes <= v_pad_) part(Number<4>());
      if (d < v_pad_) part(Number<2>());
      for (int64_t i = 0; i < n; i += 16) at[i / 16] -= d * 2;
    }
  }
#endif

  // All rows' logits of 16 cells.
  template <class Lane, int kPad>
  void logits_of_16(const float* queries, int64_t k_pad, const float* k, int64_t c) const {
    Lines lines = next_.turn(c / 16, kPad / 2 * Lane::kNumbers);
    const auto part = [&](auto n_vecs, auto n_cells, int64_t row) {
      constexpr int kVecs = decltype(n_vecs)::of, kCells = decltype(n_cells)::of;
      logits_of<Lane, kPad, kVecs, kCells>(queries + row * k_pad, k_pad, k, factor_, s_ + row * kTile + c,
                                           scratch_.tops + 4 * row, lines);
      lines = Next::nothing();
      return kVecs * kRowsAtOnce;
    };
    int64_t r = 0;
    while (r + kMostVecs * kRowsAtOnce <= rows_pad_) r += part(Number<kMostVecs>(), Number<4>(), r);
    if (kMostVecs > 2 && r + 2 * kRowsAtOnce <= rows_pad_) r += part(Number<2>(), Number<kAlone / 2>(), r);
    while (r < rows_pad_) r += part(Number<1>(), Number<kAlone>(), r);
  }

#if defined(KVC_AVX2)
  // The same of K rows that are read once.
  void logits_of_few(const TileRows& rows, int64_t n) const {
    const auto of_16 = [&](auto dtype, auto pad, int64_t c) {
      constexpr auto kDtype = static_cast<Dtype>(decltype(dtype)::of);
      constexpr int kPad = decltype(pad)::of;
      int64_t step;
      const char* row = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(), scratch_.gathered, step);
      const Lines lines = next_.turn(c / 16, kPad / 2 * lines_of_32(kDtype));
      logits_of_rows<kDtype, kPad, true>(scratch_.fours, k_pad_, row, step, s_ + c, scratch_.tops, lines);
      for (int64_t r = 4; r < rows_pad_; r += 4)
        logits_of_rows<kDtype, kPad, false>(scratch_.fours + r * k_pad_, k_pad_, row, step, s_ + r * kTile + c,
                                            scratch_.tops + 4 * r, Next::nothing());
    };
    with_float(k_.dtype, [&](auto dtype) {
      for (int64_t c = 0; c < n; c += 16)
        k_pad_ == 64    ? of_16(dtype, Number<64>(), c)
        : k_pad_ == 128 ? of_16(dtype, Number<128>(), c)
                        : of_16(dtype, Number<0>(), c);
    });
  }

  void values_of_few(const TileRows& rows, int64_t n) const {
    const char* at[kTile / 16];
    int64_t steps[kTile / 16];
    const int64_t n_bytes = v_.packed_bytes();
    for (int64_t c = 0; c < n; c += 16)
      at[c / 16] = rows.together(kVRows, c, smaller(n - c, 16), n_bytes,
                                 reinterpret_cast<char*>(scratch_.v) + c * n_bytes, steps[c / 16]);
    with_float(v_.dtype, [&](auto dtype) {
      constexpr auto kDtype = static_cast<Dtype>(decltype(dtype)::of);
      values_of_rows<kDtype, true>(s_, at, steps, n, v_pad_, scratch_.acc, next_);
      for (int64_t r = 4; r < rows_pad_; r += 4)
        values_of_rows<kDtype, false>(s_ + r * kTile, at, steps, n, v_pad_, scratch_.acc + r * v_pad_, next_);
    });
  }
#endif

#if defined(KVC_AVX512)
  // The same of few rows, while K of the next cells is decoded.
  void logits_of_few(const TileRows& rows, int64_t n) const {
    const auto of_type = [&](auto is_half, auto n_vecs) {
      constexpr Dtype kDtype = decltype(is_half)::of ? Dtype::f16 : Dtype::bf16;
      constexpr int kVecs = decltype(n_vecs)::of;
      k_pad_ == 64    ? logits_of_few<kDtype, 64, kVecs>(rows, n)
      : k_pad_ == 128 ? logits_of_few<kDtype, 128, kVecs>(rows, n)
                      : logits_of_few<kDtype, 0, kVecs>(rows, n);
    };
    const auto of_rows = [&](auto is_half) {
      rows_pad_ == kRowsAtOnce ? of_type(is_half, Number<1>()) : of_type(is_half, Number<2>());
    };
    k_.dtype == Dtype::f16 ? of_rows(Number<1>()) : of_rows(Number<0>());
  }

  template <Dtype dtype, int kPad, int kVecs>
  void logits_of_few(const TileRows& rows, int64_t n) const {
    float *now = scratch_.k, *then = now + kAhead * k_pad_;
    const char* row;
    int64_t step;
    const auto take = [&](int64_t c) {
      row = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(), scratch_.gathered, step);
    };
    take(0);
    for (int64_t c = 0; c < kAhead; ++c)
      for (int64_t d = 0; d < k_pad_; d += 2 * kLanes) decode_two<dtype>(row + c * step + 2 * d, now + c * k_pad_ + d);
    Lines lines = Next::nothing();
    for (int64_t c = 0; c < n; c += kAhead) {
      const bool is_second = c % 16;
      if (!is_second) lines = next_.turn(c / 16, kPad / 2);
      if (is_second && c + kAhead < n) take(c + kAhead);  // behind the last ones these come once more
      logits_of_8<dtype, kPad, kVecs>(scratch_.fours, k_pad_, now, then, is_second ? row : row + kAhead * step, step,
                                      s_ + c, scratch_.tops, lines);
      float* const done = now;
      now = then;
      then = done;
    }
  }
#endif

  void values(const TileRows& rows, int64_t first, int64_t n, Seen seen) {
    const Dtype dtype = rows.pool->v.dtype;
#if defined(KVC_AVX2)
    if (is_read_v_ && seen == Seen::everything) {
      values_of_few(rows, n);
      return;
    }
#endif
    // For few rows there is nothing to gain from decoding once.
    const auto values_where_they_lie = [&](const auto& read) {
      for (int64_t c = 0; c < n; c += 16) {
        const int64_t m = smaller(n - c, 16);
        int64_t step;
        const char* row = rows.together(kVRows, c, m, v_.packed_bytes(), scratch_.gathered, step);
        add_values<kWide * kLanes / 4>(c, m, row, step, read);
      }
    };
    if (is_v_split_ && dtype == Dtype::bf16 && rows_ <= 4 && seen == Seen::everything) {
      return values_where_they_lie([](const char* from, int64_t d, Vec* x, auto n_vecs) {
        const auto* numbers = reinterpret_cast<const uint16_t*>(from) + d;
        if (n_vecs.of == 1) x[0] = load_bf16(numbers);  // not so: they come in pairs
        for (int i = 0; i + 1 < n_vecs.of; i += 2) load_split(numbers + i * kLanes, x[i], x[i + 1]);
      });
    }
#if defined(KVC_AVX512)
    if (rows.pool == job_.pool && dtype == Dtype::f16 && v_.dim == v_pad_ && rows_ <= 4 && seen == Seen::everything) {
      return values_where_they_lie([](const char* from, int64_t d, Vec* x, auto n_vecs) {
        for (int i = 0; i < n_vecs.of; ++i) x[i] = load_half(reinterpret_cast<const uint16_t*>(from) + d + i * kLanes);
      });
    }
#endif
    const auto read = [](const char* from, int64_t d, Vec* x, auto n_vecs) {
      for (int i = 0; i < n_vecs.of; ++i) x[i] = load(reinterpret_cast<const float*>(from) + d + i * kLanes);
    };
    // So many that each four rows can fetch 16 cells' share of the next tile.
    const int64_t block = rows_ <= 4 ? 16 : rows_ <= 12 ? 32 : kDecoded;
    constexpr int kFetched = kWide * kLanes == 64 ? 16 : 8;
    const bool is_read_there = block == 16 && seen == Seen::everything;
    for (int64_t c = 0; c < n; c += block) {
      const int64_t m = smaller(n - c, block);
      const float* v = scratch_.v;
      for (int64_t i = 0; i < m; i += 16) {
        float* to = scratch_.v + i * v_pad_;
        const float* from = as_floats(rows, true, c + i, n, to);
        if (is_read_there)
          v = from;
        else if (from != to)
          std::memcpy(to, from, sizeof(float) * smaller(m - i, 16) * v_pad_);
      }
      if (seen == Seen::some) leave_no_trace(first, c, m);
      const char* row = reinterpret_cast<const char*>(v);
      block == 16   ? add_values<kFetched>(c, m, row, 4 * v_pad_, read)
      : block == 32 ? add_values<kFetched / 2>(c, m, row, 4 * v_pad_, read)
                    : add_values<kFetched / 4>(c, m, row, 4 * v_pad_, read);
    }
  }

  // V rows from `row` on times the weights of n cells from c on, of all rows.
  template <int kFetched, class Read>
  void add_values(int64_t c, int64_t n, const char* row, int64_t step, const Read& read) {
    for (int64_t r = 0; r < rows_pad_; r += 4) {
      const float* s = s_ + r * kTile + c;
      float* acc = scratch_.acc + r * v_pad_;
      int64_t d = 0;
      Lines lines = Next::nothing();
      if (4 * r < n) {
        const int64_t n_parts = v_pad_ / (kWide * kLanes), n_16 = (n + 15) / 16;
        lines = next_.turn_of_values(c / 16 + r / 4, n_parts * n_16 * 2 * kFetched);
        if (v_.affine) next_.affine(kVAffine, c / 16 + r / 4);
      }
      const auto part = [&](auto n_vecs) {
        constexpr int kVecs = decltype(n_vecs)::of;
        values_of_4<kVecs, kFetched>(s, row, step, n, v_pad_, acc + d, lines,
                                     [&](const char* from, Vec* x) { read(from, d, x, n_vecs); });
        d += kVecs * kLanes;
        if ((lines.left -= n * kFetched / 8) <= 0) lines = Next::nothing();
      };
      while (d + kWide * kLanes <= v_pad_) part(Number<kWide>());
      if (kWide > 2 && d + 2 * kLanes <= v_pad_) part(Number<2>());
      while (d < v_pad_) part(Number<1>());
    }
  }

  // A weight of 0 does not silence a value that is not finite: where a tile has a mask, rows with
  // such values are taken out and given to those alone who see them.
  void leave_no_trace(int64_t first, int64_t from, int64_t n) {
    for (int64_t c = from; c < from + n; ++c) {
      float* v = scratch_.v + (c - from) * v_pad_;
      float doubt = 0.f;
      for (int64_t d = 0; d < v_.dim; ++d) doubt += v[d] * 0.f;
      if (doubt == 0.f) continue;
      for (int64_t r = 0; r < rows_; ++r) {
        if (!is_seen(token_index(r), first + c)) continue;
        const float p = s_[r * kTile + c];
        for (int64_t d = 0; d < v_.dim; ++d) scratch_.acc[r * v_pad_ + d] += p * v[d];
      }
      std::memset(v, 0, sizeof(float) * v_pad_);
    }
  }
};

void attend(const Job& job, char* scratch) {
  [[maybe_unused]] const FlushToZero flush;
  Attention(job, scratch).run();
}

constexpr AttendOps kAttendOps = {attend, merge, write, sum_of};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
