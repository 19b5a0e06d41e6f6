// 9 to 16 rows over the same bfloat16 cells, branches of a trunk for example, without a matrix unit: a
// lane is a row. Multiplications of float32 would take longer than the memory, so those of 16-bit
// integers take their place, two to a lane, and a number of K or V is one of both factors for all rows.
//
// Of 64 cells, K and V are 14 bits of about their largest number; queries as many bits as keep the sums
// of a product within 32, by their length (Cauchy and Schwarz); weights as many as keep these sums
// there, by their own sum, at most 15. That is some 1e-4 of the largest result, and where a few numbers
// are 50 times the others as much as the rounding of results to bfloat16: no other results come here.
// Sums, maxima and results stay in lanes until the end.
//
// Only included by attend_impl.h.

#include <immintrin.h>

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

template <int kDim>
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
    take(values_, kCells * kDim);
    take(queries_, 16 * kDim / 2);
    take(weights_, 16 * kCells / 2);
    take(logits_, 16 * kCells);
    take(results_, 16 * kDim);
    take(room_, 2 * kCells * kDim);
    std::memset(queries_, 0, sizeof(int32_t) * 16 * kDim / 2);
    std::memset(results_, 0, sizeof(float) * 16 * kDim);
    alignas(64) float steps[16] = {};
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = q + r * k_pad;
      __m512 squares = _mm512_setzero_ps();
      for (int64_t d = 0; d < kDim; d += 16) squares = fma(load(row + d), load(row + d), squares);
      const float length = __builtin_sqrtf(sum(squares));
      is_finite_ &= length < kHighest;
      const float inverse = length > kLowest ? kLongest / length : 0.f;
      steps[r] = inverse > 0.f ? factor / inverse : 0.f;
      alignas(64) int16_t whole[kDim];
      for (int64_t d = 0; d < kDim; d += 16)
        _mm256_store_si256(reinterpret_cast<__m256i*>(whole + d),
                           _mm512_cvtepi32_epi16(
                               _mm512_cvtps_epi32(mul(load(row + d), all(inverse)))));
      for (int64_t p = 0; p < kDim / 2; ++p) std::memcpy(queries_ + p * 16 + r, whole + 2 * p, 4);
    }
    steps_ = load(steps);
  }

  // The n <= 64 cells from c on of a tile. False if a number is not finite: nothing of it counts then.
  bool attend(const TileRows& rows, int64_t c, int64_t n, const Next& next) {
    float k_step, v_step;
    if (!load_keys(rows, c, n, k_step, next)) return false;
    const Vec top = logits(c, mul(steps_, all(k_step)), next, n);
    const Vec now = max(max_, top);
    const Vec factor = exp2_below_1(sub(max_, now)), share = exp2_below_1(sub(top, now));
    Vec total = all(0.f);
    for (int64_t i = 0; i < kCells; ++i) {
      const Vec p = exp2_below_1(sub(load(logits_ + 16 * i), top));
      store(logits_ + 16 * i, p);
      total = add(total, p);
    }
    const Vec scale = min(all(32767.f), _mm512_div_ps(all(kMostWeights), total));
    for (int64_t i = 0; i < kCells; i += 2) {
      const __m512i x = _mm512_cvtps_epi32(mul(load(logits_ + 16 * i), scale));
      const __m512i y = _mm512_cvtps_epi32(mul(load(logits_ + 16 * i + 16), scale));
      _mm512_store_si512(weights_ + 8 * i, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
    }
    if (!load_values(rows, c, n, v_step, next)) return false;
    add_values(c, factor, mul(_mm512_div_ps(share, scale), all(v_step)), next);
    sum_ = fma(sum_, factor, mul(total, share));
    max_ = now;
    return true;
  }

  bool is_finite() const { return is_finite_; }

  // Maxima, sums of weights and results of each row.
  void finish(int64_t rows, int64_t v_pad, float* maxima, float* sums, float* acc) const {
    alignas(64) float total[16], most[16];
    store(total, sum_);
    store(most, max_);
    const __m512i across = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(16));
    for (int64_t r = 0; r < rows; ++r) {
      maxima[r] = most[r];
      store(sums + r * 16, all(0.f));
      sums[r * 16] = total[r];
      for (int64_t d = 0; d < kDim; d += 16)
        store(acc + r * v_pad + d, _mm512_i32gather_ps(across, results_ + d * 16 + r, 4));
    }
  }

 private:
  static constexpr float kMost = 8191.f;        // of K and V
  static constexpr float kLowest = 1e-30f, kHighest = 3e38f;
  static constexpr float kMostWeights = 262000.f;  // 2**31 / kMost: of 64 of them together
  // Of queries: 2**31 / (kMost * sqrt(kDim)), which is the length of a K row at most.
  static constexpr float kLongest = kDim == 64 ? 32700.f : 23100.f;

  // What is fetched of the next tile while 64 cells from c on are attended: one of 8 turns, two for each
  // loop, with kShare lines for each of 32 cells.
  static constexpr int64_t kShare = kDim / 64;
  static Lines turn(const Next& next, int64_t c, int64_t i) {
    return next.turn(c / 8 + i, 32 * kShare);
  }

  // Magnitudes of 32 numbers, where they are larger.
  static __m512i larger(__m512i most, const char* from) {
    const __m512i x = _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi16(0x7FFF));
    return _mm512_max_epu16(most, x);
  }
  static bool step_of(__m512i most, float& step, float& inverse) {
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(most, _mm512_set1_epi32(-65536)));
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(most, 16));
    if (_mm512_cmp_ps_mask(odd, all(kHighest), _CMP_NLT_UQ) |
        _mm512_cmp_ps_mask(even, all(kHighest), _CMP_NLT_UQ))
      return false;
    const float top = _mm512_reduce_max_ps(_mm512_max_ps(odd, even));
    inverse = top > kLowest ? kMost / top : 0.f;
    step = top / kMost;
    return true;
  }

  // 32 numbers of bfloat16 as integers, in their order.
  static __m512i whole(__m512i x, Vec inverse, Vec high_inverse) {
    const Vec even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    const Vec odd = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(-65536)));
    // The integer is in the lower bits of the sum, and in the upper ones of the other.
    const __m512i low = _mm512_castps_si512(fma(even, inverse, all(12582912.f)));
    const __m512i high = _mm512_cvtps_epi32(fma(odd, high_inverse, all(32768.f)));
    return _mm512_mask_mov_epi16(low, 0xAAAAAAAA, high);
  }

  bool load_keys(const TileRows& rows, int64_t c, int64_t n, float& step, const Next& next) {
    const Found found = find(rows, kKRows, c, n, room_);
    float inverse;
    if (!step_of(found.most, step, inverse)) return false;
    const Vec low = all(inverse), high = all(inverse * 65536.f);
    int16_t* to = keys_;
    Lines lines = Next::nothing();
    for (int64_t i = 0; i < n; i += 16) {
      if (i % 32 == 0) lines = turn(next, c, i / 32);
      const char* from = found.from[i / 16];
      for (int64_t j = 0; j < 16 && i + j < n; ++j, from += found.step[i / 16]) {
        for (int64_t k = 0; k < kShare; ++k) lines.one(j * kShare + k);
        for (int64_t d = 0; d < kDim; d += 32, to += 32)
          _mm512_store_si512(to, whole(_mm512_loadu_si512(from + 2 * d), low, high));
      }
    }
    std::memset(to, 0, sizeof *to * static_cast<size_t>(keys_ + kCells * kDim - to));
    return true;
  }

  // Two cells' numbers side by side, each 32 in the order of 16-byte lanes.
  bool load_values(const TileRows& rows, int64_t c, int64_t n, float& step, const Next& next) {
    const Found found = find(rows, kVRows, c, n, room_);
    float inverse;
    if (!step_of(found.most, step, inverse)) return false;
    const Vec low = all(inverse), high = all(inverse * 65536.f);
    int16_t* to = values_;
    Lines lines = Next::nothing();
    for (int64_t i = 0; i < n; i += 16) {
      if (i % 32 == 0) lines = turn(next, c, 4 + i / 32);
      const char* from = found.from[i / 16];
      const int64_t row = found.step[i / 16];
      for (int64_t j = 0; j < 16 && i + j < n; j += 2, from += 2 * row) {
        const bool has_both = i + j + 1 < n;
        for (int64_t k = 0; k < 2 * kShare; ++k) lines.one(j * kShare + k);
        for (int64_t d = 0; d < kDim; d += 32, to += 64) {
          const __m512i x = _mm512_loadu_si512(from + 2 * d);
          const __m512i y = has_both ? _mm512_loadu_si512(from + row + 2 * d) : _mm512_setzero_si512();
          _mm512_store_si512(to, whole(_mm512_unpacklo_epi16(x, y), low, high));
          _mm512_store_si512(to + 32, whole(_mm512_unpackhi_epi16(x, y), low, high));
        }
      }
    }
    std::memset(to, 0, sizeof *to * static_cast<size_t>(values_ + kCells * kDim - to));
    return true;
  }

  // Where rows lie, 16 at a time, and their largest number.
  struct Found {
    const char* from[kCells / 16];
    int64_t step[kCells / 16];
    __m512i most;
  };
  static Found find(const TileRows& rows, Part part, int64_t c, int64_t n, char* room) {
    Found found;
    __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = 0; i < n; i += 16) {
      const int64_t m = smaller(n - i, 16);
      const char* from =
          rows.together(part, c + i, m, 2 * kDim, room + i * 2 * kDim, found.step[i / 16]);
      found.from[i / 16] = from;
      for (int64_t j = 0; j < m; ++j, from += found.step[i / 16])
        for (int64_t d = 0; d < kDim; d += 32)
          most[d / 32 % 2] = larger(most[d / 32 % 2], from + 2 * d);
    }
    found.most = _mm512_max_epu16(most[0], most[1]);
    return found;
  }

  // sum += x[2 i] * y[0] + x[2 i + 1] * y[1]. The compiler would load y and copy the sum.
  static void add_pair(__m512i& sum, __m512i x, const int32_t& y) {
    __asm__("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(y));
  }

  // to[i][row] = the sum of all pairs columns[p][row] * numbers[i, p], for 16 i that lie kAcross apart
  // and kPairs p that lie kAlong apart; kPairs / 2 lines are fetched. A function of its own, so that the
  // compiler keeps the sums in registers.
  template <int64_t kPairs, int64_t kAcross, int64_t kAlong>
  static __attribute__((noinline)) void multiply(const int32_t* columns, const int32_t* numbers,
                                                 Lines& given, __m512i* to) {
    Lines lines = given;
    __m512i a[16];
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) a[i] = _mm512_setzero_si512();
    for (int64_t p = 0; p < kPairs; p += 8, columns += 128, numbers += 8 * kAlong) {
#pragma GCC unroll 8
      for (int64_t j = 0; j < 8; ++j) {
        const __m512i x = _mm512_load_si512(columns + j * 16);
        if (j % 2) lines.one(j / 2);
#pragma GCC unroll 16
        for (int64_t i = 0; i < 16; ++i) add_pair(a[i], x, numbers[i * kAcross + j * kAlong]);
      }
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + i, a[i]);
    given.at = lines.at;
  }

  // logits_[cell][row] of n cells, and minus infinity behind them; the highest of each row.
  Vec logits(int64_t c, Vec step, const Next& next, int64_t n) {
    Vec top = all(kMinusInfinity);
    Lines lines = Next::nothing();
    for (int64_t first = 0; first < kCells; first += 16) {
      if (first % 32 == 0) lines = turn(next, c, 2 + first / 32);
      const auto* k = reinterpret_cast<const int32_t*>(keys_ + first * kDim);
      __m512i a[16];
      multiply<kDim / 2, kDim / 2, 1>(queries_, k, lines, a);
      for (int64_t i = 0; i < 16; ++i) {
        const Vec s = first + i < n ? mul(_mm512_cvtepi32_ps(a[i]), step) : all(kMinusInfinity);
        top = max(top, s);
        store(logits_ + (first + i) * 16, s);
      }
    }
    return top;
  }

  void add_values(int64_t c, Vec factor, Vec step, const Next& next) {
    Lines lines = Next::nothing();
    for (int64_t d = 0; d < kDim; d += 16) {
      if (d % (kDim / 2) == 0) lines = turn(next, c, 6 + d / (kDim / 2));
      const auto* v = reinterpret_cast<const int32_t*>(values_) + d;
      __m512i a[16];
      multiply<kCells / 2, 1, kDim>(weights_, v, lines, a);
      for (int64_t i = 0; i < 16; ++i) {
        float* to = results_ + number(d + i) * 16;
        store(to, fma(load(to), factor, mul(_mm512_cvtepi32_ps(a[i]), step)));
      }
    }
  }

  // Which number lies at place i of `values_`.
  static constexpr int64_t number(int64_t i) {
    return i / 32 * 32 + i % 16 / 4 * 8 + i % 32 / 16 * 4 + i % 4;
  }

  int16_t *keys_, *values_;
  int32_t *queries_, *weights_;
  float *logits_, *results_;
  char* room_;
  Vec steps_, max_ = all(kMinusInfinity), sum_ = all(0.f);
  bool is_finite_ = true;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
