// The kernel, once for each instruction set that includes it.
//
// A job is some query rows over some cells of one KV head. It goes through the cells in tiles of
// kTile: logits of all rows, online softmax, values. Rows whose layout has a direct loop are read
// where they lie; all others are decoded into scratch first, a tile at a time.

#include "isa.h"
#include "vector.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Scratch of one worker, cut from one piece of memory.
struct Scratch {
  float *q, *k, *v, *s, *acc, *max, *sum, *factor;
  struct Rows {
    const char *k[kTile], *v[kTile], *k_affine[kTile], *v_affine[kTile];
    const Pool* pool;  // whose rows they are: the job's, or its exact one
  };
  Rows* rows;  // of this tile and of the next
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
  s.k = take(kTile * k_pad);
  s.v = take(kTile * v_pad);
  s.s = take(rows * kTile);
  s.acc = take(rows * v_pad);
  s.max = take(rows);
  s.sum = take(rows);
  s.factor = take(rows);
  s.rows = reinterpret_cast<Scratch::Rows*>(at);
  s.extra = reinterpret_cast<char*>(s.rows + 2);
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
        for (; kLanes > 1 && i % 2 == 0 && i + kLanes <= stop; i += kLanes)
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

// Walking runs ----------------------------------------------------------------------------------

struct Walk {
  const Job& job;
  int64_t run, offset;

  explicit Walk(const Job& from) : job(from), run(from.run), offset(from.run_offset) {}

  // Addresses of up to n next cells of one pool; how many they are.
  int64_t next(int64_t n, Scratch::Rows& to) {
    const bool is_exact = job.runs[run].start >= kExactBase;
    const int64_t base = is_exact ? kExactBase : 0;
    const Pool& pool = is_exact ? *job.pool->exact : *job.pool;
    const Side &k = pool.k, &v = pool.v;
    const char* k_base = k.data + job.kv_head * k.head_stride;
    const char* v_base = v.data + job.kv_head * v.head_stride;
    const char* k_affine_base = k.affine ? k.affine + job.kv_head * k.affine_head_stride : nullptr;
    const char* v_affine_base = v.affine ? v.affine + job.kv_head * v.affine_head_stride : nullptr;
    const int64_t block_size = pool.block_size;
    to.pool = &pool;
    int64_t i = 0;
    while (i < n) {
      const CellRun& cells = job.runs[run];
      if ((cells.start >= kExactBase) != is_exact) break;
      int64_t cell = cells.start - base + offset;
      int64_t length = smaller(cells.length - offset, n - i);
      offset += length;
      if (offset == cells.length) {
        ++run;
        offset = 0;
      }
      while (length) {
        int64_t block = 0, inside = cell, piece = length;
        if (block_size) {
          block = cell / block_size;
          inside = cell - block * block_size;
          piece = smaller(length, block_size - inside);
        }
        const char* kp = k_base + block * k.block_stride + inside * k.cell_stride;
        const char* vp = v_base + block * v.block_stride + inside * v.cell_stride;
        for (int64_t j = 0; j < piece; ++j) {
          to.k[i + j] = kp + j * k.cell_stride;
          to.v[i + j] = vp + j * v.cell_stride;
        }
        if (k_affine_base) {
          const char* p = k_affine_base + block * k.affine_block_stride +
                          inside * k.affine_cell_stride;
          for (int64_t j = 0; j < piece; ++j) to.k_affine[i + j] = p + j * k.affine_cell_stride;
        }
        if (v_affine_base) {
          const char* p = v_affine_base + block * v.affine_block_stride +
                          inside * v.affine_cell_stride;
          for (int64_t j = 0; j < piece; ++j) to.v_affine[i + j] = p + j * v.affine_cell_stride;
        }
        i += piece;
        cell += piece;
        length -= piece;
      }
    }
    return i;
  }
};

// The next tile's rows, fetched a few at a time while this tile is worked on: their addresses are
// known, a loop that computes for long between its loads leaves the memory idle, and many at once
// would stop the core until they have come.
struct Ahead {
  const Scratch::Rows* rows = nullptr;
  int64_t n = 0, k_bytes = 0, v_bytes = 0;
  bool has_k_affine = false, has_v_affine = false;
  int64_t next = 0;

  void start(const Scratch::Rows& from, int64_t count) {
    const Side &k = from.pool->k, &v = from.pool->v;
    rows = &from;
    n = count;
    next = 0;
    k_bytes = k.packed_bytes();
    v_bytes = v.packed_bytes();
    has_k_affine = k.affine != nullptr;
    has_v_affine = v.affine != nullptr;
  }

