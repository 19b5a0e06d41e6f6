// The kernel, once for each instruction set that includes it.
//
// A job is some query rows over some cells of one KV head. It goes through the cells in tiles of
// kTile at most: logits of all rows, online softmax, values. Rows whose layout has a direct loop are
// read where they lie; all others are decoded into scratch first, a tile at a time.

#include "isa.h"
#include "vector.h"
#include "ints.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Cells that are attended at a time, at most: each such tile has a start and an end. Twice as many take a
// twentieth less of int4's time on Zen 4, and with 256 bits a tenth more.
#if defined(KVC_AVX512) && defined(KVC_VNNI) && !defined(KVC_AMX)
constexpr int64_t kTile = kMaxTile;
#else
constexpr int64_t kTile = kMaxTile / 2;
#endif
constexpr int64_t kShortTile = 64;

// Where a tile's rows lie: K, V, and their scales and biases. 16 cells that follow on each other
// have one address, so that the core's first cache is left to what the addresses lead to.
enum Part { kKRows = 0, kVRows = 1, kKAffine = 2, kVAffine = 3 };

struct TileRows {
  const Pool* pool;  // whose rows they are: the job's, or its exact one
  bool is_run;       // whether all cells follow on each other
  bool is_whole[kTile / 16];
  int64_t stride[4];
  const char* first[4][kTile / 16];  // of 16 that are whole
  const char* at[4][kTile];          // of the others

  const char* row(Part part, int64_t c) const {
    return is_whole[c / 16] ? first[part][c / 16] + c % 16 * stride[part] : at[part][c];
  }
  // 16 addresses from cell c on, a multiple of 16; `room` is for those that are not listed.
  const char* const* sixteen(Part part, int64_t c, const char** room) const {
    if (!is_whole[c / 16]) return at[part] + c;
    const char* from = first[part][c / 16];
    const int64_t step = stride[part];
    for (int64_t i = 0; i < 16; ++i) room[i] = from + i * step;
    return room;
  }
  // The first of 16 rows from cell c on, a multiple of 16, that lie `step` bytes apart: in the pool,
  // or m of them copied to `room`.
  const char* together(Part part, int64_t c, int64_t m, int64_t n_bytes, char* room,
                       int64_t& step) const {
    step = is_whole[c / 16] ? stride[part] : n_bytes;
    if (is_whole[c / 16]) return first[part][c / 16];
    for (int64_t i = 0; i < m; ++i)
      std::memcpy(room + i * n_bytes, at[part][c + i], static_cast<size_t>(n_bytes));
    return room;
  }
};

// Logits of so many rows are sums in one vector.
constexpr int64_t kRowsAtOnce = kLanes / 4;

// Scratch of one worker, cut from one piece of memory.
struct Scratch {
  float *q, *fours, *q_pairs, *k, *v, *s, *acc, *max, *sum, *base, *factor, *most, *top, *tops;
  uint32_t* weights;  // of Pairs
  TileRows* rows;  // of three tiles
  char* gathered;  // rows of 16 cells
  char* extra;
};

inline Scratch cut(char* memory, int64_t rows, int64_t k_pad, int64_t v_pad) {
  Scratch s;
  float* at = reinterpret_cast<float*>(memory);
  auto take = [&at](int64_t n) {
    float* piece = at;
    at += (n + 15) / 16 * 16;
    return piece;
  };
  s.q = take(rows * k_pad);
  s.fours = take(rows * k_pad);
  s.k = take(16 * k_pad);
  s.gathered = reinterpret_cast<char*>(take(16 * (k_pad > v_pad ? k_pad : v_pad)));
  s.v = take(kTile * v_pad);  // kDecoded decoded, or a tile's as they are
  s.s = take(2 * rows * kTile);
  s.acc = take(rows * v_pad);
  s.max = take(rows);
  s.base = take(rows);
  s.factor = take(rows);
  s.most = take(rows);
  s.top = take(rows);
  s.sum = take(rows * kLanes);
  s.tops = take((rows + kLanes) * 4);
  s.q_pairs = take(rows * k_pad / 2);
  s.weights = reinterpret_cast<uint32_t*>(take(rows * kTile / 2));
  s.rows = reinterpret_cast<TileRows*>(at);
  s.extra = reinterpret_cast<char*>(s.rows + 3);
  return s;
}

// Numbers as float32 --------------------------------------------------------------------------

inline float load_one(const void* from, Dtype dtype, int64_t i) {
  if (dtype == Dtype::f32) return static_cast<const float*>(from)[i];
  const uint16_t bits = static_cast<const uint16_t*>(from)[i];
  return dtype == Dtype::bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

inline void load_row(const void* from, Dtype dtype, int64_t n, float* to) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(static_cast<const float*>(from) + i));
  } else if (dtype == Dtype::bf16) {
    for (; i + kLanes <= n; i += kLanes)
      store(to + i, load_bf16(static_cast<const uint16_t*>(from) + i));
  } else {
    for (; i + kLanes <= n; i += kLanes)
      store(to + i, load_half(static_cast<const uint16_t*>(from) + i));
  }
  for (; i < n; ++i) to[i] = load_one(from, dtype, i);
}

inline void store_row(void* to, Dtype dtype, int64_t n, const float* from) {
  int64_t i = 0;
  if (dtype == Dtype::f32) {
    for (; i + kLanes <= n; i += kLanes) store(static_cast<float*>(to) + i, load(from + i));
    for (; i < n; ++i) static_cast<float*>(to)[i] = from[i];
    return;
  }
  auto* half = static_cast<uint16_t*>(to);
  if (dtype == Dtype::bf16) {
    for (; i + kLanes <= n; i += kLanes) store_bf16(half + i, load(from + i));
    for (; i < n; ++i) half[i] = float_to_bf16(from[i]);
  } else {
    for (; i + kLanes <= n; i += kLanes) store_half(half + i, load(from + i));
    for (; i < n; ++i) half[i] = float_to_half(from[i]);
  }
}

// A stored row as float32, padded with zeros to `pad` numbers.
inline void decode_row(const Side& side, const char* row, const char* affine, int64_t pad,
                       float* to) {
  const int64_t dim = side.dim;
  if (!is_quantised(side.dtype)) {
    load_row(row, side.dtype, dim, to);
  } else {
    const auto* bytes = reinterpret_cast<const uint8_t*>(row);
    const auto* halves = reinterpret_cast<const uint16_t*>(affine);
    const int64_t group = side.group_size;
    for (int64_t g = 0; g * group < dim; ++g) {
      const float scale = half_to_float(halves[2 * g]), bias = half_to_float(halves[2 * g + 1]);
      int64_t i = g * group;
      const int64_t stop = i + group;
      if (side.dtype == Dtype::int8) {
        for (; i + kLanes <= stop; i += kLanes)
          store(to + i, fma(load_u8(bytes + i), all(scale), all(bias)));
        for (; i < stop; ++i) to[i] = static_cast<float>(bytes[i]) * scale + bias;
      } else {
        for (; i % 2 == 0 && i + kLanes <= stop; i += kLanes)
          store(to + i, fma(load_nibbles(bytes + i / 2), all(scale), all(bias)));
        for (; i < stop; ++i) {
          const uint8_t byte = bytes[i / 2];
          to[i] = static_cast<float>(i % 2 ? byte >> 4 : byte & 15) * scale + bias;
        }
      }
    }
  }
  for (int64_t i = dim; i < pad; ++i) to[i] = 0.f;
}

// Rows of bfloat16 are cheapest to read in the order of load_split: so they stay within each
// 2 * kLanes, and queries and results are put in that order instead.
inline bool is_split(const Side& side) {
#if defined(KVC_AMX)
  return false;
#endif
  return side.dtype == Dtype::bf16 && side.dim % (2 * kLanes) == 0 && side.dim == padded(side.dim);
}

// n rows `step` bytes apart, to rows of dim floats.
inline void split_rows(const char* rows, int64_t step, int64_t n, int64_t dim, float* to) {
  for (int64_t i = 0; i < n; ++i, rows += step, to += dim) {
    for (int64_t d = 0; d < dim; d += 2 * kLanes) {
      Vec even, odd;
      load_split(reinterpret_cast<const uint16_t*>(rows) + d, even, odd);
      store(to + d, even);
      store(to + d + kLanes, odd);
    }
  }
}

// Walking runs ----------------------------------------------------------------------------------

struct Walk {
  const Job& job;
  int64_t run, offset;

  explicit Walk(const Job& from) : job(from), run(from.run), offset(from.run_offset) {}

