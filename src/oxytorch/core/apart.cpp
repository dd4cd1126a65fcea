#include "core/apart.h"

#include <sched.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "core/export.h"
#include "core/torch_api.h"

namespace oxytorch {

namespace {

// Times that the first thread lets others run in its place until they have come.
constexpr int kYields = 1000;

thread_local std::int64_t threads_apart = 1;

class Region {
 public:
  explicit Region(std::int64_t threads) : threads_(threads) { CPU_ZERO(&taken_); }

  void enter(std::int64_t begin, std::int64_t end) {
    take_processor();
    arrived_ += end - begin;
    if (begin > 0) return;
    for (int yields = 0; arrived_ < threads_ && yields < kYields; ++yields) {
      std::this_thread::yield();
    }
  }

 private:
  void take_processor() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    int own = sched_getcpu();
    if (own < 0 || own >= CPU_SETSIZE) return;
    if (CPU_ISSET(own, &taken_)) {
      cpu_set_t others;
      CPU_XOR(&others, &allowed, &taken_);
      CPU_AND(&others, &others, &allowed);
      if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return;
      own = sched_getcpu();
      sched_setaffinity(0, sizeof(allowed), &allowed);
    }
    CPU_SET(own, &taken_);
  }

  std::int64_t threads_;
  std::atomic<std::int64_t> arrived_{0};
  std::mutex mutex_;
  cpu_set_t taken_;
};

}  // namespace

void set_apart(std::int64_t threads) {
  if (threads <= threads_apart) return;
  threads_apart = threads;
  Region region(threads);
  const auto enter = [](std::int64_t begin, std::int64_t end, void* data) {
    static_cast<Region*>(data)->enter(begin, end);
  };
  check_call(torch_parallel_for(0, threads, 1, enter, &region), "parallel_for");
}

}  // namespace oxytorch

OXY_EXPORT void oxytorch_set_apart(int threads) { oxytorch::set_apart(threads); }
