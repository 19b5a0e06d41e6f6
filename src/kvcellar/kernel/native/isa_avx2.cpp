#define KVC_NAMESPACE avx2
#define KVC_AVX2

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_avx2;
const Ops ops_avx2 = {"avx2", avx2::attend, avx2::merge, avx2::write, avx2::sum_of,
                     {avx2::prepare_linear, avx2::run_linear, avx2::unpack_linear, avx2::pack_linear, avx2::gather_rows,
                     nullptr, nullptr, avx2::kRowOps}};
}  // namespace kvcellar