  // Addresses of up to n next cells of one pool; how many they are.
  int64_t next(int64_t n, TileRows& to) {
    const bool is_exact = job.runs[run].start >= kExactBase;
    const int64_t base = is_exact ? kExactBase : 0;
    look_at(is_exact ? *job.pool->exact : *job.pool);
    to.pool = pool_;
    std::memcpy(to.stride, strides_, sizeof strides_);
    const int64_t block_size = pool_->block_size;
    if (!block_size && job.runs[run].length - offset >= n) {
      one_run(job.runs[run].start - base + offset, n, to);
      advance(n);
      return n;
    }
    to.is_run = true;
    for (bool& is_whole : to.is_whole) is_whole = false;
    int64_t i = 0;
    while (i < n) {
      const CellRun& cells = job.runs[run];
      if ((cells.start >= kExactBase) != is_exact) break;
      int64_t cell = cells.start - base + offset;
      int64_t length = smaller(cells.length - offset, n - i);
      advance(length);
      while (length) {
        int64_t block = 0, inside = cell, piece = length;
        if (block_size) {
          block = cell / block_size;
          inside = cell - block * block_size;
          piece = smaller(length, block_size - inside);
        }
        to.is_run &= i == 0;
        const int64_t head = smaller(piece, -i & 15), tail = piece - (piece - head) % 16;
        for (int64_t j = head; j < tail; j += 16) to.is_whole[(i + j) / 16] = true;
        for (int part = 0; part < n_parts_; ++part) {
          if (!data_[part]) continue;
          const int64_t step = strides_[part];
          const char* from = data_[part] + block * block_strides_[part] + inside * step;
          const char** at = to.at[part] + i;
          const char** first = to.first[part] + (i + 15) / 16;
          int64_t j = 0;
          for (; j < head; ++j, from += step) at[j] = from;
          for (; j < tail; j += 16, from += 16 * step) *first++ = from;
          for (; j < piece; ++j, from += step) at[j] = from;
        }
        i += piece;
        cell += piece;
        length -= piece;
      }
    }
    return i;
  }

 private:
  void advance(int64_t n) {
    offset += n;
    if (offset < job.runs[run].length) return;
    ++run;
    offset = 0;
  }

  void look_at(const Pool& pool) {
    if (pool_ == &pool) return;
    pool_ = &pool;
    const Side &k = pool.k, &v = pool.v;
    data_[kKRows] = k.data + job.kv_head * k.head_stride;
    data_[kVRows] = v.data + job.kv_head * v.head_stride;
    data_[kKAffine] = k.affine ? k.affine + job.kv_head * k.affine_head_stride : nullptr;
    data_[kVAffine] = v.affine ? v.affine + job.kv_head * v.affine_head_stride : nullptr;
    strides_[kKRows] = k.cell_stride;
    strides_[kVRows] = v.cell_stride;
    strides_[kKAffine] = k.affine_cell_stride;
    strides_[kVAffine] = v.affine_cell_stride;
    block_strides_[kKRows] = k.block_stride;
    block_strides_[kVRows] = v.block_stride;
    block_strides_[kKAffine] = k.affine_block_stride;
    block_strides_[kVAffine] = v.affine_block_stride;
    n_parts_ = k.affine || v.affine ? 4 : 2;
  }

  // The same of cells that follow on each other, as most do.
  void one_run(int64_t cell, int64_t n, TileRows& to) const {
    to.is_run = true;
    const int64_t n_whole = n / 16;
    for (int64_t g = 0; g < kTile / 16; ++g) to.is_whole[g] = g < n_whole;
    for (int part = 0; part < n_parts_; ++part) {
      if (!data_[part]) continue;
      const int64_t step = strides_[part];
      const char* from = data_[part] + cell * step;
      // Of all, also behind the n-th: as many each time are a few vectors of addresses.
      for (int64_t g = 0; g < kTile / 16; ++g) to.first[part][g] = from + g * 16 * step;
      from += 16 * n_whole * step;
      for (int64_t i = 16 * n_whole; i < n; ++i, from += step) to.at[part][i] = from;
    }
  }

  const Pool* pool_ = nullptr;  // where the following lead to
  const char* data_[4];
  int64_t strides_[4], block_strides_[4];
  int n_parts_ = 0;
};

// To the second cache: with 256 bits a tile is as large as the first one is there, and Zen 4 waits for fewer
// lines to its first cache than to the second. It reads bfloat16 in half the time so, but Zen 5 in a tenth more.
#if defined(KVC_AVX2)
constexpr bool is_fetched_far = true;
#elif !defined(KVC_BF16)
constexpr bool is_fetched_far = false;
#endif
// Of Intel's that have no matrix unit, float rows: few lines at a time come to the first cache there, too.
#if defined(KVC_AVX512) && !defined(KVC_BF16) && !defined(KVC_AMX)
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
    lines.at = rows_->first[part][0] + (g & cut.last_round) * cut.n_open * kPage +
               (g >> cut.shift) * cut.share;
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
        if (!is_dense_[part] || bytes[part] % 32 || n == 3 || (n > 4 && n % 4) || 8 % rounds)
          cut.n_open = 0;
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

#if defined(KVC_AMX)
// Rows that the next turn reads, fetched a few at a time during this one: their addresses are known,
// a loop that computes for long between its loads leaves the memory idle, and many at once would
// stop the core until they have come.
struct Ahead {
  // `turns`: how often some will be asked for.
  void start(int64_t turns) {
    n_ = next_ = lines_ = n_streams_ = 0;
    turns_ = turns;
  }

  // K or V of the first `count` cells of `rows`.
  void add(const TileRows& rows, int64_t count, bool is_v) {
    if (!count) return;
    n_ = n_ < count ? count : n_;
    const Side& side = is_v ? rows.pool->v : rows.pool->k;
    add(rows, count, is_v ? kVRows : kKRows, side.packed_bytes());
  }

  // Behind the last `add`. Some lines at a time: one by one would cost more than it brings.
  void pace() {
    every_ = lines_ ? smaller(turns_, turns_ * 12 / lines_ + 1) : turns_;
    count_ = (n_ * every_ + turns_ - 1) / turns_;
    wait_ = 1;
  }

  void some() {
    if (--wait_ == 0) {
      wait_ = every_;
      fetch(count_);
    }
  }

  void rest() { fetch(n_); }

 private:
  // The rows of one part, as pieces of memory of which one line each is fetched in turns: the
  // hardware fetches ahead within a page, and so in several. Without pieces row by row.
  struct Stream {
    const TileRows* rows;
    int64_t n;
    Part part;
    int64_t bytes, n_pieces, lines;  // of a piece
    const char* pieces[kTile / 16];
    int64_t done, line;
  };

  void add(const TileRows& rows, int64_t count, Part part, int64_t bytes) {
    Stream& stream = streams_[n_streams_++];
    stream.rows = &rows;
    stream.n = count;
    stream.part = part;
    stream.bytes = bytes;
    stream.n_pieces = stream.done = stream.line = 0;
    const int64_t lines = (count * bytes + 63) / 64;
    lines_ += lines;
    if (rows.stride[part] != bytes) return;
    if (rows.is_run) {
      stream.n_pieces = lines < 128 ? 1 : smaller(lines / 64, kTile / 16);
      stream.lines = lines < 128 ? lines : 64;  // what is left over comes without
      for (int64_t i = 0; i < stream.n_pieces; ++i)
        stream.pieces[i] = rows.row(part, 0) + i * stream.lines * 64;
    } else if (count % 16 == 0) {
      for (int64_t i = 0; i < count / 16; ++i) {
        if (!rows.is_whole[i]) return;
        stream.pieces[i] = rows.first[part][i];
      }
      stream.n_pieces = count / 16;
      stream.lines = (16 * bytes + 63) / 64;
    }
  }

  __attribute__((noinline)) void fetch(int64_t count) {
    if (next_ >= n_) return;
    const int64_t first = next_;
    next_ += count;
    for (int i = 0; i < n_streams_; ++i) {
      Stream& stream = streams_[i];
      const int64_t last = smaller(next_, stream.n), n_pieces = stream.n_pieces;
      if (n_pieces) {
        const int64_t stop = (last * stream.bytes + 63) / 64;
        n_pieces == 1   ? lines<1>(stream, stop)
        : n_pieces == 2 ? lines<2>(stream, stop)
        : n_pieces == 4 ? lines<4>(stream, stop)
                        : lines<0>(stream, stop);
      } else {
        for (int64_t c = first; c < last; ++c) {
          const char* row = stream.rows->row(stream.part, c);
          for (int64_t j = 0; j < stream.bytes; j += 64) __builtin_prefetch(row + j, 0, 2);
        }
      }
    }
  }

  // The next lines of all pieces, until the stop-th of the stream is among them.
  template <int kPieces>
  static void lines(Stream& stream, int64_t stop) {
    const int64_t n_pieces = kPieces ? kPieces : stream.n_pieces;
    int64_t done = stream.done, line = stream.line;
    for (; done < stop && line < stream.lines; done += n_pieces, ++line) {
      for (int64_t j = 0; j < n_pieces; ++j) {
        __builtin_prefetch(stream.pieces[j] + line * 64, 0, 2);
      }
    }
    stream.done = done;
    stream.line = line;
  }

  Stream streams_[4];
  int n_streams_ = 0;
  int64_t n_ = 0, next_ = 0, lines_ = 0, turns_ = 1, every_ = 1, count_ = 1, wait_ = 1;
};

#endif

// Logits and values in float32 --------------------------------------------------------------------

// What a lane of 32 bits holds of a row, and how it is multiplied.
struct Singles {
  static constexpr int64_t kNumbers = 1;
  static Vec add_product(Vec x, Vec y, Vec a) { return fma(x, y, a); }
};
#if defined(KVC_BF16)
struct Pairs {
  static constexpr int64_t kNumbers = 2;
  static Vec add_product(Vec x, Vec y, Vec a) { return dot_bf16_pairs(x, y, a); }
};
#endif

