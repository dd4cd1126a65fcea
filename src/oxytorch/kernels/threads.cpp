// Threads of liboxytorch_kernels.so, as torch's `parallel_for` has them.
#include <sched.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core/old_runtime.h"
#include "kernels/memory.h"

namespace oxytorch::kernels {

namespace {

using Piece = void (*)(std::int64_t begin, std::int64_t end, void* data);

// Some microseconds, after which a waiting thread sleeps.
constexpr int kSpins = 4000;

int processors() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return CPU_COUNT(&allowed);
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Never destroyed: its threads sleep until the process ends.
class Pool {
 public:
  static Pool& of_process() {
    static auto* pool = new Pool;
    return *pool;
  }

  int size() const { return wanted_.load(std::memory_order_relaxed); }
  void resize(int threads) { wanted_.store(threads, std::memory_order_relaxed); }

  void run(std::int64_t items, std::int64_t grain, Piece piece, void* data) {
    const std::int64_t most = (items + grain - 1) / std::max<std::int64_t>(grain, 1);
    const std::int64_t parts = std::min<std::int64_t>(most, size());
    const std::unique_lock<std::mutex> own(calls_, std::try_to_lock);
    if (parts <= 1 || !own.owns_lock()) return piece(0, items, data);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // A thread that came late to the last job may still look for a part of it.
      while (inside_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
      items_ = items, piece_ = piece, data_ = data;
      each_ = (items + parts - 1) / parts;
      next_.store(1, std::memory_order_relaxed);
      parts_ = (items + each_ - 1) / each_;
      left_.store(parts_, std::memory_order_relaxed);
      for (; started_ < parts_ - 1; ++started_) std::thread([this] { serve(); }).detach();
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(0);
    for (std::int64_t part; (part = next_.fetch_add(1, std::memory_order_acq_rel)) < parts_;) {
      work(part);
    }
    while (left_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

 private:
  void work(std::int64_t part) {
    piece_(part * each_, std::min((part + 1) * each_, items_), data_);
    left_.fetch_sub(1, std::memory_order_acq_rel);
  }

  void serve() {
    std::uint64_t seen = 0;
    while (true) {
      for (int i = 0; i < kSpins && job_.load(std::memory_order_acquire) == seen; ++i) {
        if (i % 64 == 63) std::this_thread::yield();
      }
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
        seen = job_.load(std::memory_order_acquire);
        if (left_.load(std::memory_order_acquire) == 0) continue;
        inside_.fetch_add(1, std::memory_order_acq_rel);
      }
      for (std::int64_t part; (part = next_.fetch_add(1, std::memory_order_acq_rel)) < parts_;) {
        work(part);
      }
      inside_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::atomic<int> wanted_{processors()};
  std::mutex calls_;  // one call at a time has the threads
  std::mutex mutex_;  // of the job
  std::condition_variable wake_;
  std::atomic<std::uint64_t> job_{0};
  std::atomic<std::int64_t> next_{0}, left_{0}, inside_{0};
  std::int64_t started_ = 0, items_ = 0, each_ = 1, parts_ = 0;
  Piece piece_ = nullptr;
  void* data_ = nullptr;
};

}  // namespace

void set_threads(int threads) { Pool::of_process().resize(threads); }
int threads() { return Pool::of_process().size(); }

}  // namespace oxytorch::kernels

extern "C" {

AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                  void (*piece)(int64_t, int64_t, void*), void* data) {
  if (begin < end) oxytorch::kernels::Pool::of_process().run(end, grain, piece, data);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_get_num_threads(uint32_t* found) {
  *found = static_cast<uint32_t>(oxytorch::kernels::threads());
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
