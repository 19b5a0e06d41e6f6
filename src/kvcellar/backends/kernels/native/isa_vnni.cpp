#define KVC_NAMESPACE vnni
#define KVC_AVX512
#define KVC_VNNI

#include "vector.h"
#include "linear_impl.h"
#include "rows_impl.h"

namespace kvcellar {
extern const LinearOps linear_vnni;
const LinearOps linear_vnni = {vnni::prepare_linear, vnni::run_linear, vnni::unpack_linear, nullptr,
                     nullptr, vnni::kRowOps};
}  // namespace kvcellar