  void some(int64_t count) {
    const int64_t stop = smaller(n, next + count);
    for (; next < stop; ++next) {
      for (int64_t i = 0; i < k_bytes; i += 64) __builtin_prefetch(rows->k[next] + i, 0, 2);
      for (int64_t i = 0; i < v_bytes; i += 64) __builtin_prefetch(rows->v[next] + i, 0, 2);
      if (has_k_affine) __builtin_prefetch(rows->k_affine[next], 0, 2);
      if (has_v_affine) __builtin_prefetch(rows->v_affine[next], 0, 2);
    }
  }
};

// Logits and values in float32 --------------------------------------------------------------------

// s[r][c] = q[r] . k[c] for kRows rows, 4 cells at a time; q rows are k_pad apart. Writes up to 3
// numbers behind the n-th, of the last cell again.
template <int kRows>
inline void logits_of(const float* q, int64_t k_pad, const char* const* k_rows, int64_t n,
                      float* s) {
  for (int64_t c = 0; c < n; c += 4) {
    const float* k[4];
    for (int j = 0; j < 4; ++j)
      k[j] = reinterpret_cast<const float*>(k_rows[smaller(c + j, n - 1)]);
    Vec a[kRows][4];
    for (auto& row : a)
      for (Vec& x : row) x = all(0.f);
    for (int64_t d = 0; d < k_pad; d += kLanes) {
      Vec x[kRows];
      for (int r = 0; r < kRows; ++r) x[r] = load(q + r * k_pad + d);
      for (int j = 0; j < 4; ++j) {
        const Vec y = load(k[j] + d);
        for (int r = 0; r < kRows; ++r) a[r][j] = fma(x[r], y, a[r][j]);
      }
    }
    for (int r = 0; r < kRows; ++r) sum_4(a[r][0], a[r][1], a[r][2], a[r][3], s + r * kTile + c);
  }
}

#if defined(KVC_AVX2)
constexpr int kLogitRows = 2;  // as many sums as there are registers for
#else
constexpr int kLogitRows = 4;
#endif

// acc[r][d .. d + kWide vectors) += s[r][c] * v[c], for 4 rows.
template <int kWide>
inline void values_of_4(const float* s, const char* const* v_rows, int64_t n, int64_t v_pad,
                        int64_t d, float* acc) {
  Vec a[4][kWide];
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kWide; ++j) a[r][j] = load(acc + r * v_pad + d + j * kLanes);
  for (int64_t c = 0; c < n; ++c) {
    const float* v = reinterpret_cast<const float*>(v_rows[c]) + d;
    Vec x[kWide];
    for (int j = 0; j < kWide; ++j) x[j] = load(v + j * kLanes);
    for (int r = 0; r < 4; ++r) {
      const Vec p = all(s[r * kTile + c]);
      for (int j = 0; j < kWide; ++j) a[r][j] = fma(p, x[j], a[r][j]);
    }
  }
  for (int r = 0; r < 4; ++r)
    for (int j = 0; j < kWide; ++j) store(acc + r * v_pad + d + j * kLanes, a[r][j]);
}

