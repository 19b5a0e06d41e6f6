// The same two products on the matrix unit (AMX), for rows that it can read: bfloat16 of a multiple
// of 32 numbers; int8 and int4 of a multiple of 64 in groups of 32 or of a multiple of 64.
//
// Logits: 16 K rows are a tile as they lie in the pool (rows of a run have one stride), the queries
// are the other operand. bfloat16 queries go in as they are, others as the sum of two bfloat16.
// Integer K rows meet queries of 16 bits, as two bytes; scale and bias come in afterwards.
// Values: cells lie along the inner dimension, so V rows are interleaved first, by 2 or by 4. Weights
// are the sum of two bfloat16, or 16 bits of about the largest one, as two bytes. Sums stay in the
// unit for all cells of a step.
//
// A tile load waits for the stores before it and a load for a tile store, even where only the last
// 12 bits of the addresses are the same. So each tile of cells goes through steps that the caller
// takes in turns with those of the next: what one has stored is loaded when another is done.
//
// Only included by attend_impl.h.

#include <immintrin.h>

#include "affine.h"
#include "isa.h"
#include "tiles.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// 16 cells of 4 numbers each to 4 vectors of 16 cells.
inline void transpose4(__m512* x) {
  const __m512i low = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i high = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
  const __m512 a = x[0], b = x[1], c = x[2], d = x[3];
  const __m512 ab0 = _mm512_permutex2var_ps(a, low, b), ab1 = _mm512_permutex2var_ps(a, high, b);
  const __m512 cd0 = _mm512_permutex2var_ps(c, low, d), cd1 = _mm512_permutex2var_ps(c, high, d);
  x[0] = _mm512_shuffle_f32x4(ab0, cd0, 0x44);
  x[1] = _mm512_shuffle_f32x4(ab0, cd0, 0xee);
  x[2] = _mm512_shuffle_f32x4(ab1, cd1, 0x44);
  x[3] = _mm512_shuffle_f32x4(ab1, cd1, 0xee);
}

// Tile registers. K or values: 16 rows x 64 bytes, queries, logits; weights, four sums of values.
#define KVC_TK 0
#define KVC_TQ 1
#define KVC_TS 2
#define KVC_TP 3
#define KVC_TA0 4
#define KVC_TA1 5
#define KVC_TA2 6
#define KVC_TA3 7

inline bool fits_matrix(const Side& side) {
  return side.dtype == Dtype::bf16 ? side.dim % 32 == 0 : fits_chunks(side);
}

// Each group's scales, as shares of the largest; that goes to `largest`.
inline void share_scales(int64_t n_groups, int64_t n, float* affine, float* largest) {
  for (int64_t g = 0; g < n_groups; ++g) {
    float* scales = affine + g * 2 * kTile;
    __m512 most = _mm512_setzero_ps();
    for (int64_t c = 0; c < n; c += 16) most = _mm512_max_ps(most, _mm512_load_ps(scales + c));
    const float top = _mm512_reduce_max_ps(most);
    const __m512 inverse = all(top > 0.f ? 1.f / top : 0.f);
    for (int64_t c = 0; c < n; c += 16)
      _mm512_store_ps(scales + c, _mm512_mul_ps(_mm512_load_ps(scales + c), inverse));
    largest[g] = top;
  }
}

class Matrix {
 public:
  const bool has_k, has_v;

