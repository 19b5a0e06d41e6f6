#define KVC_NAMESPACE neon
#define KVC_NEON

#include "isa/level.h"