#if defined(KVC_AMX)
}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
#include "amx.h"
namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {
#endif

// The job ---------------------------------------------------------------------------------------

enum class Seen { nothing, some, everything };

class Attention {
 public:
  Attention(const Job& job, char* memory)
      : job_(job),
        k_(job.pool->k),
        v_(job.pool->v),
        rows_(job.n_tokens * job.n_heads),
        rows_pad_((rows_ + 3) / 4 * 4),
        k_pad_(padded(k_.dim)),
        v_pad_(padded(v_.dim)),
        scratch_(cut(memory, rows_pad_, k_pad_, v_pad_)) {}

  void run() {
    const float softcap = job_.args->softcap;
    // Without a cap the softmax works in powers of two, and the factor is in the logits already.
    const float factor = softcap > 0.f ? job_.args->scale / softcap : job_.args->scale * kLog2e;
#if defined(KVC_AMX)
    load_queries(fits_matrix(k_) ? 1.f : factor);
    const Matrix matrix(k_, v_, rows_, k_pad_, v_pad_, scratch_.q, factor, scratch_.extra);
#else
    load_queries(factor);
#endif
    for (int64_t r = 0; r < rows_pad_; ++r) {
      scratch_.max[r] = kMinusInfinity;
      scratch_.sum[r] = 0.f;
    }
    std::memset(scratch_.acc, 0, sizeof(float) * rows_pad_ * v_pad_);
    Walk walk(job_);
    const int64_t stop = job_.first_cell + job_.n_cells;
    int64_t n = walk.next(smaller(kTile, job_.n_cells), scratch_.rows[0]), n_next = 0;
    for (int64_t first = job_.first_cell, turn = 0; first < stop; first += n, n = n_next, turn ^= 1) {
      rows_of_tile_ = scratch_.rows + turn;
      ahead_.next = ahead_.n = n_next = 0;
      if (first + n < stop) {
        Scratch::Rows& rows = scratch_.rows[turn ^ 1];
        n_next = walk.next(smaller(kTile, stop - first - n), rows);
        ahead_.start(rows, n_next);
      }
      const Seen seen = what_is_seen(first, n);
      if (seen == Seen::nothing) continue;
#if defined(KVC_AMX)
      const bool fits = rows_of_tile_->pool == job_.pool;
      if (matrix.has_k && fits) {
        matrix.logits(rows_of_tile_->k, rows_of_tile_->k_affine, n, scratch_.s, ahead_);
      } else {
        logits(n);
        if (matrix.has_k) multiply_logits(n, factor);
      }
#else
      logits(n);
#endif
      if (job_.args->softcap > 0.f) cap(n);
      if (seen == Seen::some) hide(first, n);
      softmax(n);
#if defined(KVC_AMX)
      if (matrix.has_v && fits &&
          (seen == Seen::everything ||
           matrix.is_finite(rows_of_tile_->v, rows_of_tile_->v_affine, n)))
        matrix.values(scratch_.s, rows_of_tile_->v, rows_of_tile_->v_affine, n, scratch_.acc,
                      ahead_);
      else
#endif
        values(n, first, seen);
    }
    finish();
  }

 private:
  int64_t head_of(int64_t row) const {
    const int64_t group = job_.layout->n_heads / job_.pool->n_kv_heads;
    return job_.kv_head * group + job_.first_head + row % job_.n_heads;
  }
  int64_t token_index(int64_t row) const { return job_.first_token + row / job_.n_heads; }

  void load_queries(float factor) {
    const Layout& layout = *job_.layout;
    const int64_t size = layout.in == Dtype::f32 ? 4 : 2;
    for (int64_t r = 0; r < rows_; ++r) {
      float* q = scratch_.q + r * k_pad_;
      const int64_t token = job_.tokens[token_index(r)];
      const int64_t at = head_of(r) * layout.q.head + token * layout.q.token;
      load_row(static_cast<const char*>(job_.args->q) + at * size, layout.in, k_.dim, q);
      for (int64_t d = 0; d < k_.dim; ++d) q[d] *= factor;
      for (int64_t d = k_.dim; d < k_pad_; ++d) q[d] = 0.f;
    }
    for (int64_t r = rows_; r < rows_pad_; ++r)
      std::memset(scratch_.q + r * k_pad_, 0, sizeof(float) * k_pad_);
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

  // Rows as padded float32: where they lie if they are that already, else decoded into scratch.
  void as_floats(const Side& side, int64_t pad, const char** rows, const char* const* affine,
                 int64_t n, float* to) {
    const bool lies_ready = side.dtype == Dtype::f32 && side.dim == pad;
    for (int64_t c = 0; c < n; ++c) {
      if (c % 2) ahead_.some(1);
      if (lies_ready) continue;
      decode_row(side, rows[c], affine[c], pad, to + c * pad);
      rows[c] = reinterpret_cast<const char*>(to + c * pad);
    }
  }

  void logits(int64_t n) {
    as_floats(rows_of_tile_->pool->k, k_pad_, rows_of_tile_->k, rows_of_tile_->k_affine, n, scratch_.k);
    for (int64_t r = 0; r < rows_pad_; r += kLogitRows)
      logits_of<kLogitRows>(scratch_.q + r * k_pad_, k_pad_, rows_of_tile_->k, n,
                            scratch_.s + r * kTile);
  }

#if defined(KVC_AMX)
  // The matrix unit's queries come without the factor.
  void multiply_logits(int64_t n, float factor) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < n; ++c) scratch_.s[r * kTile + c] *= factor;
  }
#endif

  // softcap * tanh(x), in powers of two: tanh(x) = 1 - 2 / (exp(2x) + 1), odd.
  void cap(int64_t n) {
    const float softcap = job_.args->softcap * kLog2e;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = scratch_.s + r * kTile;
      for (int64_t c = 0; c < n; ++c) s[c] = softcap * __builtin_tanhf(s[c]);
    }
  }

  void hide(int64_t first, int64_t n) {
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = scratch_.s + r * kTile;
      const int64_t token = token_index(r);
      for (int64_t c = 0; c < n; ++c)
        if (!is_seen(token, first + c)) s[c] = kMinusInfinity;
    }
  }

  void softmax(int64_t n) {
    const int64_t wide = (n + kLanes - 1) / kLanes * kLanes;
    for (int64_t r = 0; r < rows_; ++r) {
      float* s = scratch_.s + r * kTile;
      ahead_.some(3);
      for (int64_t c = n; c < wide; ++c) s[c] = kMinusInfinity;
      Vec top = all(scratch_.max[r]);
      for (int64_t c = 0; c < wide; c += kLanes) top = max(top, load(s + c));
      const float new_max = highest(top), old_max = scratch_.max[r];
      const float base = new_max == kMinusInfinity ? 0.f : new_max;
      Vec total = all(0.f);
      for (int64_t c = 0; c < wide; c += kLanes) {
        const Vec x = sub(load(s + c), all(base));
        Vec p = exp2_below_1(x);
        store(s + c, p);
        total = add(total, p);
      }
      const float factor = old_max == new_max ? 1.f : exp2_or_0(old_max - base);
      scratch_.sum[r] = scratch_.sum[r] * factor + sum(total);
      scratch_.max[r] = new_max;
      if (factor != 1.f) {
        float* acc = scratch_.acc + r * v_pad_;
        for (int64_t d = 0; d < v_pad_; d += kLanes) store(acc + d, mul(load(acc + d), all(factor)));
      }
    }
  }

  void values(int64_t n, int64_t first, Seen seen) {
    as_floats(rows_of_tile_->pool->v, v_pad_, rows_of_tile_->v, rows_of_tile_->v_affine, n, scratch_.v);
    if (seen == Seen::some) leave_no_trace(first, n);
    for (int64_t r = 0; r < rows_pad_; r += 4) {
      const float* s = scratch_.s + r * kTile;
      float* acc = scratch_.acc + r * v_pad_;
      int64_t d = 0;
      for (; d + 4 * kLanes <= v_pad_; d += 4 * kLanes)
        values_of_4<4>(s, rows_of_tile_->v, n, v_pad_, d, acc);
      for (; d < v_pad_; d += kLanes) values_of_4<1>(s, rows_of_tile_->v, n, v_pad_, d, acc);
    }
  }

  // A weight of 0 does not silence a value that is not finite: where a tile has a mask, rows with
  // such values are taken out and given to those alone who see them.
  void leave_no_trace(int64_t first, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      const float* v = reinterpret_cast<const float*>(rows_of_tile_->v[c]);
      float doubt = 0.f;
      for (int64_t d = 0; d < v_.dim; ++d) doubt += v[d] * 0.f;
      if (doubt == 0.f) continue;
      for (int64_t r = 0; r < rows_; ++r) {
        if (!is_seen(token_index(r), first + c)) continue;
        const float p = scratch_.s[r * kTile + c];
        for (int64_t d = 0; d < v_.dim; ++d) scratch_.acc[r * v_pad_ + d] += p * v[d];
      }
      float* zeros = scratch_.v + c * v_pad_;
      std::memset(zeros, 0, sizeof(float) * v_pad_);
      rows_of_tile_->v[c] = reinterpret_cast<const char*>(zeros);
    }
  }

  void finish();

  const Job& job_;
  const Side &k_, &v_;
  const int64_t rows_, rows_pad_, k_pad_, v_pad_;
  Scratch scratch_;
  Scratch::Rows* rows_of_tile_ = nullptr;
  Ahead ahead_;

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

