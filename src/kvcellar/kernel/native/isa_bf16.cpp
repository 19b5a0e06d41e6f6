#define KVC_NAMESPACE bf16
#define KVC_AVX512
#define KVC_VNNI
#define KVC_BF16

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_bf16;
const Ops ops_bf16 = {"bf16", bf16::attend, bf16::merge, bf16::write, bf16::sum_of,
                     {bf16::prepare_linear, bf16::run_linear, bf16::unpack_linear, bf16::pack_linear, bf16::gather_rows,
                     nullptr, nullptr, bf16::kRowOps, true}};
}  // namespace kvcellar