  // `with_k`, `with_v`: only for sides that fit. `q`: rows of k_pad floats. Logits are multiplied
  // by `factor`.
  Matrix(bool with_k, bool with_v, const Side& k, const Side& v, int64_t rows, int64_t k_pad,
         int64_t v_pad, const float* q, float factor, char* memory)
      : has_k(with_k),
        has_v(with_v),
        k_(k),
        v_(v),
        rows_(rows),
        v_pad_(v_pad),
        factor_(factor),
        width_(rows <= 4 && k.dtype == Dtype::bf16 ? 4 : 16),
        is_packed_(rows <= 4 && k.dtype != Dtype::bf16),
        blocks_((rows + 15) / 16),
        stacked_(rows <= 8),
        joined_(rows <= 4 && is_quantised(v.dtype) && v.group_size == 32) {
    if (!has_k && !has_v) return;
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    auto take = [&address](int64_t n_bytes) {
      char* piece = reinterpret_cast<char*>(address);
      address += static_cast<uintptr_t>((n_bytes + 63) / 64 * 64);
      return piece;
    };
    tile_ = reinterpret_cast<float*>(take(2 * kTile * 64 * 4));
    k_affine_ = reinterpret_cast<float*>(take(2 * 4 * kTile * groups(k)));
    v_affine_ = reinterpret_cast<float*>(take(2 * 4 * kTile * groups(v)));
    staged_ = take(kTile * k.dim * 2);
    queries_ = take(blocks_ * 16 * k.dim * 4);
    q_sums_ = reinterpret_cast<float*>(take(4 * blocks_ * 16 * (k.dim / 32 + 1)));
    q_steps_ = reinterpret_cast<float*>(take(4 * blocks_ * 16));
    values_ = take(kTile * v.dim * 2);
    weights_ = take(blocks_ * 16 * kTile * (2 * groups(v) > 4 ? 2 * groups(v) : 4));
    sums_ = reinterpret_cast<float*>(take(2 * 4 * 2048));
    steps_ = reinterpret_cast<float*>(take(4 * blocks_ * 16 * groups(v)));
    biases_ = reinterpret_cast<float*>(take(64 * blocks_ * 16 * groups(v)));
    std::memset(biases_, 0, 64 * blocks_ * 16 * groups(v));
    // Few rows: both terms of the weights are rows of one operand; of fewer still, those of a
    // chunk's two groups too.
    const int64_t v_rows = joined_ ? 4 * rows : stacked_ ? 2 * rows : 16;
    TileShapes shapes;
    const auto set = [&shapes](int tile, int64_t n_rows, int64_t n_bytes) {
      shapes.rows[tile] = static_cast<uint8_t>(n_rows);
      shapes.bytes[tile] = static_cast<uint16_t>(n_bytes);
    };
    set(KVC_TK, 16, 64);
    set(KVC_TQ, 16, 4 * width_);
    set(KVC_TS, 16, 4 * width_);
    set(KVC_TP, v_rows, 64);
    for (int tile = KVC_TA0; tile <= KVC_TA3; ++tile) set(tile, v_rows, 64);
    load_shapes(shapes);
    if (has_k) k.dtype == Dtype::bf16 ? load_float_queries(q, k_pad) : load_int_queries(q, k_pad);
  }

  ~Matrix() {
    if (has_k || has_v) _tile_release();
  }

