// The function that other shared objects get the address of.

#pragma once

#include "attend/step_call.h"

namespace kvcellar {

int step(const KvcStepCall* call, char* error, int64_t error_size);

}  // namespace kvcellar
