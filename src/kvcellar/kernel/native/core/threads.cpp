// Whose threads: those of the OpenMP runtime that torch has brought into the process, so that its
// workers and ours are the same ones; a pool given by the caller (ExecuTorch's); else our own.
//
// OpenMP joins all workers, also those that found no core and did nothing: where another process
// holds one, each call waits for its time slice. A worker of our own that is woken may take the core
// of whoever woke it, or lose its own before its work is done. So after calls in which the caller had
// to wait, or did not run, it works alone for a while. Threads of
// our own beside OpenMP's would not help: they and its workers, which spin after each operation of
// torch's, would take the core from each other.

#include "core/threads.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <string>
#endif

#include "core/pool.h"

namespace kvcellar {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using GetInt = int (*)();

struct OpenMp {
  GompParallel parallel = nullptr;
  GetInt max_threads = nullptr, thread_num = nullptr;
};

#if defined(__linux__)
int find_gomp(dl_phdr_info* info, size_t, void* data) {
  if (info->dlpi_name && std::strstr(info->dlpi_name, "libgomp")) {
    *static_cast<std::string*>(data) = info->dlpi_name;
    return 1;
  }
  return 0;
}

OpenMp look_for_openmp() {
  OpenMp found;
  std::string path;
  dl_iterate_phdr(find_gomp, &path);
  if (path.empty()) return found;
  void* lib = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!lib) return found;
  found.parallel = reinterpret_cast<GompParallel>(dlsym(lib, "GOMP_parallel"));
  found.max_threads = reinterpret_cast<GetInt>(dlsym(lib, "omp_get_max_threads"));
  found.thread_num = reinterpret_cast<GetInt>(dlsym(lib, "omp_get_thread_num"));
  if (!found.max_threads || !found.thread_num) found.parallel = nullptr;
  return found;
}
#else
OpenMp look_for_openmp() { return {}; }
#endif

OpenMp& openmp() {
  // Looked for until it is there: torch may be imported after us.
  static OpenMp found;
  static std::mutex lock;
  static std::atomic<bool> is_found{false};
  static std::atomic<int> looks_left{64};
  if (!is_found.load(std::memory_order_acquire) && looks_left.load() > 0) {
    std::lock_guard<std::mutex> guard(lock);
    if (!is_found) {
      --looks_left;
      OpenMp now = look_for_openmp();
      if (now.parallel) {
        found = now;
        is_found.store(true, std::memory_order_release);
      }
    }
  }
  static OpenMp none;
  return is_found.load(std::memory_order_acquire) ? found : none;
}

using Clock = std::chrono::steady_clock;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// Time that this thread has run; where a system does not say, time as it passes.
int64_t own_ns() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  timespec ran;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ran) == 0) return ran.tv_sec * INT64_C(1000000000) + ran.tv_nsec;
#endif
  return now_ns();
}

// Threads of our own, started when first wanted. One caller at a time; others work alone. Only workers
// that have begun are waited for.
class OwnPool {
 public:
  static OwnPool& instance() {
    static OwnPool* pool = new OwnPool;  // never destroyed: its threads wait until the process ends
    return *pool;
  }

  void run(int n_workers, void (*work)(void*, int), void* data) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn || n_workers < 2) return work(data, 0);
    {
      std::lock_guard<std::mutex> guard(lock_);
      while (static_cast<int>(threads_.size()) < n_workers - 1) {
        const int id = static_cast<int>(threads_.size()) + 1;
        threads_.emplace_back([this, id, seen = generation_] { serve(id, seen); });
      }
      work_ = work;
      data_ = data;
      n_workers_ = n_workers;
      is_open_ = true;
      ++generation_;
    }
    wake_.notify_all();
    work(data, 0);
    // All work is taken: who has not begun by now need not.
    std::unique_lock<std::mutex> guard(lock_);
    is_open_ = false;
    done_.wait(guard, [this] { return n_inside_ == 0; });
  }

 private:
  void serve(int id, uint64_t seen) {
    for (;;) {
      void (*work)(void*, int);
      void* data;
      {
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return is_open_ && generation_ != seen; });
        seen = generation_;
        if (id >= n_workers_) continue;
        work = work_;
        data = data_;
        ++n_inside_;
      }
      work(data, id);
      std::lock_guard<std::mutex> guard(lock_);
      if (--n_inside_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, lock_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  void (*work_)(void*, int) = nullptr;
  void* data_ = nullptr;
  int n_workers_ = 0, n_inside_ = 0;
  bool is_open_ = false;
  uint64_t generation_ = 0;
};

