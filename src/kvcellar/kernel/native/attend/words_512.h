// Weights and values of int8 and int4 rows with AVX-512 and VNNI: two cells' numbers lie side by side, for the weights
// of both: 16 bits of about the largest one, times the cell's scale. Biases are added up by themselves.

#pragma once

#include "attend/words_512_logits.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

class Words : public WordLogits {
 public:
  using WordLogits::WordLogits;

  // Whether each of its steps can fetch a part of the next tile. What few rows wait for is memory, and with
  // steps that fetch nothing it waits too.
  bool fetches_evenly(const TileRows& rows, int64_t n) const {
    return quads_ == 1 && has_k && has_v && &rows.pool->k == &k_ && rows.is_run && n % 32 == 0 &&
           kLinesOfWeights % (v_.dim / 64) == 0;
  }

  // Logits s[row][c] of a tile to weights, up to the next multiple of 32; their sums and those of earlier
  // tiles are in `sums`, a vector for each row.
  void weigh(float* s, const Maxima& maxima, float* sums, int64_t n, const Next& next) {
    for (int64_t r = 0; r < rows_; ++r) scale_results(r, maxima.factor[r]);
    for (int64_t r = 0; r < rows_; ++r) set_steps(r, maxima.most[r]);
    const char* line = next.is_even() ? next.first(kVRows) : nullptr;
    for (int64_t quad = 0; quad < quads_; ++quad) {
      const Quad of{quad, s + quad * 4 * kTile, maxima.top + quad * 4, maxima.most + quad * 4, line};
      is_weight_by_turns() ? weigh_groups<2>(of, maxima, sums, n) : weigh_groups<1>(of, maxima, sums, n);
    }
  }

