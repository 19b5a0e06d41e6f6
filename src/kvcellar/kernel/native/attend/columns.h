// Many rows over the same bfloat16 cells, branches of a trunk for example, without a matrix unit: a lane
// is a row. Multiplications of float32 would take longer than the memory, so those of 16-bit integers
// take their place, two to a lane, and a number of K or V is one of both factors for all rows.
//
// Of 64 cells, K and V are 14 bits of a limit that their largest number is below, but not below its half;
// queries as many bits as keep the sums of a product within 32, by their length (Cauchy and Schwarz);
// weights as many as keep these sums there, by their own sum, at most 15. That is some 1e-4 of the largest
// result, and where a few numbers are 50 times the others as much as the rounding of results to bfloat16:
// no other results come here. Sums and results stay in lanes until the end. Nothing is read to find a
// largest number first: limits, and what weights refer to, are those of the cells before, and what does not
// fit them is done once more.
//
// Only included by attend/attention.h.

#pragma once

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
    take(weighed_, kRows * kCells);
    weights_ = reinterpret_cast<int32_t*>(weighed_);  // two in the place of one
    take(results_, kRows * kDim);
    take(room_, 2 * 16 * kDim);
    alignas(64) int32_t pairs_of[kRows * kDim / 2];
    for (int64_t i = 0; i < kRows * kDim; i += kLanes) store(results_ + i, all(0.f));
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = q + r * k_pad;
      Vec squares = all(0.f);
      for (int64_t d = 0; d < kDim; d += kLanes) squares = fma(load(row + d), load(row + d), squares);
      const float length = __builtin_sqrtf(sum(squares));
      is_finite_ &= length < kHighest;
      const float inverse = length > kLowest ? kLongest / length : 0.f;
      steps_[r] = inverse > 0.f ? factor / inverse : 0.f;
      int32_t whole[kDim];
      for (int64_t d = 0; d < kDim; d += kLanes) store_ints(whole + d, to_ints(mul(load(row + d), all(inverse))));
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
    if (!cells_of<kKRows>(rows, c, n, step, next)) return false;
    bool is_small = true;
    for (int64_t at = 0; at < kRows; at += kLanes) {
      const Vec k_step = mul(load(steps_ + at), all(step));
      is_small &= highest(k_step) < kHighestLogit / 2147483648.f;
      store(k_steps_ + at, k_step);
    }
    if (!is_small) return false;
    if (!weigh(n)) {
      raise();
      weigh(n);
    }
    is_begun_ = true;
    // What weights are multiplied by is known when V has been loaded.
    Vec scales[kVecs], steps[kVecs];
    for (int64_t j = 0; j < kVecs; ++j) scales[j] = scale_of_weights(j * kLanes);
    if (!cells_of<kVRows>(rows, c, n, step, next)) return false;
    for (int64_t j = 0; j < kVecs; ++j) {
      count_weights(j * kLanes, scales[j]);
      steps[j] = div(all(step), scales[j]);
    }
    multiply_values(steps);
    return true;
  }

  bool is_finite() const { return is_finite_; }

  // What weights refer to, their sums and results of each row.
  void finish(int64_t rows, int64_t v_pad, float* maxima, float* sums, float* acc) const {
    for (int64_t r = 0; r < rows; ++r) {
      maxima[r] = references_[r];
      store(sums + r * kLanes, all(0.f));
      sums[r * kLanes] = sum_[r];
    }
    transpose(results_, kRows, kDim, kRows, rows, acc, v_pad);
  }

 private:
  static constexpr int64_t kRows = kVecs * kLanes;
  static constexpr float kMost = 8191.f;  // of K and V
  static constexpr float kLowest = 1e-30f, kHighest = 3e38f;
  // A row's reference follows its highest logit when that is kFurthest above it, or from it at the beginning.
  static constexpr float kHighestLogit = 1e6f, kFurthest = 30.f;
  // Of weights as integers: 2**31 / kMost of 64 of them together; and each, which may be rounded up. None
  // counts where all of 64 are smaller than kLeastWeight.
  static constexpr float kMostWeights = 262000.f, kMostWeight = 32700.f, kLeastWeight = 1e-25f;
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
  // all that is done (more by one, and these wait): by two cells that are loaded, and by 16 pairs of all sums,
  // these in fours.
  static constexpr int64_t kLinesOfTurn = 32 * (kDim / 64);
