#define KVC_NAMESPACE vnni
#define KVC_AVX512
#define KVC_VNNI

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_vnni;
const Ops ops_vnni = {"vnni", vnni::attend, vnni::merge, vnni::write, vnni::sum_of,
                     {vnni::prepare_linear, vnni::run_linear, vnni::unpack_linear, vnni::pack_linear, vnni::gather_rows,
                     nullptr, nullptr, vnni::kRowOps}};
}  // namespace kvcellar
