// Many rows over the same bfloat16 cells, branches of a trunk for example, without a matrix unit: a lane
// is a row. Multiplications of float32 would take longer than the memory, so those of 16-bit integers
// take their place, two to a lane, and a number of K or V is one of both factors for all rows.
//
// Of 64 cells, K and V are 14 bits of about their largest number; queries as many bits as keep the sums
// of a product within 32, by their length (Cauchy and Schwarz); weights as many as keep these sums
// there, by their own sum, at most 15. That is some 1e-4 of the largest result, and where a few numbers
// are 50 times the others as much as the rounding of results to bfloat16: no other results come here.
// Sums, maxima and results stay in lanes until the end.
//
// Only included by attend_impl.h.

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Rows are `kVecs` vectors.
template <int kDim, int kVecs>
class Columns {
 public:
  static constexpr int64_t kCells = 64;

  // `q`: rows of `k_pad` floats; logits are multiplied by `factor`.
  Columns(int64_t rows, const float* q, int64_t k_pad, float factor, char* memory) {
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    const auto take = [&address](auto*& piece, int64_t n) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(address);
      address += static_cast<uintptr_t>(n) * sizeof *piece;
    };
    take(keys_, kCells * kDim);
    values_ = keys_;  // when keys have been multiplied
    take(queries_, kRows * kDim / 2);
    take(weights_, kRows * kCells / 2);
    take(logits_, kRows * kCells);
    take(results_, kRows * kDim);
    take(room_, 2 * kCells * kDim);
    alignas(64) int32_t pairs_of[kRows * kDim / 2];
    for (int64_t i = 0; i < kRows * kDim; i += kLanes) store(results_ + i, all(0.f));
    for (float& x : max_) x = kMinusInfinity;
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = q + r * k_pad;
      Vec squares = all(0.f);
      for (int64_t d = 0; d < kDim; d += kLanes) squares = fma(load(row + d), load(row + d), squares);
      const float length = __builtin_sqrtf(sum(squares));
      is_finite_ &= length < kHighest;
      const float inverse = length > kLowest ? kLongest / length : 0.f;
      steps_[r] = inverse > 0.f ? factor / inverse : 0.f;
      int32_t whole[kDim];
      for (int64_t d = 0; d < kDim; d += kLanes)
        store_ints(whole + d, to_ints(mul(load(row + d), all(inverse))));
      for (int64_t p = 0; p < kDim / 2; ++p)
        pairs_of[r * kDim / 2 + p] = (whole[2 * p] & 0xFFFF) | whole[2 * p + 1] * 65536;
    }
    std::memset(pairs_of + rows * kDim / 2, 0, sizeof(int32_t) * static_cast<size_t>((kRows - rows) * kDim / 2));
    transpose(reinterpret_cast<float*>(pairs_of), kDim / 2, kRows, kDim / 2, kDim / 2,
              reinterpret_cast<float*>(queries_), kRows);
  }

  // The n <= 64 cells from c on of a tile. False if a number is not finite, or logits are so large that
  // float32 hardly tells them apart: nothing of it counts then.
  bool attend(const TileRows& rows, int64_t c, int64_t n, const Next& next) {
    float step;
    if (!load_keys(rows, c, n, step, next)) return false;
    multiply_queries();
    Vec shares[kVecs];
    bool is_higher = false;
    for (int64_t j = 0; j < kVecs; ++j) {
      const Vec k_step = mul(load(steps_ + j * kLanes), all(step));
      if (!(highest(k_step) < kHighestLogit / 2147483648.f)) return false;
      shares[j] = weigh(j, k_step, rows, c, n, is_higher);
    }
    if (!load_values(rows, c, n, step, next)) return false;
    for (Vec& share : shares) share = mul(share, all(step));
    is_higher ? multiply_values<true>(shares) : multiply_values<false>(shares);
    return true;
  }

  bool is_finite() const { return is_finite_; }

  // Maxima, sums of weights and results of each row.
  void finish(int64_t rows, int64_t v_pad, float* maxima, float* sums, float* acc) const {
    for (int64_t r = 0; r < rows; ++r) {
      maxima[r] = max_[r];
      store(sums + r * kLanes, all(0.f));
      sums[r * kLanes] = sum_[r];
    }
    transpose(results_, kRows, kDim, kRows, rows, acc, v_pad);
  }

 private:
  static constexpr int64_t kRows = kVecs * kLanes;
  static constexpr float kMost = 8191.f;  // of K and V
  static constexpr float kLowest = 1e-30f, kHighest = 3e38f;
  static constexpr float kHighestLogit = 1e6f;
  static constexpr int32_t kLowestInt = -2147483647 - 1;
  // Of weights: 2**31 / kMost of 64 of them together; and each, though float32 may find one 4% too high
  // where logits are near the highest.
  static constexpr float kMostWeights = 262000.f, kMostWeight = 31200.f;
  // Of queries: 2**31 / (kMost * sqrt(kDim)), which is the length of a K row at most.
  static constexpr float kLongest = kDim == 64 ? 32700.f : 23100.f;

  // Rows [n_rows, n_columns], `step` apart, to columns `to_step` apart: the first n of them.
  static void transpose(const float* from, int64_t step, int64_t n_rows, int64_t n_columns, int64_t n, float* to,
                        int64_t to_step) {
#if defined(KVC_AVX512)
    for (int64_t c = 0; c < n_columns; c += 16) {
      for (int64_t r = 0; r < n_rows; r += 16) {
        Vec x[16];
        for (int64_t i = 0; i < 16; ++i) x[i] = load(from + (r + i) * step + c);
        transpose16(x);
        for (int64_t i = 0; i < 16 && c + i < n; ++i) store(to + (c + i) * to_step + r, x[i]);
      }
    }
#else
    for (int64_t c = 0; c < n_columns && c < n; ++c)
      for (int64_t r = 0; r < n_rows; ++r) std::memcpy(to + c * to_step + r, from + r * step + c, 4);
#endif
  }

  // Numbers that are multiplied by all rows at a time: as many sums as there are registers for.
