// Many tokens of bfloat16 through weights in 12 or 16 bits with AVX2, or AVX-512 and VNNI: products of 16-bit
// integers, two to a lane, in place of float32's.
//
// Of each kGroup inputs a token's numbers are integers that count parts of the group's length, an output's weights
// 15 bits of a limit, which of 16-bit weights is the largest of some inputs and of coded ones what their row's table
// ends with, up to four times the largest: a group's sums stay below 2**31 (Cauchy and Schwarz), and from group to
// group they are floats. That is 1e-4 to 3e-4 of a result, which is rounded to bfloat16 (2e-3); an input or a weight
// that is hundreds of times the others beside it takes their last bits.
//
// Only included by linear/product.h.

#pragma once

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

class ManyWords {
 public:
  // What fits into registers with sums of 4 outputs: a product by itself is one more.
#if defined(KVC_AVX512)
  static constexpr int kTokens = 6;
#elif defined(KVC_VNNI)
  static constexpr int kTokens = 3;
#else
  static constexpr int kTokens = 2;
#endif
  static constexpr int64_t kRows = 8, kInputs = 1024;  // half of a first cache, or a third
#if defined(KVC_AVX512)
  static constexpr int64_t kKept = 2 * kTokensKept;
#else
  static constexpr int64_t kKept = kTokensKept;
#endif
  static constexpr int64_t kRow = kInputs + 32;  // not all in the same of its sets
  static constexpr bool is_least_in = false;
  struct Decoded {
    alignas(64) int16_t numbers[kRows * kRow];
    float steps[kRows];
  };

  static bool fits(const LinearCall& call) {
    const bool is_bf16 = !call.weights.is_plain || call.weights.format == WeightFormat::bf16;
    return call.in == Dtype::bf16 && call.result == Dtype::bf16 && is_bf16;
  }

  ManyWords(const LinearCall& call, const LinearInputs& inputs)
      : call_(call), n_(whole_vectors(call.weights.n_in)), n_groups_((n_ + kGroup - 1) / kGroup) {
    // They take half of the room that floats would.
    words_ = reinterpret_cast<int16_t*>(inputs.rows);
    steps_ = inputs.rows + (call.n_tokens + kTokens - 1) / kTokens * kTokens * n_ / 2;
  }

  // A token's numbers: those of kTokens lie in a panel, a vector of each by turns.
  void put(int64_t token) const {
    const auto* x = static_cast<const uint16_t*>(call_.x) + token * call_.weights.n_in;
    for (int64_t g = 0; g < n_groups_; ++g) {
      const int64_t first = g * kGroup, length = smaller(n_ - first, kGroup);
      Vec most = all(0.f), doubts = most, squares = most;
      for (int64_t i = first; i < first + length; i += kLanes) {
        const Vec y = load_bf16(x + i);
        most = max(most, max(y, sub(all(0.f), y)));
        doubts = fma(y, all(0.f), doubts);
      }
      // Less than kLowest counts as nothing.
      const float top = highest(most), inverse = top > kLowest ? 1.f / top : 0.f;
      for (int64_t i = first; i < first + length; i += kLanes) {
        const Vec y = mul(load_bf16(x + i), all(inverse));
        squares = fma(y, y, squares);
      }
      const bool is_finite = sum(doubts) == 0.f;
      const float longest = is_finite && inverse > 0.f ? __builtin_sqrtf(sum(squares)) : 0.f;
      const Vec scale = all(longest > 0.f ? kLongest / longest : 0.f);
      int16_t* to = words_ + place(token, first);
      for (int64_t i = first; i < first + length; i += 2 * kLanes, to += 2 * kTokens * kLanes) {
        Vec even, odd;
        load_split(x + i, even, odd);
        even = mul(even, all(inverse));
        odd = mul(odd, all(inverse));
        store_ints(to, is_finite ? whole_pairs(even, odd, scale) : all_ints(0));
      }
      // What is not finite makes this token's results NaN, and no other's.
      steps_[token * n_groups_ + g] = is_finite ? top * (longest / kLongest) : __builtin_nanf("");
    }
  }

  // Some inputs of n_rows rows of a block. An escape is 0: its row's least number would be rounded by the largest.
  void decode(int64_t block, int64_t row, int64_t n_rows, int64_t first, int64_t length, Decoded& to) const {
    const LinearWeights& weights = call_.weights;
    const bool is_coded = weights.format == WeightFormat::coded;
    const CodedHead* head = is_coded ? &head_of(weights, block) : nullptr;
    const Escapes escapes = is_coded ? escapes_of(weights, *head) : Escapes{nullptr, 0};
    for (int64_t r = 0; r < n_rows; ++r) {
      int16_t* at = to.numbers + r * kRow;
      if (is_coded) {
        const uint8_t* from = coded_row(weights, *head, row + r) + first * 3 / 2;
        const uint8_t* uppers = head->tables[row + r];
        const Ints table = table_at(uppers);
        const Vec scale = all(scale_below(static_cast<uint16_t>(uppers[7] << 8 | 255), to.steps[r]));
        for (int64_t i = 0; i < length; i += kCodedInputs, from += kCodedInputs * 3 / 2) {
          fetch_group(from + weights.block_bytes);
          split_group(from, table, [&](Vec even, Vec odd, int64_t place) {
            store_ints(at + i + place, whole_pairs(even, odd, scale));
          });
        }
        for (uint32_t e = 0; e < escapes.n; ++e) {
          const Escape& escape = escapes.first[e];
          if (escape.output == row + r && escape.input >= first && escape.input < first + length)
            at[escape.input - first] = 0;
        }
      } else {
        const auto* from =
            static_cast<const uint16_t*>(weights.data) + (block * kBlockRows + row + r) * weights.n_in + first;
        Ints most = all_ints(0);
        for (int64_t i = 0; i < length; i += 2 * kLanes) {
          most = max_u16(most, both(load_ints(from + i), all_ints(0x7FFF7FFF)));
          // What follows: the same inputs of the next rows.
          if (i % 32 == 0) __builtin_prefetch(from + kRows * weights.n_in + i, 0, 2);
        }
        most = both(max_u16(most, right_32(most, 16)), all_ints(0xFFFF));
        const auto top = static_cast<uint16_t>(highest(to_floats(most)));
        const Vec scale = all(scale_below(top, to.steps[r]));
        for (int64_t i = 0; i < length; i += 2 * kLanes) {
          Vec even, odd;
          load_split(from + i, even, odd);
          store_ints(at + i, whole_pairs(even, odd, scale));
        }
      }
    }
  }