std::atomic<ParallelFor> given{nullptr};
thread_local ParallelFor callers = nullptr;
std::atomic<int> wanted{0};

struct GompCall {
  void (*work)(void*, int);
  void* data;
  GetInt thread_num;
  int64_t done_ns;  // when the caller found no more work
};

void gomp_entry(void* raw) {
  auto* call = static_cast<GompCall*>(raw);
  const int worker = call->thread_num();
  call->work(call->data, worker);
  if (worker == 0) call->done_ns = now_ns();
}

// Whether workers get the cores. A pause costs up to half its length where they would have
// got them after all. So a wait by itself is borne, as when another process has just ended its turn;
// only waits that take a good part of the time begin pauses, and make them longer.
class Crowd {
 public:
  bool is_quiet(int64_t at_ns) const { return at_ns >= until_ns_.load(std::memory_order_relaxed); }

  // A call worked for `worked_ns` and then waited for others.
  void note(int64_t at_ns, int64_t worked_ns, int64_t waited_ns) {
    if (waited_ns <= kWaitNs || waited_ns <= worked_ns / 2) return;
    const int64_t since_ns = at_ns - waited_ns - until_ns_.load(std::memory_order_relaxed);
    const int64_t last_ns = pause_ns_.load(std::memory_order_relaxed);
    const bool is_rare = since_ns > kTimesTheWait * waited_ns;
    const int64_t pause_ns = is_rare ? 0 : std::min(kLongestNs, 2 * std::max(waited_ns, last_ns));
    pause_ns_.store(pause_ns, std::memory_order_relaxed);
    until_ns_.store(at_ns + pause_ns, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t kWaitNs = 1000000;  // far more than the last piece of work takes
  static constexpr int64_t kLongestNs = 800000000, kTimesTheWait = 8;
  std::atomic<int64_t> until_ns_{0}, pause_ns_{0};
};

Crowd crowd;

}  // namespace

void run_workers(int n_workers, void (*work)(void*, int), void* data) {
  if (n_workers < 2) return work(data, 0);
  if (ParallelFor run = callers ? callers : given.load()) return run(n_workers, work, data);
  const int64_t start_ns = now_ns();
  if (!crowd.is_quiet(start_ns)) return work(data, 0);
  OpenMp& omp = openmp();
  int64_t worked_ns;
  if (omp.parallel) {
    GompCall call{work, data, omp.thread_num, start_ns};
    // A team smaller than the last one ends the others' threads, and torch would start them again.
    const int team = wanted.load() ? n_workers : std::max(n_workers, omp.max_threads());
    omp.parallel(gomp_entry, &call, static_cast<unsigned>(team), 0);
    worked_ns = call.done_ns - start_ns;
  } else {
    const int64_t before_ns = own_ns();
    OwnPool::instance().run(n_workers, work, data);
    worked_ns = own_ns() - before_ns;
  }
  const int64_t end_ns = now_ns();
  crowd.note(end_ns, worked_ns, end_ns - start_ns - worked_ns);
}

// Processors for threads of our own: as many as OpenMP would take, by its variable too.
int own_threads() {
  const char* asked = std::getenv("OMP_NUM_THREADS");
  if (const int n = asked ? std::atoi(asked) : 0; n > 0) return n;
  const unsigned cores = std::thread::hardware_concurrency();
  return cores ? static_cast<int>(cores) : 1;
}

int num_threads() {
  if (const int n = wanted.load()) return n;
  OpenMp& omp = openmp();
  if (omp.max_threads) return omp.max_threads();
  static const int n_own = own_threads();
  return n_own;
}

int workers_for(int n_threads) { return n_threads > 0 ? n_threads : num_threads(); }

CallersThreads::CallersThreads(ParallelFor run) : before_(callers) { callers = run; }

CallersThreads::~CallersThreads() { callers = before_; }

void set_num_threads(int n) { wanted.store(n > 0 ? n : 0); }

void set_parallel_for(ParallelFor run) { given.store(run); }

Threads threads_of() {
  if (given.load()) return Threads::given;
  return openmp().parallel ? Threads::openmp : Threads::own;
}

}  // namespace kvcellar