// s[r][c] = q[r] . k[c] for kVecs * kRowsAtOnce rows and 16 cells, kCells at a time. A vector of the
// queries is 4 lanes of each of its rows, [vector][k_pad / 4][row][4]; those of a cell meet them
// all, and only 4 sums of each product are left to add up. Of pairs, logits are multiplied by `factor`.
// `tops`: the highest until now of each row, in 4 parts.
// `kPad`: k_pad, the lanes of a row, where it is known, else 0. `given`: for each lane half as many lines to
// fetch as it has numbers, where that is known.
template <class Lane, int kPad, int kVecs, int kCells>
inline void logits_of(const float* fours, int64_t any_pad, const float* k, float factor, float* s,
                      float* tops, const Lines& given) {
  Lines lines = given;
  const int64_t k_pad = kPad ? kPad : any_pad;
  for (int64_t c = 0; c < 16; c += kCells, k += kCells * k_pad) {
    Vec a[kVecs][kCells];
    for (auto& row : a)
      for (Vec& x : row) x = all(0.f);
    constexpr int64_t kStep = kPad ? 32 : 16;
    for (int64_t first = 0; first < k_pad; first += kStep) {
#pragma GCC unroll 8
      for (int64_t part = 0; part < kStep; part += 4) {
        const int64_t d = first + part;
        Vec x[kVecs];
        for (int i = 0; i < kVecs; ++i) x[i] = load(fours + (i * k_pad + d) * kRowsAtOnce);
        for (int j = 0; j < kCells; ++j) {
          const Vec y = all_fours(k + j * k_pad + d);
          for (int i = 0; i < kVecs; ++i) a[i][j] = Lane::add_product(x[i], y, a[i][j]);
        }
        constexpr int64_t kLines = Lane::kNumbers * kCells * 4;  // 32 for each line
        if (kPad && part / 4 * kLines % 32 == 0)
          for (int64_t i = 0; i < (kLines + 31) / 32; ++i)
            lines.one<are_floats_far>(part / 4 * kLines / 32 + i);
      }
    }
    for (int i = 0; i < kVecs; ++i) {
      Vec top = load(tops + i * kLanes);
      for (int j = 0; j < kCells; j += 4) {
        Vec sums = sum_fours(a[i][j], a[i][j + 1], a[i][j + 2], a[i][j + 3]);
        if constexpr (Lane::kNumbers == 2) sums = mul(sums, all(factor));
        top = max(top, sums);
        store_fours(sums, s + i * kRowsAtOnce * kTile + c + j, kTile);
      }
      store(tops + i * kLanes, top);
    }
  }
}

// As many sums as there are registers for.
#if defined(KVC_AVX512)
constexpr int kAlone = 16, kMostVecs = 4, kWide = 4;
#elif defined(KVC_NEON)
constexpr int kAlone = 8, kMostVecs = 4, kWide = 4;
#else
constexpr int kAlone = 8, kMostVecs = 2, kWide = 2;
#endif

// acc[r][0 .. n_vecs vectors) += s[r][c] * v[c], for 4 rows and n cells whose V rows lie `step` bytes
// apart; `read` gives a row's vectors. `given`: kFetched lines to fetch for each 8 cells.
template <int n_vecs, int kFetched, class Read>
inline void values_of_4(const float* s, const char* row, int64_t step, int64_t n, int64_t v_pad,
                        float* acc, Lines& given, const Read& read) {
  Lines lines = given;
  Vec a[4][n_vecs];
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < n_vecs; ++j) a[r][j] = load(acc + r * v_pad + j * kLanes);
  const auto add = [&](int64_t c) {
    Vec x[n_vecs];
    read(row, x);
    row += step;
    for (int r = 0; r < 4; ++r) {
      const Vec p = all(s[r * kTile + c]);
      for (int j = 0; j < n_vecs; ++j) a[r][j] = fma(p, x[j], a[r][j]);
    }
  };
  int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) {
      if (i * kFetched % 8 == 0)
        for (int64_t j = 0; j < (kFetched + 7) / 8; ++j) lines.one<are_floats_far>(i * kFetched / 8 + j);
      add(c + i);
    }
  }
  for (; c < n; ++c) add(c);
  given.at = lines.at;
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < n_vecs; ++j) store(acc + r * v_pad + j * kLanes, a[r][j]);
}

#if defined(KVC_BF16)
// The same of pairs: acc[r][0 .. kVecs vectors), for 4 rows and the n cells of a tile. Rows lie `steps`
// bytes apart from `at` on, 16 at a time. V rows of two cells come by turns; so do the results, like numbers
// of load_split. Weights are kTile / 2 pairs a row.
template <int kVecs, class Fetch>
inline void pairs_of_4(const uint32_t* weights, const char* const* at, const int64_t* steps,
                       int64_t n, int64_t v_pad, float* acc, const Fetch& fetch_16) {
  Vec a[4][kVecs];
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kVecs; ++j) a[r][j] = load(acc + r * v_pad + j * kLanes);
  for (int64_t c = 0; c < n; c += 16, weights += 8, ++at, ++steps) {
    Lines lines = fetch_16(c);
    const char* row = *at;
    const int64_t step = *steps;
    const auto add = [&](int64_t i, bool is_alone) __attribute__((always_inline)) {
      Vec x[kVecs];
      for (int j = 0; j < kVecs; j += 2)
        load_pairs(row + j * 32, is_alone ? nullptr : row + step + j * 32, x[j], x[j + 1]);
      row += 2 * step;
      for (int r = 0; r < 4; ++r) {
        const Vec p = all_pairs(weights + r * kTile / 2 + i);
        for (int j = 0; j < kVecs; ++j) a[r][j] = dot_bf16_pairs(p, x[j], a[r][j]);
      }
    };
    if (c + 16 <= n) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < 8; ++i) {
        lines.four();
        add(i, false);
      }
    } else {
      for (int64_t i = 0; 2 * i < n - c; ++i) add(i, 2 * i + 1 == n - c);
    }
  }
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kVecs; ++j) store(acc + r * v_pad + j * kLanes, a[r][j]);
}
#endif

// Of each row, when a tile's logits become weights: what is taken from them, what earlier weights are
// multiplied by, what the largest will be; the tile's highest logit.
struct Maxima {
  const float *base, *factor, *most, *top;
};

