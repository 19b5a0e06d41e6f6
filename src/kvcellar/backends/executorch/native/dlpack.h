// The part of DLPack's C interface (version 0, capsules named "dltensor") that is used here.
// https://dmlc.github.io/dlpack/latest/c_api.html

#pragma once

#include <stdint.h>

extern "C" {

typedef enum { kDLCPU = 1 } DLDeviceType;
typedef enum { kDLInt = 0, kDLFloat = 2, kDLBfloat = 4 } DLDataTypeCode;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;

}  // extern "C"
