// Linear layers with coded weights, once for each instruction set; included by linear/product.h.
//
// Bytes and looked-up bytes by turns are bfloat16 in order. For few tokens they are operands as they leave
// the registers; for many, some inputs of some rows lie decoded in the first cache.

#pragma once

#include "linear/linear.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// 128 numbers of a row, kWords at a time: fn(words, input).
constexpr int64_t kWords = 2 * kLanes;
#if defined(KVC_AVX512) || defined(KVC_AVX2)
template <class Fn>
inline void decode_group(const uint8_t* group, Ints table, const Fn& fn) {
#pragma GCC unroll 2
  for (int64_t part = 0; part < 64; part += 2 * kWords) {
    const Ints codes = load_ints(group + part), low = all_bytes(15);
    const Ints bytes = load_ints(group + 64 + part), others = load_ints(group + 128 + part);
    const Ints upper = look_up(table, both(codes, low));
    const Ints upper_others = look_up(table, both(right_16(codes, 4), low));
    fn(mix_lower(bytes, upper), part / 2);
    fn(mix_upper(bytes, upper), part / 2 + 32);
    fn(mix_lower(others, upper_others), part / 2 + 64);
    fn(mix_upper(others, upper_others), part / 2 + 96);
  }
}
// Of the first 64 of the same numbers, or the others: kWords from the (part / 2)-th on, and from 32 behind it.
inline void decode_half(const uint8_t* group, Ints table, int half, int64_t part, Ints (&words)[2]) {
  const Ints codes = load_ints(group + part), bytes = load_ints(group + 64 * (1 + half) + part);
  const Ints upper = look_up(table, both(half ? right_16(codes, 4) : codes, all_bytes(15)));
  words[0] = mix_lower(bytes, upper);
  words[1] = mix_upper(bytes, upper);
}
inline Ints table_at(const uint8_t* table) { return all_16_bytes(table); }
inline void decode_to(const uint8_t* group, Ints table, uint16_t* to) {
  decode_group(group, table, [&](Ints words, int64_t i) { store_ints(to + i, words); });
}
// fn(one half of kWords numbers, the other one, input), in the order of load_split.
template <class Fn>
inline void split_group(const uint8_t* group, Ints table, const Fn& fn) {
  decode_group(group, table, [&](Ints words, int64_t i) {
    Vec even, odd;
    split(words, even, odd);
    fn(even, odd, i);
  });
}
#else
inline const uint8_t* table_at(const uint8_t* table) { return table; }
inline void decode_to(const uint8_t* group, const uint8_t* table, uint16_t* to) {
  for (int64_t half = 0; half < 2; ++half)
    for (int64_t i = 0; i < 64; ++i) {
      const int64_t place = coded_place(i);
      const int upper = table[group[place] >> (4 * half) & 15];
      to[64 * half + i] = static_cast<uint16_t>(upper << 8 | group[64 * (1 + half) + place]);
    }
}
template <class Fn>
inline void split_group(const uint8_t* group, const uint8_t* table, const Fn& fn) {
  uint16_t numbers[kCodedInputs];
  decode_to(group, table, numbers);
  for (int64_t i = 0; i < kCodedInputs; i += kWords) {
    Vec even, odd;
    load_split(numbers + i, even, odd);
    fn(even, odd, i);
  }
}
#endif

#if defined(KVC_BF16)
constexpr int64_t kTokensMet = 6, kTurnsFrom = 48;  // tokens of a panel, and from which on they lie in panels

// A token's inputs at the beginning of a cache's line, and of many tokens in panels.
inline void prepare_pairs(const LinearCall& call, const LinearInputs& inputs, int64_t token) {
  const int64_t n = call.weights.n_in;
  const uint16_t* x = static_cast<const uint16_t*>(call.x) + token * n;
  auto* to = reinterpret_cast<uint16_t*>(inputs.rows);
  if (call.n_tokens < kTurnsFrom) {
    if (inputs.pairs != call.x) std::memcpy(to + token * n, x, static_cast<size_t>(2 * n));
    return;
  }
  to += token / kTokensMet * kTokensMet * n + token % kTokensMet * kWords;
  for (int64_t i = 0; i < n; i += kWords, to += kTokensMet * kWords) store_ints(to, load_ints(x + i));
}
#endif

