// Linear layers for a few tokens: reading the weights once is what they cost.

#pragma once

#include <vector>

#include "core/pool.h"
#include "layers/rows.h"

namespace kvcellar {

constexpr int64_t kBlockRows = 16;                      // outputs whose packed weights lie together
constexpr int64_t kGroupInputs = 32;                    // of a token, which are rounded together
constexpr int64_t kInt4Shared = 32, kInt8Shared = 128;  // packed weights of an output that share a scale
constexpr int64_t kCountedInputs = 256;                 // of an output that share what bytes count
constexpr int64_t kCodedInputs = 128;                   // of a row of coded weights, which lie together
constexpr int64_t kInputsOfBlock = 2048;                // that the matrix unit takes at a time
constexpr int64_t kPanelRow = kInputsOfBlock + 32;      // where they lie: not all rows in the same of a cache's sets
constexpr int kReadOnce = 4;                            // tokens up to which reading weights is what they cost
constexpr int64_t kMostOfPanel = 6;                     // more tokens lie in panels of so many, at most
constexpr int64_t kBlocksInTurn = 8;                    // that meet some inputs of these before the next ones come

// nibbles to fine_bytes are *grouped*: each group of 32 inputs of an output has a scale and, of some, a minimum of its own.
enum class WeightFormat : int32_t {
  bf16 = 0,
  int8 = 1,
  int4 = 2,
  coded = 3,
  mxfp4 = 4,
  nibbles = 5,     // 0 to 15
  looked_up = 6,   // 16 numbers of a table
  bytes = 7,       // 0 to 255
  fine_bytes = 8,  // the same, in groups of 16
  f16 = 9,
  f32 = 10,
};

// What stands beside grouped weights, of 16 outputs: float16 scales of a group, or scales and minima; or for 256 inputs
// float16 scales and minima, and then for each group bytes that count them; or for these scales alone, and bytes around
// 128; or float32 scales and minima of a number of groups. A weight is scale * (number - zero) + minimum.
enum class Steps : int32_t { none, halves, pairs, counts, signs, floats };
static constexpr bool has_minima(Steps steps) {
  return steps == Steps::pairs || steps == Steps::counts || steps == Steps::floats;
}

// A number of coded weights that its row's table has not.
struct Escape {
  uint32_t input;
  uint16_t output;  // of the block
  uint16_t value;   // bfloat16
};

// What 16 outputs' coded weights begin with.
struct CodedHead {
  uint8_t tables[kBlockRows][16];  // upper bytes: 8 positive ones, the least first, and their negatives
  uint32_t n_escapes, first_escape;
  uint8_t unused[56];  // rows begin with a cache line
};

// Where an input's byte lies among 64 of coded weights. Of each translation unit its own.
static constexpr int64_t coded_place(int64_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

// bf16, f16 and f32: numbers [n_out, n_in]. int8 and int4: blocks of 16 outputs, padded with zeros; a block has
// for each group of 32 inputs and each 4 of them the weights of all 16 outputs, 4 at a time, as
// unsigned numbers around 128 or 8. int4 puts 4 inputs into the low halves of 64 bytes and the next
// 4 into the high ones. `scales` are float16 [blocks, n_scales, 16]. mxfp4 has the halves of int4, which are numbers of
// E2M1 (sign, two bits of exponent, one of fraction), and in place of scales `exponents`, 127 for 1, one for 32 inputs.
struct LinearWeights {
  WeightFormat format = WeightFormat::bf16;
  int64_t n_in = 0, n_out = 0;
  const void* data = nullptr;
  const uint16_t* scales = nullptr;
  const Escape* escapes = nullptr;
  const uint8_t* exponents = nullptr;
  const uint8_t* beside = nullptr;  // of grouped weights
  Steps steps = Steps::none;
  int32_t zero = 0;        // of grouped weights
  int64_t n_together = 1;  // groups that share floats

  // What follows from these, in plain numbers: inline functions of a header would be everyone's.
  bool is_plain = false, is_packed = false, is_grouped = false, has_minima = false;
  bool is_wide = false;                                 // their products are too large for words
  int64_t n_groups = 0, n_blocks = 0, block_bytes = 0;  // a block: 16 outputs
  int64_t n_scales = 0;                                 // of an output
  int64_t plain_bytes = 0;                              // of a number that is plain
  int64_t n_sums = 0;                                   // of a token's inputs
  int64_t beside_bytes = 0;                             // of a block
};

// Inputs of a call as the instruction set wants them: floats, or for packed weights bytes in groups
// of 32, with a scale each and what an offset of the weights adds to their products.
struct LinearInputs {
  float* rows;            // [tokens, n_in], of many in panels, or these as words; plain and coded only
  const uint16_t* pairs;  // [tokens, n_in] on lines of the cache, where they meet coded weights in pairs
  int8_t* numbers;        // [tokens, n_in], or words of 16 bits
  float* scales;          // [tokens, groups]
  int32_t* offsets;       // [tokens, sums]; where weights have minima floats: what meets these
};

struct LinearCall {
  LinearWeights weights;
  const void* x;  // [tokens, n_in]
  void* out;      // [tokens, n_out]
  int64_t n_tokens;
  Dtype in, result;      // f32 or bf16
  int64_t out_step = 0;  // of packed weights: from a token's results to the next one's; 0: n_out
};

// Many tokens in bfloat16, for the matrix unit: a block of them and of inputs at a time.
struct ManyTokens {
  LinearWeights weights;  // n_in a multiple of 32
  const uint16_t* x;      // [n_tokens, n_in]
  uint16_t* out;          // [n_tokens, n_out]
  int64_t n_tokens;
  uint16_t* tokens;  // as tiles: [tokens / 16, n_in / 32, 16 pairs of inputs, 16 tokens, 2]
  float* sums;       // [panels, n_pairs, 4 tiles]: between blocks of inputs
  int64_t n_pairs;   // of 32 tokens each
  int64_t first_pair, stop_pair, first_input, stop_input;
};

// `beside` are scales, exponents or escapes.
LinearWeights make_linear_weights(WeightFormat format, int64_t n_in, int64_t n_out, const void* data,
                                  const void* beside);

// Grouped weights; `beside` lies as Steps says.
LinearWeights make_grouped_weights(WeightFormat format, Steps steps, int32_t zero, int64_t n_in, int64_t n_out,
                                   const void* data, const void* beside, int64_t n_together = 1);

// bfloat16 [n_out, n_in] as coded blocks, and their escapes, which go on after n_before of other blocks. n_in is a
// multiple of kCodedInputs.
std::vector<Escape> code(const uint16_t* rows, int64_t n_in, int64_t n_out, void* to, int64_t n_before, int n_threads);

// Packs f32 or bf16 rows [n_out, n_in]: int8 has its largest magnitude at 127 steps, int4 the number of the
// largest magnitude, the first one of equals, at -8 of them. The scale of numbers that are not all finite is NaN.
struct Packing {
  LinearWeights weights;  // what they become; n_in is a multiple of kGroupInputs
  const void* rows;
  Dtype dtype;
  uint8_t* data;  // of the weights
  uint16_t* scales;
};

struct LinearOps {
  // Tokens [first, stop) of the inputs.
  void (*prepare)(const LinearCall& call, const LinearInputs& inputs, int64_t first, int64_t stop);
  // Blocks [first, stop) of 16 outputs, for all tokens. Returns how many blocks it has read: one that is read again
  // for more tokens counts again.
  int64_t (*run)(const LinearCall& call, const LinearInputs& inputs, int64_t first, int64_t stop);
  // Packed or coded blocks [first, stop) as bf16 [outputs, n_in].
  void (*unpack)(const LinearWeights& weights, int64_t first, int64_t stop, uint16_t* to);
  // Blocks [first, stop).
  void (*pack)(const Packing& packing, int64_t first, int64_t stop);
  // See below; f32 is not for coded weights.
  void (*gather)(const LinearWeights& weights, const int64_t* outputs, int64_t n, Dtype dtype, void* to);
  // Tiles of 16 tokens, then panels of 32 outputs. None where there is no matrix unit.
  void (*pack_tokens)(const ManyTokens& call, int64_t first, int64_t stop);
  void (*multiply)(const ManyTokens& call, char* scratch, int64_t first, int64_t stop);
  bool has_pairs = false;  // coded weights meet bfloat16 inputs two at a time
  bool has_words = false;  // what meets weights of int8 is 16 bits wide
};

void pack(const Packing& packing, int n_threads);

// Weights of mxfp4 as checkpoints have them, outputs one behind the other: of each 32 inputs 16 bytes, the first input
// in a lower half, and an exponent. To data and exponents as LinearWeights has them; nothing is rounded.
void place_mxfp4(const uint8_t* blocks, const uint8_t* exponents, int64_t n_in, int64_t n_out, uint8_t* data,
                 uint8_t* exponents_to, int n_threads);

// out = x W^T. Each token's result is the same whatever other tokens come with it; plain weights
// are summed in one order for up to kReadOnce tokens, and in another for more, with AVX2 and both of bf16 in words
// of 16 bits; coded ones that meet inputs in pairs in a third one for many.
void linear(const LinearCall& call, int n_threads);

// The same for any number of tokens in bfloat16, where can_multiply: weights are rounded to bfloat16,
// and inputs are not rounded.
bool can_multiply(const LinearWeights& weights);
void multiply(const LinearWeights& weights, const void* x, int64_t n_tokens, void* out, int n_threads);

// Packed or coded blocks [first, stop), without the padding of the last one, as bf16 [outputs, n_in].
void unpack(const LinearWeights& weights, int64_t first, int64_t stop, void* to, int n_threads);

// Weights of some outputs [n, n_in], as an embedding that is the last layer's weights is read;
// f32 or bf16, and of coded ones, which are that, bf16.
void gather(const LinearWeights& weights, const int64_t* outputs, int64_t n, Dtype dtype, void* to, int n_threads);

}  // namespace kvcellar
