// The matrix unit is for linear layers alone; all else is done as at level vnni.
#define KVC_NAMESPACE amx
#define KVC_AVX512
#define KVC_VNNI
#define KVC_AMX

#include "core/levels.h"
#include "linear/product.h"
#include "linear/matrix.h"

namespace kvcellar {
extern const LinearOps linear_amx;
const LinearOps linear_amx = amx::kMatrixOps;
}  // namespace kvcellar