inline const CodedHead& head_of(const LinearWeights& weights, int64_t block) {
  return *reinterpret_cast<const CodedHead*>(static_cast<const char*>(weights.data) + block * weights.block_bytes);
}
inline const uint8_t* coded_row(const LinearWeights& weights, const CodedHead& head, int64_t r) {
  return reinterpret_cast<const uint8_t*>(&head + 1) + r * (weights.n_in * 3 / 2);
}

// To the first cache, but where the second one is better for it (decision 9).
inline void fetch_group(const uint8_t* group) {
  __asm__ volatile("");  // else it is a function without effect, whose calls go
#if defined(KVC_BF16)
  if (!is_fetched_far) {
    __builtin_prefetch(group, 0, 3);
    __builtin_prefetch(group + 64, 0, 3);
    __builtin_prefetch(group + 128, 0, 3);
    return;
  }
#endif
  __builtin_prefetch(group, 0, 2);
  __builtin_prefetch(group + 64, 0, 2);
  __builtin_prefetch(group + 128, 0, 2);
}

// One line of a group and, on Intel's processors, the one that comes kNearBytes behind what is read, once x is
// there. So a loop's lines are fetched one by one: compilers put all of them in one place, and a token took a
// fifth more time.
template <class V>
inline void fetch_line(const uint8_t* line, [[maybe_unused]] const uint8_t* near, [[maybe_unused]] V& x) {
#if defined(KVC_AVX512) && !defined(KVC_BF16) && !defined(KVC_EMULATED)
  __asm__ volatile("prefetcht1 %1\n\tprefetcht0 %2" : "+v"(x) : "m"(*line), "m"(*near));
#else
  __asm__ volatile("");
#if defined(KVC_BF16)
  if (!is_fetched_far) return __builtin_prefetch(line, 0, 3);
#endif
  __builtin_prefetch(line, 0, 2);
#endif
}

#if defined(KVC_AVX2)
// a += x * numbers, b += y * numbers, which are loaded once. The compiler would load more of them ahead, and keep
// sums on the stack for it.
inline void add_products(Vec x, Vec y, const float* numbers, Vec& a, Vec& b) {
  Vec loaded, sum = a, other = b;
  __asm__("vmovups %5, %2\n\tvfmadd231ps %2, %3, %0\n\tvfmadd231ps %2, %4, %1"
          : "+x"(sum), "+x"(other), "=&x"(loaded)
          : "x"(x), "x"(y), "m"(*reinterpret_cast<const Vec*>(numbers)));
  a = sum;
  b = other;
}
#endif

// Sums of a row's product: an addition waits for the one before the last. With AVX2, which has not the registers
// for that, it waits for those of the other rows.
#if defined(KVC_AVX2)
constexpr int kSums = 1;
#else
constexpr int kSums = 2;
#endif

// Numbers of several tokens that a core's first cache keeps beside the weights that pass.
#if defined(KVC_AVX2)
constexpr int64_t kFloatsNear = 4096;
#else
constexpr int64_t kFloatsNear = 8192;
#endif

// What is fetched while a group of each row passes: 192 bytes from `at` on, and for the next row those `apart`
// from them; `step` bytes further for the next groups.
struct Fetched {
  const uint8_t* at;
  int64_t apart, step;
};