#if defined(KVC_AVX512) || defined(KVC_AVX2)  // with AMX too
}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
#if defined(KVC_AMX)
#include "amx.h"
#elif defined(KVC_AVX512)
#include "floats_512.h"
#include "words.h"
#else
#include "floats_256.h"
#include "words_256.h"
#endif
#if (defined(KVC_AVX512) && defined(KVC_VNNI) && !defined(KVC_AMX)) || defined(KVC_AVX2)
#define KVC_COLUMNS
#if defined(KVC_BF16)
#include "pairs.h"
#else
#include "columns.h"
#endif
#endif
namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {
#endif

// The job ---------------------------------------------------------------------------------------

enum class Seen { nothing, some, everything };

// Cells of a whole tile. What is fetched into a first cache shall not push out what is read, and comes best not
// long before it is: where reading is all that a few float rows wait for, 8 KB of them (Zen 5, a sequence of 4
// rows: bfloat16 in a tenth less than with 256 cells, float32 in a sixth).
inline int64_t longest_tile(const Pool& pool, int64_t rows) {
#if defined(KVC_BF16)
  const Dtype k = pool.k.dtype, v = pool.v.dtype;
  const auto is_light = [](Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f32; };
  if (!is_fetched_far && rows <= 4 && is_light(k) && is_light(v)) {
    int64_t n = kTile;
    while (n > 32 && n * (pool.k.packed_bytes() + pool.v.packed_bytes()) > 8192) n /= 2;
    return n;
  }
#else
  (void)rows;
  if (!is_quantised(pool.k.dtype) && !is_quantised(pool.v.dtype)) return smaller(kTile, kMaxTile / 2);
#endif
  return kTile;
}

// Whether rows see all cells, are many enough for products in lanes of rows, and their results are
// rounded to what makes the error of these unseen.
inline bool fits_columns(const Job& job) {
  const Side &k = job.pool->k, &v = job.pool->v;
  const int64_t rows = job.n_tokens * job.n_heads;
#if defined(KVC_BF16)
  if (job.layout->in != Dtype::bf16) return false;
#endif
  return k.dtype == Dtype::bf16 && v.dtype == Dtype::bf16 && job.layout->out == Dtype::bf16 &&
         k.dim == v.dim && (k.dim == 64 || k.dim == 128) && rows > 8 && rows <= 2 * kLanes &&
         job.kind == Kind::none && job.args->softcap <= 0.f && !job.pool->exact;
}

class Attention {
 public:
  // `has_halves`: see Columns.
  Attention(const Job& job, char* memory, bool has_halves)
      : job_(job),
        has_halves_(has_halves),
        k_(job.pool->k),
        v_(job.pool->v),
        rows_(job.n_tokens * job.n_heads),
        rows_pad_((rows_ + 3) / 4 * 4),
        k_pad_(padded(k_.dim)),
        v_pad_(padded(v_.dim)),
        is_k_split_(is_split(k_)),
        is_v_split_(is_split(v_)),
#if defined(KVC_AVX2)
        is_read_k_(fits_registers(*job.pool, k_, rows_)),
        is_read_v_(fits_registers(*job.pool, v_, rows_)),
#endif
        scratch_(cut(memory, rows_pad_, k_pad_, v_pad_)),
#if defined(KVC_BF16)
        has_k_pairs_(is_split(k_) && job.layout->in == Dtype::bf16),
        has_v_pairs_(is_split(v_) && job.layout->out == Dtype::bf16),
#endif
        next_(longest_tile(*job.pool, rows_)) {}

  void run() {
    if (job_.n_cells <= kFewCells && job_.kind == Kind::none && job_.args->softcap <= 0.f) return run_few();
#if defined(KVC_COLUMNS)
    if (fits_columns(job_) && run_columns()) return;
#endif
    const float softcap = job_.args->softcap;
    // Without a cap the softmax works in powers of two, and the factor is in the logits already.
    const float factor = softcap > 0.f ? job_.args->scale / softcap : job_.args->scale * kLog2e;
#if defined(KVC_AMX)
    load_queries(1.f);
    Matrix matrix(k_, v_, rows_, k_pad_, v_pad_, scratch_.q, factor, scratch_.extra);
    const int64_t longest = kShortTile;
#else
#if defined(KVC_AVX512) || defined(KVC_AVX2)
    const bool has_k = fits_chunks(k_), has_v = fits_chunks(v_);
    factor_ = factor;
#if defined(KVC_BF16)
    if (has_k_pairs_) load_query_pairs();
    if (!has_k_pairs_ || job_.pool->exact)
#endif
      load_queries(has_k ? 1.f : factor);
    Words words(has_k, has_v, k_, v_, rows_, k_pad_, v_pad_, scratch_.q, factor, scratch_.extra);
#else
    load_queries(factor);
#endif
    // Jobs are whole tiles: what lies in one is the same whatever else is attended, and so are the
    // bits of a row.
    static_assert(kRound % kTile == 0);
    const int64_t longest = next_.longest();
#endif
    for (int64_t r = 0; r < (rows_ + 15) / 16 * 16; ++r)
      scratch_.max[r] = scratch_.most[r] = kMinusInfinity;
    for (int64_t r = 0; r < rows_; ++r) {
      store(scratch_.sum + r * kLanes, all(0.f));
    }
    std::memset(scratch_.acc, 0, sizeof(float) * rows_pad_ * v_pad_);
    // Three tiles at a time: one is attended, of the next the logits are made meanwhile if the matrix
    // unit makes them, and what is behind is fetched.
    Walk walk(job_);
    int64_t left = job_.n_cells;
    const auto take = [&](TileRows& rows) {
      const int64_t n = left ? walk.next(smaller(longest, left), rows) : 0;
      left -= n;
      return n;
    };
    Walk following(job_.following ? *job_.following : job_);
    int64_t following_left = following.job.n_cells;
    TileRows *rows = scratch_.rows, *next = rows + 1, *third = next + 1;
    int64_t n = take(*rows), n_next = take(*next), n_third = 0;
    s_ = scratch_.s;
    float* next_s = s_ + rows_pad_ * kTile;
#if defined(KVC_AMX)
    matrix.stage(*rows, n);
    matrix.multiply(ahead_);
    matrix.logits(s_, ahead_);
#endif
    for (int64_t first = job_.first_cell; n; first += n, n = n_next, n_next = n_third) {
      n_third = take(*third);
#if defined(KVC_AMX)
      ahead_.start((n + 31) / 32 * (12 + rows_));
      ahead_.add(*third, n_third, false);
      ahead_.add(*next, n_next, true);
      const bool has_room = !n_third;
#else
      // Of a last tile with a few cells, as what was just written is, all comes now: while it is attended there
      // is no time to fetch a whole one.
      const bool is_short = n_next && 8 * n_next <= longest, has_room = !n_third && (!n_next || is_short);
#endif
#if defined(KVC_AVX512) && !defined(KVC_AMX)
      const bool evenly = words.fetches_evenly(*rows, n);
#else
      constexpr bool evenly = false;
#endif
      next_.start(*next, n_next, evenly);
      if (has_room && job_.following && following_left) {  // its first tiles, in the free room
        const int64_t n_following = following.next(smaller(longest, following_left), *third);
#if defined(KVC_AMX)
        following_left -= n_following;
        ahead_.add(*third, n_following, false);
        ahead_.add(*third, n_following, true);
#else
        if (is_short) next_.now();
        next_.start(*third, n_following, evenly);
        following_left = 0;
#endif
      }
#if defined(KVC_AMX)
      ahead_.pace();
#endif
      const Seen seen = what_is_seen(first, n);
      clear_tops();
      // Whether `tops` will say which logits are the highest: of whole blocks of cells, as they come.
      has_tops_ = n % 32 == 0 && seen == Seen::everything && job_.args->softcap <= 0.f;
#if defined(KVC_AMX)
      has_tops_ = false;
      if (n_next) matrix.stage(*next, n_next);
#elif defined(KVC_AVX512) || defined(KVC_AVX2)
      const bool is_main = rows->pool == job_.pool;
      if (seen != Seen::nothing && words.has_k && is_main) {
        words.logits(*rows, n, s_, scratch_.tops, next_);
      } else if (seen != Seen::nothing) {
        logits(*rows, n);
        if (words.has_k) multiply_logits(n, factor);
        has_tops_ &= !words.has_k;
      }
#else
      if (seen != Seen::nothing) logits(*rows, n);
#endif
      if (job_.args->softcap > 0.f) cap(n);
      if (seen == Seen::some) hide(first, n);
#if defined(KVC_AMX)
      matrix.settle(scratch_.acc);
      const bool by_matrix = seen == Seen::everything || (seen == Seen::some && matrix.is_finite(*rows, n));
      if (by_matrix)
        softmax(n, 64, [&](int64_t r, const float* s, float base, float, float) {
          return matrix.weigh(r, s, base, n, ahead_);
        });
      if (n_next) matrix.multiply(ahead_);
      if (by_matrix) matrix.interleave(*rows, n, ahead_);
      if (by_matrix) next_s = s_;  // its logits are weights by now, and elsewhere
      if (n_next) matrix.logits(next_s, ahead_);
      if (by_matrix) matrix.sum_values(n, scratch_.acc, ahead_);
      const bool is_done = by_matrix || seen == Seen::nothing;
#elif defined(KVC_AVX512) || defined(KVC_AVX2)
      const bool by_words = words.has_v && is_main && seen != Seen::nothing &&
                            (seen == Seen::everything || words.is_finite(*rows, n));
      if (by_words) {
#if defined(KVC_AVX512)
        const Maxima maxima = start_softmax(n, 32);  // one step waits for the other: so meanwhile
        words.prepare(*rows, n);
        words.weigh(s_, maxima, scratch_.sum, n, next_);
#else
        words.prepare(*rows, n);
        softmax(n, 32, [&](int64_t r, const float* s, float base, float factor, float top) {
          return words.weigh(r, s, base, factor, top, n);
        });
#endif
        words.values(*rows, n, next_);
      }
      const bool is_done = by_words || seen == Seen::nothing;
#else
      const bool is_done = seen == Seen::nothing;
#endif
#if defined(KVC_BF16)
      const bool by_pairs = has_v_pairs_ && is_main && seen == Seen::everything;
      if (by_pairs) {
        softmax(n, 2 * kLanes, [&](int64_t r, const float* s, float base, float, float) {
          uint32_t* to = scratch_.weights + r * kTile / 2;
          Vec total = all(0.f);
          for (int64_t c = 0; c < n; c += 2 * kLanes) {
            const Vec p = exp2_below_1(sub(load(s + c), all(base)));
            const Vec q = exp2_below_1(sub(load(s + c + kLanes), all(base)));
            total = store_pairs(to + c / 2, p, q, total);
          }
          return total;
        });
        values_of_pairs(*rows, n);
      }
#else
      constexpr bool by_pairs = false;
#endif
      if (!is_done && !by_pairs) {
        softmax(n, kLanes, [&](int64_t r, float* s, float base, float factor, float) {
#if (defined(KVC_AVX512) && !defined(KVC_AMX)) || defined(KVC_AVX2)
          words.scale_results(r, factor);
#else
          static_cast<void>(r), static_cast<void>(factor);
#endif
          Vec total = all(0.f);
          for (int64_t c = 0; c < n; c += kLanes) {
            const Vec p = exp2_below_1(sub(load(s + c), all(base)));
            store(s + c, p);
            total = add(total, p);
          }
          return total;
        });
        values(*rows, first, n, seen);
      }
#if defined(KVC_AMX)
      ahead_.rest();
#endif
      TileRows* const done = rows;
      rows = next;
      next = third;
      third = done;
      s_ = next_s;
      next_s = s_ == scratch_.s ? s_ + rows_pad_ * kTile : scratch_.s;
    }
#if defined(KVC_AMX)
    matrix.settle(scratch_.acc);
#elif defined(KVC_AVX512) || defined(KVC_AVX2)
    words.finish(scratch_.acc);
#endif
    finish(is_v_split_);
  }

 private:
  // Cells for which making operands takes longer than what they are for, as a branch's own one.
  static constexpr int64_t kFewCells = 4;

  void run_few() {
    load_queries(job_.args->scale * kLog2e);
    float *logits = scratch_.s, *values = scratch_.v;
    Walk walk(job_);
    TileRows& rows = *scratch_.rows;
    for (int64_t first = 0, n; first < job_.n_cells; first += n) {
      n = walk.next(job_.n_cells - first, rows);
      const Side &k = rows.pool->k, &v = rows.pool->v;
      for (int64_t c = 0; c < n; ++c) {
        decode_row(k, rows.row(kKRows, c), k.affine ? rows.row(kKAffine, c) : nullptr, k_pad_, scratch_.k);
        decode_row(v, rows.row(kVRows, c), v.affine ? rows.row(kVAffine, c) : nullptr, v_pad_,
                   values + (first + c) * v_pad_);
        for (int64_t r = 0; r < rows_; ++r) {
          Vec products = all(0.f);
          for (int64_t d = 0; d < k_pad_; d += kLanes)
            products = fma(load(scratch_.q + r * k_pad_ + d), load(scratch_.k + d), products);
          logits[r * kFewCells + first + c] = sum(products);
        }
      }
    }
    for (int64_t r = 0; r < rows_; ++r) {
      float* of_row = logits + r * kFewCells;
      float top = kMinusInfinity, total = 0.f;
      for (int64_t c = 0; c < job_.n_cells; ++c) top = of_row[c] > top ? of_row[c] : top;
      const float base = top == kMinusInfinity ? 0.f : top;
      for (int64_t c = 0; c < job_.n_cells; ++c) {
        const float below = of_row[c] - base;  // NaN of two infinite ones
        total += of_row[c] = below == 0.f ? 1.f : exp2_or_0(below);
      }
      scratch_.max[r] = top;
      store(scratch_.sum + r * kLanes, all(0.f));
      scratch_.sum[r * kLanes] = total;
      for (int64_t d = 0; d < v_pad_; d += kLanes) {
        Vec y = mul(all(of_row[0]), load(values + d));
        for (int64_t c = 1; c < job_.n_cells; ++c) y = fma(all(of_row[c]), load(values + c * v_pad_ + d), y);
        store(scratch_.acc + r * v_pad_ + d, y);
      }
    }
    finish(false);
  }

#if defined(KVC_COLUMNS)
  // False if they cannot: nothing has happened then.
  bool run_columns() {
#if defined(KVC_AVX512)
    if (rows_ <= kLanes) return k_.dim == 64 ? run_columns<64, 1>() : run_columns<128, 1>();
#endif
    return k_.dim == 64 ? run_columns<64, 2>() : run_columns<128, 2>();
  }
  template <int kDim, int kVecs>
  bool run_columns() {
#if defined(KVC_HALVES)
    if (has_halves_) return run_columns<kDim, kVecs, true>();
#endif
    return run_columns<kDim, kVecs, false>();
  }
  template <int kDim, int kVecs, bool kHalves>
  bool run_columns() {
    const float factor = job_.args->scale * kLog2e;
#if defined(KVC_BF16)
    load_query_pairs();
    Columns<kDim, kVecs> columns(rows_, scratch_.q_pairs, factor, scratch_.extra);
#else
    load_queries(1.f);
    Columns<kDim, kVecs, kHalves> columns(rows_, scratch_.q, k_pad_, factor, scratch_.extra);
#endif
    if (!columns.is_finite()) return false;
    Walk walk(job_);
    const int64_t longest = next_.longest();
    int64_t left = job_.n_cells;
    const auto take = [longest](Walk& from, int64_t& left, TileRows& rows) {
      const int64_t n = left ? from.next(smaller(longest, left), rows) : 0;
      left -= n;
      return n;
    };
    TileRows *rows = scratch_.rows, *next = rows + 1;
    for (int64_t n = take(walk, left, *rows); n;) {
      const int64_t n_next = take(walk, left, *next);
      next_.start(*next, n_next);
      if (!n_next && job_.following) {
        Walk following(*job_.following);
        int64_t following_left = job_.following->n_cells;
        next_.start(*next, take(following, following_left, *next));
      }
      for (int64_t c = 0; c < n; c += columns.kCells)
        if (!columns.attend(*rows, c, smaller(n - c, columns.kCells), next_)) return false;
      TileRows* const done = rows;
      rows = next;
      next = done;
      n = n_next;
    }
    columns.finish(rows_, v_pad_, scratch_.max, scratch_.sum, scratch_.acc);
#if defined(KVC_BF16)
    finish(is_v_split_);
#else
    finish(false);
#endif
    return true;
  }
#endif

  // run(row, token, head) for each row: its token in the batch, and the query head.
  template <class Run>
  void for_rows(const Run& run) const {
    const int64_t group = job_.layout->n_heads / job_.pool->n_kv_heads;
    const int64_t first = job_.kv_head * group + job_.first_head;
    for (int64_t t = 0, row = 0; t < job_.n_tokens; ++t)
      for (int64_t h = 0; h < job_.n_heads; ++h, ++row) run(row, job_.tokens[job_.first_token + t], first + h);
  }
  int64_t token_index(int64_t row) const { return job_.first_token + row / job_.n_heads; }

  void load_queries(float factor) {
    const Layout& layout = *job_.layout;
    const int64_t size = layout.in == Dtype::f32 ? 4 : 2;
    for_rows([&](int64_t r, int64_t token, int64_t head) {
      float* q = scratch_.q + r * k_pad_;
      const int64_t at = head * layout.q.head + token * layout.q.token;
      load_row(static_cast<const char*>(job_.args->q) + at * size, layout.in, k_.dim, q);
      for (int64_t d = 0; d < k_.dim; ++d) q[d] *= factor;
      for (int64_t d = k_.dim; d < k_pad_; ++d) q[d] = 0.f;
    });
    for (int64_t r = rows_; r < rows_pad_; ++r)
      std::memset(scratch_.q + r * k_pad_, 0, sizeof(float) * k_pad_);
  }

#if defined(KVC_BF16)
  // The same of bfloat16 as they are, in the order of `logits_of`.
  void load_query_pairs() {
    const Strides& strides = job_.layout->q;
    const auto place = [&](int64_t r) { return scratch_.q_pairs + r / 4 * 2 * k_.dim + r % 4 * 4; };
    for_rows([&](int64_t r, int64_t token, int64_t head) {
      const auto* from = static_cast<const uint16_t*>(job_.args->q) + head * strides.head + token * strides.token;
      float* to = place(r);
      for (int64_t d = 0; d < k_.dim; d += 8) std::memcpy(to + 2 * d, from + d, 16);
    });
    for (int64_t r = rows_; r < rows_pad_; ++r)
      for (int64_t d = 0; d < k_.dim; d += 8) std::memset(place(r) + 2 * d, 0, 16);
  }
#endif

  // Before a tile's logits.
  void clear_tops() {
    const int64_t n_rows = (rows_ + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = 0; i < 4 * n_rows; i += kLanes) store(scratch_.tops + i, all(kMinusInfinity));
  }

  // The queries as `logits_of` reads them, when it first does.
  void order_queries() {
    if (has_fours_) return;
    has_fours_ = true;
    for (int64_t r = 0; r < rows_pad_; ++r) {
      float* q = scratch_.q + r * k_pad_;
      if (is_k_split_) split_floats(q, k_.dim, false);
#if defined(KVC_AVX2)
      if (is_read_k_) {
        float* to = scratch_.fours + r / 4 * 4 * k_pad_;
        for (int64_t d = 0; d < k_pad_; d += 4)
          std::memcpy(to + place_of_four(k_.dtype, r % 4, d), q + d, 4 * sizeof(float));
        continue;
      }
#endif
      float* to = scratch_.fours + r / kRowsAtOnce * kRowsAtOnce * k_pad_ + r % kRowsAtOnce * 4;
      for (int64_t d = 0; d < k_pad_; d += 4)
        std::memcpy(to + d * kRowsAtOnce, q + d, 4 * sizeof(float));
    }
  }

  // How many of the list's cells, from the first on, a token may see (causal), by its index.
  int64_t seen_until(int64_t token) const { return job_.n_free + token + 1; }

  const uint8_t* mask_row(int64_t token) const {
    return job_.mask + token * (job_.list_cells - job_.n_free);
  }

  Seen what_is_seen(int64_t first, int64_t n) const {
    if (job_.kind == Kind::none || first + n <= job_.n_free) return Seen::everything;
    const int64_t last_token = job_.first_token + job_.n_tokens - 1;
    if (job_.kind == Kind::causal) {
      if (first + n <= seen_until(job_.first_token)) return Seen::everything;
      return first < seen_until(last_token) ? Seen::some : Seen::nothing;
    }
    bool any = first < job_.n_free, every = true;
    const int64_t from = first < job_.n_free ? job_.n_free : first;
    for (int64_t t = job_.first_token; t <= last_token; ++t) {
      const uint8_t* mask = mask_row(t) - job_.n_free;
      for (int64_t c = from; c < first + n; ++c) {
        any |= mask[c] != 0;
        every &= mask[c] != 0;
      }
    }
    return every ? Seen::everything : any ? Seen::some : Seen::nothing;
  }

  bool is_seen(int64_t token, int64_t cell) const {
    if (cell < job_.n_free) return true;
    if (job_.kind == Kind::causal) return cell < seen_until(token);
    return mask_row(token)[cell - job_.n_free] != 0;
  }

  // Rows from cell c on, of 16 cells or those up to the n-th, as padded float32: where they lie, if
  // they are that already, or at `to`.
  const float* as_floats(const TileRows& rows, bool is_v, int64_t c, int64_t n, float* to) {
    const Side& side = is_v ? rows.pool->v : rows.pool->k;
    const bool is_split = is_v ? is_v_split_ : is_k_split_;
    const int64_t pad = is_v ? v_pad_ : k_pad_, m = smaller(n - c, 16);
    int64_t step;
    const char* row = rows.together(is_v ? kVRows : kKRows, c, m, side.packed_bytes(),
                                    scratch_.gathered, step);
    if (side.dtype == Dtype::f32 && !is_split && step == 4 * pad)
      return reinterpret_cast<const float*>(row);
    if (is_split && side.dtype == Dtype::bf16) {
      split_rows(row, step, m, pad, to);
      return to;
    }
    const char* affine = nullptr;
    for (int64_t i = 0; i < m; ++i, row += step) {
      if (side.affine) affine = rows.row(is_v ? kVAffine : kKAffine, c + i);
      decode_row(side, row, affine, pad, to + i * pad);
      if (is_split) split_floats(to + i * pad, side.dim, false);
    }
    return to;
  }

  void logits(const TileRows& rows, int64_t n) {
#if defined(KVC_BF16)
    if (has_k_pairs_ && rows.pool == job_.pool) {
      logits_of_pairs(rows, n);
      return;
    }
#endif
    order_queries();
#if defined(KVC_AVX2)
    if (is_read_k_) {
      logits_of_few(rows, n);
      return;
    }
#elif defined(KVC_AVX512) && !defined(KVC_AMX)
    if (rows.pool == job_.pool && is_decoded_ahead(*rows.pool, rows_)) {
      logits_of_few(rows, n);
      return;
    }
#endif
    for (int64_t c = 0; c < n; c += 16) {
      const float* k = as_floats(rows, false, c, n, scratch_.k);
      if (rows.pool->k.affine) next_.affine(kKAffine, c / 16);
      k_pad_ == 64    ? logits_of_16<Singles, 64>(scratch_.fours, k_pad_, k, c)
      : k_pad_ == 128 ? logits_of_16<Singles, 128>(scratch_.fours, k_pad_, k, c)
                      : logits_of_16<Singles, 0>(scratch_.fours, k_pad_, k, c);
    }
  }

#if defined(KVC_BF16)
  void logits_of_pairs(const TileRows& rows, int64_t n) {
    const float* queries = scratch_.q_pairs;
    const int64_t n_bytes = k_.packed_bytes(), pad = k_.dim / 2;
    for (int64_t c = 0; c < n; c += 16) {
      int64_t step;
      const char* row =
          rows.together(kKRows, c, smaller(n - c, 16), n_bytes, scratch_.gathered, step);
      if (step != n_bytes) {
        for (int64_t i = 0; i < 16; ++i)
          std::memcpy(scratch_.gathered + i * n_bytes, row + i * step, static_cast<size_t>(n_bytes));
        row = scratch_.gathered;
      }
      const auto* k = reinterpret_cast<const float*>(row);
      pad == 32   ? logits_of_16<Pairs, 32>(queries, pad, k, c)
      : pad == 64 ? logits_of_16<Pairs, 64>(queries, pad, k, c)
                  : logits_of_16<Pairs, 0>(queries, pad, k, c);
    }
  }

  void values_of_pairs(const TileRows& rows, int64_t n) const {
    const char* at[kTile / 16];
    int64_t steps[kTile / 16];
    const int64_t n_bytes = v_.packed_bytes();
    for (int64_t c = 0; c < n; c += 16)
      at[c / 16] = rows.together(kVRows, c, smaller(n - c, 16), n_bytes,
                                 reinterpret_cast<char*>(scratch_.v) + c * n_bytes, steps[c / 16]);
    for (int64_t r = 0; r < rows_pad_; r += 4) {
      const uint32_t* weights = scratch_.weights + r * kTile / 2;
      int64_t d = 0;
      const auto part = [&](auto n_vecs) {
        constexpr int kVecs = decltype(n_vecs)::of;
        pairs_of_4<kVecs>(weights, at, steps, n, v_pad_, scratch_.acc + r * v_pad_ + d, [&](int64_t c) {
          return r || d ? Next::nothing() : next_.turn_of_values(c / 16, 32);
        });
        d += kVecs * kLanes;
        for (int64_t i = 0; i < n; i += 16) at[i / 16] += kVecs * kLanes * 2;
      };
      while (d + 4 * kLanes <= v_pad_) part(Number<4>());
      if (d < v_pad_) part(Number<2>());
      for (int64_t i = 0; i < n; i += 16) at[i / 16] -= d * 2;
    }
  }
#endif

  // All rows' logits of 16 cells.
  template <class Lane, int kPad>
  void logits_of_16(const float* queries, int64_t k_pad, const float* k, int64_t c) const {
    Lines lines = next_.turn(c / 16, kPad / 2 * Lane::kNumbers);
    const auto part = [&](auto n_vecs, auto n_cells, int64_t row) {
      constexpr int kVecs = decltype(n_vecs)::of, kCells = decltype(n_cells)::of;
      logits_of<Lane, kPad, kVecs, kCells>(queries + row * k_pad, k_pad, k, factor_,
                                           s_ + row * kTile + c, scratch_.tops + 4 * row, lines);
      lines = Next::nothing();
      return kVecs * kRowsAtOnce;
    };
    int64_t r = 0;
    while (r + kMostVecs * kRowsAtOnce <= rows_pad_)
      r += part(Number<kMostVecs>(), Number<4>(), r);
    if (kMostVecs > 2 && r + 2 * kRowsAtOnce <= rows_pad_)
      r += part(Number<2>(), Number<kAlone / 2>(), r);
    while (r < rows_pad_) r += part(Number<1>(), Number<kAlone>(), r);
  }

#if defined(KVC_AVX2)
  // The same of K rows that are read once.
  void logits_of_few(const TileRows& rows, int64_t n) const {
    const auto of_16 = [&](auto dtype, auto pad, int64_t c) {
      constexpr auto kDtype = static_cast<Dtype>(decltype(dtype)::of);
      constexpr int kPad = decltype(pad)::of;
      int64_t step;
      const char* row = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(),
                                      scratch_.gathered, step);
      const Lines lines = next_.turn(c / 16, kPad / 2 * lines_of_32(kDtype));
      logits_of_rows<kDtype, kPad, true>(scratch_.fours, k_pad_, row, step, s_ + c, scratch_.tops, lines);
      for (int64_t r = 4; r < rows_pad_; r += 4)
        logits_of_rows<kDtype, kPad, false>(scratch_.fours + r * k_pad_, k_pad_, row, step, s_ + r * kTile + c,
                                            scratch_.tops + 4 * r, Next::nothing());
    };
    with_float(k_.dtype, [&](auto dtype) {
      for (int64_t c = 0; c < n; c += 16)
        k_pad_ == 64    ? of_16(dtype, Number<64>(), c)
        : k_pad_ == 128 ? of_16(dtype, Number<128>(), c)
                        : of_16(dtype, Number<0>(), c);
    });
  }

  void values_of_few(const TileRows& rows, int64_t n) const {
    const char* at[kTile / 16];
    int64_t steps[kTile / 16];
    const int64_t n_bytes = v_.packed_bytes();
    for (int64_t c = 0; c < n; c += 16)
      at[c / 16] = rows.together(kVRows, c, smaller(n - c, 16), n_bytes,
                                 reinterpret_cast<char*>(scratch_.v) + c * n_bytes, steps[c / 16]);
    with_float(v_.dtype, [&](auto dtype) {
      constexpr auto kDtype = static_cast<Dtype>(decltype(dtype)::of);
      values_of_rows<kDtype, true>(s_, at, steps, n, v_pad_, scratch_.acc, next_);
      for (int64_t r = 4; r < rows_pad_; r += 4)
        values_of_rows<kDtype, false>(s_ + r * kTile, at, steps, n, v_pad_, scratch_.acc + r * v_pad_,
                                      next_);
    });
  }
#endif

#if defined(KVC_AVX512) && !defined(KVC_AMX)
  // The same of few rows, while K of the next cells is decoded.
  void logits_of_few(const TileRows& rows, int64_t n) const {
    const auto of_type = [&](auto is_half, auto n_vecs) {
      constexpr Dtype kDtype = decltype(is_half)::of ? Dtype::f16 : Dtype::bf16;
      constexpr int kVecs = decltype(n_vecs)::of;
      k_pad_ == 64    ? logits_of_few<kDtype, 64, kVecs>(rows, n)
      : k_pad_ == 128 ? logits_of_few<kDtype, 128, kVecs>(rows, n)
                      : logits_of_few<kDtype, 0, kVecs>(rows, n);
    };
    const auto of_rows = [&](auto is_half) {
      rows_pad_ == kRowsAtOnce ? of_type(is_half, Number<1>()) : of_type(is_half, Number<2>());
    };
    k_.dtype == Dtype::f16 ? of_rows(Number<1>()) : of_rows(Number<0>());
  }

  template <Dtype dtype, int kPad, int kVecs>
  void logits_of_few(const TileRows& rows, int64_t n) const {
    float *now = scratch_.k, *then = now + kAhead * k_pad_;
    const char* row;
    int64_t step;
    const auto take = [&](int64_t c) {
      row = rows.together(kKRows, c, smaller(n - c, 16), k_.packed_bytes(), scratch_.gathered, step);
    };
    take(0);
    for (int64_t c = 0; c < kAhead; ++c)
      for (int64_t d = 0; d < k_pad_; d += 2 * kLanes) decode_two<dtype>(row + c * step + 2 * d, now + c * k_pad_ + d);
    Lines lines = Next::nothing();
    for (int64_t c = 0; c < n; c += kAhead) {
      const bool is_second = c % 16;
      if (!is_second) lines = next_.turn(c / 16, kPad / 2);
      if (is_second && c + kAhead < n) take(c + kAhead);  // behind the last ones these come once more
      logits_of_8<dtype, kPad, kVecs>(scratch_.fours, k_pad_, now, then, is_second ? row : row + kAhead * step, step,
                                      s_ + c, scratch_.tops, lines);
      float* const done = now;
      now = then;
      then = done;
    }
  }
#endif

#if defined(KVC_AVX512) || defined(KVC_AVX2)
  // Queries for products of another kind come without the factor.
  void multiply_logits(int64_t n, float factor) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < n; ++c) s_[r * kTile + c] *= factor;
  }
