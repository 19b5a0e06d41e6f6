// Products with grouped weights, once for each instruction set; included by linear/product.h.
//
// Within a group numbers are summed as integers, as of other packed weights; scales and minima are multiplied out in
// float32 where they are met, which is exact: a float16 number and one of 8 bits fit.

#pragma once

#include "linear/linear.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

constexpr int64_t group_of(WeightFormat format) { return format == WeightFormat::fine_bytes ? 16 : kGroupInputs; }

// Scales and minima of a group, or of the group-th that share floats, of kLanes outputs from the `first`-th on. Without minima these stay what they are.
template <Steps kSteps, int64_t kGroup>
inline void load_steps(const uint8_t* beside, int64_t group, int64_t first, Vec& scale, [[maybe_unused]] Vec& least) {
  const auto halves = [](const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); };
  constexpr int64_t kGroups = kCountedInputs / kGroup;
  if constexpr (kSteps == Steps::halves) {
    scale = halves(beside + group * 2 * kBlockRows + 2 * first);
  } else if constexpr (kSteps == Steps::pairs) {
    beside += group * 4 * kBlockRows + 2 * first;
    scale = halves(beside);
    least = halves(beside + 2 * kBlockRows);
  } else if constexpr (kSteps == Steps::floats) {
    const float* floats = reinterpret_cast<const float*>(beside + group * 8 * kBlockRows) + first;
    scale = load(floats);
    least = load(floats + kBlockRows);
  } else if constexpr (kSteps == Steps::counts) {
    beside += group / kGroups * (4 + 2 * kGroups) * kBlockRows;
    const uint8_t* counts = beside + (4 + 2 * (group % kGroups)) * kBlockRows + first;
    scale = mul(halves(beside + 2 * first), load_u8(counts));
    least = mul(mul(halves(beside + 2 * kBlockRows + 2 * first), all(-1.f)), load_u8(counts + kBlockRows));
  } else {
    beside += group / kGroups * (2 + kGroups) * kBlockRows;
    const Vec counts = sub(load_u8(beside + (2 + group % kGroups) * kBlockRows + first), all(128.f));
    scale = mul(halves(beside + 2 * first), counts);
  }
}

// Which scales and minima are a group's, one group after the other.
template <Steps kSteps>
class StepsOf {
 public:
  explicit StepsOf(const LinearWeights& weights) : n_together_(weights.n_together) {}
  int64_t next() {
    if (kSteps != Steps::floats) return at_++;
    const int64_t at = at_;
    if (++n_ == n_together_) {
      ++at_;
      n_ = 0;
    }
    return at;
  }

 private:
  const int64_t n_together_;
  int64_t at_ = 0, n_ = 0;
};

// run(Number<format>(), Number<steps>()) of those that there are.
template <class Run>
inline void with_form(const LinearWeights& weights, const Run& run) {
  const auto with = [&](auto format, Steps steps) {
    constexpr auto kFormat = static_cast<WeightFormat>(decltype(format)::of);
    constexpr bool has_signs = kFormat == WeightFormat::fine_bytes || kFormat == WeightFormat::looked_up;
    constexpr bool has_pairs = kFormat == WeightFormat::nibbles || kFormat == WeightFormat::bytes;
    if constexpr (has_signs)
      if (steps == Steps::signs) return run(format, Number<static_cast<int>(Steps::signs)>());
    if constexpr (has_pairs) {
      if (steps == Steps::pairs) return run(format, Number<static_cast<int>(Steps::pairs)>());
      if (steps == Steps::counts) return run(format, Number<static_cast<int>(Steps::counts)>());
      if (steps == Steps::floats) return run(format, Number<static_cast<int>(Steps::floats)>());
    }
    if constexpr (kFormat != WeightFormat::fine_bytes) run(format, Number<static_cast<int>(Steps::halves)>());
  };
  switch (weights.format) {
    case WeightFormat::nibbles: return with(Number<static_cast<int>(WeightFormat::nibbles)>(), weights.steps);
    case WeightFormat::looked_up: return with(Number<static_cast<int>(WeightFormat::looked_up)>(), weights.steps);
    case WeightFormat::bytes: return with(Number<static_cast<int>(WeightFormat::bytes)>(), weights.steps);
    default: return with(Number<static_cast<int>(WeightFormat::fine_bytes)>(), weights.steps);
  }
}

// 16 outputs of kTokens tokens.
template <int kTokens, WeightFormat kFormat, Steps kSteps>
__attribute__((noinline)) void block_grouped(const LinearCall& call, const LinearInputs& inputs, int64_t token,
                                             int64_t block) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, n_sums = weights.n_sums;
  const uint8_t* w = static_cast<const uint8_t*>(weights.data) + block * weights.block_bytes;
  const uint8_t* beside = weights.beside + block * weights.beside_bytes;
  constexpr bool kHalves = has_halves(kFormat);
  constexpr int64_t kGroup = group_of(kFormat), kTogether = kHalves ? 8 : 4;
  constexpr int64_t kWide = kHasWords && is_wide(kFormat) ? 2 : 1;  // bytes of a number
  const int8_t* x = inputs.numbers + token * n * kWide;
  const float* x_scales = inputs.scales + token * weights.n_groups;
  const int32_t* offsets = inputs.offsets + token * n_sums;
  [[maybe_unused]] const auto* of_minima = reinterpret_cast<const float*>(offsets);
  constexpr bool kHasMinima = has_minima(kSteps);
  StepsOf<kSteps> steps_of(weights);
  float out[kTokens][kBlockRows];
#if defined(KVC_AVX512) || defined(KVC_AVX2)
  const int64_t step_bytes = weights.beside_bytes / n_sums;
  Vec totals[kTokens][kParts];
  for (auto& each : totals)
    for (Vec& total : each) total = all(0.f);
  for (int64_t g = 0; g < n_sums; ++g, x += kGroup * kWide) {
    __builtin_prefetch(beside + g * step_bytes + kScalesAhead, 0, 3);
    const auto offset = [&](int t) { return kHasMinima ? 0 : offsets[t * n_sums + g]; };
    Ints sums[kTokens][kParts];
    for (int t = 0; t < kTokens; ++t)
      for (Ints& sum : sums[t]) sum = begin<kFormat>(offset(t));
    const int8_t* at = x;
    for (int v = 0; v < kGroup / kTogether; ++v, at += kTogether * kWide, w += 64) {
      fetch_packed(w);
      Ints weight[kParts];
      for (int part = 0; part < kParts; ++part) weight[part] = load_ints(w + part * kLanes * 4);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) add_token<kFormat>(weight, at + t * n * kWide, sums[t]);
    }
    const float* x_scale = x_scales + g * kGroup / kGroupInputs;
    const int64_t steps = steps_of.next();
    for (int part = 0; part < kParts; ++part) {
      Vec scale, least = all(0.f);
      load_steps<kSteps, kGroup>(beside, steps, part * kLanes, scale, least);
      for (int t = 0; t < kTokens; ++t) {
        const float of_x = x_scale[t * weights.n_groups];
        totals[t][part] =
            fma(to_floats(end<kFormat>(sums[t][part], offset(t))), mul(scale, all(of_x)), totals[t][part]);
        if (kHasMinima) totals[t][part] = fma(least, all(of_minima[t * n_sums + g]), totals[t][part]);
      }
    }
  }
  for (int t = 0; t < kTokens; ++t)
    for (int part = 0; part < kParts; ++part) store(out[t] + part * kLanes, totals[t][part]);
