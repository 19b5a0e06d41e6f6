// bfloat16 weights in 12 bits: what their rows have in common is found once, when they are loaded.

#include <algorithm>
#include <array>
#include <cstring>

#include "linear/linear.h"
#include "core/threads.h"

namespace kvcellar {
namespace {

constexpr uint8_t kNotThere = 255;
constexpr int64_t kBlocksOfPiece = 4;

// The 8 most frequent of a row's upper bytes without their signs, the least first.
std::array<uint8_t, 8> most_frequent(const uint16_t* row, int64_t n) {
  std::array<std::array<int32_t, 128>, 4> parts{};  // neighbours are often the same: none waits for another
  for (int64_t i = 0; i < n; i += 4)
    for (int64_t part = 0; part < 4; ++part) ++parts[part][row[i + part] >> 8 & 127];
  std::array<int32_t, 128> counts;
  for (int i = 0; i < 128; ++i) counts[i] = parts[0][i] + parts[1][i] + parts[2][i] + parts[3][i];
  std::array<uint8_t, 128> order;
  for (int i = 0; i < 128; ++i) order[i] = static_cast<uint8_t>(i);
  std::partial_sort(order.begin(), order.begin() + 8, order.end(),
                    [&](uint8_t a, uint8_t b) { return counts[a] > counts[b] || (counts[a] == counts[b] && a < b); });
  std::array<uint8_t, 8> found;
  std::copy_n(order.begin(), 8, found.begin());
  std::sort(found.begin(), found.end());
  return found;
}

// One output of a block. Where an input's bytes lie: see LinearWeights.
void code_row(const uint16_t* row, int64_t n, uint16_t output, uint8_t* table, uint8_t* to,
              std::vector<Escape>& escapes) {
  const std::array<uint8_t, 8> bytes = most_frequent(row, n);
  std::array<uint8_t, 256> codes;
  codes.fill(kNotThere);
  for (uint8_t i = 0; i < 8; ++i) {
    table[i] = bytes[i];
    table[8 + i] = bytes[i] | 128;
    codes[table[i]] = i;
    codes[table[8 + i]] = 8 + i;
  }
  for (int64_t first = 0; first < n; first += kCodedInputs, to += kCodedInputs * 3 / 2) {
    std::array<uint8_t, kCodedInputs> found, lower;
    uint8_t highest = 0;
    for (int64_t i = 0; i < kCodedInputs; ++i) {
      found[i] = codes[row[first + i] >> 8];
      lower[i] = static_cast<uint8_t>(row[first + i] & 255);
      highest = std::max(highest, found[i]);
    }
    for (int64_t i = 0; highest == kNotThere && i < kCodedInputs; ++i) {
      if (found[i] != kNotThere) continue;
      escapes.push_back({static_cast<uint32_t>(first + i), output, row[first + i]});
      found[i] = lower[i] = 0;
    }
    for (int64_t i = 0; i < 64; i += 8) {  // 8 places that follow on each other
      uint8_t* place = to + coded_place(i);
      uint64_t near, far;
      std::memcpy(&near, &found[i], 8);
      std::memcpy(&far, &found[64 + i], 8);
      near |= far << 4;
      std::memcpy(place, &near, 8);
      std::memcpy(place + 64, &lower[i], 8);
      std::memcpy(place + 128, &lower[64 + i], 8);
    }
  }
}

}  // namespace

std::vector<Escape> code(const uint16_t* rows, int64_t n_in, int64_t n_out, void* to, int64_t n_before, int n_threads) {
  const LinearWeights weights = make_linear_weights(WeightFormat::coded, n_in, n_out, to, nullptr);
  std::vector<std::vector<Escape>> of_blocks(static_cast<size_t>(weights.n_blocks));
  const auto at = [&](int64_t block) { return static_cast<uint8_t*>(to) + block * weights.block_bytes; };
  const auto code_blocks = [&](int64_t first, int64_t stop) {
    for (int64_t block = first; block < stop; ++block) {
      CodedHead head{};
      std::vector<Escape>& escapes = of_blocks[static_cast<size_t>(block)];
      uint8_t* row = at(block) + sizeof head;
      for (int64_t r = 0; r < kBlockRows; ++r, row += n_in * 3 / 2) {
        const int64_t output = block * kBlockRows + r;
        if (output < n_out)
          code_row(rows + output * n_in, n_in, static_cast<uint16_t>(r), head.tables[r], row, escapes);
        else
          std::memset(row, 0, static_cast<size_t>(n_in * 3 / 2));
      }
      std::stable_sort(escapes.begin(), escapes.end(),
                       [](const Escape& a, const Escape& b) { return a.input < b.input; });
      head.n_escapes = static_cast<uint32_t>(escapes.size());
      std::memcpy(at(block), &head, sizeof head);
    }
  };
  spread(weights.n_blocks, kBlocksOfPiece, 1, workers_for(n_threads), code_blocks);
  std::vector<Escape> all;
  for (int64_t block = 0; block < weights.n_blocks; ++block) {
    const auto first = static_cast<uint32_t>(all.size() + static_cast<size_t>(n_before));
    std::memcpy(at(block) + offsetof(CodedHead, first_escape), &first, sizeof first);
    const std::vector<Escape>& escapes = of_blocks[static_cast<size_t>(block)];
    all.insert(all.end(), escapes.begin(), escapes.end());
  }
  return all;
}

}  // namespace kvcellar
