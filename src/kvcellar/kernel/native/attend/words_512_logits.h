// Logits of int8 and int4 rows with AVX-512 and VNNI: 32 bits of 16 cells' rows lie side by side and meet the same
// numbers of one query: a lane is a cell, and nothing is left to add up across lanes. Numbers come apart into words by
// shifts alone, so that those of a pair are 2 or 4 places apart; queries are 16 bits of about the largest one, in the
// same order. Scale and bias come in afterwards. Up to 4 rows meet int8 as it lies and int4 as bytes, each of their
// numbers as two bytes.

#pragma once

#include "attend/words_base.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// a[i] + x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1].
inline __m512i dot_pairs(__m512i a, __m512i x, __m512i y) {
#if defined(KVC_VNNI) && !defined(KVC_EMULATED)
  // For the intrinsic function GCC copies every sum there and back.
  __asm__("vpdpwssd %2, %1, %0" : "+v"(a) : "v"(x), "v"(y));
  return a;
#else
  return _mm512_add_epi32(a, _mm512_madd_epi16(x, y));
#endif
}

// a[i] + x[4 i] * y[4 i] + ... + x[4 i + 3] * y[4 i + 3], of bytes of which those of y are signed.
inline __m512i dot_fours(__m512i a, __m512i x, __m512i y) {
#if !defined(KVC_EMULATED)
  __asm__("vpdpbusd %2, %1, %0" : "+v"(a) : "v"(x), "v"(y));
  return a;
#else
  return _mm512_dpbusd_epi32(a, x, y);
#endif
}

