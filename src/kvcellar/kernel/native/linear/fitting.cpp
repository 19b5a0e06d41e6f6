// Searched scales and minima. What is summed are whole numbers that float32 holds, so it does not matter in which order.

#define KVC_NAMESPACE fitting

#include "linear/fitting.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"
#include "isa/vector.h"

namespace kvcellar {
namespace fitting {
namespace {

constexpr int kGroups = 8, kNumbers = kGroups * static_cast<int>(kGroupInputs), kBytes = 144;  // of a block
constexpr int kSteps = 1023;    // that the span from a group's lowest weight to its highest has while it is searched
constexpr int kShares = 15;     // most that an error of one weight counts against another's
constexpr int kHalves = 28;     // a span is cut into 14 steps at least, in halves of one,
constexpr int kCandidates = 5;  // and into 16 at most

constexpr int kVectors = static_cast<int>(kGroupInputs) / kLanes;

struct Fit {
  float scale, minimum;  // weights are scale * number + minimum; the minimum is never above 0
};

// Of numbers from 0 to 2**22, to even.
inline Vec whole(Vec x) { return sub(add(x, all(8388608.f)), all(8388608.f)); }

// The larger a weight, the more its error counts: it counts its magnitude and the mean of its group's.
void shares_of(const Vec* x, float largest, Vec* shares) {
  const Vec to = all(kSteps / largest), zeros = all(0.f);
  Vec sums = zeros;
  for (int v = 0; v < kVectors; ++v) {
    shares[v] = whole(mul(max(x[v], sub(zeros, x[v])), to));
    sums = add(sums, shares[v]);
  }
  const float mean = sum(sums) / kGroupInputs;
  const Vec means = all(mean), factor = all(kShares / (kSteps + mean));
  for (int v = 0; v < kVectors; ++v) shares[v] = max(whole(mul(add(shares[v], means), factor)), all(1.f));
}

// The scale and minimum with the least weighted square error, for each of some ways to round to numbers; the best.
Fit fit_group(const float* numbers) {
  const Vec zeros = all(0.f);
  Vec x[kVectors], shares[kVectors], at[kVectors], weighted[kVectors], least = zeros, most = load(numbers);
  for (int v = 0; v < kVectors; ++v) {
    x[v] = load(numbers + v * kLanes);
    least = min(x[v], least);
    most = max(x[v], most);
  }
  const float low = -highest(sub(zeros, least)), high = highest(most), span = high - low;
  if (!(span > 0.f) || !(kSteps / span <= 3e38f)) return {0.f, low};
  shares_of(x, high > -low ? high : -low, shares);
  Vec sums[2] = {zeros, zeros};
  for (int v = 0; v < kVectors; ++v) {
    at[v] = whole(mul(sub(x[v], all(low)), all(kSteps / span)));
    weighted[v] = mul(shares[v], at[v]);
    sums[0] = add(sums[0], shares[v]);
    sums[1] = add(sums[1], weighted[v]);
  }
  const double n = sum(sums[0]), total = sum(sums[1]);
  double best = -1., scale = kSteps / 15., minimum = 0.;  // of weights that are all the same
  for (int c = 0; c < kCandidates; ++c) {
    const Vec factor = all((kHalves + c) / (2.f * kSteps));
    Vec of_numbers = zeros, of_squares = zeros, of_products = zeros;
    for (int v = 0; v < kVectors; ++v) {
      const Vec number = min(whole(mul(at[v], factor)), all(15.f)), share = mul(shares[v], number);
      of_numbers = add(of_numbers, share);
      of_squares = add(of_squares, mul(share, number));
      of_products = add(of_products, mul(weighted[v], number));
    }
    const double first = sum(of_numbers), second = sum(of_squares), product = sum(of_products);
    const double apart = n * second - first * first;
    if (apart <= 0.) continue;
    const double step = (n * product - total * first) / apart, floor = (total - step * first) / n;
    const double gain = floor * total + step * product;  // the error is a constant less this
    if (gain > best) best = gain, scale = step, minimum = floor;
  }
  const double unit = static_cast<double>(span) / kSteps;
  return {static_cast<float>(scale * unit), std::min(static_cast<float>(low + minimum * unit), 0.f)};
}

// 8 numbers of 0 or more as counts of 6 bits of a float16, which this returns.
uint16_t count(const float* values, uint8_t* counts) {
  const uint16_t unit = float_to_half(*std::max_element(values, values + kGroups) / 63.f);
  const float held = half_to_float(unit), inverse = held > 0.f ? 1.f / held : 0.f;
  for (int g = 0; g < kGroups; ++g) counts[g] = static_cast<uint8_t>(std::min(values[g] * inverse + 0.5f, 63.f));
  return unit;
}

void put_counts(const uint8_t* scales, const uint8_t* minima, uint8_t* to) {
  for (int g = 0; g < 4; ++g) {
    to[g] = static_cast<uint8_t>(scales[g] | scales[4 + g] >> 4 << 6);
    to[4 + g] = static_cast<uint8_t>(minima[g] | minima[4 + g] >> 4 << 6);
    to[8 + g] = static_cast<uint8_t>((scales[4 + g] & 15) | (minima[4 + g] & 15) << 4);
  }
}

void fit_block(const float* x, uint8_t* to) {
  float scales[kGroups], minima[kGroups];
  Vec doubts = all(0.f);
  for (int i = 0; i < kNumbers; i += kLanes) doubts = add(doubts, mul(load(x + i), all(0.f)));
  std::memset(to, 0, kBytes);
  if (sum(doubts) != 0.f) {
    const uint16_t nan = 0x7E00;
    std::memcpy(to, &nan, 2);
    return;
  }
  for (int g = 0; g < kGroups; ++g) {
    const Fit fit = fit_group(x + g * kGroupInputs);
    scales[g] = fit.scale, minima[g] = -fit.minimum;
  }
  uint8_t of_scales[kGroups], of_minima[kGroups];
  const uint16_t units[2] = {count(scales, of_scales), count(minima, of_minima)};
  std::memcpy(to, units, 4);
  put_counts(of_scales, of_minima, to + 4);
  for (int g = 0; g < kGroups; ++g) {
    const float scale = half_to_float(units[0]) * of_scales[g], minimum = half_to_float(units[1]) * of_minima[g];
    const Vec inverse = all(scale > 0.f ? 1.f / scale : 0.f), minima_of = all(minimum);
    uint8_t *numbers = to + 16 + g / 2 * kGroupInputs, found[kGroupInputs];
    for (int i = 0; i < kGroupInputs; i += kLanes) {
      const Vec at = mul(add(load(x + g * kGroupInputs + i), minima_of), inverse);
      store_u8(found + i, whole(min(max(at, all(0.f)), all(15.f))));
    }
    for (int i = 0; i < kGroupInputs; ++i) numbers[i] = static_cast<uint8_t>(numbers[i] | found[i] << g % 2 * 4);
  }
}

}  // namespace
}  // namespace fitting

void fit_q4_k(const void* rows, Dtype dtype, int64_t n_in, int64_t n_out, uint8_t* to, int n_threads) {
  using namespace fitting;
  const int64_t n_blocks = n_out * n_in / kNumbers;
  spread(n_blocks, 64, 64, workers_for(n_threads), [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) {
      float x[kNumbers];
      const int64_t at = block * kNumbers;
      if (dtype == Dtype::f32)
        std::memcpy(x, static_cast<const float*>(rows) + at, sizeof x);
      else
        for (int i = 0; i < kNumbers; ++i) x[i] = bf16_to_float(static_cast<const uint16_t*>(rows)[at + i]);
      fit_block(x, to + block * kBytes);
    }
  });
}

}  // namespace kvcellar