// Some inputs of kRows outputs for kTokens tokens, added to their sums.
template <int kTokens, int kRows>
inline void dots_coded(const uint8_t* row, [[maybe_unused]] int64_t row_bytes, Fetched fetched, const uint8_t* tables,
                       int64_t n, const float* x, int64_t n_in, Vec (*of_rows)[kTokens][kSums]) {
  Vec sums[kRows][kTokens][kSums];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kSums; ++k) sums[r][t][k] = of_rows[r][t][k];
  for (int64_t i = 0; i < n; i += kCodedInputs, row += kCodedInputs * 3 / 2, fetched.at += fetched.step) {
#if defined(KVC_AVX2)
#pragma GCC unroll 4
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      const int half = static_cast<int>(quarter / 2);
      const int64_t part = quarter % 2 * 32;
      if constexpr (kTokens > 1 && kRows == 2) {
        // Each number of a token is loaded once for two rows: a load takes as long as a product.
        Ints words[2][2];
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) decode_half(row + r * row_bytes, table_at(tables + 16 * r), half, part, words[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int64_t at = 64 * half + part / 2 + 32 * v;
          const float* y = x + i + at;
          Vec numbers[2];
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r) {
            numbers[r] = even_of(words[r][v]);
            if (at % 32 == 0 && at < 96) fetch_line(fetched.at + r * fetched.apart + 2 * at, nullptr, numbers[r]);
          }
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t)
            add_products(numbers[0], numbers[1], y + t * n_in, sums[0][t][0], sums[1][t][0]);
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r) numbers[r] = odd_of(words[r][v]);
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t)
            add_products(numbers[0], numbers[1], y + t * n_in + kLanes, sums[0][t][0], sums[1][t][0]);
        }
      } else {
        // All of a row's sums have one product more before one of them has two.
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          Ints words[2];
          decode_half(row + r * row_bytes, table_at(tables + 16 * r), half, part, words);
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) {
            const int64_t at = 64 * half + part / 2 + 32 * v;
            Vec even, odd;
            split(words[v], even, odd);
            if (at % 32 == 0 && at < 96) fetch_line(fetched.at + r * fetched.apart + 2 * at, nullptr, even);
            const float* y = x + i + at;
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) sums[r][t][0] = fma(even, load(y + t * n_in), sums[r][t][0]);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) sums[r][t][0] = fma(odd, load(y + t * n_in + kLanes), sums[r][t][0]);
          }
        }
      }
    }
#else
    // Behind these inputs of two rows come those of the next two.
    const bool is_at_end = kRows == 2 && 3 * i + 2 * kNearBytes >= 3 * n;
    const int64_t near = kNearBytes + (is_at_end ? 2 * row_bytes - n * 3 / 2 : 0);
    if constexpr (kRows == 1) {
      split_group(row, table_at(tables), [&](Vec even, Vec odd, int64_t at) {
        if (at % 32 == 0 && at < 96) fetch_line(fetched.at + at * 2, row + near + at * 2, even);
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          const float* y = x + t * n_in + i + at;
          sums[0][t][0] = fma(even, load(y), sums[0][t][0]);
          sums[0][t][kSums - 1] = fma(odd, load(y + kLanes), sums[0][t][kSums - 1]);
        }
      });
#if defined(KVC_AVX512)
    } else {
      // Each number of a token is loaded once for two rows: a load takes as long as two products. Half of a
      // group at a time leaves registers for all sums.
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Ints words[2][2];
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) decode_half(row + r * row_bytes, table_at(tables + 16 * r), half, 0, words[r]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const int64_t at = (2 * half + v) * kWords;
          Vec even[2], odd[2];
#pragma GCC unroll 2
          for (int r = 0; r < 2; ++r) {
            split(words[r][v], even[r], odd[r]);
            if (at < 96)
              fetch_line(fetched.at + r * fetched.apart + 2 * at, row + r * row_bytes + near + 2 * at, even[r]);
          }
#pragma GCC unroll 4
          for (int t = 0; t < kTokens; ++t) {
            const float* y = x + t * n_in + i + at;
            const Vec first = kept(load(y)), second = kept(load(y + kLanes));
#pragma GCC unroll 2
            for (int r = 0; r < 2; ++r) {
              sums[r][t][0] = fma(even[r], first, sums[r][t][0]);
              sums[r][t][1] = fma(odd[r], second, sums[r][t][1]);
            }
          }
        }
      }
#endif
    }
#endif
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kSums; ++k) of_rows[r][t][k] = sums[r][t][k];
}

// A token's i-th input among floats in the order of load_split.
inline float split_input(const float* x, int64_t i) {
  constexpr int64_t kBoth = 2 * kLanes;
  return x[i / kBoth * kBoth + split_place(static_cast<int>(i % kBoth))];
}

// A block's escapes, asked for before its rows pass: how many there are decides where the processor goes on, and
// behind the rows the head has left its first cache.
struct Escapes {
  const Escape* first;
  uint32_t n;
};
inline Escapes escapes_of(const LinearWeights& weights, const CodedHead& head) {
  const Escapes found{weights.escapes + head.first_escape, head.n_escapes};
  if (found.n) __builtin_prefetch(found.first);
  return found;
}