#endif

  // softcap * tanh(x), in powers of two: tanh(x) = 1 - 2 / (exp(2x) + 1), odd.
  void cap(int64_t n) {
    const float softcap = job_.args->softcap * kLog2e;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      for (int64_t c = 0; c < n; ++c) s[c] = softcap * __builtin_tanhf(s[c]);
    }
  }

  void hide(int64_t first, int64_t n) {
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      const int64_t token = token_index(r);
      for (int64_t c = 0; c < n; ++c)
        if (!is_seen(token, first + c)) s[c] = kMinusInfinity;
    }
  }

  // Logits up to a multiple of `multiple` become weights: `weigh` is given a row, its logits, what
  // to take from each, what earlier weights are multiplied by and what the largest will be, and
  // gives their sums.
  template <class Weigh>
  void softmax(int64_t n, int64_t multiple, const Weigh& weigh) {
    const auto [base, factor, most, top] = start_softmax(n, multiple);
    for (int64_t r = 0; r < rows_; ++r) {
      float* sums = scratch_.sum + r * kLanes;
      const Vec total = weigh(r, s_ + r * kTile, base[r], factor[r], most[r]);
      store(sums, fma(load(sums), all(factor[r]), total));
    }
  }

  // What it begins with.
  Maxima start_softmax(int64_t n, int64_t multiple) {
    const int64_t wide = (n + multiple - 1) / multiple * multiple;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = s_ + r * kTile;
      for (int64_t c = n; c < wide; ++c) s[c] = kMinusInfinity;
      if (has_tops_) continue;
      Vec tops = load(s);
      for (int64_t c = kLanes; c < wide; c += kLanes) tops = max(tops, load(s + c));
      scratch_.most[r] = highest(tops);
    }
    const Maxima maxima = raise_maxima();
    for (int64_t r = 0; r < rows_; ++r) {
      const float factor = maxima.factor[r];
      if (factor == 1.f) continue;
      float* acc = scratch_.acc + r * v_pad_;
      for (int64_t d = 0; d < v_pad_; d += kLanes) store(acc + d, mul(load(acc + d), all(factor)));
    }
    return maxima;
  }

  // All rows at once, up to a multiple of the lanes: from `tops`, or else the tile's highest logits in
  // `most`.
  Maxima raise_maxima() const {
    float *base = scratch_.base, *factor = scratch_.factor, *most = scratch_.most;
    constexpr float kLowest = -3e38f;
    for (int64_t r = 0; r < rows_; r += kLanes) {
      const float* tops = scratch_.tops + 4 * r;
      const Vec top = has_tops_ ? highest_fours(load(tops), load(tops + kLanes),
                                                load(tops + 2 * kLanes), load(tops + 3 * kLanes))
                                : load(most + r);
      const Vec old = load(scratch_.max + r), now = max(old, top);
      const Vec from = max(all(kLowest), now);  // where nothing is seen, x - from is minus infinity
      store(scratch_.max + r, now);
      store(base + r, from);
      store(factor + r, exp2_below_1(sub(old, from)));
      store(most + r, exp2_below_1(sub(top, from)));
      store(scratch_.top + r, max(all(kLowest), top));
    }
    return {base, factor, most, scratch_.top};
  }

  void values(const TileRows& rows, int64_t first, int64_t n, Seen seen) {
    const Dtype dtype = rows.pool->v.dtype;
#if defined(KVC_AVX2)
    if (is_read_v_ && seen == Seen::everything) {
      values_of_few(rows, n);
      return;
    }
#endif
    // For few rows there is nothing to gain from decoding once.
    const auto values_where_they_lie = [&](const auto& read) {
      for (int64_t c = 0; c < n; c += 16) {
        const int64_t m = smaller(n - c, 16);
        int64_t step;
        const char* row = rows.together(kVRows, c, m, v_.packed_bytes(), scratch_.gathered, step);
        add_values<kWide * kLanes / 4>(c, m, row, step, read);
      }
    };
    if (is_v_split_ && dtype == Dtype::bf16 && rows_ <= 4 && seen == Seen::everything) {
      return values_where_they_lie([](const char* from, int64_t d, Vec* x, auto n_vecs) {
        const auto* numbers = reinterpret_cast<const uint16_t*>(from) + d;
        if (n_vecs.of == 1) x[0] = load_bf16(numbers);  // not so: they come in pairs
        for (int i = 0; i + 1 < n_vecs.of; i += 2)
          load_split(numbers + i * kLanes, x[i], x[i + 1]);
      });
    }
#if defined(KVC_AVX512)
    if (rows.pool == job_.pool && dtype == Dtype::f16 && v_.dim == v_pad_ && rows_ <= 4 && seen == Seen::everything) {
      return values_where_they_lie([](const char* from, int64_t d, Vec* x, auto n_vecs) {
        for (int i = 0; i < n_vecs.of; ++i) x[i] = load_half(reinterpret_cast<const uint16_t*>(from) + d + i * kLanes);
      });
    }
#endif
    const auto read = [](const char* from, int64_t d, Vec* x, auto n_vecs) {
      for (int i = 0; i < n_vecs.of; ++i)
        x[i] = load(reinterpret_cast<const float*>(from) + d + i * kLanes);
    };
    // So many that each four rows can fetch 16 cells' share of the next tile.
    const int64_t block = rows_ <= 4 ? 16 : rows_ <= 12 ? 32 : kDecoded;
    constexpr int kFetched = kWide * kLanes == 64 ? 16 : 8;
    const bool is_read_there = block == 16 && seen == Seen::everything;
    for (int64_t c = 0; c < n; c += block) {
      const int64_t m = smaller(n - c, block);
      const float* v = scratch_.v;
      for (int64_t i = 0; i < m; i += 16) {
        float* to = scratch_.v + i * v_pad_;
        const float* from = as_floats(rows, true, c + i, n, to);
        if (is_read_there)
          v = from;
        else if (from != to)
          std::memcpy(to, from, sizeof(float) * smaller(m - i, 16) * v_pad_);
      }
      if (seen == Seen::some) leave_no_trace(first, c, m);
      const char* row = reinterpret_cast<const char*>(v);
      block == 16   ? add_values<kFetched>(c, m, row, 4 * v_pad_, read)
      : block == 32 ? add_values<kFetched / 2>(c, m, row, 4 * v_pad_, read)
                    : add_values<kFetched / 4>(c, m, row, 4 * v_pad_, read);
    }
  }

  // V rows from `row` on times the weights of n cells from c on, of all rows.
  template <int kFetched, class Read>
  void add_values(int64_t c, int64_t n, const char* row, int64_t step, const Read& read) {
    for (int64_t r = 0; r < rows_pad_; r += 4) {
      const float* s = s_ + r * kTile + c;
      float* acc = scratch_.acc + r * v_pad_;
      int64_t d = 0;
      Lines lines = Next::nothing();
      if (4 * r < n) {
        const int64_t n_parts = v_pad_ / (kWide * kLanes), n_16 = (n + 15) / 16;
        lines = next_.turn_of_values(c / 16 + r / 4, n_parts * n_16 * 2 * kFetched);
        if (v_.affine) next_.affine(kVAffine, c / 16 + r / 4);
      }
      const auto part = [&](auto n_vecs) {
        constexpr int kVecs = decltype(n_vecs)::of;
        values_of_4<kVecs, kFetched>(s, row, step, n, v_pad_, acc + d, lines,
                                    [&](const char* from, Vec* x) { read(from, d, x, n_vecs); });
        d += kVecs * kLanes;
        if ((lines.left -= n * kFetched / 8) <= 0) lines = Next::nothing();
      };
      while (d + kWide * kLanes <= v_pad_) part(Number<kWide>());
      if (kWide > 2 && d + 2 * kLanes <= v_pad_) part(Number<2>());
      while (d < v_pad_) part(Number<1>());
    }
  }

  // A weight of 0 does not silence a value that is not finite: where a tile has a mask, rows with
  // such values are taken out and given to those alone who see them.
  void leave_no_trace(int64_t first, int64_t from, int64_t n) {
    for (int64_t c = from; c < from + n; ++c) {
      float* v = scratch_.v + (c - from) * v_pad_;
      float doubt = 0.f;
      for (int64_t d = 0; d < v_.dim; ++d) doubt += v[d] * 0.f;
      if (doubt == 0.f) continue;
      for (int64_t r = 0; r < rows_; ++r) {
        if (!is_seen(token_index(r), first + c)) continue;
        const float p = s_[r * kTile + c];
        for (int64_t d = 0; d < v_.dim; ++d) scratch_.acc[r * v_pad_ + d] += p * v[d];
      }
      std::memset(v, 0, sizeof(float) * v_pad_);
    }
  }

  // `is_split`: whether results are in the order of `is_split` rows.
  void finish(bool is_split);

  const Job& job_;
  [[maybe_unused]] const bool has_halves_;
  const Side &k_, &v_;
  const int64_t rows_, rows_pad_, k_pad_, v_pad_;
  const bool is_k_split_, is_v_split_;
