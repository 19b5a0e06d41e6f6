// Linear layers: their inputs prepared once, their outputs spread over threads.

#include "linear/linear.h"

#include <algorithm>
#include <cstring>

#include "core/buffer.h"
#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kPieceBytes = 1 << 17;   // weights of a piece of work: what a core's cache keeps
constexpr int64_t kStreamBytes = 1 << 19;  // where they are read once: long streams are read faster
constexpr int64_t kLeastBytes = 1 << 16;   // of the last pieces
constexpr int64_t kAloneBytes = 1 << 18;   // below, waking a thread costs more than it brings

constexpr int64_t kTokensOfBlock = 256;  // for the matrix unit: 1 MiB of kInputsOfBlock
constexpr int64_t kPanel = 32;           // outputs that the matrix unit takes at a time
constexpr int64_t kPanelsOfPiece = 16;

thread_local Buffer inputs_buffer, tokens_buffer, sums_buffer, panel_buffer;

// Blocks that are a piece of work: of so many bytes or less, and enough pieces for all.
int64_t blocks_of_piece(const LinearWeights& weights, int64_t n_blocks, int n_workers, int64_t piece_bytes) {
  const int64_t fits = std::max<int64_t>(1, piece_bytes / weights.block_bytes);
  return std::min(fits, std::max<int64_t>(1, n_blocks / (8 * n_workers)));
}

int64_t least_blocks(const LinearWeights& weights) { return std::max<int64_t>(1, kLeastBytes / weights.block_bytes); }

}  // namespace

LinearWeights make_linear_weights(WeightFormat format, int64_t n_in, int64_t n_out, const void* data,
                                  const void* beside) {
  LinearWeights weights{format, n_in, n_out, data};
  const bool is_coded = format == WeightFormat::coded;
  if (format == WeightFormat::bf16 || format == WeightFormat::f16) weights.plain_bytes = 2;
  if (format == WeightFormat::f32) weights.plain_bytes = 4;
  weights.is_plain = weights.plain_bytes > 0;
  const bool is_mxfp4 = format == WeightFormat::mxfp4, is_int4 = format == WeightFormat::int4;
  weights.is_packed = format == WeightFormat::int8 || is_int4 || is_mxfp4;
  weights.is_wide = format == WeightFormat::int8;
  if (is_mxfp4)
    weights.exponents = static_cast<const uint8_t*>(beside);
  else if (weights.is_packed)
    weights.scales = static_cast<const uint16_t*>(beside);
  if (is_coded) weights.escapes = static_cast<const Escape*>(beside);
  weights.n_groups = weights.n_sums = n_in / kGroupInputs;
  const int64_t shared = is_int4 || is_mxfp4 ? kInt4Shared : kInt8Shared;
  if (weights.is_packed) weights.n_scales = (n_in + shared - 1) / shared;
  weights.n_blocks = (n_out + kBlockRows - 1) / kBlockRows;
  const int64_t half_bytes = kBlockRows * n_in / 2;
  weights.block_bytes = is_coded                       ? sizeof(CodedHead) + 3 * half_bytes
                        : weights.is_plain             ? 2 * weights.plain_bytes * half_bytes
                        : format == WeightFormat::int8 ? 2 * half_bytes
                                                       : half_bytes;
  return weights;
}

LinearWeights make_grouped_weights(WeightFormat format, Steps steps, int32_t zero, int64_t n_in, int64_t n_out,
                                   const void* data, const void* beside, int64_t n_together) {
  LinearWeights weights{format, n_in, n_out, data};
  const bool is_fine = format == WeightFormat::fine_bytes;
  weights.is_packed = weights.is_grouped = true;
  weights.is_wide = format != WeightFormat::nibbles;
  weights.beside = static_cast<const uint8_t*>(beside);
  weights.steps = steps;
  weights.zero = zero;
  weights.n_together = n_together;
  weights.has_minima = has_minima(steps);
  weights.n_groups = n_in / kGroupInputs;
  weights.n_sums = is_fine ? 2 * weights.n_groups : weights.n_groups;
  weights.n_blocks = (n_out + kBlockRows - 1) / kBlockRows;
  const bool has_halves = format == WeightFormat::nibbles || format == WeightFormat::looked_up;
  weights.block_bytes = kBlockRows * n_in / (has_halves ? 2 : 1);
  const int64_t numbers = weights.has_minima ? 2 : 1;  // scales, or these and minima
  const int64_t of_output = steps == Steps::floats ? weights.n_sums / n_together * 4
                            : steps == Steps::halves || steps == Steps::pairs
                                ? weights.n_sums * 2
                                : n_in / kCountedInputs * 2 + weights.n_sums;
  weights.beside_bytes = of_output * numbers * kBlockRows;
  return weights;
}

