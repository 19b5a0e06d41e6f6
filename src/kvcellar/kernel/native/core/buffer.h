// Memory of one thread that stays for the next call.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace kvcellar {

class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  char* get(int64_t n_bytes) {
    if (n_bytes > size_) {
      std::free(data_);
      size_ = (n_bytes + n_bytes / 2 + 63) / 64 * 64;
      data_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size_)));
      if (!data_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvcellar
