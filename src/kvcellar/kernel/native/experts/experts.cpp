// Mixtures of experts: rows are put in the order of the experts that they chose, and all of these experts' blocks are
// one range of work.

#include "experts/experts.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kPieceBytes = 1 << 17, kStreamBytes = 1 << 18;  // of a piece of work, and where it is read once
constexpr int64_t kLeastBytes = 1 << 15;                          // of the last pieces
constexpr int64_t kAloneBytes = 1 << 18;                          // below, waking a thread costs more than it brings
constexpr int64_t kFewPacked = 32;  // rows up to which packed weights are met as they are where there is a matrix unit
constexpr int64_t kPieceRows = 16;
constexpr int64_t kMostPairs = 4096;  // of a mixture's tokens and experts together: their rows lie in memory meanwhile

std::atomic<int64_t> all_read{0}, all_chosen{0};

thread_local Buffer choice_buffer, rows_buffer, inputs_buffer, mixture_buffer;

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }
int64_t lines(int64_t n_bytes) { return (n_bytes + 63) / 64 * 64; }

// An expert and its rows, which lie one behind the other.
struct Group {
  int64_t expert, first, n;
};

// Which rows of a call are whose: `order[i]` is the place among [n_rows, n_each] of what comes i-th.
struct Order {
  std::vector<Group> groups;
  std::vector<int64_t> order, place;  // place: where each comes, -1 for one whose expert is not there

  Order(const int64_t* experts, int64_t n, int64_t n_experts) : place(static_cast<size_t>(n), -1) {
    std::vector<int64_t> counts(static_cast<size_t>(n_experts), 0);
    const auto is_there = [&](int64_t expert) { return expert >= 0 && expert < n_experts; };
    for (int64_t i = 0; i < n; ++i)
      if (is_there(experts[i])) ++counts[static_cast<size_t>(experts[i])];
    int64_t total = 0;
    for (int64_t e = 0; e < n_experts; ++e) {
      const int64_t count = counts[static_cast<size_t>(e)];
      if (count) groups.push_back({e, total, count});
      counts[static_cast<size_t>(e)] = total;
      total += count;
    }
    order.resize(static_cast<size_t>(total));
    for (int64_t i = 0; i < n; ++i) {
      if (!is_there(experts[i])) continue;
      const int64_t at = counts[static_cast<size_t>(experts[i])]++;
      order[static_cast<size_t>(at)] = i;
      place[static_cast<size_t>(i)] = at;
    }
  }
  int64_t size() const { return static_cast<int64_t>(order.size()); }
};

LinearWeights weights_of(const ExpertLayer& layer, int64_t expert) {
  LinearWeights weights = layer.weights;
  const int64_t bytes =
      weights.is_plain ? weights.plain_bytes * weights.n_in * weights.n_out : weights.n_blocks * weights.block_bytes;
  const int64_t scales = expert * weights.n_blocks * weights.n_scales * kBlockRows;
  weights.data = static_cast<const char*>(weights.data) + expert * bytes;
  if (weights.scales) weights.scales += scales;
  if (weights.exponents) weights.exponents += scales;
  if (weights.beside) weights.beside += expert * weights.n_blocks * weights.beside_bytes;
  return weights;
}

// Bytes of a block, and of what lies beside it.
int64_t bytes_of_block(const LinearWeights& weights) {
  return weights.block_bytes + weights.beside_bytes +
         weights.n_scales * kBlockRows *
             (weights.exponents ? 1
              : weights.scales  ? 2
                                : 0);
}

