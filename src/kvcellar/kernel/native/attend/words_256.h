// The two products of words_512.h with vectors of 256 bits, of which there are 16.
//
// Logits: a vector is a pair of numbers of 2 queries, each 4 times, and meets that pair of 4 cells: 4
// queries and 16 cells at a time are 8 sums. Values: 4 rows and 16 numbers are 8 sums, which go through
// all cells of a tile before the next 16 numbers do.
//
// Only included by attend/attention.h.

#pragma once

#include "attend/words_base.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline __m256i load_whole(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store_whole(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

class Words : public WordsBase {
 public:
  Words(bool with_k, bool with_v, const Side& k, const Side& v, int64_t rows, int64_t k_pad, int64_t v_pad,
        const float* q, float factor, char* memory)
      : WordsBase(with_k, with_v, k, v, rows, v_pad, factor, kTile, 32, memory) {
    if (has_k) with_kind(k, [&](auto is_4, auto n_subs) { load_queries<is_4.of, n_subs.of>(q, k_pad); });
  }

  // s[row][c] of the n cells of `rows`, and of those up to the next multiple of 16; `tops`: the highest
  // of each row, in 4 parts.
  void logits(const TileRows& rows, int64_t n, float* s, float* tops, const Next& next) {
    load_affine<kKAffine>(k_groups_, rows, n, k_affine_);
    with_kind(k_, [&](auto is_4, auto n_subs) {
      const int64_t n_bytes = k_.packed_bytes();
      int64_t step;
      const auto sixteen = [&](int64_t c) {
        return rows.together(kKRows, c, smaller(n - c, 16), n_bytes, gathered_ + c * n_bytes, step);
      };
      // While 16 cells are multiplied, words are made of the 16 behind them: alone it would wait for its
      // stores. Behind the last ones it is the same again, for nothing.
      int16_t *staged = staged_, *other = staged_ + 16 * k_.dim;
      const char* from = sixteen(0);
      for (int64_t i = 0; i < k_.dim / 64 * 4; ++i)
        stage_four<is_4.of>(from + i / 4 * (is_4.of ? 32 : 64) + i % 4 * 4 * step, step, staged + i * 256);
      const Lines nothing = Next::nothing();
      for (int64_t c = 0; c < n; c += 16) {
        const Lines lines = next.turn(c / 16, k_.dim / 64 * (is_4.of ? 8 : 16));
        next.affine(kKAffine, c / 16);
        if (c + 16 < n) from = sixteen(c + 16);
        logits_of<is_4.of, n_subs.of, true>(0, c, staged, from, step, other, s, tops,
                                            c / 16 % quads_ ? nothing : lines);
        for (int64_t quad = 1; quad < quads_; ++quad)
          logits_of<is_4.of, n_subs.of, false>(quad, c, staged, from, step, other, s, tops,
                                               quad == c / 16 % quads_ ? lines : nothing);
        int16_t* const done = staged;
        staged = other;
        other = done;
      }
    });
  }

  // Its steps fetch as much as they have time for.
  bool fetches_evenly(const TileRows&, int64_t) const { return false; }

  // Logits s[row][c] of a tile to weights, up to the next multiple of 32; their sums and those of earlier
  // tiles are in `sums`, a vector for each row.
  void weigh(const float* s, const Maxima& maxima, float* sums, int64_t n, const Next&) {
    for (int64_t r = 0; r < rows_; ++r, s += kTile, sums += kLanes) {
      scale_results(r, maxima.factor[r]);
      set_steps(r, maxima.most[r]);
      const float base = maxima.base[r];
      const Vec total = v_groups_ == 1   ? weights_of<1>(r, s, base, n)
                        : v_groups_ == 2 ? weights_of<2>(r, s, base, n)
                                         : weights_of<kMaxGroups>(r, s, base, n);
      store(sums, fma(load(sums), all(maxima.factor[r]), total));
    }
  }

