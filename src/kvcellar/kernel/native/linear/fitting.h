// Weights made blocks of Q4_K: 4 bits each, and for every 32 a scale and a minimum that are searched.

#pragma once

#include "linear/linear.h"

namespace kvcellar {

// f32 or bf16 rows [n_out, n_in] as blocks of GGUF files, one output's after the other's; n_in is a multiple of 256. The
// same bytes come out on every machine, by any number of threads. Of weights that are not all finite a block's are NaN.
void fit_q4_k(const void* rows, Dtype dtype, int64_t n_in, int64_t n_out, uint8_t* to, int n_threads);

}  // namespace kvcellar