#if defined(KVC_AVX2)
  const bool is_read_k_, is_read_v_;  // whether all numbers are decoded in registers
#endif
  Scratch scratch_;
#if defined(KVC_BF16)
  const bool has_k_pairs_, has_v_pairs_;  // whether products are of pairs
  static_assert(kRowsAtOnce == 4);
#endif
  float factor_ = 1.f;  // of logits
  bool has_fours_ = false, has_tops_ = false;
  float* s_ = nullptr;  // the tile's logits, then weights
  Next next_;
#if defined(KVC_AMX)
  Ahead ahead_;
#endif

 public:
  static float exp2_or_0(float x) { return x == kMinusInfinity ? 0.f : exp2_one(x); }
};

// Weights of a result, and its sink's, to one.
inline void write_result(const Job& job, int64_t token, int64_t head, float max, float sum,
                         float* row) {
  const Layout& layout = *job.layout;
  const int64_t dim = job.pool->v.dim;
  float factor = 1.f;
  if (job.args->sinks) {
    const float sink = job.args->sinks[head] * kLog2e;
    const float top = sink > max ? sink : max;
    if (top != kMinusInfinity) {
      factor = Attention::exp2_or_0(max - top);
      sum = sum * factor + Attention::exp2_or_0(sink - top);
    }
  }
  factor = sum == 0.f ? 0.f : factor / sum;
  for (int64_t d = 0; d < dim; ++d) row[d] *= factor;
  const int64_t size = layout.out == Dtype::f32 ? 4 : 2;
  char* out = static_cast<char*>(job.args->out) +
              (head * layout.o.head + token * layout.o.token) * size;
  store_row(out, layout.out, dim, row);
}

