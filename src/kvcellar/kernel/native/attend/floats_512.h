// A few query rows over K rows of 16-bit floats, with 512 bits. Rows become float32 in scratch, since a number of a
// cell meets four queries in four parts of a vector, which a load from there gives, and operations would take as
// long as products. What takes the time is not their number but that stores, loads and products wait for each
// other: so some cells' rows are decoded between the products of the cells before.
//
// Only included by attend/attention.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int64_t kAhead = 8;  // cells that are decoded while as many are multiplied

// Whether rows are read so.
inline bool is_decoded_ahead(const Pool& pool, int64_t rows) {
  const Side& k = pool.k;
  return rows <= 8 && (k.dtype == Dtype::bf16 || k.dtype == Dtype::f16) && k.dim % (2 * kLanes) == 0;
}

// 2 * kLanes numbers: bfloat16 in the order of load_split.
template <Dtype dtype>
inline void decode_two(const char* from, float* to) {
  const auto* numbers = reinterpret_cast<const uint16_t*>(from);
  Vec x, y;
  if constexpr (dtype == Dtype::bf16) {
    load_split(numbers, x, y);
  } else {
    x = load_half(numbers);
    y = load_half(numbers + kLanes);
  }
  store(to, x);
  store(to + kLanes, y);
}

// s[r][c] = q[r] . k[c] for kVecs * 4 rows and kAhead cells, whose rows are `now`; meanwhile as many rows, `step`
// bytes apart from `row` on, go to `then`. `fours`, `kPad` and `tops` as of logits_of; of `lines` one comes for each
// four numbers of a row.
template <Dtype dtype, int kPad, int kVecs>
inline void logits_of_8(const float* fours, int64_t any_pad, const float* now, float* then, const char* row,
                        int64_t step, float* s, float* tops, Lines& lines) {
  const int64_t k_pad = kPad ? kPad : any_pad;
  Vec a[kVecs][kAhead];
  for (auto& cells : a)
    for (Vec& x : cells) x = all(0.f);
  // So many pieces to decode are there as fours of a row.
  static_assert(kAhead * 4 == 2 * kLanes);
  int64_t d = 0;
#pragma GCC unroll 8
  for (int64_t c = 0; c < kAhead; ++c, row += step, then += k_pad) {
#pragma GCC unroll 4
    for (int64_t first = 0; first < k_pad; first += 2 * kLanes, d += 4) {
      Vec x[kVecs];
      for (int i = 0; i < kVecs; ++i) x[i] = load(fours + (i * k_pad + d) * kRowsAtOnce);
#pragma GCC unroll 8
      for (int64_t j = 0; j < kAhead; ++j) {
        const Vec y = kept(all_fours(now + j * k_pad + d));
        for (int i = 0; i < kVecs; ++i) a[i][j] = fma(x[i], y, a[i][j]);
      }
      decode_two<dtype>(row + 2 * first, then + first);
      if (kPad) lines.one<are_floats_far>(d / 4);
    }
  }
  for (int i = 0; i < kVecs; ++i) {
    Vec top = load(tops + i * kLanes);
    for (int64_t j = 0; j < kAhead; j += 4) {
      const Vec sums = sum_fours(a[i][j], a[i][j + 1], a[i][j + 2], a[i][j + 3]);
      top = max(top, sums);
      store_fours(sums, s + i * kRowsAtOnce * kTile + j, kTile);
    }
    store(tops + i * kLanes, top);
  }
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
