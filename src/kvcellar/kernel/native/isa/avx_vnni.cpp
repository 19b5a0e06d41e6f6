#define KVC_NAMESPACE avx_vnni
#define KVC_AVX2
#define KVC_VNNI

#include "isa/level.h"
