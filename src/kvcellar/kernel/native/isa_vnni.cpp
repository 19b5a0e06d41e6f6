#define KVC_NAMESPACE vnni
#define KVC_AVX512
#define KVC_VNNI
#if defined(KVC_WITH_FP16)
#define KVC_HALVES
#endif

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_vnni;
const Ops ops_vnni = {"vnni", vnni::attend, vnni::merge, vnni::write, vnni::sum_of,
                     {vnni::prepare_linear, vnni::run_linear, vnni::unpack_linear, vnni::pack_linear, vnni::gather_rows,
                     nullptr, nullptr, vnni::kRowOps}};
#if defined(KVC_HALVES)
extern const Ops ops_fp16;  // the same but for branches
const Ops ops_fp16 = {"fp16", vnni::attend_with_halves, vnni::merge, vnni::write, vnni::sum_of,
                     {vnni::prepare_linear, vnni::run_linear, vnni::unpack_linear, vnni::pack_linear, vnni::gather_rows,
                     nullptr, nullptr, vnni::kRowOps}};
#endif
}  // namespace kvcellar
