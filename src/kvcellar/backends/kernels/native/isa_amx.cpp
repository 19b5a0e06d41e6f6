#define KVC_NAMESPACE amx
#define KVC_AVX512
#define KVC_AMX

#include "attend_impl.h"

namespace kvcellar {
extern const Ops ops_amx;
const Ops ops_amx = {"amx", amx::attend, amx::merge, amx::write, amx::sum_of};
}  // namespace kvcellar
