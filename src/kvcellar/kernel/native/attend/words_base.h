// What products of integer rows as words of 16 bits have in common, whatever the vectors' length: where
// things lie in scratch, and what is done once for a row or a tile.
//
// Only included by attend/attention.h.

#pragma once

#include "attend/affine.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// The same pointer. The compiler then adds known distances to it, and keeps no pointer for each.
template <class T>
inline T* one_base(T* pointer) {
  __asm__("" : "+r"(pointer));
  return pointer;
}

template <bool value>
struct Flag {
  static constexpr bool of = value;
};

class WordsBase {
 public:
  const bool has_k, has_v;

  // Before `weigh`: what it needs of these V rows.
  void prepare(const TileRows& rows, int64_t n) {
    load_affine<kVAffine>(v_groups_, rows, n, v_affine_, middle(), largest_);
  }

  // Of earlier tiles, which weigh less now.
  void scale_results(int64_t r, float factor) {
    if (!has_v || factor == 1.f) return;
    for (int64_t d = 0; d < v_.dim; d += kLanes) store(result(r) + d, mul(load(result(r) + d), all(factor)));
    for (int64_t g = 0; g < v_groups_; ++g) {
      float* bias = biases_ + (r * v_groups_ + g) * 16;
      store(bias, mul(load(bias), all(factor)));
    }
  }

  // Whether a weight of 0 silences all of these V rows.
  bool is_finite(const TileRows& rows, int64_t n) const { return has_finite_affine(v_, rows, kVAffine, n); }

 protected:
  // `with_k`, `with_v`: only for sides that fit. `q`: rows of k_pad floats. Logits are multiplied
  // by `factor`. Rows of `n_gathered` cells may be gathered, words are made of `n_staged` at a time.
  WordsBase(bool with_k, bool with_v, const Side& k, const Side& v, int64_t rows, int64_t v_pad, float factor,
            int64_t n_gathered, int64_t n_staged, char* memory)
      : has_k(with_k),
        has_v(with_v),
        k_(k),
        v_(v),
        rows_(rows),
        quads_((rows + 3) / 4),
        k_groups_(groups(k)),
        v_groups_(groups(v)),
        v_pad_(v_pad),
        factor_(factor) {
    auto address = (reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64;
    const auto take = [&address](auto*& piece, int64_t n) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(address);
      address += static_cast<uintptr_t>((n * static_cast<int64_t>(sizeof *piece) + 63) / 64 * 64);
    };
    if (has_k || has_v) take(gathered_, n_gathered * (k.dim > v.dim ? k.dim : v.dim));
    if (has_k) {
      take(staged_, n_staged * k.dim);
      take(queries_, quads_ * 16 * k.dim);
      take(q_steps_, quads_ * 16);
      take(q_sums_, quads_ * 16 * (k.dim / 64) * subs(k));
      take(k_affine_, 2 * kTile * k_groups_);
      take(tops_, quads_ * 64);
    }
    if (has_v) {
      take(values_, kTile * 64);
      take(weights_, quads_ * 4 * v_groups_ * kTile);
      take(sums_, 32 * 16);
      take(v_affine_, 2 * kTile * v_groups_);
      take(steps_, quads_ * 4 * v_groups_);
      take(biases_, quads_ * 4 * v_groups_ * 16);
      take(results_, quads_ * 4 * v.dim);
      std::memset(results_, 0, 16 * quads_ * v.dim);
      std::memset(steps_, 0, 16 * quads_ * v_groups_);
      std::memset(biases_, 0, 64 * quads_ * 4 * v_groups_);
      std::memset(weights_, 0, 2 * quads_ * 4 * v_groups_ * kTile);
    }
  }

  // Groups of a chunk of 64 numbers.
  static int64_t subs(const Side& side) { return side.group_size == 32 ? 2 : 1; }

  // run(is_4, n_subs), which are known when this is compiled.
  template <class Run>
  static void with_kind(const Side& side, const Run& run) {
    const bool is_4 = side.dtype == Dtype::int4, is_halved = subs(side) == 2;
    is_4&& is_halved ? run(Flag<true>(), Number<2>())
    : is_4           ? run(Flag<true>(), Number<1>())
    : is_halved      ? run(Flag<false>(), Number<2>())
                     : run(Flag<false>(), Number<1>());
  }

  // The numbers' errors are those of the weights times how far they are from this one: it goes into the
  // biases, which meet weights that are not rounded.
  float middle() const { return v_.dtype == Dtype::int4 ? 8.f : 128.f; }

  // Of a row's weights, whose largest is `top`: what their words are counted in, for each group.
  void set_steps(int64_t r, float top) {
    for (int64_t i = 0; i < v_groups_; ++i) steps_[r * v_groups_ + i] = top / 32767.f * largest_[i];
  }

  // The weights' sums of biases, to acc[row]: behind the last tile.
  void add_biases(float* acc) const {
    for (int64_t i = 0; has_v && i < rows_ * v_groups_; ++i) {
      const int64_t r = i / v_groups_, g = i % v_groups_;
      const Vec bias = all(sum(load(biases_ + i * 16)));
      for (int64_t d = g * v_.group_size; d < (g + 1) * v_.group_size; d += kLanes) {
        float* to = acc + r * v_pad_ + d;
        store(to, add(load(to), bias));
      }
    }
  }

  // A number of each of 4 queries, each 4 times.
  static void put_fours(float* to, int64_t lane, float x) { _mm_storeu_ps(to + lane * 4, _mm_set1_ps(x)); }

  // A row's sums of all tiles, each chunk in the order of the products.
  float* result(int64_t r) const { return results_ + r * v_.dim; }

  const Side &k_, &v_;
  const int64_t rows_, quads_, k_groups_, v_groups_;
  const int64_t v_pad_;
  const float factor_;
  float largest_[kMaxGroups];  // scales of V in the tile, of each group
  char* gathered_ = nullptr;
  int16_t *staged_ = nullptr, *queries_ = nullptr, *values_ = nullptr, *weights_ = nullptr;
  int32_t* sums_ = nullptr;
  float *q_steps_ = nullptr, *q_sums_ = nullptr, *k_affine_ = nullptr, *tops_ = nullptr;
  float *v_affine_ = nullptr, *steps_ = nullptr, *biases_ = nullptr, *results_ = nullptr;
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