void pack(const Packing& packing, int n_threads) {
  constexpr int64_t kBlocks = 8;
  const LinearOps& ops_now = *ops().linear;
  spread(packing.weights.n_blocks, kBlocks, 1, workers_for(n_threads),
         [&](int64_t first, int64_t stop) { ops_now.pack(packing, first, stop); });
}

namespace {

// Of 8 halves the first 4 to lower ones, the others to upper ones.
uint32_t by_turns(uint32_t halves) {
  const auto spread_out = [](uint32_t x) {
    x = (x | x << 8) & 0x00FF00FF;
    return (x | x << 4) & 0x0F0F0F0F;
  };
  return spread_out(halves & 0xFFFF) | spread_out(halves >> 16) << 4;
}

}  // namespace

void place_mxfp4(const uint8_t* blocks, const uint8_t* exponents, int64_t n_in, int64_t n_out, uint8_t* data,
                 uint8_t* exponents_to, int n_threads) {
  const LinearWeights weights = make_linear_weights(WeightFormat::mxfp4, n_in, n_out, data, exponents_to);
  constexpr int64_t kBlocks = 8, kGroupBytes = kGroupInputs / 2;
  const auto place = [&](int64_t block) {
    uint8_t* to = data + block * weights.block_bytes;
    uint8_t* exponent_to = exponents_to + block * weights.n_scales * kBlockRows;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t output = block * kBlockRows + r, first = output * weights.n_groups;
      for (int64_t g = 0; g < weights.n_groups; ++g) {
        const bool is_there = output < n_out;
        exponent_to[g * kBlockRows + r] = is_there ? exponents[first + g] : 0;
        for (int64_t v = 0; v < 4; ++v) {
          uint32_t halves = 0;
          if (is_there) std::memcpy(&halves, blocks + (first + g) * kGroupBytes + 4 * v, 4);
          halves = by_turns(halves);
          std::memcpy(to + (g * 4 + v) * 64 + 4 * r, &halves, 4);
        }
      }
    }
  };
  spread(weights.n_blocks, kBlocks, 1, workers_for(n_threads), [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) place(block);
  });
}

void linear(const LinearCall& call, int n_threads) {
  const bool is_bf16 = call.in == Dtype::bf16 && call.result == Dtype::bf16 && !call.out_step;
  if (call.n_tokens > kReadOnce && is_bf16 && !call.weights.is_packed && can_multiply(call.weights))
    return multiply(call.weights, call.x, call.n_tokens, call.out, n_threads);
  const LinearOps& ops_now = *ops().linear;
  const LinearWeights& weights = call.weights;
  const int64_t n = call.n_tokens * weights.n_in, groups = call.n_tokens * weights.n_groups;
  const int64_t n_sums = call.n_tokens * weights.n_sums;
  const int64_t float_bytes = 4 * (call.n_tokens + kMostOfPanel - 1) * weights.n_in;
  char* memory = inputs_buffer.get(weights.is_packed ? 2 * n + 4 * (groups + n_sums) + 128 : float_bytes + 64);
  LinearInputs inputs{};
  if (weights.is_packed) {
    inputs.numbers = reinterpret_cast<int8_t*>(memory);
    memory += (2 * n + 63) / 64 * 64;
    inputs.scales = reinterpret_cast<float*>(memory);
    inputs.offsets = reinterpret_cast<int32_t*>(memory + 4 * groups);
  } else {
    inputs.rows = reinterpret_cast<float*>(memory);
    const bool is_aligned = reinterpret_cast<uintptr_t>(call.x) % 64 == 0;
    if (ops_now.has_pairs && weights.format == WeightFormat::coded && call.in == Dtype::bf16)
      inputs.pairs = static_cast<const uint16_t*>(is_aligned ? call.x : memory);
  }
  const int64_t all_bytes = weights.n_blocks * weights.block_bytes;
  const int workers = all_bytes * call.n_tokens > kAloneBytes ? workers_for(n_threads) : 1;
  spread(call.n_tokens, 16, 16, workers,
         [&](int64_t first, int64_t stop) { ops_now.prepare(call, inputs, first, stop); });
  const int64_t piece_bytes = call.n_tokens <= kReadOnce || inputs.pairs ? kStreamBytes
                              : weights.is_packed                        ? kPieceBytes
                                                                         : kBlocksInTurn * weights.block_bytes;
  spread(weights.n_blocks, blocks_of_piece(weights, weights.n_blocks, workers, piece_bytes), least_blocks(weights),
         workers, [&](int64_t first, int64_t stop) { ops_now.run(call, inputs, first, stop); });
}

