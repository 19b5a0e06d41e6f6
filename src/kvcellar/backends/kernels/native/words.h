// The same two products for rows of int8 and int4 without a matrix unit: numbers of 16 bits, two to a
// lane, whose products a lane adds up.
//
// Logits: of 4 cells the same pair of numbers lies side by side, and meets that pair of 4 queries: a
// lane is one row and one cell, and nothing is left to add up across lanes. Numbers come apart into
// words by shifts alone, so that those of a pair are 2 or 4 places apart; queries are 16 bits of about
// the largest one, in the same order. Scale and bias come in afterwards.
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
      : WordsBase(with_k, with_v, k, v, rows, v_pad, factor, 32, kStaged, memory) {
    if (has_k) load_queries(q, k_pad);
  }

  // s[row][c] of the n cells of `rows`, and of those up to the next multiple of 32; `tops`: the highest
  // of each row, in 4 parts. Or, as products come, `fours`: s[quad][c / 4][row][4].
  void logits(const TileRows& rows, int64_t n, float* s, float* tops, bool is_fours, const Next& next) {
    load_affine<kKAffine>(k_groups_, rows, n, k_affine_);
    with_kind(k_, [&](auto is_4, auto n_subs) {
      for (int64_t c = 0; c < n; c += kStaged)
        logits_of_32<is_4.of, n_subs.of>(rows, c, n, s, tops, is_fours, next);
    });
  }

  // A row's logits to weights, 2**(s[c] - base); their sums. The largest of them is `top`; earlier
  // weights are multiplied by `factor`. Logits up to the next multiple of 32 are minus infinity.
  Vec weigh(int64_t r, const float* s, float base, float factor, float top, int64_t n,
            const Next& next) {
    scale_results(r, factor);
    const int64_t n_groups = v_groups_;
    set_steps(r, top);
    // Four rows fetch what is left of the next tile's K rows; the products will of its V rows.
    const int64_t every = rows_ < 8 ? 1 : rows_ / 4, g = r / every, first = kTile / 32;
    const bool is_fetched = r % every == 0 && g < 4;
    const int64_t n_lines = v_.dtype == Dtype::int4 ? 8 : 16;
    const Lines lines = is_fetched ? next.sixteen(kKRows, first + g, n_lines) : Next::nothing();
    for (int64_t i = r + 1; r == rows_ - 1 && i < 4; ++i) next.sixteen(kKRows, first + i, 0);
    return n_groups == 1   ? weights_of<1>(r, s, base, n, lines)
           : n_groups == 2 ? weights_of<2>(r, s, base, n, lines)
                           : weights_of<kMaxGroups>(r, s, base, n, lines);
  }

  // The same of all rows, where logits are fours, with `maxima` as softmax has them. Their number is a
  // multiple of 32.
  void weigh_fours(const float* s, const Maxima& maxima, float* sums, int64_t n, const Next& next) {
    for (int64_t r = 0; r < rows_; ++r) {
      scale_results(r, maxima.factor[r]);
      set_steps(r, maxima.most[r]);
    }
    for (int64_t quad = 0; quad < quads_; ++quad) {
      alignas(64) float total[16];
      with_kind(v_, [&](auto is_4, auto n_subs) {
        constexpr bool kIs4 = decltype(is_4)::of;
        constexpr int kSubs = decltype(n_subs)::of;
        store(total, v_groups_ == kSubs
                         ? weights_of_fours<kSubs, kIs4, kSubs>(quad, s, maxima, n, next)
                         : weights_of_fours<kMaxGroups, kIs4, kSubs>(quad, s, maxima, n, next));
      });
      for (int64_t r = 4 * quad; r < rows_ && r < 4 * quad + 4; ++r) {
        float* sum = sums + r * kLanes;
        store(sum, mul(load(sum), all(maxima.factor[r])));
        add_four(sum, total + r % 4 * 4);
      }
    }
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
  static constexpr int64_t kStaged = 32;  // cells whose words are made at a time

  // Of 64 numbers, the first of the pair at place p; where the other one is; at which place the t-th
  // pair of the one or the other 32 is.
  static constexpr int64_t first_of(bool is_4, int64_t p) {
    return is_4 ? (p / 16 * 4 + p % 4) * 8 + p / 4 % 4 : (p % 4 * 4 + p / 8) * 4 + p / 4 % 2;
  }
  static constexpr int64_t apart(bool is_4) { return is_4 ? 4 : 2; }
  static constexpr int64_t place_of(bool is_4, int64_t half, int64_t t) {
    return is_4 ? half * 16 + t : t / 2 * 4 + half * 2 + t % 2;
  }

  // For kGroups, or up to as many if these are the most.
  template <int kGroups>
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
        if (!is_weight_by_turns()) {
          store_lanes(weights(r / 4, g, c) + r % 4 * 8, words, 32);
        } else if (g % 2) {
          int16_t* both = weights(r / 4, g - 1, c) + r % 4 * 8;
          store_lanes(both, _mm512_unpacklo_epi32(before, words), 64);
          store_lanes(both + 32, _mm512_unpackhi_epi32(before, words), 64);
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

  template <int kGroups, bool is_4, int kSubs>
  Vec weights_of_fours(int64_t quad, const float* s, const Maxima& maxima, int64_t n,
                       const Next& next) const {
    constexpr bool is_by_turns = is_4 && kSubs == 2;
    const int64_t n_groups = kGroups == kMaxGroups ? v_groups_ : kGroups;
    const auto each_4_times = [&](const float* rows) {
      const __m512i lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
      return _mm512_permutexvar_ps(lanes, all_fours(rows + 4 * quad));
    };
    const Vec base = each_4_times(maxima.base), most = each_4_times(maxima.most), zero = all(0.f);
    Vec total = zero, bias[kGroups], inverse[kGroups];
    __m512i whole[kGroups];
    const auto step = [&](int64_t g) { return mul(div(most, all(32767.f)), all(largest_[g])); };
#pragma GCC unroll 2
    for (int64_t g = 0; g < n_groups; ++g) {
      const __mmask16 is_some = _mm512_cmp_ps_mask(step(g), zero, _CMP_GT_OQ);
      inverse[g] = _mm512_mask_mov_ps(zero, is_some, div(all(1.f), step(g)));
      bias[g] = zero;
      whole[g] = _mm512_setzero_si512();
    }
    const float* affine = one_base(v_affine_);
    int16_t* to = one_base(weights(quad, 0, 0));
    s += quad * 4 * kTile;
    int64_t turn = quad;  // blocks until this quad fetches one
    for (int64_t c = 0; c < n; c += 32, s += 128, affine += 32, to += is_by_turns ? 256 : 128) {
      // What is left of the next tile's K rows; the products fetch its V rows.
      Lines lines = Next::nothing();
      if (--turn < 0) {
        lines = next.sixteen(kKRows, kTile / 32 + c / 32, is_4 ? 8 : 16);
        turn = quads_ - 1;
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        for (int64_t j = 0; j < (is_4 ? 2 : 4); ++j) lines.one((is_4 ? 2 : 4) * i + j);
        const Vec p = exp2_below_1(sub(load(s + i * 16), base));
        const Vec q = exp2_below_1(sub(load(s + i * 16 + 64), base));
        total = add(total, add(p, q));
        __m512i before = _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int64_t g = 0; g < n_groups; ++g) {
          const float* scales = affine + g * 2 * kTile + i * 4;
          const Vec scale_p = mul(inverse[g], all_fours(scales));
          const Vec scale_q = mul(inverse[g], all_fours(scales + 16));
          const __m512i words =
              _mm512_packs_epi32(to_ints(mul(p, scale_p)), to_ints(mul(q, scale_q)));
          int16_t* both = to + (is_by_turns ? g / 2 * 2 * kTile * 4 + i * 64 : g * kTile * 4 + i * 32);
          if (!is_by_turns) {
            store_ints(both, words);
          } else if (g % 2) {
            store_ints(both, _mm512_unpacklo_epi32(before, words));
            store_ints(both + 32, _mm512_unpackhi_epi32(before, words));
          }
          before = words;
          whole[g] = dot_pairs(whole[g], words, all_ints(0x10001));
          bias[g] = fma(p, all_fours(scales + kTile), bias[g]);
          bias[g] = fma(q, all_fours(scales + kTile + 16), bias[g]);
        }
      }
    }
#pragma GCC unroll 2
    for (int64_t g = 0; g < n_groups; ++g) {
      alignas(64) float biases[16];
      store(biases, fma(to_floats(whole[g]), mul(all(-middle()), step(g)), bias[g]));
      for (int64_t r = 4 * quad; r < rows_ && r < 4 * quad + 4; ++r)
        add_four(biases_ + (r * n_groups + g) * 16, biases + r % 4 * 4);
    }
    return total;
  }

  static void add_four(float* to, const float* from) {
    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), _mm_load_ps(from)));
  }

  // A chunk's numbers in the order of pairs.
  template <bool is_4>
  struct Order {
    uint16_t of[64];
    constexpr Order() : of{} {
      for (int64_t p = 0; p < 32; ++p) {
        of[2 * p] = static_cast<uint16_t>(first_of(is_4, p));
        of[2 * p + 1] = static_cast<uint16_t>(first_of(is_4, p) + apart(is_4));
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
    std::memset(queries_, 0, 2 * quads_ * 16 * k_.dim);
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
        int16_t* to = query(chunk, quad) + lane * 8;
        for (int half = 0; half < 2; ++half) {
          const __m512i from = _mm512_load_si512(order.of + 32 * half);
          alignas(64) int32_t pairs[16];
          _mm512_store_si512(pairs, _mm512_permutex2var_epi16(low, from, high));
          for (int i = 0; i < 16; ++i, to += 32)
            _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm_set1_epi32(pairs[i]));
        }
      }
    }
  }

  // K rows of 16 cells from c on as words, [chunk][cells / 4 of kStaged][place of a pair][cell].
  template <bool is_4>
  void stage(const TileRows& rows, int64_t c, int64_t n, int16_t* to, Lines& given) const {
    Lines lines = given;
    const int64_t m = smaller(n - c, 16);
    int64_t step;
    const char* from = rows.together(kKRows, c, m, k_.packed_bytes(), gathered_, step);
    const __m512i low = _mm512_set1_epi16(is_4 ? 15 : 255);
    for (int64_t d = 0; d < k_.packed_bytes(); d += is_4 ? 32 : 64, to += kStaged * 64) {
      const char* row = one_base(from + d);
      int16_t* at = to;
#pragma GCC unroll 4
      for (int64_t i = 0; i < 16; i += 4, row += 4 * step, at += 256) {
        for (int64_t j = 0; j < (is_4 ? 1 : 2); ++j) lines.one(i / 4 * (is_4 ? 1 : 2) + j);
        if (is_4) {
          const bool is_dense = step == 32;
          const __m512i x = two_rows(row, step, is_dense);
          const __m512i y = two_rows(row + 2 * step, step, is_dense);
          const __m512i first = _mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2,
                                                 25, 17, 9, 1, 24, 16, 8, 0);
          for (int j = 0; j < 2; ++j) {
            const __m512i order = _mm512_add_epi32(first, _mm512_set1_epi32(4 * j));
            const __m512i z = _mm512_permutex2var_epi32(x, order, y);
            int16_t* four = at + 128 * j;
            _mm512_store_si512(four, _mm512_and_si512(z, low));
            _mm512_store_si512(four + 32, _mm512_and_si512(_mm512_srli_epi16(z, 4), low));
            _mm512_store_si512(four + 64, _mm512_and_si512(_mm512_srli_epi16(z, 8), low));
            _mm512_store_si512(four + 96, _mm512_srli_epi16(z, 12));
          }
        } else {
          __m512i x[4], y[4];
          for (int j = 0; j < 4; ++j) x[j] = _mm512_loadu_si512(row + j * step);
          for (int j = 0; j < 4; j += 2) {
            y[j] = _mm512_unpacklo_epi32(x[j], x[j + 1]);
            y[j + 1] = _mm512_unpackhi_epi32(x[j], x[j + 1]);
          }
          for (int j = 0; j < 2; ++j) {
            x[2 * j] = _mm512_unpacklo_epi64(y[j], y[j + 2]);
            x[2 * j + 1] = _mm512_unpackhi_epi64(y[j], y[j + 2]);
          }
          for (int j = 0; j < 4; ++j) {
            _mm512_store_si512(at + 64 * j, _mm512_and_si512(x[j], low));
            _mm512_store_si512(at + 64 * j + 32, _mm512_srli_epi16(x[j], 8));
          }
        }
      }
    }
    given.at = lines.at;
  }

  template <bool is_4, int kSubs>
  void logits_of_32(const TileRows& rows, int64_t c, int64_t n, float* s, float* tops, bool is_fours,
                    const Next& next) const {
    // Of the next tile, as many K rows are fetched here and V rows during the products.
    const int64_t n_lines = k_.dim / 64 * (is_4 ? 8 : 16);
    Lines lines = next.turn(c / 16, n_lines);
    for (int64_t i = 0; i < kStaged && c + i < n; i += 16) {
      next.affine(kKAffine, (c + i) / 16);
      stage<is_4>(rows, c + i, n, staged_ + i * 64, lines);
    }
    lines = next.turn(c / 16 + 1, n_lines);
    const Lines nothing = Next::nothing();
    const int64_t turn = c / kStaged % ((quads_ + 1) / 2) * 2;
    int64_t quad = 0;
    for (; quad + 2 <= quads_; quad += 2)
      logits_of<is_4, kSubs, 2, 16>(quad, c, s, tops, is_fours, quad == turn ? lines : nothing);
    if (quad < quads_)
      logits_of<is_4, kSubs, 1, 32>(quad, c, s, tops, is_fours, quad == turn ? lines : nothing);
  }

  // Logits of the cells that are staged, from `first` on, kCells at a time, for the rows of kQuads
  // quads.
  template <bool is_4, int kSubs, int kQuads, int kCells>
  void logits_of(int64_t quad, int64_t first, float* s, float* tops, bool is_fours,
                 const Lines& given) const {
    Lines lines = given;
    constexpr int kFours = kCells / 4, kEvery = (is_4 ? 2 : 1) * kStaged / kCells;
    for (int64_t c = 0; c < kStaged; c += kCells) {
      __m512 result[kQuads][kFours];
      const float* affine = k_affine_ + first + c;  // of the chunk's first group
      for (int64_t chunk = 0, done = 0; chunk < k_.dim / 64; ++chunk) {
        const int16_t* staged = one_base(staged_ + (chunk * kStaged + c) * 64);
        const int16_t* q = one_base(query(chunk, quad));
        __m512i dot[2][kQuads][kFours];
        for (auto& of_half : dot)
          for (auto& of_quad : of_half)
            for (__m512i& x : of_quad) x = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int t = 0; t < 16; ++t) {
          if (t % kEvery == kEvery - 1) lines.one(t / kEvery);
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half) {
            const int64_t place = place_of(is_4, half, t);
            auto& a = dot[half];
            __m512i x[kQuads];
            for (int k = 0; k < kQuads; ++k) x[k] = _mm512_load_si512(q + k * 1024 + place * 32);
            for (int l = 0; l < kFours; ++l) {
              const auto* from = reinterpret_cast<const __m128i*>(staged + l * 256 + place * 8);
              const __m512i y = _mm512_broadcast_i32x4(_mm_load_si128(from));
              for (int k = 0; k < kQuads; ++k) a[k][l] = dot_pairs(a[k][l], x[k], y);
            }
          }
        }
        if (kSubs == 1)
          for (int k = 0; k < kQuads; ++k)
            for (int l = 0; l < kFours; ++l)
              dot[0][k][l] = _mm512_add_epi32(dot[0][k][l], dot[1][k][l]);
        const float* sums = one_base(q_sums_ + (chunk * quads_ + quad) * kSubs * 16);
        for (int j = 0; j < kFours; ++j) {
          for (int k = 0; k < kQuads; ++k) {
            __m512 dots, more = chunk ? result[k][j] : _mm512_setzero_ps();
            for (int sub = 0; sub < kSubs; ++sub) {
              const float* scales = affine + sub * 2 * kTile + 4 * j;
              const __m512 scale = all_fours(scales), bias = all_fours(scales + kTile);
              const __m512 x = _mm512_cvtepi32_ps(dot[sub][k][j]);
              dots = sub ? fma(x, scale, dots) : mul(x, scale);
              more = fma(bias, _mm512_load_ps(sums + (k * kSubs + sub) * 16), more);
            }
            result[k][j] = fma(dots, _mm512_load_ps(q_steps_ + (quad + k) * 16), more);
          }
        }
        if ((done += 64) >= k_.group_size) {
          done = 0;
          affine += kSubs * 2 * kTile;
        }
      }
      for (int k = 0; k < kQuads; ++k) {
        Vec top = load(tops + (quad + k) * 16);
        for (int j = 0; j < kFours; ++j) {
          top = max(top, result[k][j]);
          float* of_quad = s + (quad + k) * 4 * kTile;
          const int64_t cell = first + c + 4 * j;
          if (is_fours)
            store(of_quad + cell * 4, result[k][j]);
          else
            store_fours(result[k][j], of_quad + cell, kTile);
        }
        store(tops + (quad + k) * 16, top);
      }
    }
  }

  // Of 32 cells from c on: i-th are those of cells 4 i .. + 3 and 16 + 4 i .. + 3, [i][row][8]. Where a
  // chunk has two groups, the weights of two cells for the one lie before those for the other, as the
  // chunk's numbers do, [i][half][row][2 cells][group][2].
  int16_t* weights(int64_t quad, int64_t g, int64_t c) const {
    const int64_t each = is_weight_by_turns() ? 8 : 4;
    return weights_ + (quad * v_groups_ + g) * kTile * 4 + c * each;
  }
  bool is_weight_by_turns() const { return v_.dtype == Dtype::int4 && subs(v_) == 2; }

  static void store_lanes(int16_t* to, __m512i x, int64_t step) {
    auto* at = reinterpret_cast<float*>(to);
    store_fours(bits_as_floats(x), at, step / 2);
  }

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
    for (int64_t quad = 0; quad < quads_; ++quad) {
      std::memset(sums_, 0, 16 * 64);
      for (int64_t c = 0; c < n; c += 32) {
        Pairs pairs;
        for (int64_t i = 0; i < 2 && c + 16 * i < n; ++i) {
          const int64_t first = c + 16 * i, m = smaller(n - first, 16);
          pairs.n[i] = (m + 1) / 2;
          if (quad) continue;
          pairs.from[i] = rows.together(kVRows, first, m, n_bytes, gathered_ + i * 16 * n_bytes,
                                        pairs.step[i]) +
                          chunk * (is_4 ? 32 : 64);
        }
        if (!chunk && quad == c / 32 % quads_) {
          pairs.lines = next.sixteen(kVRows, kTile / 32 + c / 32, is_4 ? 8 : 16);
          next.affine(kVAffine, c / 16);
          next.affine(kVAffine, c / 16 + 1);
        }
        __m512i* staged = reinterpret_cast<__m512i*>(values_) + c * 2;
        const int16_t* of = weights(quad, group, c);
        const bool is_whole = pairs.n[0] == 8 && pairs.n[1] == 8;
        const bool is_dense = is_4 && pairs.step[0] == 32 && pairs.step[1] == 32;
        if (quad)
          add_pairs<is_4, kSubs, Place::stage>(pairs, of, staged);
        else if (quads_ > 1)
          add_pairs<is_4, kSubs, Place::to_stage>(pairs, of, staged);
        else if (!is_whole)
          add_pairs<is_4, kSubs, Place::pool>(pairs, of, staged);
        else if (is_dense)
          add_pairs<is_4, kSubs, is_4 ? Place::dense : Place::whole>(pairs, of, staged);
        else
          add_pairs<is_4, kSubs, Place::whole>(pairs, of, staged);
      }
      add_sums<is_4, kSubs>(quad, chunk, group);
    }
  }

  // Rows of twice 16 cells, pair by pair.
  struct Pairs {
    int64_t n[2] = {}, step[2] = {};
    const char* from[2] = {};
    Lines lines = Next::nothing();  // to fetch: one for each of them, or of int4 for each second one
  };
  // Where interleaved numbers come from: all of them are kept if other rows' weights want them too.
  // `whole`: from the pool, and there are all 32 of them; `dense`: 32 bytes apart as well.
  enum class Place { dense, whole, pool, to_stage, stage };

  // sums_ += weights * V for 4 rows.
  template <bool is_4, int kSubs, Place place>
  __attribute__((noinline)) void add_pairs(const Pairs& pairs, const int16_t* weights,
                                           __m512i* staged) const {
    int32_t* sums = one_base(sums_);
    const __m512i low = kept(_mm512_set1_epi16(15));  // not made again each time
    Lines lines = pairs.lines;
    __m512i a[4][4];
    for (int r = 0; r < 4; ++r)
      for (int j = 0; j < 4; ++j) a[r][j] = _mm512_load_si512(sums + (r * 4 + j) * 16);
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
      const char* from = pairs.from[half];
      const int64_t step = pairs.step[half];
      const int16_t* at = weights + (is_4 && kSubs == 2 ? 32 : 4) * half;
      __m512i* numbers = staged + 32 * half;
      if (place == Place::dense || place == Place::whole) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i, from += 2 * step) {
          if (!is_4 || i % 2) lines.one(is_4 ? i / 2 : i);
          add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers, a);
        }
        continue;
      }
      for (int64_t i = 0; i < pairs.n[half]; ++i, from += 2 * step, numbers += 4) {
        if (i % (is_4 ? 8 : 4) == 0) lines.four();
        add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers, a);
      }
    }
    for (int r = 0; r < 4; ++r)
      for (int j = 0; j < 4; ++j) _mm512_store_si512(sums + (r * 4 + j) * 16, a[r][j]);
  }

  template <bool is_4, int kSubs, Place place>
  static __attribute__((always_inline)) void add_pair(const char* from, int64_t step,
                                                      const int16_t* weights, int64_t i,
                                                      __m512i low, __m512i* numbers,
                                                      __m512i (&a)[4][4]) {
    constexpr __mmask16 kSecond = 0xFF00;  // the chunk's second group
    constexpr bool is_by_turns = is_4 && kSubs == 2;
    weights += is_by_turns ? i / 2 * 64 + i % 2 * 4 : i / 2 * 32 + i % 2 * 2;
    __m512i x[4];
    if (place == Place::stage) {
      for (int j = 0; j < 4; ++j) x[j] = _mm512_load_si512(numbers + j);
    } else {
      interleave<is_4, kSubs, place == Place::dense>(from, step, low, x);
    }
    if (place == Place::to_stage)
      for (int j = 0; j < 4; ++j) _mm512_store_si512(numbers + j, x[j]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r, weights += 8) {
      __m512i w = is_by_turns ? _mm512_broadcastq_epi64(_mm_loadu_si64(weights))
                              : _mm512_broadcastd_epi32(_mm_loadu_si32(weights));
      if (kSubs == 2 && !is_by_turns)
        w = _mm512_mask_broadcastd_epi32(w, kSecond, _mm_loadu_si32(weights + 4 * kTile));
      for (int j = 0; j < 4; ++j) a[r][j] = dot_pairs(a[r][j], x[j], w);
    }
  }

  template <bool is_4, int kSubs>
  void add_sums(int64_t quad, int64_t chunk, int64_t group) const {
    for (int64_t r = quad * 4; r < rows_ && r < quad * 4 + 4; ++r) {
      const float* steps = steps_ + r * v_groups_ + group;
      constexpr __mmask16 kSecond = is_4 ? 0xAAAA : 0xFF00;  // the chunk's second group
      Vec step = all(steps[0]);
      if (kSubs == 2) step = _mm512_mask_mov_ps(step, kSecond, all(steps[1]));
      __m512i whole[4];
      for (int j = 0; j < 4; ++j) whole[j] = _mm512_load_si512(sums_ + (r % 4 * 4 + j) * 16);
      // Where a sum was too large for 32 bits its difference is not.
      for (int j = 1; is_4 && j < 3; ++j)
        whole[j] = _mm512_sub_epi32(whole[j], _mm512_slli_epi32(whole[j + 1], 4));
      float* to = result(r) + chunk * 64;
      for (int j = 0; j < 4; ++j)
        store(to + 16 * j, fma(_mm512_cvtepi32_ps(whole[j]), step, load(to + 16 * j)));
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
