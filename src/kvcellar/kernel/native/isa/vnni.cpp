#define KVC_NAMESPACE vnni
#define KVC_AVX512
#define KVC_VNNI

#include "isa/level.h"
