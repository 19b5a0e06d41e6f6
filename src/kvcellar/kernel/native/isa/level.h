// Everything that a level gives. KVC_NAMESPACE and the level's instruction sets are set by the including file.

#include "attend/attention.h"
#include "core/levels.h"
#include "layers/passes.h"
#include "linear/product.h"
#include "recurrent/passes.h"

#define KVC_JOINED(left, right) left##right
#define KVC_NAMED(left, right) KVC_JOINED(left, right)
#define KVC_OPS KVC_NAMED(ops_, KVC_NAMESPACE)

namespace kvcellar {
extern const Ops KVC_OPS;
const Ops KVC_OPS = {Level::KVC_NAMESPACE, &KVC_NAMESPACE::kAttendOps, &KVC_NAMESPACE::kLinearOps,
                     &KVC_NAMESPACE::kRowOps, &KVC_NAMESPACE::kRecurrentOps};
}  // namespace kvcellar
