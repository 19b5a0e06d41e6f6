// Levels: the instruction sets that this code is compiled for. Which one is used is chosen at run time.

#pragma once

#include <vector>

#include "attend/job.h"
#include "layers/rows.h"
#include "linear/linear.h"
#include "recurrent/recurrent.h"

namespace kvcellar {

// The best last. `vnni` is AVX-512 with VNNI, `bf16` that with products of bfloat16, `amx` has a matrix unit for
// linear layers.
enum class Level : int32_t { scalar, neon, avx2, avx_vnni, vnni, bf16, amx };
const char* name_of(Level level);

struct Ops {
  Level level;
  const AttendOps* attend;
  const LinearOps* linear;
  const RowOps* rows;
  const RecurrentOps* recurrent;
};

const Ops& ops();  // of the level in use

// Those of this build that this machine can run, the best first.
std::vector<Level> levels();
Level level();
void set_level(Level level);  // raises ConfigError if it is not there

// Whose processor it is. Where memory is fetched to differs: see attend/fetch.h.
bool is_amd();
// Whether its second cache is the better place for what is fetched, though the first one has room.
extern __attribute__((visibility("hidden"))) const bool is_fetched_far;
// The same of what many rows of queries read with products of bfloat16: all but Zen 5's.
extern __attribute__((visibility("hidden"))) const bool are_branches_far;

// Sum of n_bytes read with all threads: what the memory gives.
double stream_read(const void* data, int64_t n_bytes, int n_threads);

}  // namespace kvcellar