#else
  for (auto& row : out)
    for (float& value : row) value = 0.f;
  for (int64_t g = 0; g < n_sums; ++g) {
    int16_t numbers[kGroup / 4][kBlockRows][4];
    const auto number = [](int half) { return has_table(kFormat) ? table_of(kFormat)[half] : half; };
    for (int64_t v = 0; v < kGroup / kTogether; ++v, w += 64)
      for (int i = 0; i < 64; ++i) {
        if constexpr (kHalves) {
          (&numbers[2 * v][0][0])[i] = static_cast<int16_t>(number(w[i] & 15));
          (&numbers[2 * v + 1][0][0])[i] = static_cast<int16_t>(number(w[i] >> 4));
        } else {
          (&numbers[v][0][0])[i] = w[i];
        }
      }
    float scale[kBlockRows], least[kBlockRows];
    const int64_t steps = steps_of.next();
    for (int r = 0; r < kBlockRows; r += kLanes) {
      Vec scales, minima = all(0.f);
      load_steps<kSteps, kGroup>(beside, steps, r, scales, minima);
      store(scale + r, scales);
      store(least + r, minima);
    }
    for (int t = 0; t < kTokens; ++t) {
      const int8_t* from = x + t * n + g * kGroup;
      const int32_t offset = offsets[t * n_sums + g];
      const float of_x = x_scales[t * weights.n_groups + g * kGroup / kGroupInputs];
      int32_t sums[kBlockRows];
      for (int32_t& value : sums) value = kHasMinima ? 0 : offset;
      for (int q = 0; q < kGroup / 4; ++q)
        for (int r = 0; r < kBlockRows; ++r)
          for (int i = 0; i < 4; ++i) sums[r] += numbers[q][r][i] * from[4 * q + i];
      for (int r = 0; r < kBlockRows; ++r) {
        out[t][r] += static_cast<float>(sums[r]) * (scale[r] * of_x);
        if (kHasMinima) out[t][r] += least[r] * of_minima[t * n_sums + g];
      }
    }
  }
#endif
  const int64_t first = block * kBlockRows;
  const int64_t n_rows = smaller(weights.n_out - first, kBlockRows);
  for (int t = 0; t < kTokens; ++t) put(call, token + t, first, n_rows, out[t]);
}

// The weights of an output: put(i, kLanes numbers from the i-th on).
template <WeightFormat kFormat, Steps kSteps, class Put>
inline void grouped_row_of(const LinearWeights& weights, int64_t output, const Put& put) {
  const int64_t block = output / kBlockRows, r = output % kBlockRows;
  constexpr bool kHalves = has_halves(kFormat);
  constexpr int64_t kGroup = group_of(kFormat);
  const Vec zero = all(static_cast<float>(weights.zero));
  const char* from = static_cast<const char*>(weights.data) + block * weights.block_bytes + 4 * r;
  const uint8_t* beside = weights.beside + block * weights.beside_bytes;
  const int64_t lane = r % kLanes;
  StepsOf<kSteps> steps_of(weights);
  for (int64_t g = 0; g < weights.n_sums; ++g) {
    uint32_t fours[kGroup / 4];
    for (int64_t q = 0; q < kGroup / 4; q += kHalves ? 2 : 1, from += 64) {
      std::memcpy(fours + q, from, 4);
      if (!kHalves) continue;
      fours[q + 1] = fours[q] >> 4 & 0x0F0F0F0F;
      fours[q] &= 0x0F0F0F0F;
    }
    auto* numbers = reinterpret_cast<uint8_t*>(fours);
    if (has_table(kFormat))
      for (int64_t i = 0; i < kGroup; ++i) numbers[i] = table_of(kFormat)[numbers[i]];
    Vec scales, minima = all(0.f);
    load_steps<kSteps, kGroup>(beside, steps_of.next(), r - lane, scales, minima);
    float scale[kLanes], least[kLanes];
    store(scale, scales);
    store(least, minima);
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const Vec product = mul(sub(load_u8(numbers + i), zero), all(scale[lane]));
      put(g * kGroup + i, weights.has_minima ? add(product, all(least[lane])) : product);
    }
  }
}

template <class Put>
inline void grouped_row(const LinearWeights& weights, int64_t output, const Put& put) {
  with_form(weights, [&](auto format, auto steps) {
    grouped_row_of<static_cast<WeightFormat>(decltype(format)::of), static_cast<Steps>(decltype(steps)::of)>(
        weights, output, put);
  });
}

template <int kTokens>
inline void grouped_tokens(const LinearCall& call, const LinearInputs& inputs, int64_t token, int64_t first,
                           int64_t stop) {
  with_form(call.weights, [&](auto format, auto steps) {
    for (int64_t block = first; block < stop; ++block)
      block_grouped<kTokens, static_cast<WeightFormat>(decltype(format)::of), static_cast<Steps>(decltype(steps)::of)>(
          call, inputs, token, block);
  });
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
