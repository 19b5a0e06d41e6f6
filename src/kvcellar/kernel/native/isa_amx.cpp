#define KVC_NAMESPACE amx
#define KVC_AVX512
#define KVC_AMX
#define KVC_VNNI

#include "attend_impl.h"
#include "linear_impl.h"
#include "linear_amx.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_amx;
const Ops ops_amx = {"amx", amx::attend, amx::merge, amx::write, amx::sum_of,
                    {amx::prepare_linear, amx::run_linear, amx::unpack_linear, amx::pack_linear, amx::gather_rows,
                    amx::pack_tokens, amx::multiply_panels, amx::kRowOps}};
}  // namespace kvcellar
