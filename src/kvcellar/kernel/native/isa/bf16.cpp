#define KVC_NAMESPACE bf16
#define KVC_AVX512
#define KVC_VNNI
#define KVC_BF16

#include "isa/level.h"
