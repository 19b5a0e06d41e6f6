// Weights of files that are grouped already, put where products take them; nothing is lost.

#pragma once

#include "linear/linear.h"

namespace kvcellar {

enum class BlockType : int32_t { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, f16, bf16 };

int64_t inputs_of(BlockType type);  // of a block
int64_t bytes_of(BlockType type);

// Weights as such blocks become; data and beside may be none yet. n_in is a multiple of a block's.
LinearWeights make_block_weights(BlockType type, int64_t n_in, int64_t n_out, const void* data, const void* beside);

// Bytes of all numbers of weights, and beside them.
int64_t data_bytes_of(const LinearWeights& weights);
int64_t beside_bytes_of(const LinearWeights& weights);

// Rows of blocks, one output's after the other's, to data and beside of weights that were made for them.
void place_blocks(BlockType type, const uint8_t* rows, const LinearWeights& weights, uint8_t* data, uint8_t* beside,
                  int n_threads);

// Numbers of 4 or 8 bits with float32 scales and minima for each `group` inputs, a multiple of kGroupInputs, which is
// how other files have theirs: scale * number + minimum. n_in is a multiple of the group.
LinearWeights make_affine_weights(int64_t bits, int64_t group, int64_t n_in, int64_t n_out, const void* data,
                                  const void* beside);

// Numbers [n_out, n_in], a byte each, and scales and minima [n_out, n_in / group].
struct AffineRows {
  const uint8_t* numbers;
  const float *scales, *minima;
};
void place_affine(const AffineRows& rows, const LinearWeights& weights, uint8_t* data, uint8_t* beside, int n_threads);

}  // namespace kvcellar
