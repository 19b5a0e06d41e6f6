#define KVC_NAMESPACE scalar


#include "attend_impl.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const Ops ops_scalar;
const Ops ops_scalar = {"scalar", scalar::attend, scalar::merge, scalar::write, scalar::sum_of,
                       {scalar::prepare_linear, scalar::run_linear, scalar::unpack_linear, scalar::pack_linear, scalar::gather_rows,
                       nullptr, nullptr, scalar::kRowOps}};
}  // namespace kvcellar
