// The same two products for rows of int8 and int4 without a matrix unit: numbers of 16 bits, two to a
// lane, whose products a lane adds up.
//
// Logits: 32 bits of 16 cells' rows lie side by side and meet the same numbers of one query: a lane is a
// cell, and nothing is left to add up across lanes. Numbers come apart into words by shifts alone, so that
// those of a pair are 2 or 4 places apart; queries are 16 bits of about the largest one, in the same
// order. Scale and bias come in afterwards.
// Values: two cells' numbers lie side by side, for the weights of both: 16 bits of about the largest
// one, times the cell's scale. Biases are added up by themselves.
//
// Only included by attend_impl.h.

#include "words_base.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// a[i] + x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1].
inline __m512i dot_pairs(__m512i a, __m512i x, __m512i y) {
#if defined(KVC_VNNI) && !defined(KVC_EMULATED_AVX512)
  // For the intrinsic function GCC copies every sum there and back.
  __asm__("vpdpwssd %2, %1, %0" : "+v"(a) : "v"(x), "v"(y));
  return a;
#else
  return _mm512_add_epi32(a, _mm512_madd_epi16(x, y));
#endif
}

// Two rows of 32 bytes `step` bytes apart; `is_dense`: 32.
inline __m512i two_rows(const char* row, int64_t step, bool is_dense) {
  return is_dense ? _mm512_loadu_si512(row) : two_halves(row, row + step);
}

class Words : public WordsBase {
 public:
  Words(bool with_k, bool with_v, const Side& k, const Side& v, int64_t rows, int64_t k_pad,
        int64_t v_pad, const float* q, float factor, char* memory)
      : WordsBase(with_k, with_v, k, v, rows, v_pad, factor, kTile, 32, memory) {
    if (has_k) load_queries(q, k_pad);
  }

  // s[row][c] of the n cells of `rows`, and of those up to the next multiple of 16 or 32; `tops`: the
  // highest of each row, in 4 parts.
  void logits(const TileRows& rows, int64_t n, float* s, float* tops, const Next& next) {
    load_affine<kKAffine>(k_groups_, rows, n, k_affine_);
    for (int64_t r = 0; r < quads_ * 4; ++r) store(tops_ + r * 16, all(kMinusInfinity));
    with_kind(k_, [&](auto is_4, auto n_subs) {
      if (quads_ == 1)
        logits_of_few<is_4.of, n_subs.of>(rows, n, s, next);
      else
        for (int64_t c = 0; c < n; c += 32) logits_of_32<is_4.of, n_subs.of>(rows, c, n, s, next);
    });
    for (int64_t quad = 0; quad < quads_; ++quad) {
      const float* top = tops_ + quad * 64;
      store(tops + quad * 16, highest_fours(load(top), load(top + 16), load(top + 32), load(top + 48)));
    }
  }

  // A row's logits to weights, 2**(s[c] - base); their sums. The largest of them is `top`; earlier
  // weights are multiplied by `factor`. Logits up to the next multiple of 32 are minus infinity.
  Vec weigh(int64_t r, const float* s, float base, float factor, float top, int64_t n,
            const Next& next) {
    scale_results(r, factor);
    const int64_t n_groups = v_groups_;
    set_steps(r, top);
    // Four rows fetch what is left of the next tile's K rows; the products will fetch its V rows.
    const int64_t every = rows_ < 8 ? 1 : rows_ / 4, g = r / every, first = kTile / 32;
    const bool is_fetched = r % every == 0 && g < 4;
    const int64_t n_lines = v_.dtype == Dtype::int4 ? 8 : 16;
    const Lines lines = is_fetched ? next.sixteen(kKRows, first + g, n_lines) : Next::nothing();
    for (int64_t i = r + 1; r == rows_ - 1 && i < 4; ++i) next.sixteen(kKRows, first + i, 0);
    if (is_weight_by_turns())
      return n_groups == 2 ? weights_of<2, true>(r, s, base, n, lines)
                           : weights_of<kMaxGroups, true>(r, s, base, n, lines);
    return n_groups == 1   ? weights_of<1, false>(r, s, base, n, lines)
           : n_groups == 2 ? weights_of<2, false>(r, s, base, n, lines)
                           : weights_of<kMaxGroups, false>(r, s, base, n, lines);
  }