  // Logits in three steps, for the n <= kTile cells of `rows`. First their K rows to where tiles can
  // be loaded from: the pool itself, if they have one stride.
  void stage(const TileRows& rows, int64_t n) {
    const int64_t row_bytes = k_.dtype == Dtype::bf16 ? k_.dim * 2 : k_.dim;
    if (k_.dtype != Dtype::bf16) load_affine<kKAffine>(groups(k_), rows, n, k_affine_);
    char* to = staged_;
    tiles_.n = 0;
    for (int64_t c = 0; c < n; c += 16, to += 16 * row_bytes) {
      const int64_t m = n - c < 16 ? n - c : 16;
      const char* room[16];
      tiles_.from[tiles_.n] = to;
      tiles_.stride[tiles_.n] = row_bytes;
      if (k_.dtype == Dtype::int4) {
        if (rows.is_whole[c / 16] && k_.dim == 64 && k_.cell_stride == 32)
          unpack_dense(rows.first[kKRows][c / 16], to);
        else
          unpack(rows.sixteen(kKRows, c, room), m, to);
      } else if (rows.is_whole[c / 16]) {
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

  // Then the first of the products: of one block of 16 rows and, of integers, one chunk of 64
  // numbers.
  void multiply(Ahead& ahead) const { multiply(0, ahead); }

  // Then s[row][c]. The other products are made meanwhile.
  void logits(float* s, Ahead& ahead) const {
    const int64_t chunks = k_chunks(), units = blocks_ * chunks;
    for (int64_t unit = 0; unit < units; ++unit) {
      if (unit + 1 < units) multiply(unit + 1, ahead);
      const int64_t block = unit / chunks, chunk = unit % chunks;
      const float* from = product(unit);
      for (int64_t i = 0; i < tiles_.n; ++i) {
        ahead.some();
        k_.dtype == Dtype::bf16 ? float_logits(block, i, from + i * 16 * width_, s)
        : is_packed_            ? packed_logits(chunk, i, from + i * 256, s)
                                : int_logits(block, chunk, i, from + i * 1024, s);
      }
    }
  }

  // Before `weigh`: what it needs of these V rows.
  void prepare(const TileRows& rows, int64_t n) {
    if (v_.dtype == Dtype::bf16) return;
    load_affine<kVAffine>(groups(v_), rows, n, v_affine_);
    share_scales(groups(v_), n, v_affine_, top_scale_);
  }

  // A row's logits to weights, 2**(s[c] - base), as operands; their sums. The largest of them is
  // `top`; earlier weights are multiplied by `factor`. Logits up to the next multiple of 64 are
  // minus infinity.
  Vec weigh(int64_t r, const float* s, float base, float factor, float top, int64_t n,
            Ahead& ahead) const {
    if (v_.dtype == Dtype::bf16) return float_weights(r, s, base, n, ahead);
    if (factor != 1.f) scale_biases(r, factor);
    return int_weights(r, s, base, top, n, ahead);
  }

  void scale_biases(int64_t r, float factor) const {
    for (int64_t g = 0; has_v && g < groups(v_); ++g) {
      float* bias = biases_ + (r * groups(v_) + g) * 16;
      store(bias, mul(load(bias), all(factor)));
    }
  }

  // Values in three steps: V rows as operands, for all numbers [64 numbers][32 or 64 cells].
  void interleave(const TileRows& rows, int64_t n, Ahead& ahead) const {
    const bool is_float = v_.dtype == Dtype::bf16;
    const int64_t cells = is_float ? 32 : 64, width = is_float ? 32 : 64;
    char* to = values_;
    for (int64_t d = 0; d < v_.dim; d += width)
      for (int64_t c = 0; c < n; c += cells, to += cells * width * (is_float ? 2 : 1))
        is_float ? interleave_floats(rows, c, n, d, to, ahead)
                 : interleave_ints(rows, c, n, d, to, ahead);
  }

  // Sums of weight[row][c] * V[c] over all cells. They come to `acc` later, the last with `settle`.
  void sum_values(int64_t n, float* acc, Ahead& ahead) {
    const int64_t units = sum_units();
    for (int64_t unit = 0; unit < units; ++unit) {
      keep_order();
      v_.dtype == Dtype::bf16 ? float_sums(unit, n, ahead) : int_sums(unit, n, ahead);
      keep_order();
      settle(acc);
      pending_ = unit;
    }
  }

  // Adds the sums that are pending: before the next weights.
  void settle(float* acc) {
    if (pending_ < 0) return;
    v_.dtype == Dtype::bf16 ? add_floats(pending_, acc) : add_ints(pending_, acc);
    pending_ = -1;
  }

  // Behind the last tile.
  void finish(float* acc) {
    settle(acc);
    for (int64_t i = 0; has_v && i < rows_ * groups(v_); ++i) {
      const int64_t r = i / groups(v_), g = i % groups(v_);
      const Vec bias = all(sum(load(biases_ + i * 16)));
      for (int64_t d = g * v_.group_size; d < (g + 1) * v_.group_size; d += 16) {
        float* to = acc + r * v_pad_ + d;
        store(to, add(load(to), bias));
      }
    }
  }

  // Whether a weight of 0 silences all of these V rows.
  bool is_finite(const TileRows& rows, int64_t n) const {
    if (v_.dtype != Dtype::bf16) return has_finite_affine(v_, rows, kVAffine, n);
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

  // Queries as operands: for each block of 16 rows, chunk of K and term one tile of pairs (bf16) or
  // fours (int8) along the dimension.
  uint16_t* float_query(int64_t block, int64_t chunk, int term) const {
    return reinterpret_cast<uint16_t*>(queries_) +
           ((block * (k_.dim / 32) + chunk) * 2 + term) * 512;
  }
  int8_t* int_query(int64_t block, int64_t chunk, int64_t sub, int term) const {
    return reinterpret_cast<int8_t*>(queries_) +
           (((block * (k_.dim / 64) + chunk) * 2 + sub) * 2 + term) * 1024;
  }

  void load_float_queries(const float* q, int64_t k_pad) {
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
          auto* to = reinterpret_cast<uint32_t*>(float_query(r / 16, d / 32, term));
          for (int64_t i = 0; i < 8; ++i) to[(d % 32 / 2 + i) * width_ + r % 16] = pairs[term][i];
        }
      }
    }
  }

  void load_int_queries(const float* q, int64_t k_pad) {
    std::memset(queries_, 0, blocks_ * 16 * k_.dim * 4);
    const bool halves = k_.group_size == 32;
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    for (int64_t r = 0; r < rows_; ++r) {
      const float* row = q + r * k_pad;
      __m512 most = _mm512_setzero_ps();
      for (int64_t d = 0; d < k_.dim; d += 16)
        most = _mm512_max_ps(most, _mm512_abs_ps(load(row + d)));
      const float top = _mm512_reduce_max_ps(most);
      q_steps_[r] = factor_ * (top / 32512.f);
      const __m512 inverse = all(top > 0.f ? 32512.f / top : 0.f);
      for (int64_t d = 0; d < k_.dim; d += 32) {
        const int64_t chunk = d / 64, half = d / 32 % 2, sub = halves ? half : 0;
        __m512 x = load(row + d), y = load(row + d + 16);
        float& sum = q_sums_[r * (k_.dim / 32) + chunk * 2 + sub];
        const float more = factor_ * _mm512_reduce_add_ps(_mm512_add_ps(x, y));
        sum = half && !halves ? sum + more : more;
        int64_t fours[2] = {half * 8, half * 8 + 4};  // where these 16 numbers are in the tile
        if (k_.dtype == Dtype::int4) {                // even numbers first
          const __m512 both = x;
          x = _mm512_permutex2var_ps(both, evens, y);
          y = _mm512_permutex2var_ps(both, odds, y);
          fours[0] = half * 4;
          fours[1] = half * 4 + 8;
        }
        for (int i = 0; i < 2; ++i) {
          const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(i ? y : x, inverse));
          const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
          const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
          alignas(16) uint32_t words[2][4];
          _mm_store_si128(reinterpret_cast<__m128i*>(words[0]), _mm512_cvtepi32_epi8(high));
          _mm_store_si128(reinterpret_cast<__m128i*>(words[1]), _mm512_cvtepi32_epi8(low));
          for (int term = 0; term < 2; ++term) {
            const int64_t column = is_packed_ ? (sub * 2 + term) * 4 + r : r % 16;
            auto* to = reinterpret_cast<uint32_t*>(
                is_packed_ ? int_query(0, chunk, 0, 0) : int_query(r / 16, chunk, sub, term));
            for (int64_t j = 0; j < 4; ++j) to[(fours[i] + j) * width_ + column] = words[term][j];
          }
        }
      }
    }
  }