// What a block's escapes add to its outputs, out[token * kBlockRows + row], in place of the table's least: what is
// left of that is its rounding, 2**-24 of a 2**15th of the row's largest number.
// `input_of(token, i)`: where products have taken it from, as elsewhere it would come from memory. `is_least_in`: or
// products have met 0 in its place.
template <bool is_least_in = true, class InputOf>
inline void add_escapes(const CodedHead& head, const Escapes& escapes, int64_t n_tokens, const InputOf& input_of,
                        float* out) {
  for (uint32_t e = 0; e < escapes.n; ++e) {
    const Escape& escape = escapes.first[e];
    const float value = bf16_to_float(escape.value);
    const float least = bf16_to_float(static_cast<uint16_t>(head.tables[escape.output][0] << 8));
    for (int64_t t = 0; t < n_tokens; ++t) {
      const float x = input_of(t, escape.input);
      float& sum = out[t * kBlockRows + escape.output];
      sum += value * x;
      if (is_least_in) sum -= least * x;
    }
  }
}

// What rows that are multiplied leave: their block's escapes are not among it yet.
template <int kTokens, class InputOf>
inline void end_block(const LinearCall& call, const CodedHead& head, const Escapes& escapes, int64_t token,
                      int64_t block, int64_t n_rows, const InputOf& input_of, float* out) {
  add_escapes(head, escapes, kTokens, input_of, out);
  for (int t = 0; t < kTokens; ++t) put(call, token + t, block * kBlockRows, n_rows, out + t * kBlockRows);
}

// Rows that meet some inputs before the next ones come, and rows at a time of these.
#if defined(KVC_AVX2)
constexpr int64_t kRowsNear = 8;
template <int kTokens>
constexpr int kRowsMet = kTokens == 1 ? 4 : 2;
#elif defined(KVC_AVX512)
constexpr int64_t kRowsNear = kBlockRows;
template <int kTokens>
constexpr int kRowsMet = kTokens > 1 ? 2 : 1;
#else
constexpr int64_t kRowsNear = kBlockRows;
template <int kTokens>
constexpr int kRowsMet = 1;  // there are registers for no more
#endif

// A block for kTokens tokens in floats. Where inputs would come from the second cache for every row, which takes
// longer than the products: some of them for kRowsNear rows, and then the next. The order of sums is the same.
template <int kTokens>
inline void block_coded(const LinearCall& call, const float* x, int64_t token, int64_t block) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, row_bytes = n * 3 / 2;
  const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
  constexpr int64_t kNear = kFloatsNear / kTokens;
  constexpr int kTogether = kRowsMet<kTokens>;
  const int64_t n_pieces = kTokens == 1 ? 1 : (n + kNear - 1) / kNear, n_groups = n / kCodedInputs;
  const CodedHead& head = head_of(weights, block);
  const Escapes escapes = escapes_of(weights, head);
#if defined(KVC_AVX2)
  // One stream in the order of addresses, as far ahead as rows are not read in that order.
  const int64_t span = (n_pieces > 1 ? kRowsNear : kTogether) * row_bytes;
  const int64_t far = span > kAheadBytes ? span : kAheadBytes;
  const uint8_t* stream = coded_row(weights, head, 0) + far;
#else
  constexpr int64_t far = kAheadBytes;
