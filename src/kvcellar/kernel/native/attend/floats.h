// Logits and values in float32, or in pairs of bfloat16.

#pragma once

#include "attend/fetch.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Logits of so many rows are sums in one vector.
constexpr int64_t kRowsAtOnce = kLanes / 4;

// What a lane of 32 bits holds of a row, and how it is multiplied.
struct Singles {
  static constexpr int64_t kNumbers = 1;
  static Vec add_product(Vec x, Vec y, Vec a) { return fma(x, y, a); }
};
#if defined(KVC_BF16)
struct Pairs {
  static constexpr int64_t kNumbers = 2;
  static Vec add_product(Vec x, Vec y, Vec a) { return dot_bf16_pairs(x, y, a); }
};
#endif

// s[r][c] = q[r] . k[c] for kVecs * kRowsAtOnce rows and 16 cells, kCells at a time. A vector of the
// queries is 4 lanes of each of its rows, [vector][k_pad / 4][row][4]; those of a cell meet them
// all, and only 4 sums of each product are left to add up. Of pairs, logits are multiplied by `factor`.
// `tops`: the highest until now of each row, in 4 parts.
// `kPad`: k_pad, the lanes of a row, where it is known, else 0. `given`: for each lane half as many lines to
// fetch as it has numbers, where that is known.
template <class Lane, int kPad, int kVecs, int kCells>
inline void logits_of(const float* fours, int64_t any_pad, const float* k, float factor, float* s, float* tops,
                      const Lines& given) {
  Lines lines = given;
  const int64_t k_pad = kPad ? kPad : any_pad;
  for (int64_t c = 0; c < 16; c += kCells, k += kCells * k_pad) {
    Vec a[kVecs][kCells];
    for (auto& row : a)
      for (Vec& x : row) x = all(0.f);
    constexpr int64_t kStep = kPad ? 32 : 16;
    for (int64_t first = 0; first < k_pad; first += kStep) {
#pragma GCC unroll 8
      for (int64_t part = 0; part < kStep; part += 4) {
        const int64_t d = first + part;
        Vec x[kVecs];
        for (int i = 0; i < kVecs; ++i) x[i] = load(fours + (i * k_pad + d) * kRowsAtOnce);
        for (int j = 0; j < kCells; ++j) {
          const Vec y = all_fours(k + j * k_pad + d);
          for (int i = 0; i < kVecs; ++i) a[i][j] = Lane::add_product(x[i], y, a[i][j]);
        }
        constexpr int64_t kLines = Lane::kNumbers * kCells * 4;  // 32 for each line
        if (kPad && part / 4 * kLines % 32 == 0)
          for (int64_t i = 0; i < (kLines + 31) / 32; ++i) lines.one<are_floats_far>(part / 4 * kLines / 32 + i);
      }
    }
    for (int i = 0; i < kVecs; ++i) {
      Vec top = load(tops + i * kLanes);
      for (int j = 0; j < kCells; j += 4) {
        Vec sums = sum_fours(a[i][j], a[i][j + 1], a[i][j + 2], a[i][j + 3]);
        if constexpr (Lane::kNumbers == 2) sums = mul(sums, all(factor));
        top = max(top, sums);
        store_fours(sums, s + i * kRowsAtOnce * kTile + c + j, kTile);
      }
      store(tops + i * kLanes, top);
    }
  }
}

// As many sums as there are registers for.
#if defined(KVC_AVX512)
constexpr int kAlone = 16, kMostVecs = 4, kWide = 4;
#elif defined(KVC_NEON)
constexpr int kAlone = 8, kMostVecs = 4, kWide = 4;
#else
constexpr int kAlone = 8, kMostVecs = 2, kWide = 2;
#endif

// acc[r][0 .. n_vecs vectors) += s[r][c] * v[c], for 4 rows and n cells whose V rows lie `step` bytes
// apart; `read` gives a row's vectors. `given`: kFetched lines to fetch for each 8 cells.
template <int n_vecs, int kFetched, class Read>
inline void values_of_4(const float* s, const char* row, int64_t step, int64_t n, int64_t v_pad, float* acc,
                        Lines& given, const Read& read) {
  Lines lines = given;
  Vec a[4][n_vecs];
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < n_vecs; ++j) a[r][j] = load(acc + r * v_pad + j * kLanes);
  const auto add = [&](int64_t c) {
    Vec x[n_vecs];
    read(row, x);
    row += step;
    for (int r = 0; r < 4; ++r) {
      const Vec p = all(s[r * kTile + c]);
      for (int j = 0; j < n_vecs; ++j) a[r][j] = fma(p, x[j], a[r][j]);
    }
  };
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) {
      if (i * kFetched % 8 == 0)
        for (int64_t j = 0; j < (kFetched + 7) / 8; ++j) lines.one<are_floats_far>(i * kFetched / 8 + j);
      add(c + i);
    }
  }
  for (; c < n; ++c) add(c);
  given.at = lines.at;
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < n_vecs; ++j) store(acc + r * v_pad + j * kLanes, a[r][j]);
}

#if defined(KVC_BF16)
// The same of pairs: acc[r][0 .. kVecs vectors), for 4 rows and the n cells of a tile. Rows lie `steps`
// bytes apart from `at` on, 16 at a time. V rows of two cells come by turns; so do the results, like numbers
// of load_split. Weights are kTile / 2 pairs a row.
template <int kVecs, class Fetch>
inline void pairs_of_4(const uint32_t* weights, const char* const* at, const int64_t* steps, int64_t n, int64_t v_pad,
                       float* acc, const Fetch& fetch_16) {
  Vec a[4][kVecs];
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kVecs; ++j) a[r][j] = load(acc + r * v_pad + j * kLanes);
  for (int64_t c = 0; c < n; c += 16, weights += 8, ++at, ++steps) {
    Lines lines = fetch_16(c);
    const char* row = *at;
    const int64_t step = *steps;
    const auto add = [&](int64_t i, bool is_alone) __attribute__((always_inline)) {
      Vec x[kVecs];
      for (int j = 0; j < kVecs; j += 2)
        load_pairs(row + j * 32, is_alone ? nullptr : row + step + j * 32, x[j], x[j + 1]);
      row += 2 * step;
      for (int r = 0; r < 4; ++r) {
        const Vec p = all_pairs(weights + r * kTile / 2 + i);
        for (int j = 0; j < kVecs; ++j) a[r][j] = dot_bf16_pairs(p, x[j], a[r][j]);
      }
    };
    if (c + 16 <= n) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i) {
        lines.four();
        add(i, false);
      }
    } else {
      for (int64_t i = 0; 2 * i < n - c; ++i) add(i, 2 * i + 1 == n - c);
    }
  }
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kVecs; ++j) store(acc + r * v_pad + j * kLanes, a[r][j]);
}
#endif

// Of each row, when a tile's logits become weights: what is taken from them, what earlier weights are
// multiplied by, what the largest will be; the tile's highest logit.
struct Maxima {
  const float *base, *factor, *most, *top;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
