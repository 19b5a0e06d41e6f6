// Linear layers for many tokens on the matrix unit; after linear_impl.h.
//
// 16 outputs' weights are a tile as they lie; tokens are the other operand, interleaved by 2. A panel
// of 32 outputs meets 32 tokens at a time, so that 4 results share 4 operands. Tokens of a block and a
// panel stay in the core's cache; the next panel is fetched while this one is multiplied. Each token's
// sums are taken in one order, whatever other tokens come with it.

#include <immintrin.h>

#include "linear.h"
#include "tiles.h"

namespace kvcellar {
namespace KVC_NAMESPACE {
namespace {

// 16 rows of 16 pairs: rows to columns.
inline void turn_16(__m512i* x) {
  __m512 rows[16];
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_castsi512_ps(x[i]);
  transpose16(rows);
  for (int i = 0; i < 16; ++i) x[i] = _mm512_castps_si512(rows[i]);
}

void pack_tokens(const ManyTokens& call, int64_t first, int64_t stop) {
  const int64_t n = call.weights.n_in, steps = n / 32;
  for (int64_t tile = first; tile < stop; ++tile) {
    const int64_t there = call.n_tokens - 16 * tile;
    const uint16_t* from = call.x + 16 * tile * n;
    uint16_t* to = call.tokens + tile * steps * 512;
    for (int64_t k = 0; k < steps; ++k, to += 512) {
      __m512i rows[16];
      for (int64_t t = 0; t < 16; ++t)
        rows[t] = t < there ? _mm512_loadu_si512(from + t * n + 32 * k) : _mm512_setzero_si512();
      turn_16(rows);
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(to + 32 * i, rows[i]);
    }
  }
}

// Packed weights of 16 outputs as tiles of bfloat16: groups [first, stop) of 32 inputs.
template <bool is_int4>
inline void unpack_tiles(const LinearWeights& weights, int64_t block, int64_t first, int64_t stop,
                         uint16_t* to) {
  const int64_t group_bytes = weights.block_bytes / weights.n_groups;
  const char* data = static_cast<const char*>(weights.data) + block * weights.block_bytes;
  const uint16_t* scales = weights.scales + block * weights.n_scales * kBlockRows;
  const __m512i low = _mm512_set1_epi8(15);
  const __m512 zero = _mm512_set1_ps(is_int4 ? 8.f : 128.f);
  for (int64_t group = first; group < stop; group += 2) {
    const int64_t n_groups = stop - group < 2 ? 1 : 2;
    __m512i fours[16];  // 4 inputs of 16 outputs each
    alignas(64) float steps[2][16];
    for (int64_t g = 0; g < 2; ++g) {
      const char* from = data + (group + (g < n_groups ? g : 0)) * group_bytes;
      for (int v = 0; v < 8; v += is_int4 ? 2 : 1, from += 64) {
        fours[8 * g + v] = _mm512_loadu_si512(from);
        if (!is_int4) continue;
        fours[8 * g + v + 1] = _mm512_and_si512(_mm512_srli_epi16(fours[8 * g + v], 4), low);
        fours[8 * g + v] = _mm512_and_si512(fours[8 * g + v], low);
      }
      const int64_t shared = shared_of<is_int4>(group + (g < n_groups ? g : 0));
      _mm512_store_ps(steps[g], load_half(scales + shared * kBlockRows));
    }
    turn_16(fours);
    for (int64_t r = 0; r < kBlockRows; ++r)
      for (int64_t g = 0; g < n_groups; ++g) {
        const __m256i bytes = g ? _mm512_extracti64x4_epi64(fours[r], 1)
                                : _mm512_castsi512_si256(fours[r]);
        const __m512 step = _mm512_set1_ps(steps[g][r]);
        const auto number = [&](__m128i sixteen) {
          return _mm512_mul_ps(
              _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen)), zero), step);
        };
        const __m512bh row = _mm512_cvtne2ps_pbh(number(_mm256_extracti128_si256(bytes, 1)),
                                                 number(_mm256_castsi256_si128(bytes)));
        _mm512_store_si512(to + (group - first + g) * 1024 + r * 32,
                           reinterpret_cast<const __m512i&>(row));
      }
  }
}

// Inputs [first, stop) of a panel's 32 outputs as tiles, in steps of 32 inputs: two tiles each.
inline void pack_panel(const LinearWeights& weights, int64_t panel, int64_t first, int64_t stop,
                       uint16_t* to) {
  const int64_t n = weights.n_in;
  for (int64_t half = 0; half < 2; ++half) {
    const int64_t block = 2 * panel + half, there = weights.n_out - block * kBlockRows;
    if (weights.is_packed && there > 0) {
      (weights.format == WeightFormat::int4 ? unpack_tiles<true> : unpack_tiles<false>)(
          weights, block, first / kGroupInputs, stop / kGroupInputs, to + half * 512);
      continue;
    }
    const uint16_t* rows = static_cast<const uint16_t*>(weights.data) + block * kBlockRows * n;
    for (int64_t r = 0; r < kBlockRows; ++r) {
      uint16_t* tile = to + half * 512 + r * 32;
      for (int64_t k = first; k < stop; k += 32, tile += 1024)
        _mm512_store_si512(tile, r < there ? _mm512_loadu_si512(rows + r * n + k)
                                           : _mm512_setzero_si512());
    }
  }
}

