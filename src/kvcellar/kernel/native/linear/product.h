// Linear layers, once for each instruction set that includes it; after vector.h.

#pragma once

#include "core/levels.h"
#include "isa/ints.h"
#include "linear/linear.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Of packed weights: what fits into registers.
#if defined(KVC_AVX2)
constexpr int kTokensAtOnce = 4;
#else
constexpr int kTokensAtOnce = 8;
#endif

// kLanes sums of four products each: of weights from 0 to 24 or 255, 4 to a lane, and 4 signed numbers of
// a token, which all lanes meet; `begin` and `end` are for a group's.

constexpr bool has_halves(WeightFormat format) {
  return format == WeightFormat::int4 || format == WeightFormat::mxfp4 || format == WeightFormat::nibbles ||
         format == WeightFormat::looked_up;
}
// Whose numbers are a table's.
constexpr bool has_table(WeightFormat format) {
  return format == WeightFormat::mxfp4 || format == WeightFormat::looked_up;
}
// Whose products in bytes may be too large for words of 16 bits.
constexpr bool is_wide(WeightFormat format) { return !has_halves(format) || format == WeightFormat::looked_up; }
// What stands for 0 among a format's unsigned numbers.
constexpr int32_t zero_of(WeightFormat format) {
  return format == WeightFormat::int8 ? 128 : format == WeightFormat::int4 ? 8 : 12;
}
// The numbers of mxfp4, doubled and around 12.
alignas(16) constexpr uint8_t kMxfp4Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// Those of IQ4, around 128.
alignas(16) constexpr uint8_t kIq4Numbers[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                 129, 141, 153, 166, 181, 197, 217, 241};
constexpr const uint8_t* table_of(WeightFormat format) {
  return format == WeightFormat::mxfp4 ? kMxfp4Numbers : kIq4Numbers;
}
// What a number of mxfp4 counts: half of the power of 2, also where that is below the normal numbers.
inline float mxfp4_step(uint8_t exponent) {
  const uint32_t bits = exponent < 2 ? 0x200000u << exponent : (exponent - 1u) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Without VNNI products of 8-bit weights are those of words: a token's numbers come as such, of each four
// the first, third, second and fourth.
#if defined(KVC_AVX2) && !defined(KVC_VNNI)
constexpr bool kHasWords = true;
#else
constexpr bool kHasWords = false;
#endif
#if defined(KVC_BF16)
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

#if defined(KVC_AVX512) || defined(KVC_AVX2)
constexpr int kParts = kBlockRows / kLanes;  // vectors of outputs

// 4 bits of each byte, as unsigned numbers.
template <WeightFormat kFormat>
inline Ints low_halves(Ints x) {
  const Ints halves = both(x, all_bytes(15));
  return has_table(kFormat) ? look_up(all_16_bytes(table_of(kFormat)), halves) : halves;
}
template <WeightFormat kFormat>
inline Ints high_halves(Ints x) {
  return low_halves<kFormat>(right_16(x, 4));
}

// The same four of a token for all lanes.
inline Ints four(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, 4);
  return all_ints(bytes);
}

#if defined(KVC_VNNI)
template <WeightFormat kFormat>
inline Ints begin(int32_t offset) {
  return all_ints(offset);
}
template <WeightFormat kFormat>
inline Ints end(Ints sum, int32_t) {
  return sum;
}
inline Ints dot_four(Ints sum, Ints x, const int8_t* numbers) {
#if defined(KVC_AVX512)
  return _mm512_dpbusd_epi32(sum, x, four(numbers));  // which loads them
#else
  return dot_fours(sum, x, four(numbers));
#endif
}
// 64 bytes of weights meet a token's numbers, which are loaded once for all outputs. Functions that use it are called:
// in a larger one a compiler stops putting such parts in their place, and sums go through memory.
template <WeightFormat kFormat>
__attribute__((always_inline)) inline void add_token(const Ints (&weights)[kParts], const int8_t* numbers,
                                                     Ints (&sums)[kParts]) {
  for (int part = 0; part < kParts; ++part) {
    if constexpr (has_halves(kFormat)) {
      sums[part] = dot_four(sums[part], low_halves<kFormat>(weights[part]), numbers);
      sums[part] = dot_four(sums[part], high_halves<kFormat>(weights[part]), numbers + 4);
    } else {
      sums[part] = dot_four(sums[part], weights[part], numbers);
    }
  }
}
#else
// Sums are kept: GCC would else add products to each other first, for which there are no registers.