inline void Attention::finish() {
  if (job_.partial) {
    std::memcpy(job_.partial, scratch_.max, sizeof(float) * rows_);
    std::memcpy(job_.partial + rows_, scratch_.sum, sizeof(float) * rows_);
    std::memcpy(job_.partial + 2 * rows_, scratch_.acc, sizeof(float) * rows_ * v_pad_);
    return;
  }
  for (int64_t r = 0; r < rows_; ++r)
    write_result(job_, job_.tokens[token_index(r)], head_of(r), scratch_.max[r], scratch_.sum[r],
                 scratch_.acc + r * v_pad_);
}

void attend(const Job& job, char* scratch) { Attention(job, scratch).run(); }

void merge(const Job& job, int64_t token, int64_t head, int n_parts, const float* const* maxima,
           const float* const* sums, const float* const* rows, float* scratch) {
  const int64_t v_pad = padded(job.pool->v.dim);
  float top = kMinusInfinity;
  for (int i = 0; i < n_parts; ++i)
    if (*maxima[i] > top) top = *maxima[i];
  const float base = top == kMinusInfinity ? 0.f : top;
  float total = 0.f;
  std::memset(scratch, 0, sizeof(float) * v_pad);
  for (int i = 0; i < n_parts; ++i) {
    const float factor = Attention::exp2_or_0(*maxima[i] - base);
    total += *sums[i] * factor;
    for (int64_t d = 0; d < v_pad; d += kLanes)
      store(scratch + d, fma(all(factor), load(rows[i] + d), load(scratch + d)));
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
  if (side.dtype == Dtype::int4) std::memset(packed, 0, (side.dim + 1) / 2);
  for (int64_t g = 0; g * group < side.dim; ++g) {
    const float* x = row + g * group;
    const bool is_wide = kLanes > 1 && group % kLanes == 0;
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
        for (int j = 0; j + 1 < kLanes; j += 2)
          packed[(first + i + j) / 2] = static_cast<uint8_t>(bytes[j] | bytes[j + 1] << 4);
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
