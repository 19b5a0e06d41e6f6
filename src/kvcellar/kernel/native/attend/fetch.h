// What comes next is fetched from memory while a tile is attended.

#pragma once

#include "attend/tiles.h"
#include "core/levels.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// To the second cache: with 256 bits a tile is as large as the first one is there, and Zen 4 waits for fewer
// lines to its first cache than to the second. It reads bfloat16 in half the time so, but Zen 5 in a tenth more.
#if defined(KVC_AVX2)
constexpr bool is_fetched_far = true;
#elif !defined(KVC_BF16)
constexpr bool is_fetched_far = false;
#endif
// Of Intel's, float rows: few lines at a time come to the first cache there, too.
#if defined(KVC_AVX512) && !defined(KVC_BF16)
constexpr bool are_floats_far = true;
#else
constexpr bool are_floats_far = false;
#endif
template <bool is_far = false>
inline void fetch(const char* line) {
  if (is_far || is_fetched_far)
    __builtin_prefetch(line, 0, 2);
  else
    __builtin_prefetch(line, 0, 3);
  __asm__ volatile("");  // or a function that does nothing else would be taken for one without effect
}

// Some of the lines of memory that the next tile reads, for a loop to fetch one by one while it
// computes: four at once cost a tenth of the time from memory, and many would stop the core until
// they have come.
struct Lines {
  const char* at;
  int64_t second, third, fourth, step;
  int64_t left;  // how many

  // The i-th line from `at` on, where loops are unrolled and i is known. Each fourth one goes on.
  template <bool is_far = false>
  void one(int64_t i) {
    i %= 4;
    fetch<is_far>(at + (i == 1 ? second : i == 2 ? third : i == 3 ? fourth : 0));
    if (i == 3) at += step;
  }
  void four() {
    for (int64_t i = 0; i < 4; ++i) one(i);
  }
  // Whether they follow on each other and go to the first cache: then the i-th is `in_row(i)`, and where all
  // else is known as well, that is one instruction.
  bool is_in_row() const { return second == 64 && step == 256 && !is_fetched_far; }
  void in_row(int64_t i) const { __builtin_prefetch(at + i * 64, 0, 3); }
};

// The tile that comes next: while 16 cells are attended, as much of each of its parts is fetched as 16
// cells have. The hardware fetches ahead within a page: so it may not be these cells' rows, but lines of
// up to four pages, or of four blocks of cells, by turns. Not of pages where it does that for one line after
// the other (Zen 4 and 5: a tenth of the time of bfloat16, float32 in 1.4 ms, not 2.4).
class Next {
 public:
  // `longest`: how many cells a whole tile has.
  explicit Next(int64_t longest) : longest_(longest) {}
  int64_t longest() const { return longest_; }

  // `evenly`: whether the tile before fetches in all of its time. So it shall where pages come one after the
  // other.
  void start(const TileRows& rows, int64_t n, bool evenly = false) {
    rows_ = &rows;
    n_ = n;
    is_even_ = false;
    if (n && rows.pool != pool_) measure();
    cuts_ = nullptr;
    if (n != longest_) return;
    for (int64_t g = 0; g < n / 16; ++g)
      if (!rows.is_whole[g]) return;
    cuts_ = rows.is_run ? pages_ : blocks_;
    is_even_ = evenly && rows.is_run && pages_[kKRows].n_open == 1 && pages_[kVRows].n_open == 1 &&
               is_dense_[kKAffine] && is_dense_[kVAffine];
  }

  // Lines of a part for the g-th 16 cells, for a loop that fetches up to n, a multiple of 4; what is
  // more comes now. Where the loop fetches more, they are lines of the next cells.
  Lines sixteen(Part part, int64_t g, int64_t n) const {
    const Cut& cut = pages_[part];
    if (cuts_ != pages_ || cut.lines.left != n) return others(part, g, n);
    Lines lines = cut.lines;
    lines.at = rows_->first[part][0] + (g & cut.last_round) * cut.n_open * kPage + (g >> cut.shift) * cut.share;
    return lines;
  }

  // Of the i-th turn of a tile: each 16 cells have one for logits and, when all have had that, one for
  // values. K and V come alternately, so that more pages are read at a time.
  Lines turn(int64_t i, int64_t n) const { return sixteen(i % 2 ? kVRows : kKRows, i / 2, n); }
  Lines turn_of_values(int64_t i, int64_t n) const { return turn(longest_ / 16 + i, n); }
  // The same where K may come first.
  Lines turn_of_logits(int64_t i, int64_t n) const { return is_even_ ? sixteen(kKRows, i, n) : turn(i, n); }

  // Whether all of K comes while logits are made, and then V: all parts' lines follow on each other from these.
  bool is_even() const { return is_even_; }
  const char* first(Part part) const { return rows_->first[part][0]; }