// Of 4 bits a group's products fit into 16: 16 of them at most 15 * 127, or of half a group 8 at most 24 * 127.
template <WeightFormat kFormat>
inline Ints begin(int32_t offset) {
  return all_ints(is_wide(kFormat) ? offset : 0);
}
template <WeightFormat kFormat>
inline Ints end(Ints sum, int32_t offset) {
  return is_wide(kFormat) ? sum : add_32(dot_words(sum, all_ints(0x10001)), all_ints(offset));
}
// 64 bytes of weights meet a token's numbers, which are loaded once for all outputs: with AVX2 a load takes as long
// as a product.
template <WeightFormat kFormat>
__attribute__((always_inline)) inline void add_token(const Ints (&weights)[kParts], const int8_t* numbers,
                                                     Ints (&sums)[kParts]) {
  if (!is_wide(kFormat)) {
    for (int part = 0; part < kParts; ++part) {
      sums[part] = kept(add_16(sums[part], dot_bytes(low_halves<kFormat>(weights[part]), four(numbers))));
      sums[part] = kept(add_16(sums[part], dot_bytes(high_halves<kFormat>(weights[part]), four(numbers + 4))));
    }
    return;
  }
  for (int side = 0; side < (has_halves(kFormat) ? 2 : 1); ++side) {
    Ints bytes[kParts];
    for (int part = 0; part < kParts; ++part)
      bytes[part] = !has_halves(kFormat) ? weights[part]
                    : side               ? high_halves<kFormat>(weights[part])
                                         : low_halves<kFormat>(weights[part]);
    for (int half = 0; half < 2; ++half) {
      const Ints two = kept(four(numbers + 8 * side + 4 * half));
      for (int part = 0; part < kParts; ++part) {
        const Ints words = half ? right_16(bytes[part], 8) : both(bytes[part], all_ints(0xFF00FF));
        sums[part] = kept(add_32(sums[part], dot_words(words, two)));
      }
    }
  }
}
#endif
#endif

// Rows are hardly longer than what the machine needs to see that it reads a stream, and what it
// fetches by itself ends with a page. Intel's processors wait less where lines come to the first cache from the
// second one as well, before they are read.
constexpr int64_t kAheadBytes = 4096, kScalesAhead = 1024;
#if defined(KVC_VNNI) && !defined(KVC_BF16)
constexpr int64_t kNearBytes = 1536, kNearPacked = 1024;
#else
constexpr int64_t kNearBytes = 1536, kNearPacked = 0;
#endif
template <int64_t kNear = kNearBytes>
inline void fetch_ahead(const void* now) {
  __asm__ volatile("");  // else it is a function without effect, whose calls go
  const auto* line = static_cast<const char*>(now);
  __builtin_prefetch(line + kAheadBytes, 0, 2);
  if (kNear) __builtin_prefetch(line + kNear, 0, 3);
}

// The same for packed weights, of which Zen 5 waits for a line in its second cache now and then.
inline void fetch_packed(const void* now) {
#if defined(KVC_BF16)
  __asm__ volatile("");
  if (!is_fetched_far) return __builtin_prefetch(static_cast<const char*>(now) + kAheadBytes * 3 / 2, 0, 3);
#endif
  fetch_ahead<kNearPacked>(now);
}

// Of an output's scales that of a group.
template <WeightFormat kFormat>
constexpr int64_t shared_of(int64_t group) {
  return group * kGroupInputs / (has_halves(kFormat) ? kInt4Shared : kInt8Shared);
}

// A block's scales, and how they are read.
template <WeightFormat kFormat>
inline auto scales_of(const LinearWeights& weights, int64_t block) {
  const int64_t first = block * weights.n_scales * kBlockRows;
  if constexpr (kFormat == WeightFormat::mxfp4)
    return weights.exponents + first;
  else
    return weights.scales + first;
}
inline float scale_at(const uint16_t* half) { return half_to_float(*half); }
inline float scale_at(const uint8_t* exponent) { return mxfp4_step(*exponent); }
#if defined(KVC_AVX512) || defined(KVC_AVX2)
inline Vec load_scales(const uint16_t* halves) { return load_half(halves); }
inline Vec load_scales(const uint8_t* exponents) {
  const Ints from = load_u8_ints(exponents);  // see mxfp4_step
  return bits_as_floats(
      max_32(add_32(left_32(from, 23), all_ints(-0x800000)), add_32(left_32(from, 21), all_ints(0x200000))));
}
#endif

inline void load_floats(const void* from, Dtype dtype, int64_t n, float* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, sizeof(float) * n);
    return;
  }
  const auto* p = static_cast<const uint16_t*>(from);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load_bf16(p + i));
  for (; i < n; ++i) to[i] = bf16_to_float(p[i]);
}

#if defined(KVC_BF16)
inline void prepare_pairs(const LinearCall& call, const LinearInputs& inputs, int64_t token);
#endif

// Of many tokens kTokensOfPanel lie in a panel: a vector of each by turns, in the order of load_split, and behind
// them what numbers of each are left. Where they come from, rows a power of two apart share a few of a cache's sets.
#if defined(KVC_AVX512) || defined(KVC_NEON)
constexpr int kTokensOfPanel = 6;
#else
constexpr int kTokensOfPanel = 3;
#endif
static_assert(kTokensOfPanel <= kMostOfPanel);

inline int64_t whole_vectors(int64_t n) { return n / (2 * kLanes) * (2 * kLanes); }

// Where a token's i-th number lies among panels.
inline int64_t panel_place(int64_t token, int64_t i, int64_t n_in) {
  constexpr int64_t kBoth = 2 * kLanes;
  const int64_t whole = whole_vectors(n_in), of_panel = token % kTokensOfPanel, panel = (token - of_panel) * n_in;
  if (i >= whole) return panel + kTokensOfPanel * whole + of_panel * (n_in - whole) + i - whole;
  const int64_t place = i / kBoth * kBoth + split_place(static_cast<int>(i % kBoth));
  return panel + (place / kLanes * kTokensOfPanel + of_panel) * kLanes + place % kLanes;
}