#if defined(KVC_AVX512)
  static constexpr int64_t kAtOnce = 16 / kVecs;
#else
  static constexpr int64_t kAtOnce = 8 / kVecs;
#endif
  // What is fetched of the next tile: 64 cells' share in 8 turns. With 256 bits by the products; else evenly by
  // all that is done, but finding what is largest, which waits for the second cache itself: by two cells that are
  // loaded or weighed, and by 16 pairs of all sums, these in fours.
  static constexpr int64_t kLinesOfTurn = 32 * (kDim / 64);
#if defined(KVC_AVX512)
  static constexpr int64_t kLinesOf2 = kDim / 64, kLinesOf2Values = kVecs * kLinesOf2;
  static constexpr int64_t kLinesOfQueries = kAtOnce / 2, kLinesOfWeights = kVecs == 1 ? 12 : 4;
#else
  static constexpr int64_t kLinesOf2 = 0, kLinesOf2Values = 0, kLinesOfQueries = kAtOnce, kLinesOfWeights = kAtOnce;
#endif
  static constexpr int64_t kTurnOfValues = 4;

  // Rows as they lie, 16 at a time, and what they are counted in.
  struct Found {
    const char* from[kCells / 16];
    int64_t step[kCells / 16];
    Vec inverse, high_inverse;
  };

  // False if a number is not finite.
  bool find(const TileRows& rows, Part part, int64_t c, int64_t n, Found& found, float& step) const {
    Ints most[2] = {all_ints(0), all_ints(0)};
    for (int64_t i = 0; i < n; i += 16) {
      const int64_t m = smaller(n - i, 16);
      const char* from =
          rows.together(part, c + i, m, 2 * kDim, room_ + i * 2 * kDim, found.step[i / 16]);
      found.from[i / 16] = from;
      const int64_t row = found.step[i / 16];
      const auto take = [&](int64_t, int64_t) {
        for (int64_t d = 0; d < kDim; d += 2 * kLanes) {
          Ints& larger = most[d / (2 * kLanes) % 2];
          larger = max_u16(larger, both(load_ints(from + 2 * d), all_ints(0x7FFF7FFF)));
        }
        from += row;
      };
      for_each<1>(m, take);
    }
    // Magnitudes are in the order of their bits, which are exact as floats.
    Ints larger = max_u16(most[0], most[1]);
    larger = both(max_u16(larger, right_32(larger, 16)), all_ints(0xFFFF));
    const float top = bf16_to_float(static_cast<uint16_t>(highest(to_floats(larger))));
    const float inverse = top > kLowest ? kMost / top : 0.f;
    found.inverse = all(inverse);
    found.high_inverse = all(inverse * 65536.f);
    step = top / kMost;
    return top < kHighest;
  }

  static Vec even(Ints x) { return bits_as_floats(left_32(x, 16)); }
  static Vec odd(Ints x) { return bits_as_floats(both(x, all_ints(-65536))); }

  // Floats as integers, x[i] beside y[i]: those of x are in the lower bits of a sum, those of y in the
  // upper ones of the other.
  static Ints pairs(Vec x, Vec y, Vec scale, Vec high_scale) {
    const Ints low = bits_as_ints(fma(x, scale, all(12582912.f)));
    return words_by_turns(low, to_ints(fma(y, high_scale, all(32768.f))));
  }

  bool load_keys(const TileRows& rows, int64_t c, int64_t n, float& step, const Next& next) {
    Found found{};
    if (!find(rows, kKRows, c, n, found, step)) return false;
    int16_t* to = keys_;
    for (int64_t i = 0; i < kCells; i += 16) {
      const char* from = found.from[i / 16];
      const int64_t row = found.step[i / 16];
      Lines lines = next.turn(c / 8 + i / 16, kLinesOfTurn);
      for_each<1>(smaller(n - i, 16), [&](int64_t, int64_t place) {
        if (place % 2 == 0)
          for (int64_t k = 0; k < kLinesOf2; ++k) lines.one<true>(place / 2 * kLinesOf2 + k);
        for (int64_t d = 0; d < kDim; d += 2 * kLanes, to += 2 * kLanes) {
          const Ints x = load_ints(from + 2 * d);
          store_ints(to, pairs(even(x), odd(x), found.inverse, found.high_inverse));
        }
        from += row;
      });
      lines_[i / 16] = lines;
    }
    std::memset(to, 0, sizeof *to * static_cast<size_t>(keys_ + kCells * kDim - to));
    return true;
  }

  // Two cells' numbers side by side: of each 2 * kLanes first those at even places.
  bool load_values(const TileRows& rows, int64_t c, int64_t n, float& step, const Next& next) {
    Found found{};
    if (!find(rows, kVRows, c, n, found, step)) return false;
    int16_t* to = values_;
    for (int64_t i = 0; i < kCells; i += 16) {
      const char* from = found.from[i / 16];
      const int64_t row = found.step[i / 16], m = smaller(n - i, 16);
      Lines lines = next.turn(c / 8 + 4 + i / 16, kLinesOfTurn);
      for_each<2>(m, [&](int64_t j, int64_t place) {
        for (int64_t k = 0; k < kLinesOf2Values; ++k)
          lines.one<true>(place / 2 * kLinesOf2Values + k);
        for (int64_t d = 0; d < kDim; d += 2 * kLanes, to += 4 * kLanes) {
          const Ints x = load_ints(from + 2 * d);
          const Ints y = j + 1 < m ? load_ints(from + row + 2 * d) : all_ints(0);
          store_ints(to, pairs(even(x), even(y), found.inverse, found.high_inverse));
          store_ints(to + 2 * kLanes, pairs(odd(x), odd(y), found.inverse, found.high_inverse));
        }
        from += 2 * row;
      });
      lines_[kTurnOfValues + i / 16] = lines;
    }
    std::memset(to, 0, sizeof *to * static_cast<size_t>(values_ + kCells * kDim - to));
    return true;
  }

  // take(j, place), for each kStep-th j of m <= 16 rows; `place` is j % 8, and known where loops are unrolled.
  // Of 16 rows j is 0: all of them are there.
  template <int64_t kStep, class Take>
  static __attribute__((always_inline)) void for_each(int64_t m, const Take& take) {
    if (m == 16) {
      for (int64_t half = 0; half < 2; ++half)
#pragma GCC unroll 8
        for (int64_t j = 0; j < 8; j += kStep) take(0, j);
    } else {
      for (int64_t j = 0; j < m; j += kStep) take(j, j % 8);
    }
  }

  // Which number lies at place i of `values_`.
  static constexpr int64_t number(int64_t i) {
    return i / (2 * kLanes) * 2 * kLanes + i % kLanes * 2 + i / kLanes % 2;
  }

  // sums[j] += x[j][2 i] * y[0] + x[j][2 i + 1] * y[1].
  static void add_pair(Ints* sums, const Ints* x, const int32_t& y) {
#if defined(KVC_AVX512)
    for (int64_t j = 0; j < kVecs; ++j) sums[j] = dot_pair(sums[j], x[j], y);
#else
    const Ints all_y = kept(all_ints(y));
    for (int64_t j = 0; j < kVecs; ++j) sums[j] = kept(add_32(sums[j], dot_words(x[j], all_y)));
#endif
  }

  // take(sums): sums[i][row] of all pairs columns[p][row] * numbers[i, p], for kAtOnce i that lie kAcross
  // apart and kPairs p that lie kAlong apart. A function of its own, so that the compiler keeps the sums
  // in registers.
  template <int64_t kPairs, int64_t kAcross, int64_t kAlong, int64_t kLinesOf16, class Take>
  static __attribute__((noinline)) void multiply(const int32_t* columns, const int32_t* numbers,
                                                 Lines& given, const Take take) {
    Lines lines = given;
    Ints a[kAtOnce][kVecs];
#pragma GCC unroll 16
    for (auto& sums : a)
      for (Ints& x : sums) x = all_ints(0);
    for (int64_t p = 0; p < kPairs; p += 16, columns += 16 * kRows, numbers += 16 * kAlong) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < 16; ++j) {
        Ints x[kVecs];
        for (int64_t k = 0; k < kVecs; ++k) x[k] = load_ints(columns + j * kRows + k * kLanes);
        if ((j + 1) * kLinesOf16 / 16 > j * kLinesOf16 / 16) lines.one<true>(j * kLinesOf16 / 16);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kAtOnce; ++i)
          add_pair(a[i], x, numbers[i * kAcross + j * kAlong]);
      }
    }
    take(a);
    given.at = lines.at;
  }

  // logits_[cell][row].
  void multiply_queries() {
    for (int64_t j = 0; j < kVecs; ++j) store_ints(tops_ + j * kLanes, all_ints(kLowestInt));
    for (int64_t c = 0; c < kCells; c += kAtOnce) {
      int32_t* to = logits_ + c * kRows;
      int32_t* tops = tops_;
      multiply<kDim / 2, kDim / 2, 1, kLinesOfQueries>(
          queries_, reinterpret_cast<const int32_t*>(keys_ + c * kDim), lines_[c / 16],
          [to, tops](const Ints (&sums)[kAtOnce][kVecs]) __attribute__((always_inline)) {
            for (int64_t j = 0; j < kVecs; ++j) {
              Ints top = load_ints(tops + j * kLanes);
#pragma GCC unroll 16
              for (int64_t i = 0; i < kAtOnce; ++i) {
                store_ints(to + i * kRows + j * kLanes, sums[i][j]);
                top = max_32(top, sums[i][j]);
              }
              store_ints(tops + j * kLanes, top);
            }
          });
    }
  }

  // Of n cells, for the j-th vector of rows.
  Ints highest_logits(int64_t j, int64_t n) const {
    if (n == kCells) return load_ints(tops_ + j * kLanes);
    const int32_t* from = logits_ + j * kLanes;
    Ints most[4];
    for (Ints& x : most) x = load_ints(from);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
#pragma GCC unroll 8
      for (int64_t k = 0; k < 8; ++k)
        most[k % 4] = max_32(most[k % 4], load_ints(from + (i + k) * kRows));
    for (; i < n; ++i) most[0] = max_32(most[0], load_ints(from + i * kRows));
    return max_32(max_32(most[0], most[1]), max_32(most[2], most[3]));
  }

  // Logits to weights, for the j-th vector of rows; what a result of one is worth. `is_higher` becomes
  // true if earlier sums and results count by `factors_` from now on.
  Vec weigh(int64_t j, Vec step, const TileRows& rows, int64_t c, int64_t n, bool& is_higher) {
    const int64_t at = j * kLanes;
    const Vec top = mul(to_floats(highest_logits(j, n)), step), zero = all(0.f), below = sub(zero, top);
    Vec totals[2] = {zero, zero};
    float* weights = reinterpret_cast<float*>(logits_) + at;
    const auto take = [&](int64_t i, int64_t place, Lines& lines, Vec& total) __attribute__((always_inline)) {
      float* to = weights + i * kRows;
      if (j == 0) {  // V comes from the second cache meanwhile
        const char* row = rows.row(kVRows, c + i);
        for (int64_t at = 0; at < 2 * kDim; at += 64) __builtin_prefetch(row + at, 0, 3);
        if (place % 2 == 0)
          for (int64_t k = 0; k < kLinesOf2; ++k) lines.one<true>(place / 2 * kLinesOf2 + k);
      }
      const Vec x = fma(to_floats(load_ints(to)), step, below);
#if defined(KVC_AVX512)
      const Vec p = exp2_rough(x);
#else
      const Vec p = exp2_below_1(x);
#endif
      store(to, p);
      total = add(total, p);
    };
    int64_t first = 0;
    for (; first + 8 <= n; first += 8) {
      Lines lines = lines_[first / 16];
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i) take(first + i, i, lines, totals[i % 2]);
      if (j == 0) lines_[first / 16].at = lines.at;
    }
    for (Lines none = Next::nothing(); first < n; ++first) take(first, 0, none, totals[0]);
    const Vec total = add(totals[0], totals[1]);
    for (int64_t i = n; i < kCells; ++i) store(weights + i * kRows, zero);
    const Vec scale = min(all(kMostWeight), div(all(kMostWeights), total));
    const Vec high_scale = mul(scale, all(65536.f));
    int32_t* to = weights_ + at;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCells; i += 2, weights += 2 * kRows, to += kRows)
      store_ints(to, pairs(load(weights), load(weights + kRows), scale, high_scale));
    // Earlier results are multiplied where a row's logits have become 2**4 times as large, not whenever
    // they are larger.
    Vec now = load(max_ + at), factor = all(1.f);
    if (highest(sub(top, now)) > 4.f) {
      const Vec old = now;
      now = max(now, top);
      factor = exp2_below_1(sub(old, now));
      is_higher = true;
    }
    const Vec share = exp2_below_1(sub(top, now));
    store(max_ + at, now);
    store(factors_ + at, factor);
    store(sum_ + at, fma(load(sum_ + at), factor, mul(total, share)));
    return div(share, scale);
  }

  template <bool is_higher>
  void multiply_values(const Vec* steps) {
    const float* factors = factors_;
    for (int64_t d = 0; d < kDim; d += kAtOnce) {
      float* results = results_ + number(d) * kRows;
      multiply<kCells / 2, 1, kDim, kLinesOfWeights>(
          weights_, reinterpret_cast<const int32_t*>(values_) + d, lines_[kTurnOfValues + d / (kDim / 4)],
          [results, steps, factors](const Ints (&sums)[kAtOnce][kVecs]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < kAtOnce; ++i) {
              for (int64_t j = 0; j < kVecs; ++j) {
                float* to = results + 2 * i * kRows + j * kLanes;
                Vec before = load(to);
                if (is_higher) before = mul(before, load(factors + j * kLanes));
                store(to, fma(to_floats(sums[i][j]), steps[j], before));
              }
            }
          });
    }
  }

  int16_t *keys_, *values_;
  int32_t *queries_, *weights_, *logits_;
  float* results_;
  char* room_;
  Lines lines_[8];  // turns of 16 cells, for logits and for values
  alignas(64) int32_t tops_[kRows];  // the highest logits of all 64 cells
  alignas(64) float steps_[kRows] = {}, sum_[kRows] = {}, factors_[kRows], max_[kRows];
  bool is_finite_ = true;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