  // out[token * kBlockRows + row] += w[row] . x[token], for 4 rows that are decoded and kTokensNow tokens.
  // A function of its own, so that the compiler keeps the sums in registers.
  template <int kTokensNow>
  __attribute__((noinline)) void dots(const Decoded& decoded, int64_t row, int64_t token, int64_t first, int64_t length,
                                      float* out) const {
    const int16_t *w = decoded.numbers + row * kRow, *x = words_ + place(token, first);
    const float* steps = steps_ + token * n_groups_ + first / kGroup;
    alignas(64) float totals[kTokensNow][4][kLanes];
    for (auto& of_token : totals)
      for (auto& total : of_token) store(total, all(0.f));
    for (int64_t from = 0; from < length; from += kGroup, w += kGroup, ++steps) {
      Ints sums[kTokensNow][4];
      for (auto& of_token : sums)
        for (Ints& a : of_token) a = all_ints(0);
      const auto sixteen = [&](int64_t i) __attribute__((always_inline)) {
        Ints y[kTokensNow];
        for (int t = 0; t < kTokensNow; ++t) y[t] = kept(load_ints(x + (i * kTokens + t) * 2 * kLanes));
        for (int r = 0; r < 4; ++r) {
          const Ints weight = load_ints(w + r * kRow + i * 2 * kLanes);
          for (int t = 0; t < kTokensNow; ++t) sums[t][r] = dot_pairs(sums[t][r], y[t], weight);
        }
      };
      if (from + kGroup <= length) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < kGroup / (2 * kLanes); ++i) sixteen(i);
      } else {
        for (int64_t i = 0; i < (length - from) / (2 * kLanes); ++i) sixteen(i);
      }
      x += kGroup * kTokens;
      for (int t = 0; t < kTokensNow; ++t) {
        const Vec step = all(steps[t * n_groups_]);
        for (int r = 0; r < 4; ++r) store(totals[t][r], fma(to_floats(sums[t][r]), step, load(totals[t][r])));
      }
    }
    for (int t = 0; t < kTokensNow; ++t) {
      float four[4];
      sum_4(load(totals[t][0]), load(totals[t][1]), load(totals[t][2]), load(totals[t][3]), four);
      for (int r = 0; r < 4; ++r) out[t * kBlockRows + r] += four[r] * decoded.steps[row + r];
    }
  }

  // As products have it, or what is left behind whole vectors.
  float input(int64_t token, int64_t i) const {
    if (i >= n_) return bf16_to_float(static_cast<const uint16_t*>(call_.x)[token * call_.weights.n_in + i]);
    return steps_[token * n_groups_ + i / kGroup] * words_[place(token, i)];
  }

 private:
  // By what weights up to `most`, a bfloat16, are integers; what 1 of these counts.
  static float scale_below(uint16_t most, float& step) {
    const float top = bf16_to_float(most);
    const bool is_finite = top * 0.f == 0.f;
    step = is_finite ? top / kMost : __builtin_nanf("");
    return is_finite && top > kLowest ? kMost / top : 0.f;
  }

  static constexpr float kLowest = 1e-34f;  // what others are divided by
  // Of weights, and of inputs the length, which is no less than any of them: their product times the root of how many
  // a lane has of a group, and what is rounded up, are below 2**31.
#if defined(KVC_AVX512)
  static constexpr int64_t kGroup = 32 * kLanes;  // half as many would be made floats twice as often: 7% more time
  static constexpr float kMost = 16380.f, kLongest = 23100.f;
#else
  static constexpr int64_t kGroup = 16 * kLanes;
  static constexpr float kMost = 16380.f, kLongest = 32700.f;
#endif
  static_assert(kInputs % kGroup == 0);

  int64_t place(int64_t token, int64_t i) const {
    constexpr int64_t kBoth = 2 * kLanes;
    const int64_t of_panel = token % kTokens;
    return (token - of_panel) * n_ + (i / kBoth * kTokens + of_panel) * kBoth + i % kBoth;
  }

  const LinearCall& call_;
  const int64_t n_, n_groups_;
  int16_t* words_;
  float* steps_;  // [token][group]
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
