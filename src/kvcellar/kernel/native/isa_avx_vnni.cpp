#define KVC_NAMESPACE avx_vnni
#define KVC_AVX2
#define KVC_VNNI

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_avx_vnni;
const Ops ops_avx_vnni = {"avx_vnni", avx_vnni::attend, avx_vnni::merge, avx_vnni::write, avx_vnni::sum_of,
                          {avx_vnni::prepare_linear, avx_vnni::run_linear, avx_vnni::unpack_linear,
                           avx_vnni::pack_linear, avx_vnni::gather_rows, nullptr, nullptr, avx_vnni::kRowOps}};
}  // namespace kvcellar