  // Sums of weight[row][c] * V[c], and of those of earlier tiles.
  void values(const TileRows& rows, int64_t n, const Next& next) {
    Places places;
    const int64_t n_bytes = v_.packed_bytes();
    for (int64_t i = 0; 32 * (i / 2) < n; ++i) {
      const int64_t m = smaller(n - 16 * i, 16);
      if (m > 0)
        places.at[i] = rows.together(kVRows, 16 * i, m, n_bytes, gathered_ + i * 16 * n_bytes, places.step[i]);
      else  // whose weights are 0
        places.at[i] = places.at[i - 1], places.step[i] = places.step[i - 1];
    }
    with_kind(v_, [&](auto is_4, auto n_subs) {
      const int64_t chunks = v_.dim / 64;
      Lines lines = Next::nothing();
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t pass = 0; pass < 4; ++pass) {
          // Of the 8 turns, each is as many halves of a pass as there are chunks.
          Lines second = lines;
          bool is_second = false;
          for (int64_t i = 0; i < 2; ++i) {
            const int64_t half = (chunk * 4 + pass) * 2 + i;
            if (!chunk) next.affine(kVAffine, half);
            if (half % chunks) continue;
            is_second = i;
            (i ? second : lines) = next.turn_of_values(half / chunks, chunks * (is_4.of ? 8 : 16));
          }
          for (int64_t quad = 0; quad < quads_; ++quad) {
            Lines nothing = Next::nothing();
            const bool is_turn = quad == (chunk * 4 + pass) % quads_;
            values_of<is_4.of, n_subs.of>(places, quad, chunk, pass, n, is_turn ? lines : nothing,
                                          is_turn && is_second ? &second : nullptr);
          }
        }
      }
    });
  }

  // All tiles' sums go to acc[row]: behind the last one.
  void finish(float* acc) {
    for (int64_t r = 0; has_v && r < rows_; ++r) {
      for (int64_t d = 0; d < v_.dim; d += 32) {
        Vec y[4];
        in_order(result(r) + d, y);
        float* to = acc + r * v_pad_ + d;
        for (int j = 0; j < 4; ++j) {
          const Vec x = _mm256_permute2f128_ps(y[j % 2 * 2], y[j % 2 * 2 + 1], 0x20);
          const Vec z = _mm256_permute2f128_ps(y[j % 2 * 2], y[j % 2 * 2 + 1], 0x31);
          store(to + 8 * j, add(load(to + 8 * j), j < 2 ? x : z));
        }
      }
    }
    add_biases(acc);
  }

 private:
  // Of 64 numbers, the first of the pair at place p; where the other one is. Where the t-th pair of the
  // one or the other 32 is.
  static constexpr int64_t first_of(bool is_4, int64_t p) {
    return is_4 ? (p / 8 + p % 2 * 4) * 8 + p / 2 % 4 : p / 16 * 32 + (p / 4 % 4 + p % 2 * 4) * 4 + p / 2 % 2;
  }
  static constexpr int64_t apart(bool is_4) { return is_4 ? 4 : 2; }
  static constexpr int64_t place_of(bool is_4, int64_t half, int64_t t) { return is_4 ? t * 2 + half : half * 16 + t; }

  template <bool is_4, int kSubs>
  void load_queries(const float* q, int64_t k_pad) {
    const int64_t chunks = k_.dim / 64;
    std::memset(queries_, 0, 2 * quads_ * 16 * k_.dim);
    std::memset(q_steps_, 0, 64 * quads_);
    std::memset(q_sums_, 0, 64 * quads_ * chunks * kSubs);
    const Vec sign = all(-0.f);
    for (int64_t r = 0; r < rows_; ++r) {
      const float* row = q + r * k_pad;
      const int64_t quad = r / 4, lane = r % 4;
      Vec most = all(0.f), zeros = most;
      for (int64_t d = 0; d < k_.dim; d += 8) {
        const Vec x = load(row + d);
        most = max(most, _mm256_andnot_ps(sign, x));
        zeros = add(zeros, mul(x, all(0.f)));
      }
      const float zero = sum(zeros);  // NaN if one is not finite
      const float top = highest(most);
      const Vec inverse = all(top > 0.f ? 32767.f / top : 0.f);
      const float step = factor_ * (top / 32767.f);
      put_fours(q_steps_ + quad * 16, lane, step);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        uint16_t words[64];
        for (int sub = 0; sub < kSubs; ++sub) {
          // Of the rounded numbers: their error then meets K rows, and not how far these are from 0.
          Vec whole = all(0.f);
          for (int64_t d = sub * 32; d < (sub + 1) * (64 / kSubs); d += 8) {
            const __m256i x = _mm256_cvtps_epi32(mul(load(row + chunk * 64 + d), inverse));
            const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(words + d), _mm_packs_epi32(low, high));
            whole = add(whole, _mm256_cvtepi32_ps(x));
          }
          const float total = step * sum(whole) + zero;
          put_fours(q_sums_ + ((chunk * quads_ + quad) * kSubs + sub) * 16, lane, total);
        }
        int16_t* to = query(chunk, quad) + lane * 8;
        for (int64_t p = 0; p < 32; ++p, to += 32) {
          const int64_t first = first_of(is_4, p);
          const uint32_t pair = words[first] | static_cast<uint32_t>(words[first + apart(is_4)]) << 16;
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_set1_epi32(static_cast<int>(pair)));
        }
      }
    }
  }

  // A chunk of 4 K rows as words, [place of a pair][cell].
  template <bool is_4>
  static inline __attribute__((always_inline)) void stage_four(const char* row, int64_t step, int16_t* to) {
    const __m256i low = _mm256_set1_epi16(is_4 ? 15 : 255);
    const auto put = [&](int64_t i, __m256i x) {
      int16_t* at = to + i * (is_4 ? 64 : 32);
      store_whole(at, _mm256_and_si256(x, low));
      if (is_4) {
        store_whole(at + 16, _mm256_and_si256(_mm256_srli_epi16(x, 4), low));
        store_whole(at + 32, _mm256_and_si256(_mm256_srli_epi16(x, 8), low));
        store_whole(at + 48, _mm256_srli_epi16(x, 12));
      } else {
        store_whole(at + 16, _mm256_srli_epi16(x, 8));
      }
    };
#pragma GCC unroll 2
    for (int64_t part = 0; part < (is_4 ? 1 : 2); ++part, row += 32) {
      const __m256i x = load_whole(row), y = load_whole(row + step);
      const __m256i xy0 = _mm256_unpacklo_epi32(x, y), xy1 = _mm256_unpackhi_epi32(x, y);
      const __m256i z = load_whole(row + 2 * step), w = load_whole(row + 3 * step);
      const __m256i zw0 = _mm256_unpacklo_epi32(z, w), zw1 = _mm256_unpackhi_epi32(z, w);
      put(part * 4, _mm256_unpacklo_epi64(xy0, zw0));
      put(part * 4 + 1, _mm256_unpackhi_epi64(xy0, zw0));
      put(part * 4 + 2, _mm256_unpacklo_epi64(xy1, zw1));
      put(part * 4 + 3, _mm256_unpackhi_epi64(xy1, zw1));
    }
  }

  // s[row][first ..] of 16 cells whose words are staged, [chunk][4 cells][place of a pair][cell], for the
  // 4 rows of a quad. `is_staging`: the 16 rows from `row` on, `step` bytes apart, go to `other`.
  template <bool is_4, int kSubs, bool is_staging>
  void logits_of(int64_t quad, int64_t first, const int16_t* words, const char* row, int64_t step, int16_t* other,
                 float* s, float* tops, const Lines& given) {
    constexpr int kEvery = is_4 ? 4 : 2;
    Lines lines = given;
    const int64_t chunks = k_.dim / 64;
    const float* affine = k_affine_ + first;  // of the chunk's first group
    for (int64_t chunk = 0, done = 0; chunk < chunks; ++chunk) {
      const int16_t* staged = one_base(words + chunk * 1024);
      const int16_t* q = one_base(query(chunk, quad));
      __m256i a[2][4];
      for (int half = 0; half < 2; ++half) {
        if (half == 0 || kSubs == 2)
          for (auto& of_two : a)
            for (__m256i& x : of_two) x = _mm256_setzero_si256();
#pragma GCC unroll 16
        for (int t = 0; t < 16; ++t) {
          if (is_staging && t % 8 == 0) {
            stage_four<is_4>(row, step, other);
            row += 4 * step;
            other += 256;
          }
          if (t % kEvery == kEvery - 1) lines.one(t / kEvery);
          const int64_t place = place_of(is_4, 0, t);
          const __m256i x = load_whole(q + place * 32), y = load_whole(q + place * 32 + 16);
#pragma GCC unroll 4
          for (int l = 0; l < 4; ++l) {
            const auto* from = reinterpret_cast<const __m128i*>(staged + l * 256 + place * 8);
            const __m256i z = _mm256_broadcastsi128_si256(_mm_loadu_si128(from));
            a[0][l] = dot_pairs(a[0][l], x, z);
            a[1][l] = dot_pairs(a[1][l], y, z);
          }
        }
        staged += place_of(is_4, 1, 0) * 8;
        q += place_of(is_4, 1, 0) * 32;
        if (is_staging && half == 1) row += (is_4 ? 32 : 64) - 16 * step;
        if (kSubs == 1 && half == 0) continue;
        const int64_t sub = kSubs == 2 ? half : 0;
        const bool is_first = chunk + sub == 0, is_last = chunk == chunks - 1 && half == 1;
        const float* scales = affine + sub * 2 * kTile;
        const float* sums = q_sums_ + ((chunk * quads_ + quad) * kSubs + sub) * 16;
        for (int k = 0; k < 2; ++k) {
          const Vec of_q = load(sums + k * 8), of_step = load(q_steps_ + quad * 16 + k * 8);
          Vec dots[4];
          for (int l = 0; l < 4; ++l) {
            const Vec scale = all_fours(scales + 4 * l), bias = all_fours(scales + kTile + 4 * l);
            const Vec more = is_first ? mul(bias, of_q) : fma(bias, of_q, load(parts_ + (k * 4 + l) * 8));
            dots[l] = fma(mul(_mm256_cvtepi32_ps(a[k][l]), scale), of_step, more);
          }
          if (!is_last) {
            for (int l = 0; l < 4; ++l) store(parts_ + (k * 4 + l) * 8, dots[l]);
            continue;
          }
          const int64_t row = quad * 4 + 2 * k;
          Vec top = load(tops + row * 4);
          for (int l = 0; l < 4; ++l) {
            top = max(top, dots[l]);
            store_fours(dots[l], s + row * kTile + first + 4 * l, kTile);
          }
          store(tops + row * 4, top);
        }
      }
      if ((done += 64) >= k_.group_size) {
        done = 0;
        affine += kSubs * 2 * kTile;
      }
    }
  }

  // Pairs of a chunk's numbers of 4 queries, each 4 times: [place][row][cell].
  int16_t* query(int64_t chunk, int64_t quad) const { return queries_ + (chunk * quads_ + quad) * 1024; }

  // Words of a quad's weights, [16 cells][row][pair of cells, in the order of packing].
  int16_t* weights(int64_t quad, int64_t g) const { return weights_ + (quad * v_groups_ + g) * 4 * kTile; }
  static constexpr int64_t place_of_pair(int64_t i) { return i % 2 + i / 2 % 2 * 4 + i / 4 * 2; }

  // For kGroups, or up to as many if these are the most.
  template <int kGroups>
  Vec weights_of(int64_t r, const float* s, float base, int64_t n) const {
    const int64_t n_groups = kGroups == kMaxGroups ? v_groups_ : kGroups;
    const float* steps = steps_ + r * n_groups;
    float* biases = biases_ + r * n_groups * 16;
    Vec total = all(0.f), bias[kGroups], inverse[kGroups];
    __m256i whole[kGroups];
    for (int64_t g = 0; g < n_groups; ++g) {
      bias[g] = load(biases + g * 16);
      inverse[g] = all(steps[g] > 0.f ? 1.f / steps[g] : 0.f);
      whole[g] = _mm256_setzero_si256();
    }
    int16_t* to = weights(r / 4, 0) + r % 4 * 16;
    for (int64_t c = 0; c < (n + 31) / 32 * 32; c += 16, to += 64) {
      const Vec p = exp2_below_1(sub(load(s + c), all(base)));
      const Vec q = exp2_below_1(sub(load(s + c + 8), all(base)));
      total = add(total, add(p, q));
      for (int64_t g = 0; g < n_groups; ++g) {
        const float* scales = v_affine_ + g * 2 * kTile + c;
        const __m256i x = _mm256_cvtps_epi32(mul(p, mul(inverse[g], load(scales))));
        const __m256i y = _mm256_cvtps_epi32(mul(q, mul(inverse[g], load(scales + 8))));
        store_whole(to + g * 4 * kTile, _mm256_packs_epi32(x, y));
        whole[g] = _mm256_add_epi32(whole[g], _mm256_add_epi32(x, y));
        bias[g] = fma(p, load(scales + kTile), bias[g]);
        bias[g] = fma(q, load(scales + kTile + 8), bias[g]);
      }
    }
    for (int64_t g = 0; g < n_groups; ++g)
      store(biases + g * 16, fma(_mm256_cvtepi32_ps(whole[g]), all(-middle() * steps[g]), bias[g]));
    return total;
  }

  // A tile's V rows, 16 at a time, for whole 32 cells.
  struct Places {
    const char* at[kTile / 16];
    int64_t step[kTile / 16];
  };

  // A chunk's numbers are 4 vectors of pairs of words, of int4 2 of pairs of four numbers each: all are
  // made in the first pass, which reads the rows, and kept for the others.
  template <bool is_4, int kSubs>
  void values_of(const Places& places, int64_t quad, int64_t chunk, int64_t pass, int64_t n, Lines& lines,
                 const Lines* second) const {
    const int64_t group = chunk * 64 / v_.group_size + (kSubs == 2 ? pass / 2 : 0);
    const int16_t* w = weights(quad, group);
    const int64_t kept = is_4 ? pass / 2 : pass;
    __m256i a[4][2];
    const int64_t offset = chunk * (is_4 ? 32 : 64);
    if (!is_4 && quads_ == 1) {
      pass % 2 ? add_pairs<is_4, Place::pool, true>(places, offset + pass / 2 * 32, w, n, lines, second, a)
               : add_pairs<is_4, Place::pool, false>(places, offset + pass / 2 * 32, w, n, lines, second, a);
    } else if (!pass && !quad) {
      add_pairs<is_4, Place::to_stage, true>(places, offset, w, n, lines, second, a);
    } else if (is_4 && pass % 2) {
      add_pairs<is_4, Place::stage, false>(places, kept * 16, w, n, lines, second, a);
    } else {
      add_pairs<is_4, Place::stage, true>(places, kept * 16, w, n, lines, second, a);
    }
    const float* steps = steps_ + quad * 4 * v_groups_ + group;
    float* to = result(quad * 4) + chunk * 64 + (is_4 ? (pass ^ 1) : pass) * 16;
#pragma GCC unroll 4
    for (int64_t r = 0; r < 4; ++r, to += v_.dim, steps += v_groups_) {
      __m256i x = a[r][0], y = a[r][1];
      if (is_4) {
        // Where a sum was too large for 32 bits its difference is not.
        int32_t* third = sums_ + (quad * 4 + r) * 8;
        if (pass % 2) {
          y = _mm256_sub_epi32(y, _mm256_slli_epi32(load_whole(third), 4));
        } else {
          store_whole(third, x);
          x = _mm256_sub_epi32(x, _mm256_slli_epi32(y, 4));
        }
      }
      const Vec step = all(*steps);
      store(to, fma(_mm256_cvtepi32_ps(x), step, load(to)));
      store(to + 8, fma(_mm256_cvtepi32_ps(y), step, load(to + 8)));
    }
  }

  // Where numbers come from: of two cells' all are kept if they will be wanted again.
  enum class Place { pool, to_stage, stage };

  // a[row][0 .. 1] = weights * V of 16 numbers. Of int4 these are every fourth one from the third and
  // fourth on, or from the first and second: the third and second ones have 16 times the next in them.
  template <bool is_4, Place place, bool is_high>
  void add_pairs(const Places& places, int64_t offset, const int16_t* w, int64_t n, Lines& given, const Lines* second,
                 __m256i (&sums)[4][2]) const {
    constexpr bool is_pool = place != Place::stage;
    constexpr int64_t kKept = is_4 ? 32 : 64;  // words of two cells
    constexpr int kEvery = is_4 ? 4 : 2;
    Lines lines = given;
    const __m256i low = _mm256_set1_epi16(is_4 ? 15 : 255);
    int16_t* at = values_ + (is_pool ? 0 : offset);
    __m256i a[4][2];
    for (auto& row : a)
      for (__m256i& x : row) x = _mm256_setzero_si256();
    for (int64_t c = 0; c < n; c += 32) {
      if (c == 64 && second) lines = *second;
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t step = is_pool ? places.step[c / 16 + half] : 0;
        const char* row = is_pool ? places.at[c / 16 + half] + offset : nullptr;
#pragma GCC unroll 8
        for (int64_t i = 0; i < 8; ++i) {
          if (i % kEvery == kEvery - 1) lines.one((half * 8 + i) / kEvery);
          __m256i both, x[2];
          if (is_pool) {
            const __m256i y = load_whole(row), z = load_whole(row + step);
            if (place == Place::pool) {
              both = is_high ? _mm256_unpackhi_epi16(y, z) : _mm256_unpacklo_epi16(y, z);
            } else if (is_4) {
              const __m256i of_y = _mm256_permute4x64_epi64(y, 0xd8);
              const __m256i of_z = _mm256_permute4x64_epi64(z, 0xd8);
              both = _mm256_unpacklo_epi16(of_y, of_z);
              store_whole(at + 16, _mm256_unpackhi_epi16(of_y, of_z));
            } else {
              const __m256i later_y = load_whole(row + 32), later_z = load_whole(row + step + 32);
              both = _mm256_unpacklo_epi16(y, z);
              store_whole(at + 16, _mm256_unpackhi_epi16(y, z));
              store_whole(at + 32, _mm256_unpacklo_epi16(later_y, later_z));
              store_whole(at + 48, _mm256_unpackhi_epi16(later_y, later_z));
            }
            if (place == Place::to_stage) store_whole(at, both);
            row += 2 * step;
          } else {
            both = load_whole(at);
          }
          at += kKept;
          if (is_4 && is_high) {
            x[0] = _mm256_srli_epi16(both, 8);
            x[1] = _mm256_srli_epi16(both, 12);
          } else {
            x[0] = _mm256_and_si256(both, low);
            x[1] = _mm256_srli_epi16(both, is_4 ? 4 : 8);
          }
#pragma GCC unroll 4
          for (int r = 0; r < 4; ++r) {
            int32_t pair;
            std::memcpy(&pair, w + r * 16 + 2 * place_of_pair(i), 4);
            const __m256i of = _mm256_set1_epi32(pair);
            for (int j = 0; j < 2; ++j) a[r][j] = dot_pairs(a[r][j], x[j], of);
          }
        }
        w += 64;
      }
    }
    given = lines;
    for (int r = 0; r < 4; ++r)
      for (int j = 0; j < 2; ++j) sums[r][j] = a[r][j];
  }

  // 32 of a row's sums as their numbers lie: y[i] is the i-th four, and the one 16 numbers on.
  void in_order(const float* from, Vec* y) const {
    const Vec a = load(from), b = load(from + 8), c = load(from + 16), d = load(from + 24);
    const Vec ab0 = _mm256_unpacklo_ps(a, b), ab1 = _mm256_unpackhi_ps(a, b);
    const Vec cd0 = _mm256_unpacklo_ps(c, d), cd1 = _mm256_unpackhi_ps(c, d);
    const bool is_4 = v_.dtype == Dtype::int4;
    y[0] = is_4 ? _mm256_shuffle_ps(ab0, cd0, 0x44) : ab0;
    y[1] = is_4 ? _mm256_shuffle_ps(ab0, cd0, 0xee) : ab1;
    y[2] = is_4 ? _mm256_shuffle_ps(ab1, cd1, 0x44) : cd0;
    y[3] = is_4 ? _mm256_shuffle_ps(ab1, cd1, 0xee) : cd1;
  }

  alignas(32) float parts_[8 * 8];  // logits of 4 rows and 16 cells, of the groups until now
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