bool can_multiply(const LinearWeights& weights) {
  return ops().linear->multiply && weights.n_in % kGroupInputs == 0 && !weights.is_grouped &&
         (!weights.is_plain || weights.format == WeightFormat::bf16);
}

void multiply(const LinearWeights& weights, const void* x, int64_t n_tokens, void* out, int n_threads) {
  const int64_t n_in = weights.n_in, n_pairs = (n_tokens + 31) / 32;
  const int64_t n_panels = (weights.n_out + kPanel - 1) / kPanel;
  const int workers = workers_for(n_threads);
  const LinearOps& ops_now = *ops().linear;
  ManyTokens call{weights,
                  static_cast<const uint16_t*>(x),
                  static_cast<uint16_t*>(out),
                  n_tokens,
                  nullptr,
                  nullptr,
                  n_pairs,
                  0,
                  0,
                  0,
                  0};
  call.tokens = reinterpret_cast<uint16_t*>(tokens_buffer.get(n_pairs * 32 * n_in * 2));
  // A few tokens go through all inputs of a panel at once.
  const int64_t n_inputs = n_pairs == 1 ? n_in : kInputsOfBlock;
  if (n_in > n_inputs) call.sums = reinterpret_cast<float*>(sums_buffer.get(n_panels * n_pairs * 4096));
  spread((n_tokens + 15) / 16, 2, 1, workers,
         [&](int64_t first, int64_t stop) { ops_now.pack_tokens(call, first, stop); });
  const int64_t scratch = 2 * kPanel * kPanelRow * 2 + 4096;  // two panels, and results
  for (int64_t pair = 0; pair < n_pairs; pair = call.stop_pair) {
    call.first_pair = pair;
    call.stop_pair = std::min(pair + kTokensOfBlock / 32, n_pairs);
    for (int64_t input = 0; input < n_in; input = call.stop_input) {
      call.first_input = input;
      call.stop_input = std::min(input + n_inputs, n_in);
      spread(n_panels, kPanelsOfPiece, 1, workers,
             [&](int64_t first, int64_t stop) { ops_now.multiply(call, panel_buffer.get(scratch), first, stop); });
    }
  }
}

void unpack(const LinearWeights& weights, int64_t first, int64_t stop, void* to, int n_threads) {
  const int workers = workers_for(n_threads);
  const LinearOps& ops_now = *ops().linear;
  spread(stop - first, blocks_of_piece(weights, stop - first, workers, kPieceBytes), 1, workers,
         [&](int64_t from, int64_t until) {
           ops_now.unpack(weights, first + from, first + until,
                          static_cast<uint16_t*>(to) + from * kBlockRows * weights.n_in);
         });
}

void gather(const LinearWeights& weights, const int64_t* outputs, int64_t n, Dtype dtype, void* to, int n_threads) {
  const int64_t row_bytes = weights.n_in * (dtype == Dtype::f32 ? 4 : 2);
  const int64_t rows = std::max<int64_t>(1, kPieceBytes / row_bytes);
  const LinearOps& ops_now = *ops().linear;
  spread(n, rows, rows, n * row_bytes > kAloneBytes ? workers_for(n_threads) : 1, [&](int64_t first, int64_t stop) {
    ops_now.gather(weights, outputs + first, stop - first, dtype, static_cast<char*>(to) + first * row_bytes);
  });
}

}  // namespace kvcellar