#endif
  for (int64_t i = 0; i < static_cast<int64_t>(sizeof head); i += 64)  // what no row fetches
    __builtin_prefetch(reinterpret_cast<const char*>(&head) + far + i, 0, 2);
  Vec sums[kBlockRows][kTokens][kSums];
  for (auto& row : sums)
    for (auto& of_token : row)
      for (Vec& sum : of_token) sum = all(0.f);
  for (int64_t from = 0; from < n_rows; from += kRowsNear) {
    const int64_t until = smaller(from + kRowsNear, n_rows);
    for (int64_t piece = 0; piece < n_pieces; ++piece) {
      const int64_t first = n_groups * piece / n_pieces * kCodedInputs;
      const int64_t stop = n_groups * (piece + 1) / n_pieces * kCodedInputs;
      for (int64_t r = from; r < until;) {
        const uint8_t* row = coded_row(weights, head, r) + first * 3 / 2;
        const auto rows = [&](auto at_once) {
          constexpr int kRows = decltype(at_once)::of;
          constexpr int64_t kGroupBytes = kCodedInputs * 3 / 2;
#if defined(KVC_AVX2)
          const Fetched fetched{stream, kGroupBytes, kRows * kGroupBytes};
          stream += kRows * (stop - first) * 3 / 2;
#else
          // One stream, or these inputs of the row after the next, or of the first two those that come then.
          int64_t ahead = kAheadBytes;
          if (n_pieces > 1 || kTogether > 1) {
            ahead = 2 * row_bytes;
            if (r + 2 >= n_rows)
              ahead += (stop < n ? (stop - first) * 3 / 2 : weights.block_bytes - first * 3 / 2) - n_rows * row_bytes;
          }
          const Fetched fetched{row + ahead, row_bytes, kGroupBytes};
#endif
          dots_coded<kTokens, kRows>(row, row_bytes, fetched, head.tables[r], stop - first, x + first, n, sums + r);
          r += kRows;
        };
        r + kTogether <= until ? rows(Number<kTogether>()) : rows(Number<1>());
      }
    }
  }
  float out[kTokens][kBlockRows];
  for (int64_t r = 0; r < n_rows; ++r)
    for (int t = 0; t < kTokens; ++t)
      out[t][r] = sum(kSums == 2 ? add(sums[r][t][0], sums[r][t][kSums - 1]) : sums[r][t][0]);
  const auto input_of = [=](int64_t t, int64_t i) { return split_input(x + t * n, i); };
  end_block<kTokens>(call, head, escapes, token, block, n_rows, input_of, out[0]);
}

#if defined(KVC_BF16)
constexpr int kTokensPaired = 8;        // that two rows meet at once, a sum each
constexpr int64_t kInputsNear = 16384;  // of all of these: 32 KB, which stay in the first cache

// Some inputs of kRows outputs for kTokens tokens, added to sums [kRows][kTokens][kSums]. What comes
// `ahead` bytes behind is fetched.
template <int kTokens, int kRows, int kSums>
inline void add_pairs(const uint8_t* row, int64_t row_bytes, int64_t ahead, const uint8_t* tables, int64_t n,
                      const uint16_t* x, int64_t n_in, Vec (*sums)[kTokens][kSums]) {
  Ints bytes[kRows];
  Vec totals[kRows][kTokens][kSums];
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
    bytes[r] = table_at(tables + 16 * r);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kSums; ++k) totals[r][t][k] = sums[r][t][k];
  }
  for (int64_t i = 0; i < n; i += kCodedInputs, row += kCodedInputs * 3 / 2) {
    Ints words[kRows][4];
#pragma GCC unroll 2
    for (int r = 0; r < kRows; ++r) {
      fetch_group(row + r * row_bytes + ahead);
      decode_group(row + r * row_bytes, bytes[r], [&](Ints found, int64_t at) { words[r][at / kWords] = found; });
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const Vec y = bits_as_floats(load_ints(x + t * n_in + i + v * kWords));
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r)
          totals[r][t][v % kSums] = dot_bf16_pairs(bits_as_floats(words[r][v]), y, totals[r][t][v % kSums]);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t)
      for (int k = 0; k < kSums; ++k) sums[r][t][k] = totals[r][t][k];
  }
}

// A block for kTokens tokens, in pairs of bfloat16: some inputs of all rows, and then the next. The order of a
// token's sums depends on kSums alone.
template <int kTokens, int kSums>
inline void block_of_pairs(const LinearCall& call, const uint16_t* x, int64_t token, int64_t block) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, row_bytes = n * 3 / 2;
  const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
  constexpr int kRows = kSums == 1 ? 2 : 1;
  constexpr int64_t kNear = kInputsNear / kTokens / kCodedInputs * kCodedInputs;
  // One stream, or the same inputs of the next rows.
  const int64_t ahead = n <= kNear && kRows == 1 ? kAheadBytes : kRows * row_bytes;
  const CodedHead& head = head_of(weights, block);
  const Escapes escapes = escapes_of(weights, head);
  Vec sums[kBlockRows][kTokens][kSums];
  float out[kTokens][kBlockRows];
  for (int64_t first = 0; first < n; first += kNear) {
    const int64_t stop = smaller(first + kNear, n);
    for (int64_t r = 0; r < n_rows; r += kRows) {
      if (first == 0)
        for (int i = 0; i < kRows; ++i)
          for (auto& token : sums[r + i])
            for (Vec& sum : token) sum = all(0.f);
      add_pairs<kTokens, kRows, kSums>(coded_row(weights, head, r) + first * 3 / 2, row_bytes, ahead, head.tables[r],
                                       stop - first, x + first, n, sums + r);
      if (stop < n) continue;
      for (int i = 0; i < kRows; ++i)
        for (int t = 0; t < kTokens; ++t) {
          const Vec* of = sums[r + i][t];
          out[t][r + i] = sum(kSums == 2 ? add(of[0], of[kSums - 1]) : of[0]);
        }
    }
  }
  const auto input_of = [=](int64_t t, int64_t i) { return bf16_to_float(x[t * n + i]); };
  end_block<kTokens>(call, head, escapes, token, block, n_rows, input_of, out[0]);
}

