#define KVC_NAMESPACE avx2
#define KVC_AVX2

#include "isa/level.h"