  // Sums of weight[row][c] * V[c], and of those of earlier tiles.
  void values(const TileRows& rows, int64_t n, const Next& next) {
    with_kind(v_, [&](auto is_4, auto n_subs) {
      const char* line = next.is_even() ? next.first(kVRows) + n / 16 * kLinesOfWeights * 64 : nullptr;
      for (int64_t chunk = 0; chunk < v_.dim / 64; ++chunk)
        line ? values_evenly<is_4.of, n_subs.of>(rows, chunk, n, next, line)
             : values_of_chunk<is_4.of, n_subs.of>(rows, chunk, n, next);
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

  // Rows of V that follow on each other, and what is fetched with them: for each 16 cells so many bytes of
  // scales and biases, and lines in all slots but those whose numbers from 1 on have none of the bits of
  // `fetching`.
  struct InOrder {
    const char* from;
    int64_t step;
    const char* affine;
    int64_t n_affine;
    const char* line;
    int64_t fetching;
  };

  // So many lines are fetched for each 16 cells while weights are made.
  static constexpr int64_t kLinesOfWeights = 4;

  // Logits of 4 rows, the highest of each, and what is its weight beside earlier tiles'.
  struct Quad {
    int64_t index;
    float* s;
    const float *top, *most;
    const char* line;  // to fetch from there on, or none
  };

  template <int kGroups>
  void weigh_groups(const Quad& of, const Maxima& maxima, float* sums, int64_t n) {
    Vec totals[4];
    weigh_groups<kGroups, true>(of, 0, n, totals);
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t r = of.index * 4 + i;
      float* sum = sums + r * kLanes;
      if (r < rows_) store(sum, fma(load(sum), all(maxima.factor[r]), mul(totals[i], all(maxima.most[r]))));
    }
    for (int64_t g = kGroups; g < v_groups_; g += kGroups) weigh_groups<kGroups, false>(of, g, n, totals);
  }

  // Weights of 4 rows, 2**(s[c] - top), times the scales of a group, or of two by turns, from the g-th
  // on; the first time they take the place of the logits, and `totals` are their sums.
  template <int kGroups, bool is_first>
  __attribute__((noinline)) void weigh_groups(const Quad& of, int64_t g, int64_t n, Vec* totals) const {
    constexpr bool is_by_turns = kGroups == 2;
    const int64_t quad = of.index;
    const float* affine = v_affine_ + g * 2 * kTile;
    float* s = of.s;
    int16_t* to = weights(quad * 4, g);
    const bool is_kept = is_first && v_groups_ > kGroups;
    const char* line = of.line;
    Vec total[4], bias[4][kGroups], inverse[kGroups];
    __m512i whole[4];
    for (int64_t j = 0; j < kGroups; ++j) inverse[j] = all(largest_[g + j] > 0.f ? 32767.f / largest_[g + j] : 0.f);
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r) {
      total[r] = all(0.f);
      for (Vec& x : bias[r]) x = all(0.f);
      whole[r] = _mm512_setzero_si512();
    }
    for (int64_t c = 0; c < n; c += 32, s += 32, affine += 32, to += is_by_turns ? 64 : 32) {
      Vec scale[kGroups][2];
#pragma GCC unroll 2
      for (int64_t j = 0; j < kGroups; ++j)
        for (int64_t i = 0; i < 2; ++i) scale[j][i] = mul(inverse[j], load(affine + j * 2 * kTile + 16 * i));
#pragma GCC unroll 4
      for (int64_t r = 0; r < 4; ++r) {
        float* at = s + r * kTile;
        Vec p = load(at), q = load(at + 16);
        if (is_first) {
          static_assert(kLinesOfWeights == 4);  // two for each row of 32 cells
          if (line) fetch(line), fetch(line + 64), line += 128;
          p = exp2_rough(sub(p, all(of.top[r])));
          q = exp2_rough(sub(q, all(of.top[r])));
          total[r] = add(total[r], add(p, q));
          if (is_kept) store(at, p), store(at + 16, q);
        }
        __m512i words[kGroups];
#pragma GCC unroll 2
        for (int64_t j = 0; j < kGroups; ++j) {
          words[j] = low_words(fma(p, scale[j][0], all(kWhole)), fma(q, scale[j][1], all(kWhole)));
          const float* biases = affine + j * 2 * kTile + kTile;
          bias[r][j] = fma(p, load(biases), bias[r][j]);
          bias[r][j] = fma(q, load(biases + 16), bias[r][j]);
        }
        const __m512i ones = all_ints(0x10001);
        if (is_by_turns) {
          const __m512i low = _mm512_unpacklo_epi32(words[0], words[kGroups - 1]);
          const __m512i high = _mm512_unpackhi_epi32(words[0], words[kGroups - 1]);
          store_ints(to + r * 2 * kTile, low);
          store_ints(to + r * 2 * kTile + 32, high);
          whole[r] = dot_pairs(dot_pairs(whole[r], low, ones), high, ones);
        } else {
          store_ints(to + r * kTile, words[0]);
          whole[r] = dot_pairs(whole[r], words[0], ones);
        }
      }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r) {
      totals[r] = total[r];
      for (int64_t j = 0; j < kGroups; ++j) {
        Vec sum = _mm512_cvtepi32_ps(whole[r]);
        if (is_by_turns) sum = _mm512_mask_mov_ps(all(0.f), j ? 0xAAAA : 0x5555, sum);
        const int64_t row = quad * 4 + r;
        float* to_bias = biases_ + (row * v_groups_ + g + j) * 16;
        const Vec tile = fma(sum, all(-middle() / 32767.f * largest_[g + j]), bias[r][j]);
        store(to_bias, fma(tile, all(of.most[r]), load(to_bias)));
      }
    }
  }

  // Added to a number below 2**15 this leaves the nearest integer in the lowest 16 bits.
  static constexpr float kWhole = 3 << 22;
  // Those of both vectors, of 4 lanes each by turns.
  static __m512i low_words(Vec x, Vec y) {
    struct Order {
      uint16_t of[32];
      constexpr Order() : of{} {
        for (int i = 0; i < 32; ++i) of[i] = static_cast<uint16_t>(i / 8 * 8 + i % 4 * 2 + i % 8 / 4 * 32);
      }
    };
    alignas(64) static constexpr Order order;
    return _mm512_permutex2var_epi16(_mm512_castps_si512(x), _mm512_load_si512(order.of), _mm512_castps_si512(y));
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
      const __m512i both = _mm512_permutexvar_epi16(_mm512_load_si512(order.of), two_rows(row, step, is_dense));
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

  // Of rows that follow on each other, where lines are fetched evenly, those from `line` on.
  template <bool is_4, int kSubs>
  void values_evenly(const TileRows& rows, int64_t chunk, int64_t n, const Next& next, const char*& line) const {
    constexpr int64_t kSlots = is_4 ? 8 : 16;  // of 16 cells
    const int64_t step = rows.stride[kVRows];
    const InOrder place{rows.first[kVRows][0] + chunk * (is_4 ? 32 : 64),
                        step,
                        next.first(kVAffine),
                        chunk ? 0 : 16 * v_.affine_bytes(),
                        line,
                        kSlots / (kLinesOfWeights / (v_.dim / 64)) - 1};
    const int16_t* of = weights(0, chunk * 64 / v_.group_size);
    line = is_4 && step == 32 ? add_pairs<is_4, kSubs, is_4 ? Place::dense : Place::whole>(n, of, 0, chunk, place)
                              : add_pairs<is_4, kSubs, Place::whole>(n, of, 0, chunk, place);
  }

  template <bool is_4, int kSubs>
  void values_of_chunk(const TileRows& rows, int64_t chunk, int64_t n, const Next& next) const {
    static_assert(kTile * 32767 * 255 < 1ll << 31);  // of int8; int4's are smaller
    const int64_t n_bytes = v_.packed_bytes(), n_chunks = v_.dim / 64, first_turn = chunk * (kTile / 16);
    for (int64_t quad = 0; quad < quads_; ++quad) {
      // A turn's lines are as many as 16 cells of all chunks fetch: so each chunk's have a part.
      Lines lines = Next::nothing();
      int64_t turn = first_turn / n_chunks, part = first_turn % n_chunks, fetching = 0;
      const auto place_of = [&](int64_t c) __attribute__((always_inline)) {
        Sixteen found;
        char* room = gathered_ + c * n_bytes;
        found.from = rows.together(kVRows, c, smaller(n - c, 16), n_bytes, room, found.step) + chunk * (is_4 ? 32 : 64);
        if (fetching == quad) {
          if (!chunk) next.affine(kVAffine, c / 16);
          if (part == 0 || c % 32 == 0) lines = next.turn_of_values(turn, n_chunks * (is_4 ? 8 : 16));
          found.lines = lines;
          found.lines.at += part * (is_4 ? 2 : 4) * lines.step;
        } else {
          found.lines = Next::nothing();
        }
        if (++part == n_chunks) part = 0, ++turn;
        if (c % 32 && ++fetching == quads_) fetching = 0;
        return found;
      };
      const int16_t* of = weights(quad * 4, chunk * 64 / v_.group_size);  // the chunk's first group
      if (quad)
        add_pairs<is_4, kSubs, Place::stage>(n, of, quad, chunk, place_of);
      else if (quads_ > 1)
        add_pairs<is_4, kSubs, Place::to_stage>(n, of, quad, chunk, place_of);
      else if (n % 32)
        add_pairs<is_4, kSubs, Place::pool>(n, of, quad, chunk, place_of);
      else if (is_4 && rows.stride[kVRows] == 32)
        add_pairs<is_4, kSubs, is_4 ? Place::dense : Place::whole>(n, of, quad, chunk, place_of);
      else
        add_pairs<is_4, kSubs, Place::whole>(n, of, quad, chunk, place_of);
    }
  }

  // Results of 4 rows += weights * V of n cells, of a chunk; the next line in order. A function of its own, so
  // that the compiler keeps the sums in registers.
  template <bool is_4, int kSubs, Place place, class PlaceOf>
  __attribute__((noinline)) const char* add_pairs(int64_t n, const int16_t* weights, int64_t quad, int64_t chunk,
                                                  const PlaceOf& place_of) const {
    constexpr bool is_in_order = std::is_same_v<PlaceOf, InOrder>;
    const __m512i low = kept(_mm512_set1_epi16(15));  // not made again each time
    auto* numbers = reinterpret_cast<__m512i*>(values_);
    __m512i a[4][4];
#pragma GCC unroll 4
    for (auto& of_row : a)
#pragma GCC unroll 4
      for (__m512i& x : of_row) x = _mm512_setzero_si512();
    InOrder in_order{};
    if constexpr (is_in_order) in_order = place_of;
    const auto fetch_slot = [&](int64_t slot) __attribute__((always_inline)) {
      if (!((slot + 1) & in_order.fetching)) return;
      fetch(in_order.line);
      in_order.line += 64;
    };
    for (int64_t c = 0; c < n; weights += is_4 && kSubs == 2 ? 64 : 32) {
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; ++half, c += 16, numbers += 32) {
        constexpr bool is_whole = place == Place::dense || place == Place::whole;
        if (!is_whole && c >= n) break;
        Sixteen cells;
        if constexpr (is_in_order) {
          for (int64_t i = 0; i < in_order.n_affine; i += 64, in_order.affine += 64) fetch(in_order.affine);
          cells.from = in_order.from;
          cells.step = in_order.step;
          in_order.from += 16 * in_order.step;
        } else {
          cells = place_of(c);
        }
        Lines lines = cells.lines;
        const char* from = cells.from;
        const int64_t step = cells.step;
        const int16_t* at = weights + (is_4 && kSubs == 2 ? 32 : 4) * half;
        if (is_whole) {
#pragma GCC unroll 8
          for (int64_t i = 0; i < 8; ++i, from += 2 * step) {
            for (int64_t j = is_4 ? i : 2 * i; j <= (is_4 ? i : 2 * i + 1); ++j)
              is_in_order ? fetch_slot(j) : lines.one(j);
            add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers, a);
          }
          continue;
        }
        for (int64_t i = 0; i < (smaller(n - c, 16) + 1) / 2; ++i, from += 2 * step) {
          if (i % (is_4 ? 4 : 2) == 0) lines.four();
          add_pair<is_4, kSubs, place>(from, step, at, i, low, numbers + 4 * i, a);
        }
      }
    }
    add_sums<is_4, kSubs>(quad, chunk, a);
    return in_order.line;
  }

  template <bool is_4, int kSubs, Place place>
  static __attribute__((always_inline)) void add_pair(const char* from, int64_t step, const int16_t* weights, int64_t i,
                                                      __m512i low, __m512i* numbers, __m512i (&a)[4][4]) {
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
      if (kSubs == 2 && !is_by_turns) w = _mm512_mask_broadcastd_epi32(w, kSecond, _mm_loadu_si32(weights + 4 * kTile));
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
      for (int j = 1; j < (is_4 ? 3 : 0); ++j) a[r][j] = _mm512_sub_epi32(a[r][j], _mm512_slli_epi32(a[r][j + 1], 4));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) store(to + 16 * j, fma(_mm512_cvtepi32_ps(a[r][j]), step, load(to + 16 * j)));
    }
  }

  // A chunk's sums in the order of numbers.
  void in_order(const float* from, __m512* y) const {
    __m512 x[4];
    for (int j = 0; j < 4; ++j) x[j] = load(from + 16 * j);
    if (v_.dtype == Dtype::int4) {
      const __m512i one_behind_other = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
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