// Many tokens: some inputs of 4 rows are decoded once for up to kTokensInTurn of them, which lie in
// panels: of kTokensMet tokens 32 inputs each, and then the next 32. Where they come from, rows a power of two
// apart would share a few of a cache's sets.
constexpr int64_t kTokensInTurn = 96, kDecodedRows = 4;
constexpr int64_t kPairedInputs = 2048;  // 16 KB, beside 24 of a panel in the first cache
constexpr int64_t kPairedRow = kPairedInputs + 32;

// out[token * kBlockRows + row] += w[row] . x[token] over n inputs, for 4 rows kPairedRow apart.
template <int kTokens>
inline void pairs_of_4(const uint16_t* w, const uint16_t* panel, int64_t n, float* out) {
  Vec sums[kTokens][4];
  for (auto& token : sums)
    for (Vec& a : token) a = all(0.f);
  for (int64_t i = 0; i < n; i += kWords, panel += kTokensMet * kWords) {
    Vec y[kTokens];
    for (int t = 0; t < kTokens; ++t) y[t] = bits_as_floats(load_ints(panel + t * kWords));
    for (int r = 0; r < 4; ++r) {
      const Vec weight = bits_as_floats(load_ints(w + r * kPairedRow + i));
      for (int t = 0; t < kTokens; ++t) sums[t][r] = dot_bf16_pairs(weight, y[t], sums[t][r]);
    }
  }
  for (int t = 0; t < kTokens; ++t) {
    float four[4];
    sum_4(sums[t][0], sums[t][1], sums[t][2], sums[t][3], four);
    for (int r = 0; r < 4; ++r) out[t * kBlockRows + r] += four[r];
  }
}

// Up to kBlocksInTurn blocks from `first` on, for up to kTokensInTurn tokens: some inputs of all, which stay in
// the second cache, and then the next.
inline void blocks_in_turns(const LinearCall& call, const uint16_t* panels, int64_t token, int64_t n_tokens,
                            int64_t first, int64_t stop) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in;
  alignas(64) uint16_t decoded[kDecodedRows * kPairedRow];
  float out[kBlocksInTurn][kTokensInTurn * kBlockRows];
  const Escape* escapes[kBlocksInTurn];
  for (int64_t block = first; block < stop; ++block) {
    escapes[block - first] = weights.escapes + head_of(weights, block).first_escape;
    std::memset(out[block - first], 0, sizeof(float) * static_cast<size_t>(n_tokens * kBlockRows));
  }
  for (int64_t i = 0; i < n; i += kPairedInputs) {
    const int64_t length = smaller(n - i, kPairedInputs);
    for (int64_t block = first; block < stop; ++block) {
      const CodedHead& head = head_of(weights, block);
      const Escape* const last = weights.escapes + head.first_escape + head.n_escapes;
      const Escape *const escape = escapes[block - first], *next = escape;
      while (next < last && next->input < i + length) ++next;
      escapes[block - first] = next;
      const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
      for (int64_t of = 0; of < n_rows; of += kDecodedRows) {
        for (int64_t r = 0; r < kDecodedRows; ++r) {
          const uint8_t* row = coded_row(weights, head, of + r) + i * 3 / 2;
          const Ints table = table_at(head.tables[of + r]);
          for (int64_t j = 0; j < length; j += kCodedInputs, row += kCodedInputs * 3 / 2) {
            fetch_group(row + weights.block_bytes);
            decode_to(row, table, decoded + r * kPairedRow + j);
          }
        }
        for (const Escape* e = escape; e < next; ++e)
          if (e->output >= of && e->output < of + kDecodedRows)
            decoded[(e->output - of) * kPairedRow + e->input - i] = e->value;
        for (int64_t t = 0; t < n_tokens; t += kTokensMet) {
          with_number<kTokensMet>(smaller(kTokensMet, n_tokens - t), [&](auto at_once) {
            for (int64_t r = 0; r < kDecodedRows; r += 4)
              pairs_of_4<decltype(at_once)::of>(decoded + r * kPairedRow, panels + t * n + i * kTokensMet, length,
                                                out[block - first] + t * kBlockRows + of + r);
          });
        }
      }
    }
  }
  for (int64_t block = first; block < stop; ++block) {
    const int64_t n_rows = smaller(weights.n_out - block * kBlockRows, kBlockRows);
    for (int64_t t = 0; t < n_tokens; ++t)
      put(call, token + t, block * kBlockRows, n_rows, out[block - first] + t * kBlockRows);
  }
}

