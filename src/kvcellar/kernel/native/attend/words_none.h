// Where no level multiplies integer rows as words: they are decoded.

#pragma once

#include "attend/floats.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline bool fits_chunks(const Side&) { return false; }

struct Words {
  static constexpr bool has_k = false, has_v = false;
  Words(bool, bool, const Side&, const Side&, int64_t, int64_t, int64_t, const float*, float, char*) {}
  bool fetches_evenly(const TileRows&, int64_t) const { return false; }
  void logits(const TileRows&, int64_t, float*, float*, const Next&) {}
  bool is_finite(const TileRows&, int64_t) const { return true; }
  void prepare(const TileRows&, int64_t) {}
  void weigh(float*, const Maxima&, float*, int64_t, const Next&) {}
  void values(const TileRows&, int64_t, const Next&) {}
  void scale_results(int64_t, float) {}
  void finish(float*) {}
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