#if defined(KVC_AVX512)
  static constexpr int64_t kLinesOf2 = kDim / 64, kLinesOf2Values = kVecs * kLinesOf2;
  static constexpr int64_t kLinesOfQueries = kVecs == 1 ? 12 : 6, kLinesOfWeights = kVecs == 1 ? 12 : 4;
#else
  static constexpr int64_t kLinesOf2 = 0, kLinesOf2Values = 0, kLinesOfQueries = kAtOnce, kLinesOfWeights = kAtOnce;
#endif
  static constexpr int64_t kTurnOfValues = 4;

  static Vec even(Ints x) { return bits_as_floats(left_32(x, 16)); }
  static Vec odd(Ints x) { return bits_as_floats(both(x, all_ints(-65536))); }

  // 64 cells of a part as 14 bits of a limit; what 1 of these counts. Their largest number is found meanwhile:
  // where that is above the limit, or not half of it, they are loaded again. False if a number is not finite.
  template <Part part>
  bool cells_of(const TileRows& rows, int64_t c, int64_t n, float& step, const Next& next) {
    float& limit = limits_[part];
    if (limit == 0.f) limit = 1.5f * top_of(rows, part, c, smaller(n, 16));
    const float top = cells_of<part, true>(rows, c, n, limit, next);
    if (!(top < kHighest / 2)) return false;
    if (top > limit || top < limit / 2) {
      limit = 1.25f * top;
      cells_of<part, false>(rows, c, n, limit, next);
    }
    step = limit / kMost;
    return true;
  }

  // As pairs: of K a row's numbers, of V two cells', of each 2 * kLanes in the order of `number`. The largest
  // magnitude, if this is the first time.
  template <Part part, bool is_first>
  float cells_of(const TileRows& rows, int64_t c, int64_t n, float limit, const Next& next) {
    const float inverse = limit > kLowest ? kMost / limit : 0.f;
    const Vec scale = all(inverse), high_scale = all(inverse * 65536.f);
    Ints most[2] = {all_ints(0), all_ints(0)};
    const auto meet = [&most](Ints x, int64_t i) __attribute__((always_inline)) {
      if (is_first) most[i] = max_u16(most[i], both(x, all_ints(0x7FFF7FFF)));
    };
    int16_t* to = keys_;
    for (int64_t i = 0; i < kCells && (is_first || i < n); i += 16) {
      const int64_t turn = i / 16 + (part == kVRows ? kTurnOfValues : 0), m = smaller(n - i, 16);
      Lines lines = is_first ? next.turn(c / 8 + turn, kLinesOfTurn) : Next::nothing();
      int64_t row = 0;
      const char* from = m > 0 ? rows.together(part, c + i, m, 2 * kDim, room_, row) : nullptr;
      if constexpr (part == kKRows) {
        for_each<1>(m, [&](int64_t, int64_t place) __attribute__((always_inline)) {
          if (is_first && place % 2 == 0)
            for (int64_t k = 0; k < kLinesOf2; ++k) lines.one<true>(place / 2 * kLinesOf2 + k);
          for (int64_t d = 0; d < kDim; d += 2 * kLanes, to += 2 * kLanes) {
            const Ints x = load_ints(from + 2 * d);
            meet(x, d / (2 * kLanes) % 2);
            store_ints(to, whole_pairs(even(x), odd(x), scale, high_scale));
          }
          from += row;
        });
      } else {
        for_each<2>(m, [&](int64_t j, int64_t place) __attribute__((always_inline)) {
          if (is_first)
            for (int64_t k = 0; k < kLinesOf2Values; ++k) lines.one<true>(place / 2 * kLinesOf2Values + k);
          for (int64_t d = 0; d < kDim; d += 2 * kLanes, to += 4 * kLanes) {
            const Ints x = load_ints(from + 2 * d);
            const Ints y = j + 1 < m ? load_ints(from + row + 2 * d) : all_ints(0);
            meet(x, 0), meet(y, 1);
            store_ints(to, whole_pairs(even(x), even(y), scale, high_scale));
            store_ints(to + 2 * kLanes, whole_pairs(odd(x), odd(y), scale, high_scale));
          }
          from += 2 * row;
        });
      }
      if (is_first) lines_[turn] = lines;
    }
    std::memset(to, 0, sizeof *to * static_cast<size_t>(keys_ + kCells * kDim - to));
    return top_of(most[0], most[1]);
  }

  // The largest magnitude of m rows, or in two vectors: in the order of their bits, which are exact as floats.
  float top_of(const TileRows& rows, Part part, int64_t c, int64_t m) const {
    Ints most = all_ints(0);
    for (int64_t i = 0; i < m; ++i)
      for (int64_t d = 0; d < kDim; d += 2 * kLanes)
        most = max_u16(most, both(load_ints(rows.row(part, c + i) + 2 * d), all_ints(0x7FFF7FFF)));
    return top_of(most, most);
  }
  static float top_of(Ints x, Ints y) {
    Ints larger = max_u16(x, y);
    larger = both(max_u16(larger, right_32(larger, 16)), all_ints(0xFFFF));
    return bf16_to_float(static_cast<uint16_t>(highest(to_floats(larger))));
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

  // Which number lies at place i of `values_`: those at even places and those at odd ones, or four of each 8.
  static constexpr int64_t number(int64_t i) {
    const int64_t first = i / (2 * kLanes) * 2 * kLanes, second = i / kLanes % 2;
    return first + i % kLanes * 2 + second;
  }

  // sums[j] += x[j][2 i] * y[0] + x[j][2 i + 1] * y[1].
  static void add_pair(Ints* sums, const Ints* x, const int32_t& y) {
#if defined(KVC_AVX512)
    for (int64_t j = 0; j < kVecs; ++j) sums[j] = dot_pair(sums[j], x[j], y);
#else
    const Ints all_y = kept(all_ints(y));
    for (int64_t j = 0; j < kVecs; ++j) sums[j] = dot_pairs(sums[j], x[j], all_y);
#endif
  }

  // take(sums): sums[i][row] of all pairs columns[p][row] * numbers[i, p], for kAtOnce i that lie kAcross
  // apart and kPairs p that lie kAlong apart. A function of its own, so that the compiler keeps the sums
  // in registers.
  template <int64_t kPairs, int64_t kAcross, int64_t kAlong, int64_t kLinesOf16, class Take>
  static __attribute__((noinline)) void multiply(const int32_t* columns, const int32_t* numbers, Lines& given,
                                                 const Take take) {
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
        for (int64_t i = 0; i < kAtOnce; ++i) add_pair(a[i], x, numbers[i * kAcross + j * kAlong]);
      }
    }
    take(a);
    given.at = lines.at;
  }

  // Weights of n cells, [cell][row], by rows' references, their sums and the highest logits less these. False if
  // one is too far from its reference. With AVX2 when all products are made: those that come behind would wait for
  // a few cells' powers, of which each step waits for the one before.
  bool weigh(int64_t n) {
    n_ = n;
    for (int64_t at = 0; at < kRows; at += kLanes) {
      store(totals_ + at, all(0.f));
      store(tops_ + at, all(kMinusInfinity));
    }
    for (int64_t c = 0; c < n; c += kAtOnce) {
      multiply<kDim / 2, kDim / 2, 1, kLinesOfQueries>(
          queries_, reinterpret_cast<const int32_t*>(keys_ + c * kDim), lines_[c / 16],
          [this, c](const Ints(&sums)[kAtOnce][kVecs]) __attribute__((always_inline)) {
#if defined(KVC_AVX512)
            n_ - c < kAtOnce ? weigh<false>(sums, c, n_ - c) : weigh<true>(sums, c, n_ - c);
#else
            for (int64_t i = 0; i < kAtOnce; ++i)
              for (int64_t j = 0; j < kVecs; ++j) store_ints(weights_ + (c + i) * kRows + j * kLanes, sums[i][j]);
#endif
          });
    }
#if !defined(KVC_AVX512)
    for (int64_t c = 0; c < n; c += kAtOnce) {
      Ints sums[kAtOnce][kVecs];
      for (int64_t i = 0; i < kAtOnce; ++i)
        for (int64_t j = 0; j < kVecs; ++j) sums[i][j] = load_ints(weights_ + (c + i) * kRows + j * kLanes);
      n - c < kAtOnce ? weigh<false>(sums, c, n - c) : weigh<true>(sums, c, n - c);
    }
#endif
    std::memset(weighed_ + n * kRows, 0, sizeof *weighed_ * static_cast<size_t>((kCells - n) * kRows));
    bool is_near = true;
    for (int64_t at = 0; at < kRows; at += kLanes) {
      const Vec top = load(tops_ + at);
      is_near &= highest(top) <= kFurthest && (is_begun_ || highest(sub(all(0.f), top)) <= kFurthest);
    }
    return is_near;
  }
  // Of kAtOnce cells from the c-th on, or m.
  template <bool is_all>
  __attribute__((always_inline)) void weigh(const Ints (&sums)[kAtOnce][kVecs], int64_t c, int64_t m) {
    for (int64_t j = 0; j < kVecs; ++j) {
      const int64_t at = j * kLanes;
      const Vec step = load(k_steps_ + at), below = sub(all(0.f), load(references_ + at));
      Vec totals[2] = {load(totals_ + at), all(0.f)}, tops[2] = {load(tops_ + at), all(kMinusInfinity)};
      float* to = weighed_ + c * kRows + at;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kAtOnce; ++i, to += kRows) {
        if (!is_all && i >= m) break;
        const Vec x = fma(to_floats(sums[i][j]), step, below);
        tops[i % 2] = max(tops[i % 2], x);
        const Vec p = exp2_rough(x);
        totals[i % 2] = add(totals[i % 2], p);
        store(to, p);
      }
      store(totals_ + at, add(totals[0], totals[1]));
      store(tops_ + at, max(tops[0], tops[1]));
    }
  }

  // References to the highest logits that have been weighed, where these are above or nothing was before.
  void raise() {
    for (int64_t at = 0; at < kRows; at += kLanes) {
      const Vec zero = all(0.f), top = load(tops_ + at), higher = max(top, zero);
      const Vec share = exp2_below_1(sub(zero, higher));
      store(references_ + at, add(load(references_ + at), is_begun_ ? higher : top));
      store(sum_ + at, mul(load(sum_ + at), share));
      for (int64_t d = 0; d < kDim; ++d) store(results_ + d * kRows + at, mul(load(results_ + d * kRows + at), share));
    }
  }

  // By what weights are integers, of the rows from the `at`-th on.
  Vec scale_of_weights(int64_t at) {
    const Vec total = load(totals_ + at);
    store(sum_ + at, add(load(sum_ + at), total));
    const Vec most = max(all(kLeastWeight), exp2_rough(load(tops_ + at)));
    return min(div(all(kMostWeight), most), div(all(kMostWeights), max(total, most)));
  }
  void count_weights(int64_t at, Vec scale) {
    const Vec high_scale = mul(scale, all(65536.f));
    const float* from = weighed_ + at;
    int32_t* to = weights_ + at;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCells; i += 2, from += 2 * kRows, to += kRows)
      store_ints(to, whole_pairs(load(from), load(from + kRows), scale, high_scale));
  }

  void multiply_values(const Vec* steps) {
    for (int64_t d = 0; d < kDim; d += kAtOnce) {
      float* results = results_ + number(d) * kRows;
      multiply<kCells / 2, 1, kDim, kLinesOfWeights>(
          weights_, reinterpret_cast<const int32_t*>(values_) + d, lines_[kTurnOfValues + d / (kDim / 4)],
          [results, steps](const Ints(&sums)[kAtOnce][kVecs]) __attribute__((always_inline)) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < kAtOnce; ++i) {
              for (int64_t j = 0; j < kVecs; ++j) {
                float* to = results + number(i) * kRows + j * kLanes;
                store(to, fma(to_floats(sums[i][j]), steps[j], load(to)));
              }
            }
          });
    }
  }

  int16_t *keys_, *values_;
  int32_t *queries_, *weights_;
  float *weighed_, *results_;
  char* room_;
  int64_t n_ = 0;   // cells that are weighed: a closure with it would go through memory, and its load wait for stores
  Lines lines_[8];  // turns of 16 cells, for logits and for values
  alignas(64) float steps_[kRows] = {}, k_steps_[kRows], totals_[kRows], tops_[kRows];
  alignas(64) float sum_[kRows] = {}, references_[kRows] = {};
  float limits_[2] = {};  // of K and V
  bool is_finite_ = true, is_begun_ = false;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
