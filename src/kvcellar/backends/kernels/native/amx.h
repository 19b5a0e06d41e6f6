// The same two products on the matrix unit (AMX), for rows that it can read: bfloat16 of a multiple
// of 32 numbers; int8 and int4 of a multiple of 64 in groups of 32 or of a multiple of 64.
//
// Logits: 16 K rows are a tile as they lie in the pool (rows of a run have one stride), the queries
// are the other operand. bfloat16 queries go in as they are, others as the sum of two bfloat16.
// Integer K rows meet queries of 16 bits, as two bytes; scale and bias come in afterwards.
// Values: cells lie along the inner dimension, so V rows are interleaved first, by 2 or by 4. Weights
// are the sum of two bfloat16, or 16 bits of the tile's largest weight, as two bytes.
//
// Only included by attend_impl.h.

#include <immintrin.h>

#include "isa.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Tile registers. K: 16 cells x 64 bytes, queries, two results. V: weights, values, two results.
#define KVC_TK 0
#define KVC_TQ 1
#define KVC_TS0 2
#define KVC_TS1 3
#define KVC_TP 4
#define KVC_TV 5
#define KVC_TA0 6
#define KVC_TA1 7

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

inline void transpose16(const float* from, __m512* x) {
  __m512 t[16];
  for (int i = 0; i < 16; ++i) x[i] = _mm512_load_ps(from + 16 * i);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    x[i + 1] = _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
    x[i + 2] = _mm512_castpd_ps(
        _mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    x[i + 3] = _mm512_castpd_ps(
        _mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    x[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    x[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// 16 cells of 4 numbers each: 4 vectors of 16 cells.
inline void transpose4(const float* from, __m512* x) {
  const __m512i low = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
  const __m512i high = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
  const __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
  const __m512 c = _mm512_load_ps(from + 32), d = _mm512_load_ps(from + 48);
  const __m512 ab0 = _mm512_permutex2var_ps(a, low, b), ab1 = _mm512_permutex2var_ps(a, high, b);
  const __m512 cd0 = _mm512_permutex2var_ps(c, low, d), cd1 = _mm512_permutex2var_ps(c, high, d);
  x[0] = _mm512_shuffle_f32x4(ab0, cd0, 0x44);
  x[1] = _mm512_shuffle_f32x4(ab0, cd0, 0xee);
  x[2] = _mm512_shuffle_f32x4(ab1, cd1, 0x44);
  x[3] = _mm512_shuffle_f32x4(ab1, cd1, 0xee);
}

inline bool fits_matrix(const Side& side) {
  if (side.dtype == Dtype::bf16) return side.dim % 32 == 0;
  if (!is_quantised(side.dtype) || side.dim % 64) return false;
  return side.group_size == 32 || side.group_size % 64 == 0;
}

class Matrix {
 public:
  const bool has_k, has_v;

  // `with_k`, `with_v`: only for sides that fit. `q`: rows of k_pad floats. Logits are multiplied by `factor`.
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
        blocks_((rows + 15) / 16) {
    if (!has_k && !has_v) return;
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    auto take = [&address](int64_t n_bytes) {
      char* piece = reinterpret_cast<char*>(address);
      address += static_cast<uintptr_t>((n_bytes + 63) / 64 * 64);
      return piece;
    };
    tile_ = reinterpret_cast<float*>(take(1024 * (v.dim / 16 > 8 ? v.dim / 16 : 8)));
    affine_ = reinterpret_cast<float*>(take(2 * 4 * kTile * (groups(k) + groups(v) + 1)));
    staged_ = take(kTile * k.dim * 2);
    queries_ = take(blocks_ * 16 * k.dim * 4);
    q_sums_ = reinterpret_cast<float*>(take(4 * blocks_ * 16 * (k.dim / 32 + 1)));
    q_steps_ = reinterpret_cast<float*>(take(4 * blocks_ * 16));
    values_ = take(kTile * v.dim * 2);
    weights_ = take(blocks_ * 16 * (kTile * 4 + groups(v) * (2 * kTile + 8)));
    // Few rows: both terms of the weights are rows of one operand.
    stacked_ = rows <= 8;
    v_rows_ = stacked_ ? 2 * rows : rows < 16 ? rows : 16;
    // Fewer still: the weights of a chunk's two groups too.
    joined_ = rows <= 4 && is_quantised(v.dtype) && v.group_size == 32;
    if (joined_) v_rows_ *= 2;
    TileShapes shapes;
    const auto set = [&shapes](int tile, int64_t n_rows, int64_t n_bytes) {
      shapes.rows[tile] = static_cast<uint8_t>(n_rows);
      shapes.bytes[tile] = static_cast<uint16_t>(n_bytes);
    };
    set(KVC_TK, 16, 64);
    set(KVC_TQ, 16, 4 * width_);
    set(KVC_TS0, 16, 4 * width_);
    set(KVC_TS1, 16, 4 * width_);
    set(KVC_TP, v_rows_, 64);
    set(KVC_TV, 16, 64);
    set(KVC_TA0, v_rows_, 64);
    set(KVC_TA1, v_rows_, 64);
    _tile_loadconfig(&shapes);
    if (has_k) k.dtype == Dtype::bf16 ? load_float_queries(q, k_pad) : load_int_queries(q, k_pad);
  }

  ~Matrix() {
    if (has_k || has_v) _tile_release();
  }

  // s[row][c] for cells [0, n), n <= kTile.
  void logits(const char* const* rows, const char* const* affine, int64_t n, float* s,
              Ahead& ahead) const {
    if (k_.dtype != Dtype::bf16) load_affine(k_, affine, n, affine_);
    // Step by step for all cells: a tile load waits for the stores before it, and a load for a tile
    // store, so what depends on each other is kept apart.
    KTiles tiles;
    for (int64_t c = 0; c < n; c += 16) {
      ahead.some(2);
      const int64_t m = n - c < 16 ? n - c : 16;
      tiles.from[tiles.n] = tile_of(rows + c, m, staged_ + c * k_.dim * 2, tiles.stride[tiles.n]);
      ++tiles.n;
    }
    for (int64_t block = 0; block < blocks_; ++block)
      k_.dtype == Dtype::bf16 ? float_logits(block, tiles, s, ahead)
      : is_packed_            ? packed_logits(tiles, s)
                              : int_logits(block, tiles, s);
  }

  // acc[row] += sum of s[row][c] * V[c].
  void values(float* s, const char* const* rows, const char* const* affine, int64_t n,
              float* acc, Ahead& ahead) const {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = n; c < kTile; ++c) s[r * kTile + c] = 0.f;
    if (v_.dtype == Dtype::bf16) {
      interleave_floats(rows, n, ahead);
      float_values(s, n, acc, ahead);
    } else {
      load_affine(v_, affine, n, affine_);
      int_weights(s, n);
      interleave_ints(rows, n, ahead);
      int_values(acc);
    }
  }

  // Whether a weight of 0 silences all of these V rows.
  bool is_finite(const char* const* rows, const char* const* affine, int64_t n) const {
    const bool is_float = v_.dtype == Dtype::bf16;
    const int64_t length = is_float ? v_.dim : 2 * groups(v_);
    const uint16_t mask = is_float ? 0x7F80 : 0x7C00;
    bool found = false;
    for (int64_t c = 0; c < n; ++c) {
      const auto* bits = reinterpret_cast<const uint16_t*>(is_float ? rows[c] : affine[c]);
      for (int64_t d = 0; d < length; ++d) found |= (bits[d] & mask) == mask;
    }
    return !found;
  }

 private:
  // K rows of 16 cells each.
  struct KTiles {
    int64_t n = 0, stride[kTile / 16];
    const char* from[kTile / 16];
  };

  static int64_t groups(const Side& side) {
    return is_quantised(side.dtype) ? side.dim / side.group_size : 0;
  }

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

  // 16 K rows where a tile can be loaded from: the pool itself, if they have one stride.
  const char* tile_of(const char* const* rows, int64_t m, char* staged, int64_t& stride) const {
    const int64_t row_bytes = k_.dtype == Dtype::bf16 ? k_.dim * 2 : k_.dim;
    if (k_.dtype == Dtype::int4) {
      stride = row_bytes;
      const __m256i low = _mm256_set1_epi8(15);
      for (int64_t i = 0; i < m; ++i) {
        char* to = staged + i * stride;
        for (int64_t d = 0; d < k_.dim / 2; d += 32) {
          const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + d));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * d), _mm256_and_si256(both, low));
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + 2 * d + 32),
                             _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
        }
      }
    } else {
      stride = k_.cell_stride;
      bool is_run = m == 16;
      for (int64_t i = 1; i < m; ++i) is_run &= rows[i] == rows[0] + i * stride;
      if (is_run) return rows[0];
      stride = row_bytes;
      for (int64_t i = 0; i < m; ++i) {
        char* to = staged + i * stride;
        for (int64_t d = 0; d < row_bytes; d += 64)
          _mm512_store_si512(to + d, _mm512_loadu_si512(rows[i] + d));
      }
    }
    return staged;
  }

  void float_logits(int64_t block, const KTiles& tiles, float* s, Ahead& ahead) const {
    const int64_t chunks = k_.dim / 32;
    for (int64_t i = 0; i < tiles.n; ++i) {
      ahead.some(2);
      _tile_zero(KVC_TS0);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        _tile_loadd(KVC_TK, tiles.from[i] + 64 * chunk, tiles.stride[i]);
        _tile_loadd(KVC_TQ, float_query(block, chunk, 0), 4 * width_);
        _tile_dpbf16ps(KVC_TS0, KVC_TK, KVC_TQ);
        if (has_low_) {
          _tile_loadd(KVC_TQ, float_query(block, chunk, 1), 4 * width_);
          _tile_dpbf16ps(KVC_TS0, KVC_TK, KVC_TQ);
        }
      }
      _tile_stored(KVC_TS0, tile_ + 256 * i, 4 * width_);
    }
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    for (int64_t i = 0; i < tiles.n; ++i) {
      ahead.some(2);
      __m512 x[16];
      width_ == 4 ? transpose4(tile_ + 256 * i, x) : transpose16(tile_ + 256 * i, x);
      for (int64_t r = 0; r < n_rows; ++r)
        _mm512_storeu_ps(s + (block * 16 + r) * kTile + 16 * i, _mm512_mul_ps(x[r], all(factor_)));
    }
  }

  void packed_logits(const KTiles& tiles, float* s) const {
    const int64_t chunks = k_.dim / 64, subs = k_.group_size == 32 ? 2 : 1;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      _tile_loadd(KVC_TQ, int_query(0, chunk, 0, 0), 64);
      for (int64_t i = 0; i < tiles.n; ++i) {
        _tile_loadd(KVC_TK, tiles.from[i] + 64 * chunk, tiles.stride[i]);
        _tile_zero(KVC_TS0);
        _tile_dpbusd(KVC_TS0, KVC_TK, KVC_TQ);
        _tile_stored(KVC_TS0, tile_ + 256 * i, 64);
      }
      for (int64_t i = 0; i < tiles.n; ++i) {
        __m512 x[16];
        transpose16(tile_ + 256 * i, x);
        for (int64_t r = 0; r < rows_; ++r) {
          float* to = s + r * kTile + 16 * i;
          __m512 y = chunk ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
          for (int64_t sub = 0; sub < subs; ++sub) {
            const float* affine = affine_ + (chunk * 64 + sub * 32) / k_.group_size * 2 * kTile;
            const __m512 scale = _mm512_load_ps(affine + 16 * i);
            const __m512 bias = _mm512_load_ps(affine + kTile + 16 * i);
            const __m512i high = _mm512_castps_si512(x[sub * 8 + r]);
            const __m512i low = _mm512_castps_si512(x[sub * 8 + 4 + r]);
            const __m512 dot =
                _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
            y = _mm512_fmadd_ps(bias, all(q_sums_[r * (k_.dim / 32) + chunk * 2 + sub]), y);
            y = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale, all(q_steps_[r])), y);
          }
          _mm512_storeu_ps(to, y);
        }
      }
    }
  }

  void int_logits(int64_t block, const KTiles& tiles, float* s) const {
    const int64_t chunks = k_.dim / 64, subs = k_.group_size == 32 ? 2 : 1;
    const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      for (int64_t sub = 0; sub < subs; ++sub) {
        for (int64_t i = 0; i < tiles.n; ++i) {
          _tile_loadd(KVC_TK, tiles.from[i] + 64 * chunk, tiles.stride[i]);
          _tile_zero(KVC_TS0);
          _tile_loadd(KVC_TQ, int_query(block, chunk, sub, 0), 4 * width_);
          _tile_dpbusd(KVC_TS0, KVC_TK, KVC_TQ);
          _tile_zero(KVC_TS1);
          _tile_loadd(KVC_TQ, int_query(block, chunk, sub, 1), 4 * width_);
          _tile_dpbusd(KVC_TS1, KVC_TK, KVC_TQ);
          _tile_stored(KVC_TS0, tile_ + 512 * i, 4 * width_);
          _tile_stored(KVC_TS1, tile_ + 512 * i + 256, 4 * width_);
        }
        const int64_t group = (chunk * 64 + sub * 32) / k_.group_size;
        for (int64_t i = 0; i < tiles.n; ++i) {
          float* high = tile_ + 512 * i;
          for (int64_t j = 0; j < 16 * width_; j += 16) {
            const __m512i whole = _mm512_add_epi32(
                _mm512_slli_epi32(_mm512_load_si512(high + j), 8), _mm512_load_si512(high + 256 + j));
            _mm512_store_ps(high + j, _mm512_cvtepi32_ps(whole));
          }
          __m512 x[16];
          width_ == 4 ? transpose4(high, x) : transpose16(high, x);
          const __m512 scale = _mm512_load_ps(affine_ + group * 2 * kTile + 16 * i);
          const __m512 bias = _mm512_load_ps(affine_ + group * 2 * kTile + kTile + 16 * i);
          for (int64_t r = 0; r < n_rows; ++r) {
            const int64_t row = block * 16 + r;
            float* to = s + row * kTile + 16 * i;
            __m512 y = _mm512_mul_ps(bias, all(q_sums_[row * (k_.dim / 32) + chunk * 2 + sub]));
            y = _mm512_fmadd_ps(x[r], _mm512_mul_ps(scale, all(q_steps_[row])), y);
            if (chunk || sub) y = _mm512_add_ps(y, _mm512_loadu_ps(to));
            _mm512_storeu_ps(to, y);
          }
        }
      }
    }
  }

  // For each group kTile scales, then kTile biases, as float32.
  static void load_affine(const Side& side, const char* const* affine, int64_t n, float* to) {
    const int64_t n_groups = groups(side);
    alignas(64) uint32_t pairs[kTile] = {};
    for (int64_t g = 0; g < n_groups; ++g) {
      for (int64_t c = 0; c < n; ++c) std::memcpy(pairs + c, affine[c] + 4 * g, 4);
      for (int64_t c = 0; c < n; c += 16) {
        const __m512i both = _mm512_load_si512(pairs + c);
        _mm512_store_ps(to + g * 2 * kTile + c, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
        _mm512_store_ps(to + g * 2 * kTile + kTile + c,
                        _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
      }
    }
  }

  // bfloat16 values: tile [dim / 16][pair of cells][16 numbers x 2 cells]; of 32 numbers the first
  // tile has those at 0-3, 8-11, 16-19, 24-27.
  void interleave_floats(const char* const* rows, int64_t n, Ahead& ahead) const {
    const int64_t pairs = (n + 31) / 32 * 16;
    for (int64_t i = 0; i < pairs; ++i) {
      if (i % 2) ahead.some(1);
      const char* a = 2 * i < n ? rows[2 * i] : nullptr;
      const char* b = 2 * i + 1 < n ? rows[2 * i + 1] : nullptr;
      for (int64_t d = 0; d < v_.dim; d += 32) {
        const __m512i x = a ? _mm512_loadu_si512(a + 2 * d) : _mm512_setzero_si512();
        const __m512i y = b ? _mm512_loadu_si512(b + 2 * d) : _mm512_setzero_si512();
        char* to = values_ + (d / 16) * (kTile / 2 * 64) + i * 64;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(to + kTile / 2 * 64, _mm512_unpackhi_epi16(x, y));
      }
    }
  }

  void float_values(const float* s, int64_t n, float* acc, Ahead& ahead) const {
    const int64_t steps = (n + 31) / 32;
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
      // Weights: rows of kTile bfloat16, the upper bits and the rest.
      auto* high = reinterpret_cast<uint16_t*>(weights_);
      uint16_t* low = high + (stacked_ ? n_rows : 16) * kTile;
      for (int64_t r = 0; r < n_rows; ++r) {
        ahead.some(2);
        const float* p = s + (block * 16 + r) * kTile;
        for (int64_t c = 0; c < steps * 32; c += 16) {
          const __m512i bits = _mm512_castps_si512(_mm512_loadu_ps(p + c));
          const __m512i top = _mm512_and_si512(bits, _mm512_set1_epi32(-65536));
          const __m512 rest = _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(top));
          _mm256_store_si256(reinterpret_cast<__m256i*>(high + r * kTile + c),
                             _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
          const __m256bh rounded = _mm512_cvtneps_pbh(rest);
          std::memcpy(low + r * kTile + c, &rounded, 32);
        }
      }
      if (!stacked_ && n_rows < v_rows_) {
        std::memset(high + n_rows * kTile, 0, 2 * kTile * (v_rows_ - n_rows));
        std::memset(low + n_rows * kTile, 0, 2 * kTile * (v_rows_ - n_rows));
      }
      for (int64_t d = 0; d < v_.dim; d += 32) {
        ahead.some(3);
        const char* v = values_ + (d / 16) * (kTile / 2 * 64);
        _tile_zero(KVC_TA0);
        _tile_zero(KVC_TA1);
        for (int64_t step = 0; step < steps; ++step) {
          _tile_loadd(KVC_TP, high + step * 32, 2 * kTile);
          _tile_loadd(KVC_TV, v + step * 1024, 64);
          _tile_dpbf16ps(KVC_TA0, KVC_TP, KVC_TV);
          if (stacked_) {
            _tile_loadd(KVC_TV, v + kTile / 2 * 64 + step * 1024, 64);
            _tile_dpbf16ps(KVC_TA1, KVC_TP, KVC_TV);
          } else {
            _tile_loadd(KVC_TP, low + step * 32, 2 * kTile);
            _tile_dpbf16ps(KVC_TA0, KVC_TP, KVC_TV);
            _tile_loadd(KVC_TV, v + kTile / 2 * 64 + step * 1024, 64);
            _tile_dpbf16ps(KVC_TA1, KVC_TP, KVC_TV);
            _tile_loadd(KVC_TP, high + step * 32, 2 * kTile);
            _tile_dpbf16ps(KVC_TA1, KVC_TP, KVC_TV);
          }
        }
        _tile_stored(KVC_TA0, tile_ + d * 16, 64);
        _tile_stored(KVC_TA1, tile_ + d * 16 + 256, 64);
      }
      for (int64_t d = 0; d < v_.dim; d += 32) {
        const float *even = tile_ + d * 16, *odd = even + 256;
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
  }

  // Integer values: tile [chunk of 64][16 numbers' tile][four of cells][16 numbers x 4 cells].
  void interleave_ints(const char* const* rows, int64_t n, Ahead& ahead) const {
    const int64_t chunks = v_.dim / 64;
    alignas(64) static const char zeros[64] = {};
    for (int64_t c = 0; c < kTile; c += 4) {
      ahead.some(3);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        char* to = values_ + chunk * 4096 + c / 4 * 64;
        const char* from[4];
        const int64_t at = v_.dtype == Dtype::int8 ? chunk * 64 : chunk * 32;
        for (int j = 0; j < 4; ++j) from[j] = c + j < n ? rows[c + j] + at : zeros;
        if (v_.dtype == Dtype::int8) {
          const __m512i w = _mm512_loadu_si512(from[0]), x = _mm512_loadu_si512(from[1]);
          const __m512i y = _mm512_loadu_si512(from[2]), z = _mm512_loadu_si512(from[3]);
          const __m512i wx0 = _mm512_unpacklo_epi8(w, x), wx1 = _mm512_unpackhi_epi8(w, x);
          const __m512i yz0 = _mm512_unpacklo_epi8(y, z), yz1 = _mm512_unpackhi_epi8(y, z);
          _mm512_store_si512(to, _mm512_unpacklo_epi16(wx0, yz0));
          _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(wx0, yz0));
          _mm512_store_si512(to + 2048, _mm512_unpacklo_epi16(wx1, yz1));
          _mm512_store_si512(to + 3072, _mm512_unpackhi_epi16(wx1, yz1));
        } else {
          const auto get = [](const char* p) {
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
          };
          const __m256i w = get(from[0]), x = get(from[1]), y = get(from[2]), z = get(from[3]);
          const __m256i wx0 = _mm256_unpacklo_epi8(w, x), wx1 = _mm256_unpackhi_epi8(w, x);
          const __m256i yz0 = _mm256_unpacklo_epi8(y, z), yz1 = _mm256_unpackhi_epi8(y, z);
          const __m256i four[4] = {
              _mm256_unpacklo_epi16(wx0, yz0), _mm256_unpackhi_epi16(wx0, yz0),
              _mm256_unpacklo_epi16(wx1, yz1), _mm256_unpackhi_epi16(wx1, yz1)};
          const __m256i low = _mm256_set1_epi8(15);
          for (int j = 0; j < 4; ++j) {
            auto* half = reinterpret_cast<__m256i*>(to + j * 1024);
            _mm256_store_si256(half, _mm256_and_si256(four[j], low));
            _mm256_store_si256(half + 1, _mm256_and_si256(_mm256_srli_epi16(four[j], 4), low));
          }
        }
      }
    }
  }

  // Weights of group g and a block of rows: [term][16 or fewer rows][kTile] bytes.
  uint8_t* int_weight(int64_t g, int64_t block) const {
    return reinterpret_cast<uint8_t*>(weights_) +
           (g * blocks_ + block) * 2 * (joined_ ? rows_ : 16) * kTile;
  }

  void int_weights(const float* s, int64_t n) const {
    const int64_t n_groups = groups(v_), wide = (n + 15) / 16 * 16;
    for (int64_t g = 0; g < n_groups; ++g) {
      const float* scales = affine_ + g * 2 * kTile;
      const float* biases = scales + kTile;
      for (int64_t r = 0; r < blocks_ * 16; ++r) {
        const int64_t block = r / 16;
        const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
        uint8_t* high = int_weight(g, block) + r % 16 * kTile;
        uint8_t* low = high + (stacked_ ? n_rows : 16) * kTile;
        if (r >= rows_) {
          if (stacked_) break;
          std::memset(high, 0, kTile);
          std::memset(low, 0, kTile);
          continue;
        }
        __m512 w[4], top = _mm512_setzero_ps(), sum = top;
        for (int64_t c = 0; c < wide; c += 16) {
          const __m512 p = _mm512_loadu_ps(s + r * kTile + c);
          w[c / 16] = _mm512_mul_ps(p, _mm512_load_ps(scales + c));
          top = _mm512_max_ps(top, w[c / 16]);
          sum = _mm512_fmadd_ps(p, _mm512_load_ps(biases + c), sum);
        }
        const float most = _mm512_reduce_max_ps(top);
        const __m512 inverse = all(most > 0.f ? 65535.f / most : 0.f);
        w_step(r, g) = most / 65535.f;
        w_bias(r, g) = _mm512_reduce_add_ps(sum);
        for (int64_t c = 0; c < kTile; c += 16) {
          __m512i whole = _mm512_setzero_si512();
          if (c < wide) whole = _mm512_cvtps_epi32(_mm512_mul_ps(w[c / 16], inverse));
          whole = _mm512_min_epu32(whole, _mm512_set1_epi32(65535));
          _mm_store_si128(reinterpret_cast<__m128i*>(high + c),
                          _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
          _mm_store_si128(reinterpret_cast<__m128i*>(low + c), _mm512_cvtepi32_epi8(whole));
        }
      }
    }
  }

  // Step and bias of a row's weights in a group: behind the weights themselves.
  float& w_step(int64_t r, int64_t g) const {
    return reinterpret_cast<float*>(int_weight(groups(v_), 0))[(g * blocks_ * 16 + r) * 2];
  }
  float& w_bias(int64_t r, int64_t g) const { return (&w_step(r, g))[1]; }

  void int_values(float* acc) const {
    const int64_t chunks = v_.dim / 64, subs = v_.group_size == 32 ? 2 : 1;
    const bool is_int4 = v_.dtype == Dtype::int4;
    const __m512i even = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(8));
    float* tiles[2][4];
    alignas(64) float room[2][4][256];
    for (int t = 0; t < 2; ++t)
      for (int j = 0; j < 4; ++j) tiles[t][j] = room[t][j];
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t n_rows = rows_ - block * 16 < 16 ? rows_ - block * 16 : 16;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        for (int64_t sub = 0; sub < subs; ++sub) {
          const int64_t g = (chunk * 64 + sub * 32) / v_.group_size;
          const uint8_t* weight = int_weight(g, block);
          const int terms = joined_ && sub ? 0 : stacked_ ? 1 : 2;
          for (int term = 0; term < terms; ++term) {
            _tile_loadd(KVC_TP, weight + term * 16 * kTile, kTile);
            for (int j = 0; j < 4; j += 2) {
              const char* v = values_ + chunk * 4096 + j * 1024;
              _tile_zero(KVC_TA0);
              _tile_loadd(KVC_TV, v, 64);
              _tile_dpbuud(KVC_TA0, KVC_TP, KVC_TV);
              _tile_zero(KVC_TA1);
              _tile_loadd(KVC_TV, v + 1024, 64);
              _tile_dpbuud(KVC_TA1, KVC_TP, KVC_TV);
              _tile_stored(KVC_TA0, tiles[term][j], 64);
              _tile_stored(KVC_TA1, tiles[term][j + 1], 64);
            }
          }
          for (int64_t r = 0; r < n_rows; ++r) {
            const int64_t row = block * 16 + r;
            __m512 x[4];
            for (int j = 0; j < 4; ++j) {
              const float* high = tiles[0][j] + ((joined_ ? sub * 2 * n_rows : 0) + r) * 16;
              const float* low = stacked_ ? high + n_rows * 16 : tiles[1][j] + r * 16;
              const __m512i whole = _mm512_add_epi32(
                  _mm512_slli_epi32(_mm512_load_si512(high), 8),
                  _mm512_load_si512(low));
              x[j] = _mm512_cvtepi32_ps(whole);
            }
            // Lane i of all four are the numbers of lane i.
            const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
            const __m512 b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
            const __m512 c = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
            const __m512 d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
            x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
            x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
            x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
            x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
            if (is_int4) {  // even numbers of the first and second half, then the odd ones
              const __m512 e0 = x[0], e1 = x[1], o0 = x[2], o1 = x[3];
              x[0] = _mm512_permutex2var_ps(e0, even, o0);
              x[1] = _mm512_permutex2var_ps(e0, odd, o0);
              x[2] = _mm512_permutex2var_ps(e1, even, o1);
              x[3] = _mm512_permutex2var_ps(e1, odd, o1);
            }
            const __m512 step = all(w_step(row, g)), bias = all(w_bias(row, g));
            float* to = acc + row * v_pad_ + chunk * 64;
            const int from = subs == 2 ? static_cast<int>(sub) * 2 : 0;
            for (int j = from; j < from + 4 / static_cast<int>(subs); ++j)
              store(to + 16 * j, add(load(to + 16 * j), _mm512_fmadd_ps(x[j], step, bias)));
          }
        }
      }
    }
  }

  const Side &k_, &v_;
  const int64_t rows_, v_pad_;
  const float factor_;
  const int64_t width_;
  const bool is_packed_;  // few rows: both terms and both groups' queries are one operand
  const int64_t blocks_;
  int64_t v_rows_ = 0;
  bool stacked_ = false, joined_ = false, has_low_ = false;
  float *tile_ = nullptr, *affine_ = nullptr;
  float *q_sums_ = nullptr, *q_steps_ = nullptr;
  char *staged_ = nullptr, *queries_ = nullptr, *values_ = nullptr, *weights_ = nullptr;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