// A layer's inputs as its experts' products want them, one expert's after the other's.
class Prepared {
 public:
  // Rows x [size, n_in] in the groups' order, or where `n_each` is not 0 those rows of x that chose them, which are
  // found at a place's number divided by it.
  Prepared(const ExpertLayer& layer, const Order& order, const void* x, int64_t n_rows, int64_t n_each, Dtype dtype,
           void* out, int workers)
      : layer_(layer), order_(order), dtype_(dtype), out_(static_cast<char*>(out)), ops_(*ops().linear) {
    const LinearWeights& weights = layer.weights;
    const int64_t size = order.size(), n = weights.n_in, row_bytes = n * size_of(dtype);
    is_shared_ = weights.is_packed && n_each > 1 && !has_matrix();
    const int64_t n_kept = is_shared_ ? size + n_rows : size, n_groups = static_cast<int64_t>(order.groups.size());
    const bool is_ordered = n_each == 0;
    const int64_t rows_bytes = is_ordered || is_shared_ ? 0 : lines(size * row_bytes);
    panel_numbers_ = (kMostOfPanel - 1) * n;
    const int64_t numbers_bytes = weights.is_packed
                                      ? lines(2 * n_kept * n) + 4 * n_kept * (weights.n_groups + weights.n_sums) + 128
                                      : 4 * (n_kept * n + n_groups * (panel_numbers_ + 16)) + 64;
    char* memory = inputs_buffer.get(rows_bytes + numbers_bytes);
    rows_ = is_ordered ? static_cast<const char*>(x) : memory;
    if (!is_ordered && !is_shared_)
      spread(size, kPieceRows, kPieceRows, workers, [&](int64_t first, int64_t stop) {
        for (int64_t i = first; i < stop; ++i)
          std::memcpy(memory + i * row_bytes, static_cast<const char*>(x) + order.order[i] / n_each * row_bytes,
                      static_cast<size_t>(row_bytes));
      });
    memory += rows_bytes;
    memory_ = memory;
    if (weights.is_packed) {
      numbers_ = reinterpret_cast<int8_t*>(memory);
      scales_ = reinterpret_cast<float*>(memory + lines(2 * n_kept * n));
      offsets_ = reinterpret_cast<int32_t*>(scales_ + n_kept * weights.n_groups);
    }
    if (is_shared_)
      share(x, n_rows, n_each, workers);
    else
      spread(n_groups, 1, 1, workers, [&](int64_t first, int64_t stop) {
        for (int64_t g = first; g < stop; ++g)
          if (!is_for_matrix(g)) ops_.prepare(call(g), inputs(g), 0, order_.groups[g].n);
      });
  }

  LinearCall call(int64_t g) const {
    const Group& group = order_.groups[static_cast<size_t>(g)];
    const LinearWeights& weights = layer_.weights;
    return {weights_of(layer_, group.expert),
            rows_ + group.first * weights.n_in * size_of(dtype_),
            out_ + group.first * weights.n_out * size_of(dtype_),
            group.n,
            dtype_,
            dtype_};
  }

  LinearInputs inputs(int64_t g) const {
    const int64_t first = order_.groups[static_cast<size_t>(g)].first;
    const LinearWeights& weights = layer_.weights;
    LinearInputs found{};
    if (weights.is_packed) {
      found.numbers = numbers_ + first * weights.n_in * number_bytes();
      found.scales = scales_ + first * weights.n_groups;
      found.offsets = offsets_ + first * weights.n_sums;
      return found;
    }
    // A line's beginning, with room for the last panel of each group.
    found.rows = reinterpret_cast<float*>(memory_) + (first * weights.n_in + g * (panel_numbers_ + 16) + 15) / 16 * 16;
    if (ops_.has_pairs && weights.format == WeightFormat::coded && dtype_ == Dtype::bf16)
      found.pairs = reinterpret_cast<const uint16_t*>(found.rows);
    return found;
  }

  // Whether a group is a matrix unit's.
  bool is_for_matrix(int64_t g) const {
    const int64_t few = layer_.weights.is_packed ? kFewPacked : kReadOnce;
    return has_matrix() && order_.groups[static_cast<size_t>(g)].n > few;
  }

 private:
  bool has_matrix() const { return dtype_ == Dtype::bf16 && can_multiply(layer_.weights); }
  int64_t number_bytes() const { return ops_.has_words && layer_.weights.is_wide ? 2 : 1; }

  // Rounds each row once, behind the rows of the groups, and copies it to all experts that it chose.
  void share(const void* x, int64_t n_rows, int64_t n_each, int workers) {
    const LinearWeights& weights = layer_.weights;
    const int64_t size = order_.size(), n = weights.n_in * number_bytes(), n_groups = weights.n_groups;
    const int64_t n_sums = weights.n_sums;
    const LinearInputs own{nullptr, nullptr, numbers_ + size * n, scales_ + size * n_groups, offsets_ + size * n_sums};
    const LinearCall call{weights, x, nullptr, n_rows, dtype_, dtype_};
    spread(n_rows, kPieceRows, kPieceRows, workers,
           [&](int64_t first, int64_t stop) { ops_.prepare(call, own, first, stop); });
    spread(size, kPieceRows, kPieceRows, workers, [&](int64_t first, int64_t stop) {
      for (int64_t i = first; i < stop; ++i) {
        const int64_t row = order_.order[i] / n_each;
        std::memcpy(numbers_ + i * n, own.numbers + row * n, static_cast<size_t>(n));
        std::memcpy(scales_ + i * n_groups, own.scales + row * n_groups, static_cast<size_t>(4 * n_groups));
        std::memcpy(offsets_ + i * n_sums, own.offsets + row * n_sums, static_cast<size_t>(4 * n_sums));
      }
    });
  }

