#define KVC_NAMESPACE neon
#define KVC_NEON

#include "attend_impl.h"

namespace kvcellar {
extern const Ops ops_neon;
const Ops ops_neon = {"neon", neon::attend, neon::merge, neon::write, neon::sum_of};
}  // namespace kvcellar
