#define KVC_NAMESPACE neon
#define KVC_NEON

#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_neon;
const Ops ops_neon = {"neon", neon::attend, neon::merge, neon::write, neon::sum_of,
                     {neon::prepare_linear, neon::run_linear, neon::unpack_linear, neon::pack_linear, neon::gather_rows,
                     nullptr, nullptr, neon::kRowOps}};
}  // namespace kvcellar
