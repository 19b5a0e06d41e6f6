// Which level is used: the best that this machine has.

#include "core/levels.h"
#include "core/threads.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif
#if defined(KVC_WITH_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <string>

namespace kvcellar {

extern const Ops ops_scalar, ops_neon, ops_avx2, ops_avx_vnni, ops_vnni, ops_bf16;
extern const LinearOps linear_amx;

namespace {

#if defined(__x86_64__) || defined(_M_X64)

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  explicit Cpuid(unsigned leaf, unsigned part = 0) {
    if (!__get_cpuid_count(leaf, part, &eax, &ebx, &ecx, &edx)) eax = ebx = ecx = edx = 0;
  }
};

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (Cpuid(1).ecx & bit_F16C); }

// Emulated, as checks are built, it needs no more than AVX2.
#if defined(KVC_EMULATED)
bool has_avx_vnni() { return true; }
bool has_vnni() { return true; }
bool has_bf16() { return true; }
bool has_amx() { return true; }
#else
bool has_avx_vnni() { return Cpuid(7, 1).eax & 1u << 4; }
bool has_vnni() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_bf16() { return __builtin_cpu_supports("avx512bf16"); }
#if defined(KVC_WITH_AMX)
// The tile registers are a process's own only after it has asked Linux for them.
bool has_amx() {
  const Cpuid found(7);
  const unsigned wanted = 1u << 22 | 1u << 24;  // amx-bf16, amx-tile
  if ((found.edx & wanted) != wanted || !has_bf16()) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif
#endif

std::vector<const Ops*> find_levels() {
  std::vector<const Ops*> found;
  if (has_avx2()) {
#if defined(KVC_WITH_VNNI) && defined(KVC_WITH_BF16)
    if (has_vnni()) {
#if defined(KVC_WITH_AMX)
      static const Ops ops_amx{Level::amx, ops_vnni.attend, &linear_amx, ops_vnni.rows, ops_vnni.recurrent};
      if (has_amx()) found.push_back(&ops_amx);
#endif
      // Intel's take two cycles for a product of pairs of bfloat16, four of 16-bit integers' and of float32.
      if (has_bf16() && is_amd()) found.push_back(&ops_bf16);
      found.push_back(&ops_vnni);
      if (has_bf16() && !is_amd()) found.push_back(&ops_bf16);
    }
#endif
#if defined(KVC_WITH_AVX_VNNI)
    if (has_avx_vnni()) found.push_back(&ops_avx_vnni);
#endif
#if defined(KVC_WITH_AVX2)
    found.push_back(&ops_avx2);
#endif
  }
  found.push_back(&ops_scalar);
  return found;
}

#elif defined(KVC_WITH_NEON)
std::vector<const Ops*> find_levels() { return {&ops_neon, &ops_scalar}; }
#else
std::vector<const Ops*> find_levels() { return {&ops_scalar}; }
#endif

const std::vector<const Ops*>& found_levels() {
  static const std::vector<const Ops*> found = find_levels();
  return found;
}

std::atomic<const Ops*> chosen{nullptr};

}  // namespace

const char* name_of(Level level) {
  constexpr const char* names[] = {"scalar", "neon", "avx2", "avx_vnni", "vnni", "bf16", "amx"};
  return names[static_cast<int>(level)];
}

const Ops& ops() {
  const Ops* now = chosen.load(std::memory_order_relaxed);
  if (!now) {
    now = found_levels().front();
    chosen.store(now);
  }
  return *now;
}

std::vector<Level> levels() {
  std::vector<Level> found;
  for (const Ops* ops : found_levels()) found.push_back(ops->level);
  return found;
}

Level level() { return ops().level; }

void set_level(Level level) {
  std::string names;
  for (const Ops* found : found_levels()) {
    if (found->level == level) return chosen.store(found);
    names += (names.empty() ? "" : ", ") + std::string(name_of(found->level));
  }
  throw ConfigError("instruction set " + std::string(name_of(level)) + " is not here; choose " + names);
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

namespace {

struct SumCall {
  std::atomic<int64_t> next{0};
  int64_t n;
  const char* data;
  int64_t n_bytes;
  std::atomic<int64_t> total{0};
  static void work(void* raw, int) {
    auto* call = static_cast<SumCall*>(raw);
    constexpr int64_t piece = 1 << 18;
    double total = 0;
    for (int64_t i; (i = call->next.fetch_add(1, std::memory_order_relaxed)) < call->n;)
      total += ops().attend->sum(call->data + i * piece, std::min(piece, call->n_bytes - i * piece));
    call->total += static_cast<int64_t>(total);
  }
};

}  // namespace

double stream_read(const void* data, int64_t n_bytes, int n_threads) {
  SumCall call;
  call.data = static_cast<const char*>(data);
  call.n_bytes = n_bytes;
  call.n = (n_bytes + (1 << 18) - 1) >> 18;
  run_workers(static_cast<int>(std::min<int64_t>(workers_for(n_threads), call.n)), SumCall::work, &call);
  return static_cast<double>(call.total.load());
}

}  // namespace kvcellar
