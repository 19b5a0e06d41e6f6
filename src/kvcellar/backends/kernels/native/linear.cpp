// Linear layers: their inputs prepared once, their outputs spread over threads.

#include "linear.h"

#include <algorithm>

#include "buffer.h"
#include "isa.h"
#include "threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kPieceBytes = 1 << 17;  // weights of a piece of work: what a core's cache keeps
constexpr int64_t kStreamBytes = 1 << 19; // where they are read once: long streams are read faster
constexpr int64_t kLeastBytes = 1 << 16;  // of the last pieces
constexpr int64_t kReadOnce = 4;          // tokens
constexpr int64_t kAloneBytes = 1 << 18;  // below, waking a thread costs more than it brings

thread_local Buffer inputs_buffer;

// Blocks that are a piece of work: of so many bytes or less, and enough pieces for all.
int64_t blocks_of_piece(const LinearWeights& weights, int64_t n_blocks, int n_workers,
                        int64_t piece_bytes) {
  const int64_t fits = std::max<int64_t>(1, piece_bytes / weights.block_bytes);
  return std::min(fits, std::max<int64_t>(1, n_blocks / (8 * n_workers)));
}

int64_t least_blocks(const LinearWeights& weights) {
  return std::max<int64_t>(1, kLeastBytes / weights.block_bytes);
}

}  // namespace

LinearWeights make_linear_weights(WeightFormat format, int64_t n_in, int64_t n_out, const void* data,
                                  const uint16_t* scales) {
  const int64_t numbers = kBlockRows * n_in;
  const int64_t bytes = format == WeightFormat::bf16   ? 2 * numbers
                        : format == WeightFormat::int8 ? numbers
                                                       : numbers / 2;
  return {format, n_in, n_out, data, scales, format != WeightFormat::bf16, n_in / kGroupInputs,
          (n_out + kBlockRows - 1) / kBlockRows, bytes};
}

void linear(const LinearCall& call, int n_threads) {
  const LinearWeights& weights = call.weights;
  const int64_t n = call.n_tokens * weights.n_in, groups = call.n_tokens * weights.n_groups;
  char* memory = inputs_buffer.get(weights.is_packed ? n + 8 * groups + 128 : 4 * n + 64);
  LinearInputs inputs{};
  if (weights.is_packed) {
    inputs.numbers = reinterpret_cast<int8_t*>(memory);
    memory += (n + 63) / 64 * 64;
    inputs.scales = reinterpret_cast<float*>(memory);
    inputs.offsets = reinterpret_cast<int32_t*>(memory + 4 * groups);
  } else {
    inputs.rows = reinterpret_cast<float*>(memory);
  }
  const int64_t all_bytes = weights.n_blocks * weights.block_bytes;
  const int workers = all_bytes * call.n_tokens > kAloneBytes ? workers_for(n_threads) : 1;
  const LinearOps& ops_now = ops().linear;
  spread(call.n_tokens, 16, 16, workers,
         [&](int64_t first, int64_t stop) { ops_now.prepare(call, inputs, first, stop); });
  const int64_t piece_bytes = call.n_tokens <= kReadOnce ? kStreamBytes : kPieceBytes;
  spread(weights.n_blocks, blocks_of_piece(weights, weights.n_blocks, workers, piece_bytes),
         least_blocks(weights), workers,
         [&](int64_t first, int64_t stop) { ops_now.run(call, inputs, first, stop); });
}

void unpack(const LinearWeights& weights, int64_t first, int64_t stop, void* to, int n_threads) {
  const int workers = workers_for(n_threads);
  const LinearOps& ops_now = ops().linear;
  spread(stop - first, blocks_of_piece(weights, stop - first, workers, kPieceBytes), 1, workers,
         [&](int64_t from, int64_t until) {
           ops_now.unpack(weights, first + from, first + until,
                          static_cast<uint16_t*>(to) + from * kBlockRows * weights.n_in);
         });
}

}  // namespace kvcellar
