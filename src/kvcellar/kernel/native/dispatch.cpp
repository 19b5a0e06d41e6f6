// Which instruction set's functions are used: the best that this machine has, chosen at run time.

#include <cstdlib>
#include <cstring>

#include "isa.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(KVC_WITH_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvcellar {

extern const Ops ops_scalar;
#if defined(KVC_WITH_AVX2)
extern const Ops ops_avx2;
#endif
#if defined(KVC_WITH_AVX_VNNI)
extern const Ops ops_avx_vnni;
#endif
#if defined(KVC_WITH_AVX512)
extern const Ops ops_avx512;
#endif
#if defined(KVC_WITH_VNNI)
extern const Ops ops_vnni;
#endif
#if defined(KVC_WITH_FP16)
extern const Ops ops_fp16;
#endif
#if defined(KVC_WITH_BF16)
extern const Ops ops_bf16;
#endif
#if defined(KVC_WITH_AMX)
extern const Ops ops_amx;
#endif
#if defined(KVC_WITH_NEON)
extern const Ops ops_neon;
#endif

namespace {

#if defined(KVC_EMULATED_AVX512)
bool has_avx512() { return __builtin_cpu_supports("avx2"); }
bool has_vnni() { return true; }
bool has_bf16() { return true; }
bool has_fp16() { return true; }
#elif defined(KVC_WITH_AVX512)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}
bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }
[[maybe_unused]] bool has_fp16() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && edx & 1u << 23;
}
#endif

#if defined(KVC_EMULATED_AVX_VNNI)
bool has_avx_vnni() { return true; }
#elif defined(KVC_WITH_AVX_VNNI)
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax & 1u << 4;
}
#endif

#if defined(KVC_EMULATED_AMX)
bool has_amx() { return __builtin_cpu_supports("avx512vbmi"); }
#elif defined(KVC_WITH_AMX)
// The tile registers are a process's own only after it has asked Linux for them.
bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // amx-bf16, amx-tile, amx-int8
  if ((edx & wanted) != wanted || !(ecx & 1u << 1)) return false;  // avx512-vbmi
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !(eax & 1u << 5)) return false;  // bf16
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const Ops*> find_levels() {
  std::vector<const Ops*> found;
#if defined(KVC_WITH_AVX512)
  if (has_avx512()) {
#if defined(KVC_WITH_AMX)
    if (has_amx()) found.push_back(&ops_amx);
#endif
#if defined(KVC_WITH_BF16)
    if (has_vnni() && has_bf16() && is_amd()) found.push_back(&ops_bf16);
#endif
#if defined(KVC_WITH_FP16)
    if (has_vnni() && has_fp16()) found.push_back(&ops_fp16);
#endif
#if defined(KVC_WITH_VNNI)
    if (has_vnni()) found.push_back(&ops_vnni);
#endif
#if defined(KVC_WITH_BF16)
    // Intel's take two cycles for a product of pairs of bfloat16, four of 16-bit integers' and of float32.
    if (has_vnni() && has_bf16() && !is_amd()) found.push_back(&ops_bf16);
#endif
    found.push_back(&ops_avx512);
  }
#endif
#if defined(KVC_WITH_AVX2)
  unsigned eax, ebx, ecx, edx;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) {
#if defined(KVC_WITH_AVX_VNNI)
    if (has_avx_vnni()) found.push_back(&ops_avx_vnni);
#endif
    found.push_back(&ops_avx2);
  }
#endif
#if defined(KVC_WITH_NEON)
  found.push_back(&ops_neon);
#endif
  found.push_back(&ops_scalar);
  return found;
}

const std::vector<const Ops*>& found_levels() {
  static const std::vector<const Ops*> found = find_levels();
  return found;
}

std::atomic<const Ops*> chosen{nullptr};

}  // namespace

const Ops& ops() {
  const Ops* now = chosen.load(std::memory_order_relaxed);
  if (!now) {
    now = found_levels().front();
    chosen.store(now);
  }
  return *now;
}

#if defined(KVC_WITH_AMX)
const Ops& beside_matrix() {
#if defined(KVC_WITH_FP16)
  static const Ops& best = has_fp16() ? ops_fp16 : ops_vnni;
  return best;
#else
  return ops_vnni;
#endif
}
#endif

std::vector<const char*> levels() {
  std::vector<const char*> names;
  for (const Ops* found : found_levels()) names.push_back(found->name);
  return names;
}

const char* level() { return ops().name; }

bool set_level(const char* name) {
  for (const Ops* found : found_levels()) {
    if (std::strcmp(found->name, name) == 0) {
      chosen.store(found);
      return true;
    }
  }
  return false;
}

bool is_amd() {
#if defined(__x86_64__) || defined(_M_X64)
  static const bool is = __builtin_cpu_is("amd");
  return is;
#else
  return false;
#endif
}

#if defined(__x86_64__) || defined(_M_X64)
const bool is_fetched_far = __builtin_cpu_is("amdfam19h");  // Zen 4, and Zen 3
#else
const bool is_fetched_far = false;
#endif
const bool are_branches_far = is_fetched_far || !is_amd();

int64_t scratch_bytes(int64_t rows, int64_t k_pad, int64_t v_pad) {
  const int64_t floats =
      rows * (2 * k_pad + v_pad + 2 * kMaxTile) + rows * (k_pad + kMaxTile) / 2 + 32 + 16 * (2 * k_pad + v_pad) + kMaxTile * v_pad +
      (rows + 16) * 24 + 8 * 16;
  // What products of another kind want beside it: see amx.h, and words.h. Integers
  // have two groups in 64 numbers at most.
  const int64_t k = (k_pad + 63) / 64 * 64, v = (v_pad + 63) / 64 * 64, r = (rows + 15) / 16 * 16;
  const int64_t matrix = 512 * kMaxTile + 8 * kMaxTile * (k + v) / 32 + 2 * kMaxTile * (k + v) +
                         r * (8 * k + k / 2 + 8 + 64) + r * kMaxTile * (v / 16 + 4) + 16384 +
                         r * (4 + 64) * (v / 32) + 4 * r * v + 16 * 64;
  return 4 * floats + 3 * (4 * 9 * kMaxTile + 256) + 64 + matrix;
}

}  // namespace kvcellar