// Of each 4 lanes the sums: those of a, b, c and d.
inline __m512i sum_fours(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

// Two rows of 32 bytes `step` bytes apart; `is_dense`: 32.
inline __m512i two_rows(const char* row, int64_t step, bool is_dense) {
  return is_dense ? _mm512_loadu_si512(row) : two_halves(row, row + step);
}

class WordLogits : public WordsBase {
 public:
  WordLogits(bool with_k, bool with_v, const Side& k, const Side& v, int64_t rows, int64_t k_pad, int64_t v_pad,
             const float* q, float factor, char* memory)
      : WordsBase(with_k, with_v, k, v, rows, v_pad, factor, kTile, 32, memory) {
    if (has_k) load_queries(q, k_pad);
  }

  // s[row][c] of the n cells of `rows`, and of those up to the next multiple of 16 or 32; `tops`: the
  // highest of each row, in 4 parts.
  void logits(const TileRows& rows, int64_t n, float* s, float* tops, const Next& next) {
    const bool are_in_order = has_keys_in_order(rows, n), in_row = !is_fetched_far && next.is_even();
    if (!are_in_order || k_.dim != 64) load_affine<kKAffine>(k_groups_, rows, n, k_affine_);
    for (int64_t r = 0; r < quads_ * 4; ++r) store(tops_ + r * 16, all(kMinusInfinity));
    with_kind(k_, [&](auto is_4, auto n_subs) {
      if (are_in_order && in_row)
        k_.dim == 64 ? logits_in_order<is_4.of, n_subs.of, 1, true>(rows, n, s, next)
                     : logits_in_order<is_4.of, n_subs.of, 2, true>(rows, n, s, next);
      else if (are_in_order)
        k_.dim == 64 ? logits_in_order<is_4.of, n_subs.of, 1, false>(rows, n, s, next)
                     : logits_in_order<is_4.of, n_subs.of, 2, false>(rows, n, s, next);
      else if (quads_ == 1)
        logits_of_few<is_4.of, n_subs.of>(rows, n, s, next);
      else
        for (int64_t c = 0; c < n; c += 32) logits_of_32<is_4.of, n_subs.of>(rows, c, n, s, next);
    });
    for (int64_t quad = 0; quad < quads_; ++quad) {
      const float* top = tops_ + quad * 64;
      store(tops + quad * 16, highest_fours(load(top), load(top + 16), load(top + 32), load(top + 48)));
    }
  }

 protected:
  // Of 64 numbers, the first of the t-th pair of the one or the other 32; where the other one of it is.
  static constexpr int64_t first_of(bool is_4, int64_t half, int64_t t) {
    return half * 32 + (is_4 ? t / 4 * 8 + t % 4 : t / 2 * 4 + t % 2);
  }
  static constexpr int64_t apart(bool is_4) { return is_4 ? 4 : 2; }

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
      const __m512 inverse = all(top > 0.f ? kHighestQuery / top : 0.f);
      const float step = factor_ * (top / kHighestQuery);
      put_fours(q_steps_ + quad * 16, lane, step);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        __m512i x[4];
        for (int i = 0; i < 4; ++i) x[i] = _mm512_cvtps_epi32(mul(load(row + chunk * 64 + 16 * i), inverse));
        // Of the rounded numbers: their error then meets K rows, and not how far these are from 0.
        for (int sub = 0; sub < kSubs; ++sub) {
          __m512i whole = _mm512_add_epi32(x[2 * sub], x[2 * sub + 1]);
          if (kSubs == 1) whole = _mm512_add_epi32(whole, _mm512_add_epi32(x[2], x[3]));
          const float sum = step * static_cast<float>(_mm512_reduce_add_epi32(whole)) + zero;
          put_fours(q_sums_ + ((chunk * quads_ + quad) * kSubs + sub) * 16, lane, sum);
        }
        if (is_by_bytes()) {
          alignas(64) int8_t terms[2][64];
          for (int i = 0; i < 4; ++i) {
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x[i], _mm512_set1_epi32(128)), 8);
            const __m512i low = _mm512_sub_epi32(x[i], _mm512_slli_epi32(high, 8));
            _mm_store_si128(reinterpret_cast<__m128i*>(terms[0]) + i, _mm512_cvtepi32_epi8(high));
            _mm_store_si128(reinterpret_cast<__m128i*>(terms[1]) + i, _mm512_cvtepi32_epi8(low));
          }
          for (int term = 0; term < 2; ++term)
            is_4 ? put_nibbles(terms[term], nibble_query(chunk) + lane * 2 + term)
                 : put_bytes(terms[term], reinterpret_cast<__m128i*>(query(chunk, quad)) + lane + 16 * term);
          continue;
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

  // A query's numbers are 256 times one byte and another byte.
  static constexpr float kHighestQuery = 127 * 256 + 127;

  // Whether numbers are multiplied as bytes: where 4 rows meet them once. For more rows making words once takes
  // less than adding up lanes.
  bool is_by_bytes() const { return quads_ == 1; }

  // Sums of 64 products of 4 rows, a lane for each of 16 cells: of the one and of the other 32, or of all.
  // `kStep`: that of rows where it is known, else 0; `in_row`: whether lines to fetch are in a row.
  template <int kSubs, int kStep, bool in_row>
  static __attribute__((always_inline)) void sums_of_bytes(const __m512i* q, const char* from, int64_t any_step,
                                                           Lines& lines, __m512i (&dot)[2][1][4]) {
    const int64_t step = kStep ? kStep : any_step;
    __m512i fours[kSubs][4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      __m512i a[kSubs][4];
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j, from += step) {
        in_row ? lines.in_row(4 * i + j) : lines.one(4 * i + j);
#pragma GCC unroll 2
        for (int sub = 0; sub < kSubs; ++sub) {
          constexpr int kPieces = 4 / kSubs;
          __m512i x[kPieces], sum = _mm512_setzero_si512();
#pragma GCC unroll 4
          for (int p = 0; p < kPieces; ++p)
            sum = dot_fours(sum, x[p] = all_16_bytes(from + (sub * kPieces + p) * 16), q[sub * kPieces + p]);
          sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 4
          for (int p = 0; p < kPieces; ++p) sum = dot_fours(sum, x[p], q[4 + sub * kPieces + p]);
          a[sub][j] = sum;
        }
      }
      for (int sub = 0; sub < kSubs; ++sub) fours[sub][i] = sum_fours(a[sub][0], a[sub][1], a[sub][2], a[sub][3]);
    }
    for (int sub = 0; sub < kSubs; ++sub) {
      const __m512i(&x)[4] = fours[sub];  // [row][cell]
      const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
      const __m512i c = _mm512_shuffle_i32x4(x[2], x[3], 0x44), d = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
      dot[sub][0][0] = _mm512_shuffle_i32x4(a, c, 0x88);
      dot[sub][0][1] = _mm512_shuffle_i32x4(a, c, 0xdd);
      dot[sub][0][2] = _mm512_shuffle_i32x4(b, d, 0x88);
      dot[sub][0][3] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
  }

  // The same of int4. 32 bits of each of 8 rows lie side by side, of both halves of their numbers, which come
  // apart into bytes and meet a vector for each row and term of its numbers: a lane is the half of a cell.
  template <int kStep, bool in_row>
  static __attribute__((always_inline)) void sums_of_nibbles(const __m512i* q, const char* from, int64_t any_step,
                                                             Lines& lines, __m512i (&dot)[2][1][4]) {
    const int64_t step = kStep ? kStep : any_step;
    const __m512i low = kept(_mm512_set1_epi8(15));
    __m512i x[2][4], sums[2][4][2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      __m512i y[4];
      for (int64_t j = 0; j < 4; ++j) y[j] = two_rows(from + (8 * i + 2 * j) * step, step, step == 32);
      quarters_of_32(y, x[i]);
      for (auto& row : sums[i])
        for (__m512i& sum : row) sum = _mm512_setzero_si512();
    }
#pragma GCC unroll 8
    for (int64_t j = 0; j < 8; ++j) {
      in_row ? lines.in_row(j) : lines.one(j);
      const __m512i a = nibbles(x[0][j / 2], j % 2, low), b = nibbles(x[1][j / 2], j % 2, low);
#pragma GCC unroll 8
      for (int64_t k = 0; k < 8; ++k, ++q) {
        const __m512i of_row = _mm512_load_si512(q);
        sums[0][k / 2][k % 2] = dot_fours(sums[0][k / 2][k % 2], a, of_row);
        sums[1][k / 2][k % 2] = dot_fours(sums[1][k / 2][k % 2], b, of_row);
      }
    }
    for (int r = 0; r < 4; ++r) {
      __m512i both[2];
      for (int i = 0; i < 2; ++i) both[i] = _mm512_add_epi32(_mm512_slli_epi32(sums[i][r][0], 8), sums[i][r][1]);
      part_rows(both[0], both[1], dot[0][0][r], dot[1][0][r]);
    }
  }

  static __m512i nibbles(__m512i bytes, bool upper, __m512i low) {
    return _mm512_and_si512(upper ? _mm512_srli_epi16(bytes, 4) : bytes, low);
  }

  // Of each quarter of 4 vectors the first 32 bits, the second, the third and the fourth.
  static void quarters_of_32(const __m512i* x, __m512i* y) {
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    y[0] = _mm512_unpacklo_epi64(a, c);
    y[1] = _mm512_unpackhi_epi64(a, c);
    y[2] = _mm512_unpacklo_epi64(b, d);
    y[3] = _mm512_unpackhi_epi64(b, d);
  }

  // Of quarters that are the halves of 4 rows of even numbers and those of 4 of odd ones, twice: all rows' first
  // halves in order, and the others.
  static void part_rows(__m512i x, __m512i y, __m512i& first, __m512i& second) {
    const __m512i low = _mm512_set_epi32(27, 19, 26, 18, 25, 17, 24, 16, 11, 3, 10, 2, 9, 1, 8, 0);
    const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(4));
    first = _mm512_permutex2var_epi32(x, low, y);
    second = _mm512_permutex2var_epi32(x, high, y);
  }

  // Pairs of a chunk's numbers of 4 queries: [pair][row]. By bytes: [upper or lower][16 numbers][row][16].
  int32_t* query(int64_t chunk, int64_t quad) const {
    return reinterpret_cast<int32_t*>(queries_) + (chunk * quads_ + quad) * 128;
  }

  // Of int4 by bytes: [32 bits of both halves][lower or upper 4 bits][row][term], where other rows' words would
  // be staged.
  __m512i* nibble_query(int64_t chunk) const { return reinterpret_cast<__m512i*>(staged_) + chunk * 64; }

  // A term of a chunk's numbers of one row.
  static void put_bytes(const int8_t* numbers, __m128i* to) {
    for (int i = 0; i < 4; ++i)
      _mm_storeu_si128(to + 4 * i, _mm_load_si128(reinterpret_cast<const __m128i*>(numbers) + i));
  }
  static void put_nibbles(const int8_t* numbers, __m512i* to) {
    const __m512i all_64 = _mm512_load_si512(numbers);
    for (int i = 0; i < 8; ++i) {
      const __m256i of_32 = _mm512_cvtepi16_epi8(i % 2 ? _mm512_srli_epi16(all_64, 8) : all_64);
      const int first = i / 2, second = 4 + first;
      const __m512i place = _mm512_set_epi32(second, second, second, second, first, first, first, first, second, second,
                                             second, second, first, first, first, first);
      _mm512_store_si512(to + 8 * i, _mm512_permutexvar_epi32(place, _mm512_castsi256_si512(of_32)));
    }
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
    for (auto& z : y) quarters_of_32(z, z);
    for (int j = 0; j < 4; ++j) {
      if (is_4) {
        part_rows(y[0][j], y[1][j], x[0][j], x[1][j]);
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
    found.lines = next.turn_of_logits(c / 16, n_lines);
    next.affine(kKAffine, c / 16);
    found.from = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(), room, found.step);
    return found;
  }

  // x and the part of a chunk in 16 cells' logits of a row: of the sums of the one and of the other half, and `affine`,
  // scale and bias of each group. `sum`: the row's numbers' own, of the second half 16 places on.
  template <int kSubs>
  static __attribute__((always_inline)) Vec add_scaled(Vec x, __m512i first, __m512i second, const Vec* affine,
                                                       const float* sum, float step) {
    const __m512i whole = kSubs == 1 ? _mm512_add_epi32(first, second) : first;
    Vec dots = mul(_mm512_cvtepi32_ps(whole), affine[0]);
    x = fma(affine[1], all(sum[0]), x);
    if constexpr (kSubs == 2) {
      dots = fma(_mm512_cvtepi32_ps(second), affine[2], dots);
      x = fma(affine[3], all(sum[16]), x);
    }
    return fma(dots, all(step), x);
  }

  // Whether K rows follow on each other, 16 and 16, and meet 4 queries.
  bool has_keys_in_order(const TileRows& rows, int64_t n) const {
    return quads_ == 1 && rows.is_run && n % 16 == 0 && (k_.dim == 64 || k_.dim == 128) &&
           rows.stride[kKRows] == k_.packed_bytes() && rows.stride[kKAffine] == k_.affine_bytes();
  }

  // Logits of those: with what is known nothing is looked up. Of rows of one chunk scales and biases too are read
  // where they lie. `in_row`: whether what is fetched meanwhile follows on each other as well.
  template <bool is_4, int kSubs, int kChunks, bool in_row>
  __attribute__((noinline)) void logits_in_order(const TileRows& rows, int64_t n, float* s, const Next& next) const {
    constexpr int64_t kStep = kChunks * (is_4 ? 32 : 64), kLines = kStep / 4;  // of a row; of 16
    const char *from = rows.first[kKRows][0], *affine = rows.first[kKAffine][0];
    const float *parted = k_affine_, *sums = q_sums_, *steps = q_steps_;
    const int64_t of_chunk = 64 / k_.group_size * 2 * kTile, n_affine = 16 * k_.affine_bytes();
    const char *line = in_row ? next.first(kKRows) : nullptr, *affine_line = in_row ? next.first(kKAffine) : nullptr;
    const auto* bytes = reinterpret_cast<const __m512i*>(queries_);
    const __m512i* nibbles = nibble_query(0);
    Vec highest[4];
    for (Vec& x : highest) x = all(kMinusInfinity);
    for (int64_t c = 0; c < n; c += 16, from += 16 * kStep, s += 16, parted += 16, affine += 64 * kSubs) {
      Vec logit[4];
      for (Vec& x : logit) x = all(0.f);
      Lines lines{line, 64, 128, 192, 256, 0};
      if (!in_row) lines = next.turn_of_logits(c / 16, kLines);
#pragma GCC unroll 2
      for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
        __m512i dot[2][1][4];
        for (__m512i& x : dot[1][0]) x = _mm512_setzero_si512();
        if constexpr (is_4)
          sums_of_nibbles<kStep, in_row>(nibbles + chunk * 64, from + chunk * 32, kStep, lines, dot);
        else
          sums_of_bytes<kSubs, kStep, in_row>(bytes + chunk * 8, from + chunk * 64, kStep, lines, dot);
        if (in_row) lines.at = line += 64 * kLines / kChunks;
        Vec of_16[2 * kSubs];  // scale and bias of each group
        if (kChunks == 1)
          part_affine<kSubs>(affine, of_16);
        else
          for (int64_t i = 0; i < 2 * kSubs; ++i) of_16[i] = load(parted + chunk * of_chunk + i * kTile);
        const float* sum = sums + chunk * kSubs * 16;
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r)
          logit[r] = add_scaled<kSubs>(logit[r], dot[0][0][r], dot[1][0][r], of_16, sum + 4 * r, steps[4 * r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        store(s + r * kTile, logit[r]);
        highest[r] = max(highest[r], logit[r]);
      }
      if (!in_row)
        next.affine(kKAffine, c / 16);
      else
        for (int64_t i = 0; i < n_affine; i += 64, affine_line += 64) fetch(affine_line);
    }
    for (int r = 0; r < 4; ++r) store(tops_ + r * 16, highest[r]);
  }

  template <bool is_4, int kSubs>
  void logits_of_few(const TileRows& rows, int64_t n, float* s, const Next& next) const {
    logits_of<is_4, kSubs, false>(0, 0, n, s, [&](int64_t c) __attribute__((always_inline)) {
      return sixteen(rows, c, n, gathered_ + c * k_.packed_bytes(), next);
    });
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
      logits_of<is_4, kSubs, true>(quad, c, c + 16, s, [&](int64_t) { return staged; });
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

  // Logits from `cell` to `stop` for the rows of a quad: 16 at a time, or the 32 that are staged.
  template <bool is_4, int kSubs, bool is_staged, class PlaceOf>
  __attribute__((noinline)) void logits_of(int64_t quad, int64_t cell, int64_t stop, float* s,
                                           const PlaceOf& place_of) const {
    float* tops = tops_ + quad * 64;
    Vec highest[4];
    for (int r = 0; r < 4; ++r) highest[r] = load(tops + r * 16);
    s += quad * 4 * kTile;
    for (; cell < stop; cell += 16) {
      __m512 result[is_staged ? 2 : 1][4];
      logits_at<is_4, kSubs, is_staged>(place_of(cell), quad, cell, result);
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
      if constexpr (!is_staged && is_4) {
        sums_of_nibbles<0, false>(nibble_query(chunk), from + chunk * 32, step, lines, dot);
      } else if constexpr (!is_staged) {
        const auto* bytes = reinterpret_cast<const __m512i*>(q);
        const char* row = from + chunk * 64;
        step == 64 && lines.is_in_row() ? sums_of_bytes<kSubs, 64, true>(bytes, row, step, lines, dot)
                                        : sums_of_bytes<kSubs, 0, false>(bytes, row, step, lines, dot);
      }
#pragma GCC unroll 2
      for (int64_t part = 0; part < (!is_staged ? 0 : is_4 ? 1 : 2); ++part) {
#pragma GCC unroll 16
        for (int64_t i = 0; i < (is_4 ? 16 : 8); ++i) {
          const int64_t t = part * 8 + i;
          if (!is_4 || t % 2) lines.one(is_4 ? t / 2 : t);
#pragma GCC unroll 2
          for (int64_t half = 0; half < 2; ++half) {
            const int32_t* of_rows = q + (half * 16 + t) * 4;
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
        Vec of_16[2 * kSubs];
        for (int64_t i = 0; i < 2 * kSubs; ++i) of_16[i] = load(affine + 16 * v + i * kTile);
        for (int r = 0; r < 4; ++r)
          result[v][r] = add_scaled<kSubs>(result[v][r], dot[0][v][r], dot[1][v][r], of_16, sums + 4 * r,
                                           q_steps_[quad * 16 + 4 * r]);
      }
      if ((done += 64) >= k_.group_size) {
        done = 0;
        affine += kSubs * 2 * kTile;
      }
    }
  }
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
