#define KVC_NAMESPACE avx512
#define KVC_AVX512

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_avx512;
const Ops ops_avx512 = {"avx512", avx512::attend, avx512::merge, avx512::write, avx512::sum_of,
                       {avx512::prepare_linear, avx512::run_linear, avx512::unpack_linear, avx512::pack_linear, avx512::gather_rows,
                       nullptr, nullptr, avx512::kRowOps}};
}  // namespace kvcellar