  const ExpertLayer& layer_;
  const Order& order_;
  Dtype dtype_;
  char* out_;
  const LinearOps& ops_;
  bool is_shared_ = false;
  int64_t panel_numbers_ = 0;
  const char* rows_ = nullptr;
  char* memory_ = nullptr;
  int8_t* numbers_ = nullptr;
  float* scales_ = nullptr;
  int32_t* offsets_ = nullptr;
};

void add_bias(const ExpertLayer& layer, const Order& order, Dtype dtype, char* out, int64_t first, int64_t stop) {
  const int64_t n = layer.weights.n_out, bytes = n * size_of(dtype);
  for (int64_t g = first; g < stop; ++g) {
    const Group& group = order.groups[static_cast<size_t>(g)];
    const char* bias = static_cast<const char*>(layer.bias) + group.expert * bytes;
    for (int64_t i = group.first; i < group.first + group.n; ++i) ops().rows->add(out + i * bytes, bias, n, dtype);
  }
}

// Rows in the groups' order to rows in that order; see Prepared.
void run_layer(const ExpertLayer& layer, const Order& order, const void* x, int64_t n_rows, int64_t n_each, Dtype dtype,
               void* out, int n_threads) {
  const LinearWeights& weights = layer.weights;
  const int64_t n_groups = static_cast<int64_t>(order.groups.size()), block_bytes = bytes_of_block(weights);
  const bool is_small = order.size() * weights.n_blocks * weights.block_bytes <= kAloneBytes;
  const int workers = is_small ? 1 : workers_for(n_threads);
  const Prepared prepared(layer, order, x, n_rows, n_each, dtype, out, workers);
  all_chosen.fetch_add(n_groups * weights.n_blocks * block_bytes, std::memory_order_relaxed);
  std::vector<int64_t> ours;  // groups that no matrix unit takes
  int64_t most = 0;
  for (int64_t g = 0; g < n_groups; ++g) {
    if (prepared.is_for_matrix(g)) {
      const LinearCall call = prepared.call(g);
      multiply(call.weights, call.x, call.n_tokens, call.out, n_threads);
      all_read.fetch_add(weights.n_blocks * block_bytes * ((call.n_tokens + 255) / 256), std::memory_order_relaxed);
    } else {
      ours.push_back(g);
      most = std::max(most, order.groups[static_cast<size_t>(g)].n);
    }
  }
  const int64_t total = static_cast<int64_t>(ours.size()) * weights.n_blocks;
  const int64_t piece_bytes = most <= kReadOnce   ? kStreamBytes
                              : weights.is_packed ? kPieceBytes
                                                  : 8 * weights.block_bytes;
  const int64_t fits = std::max<int64_t>(1, piece_bytes / weights.block_bytes);
  const int64_t piece = std::min(fits, std::max<int64_t>(1, total / (8 * workers)));
  spread(total, piece, std::max<int64_t>(1, kLeastBytes / weights.block_bytes), workers,
         [&](int64_t first, int64_t stop) {
           int64_t n_read = 0;
           while (first < stop) {
             const int64_t g = ours[static_cast<size_t>(first / weights.n_blocks)], block = first % weights.n_blocks;
             const int64_t until = std::min(weights.n_blocks, block + stop - first);
             n_read += ops().linear->run(prepared.call(g), prepared.inputs(g), block, until);
             first += until - block;
           }
           all_read.fetch_add(n_read * block_bytes, std::memory_order_relaxed);
         });
  if (layer.bias)
    spread(n_groups, 4, 1, workers,
           [&](int64_t first, int64_t stop) { add_bias(layer, order, dtype, static_cast<char*>(out), first, stop); });
}

}  // namespace

