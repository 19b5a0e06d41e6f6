#define KVC_NAMESPACE scalar

#include "isa/level.h"