  int64_t k_chunks() const { return k_.dtype == Dtype::bf16 ? 1 : k_.dim / 64; }
  float* product(int64_t unit) const { return tile_ + unit % 2 * kTile * 64; }

  void multiply(int64_t unit, Ahead& ahead) const {
    const int64_t block = unit / k_chunks(), chunk = unit % k_chunks();
    keep_order();
    k_.dtype == Dtype::bf16 ? float_product(block, product(unit), ahead)
    : is_packed_            ? packed_product(chunk, product(unit), ahead)
                            : int_product(block, chunk, product(unit), ahead);
    keep_order();
  }

  // Numbers of 4 bits as bytes: of each 64 the even ones, then the odd ones.
  void unpack(const char* const* rows, int64_t m, char* to) const {
    const __m256i half = _mm256_set1_epi8(15);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t d = 0; d < k_.dim / 2; d += 32) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + d));
        auto* at = reinterpret_cast<__m256i*>(to + i * k_.dim + 2 * d);
        _mm256_store_si256(at, _mm256_and_si256(both, half));
        _mm256_store_si256(at + 1, _mm256_and_si256(_mm256_srli_epi16(both, 4), half));
      }
    }
  }

  // 16 cells of 64 numbers that follow on each other, two at a time.
  static void unpack_dense(const char* from, char* to) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int64_t i = 0; i < 16; i += 2) {
      const __m512i both = _mm512_loadu_si512(from + 32 * i);
      const __m512i even = _mm512_and_si512(both, low);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      _mm512_store_si512(to + 64 * i, _mm512_shuffle_i64x2(even, odd, 0x44));
      _mm512_store_si512(to + 64 * i + 64, _mm512_shuffle_i64x2(even, odd, 0xee));
    }
  }

  // 16 cells x width_ of each tile.
  void float_product(int64_t block, float* to, Ahead& ahead) const {
    const int64_t chunks = k_.dim / 32;
    for (int64_t i = 0; i < tiles_.n; ++i) {
      ahead.some();
      _tile_zero(KVC_TS);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        _tile_loadd(KVC_TK, tiles_.from[i] + 64 * chunk, tiles_.stride[i]);
        _tile_loadd(KVC_TQ, float_query(block, chunk, 0), 4 * width_);
        _tile_dpbf16ps(KVC_TS, KVC_TK, KVC_TQ);
        if (has_low_) {
          _tile_loadd(KVC_TQ, float_query(block, chunk, 1), 4 * width_);
          _tile_dpbf16ps(KVC_TS, KVC_TK, KVC_TQ);
        }
      }
      _tile_stored(KVC_TS, to + 16 * width_ * i, 4 * width_);
    }
  }

  // 16 cells x (both groups' rows of the upper bytes and of the lower).
  void packed_product(int64_t chunk, float* to, Ahead& ahead) const {
    _tile_loadd(KVC_TQ, int_query(0, chunk, 0, 0), 64);
    for (int64_t i = 0; i < tiles_.n; ++i) {
      ahead.some();
      _tile_loadd(KVC_TK, tiles_.from[i] + 64 * chunk, tiles_.stride[i]);
      _tile_zero(KVC_TS);
      _tile_dpbusd(KVC_TS, KVC_TK, KVC_TQ);
      _tile_stored(KVC_TS, to + 256 * i, 64);
    }
  }

  // [group of the chunk][upper and lower bytes] of 16 cells x 16 rows.
  void int_product(int64_t block, int64_t chunk, float* to, Ahead& ahead) const {
    const int64_t subs = k_.group_size == 32 ? 2 : 1;
    for (int64_t i = 0; i < tiles_.n; ++i) {
      ahead.some();
      _tile_loadd(KVC_TK, tiles_.from[i] + 64 * chunk, tiles_.stride[i]);
      for (int64_t sub = 0; sub < subs; ++sub) {
        for (int term = 0; term < 2; ++term) {
          _tile_zero(KVC_TS);
          _tile_loadd(KVC_TQ, int_query(block, chunk, sub, term), 64);
          _tile_dpbusd(KVC_TS, KVC_TK, KVC_TQ);
          _tile_stored(KVC_TS, to + 1024 * i + 512 * sub + 256 * term, 64);
        }
      }
    }
  }

  // Products of tile i to logits.
  void float_logits(int64_t block, int64_t i, const float* from, float* s) const {
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    __m512 x[16];
    if (width_ == 4) {
      for (int j = 0; j < 4; ++j) x[j] = _mm512_load_ps(from + 16 * j);
      transpose4(x);
    } else {
      for (int j = 0; j < 16; ++j) x[j] = _mm512_load_ps(from + 16 * j);
      transpose16(x);
    }
    float* to = s + block * 16 * kTile + 16 * i;
    for (int64_t r = 0; r < n_rows; ++r)
      _mm512_store_ps(to + r * kTile, _mm512_mul_ps(x[r], all(factor_)));
  }

  void packed_logits(int64_t chunk, int64_t i, const float* from, float* s) const {
    const int64_t subs = k_.group_size == 32 ? 2 : 1;
    const float* affine[2];
    __m512 scale[2];
    for (int64_t sub = 0; sub < subs; ++sub) {
      affine[sub] = k_affine_ + (chunk * 64 + sub * 32) / k_.group_size * 2 * kTile + 16 * i;
      scale[sub] = _mm512_load_ps(affine[sub]);
    }
    __m512 x[4];
    __m512i each = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    for (int j = 0; j < 4; ++j) {  // 4 cells: both groups' sums, one after the other
      __m512 pairs[2];
      for (int half = 0; half < 2; ++half) {
        const __m512i a = _mm512_load_si512(from + 64 * j + 32 * half);
        const __m512i b = _mm512_load_si512(from + 64 * j + 32 * half + 16);
        const __m512i high = _mm512_shuffle_i32x4(a, b, 0x88);
        const __m512i low = _mm512_shuffle_i32x4(a, b, 0xdd);
        pairs[half] = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
      }
      const __m512 first = _mm512_shuffle_f32x4(pairs[0], pairs[1], 0x88);
      x[j] = _mm512_mul_ps(first, _mm512_permutexvar_ps(each, scale[0]));
      if (subs == 2) {
        const __m512 second = _mm512_shuffle_f32x4(pairs[0], pairs[1], 0xdd);
        x[j] = _mm512_fmadd_ps(second, _mm512_permutexvar_ps(each, scale[1]), x[j]);
      }
      each = _mm512_add_epi32(each, _mm512_set1_epi32(4));
    }
    transpose4(x);
    for (int64_t r = 0; r < rows_; ++r) put_logits(r, chunk, x[r], affine, s + r * kTile + 16 * i);
  }

  void int_logits(int64_t block, int64_t chunk, int64_t i, const float* from, float* s) const {
    const int64_t subs = k_.group_size == 32 ? 2 : 1;
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    const float* affine[2];
    for (int64_t sub = 0; sub < subs; ++sub)
      affine[sub] = k_affine_ + (chunk * 64 + sub * 32) / k_.group_size * 2 * kTile + 16 * i;
    __m512 x[16];
    for (int64_t c = 0; c < 16; ++c) {
      for (int64_t sub = 0; sub < subs; ++sub) {
        const float* at = from + 512 * sub + 16 * c;
        const __m512i high = _mm512_load_si512(at), low = _mm512_load_si512(at + 256);
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
        const __m512 scale = all(affine[sub][c]);
        x[c] = sub ? _mm512_fmadd_ps(dot, scale, x[c]) : _mm512_mul_ps(dot, scale);
      }
    }
    transpose16(x);
    for (int64_t r = 0; r < n_rows; ++r) {
      const int64_t row = block * 16 + r;
      put_logits(row, chunk, x[r], affine, s + row * kTile + 16 * i);
    }
  }

  // 16 cells' scaled products of a chunk, with their biases, into a row of logits.
  void put_logits(int64_t row, int64_t chunk, __m512 products, const float* const* affine,
                  float* to) const {
    const float* sums = q_sums_ + row * (k_.dim / 32) + chunk * 2;
    __m512 y = _mm512_mul_ps(_mm512_load_ps(affine[0] + kTile), all(sums[0]));
    if (k_.group_size == 32)
      y = _mm512_fmadd_ps(_mm512_load_ps(affine[1] + kTile), all(sums[1]), y);
    y = _mm512_fmadd_ps(products, all(q_steps_[row]), y);
    _mm512_store_ps(to, chunk ? _mm512_add_ps(y, _mm512_load_ps(to)) : y);
  }

  // 32 cells of 32 numbers: two tiles [pair of cells][16 numbers x 2 cells], the first has those at
  // 0-3, 8-11, 16-19, 24-27.
  void interleave_floats(const TileRows& rows, int64_t first, int64_t n, int64_t d, char* to,
                         Ahead& ahead) const {
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

  // 64 cells of 64 numbers: tile [16 numbers'][four of cells][16 numbers x 4 cells]. Fours are in
  // the order of `int_weights`.
  void interleave_ints(const TileRows& rows, int64_t first, int64_t n, int64_t d, char* to,
                       Ahead& ahead) const {
    const int64_t at = v_.dtype == Dtype::int8 ? d : d / 2;
    for (int64_t k = 0; k < 4; ++k) {
      const int64_t c = first + 16 * k;
      const char* room[16];
      const char* const* from = sixteen_values(rows, c, n, at, room);
      for (int64_t l = 0; l < 4; ++l, from += 4) {
        ahead.some();
        char* four = to + (4 * l + k) * 64;
        v_.dtype == Dtype::int8 ? interleave_bytes(from, four) : interleave_nibbles(from, four);
      }
    }
  }

  static void interleave_bytes(const char* const* from, char* to) {
    const __m512i w = _mm512_loadu_si512(from[0]), x = _mm512_loadu_si512(from[1]);
    const __m512i y = _mm512_loadu_si512(from[2]), z = _mm512_loadu_si512(from[3]);
    const __m512i wx0 = _mm512_unpacklo_epi8(w, x), wx1 = _mm512_unpackhi_epi8(w, x);
    const __m512i yz0 = _mm512_unpacklo_epi8(y, z), yz1 = _mm512_unpackhi_epi8(y, z);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(wx0, yz0));
    _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(wx0, yz0));
    _mm512_store_si512(to + 2048, _mm512_unpacklo_epi16(wx1, yz1));
    _mm512_store_si512(to + 3072, _mm512_unpackhi_epi16(wx1, yz1));
  }

  // Bytes 0-15 of four cells, then bytes 16-31; of each the lower halves, the even numbers, and the
  // upper ones.
  static void interleave_nibbles(const char* const* from, char* to) {
    struct Order {
      uint8_t of[64];
      constexpr Order() : of{} {
        for (int i = 0; i < 64; ++i) of[i] = static_cast<uint8_t>(i % 4 * 32 + i / 4);
      }
    };
    alignas(64) static constexpr Order order;
    const __m512i wx = two_halves(from[0], from[1]), yz = two_halves(from[2], from[3]);
    const __m512i first = _mm512_load_si512(order.of), low = _mm512_set1_epi8(15);
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(16));
    const __m512i a = _mm512_permutex2var_epi8(wx, first, yz);
    const __m512i b = _mm512_permutex2var_epi8(wx, second, yz);
    _mm512_store_si512(to, _mm512_and_si512(a, low));
    _mm512_store_si512(to + 1024, _mm512_and_si512(_mm512_srli_epi16(a, 4), low));
    _mm512_store_si512(to + 2048, _mm512_and_si512(b, low));
    _mm512_store_si512(to + 3072, _mm512_and_si512(_mm512_srli_epi16(b, 4), low));
  }

  // Weights as operands: tiles of 64 bytes of cells, [block][operand][step][row]. Operands of
  // bfloat16 are the upper bits and the rest, of integers these of each group; what is stacked or
  // joined is rows of one operand.
  char* weight(int64_t block, int64_t g, int term, int64_t step, int64_t row) const {
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    int64_t operand = g * 2 + term, n_operands = 2 * (groups(v_) > 1 ? groups(v_) : 1), at = row;
    if (stacked_) {
      at += term * n_rows;
      operand = g;
      n_operands /= 2;
    }
    if (joined_) {
      at += g % 2 * 2 * n_rows;
      operand = g / 2;
      n_operands /= 2;
    }
    const int64_t steps = v_.dtype == Dtype::bf16 ? kTile / 32 : kTile / 64;
    return weights_ + ((block * n_operands + operand) * steps + step) * 1024 + at * 64;
  }

  Vec float_weights(int64_t r, const float* s, float base, int64_t n, Ahead& ahead) const {
    const __m512i uppers = _mm512_add_epi16(
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                         24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
        _mm512_set1_epi16(1));
    const __m512i top_bits = _mm512_set1_epi32(-65536);
    char* high = weight(r / 16, 0, 0, 0, r % 16);
    char* low = weight(r / 16, 0, 1, 0, r % 16);
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

  // 16 bits of each weight times its cell's scale, their steps beside them; biases are added up. Byte
  // 16 l + 4 k + j of a step is cell 16 k + 4 l + j: packing works within lanes.
  Vec int_weights(int64_t r, const float* s, float base, float top, int64_t n,
                  Ahead& ahead) const {
    const int64_t n_groups = groups(v_);
    const Vec inverse = all(top > 0.f ? 65535.f / top : 0.f);
    Vec total = all(0.f);
    Vec bias[kMaxGroups];
    char *high[kMaxGroups], *low[kMaxGroups];
    float* biases = biases_ + r * n_groups * 16;
    for (int64_t g = 0; g < n_groups; ++g) {
      bias[g] = load(biases + 16 * g);
      high[g] = weight(r / 16, g, 0, 0, r % 16);
      low[g] = weight(r / 16, g, 1, 0, r % 16);
    }
    for (int64_t c = 0, step = 0; c < n; c += 64, step += 1024) {
      Vec p[4];
      for (int i = 0; i < 4; ++i) {
        p[i] = exp2_below_1(sub(_mm512_load_ps(s + c + 16 * i), all(base)));
        total = add(total, p[i]);
      }
      ahead.some();
      ahead.some();
      for (int64_t g = 0; g < n_groups; ++g) {
        const float* scales = v_affine_ + g * 2 * kTile + c;
        __m512i whole[4];
        for (int i = 0; i < 4; ++i) {
          const Vec w = mul(mul(p[i], inverse), _mm512_load_ps(scales + 16 * i));
          whole[i] = _mm512_cvtps_epi32(w);
          bias[g] = fma(p[i], _mm512_load_ps(scales + kTile + 16 * i), bias[g]);
        }
        const __m512i a = _mm512_packus_epi32(whole[0], whole[1]);
        const __m512i b = _mm512_packus_epi32(whole[2], whole[3]);
        const __m512i bytes = _mm512_set1_epi16(255);
        _mm512_store_si512(high[g] + step, _mm512_packus_epi16(_mm512_srli_epi16(a, 8),
                                                               _mm512_srli_epi16(b, 8)));
        _mm512_store_si512(low[g] + step, _mm512_packus_epi16(_mm512_and_si512(a, bytes),
                                                              _mm512_and_si512(b, bytes)));
      }
    }
    for (int64_t g = 0; g < n_groups; ++g) {
      steps_[r * n_groups + g] = top / 65535.f * top_scale_[g];
      store(biases + 16 * g, bias[g]);
    }
    return total;
  }

  // What is summed in one go: of floats up to 64 numbers of a block of rows, of integers a group's, or
  // all groups' of a chunk if these are joined.
  int64_t sum_units() const {
    if (v_.dtype == Dtype::bf16) return blocks_ * ((v_.dim + 63) / 64);
    return blocks_ * v_.dim / 64 * v_subs();
  }
  int64_t v_subs() const { return v_.group_size == 32 && !joined_ ? 2 : 1; }
  float* sums(int64_t unit) const { return sums_ + unit % 2 * 2048; }

  void float_sums(int64_t unit, int64_t n, Ahead& ahead) const {
    const int64_t block = unit % blocks_, d = unit / blocks_ * 64, steps = (n + 31) / 32;
    const bool is_half = v_.dim - d < 64;
    const char* v = values_ + d / 32 * steps * 2048;
    _tile_zero(KVC_TA0);
    _tile_zero(KVC_TA1);
    _tile_zero(KVC_TA2);
    _tile_zero(KVC_TA3);
    for (int64_t step = 0; step < steps; ++step, v += 2048) {
      ahead.some();
      _tile_loadd(KVC_TP, weight(block, 0, 0, step, 0), 64);
      if (!stacked_) _tile_loadd(KVC_TQ, weight(block, 0, 1, step, 0), 64);
      _tile_loadd(KVC_TK, v, 64);
      _tile_dpbf16ps(KVC_TA0, KVC_TP, KVC_TK);
      if (!stacked_) _tile_dpbf16ps(KVC_TA0, KVC_TQ, KVC_TK);
      _tile_loadd(KVC_TK, v + 1024, 64);
      _tile_dpbf16ps(KVC_TA1, KVC_TP, KVC_TK);
      if (!stacked_) _tile_dpbf16ps(KVC_TA1, KVC_TQ, KVC_TK);
      if (is_half) continue;
      _tile_loadd(KVC_TK, v + steps * 2048, 64);
      _tile_dpbf16ps(KVC_TA2, KVC_TP, KVC_TK);
      if (!stacked_) _tile_dpbf16ps(KVC_TA2, KVC_TQ, KVC_TK);
      _tile_loadd(KVC_TK, v + steps * 2048 + 1024, 64);
      _tile_dpbf16ps(KVC_TA3, KVC_TP, KVC_TK);
      if (!stacked_) _tile_dpbf16ps(KVC_TA3, KVC_TQ, KVC_TK);
    }
    store_sums(sums(unit));
  }

  void int_sums(int64_t unit, int64_t n, Ahead& ahead) const {
    const int64_t block = unit % blocks_, sub = unit / blocks_ % v_subs();
    const int64_t chunk = unit / blocks_ / v_subs(), steps = (n + 63) / 64;
    const int64_t g = (chunk * 64 + sub * 32) / v_.group_size;
    for (int term = 0; term < (stacked_ ? 1 : 2); ++term) {
      const char* v = values_ + chunk * steps * 4096;
      _tile_zero(KVC_TA0);
      _tile_zero(KVC_TA1);
      _tile_zero(KVC_TA2);
      _tile_zero(KVC_TA3);
      for (int64_t step = 0; step < steps; ++step, v += 4096) {
        ahead.some();
        _tile_loadd(KVC_TP, weight(block, g, term, step, 0), 64);
        _tile_loadd(KVC_TK, v, 64);
        _tile_dpbuud(KVC_TA0, KVC_TP, KVC_TK);
        _tile_loadd(KVC_TK, v + 1024, 64);
        _tile_dpbuud(KVC_TA1, KVC_TP, KVC_TK);
        _tile_loadd(KVC_TK, v + 2048, 64);
        _tile_dpbuud(KVC_TA2, KVC_TP, KVC_TK);
        _tile_loadd(KVC_TK, v + 3072, 64);
        _tile_dpbuud(KVC_TA3, KVC_TP, KVC_TK);
      }
      store_sums(sums(unit) + term * 1024);
    }
  }

  static void store_sums(float* to) {
    _tile_stored(KVC_TA0, to, 64);
    _tile_stored(KVC_TA1, to + 256, 64);
    _tile_stored(KVC_TA2, to + 512, 64);
    _tile_stored(KVC_TA3, to + 768, 64);
  }

  void add_floats(int64_t unit, float* acc) const {
    const int64_t block = unit % blocks_, first_d = unit / blocks_ * 64;
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const float* even = sums(unit);
    for (int64_t d = first_d; d < v_.dim && d < first_d + 64; d += 32, even += 512) {
      const float* odd = even + 256;
      for (int64_t r = 0; r < n_rows; ++r) {
        __m512 a = _mm512_load_ps(even + r * 16), b = _mm512_load_ps(odd + r * 16);
        if (stacked_) {
          a = _mm512_add_ps(a, _mm512_load_ps(even + (n_rows + r) * 16));
          b = _mm512_add_ps(b, _mm512_load_ps(odd + (n_rows + r) * 16));
        }
        float* to = acc + (block * 16 + r) * v_pad_ + d;
        store(to, add(load(to), _mm512_permutex2var_ps(a, first, b)));
        store(to + 16, add(load(to + 16), _mm512_permutex2var_ps(a, second, b)));
      }
    }
  }

  void add_ints(int64_t unit, float* acc) const {
    const int64_t block = unit % blocks_, sub = unit / blocks_ % v_subs();
    const int64_t chunk = unit / blocks_ / v_subs();
    if (!joined_) return add_group(unit, block, chunk, sub, 0, acc);
    add_group(unit, block, chunk, 0, 0, acc);
    add_group(unit, block, chunk, 1, 2 * rows_, acc);
  }

  // The numbers of one group within a chunk; its rows begin with `first_row` of the sums.
  void add_group(int64_t unit, int64_t block, int64_t chunk, int64_t sub, int64_t first_row,
                 float* acc) const {
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    const int64_t n_groups = groups(v_), g = (chunk * 64 + sub * 32) / v_.group_size;
    const bool is_narrow = v_.group_size == 32;
    for (int64_t r = 0; r < n_rows; ++r) {
      __m512 x[4], y[4];
      for (int j = 0; j < 4; ++j) {
        const float* high = sums(unit) + 256 * j + (first_row + r) * 16;
        const float* low = high + (stacked_ ? n_rows * 16 : 1024);
        const __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high), 8),
                                               _mm512_load_si512(low));
        x[j] = _mm512_cvtepi32_ps(whole);
      }
      if (v_.dtype == Dtype::int4) {  // even and odd numbers of each 32
        const __m512i even =
            _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(8));
        y[0] = _mm512_permutex2var_ps(x[0], even, x[1]);
        y[1] = _mm512_permutex2var_ps(x[0], odd, x[1]);
        y[2] = _mm512_permutex2var_ps(x[2], even, x[3]);
        y[3] = _mm512_permutex2var_ps(x[2], odd, x[3]);
      } else {  // lane i of all four are the numbers of lane i
        transpose_lanes(x, y);
      }
      const int64_t row = block * 16 + r;
      const __m512 step = all(steps_[row * n_groups + g]);
      float* to = acc + row * v_pad_ + chunk * 64;
      for (int j = 0; j < 4; ++j)
        if (!is_narrow || j / 2 == sub) store(to + 16 * j, fma(y[j], step, load(to + 16 * j)));
    }
  }

  const Side &k_, &v_;
  const int64_t rows_, v_pad_;
  const float factor_;
  const int64_t width_;
  const bool is_packed_;  // few rows: both terms and both groups' queries are one operand
  const int64_t blocks_;
  const bool stacked_, joined_;
  bool has_low_ = false;
  KTiles tiles_;
  int64_t pending_ = -1;  // the sums that are not in `acc` yet
  float top_scale_[kMaxGroups];
  float *tile_ = nullptr, *k_affine_ = nullptr, *v_affine_ = nullptr;
  float *sums_ = nullptr, *steps_ = nullptr, *biases_ = nullptr;
  float *q_sums_ = nullptr, *q_steps_ = nullptr;
  char *staged_ = nullptr, *queries_ = nullptr, *values_ = nullptr, *weights_ = nullptr;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
