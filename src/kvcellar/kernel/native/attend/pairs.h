// Many rows over the same bfloat16 cells, as in columns.h, where the processor multiplies bfloat16: a lane
// is a row for logits, a number of V for values. K and V are operands as they lie in the pool, and so are
// queries; weights become bfloat16, which adds as much as storing V in bfloat16 has added.
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
  static constexpr int64_t kCells = kTile;

  // `fours`: queries as `logits_of` reads them; logits are multiplied by `factor`.
  Columns(int64_t rows, const float* fours, float factor, char* memory) : quads_((rows + 3) / 4), factor_(factor) {
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    const auto take = [&address](auto*& piece, int64_t n) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(address);
      address += static_cast<uintptr_t>(n) * sizeof *piece;
    };
    take(queries_, kRows * kDim / 2);
    take(weights_, kRows * kCells / 2);
    take(results_, kRows * kDim);
    take(room_, kCells * kBytes);
    take(k_room_, 16 * kBytes);
    std::memset(results_, 0, sizeof *results_ * kRows * kDim);
    for (float& x : max_) x = -3e38f;
    if (quads_ * 4 < kRows) std::memset(queries_, 0, sizeof *queries_ * kRows * kDim / 2);
    for (int64_t quad = 0; quad < quads_; ++quad)
      for (int64_t p = 0; p < kDim / 2; p += 4, fours += kLanes)
        store_fours(transposed_fours(load(fours)), queries_ + p * kRows + quad * 4, kRows);
  }

  static bool is_finite() { return true; }

  // The n <= kTile cells from c on of a tile. False if logits are so large that float32 hardly tells them
  // apart: nothing of it counts then.
  bool attend(const TileRows& rows, int64_t c, int64_t n, const Next& next) {
    int64_t first = 0;  // whose values are not added yet
    bool is_pending = false;
    for (int64_t i = 0; i < n; i += 16) {
      const int64_t m = smaller(n - i, 16);
      const char* from = dense(rows, kKRows, c + i, m, k_room_);
      Lines lines = next.turn((c + i) / 16, kLinesOf16);
      for (int64_t j = 0; j < m; j += kAtOnce) {
        const char* cells = from + j * kBytes;
        uint32_t* before = weights_ + (i + j - kAtOnce) / 2 * kRows;
        is_pending =
            is_pending ? multiply<true>(cells, m - j, before, lines) : multiply<false>(cells, m - j, before, lines);
        if (is_pending) continue;
        values(rows, c, first, i + j, next);
        first = i + j;
        if (!raise(cells, m - j)) return false;
        Lines nothing = Next::nothing();
        is_pending = multiply<false>(cells, m - j, before, nothing);
      }
    }
    weigh(weights_ + (n - 1) / kAtOnce * kAtOnce / 2 * kRows);
    values(rows, c, first, n, next);
    return true;
  }

  // Maxima, sums of weights and results of each row.
  void finish(int64_t rows, int64_t v_pad, float* maxima, float* sums, float* acc) const {
    for (int64_t r = 0; r < rows; ++r) {
      maxima[r] = max_[r];
      store(sums + r * kLanes, all(0.f));
      sums[r * kLanes] = sum_[r];
      std::memcpy(acc + r * v_pad, results_ + r * kDim, sizeof(float) * kDim);
    }
  }

 private:
  static constexpr int64_t kRows = kVecs * kLanes, kBytes = 2 * kDim;
  static constexpr int64_t kAtOnce = 16 / kVecs;  // cells: as many sums as there are registers for
  static constexpr int64_t kLinesOf16 = kDim / 2;
  // Weights may be 2**kHighest: a row's reference follows its highest logit only then.
  static constexpr float kHighest = 30.f, kHighestLogit = 1e6f;

  // m <= 16 rows that follow on each other: where they lie, or at `room`.
  static const char* dense(const TileRows& rows, Part part, int64_t c, int64_t m, char* room) {
    int64_t step;
    const char* from = rows.together(part, c, m, kBytes, room, step);
    if (step == kBytes && from != room) return from;
    if (from != room)
      for (int64_t i = 0; i < m; ++i) std::memcpy(room + i * kBytes, from + i * step, kBytes);
    std::memset(room + m * kBytes, 0, static_cast<size_t>((16 - m) * kBytes));
    return room;
  }

  static void one_of(Lines& lines, int64_t i) { are_branches_far ? lines.one<true>(i) : lines.one(i); }

  // Products of kAtOnce cells; those from the n-th on are minus infinity. between(i), for each of the 16
  // vectors, is called meanwhile.
  template <class Between>
  static __attribute__((always_inline)) void multiply(const float* queries, const char* cells, int64_t n,
                                                      Vec (&sums)[kAtOnce][kVecs], Lines& lines,
                                                      const Between& between) {
    constexpr int64_t kEvery = kDim / 16;  // pairs of numbers for two vectors
#pragma GCC unroll 16
    for (auto& cell : sums)
      for (Vec& x : cell) x = all(0.f);
    for (int64_t p = 0; p < kDim / 2; p += 16, queries += 16 * kRows, cells += 64) {
#pragma GCC unroll 16
      for (int64_t j = 0; j < 16; ++j) {
        Vec x[kVecs];
        for (int64_t k = 0; k < kVecs; ++k) x[k] = load(queries + j * kRows + k * kLanes);
        if (j % kVecs == 0) one_of(lines, j / kVecs);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kAtOnce; ++i)
          for (int64_t k = 0; k < kVecs; ++k) sums[i][k] = add_pair(sums[i][k], x[k], cells + i * kBytes + j * 4);
        if (j % kEvery == kEvery - 1) between((p + j) / kEvery * 2);
      }
    }
    if (n >= kAtOnce) return;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kAtOnce; ++i)
      for (Vec& x : sums[i]) x = i < n ? x : all(kMinusInfinity);
  }

  // Exponents of kAtOnce cells; meanwhile `before` gets the weights of those before them, whose work is
  // other parts of the processor's, if there are any. False if these weights would be too large: they are
  // not pending then. A function of its own, so that the compiler keeps the sums in registers.
  template <bool has_before>
  __attribute__((noinline)) bool multiply(const char* cells, int64_t n, uint32_t* before, Lines& given) {
    Lines lines = given;
    Vec a[kAtOnce][kVecs], totals[kVecs];
    for (int64_t k = 0; k < kVecs; ++k) totals[k] = load(sum_ + k * kLanes);
    multiply(queries_, cells, n, a, lines, [&](int64_t i) __attribute__((always_inline)) {
      if (has_before) weigh_two(i, before, totals);
    });
    if (has_before)
      for (int64_t k = 0; k < kVecs; ++k) store(sum_ + k * kLanes, totals[k]);
    given.at = lines.at;
    const Vec factor = all(factor_);
    bool is_low = true;
#pragma GCC unroll 2
    for (int64_t k = 0; k < kVecs; ++k) {
      const Vec below = sub(all(0.f), load(max_ + k * kLanes));
      Vec tops[2] = {all(kMinusInfinity), all(kMinusInfinity)};
#pragma GCC unroll 16
      for (int64_t i = 0; i < kAtOnce; ++i) {
        const Vec x = fma(a[i][k], factor, below);
        tops[i % 2] = max(tops[i % 2], x);
        store(exponents_ + i * kRows + k * kLanes, x);
      }
      is_low &= !is_any_above(max(tops[0], tops[1]), all(kHighest));
    }
    return is_low;
  }

  // Pending exponents to weights, the i-th two of 16 vectors.
  __attribute__((always_inline)) void weigh_two(int64_t i, uint32_t* weights, Vec* totals) const {
    const int64_t k = kVecs == 1 ? 0 : i / 2 % kVecs, at = i / 2 / kVecs * 2 * kRows + k * kLanes;
    totals[k] = store_by_turns(weights + at / 2 + k * kLanes / 2, exp2_beside_products(load(exponents_ + at)),
                               exp2_beside_products(load(exponents_ + at + kRows)), totals[k]);
  }
  void weigh(uint32_t* weights) {
    Vec totals[kVecs];
    for (int64_t k = 0; k < kVecs; ++k) totals[k] = load(sum_ + k * kLanes);
#pragma GCC unroll 8
    for (int64_t i = 0; i < 16; i += 2) weigh_two(i, weights, totals);
    for (int64_t k = 0; k < kVecs; ++k) store(sum_ + k * kLanes, totals[k]);
  }

  // References to these logits' highest where they are below. False if these are too large.
  __attribute__((noinline)) bool raise(const char* cells, int64_t n) {
    Vec a[kAtOnce][kVecs];
    Lines lines = Next::nothing();
    multiply(queries_, cells, n, a, lines, [](int64_t) {});
    const Vec factor = all(factor_);
    float shares[kRows];
    bool is_small = true;
    for (int64_t k = 0; k < kVecs; ++k) {
      const Vec old = load(max_ + k * kLanes);
      Vec now = old;
      for (int64_t i = 0; i < kAtOnce; ++i) now = max(now, mul(a[i][k], factor));
      is_small &= !is_any_above(max(now, sub(all(0.f), now)), all(kHighestLogit));
      const Vec share = exp2_below_1(sub(old, now));
      store(max_ + k * kLanes, now);
      store(sum_ + k * kLanes, mul(load(sum_ + k * kLanes), share));
      store(shares + k * kLanes, share);
    }
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t d = 0; d < kDim; d += kLanes)
        store(results_ + r * kDim + d, mul(load(results_ + r * kDim + d), all(shares[r])));
    return is_small;
  }

  // Of the cells from `first` to `stop`, multiples of kAtOnce or the last.
  void values(const TileRows& rows, int64_t c, int64_t first, int64_t stop, const Next& next) {
    if (first == stop) return;
    const char* at[kTile / 16];
    for (int64_t i = first / 16; i * 16 < stop; ++i)
      at[i] = dense(rows, kVRows, c + i * 16, smaller(stop - i * 16, 16), room_ + i * 16 * kBytes);
    quads_ < 4 ? values_of<kDim / 32>(at, first, stop, next) : values_of<kDim / 16>(at, first, stop, next);
  }

  // One line of V at a time, of all cells: so each comes to the first cache once. The first kPasses passes
  // fetch, the more the slower: as fast as the memory gives.
  template <int64_t kPasses>
  void values_of(const char* const* at, int64_t first, int64_t stop, const Next& next) {
    int64_t pass = 0;
    for (int64_t d = 0; d < kDim; d += 32)
      for (int64_t r = 0; r + 2 <= quads_; r += 2, ++pass)
        values_of<8, kPasses>(r * 4, d, at, first, stop, pass < kPasses ? &next : nullptr, pass);
    if (quads_ % 2)
      for (int64_t d = 0; d < kDim; d += 64) values_of<4, kPasses>((quads_ - 1) * 4, d, at, first, stop, nullptr, 0);
  }

  // Of kRowsOf rows from `row` on, and 256 / kRowsOf numbers from the d-th on.
  template <int64_t kRowsOf, int64_t kPasses>
  __attribute__((noinline)) void values_of(int64_t row, int64_t d, const char* const* at, int64_t first, int64_t stop,
                                           const Next* next, int64_t pass) {
    constexpr int64_t kVecsOf = 16 / kRowsOf;
    float* results = results_ + row * kDim + d;
    const uint32_t* weights = weights_ + first / 2 * kRows + row;
    Vec a[kRowsOf][kVecsOf];
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRowsOf; ++r)
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVecsOf; ++j) a[r][j] = load(results + r * kDim + j * kLanes);
    // With 16 cells the share of a turn's lines that makes them all in these passes.
    Lines lines = Next::nothing();
    for (int64_t i = first; i < stop; i += 8) {
      const char* from = at[i / 16] + i % 16 * kBytes + d * 2;
      if (i % 16 == 0 && next) {
        const int64_t share = pass * kTile / 16 + i / 16;
        if (share % kPasses == 0 || i == first) lines = next->turn_of_values(share / kPasses, kLinesOf16);
      }
#pragma GCC unroll 4
      for (int64_t j = 0; j < 4; ++j) {
        Vec x[kVecsOf];
#pragma GCC unroll 2
        for (int64_t k = 0; k < kVecsOf; k += 2)
          load_pairs(from + 2 * j * kBytes + 32 * k, from + (2 * j + 1) * kBytes + 32 * k, x[k], x[k + 1]);
        constexpr int64_t kLinesOf2 = kDim / 16 / kPasses;
        for (int64_t k = 0; k < kLinesOf2; ++k) one_of(lines, kLinesOf2 * j + k);
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRowsOf; ++r) {
          const Vec p = all_pairs(weights + j * kRows + r);
#pragma GCC unroll 4
          for (int64_t k = 0; k < kVecsOf; ++k) a[r][k] = dot_bf16_pairs(p, x[k], a[r][k]);
        }
      }
      weights += 4 * kRows;
    }
#pragma GCC unroll 8
    for (int64_t r = 0; r < kRowsOf; ++r)
#pragma GCC unroll 4
      for (int64_t j = 0; j < kVecsOf; ++j) store(results + r * kDim + j * kLanes, a[r][j]);
  }

  float *queries_, *results_;  // queries: [pair][row]
  uint32_t* weights_;          // [two cells][row]
  char *room_, *k_room_;       // for rows that do not follow on each other
  const int64_t quads_;
  const float factor_;
  alignas(64) float sum_[kRows] = {}, max_[kRows], exponents_[16 * kLanes];
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