inline void Attention::finish(bool is_split) {
  for (int64_t r = 0; r < rows_; ++r) {
    scratch_.sum[r] = sum(load(scratch_.sum + r * kLanes));
    if (is_split) split_floats(scratch_.acc + r * v_pad_, v_.dim, true);
  }
  if (job_.partial) {
    std::memcpy(job_.partial, scratch_.max, sizeof(float) * rows_);
    std::memcpy(job_.partial + rows_, scratch_.sum, sizeof(float) * rows_);
    std::memcpy(job_.partial + 2 * rows_, scratch_.acc, sizeof(float) * rows_ * v_pad_);
    return;
  }
  for_rows([&](int64_t r, int64_t token, int64_t head) {
    write_result(job_, token, head, scratch_.max[r], scratch_.sum[r], scratch_.acc + r * v_pad_);
  });
}

#if defined(KVC_AMX)
// What is multiplied has to be stored where the unit loads it, and its results are: so it is worth it for many
// rows of bfloat16. All other jobs are faster without.
inline bool is_for_matrix(const Job& job) {
  return job.n_tokens * job.n_heads > 8 && fits_matrix(job.pool->k) && fits_matrix(job.pool->v) &&
         !job.pool->exact && !fits_columns(job);
}
#endif

__attribute__((noinline)) void attend_with(const Job& job, char* scratch, bool has_halves) {
  [[maybe_unused]] const FlushToZero flush;
  Attention(job, scratch, has_halves).run();
}

