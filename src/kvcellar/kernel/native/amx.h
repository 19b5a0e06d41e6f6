// The same two products on the matrix unit (AMX), for many rows over bfloat16 of a multiple of 32 numbers.
//
// Logits: 16 K rows are a tile as they lie in the pool (rows of a run have one stride), the queries
// are the other operand. bfloat16 queries go in as they are, others as the sum of two bfloat16.
// Values: cells lie along the inner dimension, so V rows are interleaved first, by 2. Weights are the sum of
// two bfloat16. Sums stay in the unit for all cells of a step.
//
// A tile load waits for the stores before it and a load for a tile store, even where only the last
// 12 bits of the addresses are the same. So each tile of cells goes through steps that the caller
// takes in turns with those of the next: what one has stored is loaded when another is done.
//
// Only included by attend_impl.h.

#include <immintrin.h>

#include "isa.h"
#include "tiles.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Tile registers. K or values: 16 rows x 64 bytes, queries, logits; weights, four sums of values.
#define KVC_TK 0
#define KVC_TQ 1
#define KVC_TS 2
#define KVC_TP 3
#define KVC_TA0 4
#define KVC_TA1 5
#define KVC_TA2 6
#define KVC_TA3 7

inline bool fits_matrix(const Side& side) { return side.dtype == Dtype::bf16 && side.dim % 32 == 0; }