inline void put_in_panel(const LinearCall& call, const char* x, int64_t token, float* panels) {
  const int64_t n = call.weights.n_in, whole = whole_vectors(n), size = call.in == Dtype::f32 ? 4 : 2;
  float* to = panels + panel_place(token, 0, n);
  for (int64_t i = 0; i < whole; i += 2 * kLanes, to += 2 * kTokensOfPanel * kLanes) {
    float both[2 * kLanes];
    load_floats(x + i * size, call.in, 2 * kLanes, both);
    split_floats(both, 2 * kLanes, false);
    store(to, load(both));
    store(to + kTokensOfPanel * kLanes, load(both + kLanes));
  }
  if (whole < n) load_floats(x + whole * size, call.in, n - whole, panels + panel_place(token, whole, n));
}

inline void put(const LinearCall& call, int64_t token, int64_t first, int64_t n, const float* values) {
  const int64_t step = call.out_step ? call.out_step : call.weights.n_out;
  if (call.result == Dtype::f32) {
    std::memcpy(static_cast<float*>(call.out) + token * step + first, values, sizeof(float) * n);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(call.out) + token * step + first;
  if (n == kBlockRows) {
    for (int64_t i = 0; i < kBlockRows; i += kLanes) store_bf16(to + i, load(values + i));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(values[i]);
  }
}

// Plain weights: bf16, f16 or f32.
template <WeightFormat kFormat>
struct Plain {
  using Number = uint16_t;
};
template <>
struct Plain<WeightFormat::f32> {
  using Number = float;
};
template <WeightFormat kFormat>
inline Vec load_plain(const typename Plain<kFormat>::Number* p) {
  if constexpr (kFormat == WeightFormat::f32)
    return load(p);
  else
    return kFormat == WeightFormat::f16 ? load_half(p) : load_bf16(p);
}
template <WeightFormat kFormat>
inline float plain_at(const typename Plain<kFormat>::Number* p) {
  if constexpr (kFormat == WeightFormat::f32)
    return *p;
  else
    return kFormat == WeightFormat::f16 ? half_to_float(*p) : bf16_to_float(*p);
}
// The i-th number of weights whose format is not known before.
inline float plain_at(const LinearWeights& weights, int64_t i) {
  const auto* halves = static_cast<const uint16_t*>(weights.data) + i;
  switch (weights.format) {
    case WeightFormat::f32: return static_cast<const float*>(weights.data)[i];
    case WeightFormat::f16: return half_to_float(*halves);
    default: return bf16_to_float(*halves);
  }
}

// kRows outputs of kTokens tokens, plain, to out[token * kBlockRows]. The sums depend on neither.
template <int kTokens, int kRows, WeightFormat kFormat>
inline void dot_plain(const typename Plain<kFormat>::Number* w, int64_t n, const float* x, float* out) {
  using Number = typename Plain<kFormat>::Number;
  constexpr auto kSize = static_cast<int64_t>(sizeof(Number));
  Vec sums[kRows][kTokens][2];
  for (auto& row : sums)
    for (auto& token : row) token[0] = token[1] = all(0.f);
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    // Behind a row's end come those that are not read now.
    const Number* now = w + i + (i + kAheadBytes / kSize < n ? 0 : (kRows - 1) * n);
    for (int r = 0; r < kRows; ++r) fetch_ahead(now + r * n);
    for (int half = 0; half < 2; ++half) {
      Vec y[kTokens];
      for (int t = 0; t < kTokens; ++t) y[t] = load(x + t * n + i + half * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = load_plain<kFormat>(w + r * n + i + half * kLanes);
        for (int t = 0; t < kTokens; ++t) sums[r][t][half] = fma(weight, y[t], sums[r][t][half]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) {
      float total = sum(add(sums[r][t][0], sums[r][t][1]));
      for (int64_t j = i; j < n; ++j) total += plain_at<kFormat>(w + r * n + j) * x[t * n + j];
      out[t * kBlockRows + r] = total;
    }
  }
}

// Rows that meet several tokens at once: these come from the second cache, and half as often. One
// token is met by one row after the other, which is one stream.
#if defined(KVC_AVX512) || defined(KVC_NEON)
constexpr int kRowsTogether = 2;
#else
constexpr int kRowsTogether = 1;  // there are registers for no more
#endif

template <int kTokens, WeightFormat kFormat>
inline void block_plain(const LinearCall& call, const float* x, int64_t token, int64_t block) {
  const int64_t n = call.weights.n_in, first = block * kBlockRows;
  const int64_t n_rows = call.weights.n_out - first < kBlockRows ? call.weights.n_out - first : kBlockRows;
  const auto* w = static_cast<const typename Plain<kFormat>::Number*>(call.weights.data) + first * n;
  float out[kTokens][kBlockRows];
  constexpr int kRows = kTokens > 1 ? kRowsTogether : 1;
  int64_t r = 0;
  for (; r + kRows <= n_rows; r += kRows) dot_plain<kTokens, kRows, kFormat>(w + r * n, n, x, out[0] + r);
  for (; r < n_rows; ++r) dot_plain<kTokens, 1, kFormat>(w + r * n, n, x, out[0] + r);
  for (int t = 0; t < kTokens; ++t) put(call, token + t, first, n_rows, out[t]);
}

// More tokens at once: some inputs of some rows are decoded once for up to kTokensKept tokens, of which these
// inputs stay in the second cache while kBlocksInTurn blocks meet them. Every sum is one register's.
constexpr int64_t kTokensKept = 66;
#if defined(KVC_AVX2)
constexpr int64_t kRowsDecoded = 4, kInputsDecoded = 1024;  // half of a first cache
#else
constexpr int64_t kRowsDecoded = 8, kInputsDecoded = 512;
#endif
constexpr int64_t kDecodedRow = kInputsDecoded + 16;  // not all in the same of its sets

// out[token * kBlockRows + row] += w[row] . x[token] over n inputs, for 4 rows kDecodedRow apart and the first
// kTokens of a panel.
template <int kTokens>
inline void dots_of_4(const float* w, const float* panel, int64_t n, float* out) {
  Vec sums[kTokens][4];
  for (auto& token : sums)
    for (Vec& a : token) a = all(0.f);
  for (int64_t i = 0; i < n; i += kLanes, panel += kTokensOfPanel * kLanes) {
    Vec y[kTokens];
    for (int t = 0; t < kTokens; ++t) y[t] = load(panel + t * kLanes);
    for (int r = 0; r < 4; ++r) {
      const Vec weight = load(w + r * kDecodedRow + i);
      for (int t = 0; t < kTokens; ++t) sums[t][r] = fma(weight, y[t], sums[t][r]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    float four[4];
    sum_4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
    for (int r = 0; r < 4; ++r) out[t * kBlockRows + r] += four[r];
  }
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar

#include "linear/coded.h"
// Whether many tokens are best met by integers: in half of the operations that floats take, and nothing takes fewer.
#if defined(KVC_AVX2) || (defined(KVC_VNNI) && !defined(KVC_BF16) && !defined(KVC_AMX))
#define KVC_MANY_WORDS
#include "linear/many_words.h"
#endif

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// Many tokens in float32.
struct ManyFloats {
  static constexpr int kTokens = kTokensOfPanel;
  static constexpr int64_t kKept = kTokensKept;
  static constexpr int64_t kRows = kRowsDecoded, kInputs = kInputsDecoded;
  static constexpr bool is_least_in = true;  // an escape's place
  struct Decoded {
    alignas(64) float numbers[kRowsDecoded * kDecodedRow];
  };
  const LinearWeights& weights;
  const float* panels;

  // Some inputs of n_rows rows of a block in the order of load_split, kDecodedRow apart.
  void decode(int64_t block, int64_t row, int64_t n_rows, int64_t first, int64_t length, Decoded& to) const {
    float* at = to.numbers;
    if (weights.format == WeightFormat::coded) {
      const CodedHead& head = head_of(weights, block);
      for (int64_t r = row; r < row + n_rows; ++r, at += kDecodedRow) {
        const uint8_t* from = coded_row(weights, head, r) + first * 3 / 2;
        const auto table = table_at(head.tables[r]);
        for (int64_t i = 0; i < length; i += kCodedInputs, from += kCodedInputs * 3 / 2) {
          fetch_group(from + weights.block_bytes);
          split_group(from, table, [&](Vec even, Vec odd, int64_t place) {
            store(at + i + place, even);
            store(at + i + place + kLanes, odd);
          });
        }
      }
      return;
    }
    const int64_t n = weights.n_in;
    if (weights.format == WeightFormat::f32) {
      const auto* floats = static_cast<const float*>(weights.data) + (block * kBlockRows + row) * n + first;
      for (int64_t r = 0; r < n_rows; ++r, floats += n, at += kDecodedRow) {
        for (int64_t i = 0; i < length; i += kLanes) {
          store(at + i, load(floats + i));
          if (i % 16 == 0) __builtin_prefetch(floats + kRowsDecoded * n + i, 0, 2);
        }
        split_floats(at, length, false);
      }
      return;
    }
    const auto* from = static_cast<const uint16_t*>(weights.data) + (block * kBlockRows + row) * n + first;
    const bool is_half = weights.format == WeightFormat::f16;
    for (int64_t r = 0; r < n_rows; ++r, from += n, at += kDecodedRow) {
      for (int64_t i = 0; i < length; i += 2 * kLanes) {
        Vec even, odd;
        if (is_half) {
          even = load_half(from + i);
          odd = load_half(from + i + kLanes);
        } else {
          load_split(from + i, even, odd);
        }
        store(at + i, even);
        store(at + i + kLanes, odd);
        // What follows: the same inputs of the next rows.
        if (i % 32 == 0) __builtin_prefetch(from + kRowsDecoded * n + i, 0, 2);
      }
      if (is_half) split_floats(at, length, false);
    }
  }

  template <int kTokensNow>
  void dots(const Decoded& decoded, int64_t row, int64_t token, int64_t first, int64_t length, float* out) const {
    const float* panel = panels + token * weights.n_in + first * kTokens;
    dots_of_4<kTokensNow>(decoded.numbers + row * kDecodedRow, panel, length, out);
  }

  float input(int64_t token, int64_t i) const { return panels[panel_place(token, i, weights.n_in)]; }
};

// Some blocks, kBlocksInTurn at most, for n_tokens tokens, kKept at most: some inputs of all, and then the next.
template <class Many>
inline void blocks_of_many(const LinearCall& call, const Many& many, int64_t token, int64_t n_tokens, int64_t first,
                           int64_t stop) {
  static_assert(Many::kKept % Many::kTokens == 0);
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, whole = whole_vectors(n);
  typename Many::Decoded decoded;
  float out[kBlocksInTurn][Many::kKept * kBlockRows];
  for (int64_t block = first; block < stop; ++block)
    std::memset(out[block - first], 0, sizeof(float) * static_cast<size_t>(n_tokens * kBlockRows));
  std::memset(&decoded, 0, sizeof decoded);  // rows are multiplied by fours, the last ones too
  for (int64_t i = 0; i < whole; i += Many::kInputs) {
    const int64_t length = smaller(whole - i, Many::kInputs);
    for (int64_t block = first; block < stop; ++block) {
      const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
      for (int64_t row = 0; row < n_rows; row += Many::kRows) {
        const int64_t rows = smaller(n_rows - row, Many::kRows);
        many.decode(block, row, rows, i, length, decoded);
        for (int64_t t = 0; t < n_tokens; t += Many::kTokens) {
          with_number<Many::kTokens>(smaller(Many::kTokens, n_tokens - t), [&](auto at_once) {
            for (int64_t r = 0; r < rows; r += 4)
              many.template dots<decltype(at_once)::of>(decoded, r, token + t, i, length,
                                                        out[block - first] + t * kBlockRows + row + r);
          });
        }
      }
    }
  }
  for (int64_t block = first; block < stop; ++block) {
    float* of_block = out[block - first];
    const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
    if (weights.format == WeightFormat::coded) {
      const CodedHead& head = head_of(weights, block);
      add_escapes<Many::is_least_in>(
          head, escapes_of(weights, head), n_tokens, [&](int64_t t, int64_t i) { return many.input(token + t, i); },
          of_block);
    }
    const int64_t first_row = block * kBlockRows;
    for (int64_t t = 0; t < n_tokens; ++t) {
      for (int64_t r = 0; r < n_rows; ++r)
        for (int64_t i = whole; i < n; ++i)
          of_block[t * kBlockRows + r] += plain_at(weights, (first_row + r) * n + i) * many.input(token + t, i);
      put(call, token + t, block * kBlockRows, n_rows, of_block + t * kBlockRows);
    }
  }
}

template <class Many>
inline int64_t run_many(const LinearCall& call, const Many& many, int64_t first, int64_t stop) {
  int64_t n_read = 0;
  for (int64_t kept = 0; kept < call.n_tokens; kept += Many::kKept, n_read += stop - first) {
    const int64_t n_tokens = smaller(call.n_tokens - kept, Many::kKept);
    for (int64_t block = first; block < stop; block += kBlocksInTurn)
      blocks_of_many(call, many, kept, n_tokens, block, smaller(block + kBlocksInTurn, stop));
  }
  return n_read;
}

// Parts of a group whose products are summed in integers.
template <WeightFormat kFormat>
constexpr int kTurns = kHasWords && kFormat == WeightFormat::mxfp4 ? 2 : 1;

// 16 outputs of kTokens tokens, packed: integers within a group, floats from group to group.
template <int kTokens, WeightFormat kFormat>
__attribute__((noinline)) void block_packed(const LinearCall& call, const LinearInputs& inputs, int64_t token,
                                            int64_t block) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, n_groups = weights.n_groups;
  const uint8_t* w = static_cast<const uint8_t*>(weights.data) + block * weights.block_bytes;
  const auto* scales = scales_of<kFormat>(weights, block);
  constexpr bool kHalves = has_halves(kFormat);
  constexpr int64_t kWide = kHasWords && !kHalves ? 2 : 1;  // bytes of a number
  const int8_t* x = inputs.numbers + token * n * kWide;
  const float* x_scales = inputs.scales + token * n_groups;
  const int32_t* offsets = inputs.offsets + token * n_groups;
  float out[kTokens][kBlockRows];
#if defined(KVC_AVX512) || defined(KVC_AVX2)
  Vec totals[kTokens][kParts];
  for (auto& token : totals)
    for (Vec& total : token) total = all(0.f);
  for (int64_t g = 0; g < n_groups; ++g) {
    const auto* scales_now = scales + shared_of<kFormat>(g) * kBlockRows;
    __builtin_prefetch(reinterpret_cast<const char*>(scales_now) + kScalesAhead, 0, 3);
    const int8_t* at = x + g * kGroupInputs * kWide;
    for (int turn = 0; turn < kTurns<kFormat>; ++turn) {
      // What an offset adds comes in once.
      const auto offset = [&](int t) { return turn ? 0 : offsets[t * n_groups + g]; };
      Ints sums[kTokens][kParts];
      for (int t = 0; t < kTokens; ++t)
        for (Ints& sum : sums[t]) sum = begin<kFormat>(offset(t));
      for (int v = 0; v < (kHalves ? 4 : 8) / kTurns<kFormat>; ++v, at += (kHalves ? 8 : 4) * kWide, w += 64) {
        fetch_packed(w);
        Ints weight[kParts];
        for (int part = 0; part < kParts; ++part) weight[part] = load_ints(w + part * kLanes * 4);
        for (int t = 0; t < kTokens; ++t) add_token<kFormat>(weight, at + t * n * kWide, sums[t]);
      }
      for (int part = 0; part < kParts; ++part) {
        const Vec scale = load_scales(scales_now + part * kLanes);
        for (int t = 0; t < kTokens; ++t)
          totals[t][part] = fma(to_floats(end<kFormat>(sums[t][part], offset(t))),
                                mul(scale, all(x_scales[t * n_groups + g])), totals[t][part]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int part = 0; part < kParts; ++part) store(out[t] + part * kLanes, totals[t][part]);
#else
  for (auto& row : out)
    for (float& value : row) value = 0.f;
  for (int64_t g = 0; g < n_groups; ++g) {
    int16_t numbers[kGroupInputs / 4][kBlockRows][4];
    if constexpr (kHalves) {
      const auto number = [](int half) { return kFormat == WeightFormat::mxfp4 ? kMxfp4Numbers[half] : half; };
      for (int v = 0; v < 4; ++v, w += 64)
        for (int i = 0; i < 64; ++i) {
          (&numbers[2 * v][0][0])[i] = number(w[i] & 15);
          (&numbers[2 * v + 1][0][0])[i] = number(w[i] >> 4);
        }
    } else {
      for (int i = 0; i < kGroupInputs * kBlockRows; ++i) (&numbers[0][0][0])[i] = w[i];
      w += kGroupInputs * kBlockRows;
    }
    float scale[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) scale[r] = scale_at(scales + shared_of<kFormat>(g) * kBlockRows + r);
    for (int t = 0; t < kTokens; ++t) {
      const int8_t* from = x + t * n + g * kGroupInputs;
      int32_t sums[kBlockRows];
      for (int32_t& value : sums) value = offsets[t * n_groups + g];
      for (int q = 0; q < kGroupInputs / 4; ++q)
        for (int r = 0; r < kBlockRows; ++r)
          for (int i = 0; i < 4; ++i) sums[r] += numbers[q][r][i] * from[4 * q + i];
      for (int r = 0; r < kBlockRows; ++r)
        out[t][r] += static_cast<float>(sums[r]) * (scale[r] * x_scales[t * n_groups + g]);
    }
  }
#endif
  const int64_t first = block * kBlockRows;
  const int64_t n_rows = weights.n_out - first < kBlockRows ? weights.n_out - first : kBlockRows;
  for (int t = 0; t < kTokens; ++t) put(call, token + t, first, n_rows, out[t]);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar

#include "linear/grouped.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

template <int kTokens>
inline void tokens_of(const LinearCall& call, const LinearInputs& inputs, int64_t token, int64_t first, int64_t stop) {
  if (call.weights.is_grouped) return grouped_tokens<kTokens>(call, inputs, token, first, stop);
  constexpr int kFew = kTokens > kReadOnce ? kReadOnce : kTokens;  // floats come in no more
  const int64_t n = call.weights.n_in;
  for (int64_t block = first; block < stop; ++block) {
    switch (call.weights.format) {
      case WeightFormat::int4: block_packed<kTokens, WeightFormat::int4>(call, inputs, token, block); break;
      case WeightFormat::int8: block_packed<kTokens, WeightFormat::int8>(call, inputs, token, block); break;
      case WeightFormat::mxfp4: block_packed<kTokens, WeightFormat::mxfp4>(call, inputs, token, block); break;
      case WeightFormat::coded: block_coded<kFew>(call, inputs.rows + token * n, token, block); break;
      case WeightFormat::f16: block_plain<kFew, WeightFormat::f16>(call, inputs.rows + token * n, token, block); break;
      case WeightFormat::f32: block_plain<kFew, WeightFormat::f32>(call, inputs.rows + token * n, token, block); break;
      default: block_plain<kFew, WeightFormat::bf16>(call, inputs.rows + token * n, token, block);
    }
  }
}

void prepare_linear(const LinearCall& call, const LinearInputs& inputs, int64_t first, int64_t stop) {
  const int64_t n = call.weights.n_in, size = call.in == Dtype::f32 ? 4 : 2;
  const LinearWeights& weights = call.weights;
  const int32_t zero = weights.is_grouped ? weights.zero : zero_of(weights.format);
  const int64_t sums_each = weights.is_packed ? weights.n_sums / weights.n_groups : 1;
  for (int64_t t = first; t < stop; ++t) {
    const char* x = static_cast<const char*>(call.x) + t * n * size;
#if defined(KVC_BF16)
    if (inputs.pairs) {
      prepare_pairs(call, inputs, t);
      continue;
    }
#endif
    if (!call.weights.is_packed) {
      if (call.n_tokens > kReadOnce) {
#if defined(KVC_MANY_WORDS)
        if (ManyWords::fits(call)) {
          ManyWords(call, inputs).put(t);
          continue;
        }
#endif
        put_in_panel(call, x, t, inputs.rows);
        continue;
      }
      float* row = inputs.rows + t * n;
      load_floats(x, call.in, n, row);
      if (call.weights.format == WeightFormat::coded) split_floats(row, whole_vectors(n), false);
      continue;
    }
    for (int64_t g = 0; g < call.weights.n_groups; ++g) {
      float row[kGroupInputs];
      load_floats(x + g * kGroupInputs * size, call.in, kGroupInputs, row);
      const Vec zeros = all(0.f);
      Vec highs = zeros, doubts = zeros;
      for (int64_t i = 0; i < kGroupInputs; i += kLanes) {
        const Vec y = load(row + i);
        highs = max(highs, max(y, sub(zeros, y)));
        doubts = fma(y, zeros, doubts);
      }
      const float most = highest(highs);
      const bool is_finite = sum(doubts) == 0.f;
      const float inverse = is_finite && most > 1e-36f ? 127.f / most : 0.f;  // finite, too
      int32_t totals[2] = {};
      uint8_t numbers[kGroupInputs];
      for (int64_t s = 0; s < sums_each; ++s) {
        Vec total = zeros;  // of whole numbers: the same in any order
        for (int64_t i = s * kGroupInputs / sums_each; i < (s + 1) * kGroupInputs / sums_each; i += kLanes) {
          const Vec y = is_finite ? nearest(mul(load(row + i), all(inverse))) : zeros;
          total = add(total, y);
          store_u8(numbers + i, add(y, all(128.f)));
        }
        totals[s] = static_cast<int32_t>(sum(total));
      }
      for (uint8_t& number : numbers) number ^= 128;  // signed
      const int64_t at = t * n + g * kGroupInputs;
      if (kHasWords && weights.is_wide) {
        int16_t words[kGroupInputs];
        for (int64_t i = 0; i < kGroupInputs; ++i)
          words[i ^ (i % 4 == 1 || i % 4 == 2 ? 3 : 0)] = static_cast<int8_t>(numbers[i]);
        std::memcpy(inputs.numbers + 2 * at, words, sizeof words);
      } else {
        std::memcpy(inputs.numbers + at, numbers, sizeof numbers);
      }
      // What is not finite makes this token's results NaN, and no other's.
      const float scale = is_finite ? most / 127.f : __builtin_nanf("");
      inputs.scales[t * call.weights.n_groups + g] = scale;
      for (int64_t s = 0; s < sums_each; ++s) {
        int32_t& offset = inputs.offsets[t * weights.n_sums + g * sums_each + s];
        offset = -zero * totals[s];
        if (!weights.has_minima) continue;
        const float of_minimum = scale * static_cast<float>(totals[s]);
        std::memcpy(&offset, &of_minimum, 4);
      }
    }
  }
}

int64_t run_linear(const LinearCall& call, const LinearInputs& inputs, int64_t first, int64_t stop) {
#if defined(KVC_BF16)
  if (inputs.pairs) return run_pairs(call, inputs, first, stop);
#endif
  if (!call.weights.is_packed && call.n_tokens > kReadOnce) {
#if defined(KVC_MANY_WORDS)
    if (ManyWords::fits(call)) return run_many(call, ManyWords(call, inputs), first, stop);
#endif
    return run_many(call, ManyFloats{call.weights, inputs.rows}, first, stop);
  }
  const int64_t at_once = call.weights.is_packed ? kTokensAtOnce : kReadOnce;
  int64_t n_read = 0;
  for (int64_t token = 0; token < call.n_tokens; token += at_once, n_read += stop - first) {
    with_number<kTokensAtOnce>(smaller(at_once, call.n_tokens - token), [&](auto n_tokens) {
      tokens_of<decltype(n_tokens)::of>(call, inputs, token, first, stop);
    });
  }
  return n_read;
}

// n weights of an output that share a scale; that.
template <bool is_int4>
inline uint16_t pack_shared(const float* x, int64_t n, uint8_t* numbers) {
  const Vec zeros = all(0.f);
  Vec most = zeros, least = zeros, doubts = zeros;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec y = load(x + i);
    most = max(most, y);
    least = max(least, sub(zeros, y));
    doubts = fma(y, zeros, doubts);
  }
  const float high = highest(most), low = highest(least);
  float step = (high > low ? high : low) / 127.f;
  if (is_int4) {
    float largest = high > low ? high : -low;
    for (int64_t i = n - 1; high == low && i >= 0; --i)
      if (__builtin_fabsf(x[i]) == high) largest = x[i];
    step = largest / -8.f;
  }
  if (sum(doubts) != 0.f) step = __builtin_nanf("");
  const uint16_t scale = float_to_half(step);
  const float held = half_to_float(scale);
  const Vec inverse = all(held == 0.f ? 0.f : 1.f / held);
  const Vec zero = all(is_int4 ? 8.f : 128.f), top = all(is_int4 ? 15.f : 255.f);
  for (int64_t i = 0; i < n; i += kLanes)
    store_u8(numbers + i, min(max(add(nearest(mul(load(x + i), inverse)), zero), zeros), top));
  return scale;
}

template <bool is_int4>
inline void pack_blocks(const Packing& packing, int64_t first, int64_t stop) {
  const LinearWeights& weights = packing.weights;
  constexpr int64_t kShared = is_int4 ? kInt4Shared : kInt8Shared, kTogether = is_int4 ? 8 : 4;
  const int64_t n = weights.n_in, size = packing.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t block = first; block < stop; ++block) {
    uint16_t* scales = packing.scales + block * weights.n_scales * kBlockRows;
    for (int64_t r = 0; r < kBlockRows; ++r, ++scales) {
      const int64_t output = block * kBlockRows + r;
      uint8_t* to = packing.data + block * weights.block_bytes + 4 * r;
      for (int64_t i = 0; i < n; i += kShared) {
        float x[kShared] = {};
        uint8_t numbers[kShared];
        const int64_t length = smaller(n - i, kShared);
        if (output < weights.n_out)
          load_floats(static_cast<const char*>(packing.rows) + (output * n + i) * size, packing.dtype, length, x);
        scales[i / kShared * kBlockRows] = pack_shared<is_int4>(x, length, numbers);
        for (int64_t j = 0; j < length; j += kTogether, to += 64) {
          uint32_t four, more;
          std::memcpy(&four, numbers + j, 4);
          std::memcpy(&more, numbers + j + kTogether - 4, 4);
          if (is_int4) four |= more << 4;
          std::memcpy(to, &four, 4);
        }
      }
    }
  }
}

void pack_linear(const Packing& packing, int64_t first, int64_t stop) {
  packing.weights.format == WeightFormat::int4 ? pack_blocks<true>(packing, first, stop)
                                               : pack_blocks<false>(packing, first, stop);
}

// Packed weights of an output: put(i, kLanes numbers from the i-th on).
template <WeightFormat kFormat, class Put>
inline void packed_row_of(const LinearWeights& weights, int64_t output, const Put& put) {
  const int64_t block = output / kBlockRows, r = output % kBlockRows;
  constexpr bool kHalves = has_halves(kFormat);
  const Vec zero = all(static_cast<float>(zero_of(kFormat)));
  const int64_t group_bytes = weights.block_bytes / weights.n_groups;
  const char* data = static_cast<const char*>(weights.data) + block * weights.block_bytes;
  const auto* scales = scales_of<kFormat>(weights, block);
  for (int64_t g = 0; g < weights.n_groups; ++g) {
    const char* from = data + g * group_bytes + 4 * r;
    uint32_t fours[kGroupInputs / 4];
    for (int q = 0; q < kGroupInputs / 4; q += kHalves ? 2 : 1, from += 64) {
      std::memcpy(fours + q, from, 4);
      if (!kHalves) continue;
      fours[q + 1] = fours[q] >> 4 & 0x0F0F0F0F;
      fours[q] &= 0x0F0F0F0F;
    }
    auto* numbers = reinterpret_cast<uint8_t*>(fours);
    if (kFormat == WeightFormat::mxfp4)
      for (int64_t i = 0; i < kGroupInputs; ++i) numbers[i] = kMxfp4Numbers[numbers[i]];
    const Vec scale = all(scale_at(scales + shared_of<kFormat>(g) * kBlockRows + r));
    for (int64_t i = 0; i < kGroupInputs; i += kLanes)
      put(g * kGroupInputs + i, mul(sub(load_u8(numbers + i), zero), scale));
  }
}

template <class Put>
inline void packed_row(const LinearWeights& weights, int64_t output, const Put& put) {
  if (weights.is_grouped) return grouped_row(weights, output, put);
  switch (weights.format) {
    case WeightFormat::int4: return packed_row_of<WeightFormat::int4>(weights, output, put);
    case WeightFormat::mxfp4: return packed_row_of<WeightFormat::mxfp4>(weights, output, put);
    default: return packed_row_of<WeightFormat::int8>(weights, output, put);
  }
}

void unpack_linear(const LinearWeights& weights, int64_t first, int64_t stop, uint16_t* to) {
  if (weights.format == WeightFormat::coded) return unpack_coded(weights, first, stop, to);
  const int64_t last = smaller(stop * kBlockRows, weights.n_out);
  for (int64_t output = first * kBlockRows; output < last; ++output, to += weights.n_in)
    packed_row(weights, output, [to](int64_t i, Vec x) { store_bf16(to + i, x); });
}

// Plain weights of an output.
template <WeightFormat kFormat>
inline void plain_row(const LinearWeights& weights, int64_t output, Dtype dtype, void* to) {
  const int64_t n = weights.n_in;
  const auto* from = static_cast<const typename Plain<kFormat>::Number*>(weights.data) + output * n;
  auto* floats = static_cast<float*>(to);
  auto* halves = static_cast<uint16_t*>(to);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec x = load_plain<kFormat>(from + i);
    dtype == Dtype::f32 ? store(floats + i, x) : store_bf16(halves + i, x);
  }
  for (; i < n; ++i) {
    const float x = plain_at<kFormat>(from + i);
    if (dtype == Dtype::f32)
      floats[i] = x;
    else
      halves[i] = float_to_bf16(x);
  }
}

void gather_rows(const LinearWeights& weights, const int64_t* outputs, int64_t n, Dtype dtype, void* to) {
  for (int64_t i = 0; i < n; ++i) {
    if (weights.is_plain) {
      void* row = static_cast<char*>(to) + i * weights.n_in * (dtype == Dtype::f32 ? 4 : 2);
      switch (weights.format) {
        case WeightFormat::f32: plain_row<WeightFormat::f32>(weights, outputs[i], dtype, row); break;
        case WeightFormat::f16: plain_row<WeightFormat::f16>(weights, outputs[i], dtype, row); break;
        default: plain_row<WeightFormat::bf16>(weights, outputs[i], dtype, row);
      }
      continue;
    }
    if (dtype == Dtype::f32) {
      float* row = static_cast<float*>(to) + i * weights.n_in;
      packed_row(weights, outputs[i], [row](int64_t at, Vec x) { store(row + at, x); });
      continue;
    }
    uint16_t* row = static_cast<uint16_t*>(to) + i * weights.n_in;
    if (weights.format == WeightFormat::coded)
      decode_row(weights, outputs[i], row);
    else
      packed_row(weights, outputs[i], [row](int64_t at, Vec x) { store_bf16(row + at, x); });
  }
}

constexpr LinearOps kLinearOps = {prepare_linear, run_linear, unpack_linear, pack_linear, gather_rows,
                                  nullptr,        nullptr,    kHasPairs,     kHasWords};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
