// What the Python module is made of. Integers go in, addresses among them: no tensors.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace kvcellar {

void bind_levels(nanobind::module_& m);
void bind_attend(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_layers(nanobind::module_& m);
void bind_experts(nanobind::module_& m);
void bind_recurrent(nanobind::module_& m);

// Memory at an address that Python gave.
template <class T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace kvcellar