void run_expert_layer(const ExpertLayer& layer, const void* x, int64_t n_rows, const int64_t* experts, int64_t n_each,
                      Dtype dtype, void* out, int n_threads) {
  const Order order(experts, n_rows * n_each, layer.n_experts);
  const int64_t bytes = layer.weights.n_out * size_of(dtype);
  char* found = rows_buffer.get(std::max<int64_t>(1, order.size() * bytes));
  run_layer(layer, order, x, n_rows, n_each, dtype, found, n_threads);
  for (int64_t i = 0; i < n_rows * n_each; ++i) {
    const int64_t place = order.place[static_cast<size_t>(i)];
    char* to = static_cast<char*>(out) + i * bytes;
    if (place < 0)
      std::memset(to, 0, static_cast<size_t>(bytes));
    else
      std::memcpy(to, found + place * bytes, static_cast<size_t>(bytes));
  }
}

void run_experts(const Experts& experts, const void* x, const Choice& choice, Dtype dtype, void* out, int n_threads) {
  const Order order(choice.experts, choice.n_tokens * choice.n_chosen, experts.up.n_experts);
  const int64_t hidden = experts.down.weights.n_out, inner = experts.down.weights.n_in, size = order.size();
  const int64_t up_bytes = lines(size * 2 * inner * size_of(dtype)), row_bytes = hidden * size_of(dtype);
  const int64_t gated_bytes = lines(size * inner * size_of(dtype));
  char* both = mixture_buffer.get(up_bytes + gated_bytes + size * row_bytes + 64);
  char *gated = both + up_bytes, *rows = gated + gated_bytes;
  run_layer(experts.up, order, x, choice.n_tokens, choice.n_chosen, dtype, both, n_threads);
  constexpr int64_t kAloneNumbers = 1 << 16;
  const int workers = size * inner > kAloneNumbers ? workers_for(n_threads) : 1;
  const Gate& gate = experts.gate;
  const bool is_silu = gate.alpha == 1.f && gate.cubic == 0.f && gate.shift == 0.f && gate.limit == 0.f;
  const Rows pairs{both, size, 2, inner, 2 * inner, dtype};
  spread(size, kPieceRows, 1, workers, [&](int64_t first, int64_t stop) {
    is_silu ? ops().rows->gate(pairs, gated, first, stop) : ops().rows->gate_by(pairs, gate, gated, first, stop);
  });
  run_layer(experts.down, order, gated, size, 0, dtype, rows, n_threads);
  spread(choice.n_tokens, kPieceRows, 1, workers, [&](int64_t first, int64_t stop) {
    std::vector<const void*> chosen(static_cast<size_t>(choice.n_chosen));
    for (int64_t t = first; t < stop; ++t) {
      for (int64_t c = 0; c < choice.n_chosen; ++c) {
        const int64_t place = order.place[static_cast<size_t>(t * choice.n_chosen + c)];
        chosen[static_cast<size_t>(c)] = place < 0 ? nullptr : rows + place * row_bytes;
      }
      ops().rows->weigh(chosen.data(), choice.shares + t * choice.n_chosen, choice.n_chosen, hidden, dtype,
                        static_cast<char*>(out) + t * row_bytes);
    }
  });
}

namespace {

float from_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

float as_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return value;
  return from_bf16(static_cast<uint16_t>((bits + (bits >> 16 & 1) + 0x7FFF) >> 16));
}

// Logits to scores, in place.
void score(const Router& router, float* x, int64_t n) {
  if (router.is_sigmoid) {
    for (int64_t i = 0; i < n; ++i) x[i] = 1.f / (1.f + std::exp(-x[i]));
    return;
  }
  const float most = *std::max_element(x, x + n);
  float total = 0.f;
  for (int64_t i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - most);
  for (int64_t i = 0; i < n; ++i) x[i] /= total;
}

// A score by its rank: the highest first, then by number; what is no number last.
using Ranked = std::pair<float, int64_t>;
Ranked ranked(float value, int64_t number) { return {value == value ? -value : INFINITY, number}; }