  // Sums of weight[row][c] * V[c], and of those of earlier tiles.
  void values(const TileRows& rows, int64_t n, const Next& next) {
    with_kind(v_, [&](auto is_4, auto n_subs) {
      for (int64_t chunk = 0; chunk < v_.dim / 64; ++chunk)
        values_of_chunk<is_4.of, n_subs.of>(rows, chunk, n, next);
    });
  }

  // All tiles' sums go to acc[row]: behind the last one.
  void finish(float* acc) {
    for (int64_t r = 0; has_v && r < rows_; ++r) {
      for (int64_t d = 0; d < v_.dim; d += 64) {
        __m512 y[4];
        in_order(result(r) + d, y);
        float* to = acc + r * v_pad_ + d;
        for (int j = 0; j < 4; ++j) store(to + 16 * j, add(load(to + 16 * j), y[j]));
      }
    }
    add_biases(acc);
  }

 private:
  // Where numbers as words come from: all of them are kept if other rows want them too. `whole`: from the
  // pool, and there are all 32 of them; `dense`: 32 bytes apart as well.
  enum class Place { dense, whole, pool, to_stage, stage };

  // Of 64 numbers, the first of the t-th pair of the one or the other 32; where the other one of it is.
  static constexpr int64_t first_of(bool is_4, int64_t half, int64_t t) {
    return half * 32 + (is_4 ? t / 4 * 8 + t % 4 : t / 2 * 4 + t % 2);
  }
  static constexpr int64_t apart(bool is_4) { return is_4 ? 4 : 2; }

  // For kGroups, or up to as many if these are the most.
  template <int kGroups, bool is_by_turns>
  Vec weights_of(int64_t r, const float* s, float base, int64_t n, const Lines& given) const {
    Lines lines = given;
    const int64_t n_groups = kGroups == kMaxGroups ? v_groups_ : kGroups;
    const float* steps = steps_ + r * n_groups;
    Vec total = all(0.f), bias[kGroups], inverse[kGroups];
    __m512i whole[kGroups];
    float* biases = biases_ + r * n_groups * 16;
    const float* affine = v_affine_;
    for (int64_t g = 0; g < n_groups; ++g) {
      bias[g] = load(biases + g * 16);
      inverse[g] = all(steps[g] > 0.f ? 1.f / steps[g] : 0.f);
      whole[g] = _mm512_setzero_si512();
    }
    const auto part = [&](int64_t c) __attribute__((always_inline)) {
      const Vec p = exp2_below_1(sub(_mm512_load_ps(s + c), all(base)));
      const Vec q = exp2_below_1(sub(_mm512_load_ps(s + c + 16), all(base)));
      total = add(total, add(p, q));
      __m512i before = _mm512_setzero_si512();
      for (int64_t g = 0; g < n_groups; ++g) {
        const float* scales = affine + g * 2 * kTile + c;
        const Vec scale_p = mul(inverse[g], _mm512_load_ps(scales));
        const Vec scale_q = mul(inverse[g], _mm512_load_ps(scales + 16));
        const __m512i words =
            _mm512_packs_epi32(to_ints(mul(p, scale_p)), to_ints(mul(q, scale_q)));
        if (!is_by_turns) {
          store_ints(weights(r, g) + c, words);
        } else if (g % 2) {
          int16_t* both = weights(r, g - 1) + 2 * c;
          store_ints(both, _mm512_unpacklo_epi32(before, words));
          store_ints(both + 32, _mm512_unpackhi_epi32(before, words));
        }
        before = words;
        whole[g] = dot_pairs(whole[g], words, all_ints(0x10001));
        bias[g] = fma(p, _mm512_load_ps(scales + kTile), bias[g]);
        bias[g] = fma(q, _mm512_load_ps(scales + kTile + 16), bias[g]);
      }
    };
    const bool is_4 = v_.dtype == Dtype::int4;
    int64_t c = 0;
    for (; given.left && c + 64 <= n; c += 64) {
      lines.one(0);
      lines.one(1);
      if (!is_4) lines.one(2), lines.one(3);
      part(c);
      if (!is_4) lines.one(0), lines.one(1);
      lines.one(2);
      lines.one(3);
      part(c + 32);
    }
    for (; c < n; c += 32) part(c);
    for (int64_t g = 0; g < n_groups; ++g)
      store(biases + g * 16, fma(_mm512_cvtepi32_ps(whole[g]), all(-middle() * steps[g]), bias[g]));
    return total;
  }