inline int64_t run_pairs(const LinearCall& call, const LinearInputs& inputs, int64_t first, int64_t stop) {
  const uint16_t* x = inputs.pairs;
  const int64_t n = call.n_tokens, n_in = call.weights.n_in;
  int64_t n_read = 0;
  if (n <= kReadOnce) {
    for (int64_t block = first; block < stop; ++block, ++n_read)
      with_number<kReadOnce>(n, [&](auto n_tokens) { block_of_pairs<decltype(n_tokens)::of, 2>(call, x, 0, block); });
  } else if (n < kTurnsFrom) {
    for (int64_t block = first; block < stop; ++block)
      for (int64_t t = 0; t < n; t += kTokensPaired, ++n_read)
        with_number<kTokensPaired>(smaller(kTokensPaired, n - t), [&](auto n_tokens) {
          block_of_pairs<decltype(n_tokens)::of, 1>(call, x + t * n_in, t, block);
        });
  } else {
    for (int64_t t = 0; t < n; t += kTokensInTurn, n_read += stop - first)
      for (int64_t block = first; block < stop; block += kBlocksInTurn)
        blocks_in_turns(call, reinterpret_cast<const uint16_t*>(inputs.rows) + t * n_in, t,
                        smaller(kTokensInTurn, n - t), block, smaller(block + kBlocksInTurn, stop));
  }
  return n_read;
}
#endif

// Some inputs of an output's weights, the r-th of its block; what comes `ahead` bytes behind is fetched.
inline void decode_inputs(const LinearWeights& weights, int64_t block, int64_t r, int64_t first, int64_t stop,
                          int64_t ahead, uint16_t* to) {
  const CodedHead& head = head_of(weights, block);
  const uint8_t* group = coded_row(weights, head, r) + first * 3 / 2;
  const auto table = table_at(head.tables[r]);
  for (int64_t k = first; k < stop; k += kCodedInputs, group += kCodedInputs * 3 / 2) {
#if defined(KVC_AVX512) || defined(KVC_AVX2)
    decode_group(group, table, [&](Ints words, int64_t i) {
      if (i % 32 == 0 && i < 96) fetch_line(group + ahead + 2 * i, group + kNearBytes + 2 * i, words);
      store_ints(to + k - first + i, words);
    });
#else
    fetch_group(group + ahead);
    decode_to(group, table, to + k - first);
#endif
  }
  const Escape* escapes = weights.escapes + head.first_escape;
  for (uint32_t e = 0; e < head.n_escapes; ++e)
    if (escapes[e].output == r && escapes[e].input >= first && escapes[e].input < stop)
      to[escapes[e].input - first] = escapes[e].value;
}

inline void decode_row(const LinearWeights& weights, int64_t output, uint16_t* to) {
  decode_inputs(weights, output / kBlockRows, output % kBlockRows, 0, weights.n_in, kAheadBytes, to);
}

void unpack_coded(const LinearWeights& weights, int64_t first, int64_t stop, uint16_t* to) {
  const int64_t last = smaller(stop * kBlockRows, weights.n_out);
  for (int64_t output = first * kBlockRows; output < last; ++output, to += weights.n_in)
    decode_row(weights, output, to);
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