// Lines of the next panel's weights, some at a time.
struct PanelAhead {
  const char* data = nullptr;
  int64_t row_bytes = 0, stride = 0, n_bytes = 0, at = 0;
  void fetch(int64_t lines) {
    for (; lines > 0 && at < n_bytes; --lines, at += 64)
      __builtin_prefetch(data + at / row_bytes * stride + at % row_bytes, 0, 2);
  }
};

// 32 outputs of 32 tokens: 4 tiles to rows of bfloat16.
inline void put_tiles(const ManyTokens& call, const float* tiles, int64_t panel, int64_t pair) {
  const int64_t n = call.weights.n_out, first = 32 * panel;
  for (int64_t side = 0; side < 2; ++side) {
    const int64_t token = 32 * pair + 16 * side;
    if (token >= call.n_tokens) return;
    const int64_t n_tokens = call.n_tokens - token < 16 ? call.n_tokens - token : 16;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t output = first + 16 * half, there = n - output;
      if (there <= 0) break;
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = _mm512_load_si512(tiles + 512 * half + 256 * side + 16 * i);
      turn_16(rows);
      const auto mask = static_cast<__mmask16>(there < 16 ? (1 << there) - 1 : 0xFFFF);
      for (int64_t t = 0; t < n_tokens; ++t) {
        const auto short_row =
            reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_castsi512_ps(rows[t])));
        _mm256_mask_storeu_epi16(call.out + (token + t) * n + output, mask, short_row);
      }
    }
  }
}

// Panels [first, stop) of the block of tokens and inputs that the call is at.
void multiply_panels(const ManyTokens& call, char* scratch, int64_t first, int64_t stop) {
  const LinearWeights& weights = call.weights;
  const int64_t n = weights.n_in, all_steps = n / 32;
  const int64_t steps = (call.stop_input - call.first_input) / 32;
  const bool is_first = call.first_input == 0, is_last = call.stop_input == n;
  auto* panel_data = reinterpret_cast<uint16_t*>(scratch);
  auto* tiles = reinterpret_cast<float*>(scratch + steps * 2048);
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) {
    shapes.rows[tile] = 16;
    shapes.bytes[tile] = 64;
  }
  load_shapes(shapes);
  for (int64_t panel = first; panel < stop; ++panel) {
    pack_panel(weights, panel, call.first_input, call.stop_input, panel_data);
    keep_order();
    PanelAhead ahead;
    if (panel + 1 < stop && 32 * (panel + 2) <= weights.n_out) {
      const char* data = static_cast<const char*>(weights.data) + 2 * (panel + 1) * weights.block_bytes;
      if (weights.is_packed) {
        const int64_t bytes = weights.block_bytes / weights.n_groups * steps;  // of 16 outputs
        const int64_t skipped = weights.block_bytes / all_steps * (call.first_input / 32);
        ahead = {data + skipped, bytes, weights.block_bytes, 2 * bytes, 0};
      } else {
        ahead = {data + 2 * call.first_input, 64 * steps, 2 * n, 32 * 64 * steps, 0};
      }
    }
    const int64_t pairs = call.stop_pair - call.first_pair;
    const int64_t lines = ahead.n_bytes / 64 / (pairs * steps) + 1;
    for (int64_t pair = call.first_pair; pair < call.stop_pair; ++pair) {
      float* sums = is_first && is_last ? tiles : call.sums + (panel * call.n_pairs + pair) * 1024;
      if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        _tile_loadd(2, sums + 512, 64);
        _tile_loadd(3, sums + 768, 64);
      }
      const uint16_t* w = panel_data;
      const uint16_t* left = call.tokens + (2 * pair * all_steps + call.first_input / 32) * 512;
      const uint16_t* right = left + all_steps * 512;
      for (int64_t k = 0; k < steps; ++k, w += 1024, left += 512, right += 512) {
        _tile_loadd(4, w, 64);
        _tile_loadd(6, left, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, w + 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        ahead.fetch(lines);
      }
      _tile_stored(0, sums, 64);
      _tile_stored(1, sums + 256, 64);
      _tile_stored(2, sums + 512, 64);
      _tile_stored(3, sums + 768, 64);
      keep_order();
      if (is_last) put_tiles(call, sums, panel, pair);
    }
  }
  _tile_release();
}

}  // namespace
}  // namespace KVC_NAMESPACE
}  // namespace kvcellar