  // A chunk's numbers in the order of pairs.
  template <bool is_4>
  struct Order {
    uint16_t of[64];
    constexpr Order() : of{} {
      for (int64_t p = 0; p < 32; ++p) {
        of[2 * p] = static_cast<uint16_t>(first_of(is_4, p / 16, p % 16));
        of[2 * p + 1] = static_cast<uint16_t>(of[2 * p] + apart(is_4));
      }
    }
  };

  void load_queries(const float* q, int64_t k_pad) {
    with_kind(k_, [&](auto is_4, auto n_subs) { load_queries<is_4.of, n_subs.of>(q, k_pad); });
  }

  template <bool is_4, int kSubs>
  void load_queries(const float* q, int64_t k_pad) {
    alignas(64) static constexpr Order<is_4> order;
    const int64_t chunks = k_.dim / 64;
    std::memset(queries_, 0, 2 * quads_ * 4 * k_.dim);
    std::memset(q_steps_, 0, 64 * quads_);
    std::memset(q_sums_, 0, 64 * quads_ * chunks * kSubs);
    for (int64_t r = 0; r < rows_; ++r) {
      const float* row = q + r * k_pad;
      const int64_t quad = r / 4, lane = r % 4;
      __m512 most = _mm512_setzero_ps(), zeros = most;
      for (int64_t d = 0; d < k_.dim; d += 16) {
        const __m512 x = load(row + d);
        most = _mm512_max_ps(most, _mm512_abs_ps(x));
        zeros = add(zeros, mul(x, _mm512_setzero_ps()));
      }
      const float zero = sum(zeros);  // NaN if one is not finite
      const float top = _mm512_reduce_max_ps(most);
      const __m512 inverse = all(top > 0.f ? 32767.f / top : 0.f);
      const float step = factor_ * (top / 32767.f);
      put_fours(q_steps_ + quad * 16, lane, step);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        __m512i x[4];
        for (int i = 0; i < 4; ++i)
          x[i] = _mm512_cvtps_epi32(mul(load(row + chunk * 64 + 16 * i), inverse));
        // Of the rounded numbers: their error then meets K rows, and not how far these are from 0.
        for (int sub = 0; sub < kSubs; ++sub) {
          __m512i whole = _mm512_add_epi32(x[2 * sub], x[2 * sub + 1]);
          if (kSubs == 1) whole = _mm512_add_epi32(whole, _mm512_add_epi32(x[2], x[3]));
          const float sum = step * static_cast<float>(_mm512_reduce_add_epi32(whole)) + zero;
          put_fours(q_sums_ + ((chunk * quads_ + quad) * kSubs + sub) * 16, lane, sum);
        }
        const auto words = [&](int i) {
          return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(x[i])),
                                    _mm512_cvtepi32_epi16(x[i + 1]), 1);
        };
        const __m512i low = words(0), high = words(2);
        int32_t* to = query(chunk, quad) + lane;
        for (int half = 0; half < 2; ++half) {
          const __m512i from = _mm512_load_si512(order.of + 32 * half);
          alignas(64) int32_t pairs[16];
          _mm512_store_si512(pairs, _mm512_permutex2var_epi16(low, from, high));
          for (int i = 0; i < 16; ++i, to += 4) *to = pairs[i];
        }
      }
    }
  }

  // Pairs of a chunk's numbers of 4 queries: [pair][row].
  int32_t* query(int64_t chunk, int64_t quad) const {
    return reinterpret_cast<int32_t*>(queries_) + (chunk * quads_ + quad) * 128;
  }

  // 32 bits each of 16 rows of 64 numbers, `step` bytes apart: of int4 all of the first 32 numbers, to x[0],
  // and of the others, of int8 half of them.
  template <bool is_4>
  static void load_columns(const char* row, int64_t step, int64_t part, __m512i (*x)[4]) {
    __m512i y[2][4];
    for (int64_t i = 0; i < 8; ++i) {
      __m512i& rows = y[i / 4][i % 4];
      if (is_4) {
        rows = two_rows(row + 2 * i * step, step, step == 32);
      } else {
        const char* from = row + i % 4 * step + i / 4 * 32 + part * 16;
        const auto quarter = [&](int64_t j) {
          return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4 * j * step));
        };
        rows = _mm512_castsi128_si512(quarter(0));
        rows = _mm512_inserti32x4(rows, quarter(1), 1);
        rows = _mm512_inserti32x4(rows, quarter(2), 2);
        rows = _mm512_inserti32x4(rows, quarter(3), 3);
      }
    }
    for (auto& z : y) {
      const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
      const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
      z[0] = _mm512_unpacklo_epi64(a, c);
      z[1] = _mm512_unpackhi_epi64(a, c);
      z[2] = _mm512_unpacklo_epi64(b, d);
      z[3] = _mm512_unpackhi_epi64(b, d);
    }
    for (int j = 0; j < 4; ++j) {
      if (is_4) {
        // A lane has rows of even or of odd numbers.
        const __m512i low =
            _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
        const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(4));
        x[0][j] = _mm512_permutex2var_epi32(y[0][j], low, y[1][j]);
        x[1][j] = _mm512_permutex2var_epi32(y[0][j], high, y[1][j]);
      } else {
        x[0][j] = y[0][j];
        x[1][j] = y[1][j];
      }
    }
  }

  // Words of the i-th pair of a part of the one or the other 32 numbers.
  template <bool is_4>
  static __m512i words_of(const __m512i (&x)[2][4], int64_t half, int64_t i, __m512i low) {
    constexpr int64_t kShifts = is_4 ? 4 : 2;
    const __m512i both = x[half][i / kShifts];
    if (i % kShifts == kShifts - 1) return _mm512_srli_epi16(both, 16 - 16 / kShifts);
    const auto n_bits = static_cast<unsigned>(i % kShifts * (16 / kShifts));
    return _mm512_and_si512(n_bits ? _mm512_srli_epi16(both, n_bits) : both, low);
  }
  template <bool is_4>
  static __m512i low_bits() {
    return kept(_mm512_set1_epi16(is_4 ? 15 : 255));  // not made again each time
  }

  // 16 cells' rows from `from` on.
  struct Sixteen {
    const char* from;
    int64_t step;
    Lines lines;  // to fetch
  };
  Sixteen sixteen(const TileRows& rows, int64_t c, int64_t n, char* room, const Next& next) const {
    // Of the next tile, as many V rows are fetched here as K rows.
    const int64_t n_lines = k_.dim / 64 * (k_.dtype == Dtype::int4 ? 8 : 16);
    Sixteen found;
    found.lines = next.turn(c / 16, n_lines);
    next.affine(kKAffine, c / 16);
    found.from = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(), room, found.step);
    return found;
  }

  template <bool is_4, int kSubs>
  void logits_of_few(const TileRows& rows, int64_t n, float* s, const Next& next) const {
    Sixteen places[kTile / 16];
    for (int64_t c = 0; c < n; c += 16)
      places[c / 16] = sixteen(rows, c, n, gathered_ + c * k_.packed_bytes(), next);
    logits_of<is_4, kSubs, false>(places, (n + 15) / 16, 0, 0, s);
  }

  template <bool is_4, int kSubs>
  void logits_of_32(const TileRows& rows, int64_t c, int64_t n, float* s, const Next& next) const {
    Lines lines = Next::nothing(), more = lines;
    for (int64_t i = 0; i < 2 && c + 16 * i < n; ++i) {
      const Sixteen place = sixteen(rows, c + 16 * i, n, gathered_, next);
      (i ? more : lines) = place.lines;
      stage<is_4>(place.from, place.step, i, lines);
    }
    for (int64_t quad = 0; quad < quads_; ++quad) {
      const Sixteen staged{nullptr, 0, quad == c / 32 % quads_ ? more : Next::nothing()};
      logits_of<is_4, kSubs, true>(&staged, 1, quad, c, s);
    }
  }

  // Words of 16 rows for many quads, as the i-th 16: [chunk][pair][i][cell].
  template <bool is_4>
  void stage(const char* from, int64_t step, int64_t i, Lines& given) const {
    Lines lines = given;
    const __m512i low = low_bits<is_4>();
    __m512i* to = reinterpret_cast<__m512i*>(staged_) + i;
    for (int64_t d = 0; d < k_.dim; d += 64, from += is_4 ? 32 : 64, to += 64) {
#pragma GCC unroll 2
      for (int64_t part = 0; part < (is_4 ? 1 : 2); ++part) {
        __m512i x[2][4];
        load_columns<is_4>(from, step, part, x);
#pragma GCC unroll 16
        for (int64_t j = 0; j < (is_4 ? 16 : 8); ++j) {
          if (j % (is_4 ? 4 : 2) == 0) lines.one(j / (is_4 ? 4 : 2));
          for (int64_t half = 0; half < 2; ++half)
            _mm512_store_si512(to + (half * 16 + part * 8 + j) * 2, words_of<is_4>(x, half, j, low));
        }
      }
    }
    given.at = lines.at;
  }

  // Logits from `cell` on for the rows of a quad: of n places, or of 32 cells that are staged.
  template <bool is_4, int kSubs, bool is_staged>
  __attribute__((noinline)) void logits_of(const Sixteen* places, int64_t n, int64_t quad, int64_t cell,
                                           float* s) const {
    float* tops = tops_ + quad * 64;
    Vec highest[4];
    for (int r = 0; r < 4; ++r) highest[r] = load(tops + r * 16);
    s += quad * 4 * kTile;
    for (; n; --n, ++places, cell += 16) {
      __m512 result[is_staged ? 2 : 1][4];
      logits_at<is_4, kSubs, is_staged>(*places, quad, cell, result);
      for (int r = 0; r < 4; ++r)
        for (int v = 0; v < (is_staged ? 2 : 1); ++v) {
          store(s + r * kTile + cell + 16 * v, result[v][r]);
          highest[r] = max(highest[r], result[v][r]);
        }
    }
    for (int r = 0; r < 4; ++r) store(tops + r * 16, highest[r]);
  }

  template <bool is_4, int kSubs, bool is_staged, int kVecs>
  __attribute__((always_inline)) void logits_at(const Sixteen& place, int64_t quad, int64_t cell,
                                                __m512 (&result)[kVecs][4]) const {
    const __m512i low = low_bits<is_4>();
    const char* from = place.from;
    const int64_t step = place.step;
    Lines lines = place.lines;
    for (auto& of_16 : result)
      for (__m512& x : of_16) x = _mm512_setzero_ps();
    const float* affine = k_affine_ + cell;  // of the chunk's first group
    for (int64_t chunk = 0, done = 0; chunk < k_.dim / 64; ++chunk) {
      const int32_t* q = one_base(query(chunk, quad));
      const __m512i* staged = one_base(reinterpret_cast<__m512i*>(staged_)) + chunk * 64;
      __m512i dot[2][kVecs][4];
      for (auto& of_half : dot)
        for (auto& of_16 : of_half)
          for (__m512i& x : of_16) x = _mm512_setzero_si512();
#pragma GCC unroll 2
      for (int64_t part = 0; part < (is_4 ? 1 : 2); ++part) {
        __m512i x[2][4];
        if (!is_staged) load_columns<is_4>(from + chunk * (is_4 ? 32 : 64), step, part, x);
#pragma GCC unroll 16
        for (int64_t i = 0; i < (is_4 ? 16 : 8); ++i) {
          const int64_t t = part * 8 + i;
          if (!is_4 || t % 2) lines.one(is_4 ? t / 2 : t);
#pragma GCC unroll 2
          for (int64_t half = 0; half < 2; ++half) {
            const int32_t* of_rows = q + (half * 16 + t) * 4;
            if (!is_staged) {
              const __m512i words = words_of<is_4>(x, half, i, low);
              for (int r = 0; r < 4; ++r) dot[half][0][r] = dot_pair(dot[half][0][r], words, of_rows[r]);
              continue;
            }
            const __m512i* words = staged + (half * 16 + t) * 2;
#pragma GCC unroll 4
            for (int r = 0; r < 4; ++r) {
              const __m512i of_row = kept(_mm512_set1_epi32(of_rows[r]));
              for (int v = 0; v < kVecs; ++v) dot[half][v][r] = dot_pairs(dot[half][v][r], words[v], of_row);
            }
          }
        }
      }
      const float* sums = one_base(q_sums_ + (chunk * quads_ + quad) * kSubs * 16);
      for (int v = 0; v < kVecs; ++v) {
        const float* of_16 = affine + 16 * v;
        for (int r = 0; r < 4; ++r) {
          __m512i whole = dot[0][v][r];
          __m512& to = result[v][r];
          if (kSubs == 1) whole = _mm512_add_epi32(whole, dot[1][v][r]);
          __m512 dots = mul(_mm512_cvtepi32_ps(whole), load(of_16));
          to = fma(load(of_16 + kTile), all(sums[4 * r]), to);
          if (kSubs == 2) {
            dots = fma(_mm512_cvtepi32_ps(dot[1][v][r]), load(of_16 + 2 * kTile), dots);
            to = fma(load(of_16 + 3 * kTile), all(sums[16 + 4 * r]), to);
          }
          to = fma(dots, all(q_steps_[quad * 16 + 4 * r]), to);
        }
      }
      if ((done += 64) >= k_.group_size) {
        done = 0;
        affine += kSubs * 2 * kTile;
      }
    }
  }

  // Of each 32 cells those of 4 i .. + 3 and of 16 + 4 i .. + 3 are the i-th 8 words. Where a chunk has
  // two groups, the weights of two cells for the one lie before those for the other, as the chunk's
  // numbers do: 32 words of the first 16 cells, then of the others.
  int16_t* weights(int64_t r, int64_t g) const {
    const int64_t n = is_weight_by_turns() ? 2 * kTile : kTile;
    return weights_ + (r / 4 * v_groups_ + g) * 4 * kTile + r % 4 * n;
  }
  bool is_weight_by_turns() const { return v_.dtype == Dtype::int4 && subs(v_) == 2; }

  // Numbers of two cells side by side: dims 16 l + 4 i .. + 3 of int8 are lane l of vector i; of int4
  // the pairs of vector i are every fourth number from the i-th on, of two groups by turns. Those of
  // vectors 1 and 2 have 16 times the next vector's in them, which is taken out of their sums.
  template <bool is_4, int kSubs, bool is_dense>
  static void interleave(const char* row, int64_t step, __m512i low, __m512i* x) {
    if (is_4) {
      struct Order {
        uint16_t of[32];
        constexpr Order() : of{} {
          for (int i = 0; i < 16; ++i) {
            const int word = kSubs == 2 ? i / 2 + i % 2 * 8 : i;
            of[2 * i] = static_cast<uint16_t>(word);
            of[2 * i + 1] = static_cast<uint16_t>(16 + word);
          }
        }
      };
      alignas(64) static constexpr Order order;
      const __m512i both =
          _mm512_permutexvar_epi16(_mm512_load_si512(order.of), two_rows(row, step, is_dense));
      x[0] = _mm512_and_si512(both, low);
      for (int j = 1; j < 4; ++j) x[j] = _mm512_srli_epi16(both, 4 * j);
    } else {
      const __m512i y = _mm512_loadu_si512(row), z = _mm512_loadu_si512(row + step);
      const __m512i zero = _mm512_setzero_si512();
      const __m512i first = _mm512_unpacklo_epi8(y, z), last = _mm512_unpackhi_epi8(y, z);
      x[0] = _mm512_unpacklo_epi8(first, zero);
      x[1] = _mm512_unpackhi_epi8(first, zero);
      x[2] = _mm512_unpacklo_epi8(last, zero);
      x[3] = _mm512_unpackhi_epi8(last, zero);
    }
  }

  template <bool is_4, int kSubs>
  void values_of_chunk(const TileRows& rows, int64_t chunk, int64_t n, const Next& next) const {
    const int64_t n_bytes = v_.packed_bytes();
    const int64_t group = chunk * 64 / v_.group_size;  // the chunk's first
    Pairs pairs[kTile / 32];
    int64_t n_whole = 0;  // of 32 cells each, from the first on
    bool is_dense = is_4;
    for (int64_t c = 0; c < n; c += 32) {
      Pairs& of_32 = pairs[c / 32];
      for (int64_t i = 0; i < 2 && c + 16 * i < n; ++i) {
        const int64_t first = c + 16 * i, m = smaller(n - first, 16);
        of_32.n[i] = (m + 1) / 2;
        of_32.from[i] =
            rows.together(kVRows, first, m, n_bytes, gathered_ + first * n_bytes, of_32.step[i]) +
            chunk * (is_4 ? 32 : 64);
      }
      if (of_32.n[1] < 8) continue;  // the last
      ++n_whole;
      is_dense &= of_32.step[0] == 32 && of_32.step[1] == 32;
    }
    for (int64_t quad = 0; quad < quads_; ++quad) {
      if (!chunk)
        for (int64_t c = 0; c < n; c += 32) {
          const bool is_fetched = quad == c / 32 % quads_;
          pairs[c / 32].lines = is_fetched ? next.sixteen(kVRows, kTile / 32 + c / 32, is_4 ? 8 : 16)
                                           : Next::nothing();
          if (!is_fetched) continue;
          next.affine(kVAffine, c / 16);
          next.affine(kVAffine, c / 16 + 1);
        }
      const int16_t* of = weights(quad * 4, group);
      if (quad)
        add_pairs<is_4, kSubs, Place::stage>(pairs, n, of, quad, chunk);
      else if (quads_ > 1)
        add_pairs<is_4, kSubs, Place::to_stage>(pairs, n, of, quad, chunk);
      else if (n_whole * 32 < n)
        add_pairs<is_4, kSubs, Place::pool>(pairs, n, of, quad, chunk);
      else if (is_dense)
        add_pairs<is_4, kSubs, is_4 ? Place::dense : Place::whole>(pairs, n, of, quad, chunk);
      else
        add_pairs<is_4, kSubs, Place::whole>(pairs, n, of, quad, chunk);
    }
  }

  // Rows of twice 16 cells, pair by pair.
  struct Pairs {
    int64_t n[2] = {}, step[2] = {};
    const char* from[2] = {};
    Lines lines = Next::nothing();  // to fetch: one for each of them, or of int4 for each second one
  };
  // Results of 4 rows += weights * V of n cells, of a chunk. A function of its own, so that the compiler
  // keeps the sums in registers.
  template <bool is_4, int kSubs, Place place>
  __attribute__((noinline)) void add_pairs(const Pairs* pairs, int64_t n, const int16_t* weights,
                                           int64_t quad, int64_t chunk) const {
    const __m512i low = kept(_mm512_set1_epi16(15));  // not made again each time
    auto* numbers = reinterpret_cast<__m512i*>(values_);
    __m512i a[4][4];
#pragma GCC unroll 4
    for (auto& of_row : a)
#pragma GCC unroll 4
      for (__m512i& x : of_row) x = _mm512_setzero_si512();
    for (; n > 0; n -= 32, ++pairs, weights += is_4 && kSubs == 2 ? 64 : 32) {
      Lines lines = pairs->lines;
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; ++half, numbers += 32) {
        const char* from = pairs->from[half];
        const int64_t step = pairs->step[half];
        const int16_t* at = weights + (is_4 && kSubs == 2 ? 32 : 4) * half;
        if (place == Place::dense || place == Place::whole) {
#pragma GCC unroll 8
          for (int64_t i = 0; i < 8; ++i, from += 2 * step) {
            if (!is_4 || i % 2) lines.one(is_4 ? i / 2 : i);
            add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers, a);
          }
          continue;
        }
        for (int64_t i = 0; i < pairs->n[half]; ++i, from += 2 * step) {
          if (i % (is_4 ? 8 : 4) == 0) lines.four();
          add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers + 4 * i, a);
        }
      }
    }
    add_sums<is_4, kSubs>(quad, chunk, a);
  }

  template <bool is_4, int kSubs, Place place>
  static __attribute__((always_inline)) void add_pair(const char* from, int64_t step,
                                                      const int16_t* weights, int64_t i,
                                                      __m512i low, __m512i* numbers,
                                                      __m512i (&a)[4][4]) {
    constexpr __mmask16 kSecond = 0xFF00;  // the chunk's second group
    constexpr bool is_by_turns = is_4 && kSubs == 2;
    weights += i / 2 * 8 + i % 2 * (is_by_turns ? 4 : 2);
    __m512i x[4];
    if (place == Place::stage) {
      for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(numbers + j);
    } else {
      interleave<is_4, kSubs, place == Place::dense>(from, step, low, x);
    }
    if (place == Place::to_stage)
      for (int j = 0; j < 4; ++j) _mm512_store_si512(numbers + j, x[j]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, weights += is_by_turns ? 2 * kTile : kTile) {
      __m512i w = is_by_turns ? _mm512_broadcastq_epi64(_mm_loadu_si64(weights))
                              : _mm512_broadcastd_epi32(_mm_loadu_si32(weights));
      if (kSubs == 2 && !is_by_turns)
        w = _mm512_mask_broadcastd_epi32(w, kSecond, _mm_loadu_si32(weights + 4 * kTile));
      for (int j = 0; j < 4; ++j) a[r][j] = dot_pairs(a[r][j], x[j], w);
    }
  }

  template <bool is_4, int kSubs>
  __attribute__((always_inline)) void add_sums(int64_t quad, int64_t chunk, __m512i (&a)[4][4]) const {
    const float* steps = steps_ + quad * 4 * v_groups_ + chunk * 64 / v_.group_size;
    constexpr __mmask16 kSecond = is_4 ? 0xAAAA : 0xFF00;  // the chunk's second group
    float* to = result(quad * 4) + chunk * 64;
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, steps += v_groups_, to += v_.dim) {
      Vec step = all(steps[0]);
      if (kSubs == 2) step = _mm512_mask_mov_ps(step, kSecond, all(steps[1]));
      // Where a sum was too large for 32 bits its difference is not.
#pragma GCC unroll 2
      for (int j = 1; j < (is_4 ? 3 : 0); ++j)
        a[r][j] = _mm512_sub_epi32(a[r][j], _mm512_slli_epi32(a[r][j + 1], 4));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        store(to + 16 * j, fma(_mm512_cvtepi32_ps(a[r][j]), step, load(to + 16 * j)));
    }
  }

  // A chunk's sums in the order of numbers.
  void in_order(const float* from, __m512* y) const {
    __m512 x[4];
    for (int j = 0; j < 4; ++j) x[j] = load(from + 16 * j);
    if (v_.dtype == Dtype::int4) {
      const __m512i one_behind_other =
          _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
      if (subs(v_) == 2)
        for (__m512& z : x) z = _mm512_permutexvar_ps(one_behind_other, z);
      // Lane i of all four, by turns.
      const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
      const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
      x[0] = _mm512_shuffle_ps(a, c, 0x44);
      x[1] = _mm512_shuffle_ps(a, c, 0xee);
      x[2] = _mm512_shuffle_ps(b, d, 0x44);
      x[3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    transpose_lanes(x, y);
  }
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