void attend(const Job& job, char* scratch) {
#if defined(KVC_AMX)
  if (!is_for_matrix(job)) return beside_matrix().attend(job, scratch);
#endif
  attend_with(job, scratch, false);
}
#if defined(KVC_HALVES)
void attend_with_halves(const Job& job, char* scratch) { attend_with(job, scratch, true); }
#endif

void merge(const Job& job, int64_t token, int64_t head, int n_parts, const float* const* maxima,
           const float* const* sums, const float* const* rows, float* scratch) {
  const int64_t v_pad = padded(job.pool->v.dim);
  float top = kMinusInfinity;
  for (int i = 0; i < n_parts; ++i)
    if (*maxima[i] > top) top = *maxima[i];
  const float base = top == kMinusInfinity ? 0.f : top;
  float total = 0.f;
  std::memset(scratch, 0, sizeof(float) * v_pad);
  for (int first = 0; first < n_parts; first += kLanes) {
    const int n = n_parts - first < kLanes ? n_parts - first : kLanes;
    float factors[kLanes];
    for (int i = 0; i < kLanes; ++i) factors[i] = i < n ? *maxima[first + i] - base : kMinusInfinity;
    store(factors, exp2_below_1(load(factors)));
    for (int i = 0; i < n; ++i) total += *sums[first + i] * factors[i];
    for (int64_t d = 0; d < v_pad; d += kLanes) {
      Vec y = load(scratch + d);
      for (int i = 0; i < n; ++i) y = fma(all(factors[i]), load(rows[first + i] + d), y);
      store(scratch + d, y);
    }
  }
  write_result(job, token, head, top, total, scratch);
}

// Writing ---------------------------------------------------------------------------------------

// The definition is in kvcellar/kv_dtype.py; the bytes are the same, so no operation is contracted.
void quantise(const float* row, const Side& side, uint8_t* packed, uint16_t* affine) {
  const int64_t group = side.group_size;
  const float top = side.dtype == Dtype::int8 ? 255.f : 15.f;
  const float per_step = side.dtype == Dtype::int8 ? static_cast<float>(1.0 / 255)
                                                   : static_cast<float>(1.0 / 15);
  const bool is_wide = group % kLanes == 0;
  if (side.dtype == Dtype::int4 && !is_wide) std::memset(packed, 0, (side.dim + 1) / 2);
  for (int64_t g = 0; g * group < side.dim; ++g) {
    const float* x = row + g * group;
    float low = x[0], high = x[0];
    bool has_nan = false, is_found = false;
    if (is_wide) {
      Vec least = load(x), most = least, zeros = sub(least, least);
      for (int64_t i = kLanes; i < group; i += kLanes) {
        const Vec y = load(x + i);
        least = min(least, y);
        most = max(most, y);
        zeros = add(zeros, sub(y, y));
      }
      low = -highest(sub(all(0.f), least));
      high = highest(most);
      // Not so where a number is not finite, and of two zeros the first one's sign counts.
      is_found = sum(zeros) == 0.f && low != 0.f && high != 0.f;
    }
    if (!is_found) {
      low = high = x[0];
      for (int64_t i = 0; i < group; ++i) {
        has_nan |= x[i] != x[i];
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
      }
    }
    float inverse = 0.f, bias = 0.f;
    if (has_nan) {
      affine[2 * g] = affine[2 * g + 1] = 0x7E00;
    } else {
      const float lowered = low - __builtin_fabsf(low) * (1.f / 1024.f);
      affine[2 * g + 1] = float_to_half(lowered);
      bias = half_to_float(affine[2 * g + 1]);
      const float span = (high - bias) * (1025.f / 1024.f);
      affine[2 * g] = float_to_half(span * per_step);
      const float step = half_to_float(affine[2 * g]);
      inverse = step > 0.f ? 1.f / step : 0.f;
    }
    const int64_t first = g * group;
    for (int64_t i = 0; is_wide && i < group; i += kLanes) {
      Vec q = nearest(mul(sub(load(x + i), all(bias)), all(inverse)));
      q = min(max(q, all(0.f)), all(top));  // NaN too becomes 0
      if (side.dtype == Dtype::int8) {
        store_u8(packed + first + i, q);
      } else {
        uint8_t bytes[kLanes];
        store_u8(bytes, q);
        for (int j = 0; j + 3 < kLanes; j += 4) {
          uint32_t four;
          std::memcpy(&four, bytes + j, 4);
          four |= four >> 4;
          const auto both = static_cast<uint16_t>((four & 0xFF) | (four >> 8 & 0xFF00));
          std::memcpy(packed + (first + i + j) / 2, &both, 2);
        }
      }
    }
    for (int64_t i = 0; !is_wide && i < group; ++i) {
      float q = __builtin_rintf((x[i] - bias) * inverse);
      q = q > 0.f ? q : 0.f;  // NaN too becomes 0
      q = q < top ? q : top;
      const auto number = static_cast<uint8_t>(q);
      if (side.dtype == Dtype::int8) {
        packed[first + i] = number;
      } else {
        packed[(first + i) / 2] |= (first + i) % 2 ? number << 4 : number;
      }
    }
  }
}

void write(const Side& side, int64_t block_size, int64_t head, const int64_t* cells,
           int64_t first_cell, int64_t n, const void* rows, Dtype in, int64_t token_stride,
           float* scratch) {
  const int64_t size = in == Dtype::f32 ? 4 : 2;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t cell = cells ? cells[i] : first_cell + i;
    const int64_t block = block_size ? cell / block_size : 0;
    const int64_t inside = cell - block * block_size;
    char* to = side.data + head * side.head_stride + block * side.block_stride +
               inside * side.cell_stride;
    const char* from = static_cast<const char*>(rows) + i * token_stride * size;
    if (side.dtype == in) {
      std::memcpy(to, from, side.dim * size);
      continue;
    }
    load_row(from, in, side.dim, scratch);
    if (!is_quantised(side.dtype)) {
      store_row(to, side.dtype, side.dim, scratch);
      continue;
    }
    char* affine = side.affine + head * side.affine_head_stride +
                   block * side.affine_block_stride + inside * side.affine_cell_stride;
    quantise(scratch, side, reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint16_t*>(affine));
  }
}

double sum_of(const void* data, int64_t n_bytes) {
  const auto* p = static_cast<const float*>(data);
  Vec a[8];
  for (auto& x : a) x = all(0.f);
  const int64_t n = n_bytes / 4;
  for (int64_t i = 0; i + 8 * kLanes <= n; i += 8 * kLanes)
    for (int j = 0; j < 8; ++j) a[j] = add(a[j], load(p + i + j * kLanes));
  double total = 0;
  for (const auto& x : a) total += sum(x);
  return total;
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
