// Norms, rotations and gates: their tokens spread over threads.

#include "layers/rows.h"

#include "core/levels.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr int64_t kPieceNumbers = 1 << 15;  // below two of these, waking a thread costs more

template <typename Fn>
void over_tokens(const Rows& x, int n_threads, const Fn& fn) {
  const int64_t numbers = std::max<int64_t>(1, x.n_rows * x.dim);
  const int64_t tokens = std::max<int64_t>(1, kPieceNumbers / numbers);
  const bool is_alone = x.n_tokens * numbers < 2 * kPieceNumbers;
  spread(x.n_tokens, tokens, 1, is_alone ? 1 : workers_for(n_threads), fn);
}

}  // namespace

void norm(const Rows& x, const void* weight, float eps, void* out, int64_t out_token_stride, int n_threads) {
  over_tokens(x, n_threads, [&](int64_t first, int64_t stop) {
    ops().rows->norm(x, weight, eps, out, out_token_stride, first, stop);
  });
}

void rotate(const Rows& x, const void* cos, const void* sin, int n_threads) {
  over_tokens(x, n_threads, [&](int64_t first, int64_t stop) { ops().rows->rotate(x, cos, sin, first, stop); });
}

void gate(const Rows& x, void* out, int n_threads) {
  over_tokens(x, n_threads, [&](int64_t first, int64_t stop) { ops().rows->gate(x, out, first, stop); });
}

}  // namespace kvcellar