class Matrix {
 public:
  // For sides that fit. `q`: rows of k_pad floats. Logits are multiplied by `factor`.
  Matrix(const Side& k, const Side& v, int64_t rows, int64_t k_pad, int64_t v_pad, const float* q, float factor,
         char* memory)
      : k_(k), v_(v), rows_(rows), v_pad_(v_pad), factor_(factor), blocks_((rows + 15) / 16) {
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    auto take = [&address](int64_t n_bytes) {
      char* piece = reinterpret_cast<char*>(address);
      address += static_cast<uintptr_t>((n_bytes + 63) / 64 * 64);
      return piece;
    };
    products_ = reinterpret_cast<float*>(take(2 * kTile * 64));
    staged_ = take(kTile * k.dim * 2);
    queries_ = take(blocks_ * 16 * k.dim * 4);
    values_ = take(kTile * v.dim * 2);
    weights_ = take(blocks_ * 16 * kTile * 4);
    sums_ = reinterpret_cast<float*>(take(2 * 4 * 1024));
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.rows[tile] = 16;
      shapes.bytes[tile] = 64;
    }
    load_shapes(shapes);
    load_queries(q, k_pad);
  }

  ~Matrix() { _tile_release(); }

  // Logits in three steps, for the n <= kTile cells of `rows`. First their K rows to where tiles can
  // be loaded from: the pool itself, if they have one stride.
  void stage(const TileRows& rows, int64_t n) {
    const int64_t row_bytes = k_.dim * 2;
    char* to = staged_;
    tiles_.n = 0;
    for (int64_t c = 0; c < n; c += 16, to += 16 * row_bytes) {
      const int64_t m = n - c < 16 ? n - c : 16;
      tiles_.from[tiles_.n] = to;
      tiles_.stride[tiles_.n] = row_bytes;
      if (rows.is_whole[c / 16]) {
        tiles_.from[tiles_.n] = rows.first[kKRows][c / 16];
        tiles_.stride[tiles_.n] = k_.cell_stride;
      } else {
        for (int64_t i = 0; i < m; ++i)
          for (int64_t d = 0; d < row_bytes; d += 64)
            _mm512_store_si512(to + i * row_bytes + d,
                               _mm512_loadu_si512(rows.at[kKRows][c + i] + d));
      }
      ++tiles_.n;
    }
  }

  // Then the first of the products, of one block of 16 rows.
  void multiply(Ahead& ahead) const { multiply(0, ahead); }

  // Then s[row][c]. The other products are made meanwhile.
  void logits(float* s, Ahead& ahead) const {
    for (int64_t block = 0; block < blocks_; ++block) {
      if (block + 1 < blocks_) multiply(block + 1, ahead);
      for (int64_t i = 0; i < tiles_.n; ++i) {
        ahead.some();
        put_logits(block, i, product(block) + i * 256, s);
      }
    }
  }

  // A row's logits to weights, 2**(s[c] - base), as operands; their sum. Logits up to the next multiple of 64
  // are minus infinity.
  Vec weigh(int64_t r, const float* s, float base, int64_t n, Ahead& ahead) const {
    const __m512i uppers = _mm512_add_epi16(
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                         24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
        _mm512_set1_epi16(1));
    const __m512i top_bits = _mm512_set1_epi32(-65536);
    char *high = weight(r / 16, 0, 0, r % 16), *low = weight(r / 16, 1, 0, r % 16);
    Vec total = all(0.f);
    for (int64_t c = 0; c < n; c += 32, high += 1024, low += 1024) {
      ahead.some();
      const Vec p = exp2_below_1(sub(_mm512_load_ps(s + c), all(base)));
      const Vec q = exp2_below_1(sub(_mm512_load_ps(s + c + 16), all(base)));
      total = add(total, add(p, q));
      const __m512i x = _mm512_castps_si512(p), y = _mm512_castps_si512(q);
      const Vec rest_p = sub(p, _mm512_castsi512_ps(_mm512_and_si512(x, top_bits)));
      const Vec rest_q = sub(q, _mm512_castsi512_ps(_mm512_and_si512(y, top_bits)));
      _mm512_store_si512(high, _mm512_permutex2var_epi16(x, uppers, y));
      const __m512bh rest = _mm512_cvtne2ps_pbh(rest_q, rest_p);
      std::memcpy(low, &rest, 64);
    }
    return total;
  }

  // Values in three steps: V rows as operands, for all numbers [32 numbers][32 cells].
  void interleave(const TileRows& rows, int64_t n, Ahead& ahead) const {
    char* to = values_;
    for (int64_t d = 0; d < v_.dim; d += 32)
      for (int64_t c = 0; c < n; c += 32, to += 2048) interleave(rows, c, n, d, to, ahead);
  }

  // Sums of weight[row][c] * V[c] over all cells. They come to `acc` later, the last with `settle`.
  void sum_values(int64_t n, float* acc, Ahead& ahead) {
    const int64_t units = blocks_ * ((v_.dim + 63) / 64);
    for (int64_t unit = 0; unit < units; ++unit) {
      keep_order();
      sum_values_of(unit, n, ahead);
      keep_order();
      settle(acc);
      pending_ = unit;
    }
  }

  // Adds the sums that are pending: before the next weights, and behind the last tile.
  void settle(float* acc) {
    if (pending_ >= 0) add_sums(pending_, acc);
    pending_ = -1;
  }

  // Whether a weight of 0 silences all of these V rows.
  bool is_finite(const TileRows& rows, int64_t n) const {
    bool found = false;
    for (int64_t c = 0; c < n; ++c) {
      const auto* bits = reinterpret_cast<const uint16_t*>(rows.row(kVRows, c));
      for (int64_t d = 0; d < v_.dim; ++d) found |= (bits[d] & 0x7F80) == 0x7F80;
    }
    return !found;
  }

 private:
  // K rows of 16 cells each.
  struct KTiles {
    int64_t n = 0, stride[kTile / 16];
    const char* from[kTile / 16];
  };

  // Queries as operands: for each block of 16 rows, chunk of K and term one tile of pairs along the dimension.
  uint16_t* query(int64_t block, int64_t chunk, int term) const {
    return reinterpret_cast<uint16_t*>(queries_) +
           ((block * (k_.dim / 32) + chunk) * 2 + term) * 512;
  }

  void load_queries(const float* q, int64_t k_pad) {
    std::memset(queries_, 0, blocks_ * 16 * k_.dim * 4);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t d = 0; d < k_.dim; d += 16) {
        const __m512i bits = _mm512_castps_si512(load(q + r * k_pad + d));
        const __m512i top = _mm512_and_si512(bits, _mm512_set1_epi32(-65536));
        const __m512 rest = _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(top));
        const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
        const __m256bh low = _mm512_cvtneps_pbh(rest);
        has_low_ |= _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_OQ) != 0;
        alignas(32) uint32_t pairs[2][8];
        std::memcpy(pairs[0], &high, 32);
        std::memcpy(pairs[1], &low, 32);
        for (int term = 0; term < 2; ++term) {
          auto* to = reinterpret_cast<uint32_t*>(query(r / 16, d / 32, term));
          for (int64_t i = 0; i < 8; ++i) to[(d % 32 / 2 + i) * 16 + r % 16] = pairs[term][i];
        }
      }
    }
  }

  float* product(int64_t block) const { return products_ + block % 2 * kTile * 16; }

  // 16 cells x 16 rows of each tile.
  void multiply(int64_t block, Ahead& ahead) const {
    const int64_t chunks = k_.dim / 32;
    float* to = product(block);
    keep_order();
    for (int64_t i = 0; i < tiles_.n; ++i) {
      ahead.some();
      _tile_zero(KVC_TS);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        _tile_loadd(KVC_TK, tiles_.from[i] + 64 * chunk, tiles_.stride[i]);
        _tile_loadd(KVC_TQ, query(block, chunk, 0), 64);
        _tile_dpbf16ps(KVC_TS, KVC_TK, KVC_TQ);
        if (has_low_) {
          _tile_loadd(KVC_TQ, query(block, chunk, 1), 64);
          _tile_dpbf16ps(KVC_TS, KVC_TK, KVC_TQ);
        }
      }
      _tile_stored(KVC_TS, to + 256 * i, 64);
    }
    keep_order();
  }

  // Products of tile i to logits.
  void put_logits(int64_t block, int64_t i, const float* from, float* s) const {
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    __m512 x[16];
    for (int j = 0; j < 16; ++j) x[j] = _mm512_load_ps(from + 16 * j);
    transpose16(x);
    float* to = s + block * 16 * kTile + 16 * i;
    for (int64_t r = 0; r < n_rows; ++r)
      _mm512_store_ps(to + r * kTile, _mm512_mul_ps(x[r], all(factor_)));
  }

  // 32 cells of 32 numbers: two tiles [pair of cells][16 numbers x 2 cells], the first has those at
  // 0-3, 8-11, 16-19, 24-27.
  void interleave(const TileRows& rows, int64_t first, int64_t n, int64_t d, char* to, Ahead& ahead) const {
    for (int64_t c = first; c < first + 32; c += 16) {
      const char* room[16];
      const char* const* from = sixteen_values(rows, c, n, 2 * d, room);
      for (int64_t i = 0; i < 16; i += 2, to += 64) {
        if (i % 8 == 0) ahead.some();
        const __m512i x = _mm512_loadu_si512(from[i]), y = _mm512_loadu_si512(from[i + 1]);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(x, y));
      }
    }
  }

  // Where to read 64 bytes or less of 16 V rows, `offset` bytes from their starts; zeros behind the
  // n-th.
  const char* const* sixteen_values(const TileRows& rows, int64_t c, int64_t n, int64_t offset,
                                    const char** room) const {
    alignas(64) static const char zeros[64] = {};
    if (c < n && rows.is_whole[c / 16]) {
      const char* from = rows.first[kVRows][c / 16] + offset;
      const int64_t stride = v_.cell_stride;
      for (int64_t i = 0; i < 16; ++i) room[i] = from + i * stride;
    } else {
      for (int64_t i = 0; i < 16; ++i) room[i] = c + i < n ? rows.at[kVRows][c + i] + offset : zeros;
    }
    return room;
  }

  // Weights as operands: tiles of 64 bytes of cells, [block][upper bits, the rest][step][row].
  char* weight(int64_t block, int term, int64_t step, int64_t row) const {
    return weights_ + ((block * 2 + term) * (kTile / 32) + step) * 1024 + row * 64;
  }

  float* sums(int64_t unit) const { return sums_ + unit % 2 * 1024; }

  // Up to 64 numbers of a block of rows.
  void sum_values_of(int64_t unit, int64_t n, Ahead& ahead) const {
    const int64_t block = unit % blocks_, d = unit / blocks_ * 64, steps = (n + 31) / 32;
    const bool is_half = v_.dim - d < 64;
    const char* v = values_ + d / 32 * steps * 2048;
    _tile_zero(KVC_TA0);
    _tile_zero(KVC_TA1);
    _tile_zero(KVC_TA2);
    _tile_zero(KVC_TA3);
    for (int64_t step = 0; step < steps; ++step, v += 2048) {
      ahead.some();
      _tile_loadd(KVC_TP, weight(block, 0, step, 0), 64);
      _tile_loadd(KVC_TQ, weight(block, 1, step, 0), 64);
      _tile_loadd(KVC_TK, v, 64);
      _tile_dpbf16ps(KVC_TA0, KVC_TP, KVC_TK);
      _tile_dpbf16ps(KVC_TA0, KVC_TQ, KVC_TK);
      _tile_loadd(KVC_TK, v + 1024, 64);
      _tile_dpbf16ps(KVC_TA1, KVC_TP, KVC_TK);
      _tile_dpbf16ps(KVC_TA1, KVC_TQ, KVC_TK);
      if (is_half) continue;
      _tile_loadd(KVC_TK, v + steps * 2048, 64);
      _tile_dpbf16ps(KVC_TA2, KVC_TP, KVC_TK);
      _tile_dpbf16ps(KVC_TA2, KVC_TQ, KVC_TK);
      _tile_loadd(KVC_TK, v + steps * 2048 + 1024, 64);
      _tile_dpbf16ps(KVC_TA3, KVC_TP, KVC_TK);
      _tile_dpbf16ps(KVC_TA3, KVC_TQ, KVC_TK);
    }
    float* to = sums(unit);
    _tile_stored(KVC_TA0, to, 64);
    _tile_stored(KVC_TA1, to + 256, 64);
    _tile_stored(KVC_TA2, to + 512, 64);
    _tile_stored(KVC_TA3, to + 768, 64);
  }

  void add_sums(int64_t unit, float* acc) const {
    const int64_t block = unit % blocks_, first_d = unit / blocks_ * 64;
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const float* even = sums(unit);
    for (int64_t d = first_d; d < v_.dim && d < first_d + 64; d += 32, even += 512) {
      const float* odd = even + 256;
      for (int64_t r = 0; r < n_rows; ++r) {
        const __m512 a = _mm512_load_ps(even + r * 16), b = _mm512_load_ps(odd + r * 16);
        float* to = acc + (block * 16 + r) * v_pad_ + d;
        store(to, add(load(to), _mm512_permutex2var_ps(a, first, b)));
        store(to + 16, add(load(to + 16), _mm512_permutex2var_ps(a, second, b)));
      }
    }
  }

  const Side &k_, &v_;
  const int64_t rows_, v_pad_;
  const float factor_;
  const int64_t blocks_;
  bool has_low_ = false;
  KTiles tiles_;
  int64_t pending_ = -1;  // the sums that are not in `acc` yet
  float *products_ = nullptr, *sums_ = nullptr;
  char *staged_ = nullptr, *queries_ = nullptr, *values_ = nullptr, *weights_ = nullptr;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