// Drop the experts of all groups but those that are kept; `order` has n, by number.
void keep_groups(const ExpertGroups& groups, std::vector<Ranked>& order) {
  if (groups.n_kept == groups.n_groups) return;
  const int64_t size = static_cast<int64_t>(order.size()) / groups.n_groups;
  std::vector<Ranked> best, of_groups;
  for (int64_t g = 0; g < groups.n_groups; ++g) {
    const auto first = order.begin() + g * size;
    best.assign(first, first + size);
    std::partial_sort(best.begin(), best.begin() + groups.n_best, best.end());
    float sum = 0.f;
    for (int64_t i = 0; i < groups.n_best; ++i) sum -= best[static_cast<size_t>(i)].first;
    of_groups.push_back(ranked(sum, g));
  }
  std::partial_sort(of_groups.begin(), of_groups.begin() + groups.n_kept, of_groups.end());
  std::vector<Ranked> kept;
  for (int64_t i = 0; i < groups.n_kept; ++i) {
    const auto first = order.begin() + of_groups[static_cast<size_t>(i)].second * size;
    kept.insert(kept.end(), first, first + size);
  }
  order.swap(kept);
}

// The highest of n scores, what is no number last.
void take_highest(const Router& router, const float* scores, int64_t n, int64_t* experts, float* shares) {
  std::vector<Ranked> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    order[static_cast<size_t>(i)] = ranked(router.extra ? scores[i] + router.extra[i] : scores[i], i);
  keep_groups(router.groups, order);
  std::partial_sort(order.begin(), order.begin() + router.n_chosen, order.end());
  float total = 0.f;
  for (int64_t c = 0; c < router.n_chosen; ++c) {
    experts[c] = order[static_cast<size_t>(c)].second;
    total += shares[c] = scores[experts[c]];
  }
  for (int64_t c = 0; c < router.n_chosen; ++c) {
    if (router.is_normalised) shares[c] /= total;
    shares[c] *= router.factors ? router.scale * router.factors[experts[c]] : router.scale;
  }
}

}  // namespace

void choose(const Router& router, const void* x, int64_t n_tokens, Dtype dtype, int64_t* experts, float* shares,
            int n_threads) {
  const int64_t n = router.weights.n_out;
  const bool is_bf16 = dtype == Dtype::bf16;
  std::vector<float> logits(static_cast<size_t>(n_tokens * n));
  linear({router.weights, x, logits.data(), n_tokens, dtype, Dtype::f32}, n_threads);
  for (int64_t t = 0; t < n_tokens; ++t) {
    float* row = logits.data() + t * n;
    for (int64_t i = 0; router.bias && i < n; ++i)
      row[i] +=
          is_bf16 ? from_bf16(static_cast<const uint16_t*>(router.bias)[i]) : static_cast<const float*>(router.bias)[i];
    for (int64_t i = 0; is_bf16 && router.rounds_logits && i < n; ++i) row[i] = as_bf16(row[i]);
    score(router, row, n);
    float* of_token = shares + t * router.n_chosen;
    take_highest(router, row, n, experts + t * router.n_chosen, of_token);
    for (int64_t c = 0; is_bf16 && router.rounds_shares && c < router.n_chosen; ++c) of_token[c] = as_bf16(of_token[c]);
  }
}

void run_mixture(const Mixture& mixture, const void* x, const void* asked, int64_t n_tokens, Dtype dtype, void* out,
                 int n_threads) {
  const int64_t n_chosen = mixture.router.n_chosen, piece = std::max<int64_t>(1, kMostPairs / n_chosen);
  const int64_t n = std::min(piece, n_tokens) * n_chosen;
  char* memory = choice_buffer.get(12 * n);
  auto* experts = reinterpret_cast<int64_t*>(memory);
  auto* shares = reinterpret_cast<float*>(memory + 8 * n);
  for (int64_t first = 0; first < n_tokens; first += piece) {
    const int64_t count = std::min(piece, n_tokens - first);
    const int64_t bytes = first * mixture.router.weights.n_in * size_of(dtype);
    const char* from = static_cast<const char*>(x) + bytes;
    char* to = static_cast<char*>(out) + first * mixture.experts.down.weights.n_out * size_of(dtype);
    choose(mixture.router, static_cast<const char*>(asked) + bytes, count, dtype, experts, shares, n_threads);
    run_experts(mixture.experts, from, {experts, shares, count, n_chosen}, dtype, to, n_threads);
  }
}

ExpertCounts expert_counts() { return {all_read, all_chosen}; }

}  // namespace kvcellar
