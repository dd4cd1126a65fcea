// Threads that allocate and free across streams at once. Run under ThreadSanitizer by
// tests/memory/test_allocator_threads.py: stress POLICY THREADS OPERATIONS
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "memory/allocator.h"

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// The live blocks of all threads: none may overlap.
std::mutex mutex;
std::map<std::uintptr_t, std::size_t> live;
std::atomic<long> mistakes{0}, failures{0};

void enter(void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  std::lock_guard lock(mutex);
  const auto next = live.lower_bound(begin);
  if (next != live.end() && next->first < begin + bytes) ++mistakes;
  if (next != live.begin() && std::prev(next)->first + std::prev(next)->second > begin) ++mistakes;
  live[begin] = bytes;
}

void leave(void* data) {
  std::lock_guard lock(mutex);
  live.erase(reinterpret_cast<std::uintptr_t>(data));
}

void work(oxytorch_memory* memory, int thread, long operations) {
  std::mt19937 random(thread);
  std::vector<void*> blocks;
  const auto free_one = [&](std::size_t at) {
    leave(blocks[at]);
    if (oxytorch_memory_free(memory, blocks[at])) ++mistakes;
    blocks[at] = blocks.back();
    blocks.pop_back();
  };
  for (long i = 0; i < operations; ++i) {
    const auto stream = reinterpret_cast<void*>(std::uintptr_t{8} * (random() % 4));
    if (blocks.size() < 40 && random() % 2) {
      const std::size_t sizes[] = {700, 50'000, kMiB, 3 * kMiB, 12 * kMiB};
      const std::size_t bytes = 1 + sizes[random() % 5] / (1 + random() % 3);
      void* data = nullptr;
      if (oxytorch_memory_allocate(memory, 0, bytes, stream, &data)) {
        ++failures;
        while (blocks.size() > 4) free_one(random() % blocks.size());
        continue;
      }
      enter(data, bytes);
      blocks.push_back(data);
    } else if (!blocks.empty()) {
      const std::size_t at = random() % blocks.size();
      if (random() % 8 == 0 && oxytorch_memory_record_stream(memory, blocks[at], stream))
        ++mistakes;
      free_one(at);
    }
    if (random() % 5000 == 0) oxytorch_memory_empty_cache(memory, 0);
    if (random() % 1000 == 0) {
      std::int64_t values[256];
      oxytorch_memory_statistics(memory, 0, values, 256);
    }
  }
  while (!blocks.empty()) free_one(blocks.size() - 1);
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return std::fprintf(stderr, "stress POLICY THREADS OPERATIONS\n"), 2;
  const oxytorch_memory_fake settings = {1, 2 * kMiB, 2048 * kMiB, 20};
  oxytorch_memory_source source;
  oxytorch_memory_fake_source(&settings, &source);
  oxytorch_memory* memory = oxytorch_memory_create(&source, std::atoi(words[1]));
  std::vector<std::thread> threads;
  const int thread_count = std::atoi(words[2]);
  for (int i = 0; i < thread_count; ++i)
    threads.emplace_back(work, memory, i, std::atol(words[3]) / thread_count);
  for (std::thread& thread : threads) thread.join();
  oxytorch_memory_empty_cache(memory, 0);
  oxytorch_memory_fake_counts counts;
  oxytorch_memory_fake_count(&source, &counts);
  oxytorch_memory_destroy(memory);
  std::printf("overlaps and failed calls %ld, out of memory %ld, still held %lu, mistakes %lu %s\n",
              mistakes.load(), failures.load(), counts.held_bytes, counts.mistakes,
              oxytorch_memory_fake_mistake(&source));
  oxytorch_memory_fake_end(&source);
  return mistakes || counts.held_bytes || counts.mistakes;
}