  // Those of scales and biases, which are few.
  void affine(Part part, int64_t g) const {
    if (16 * g >= n_) return;
    if (is_dense_[part] && rows_->is_whole[g])
      for (int64_t i = 0; i < 16 * bytes_[part]; i += 64) fetch(rows_->first[part][g] + i);
    else
      rows(part, g, 0);
  }

  // All of it at once.
  void now() const {
    for (int64_t g = 0; 16 * g < n_; ++g) {
      for (const Part part : {kKRows, kVRows}) rows(part, g, 0);
      for (const Part part : {kKAffine, kVAffine}) affine(part, g);
    }
  }

  // For loops that have nothing to fetch: a line that is there.
  static Lines nothing() {
    static constexpr char there[64] = {};
    return {there, 0, 0, 0, 0, 0};
  }

 private:
  static constexpr int64_t kPage = 4096;

  // How a part of a whole tile is cut into pages, or blocks of 16 cells: `n_open` at a time, of which
  // 16 cells get `share` bytes each, and others in the next round.
  struct Cut {
    int64_t n_open;  // 0: not so, but 16 rows at a time
    int64_t last_round, shift, share;
    Lines lines;
  };

  static void set(Lines& lines, int64_t n_open, int64_t second, int64_t third, int64_t fourth) {
    lines.second = n_open == 1 ? 64 : second;
    lines.third = n_open == 1 ? 128 : n_open == 2 ? 64 : third;
    lines.fourth = n_open == 1 ? 192 : n_open == 2 ? second + 64 : fourth;
    lines.step = 256 / n_open;
  }

  // Of another pool than the last one.
  void measure() {
    pool_ = rows_->pool;
    const Side &k = pool_->k, &v = pool_->v;
    const int64_t bytes[4] = {k.packed_bytes(), v.packed_bytes(), k.affine_bytes(), v.affine_bytes()};
    for (int part = 0; part < 4; ++part) {
      bytes_[part] = bytes[part];
      is_dense_[part] = rows_->stride[part] == bytes[part];
    }
    for (const Part part : {kKRows, kVRows}) {
      for (Cut* cuts : {pages_, blocks_}) {
        Cut& cut = cuts[part];
        const int64_t n_pages = is_amd() ? 1 : bytes[part] * longest_ / kPage;
        const int64_t n = cuts == blocks_ ? longest_ / 16 : n_pages;
        cut.n_open = n >= 4 ? 4 : n;
        const int64_t rounds = n >= 4 ? n / 4 : 1;
        if (!is_dense_[part] || bytes[part] % 32 || n == 3 || (n > 4 && n % 4) || 8 % rounds) cut.n_open = 0;
        cut.lines.left = -1;
        if (!cut.n_open) continue;
        cut.last_round = rounds - 1;
        for (cut.shift = 0; 1 << cut.shift < rounds;) ++cut.shift;
        cut.share = bytes[part] * 16 / cut.n_open;
        cut.lines.left = bytes[part] / 4;
        set(cut.lines, cut.n_open, kPage, 2 * kPage, 3 * kPage);
      }
    }
  }

  // Where it is not whole pages, or not as many lines as the loop fetches.
  __attribute__((noinline)) Lines others(Part part, int64_t g, int64_t n) const {
    if (!cuts_ || !cuts_[part].n_open) return rows(part, g, n);
    const Cut& cut = cuts_[part];
    Lines lines = cut.lines;
    const int64_t first = (g & cut.last_round) * cut.n_open;
    const char* const* blocks = rows_->first[part];
    if (cuts_ == pages_) {
      lines.at = blocks[0] + first * kPage;
    } else {
      blocks += first;
      lines.at = blocks[0];
      const auto apart = [&](int64_t i) { return i < cut.n_open ? blocks[i] - lines.at : 0; };
      set(lines, cut.n_open, apart(1), apart(2), apart(3));
    }
    lines.at += (g >> cut.shift) * cut.share;
    for (; lines.left > n; lines.left -= 4) lines.four();
    return lines;
  }

  __attribute__((noinline)) Lines rows(Part part, int64_t g, int64_t n) const {
    if (16 * g >= n_) return nothing();
    const int64_t bytes = bytes_[part];
    if (is_dense_[part] && rows_->is_whole[g]) {
      Lines lines{rows_->first[part][g], 64, 128, 192, 256, (bytes * 16 + 255) / 256 * 4};
      for (; lines.left > n; lines.left -= 4) lines.four();
      return lines;
    }
    for (int64_t c = 16 * g; c < n_ && c < 16 * g + 16; ++c)
      for (int64_t i = 0; i < bytes; i += 64) fetch(rows_->row(part, c) + i);
    return nothing();
  }

  int64_t longest_;
  const TileRows* rows_ = nullptr;
  int64_t n_ = 0;
  const Cut* cuts_ = nullptr;  // of the tile: pages_, blocks_ or none
  bool is_even_ = false;
  const Pool* pool_ = nullptr;
  int64_t bytes_[4];  // of a row
  bool is_dense_[4];  // whether rows follow on each other
  Cut pages_[2], blocks_[2];
};

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
