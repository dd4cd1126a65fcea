// Threads that allocate and free across streams at once. Run under ThreadSanitizer by
// tests/memory/test_allocator_threads.py: stress POLICY THREADS OPERATIONS PHYSICAL
#include <algorithm>
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

constexpr std::size_t kPage = 2 * kMiB;
constexpr int kDevices = 2;

// Live bytes of all threads, by address or, with PHYSICAL, by the pages that are mapped there: no
// two may overlap. Locks are many, so that threads meet in the allocator and not here.
struct Live {
  std::mutex mutex;
  std::map<std::uintptr_t, std::uintptr_t> ranges;  // begin, end
};
Live live[256];
bool is_physical = false;
oxytorch_memory_source source;
std::atomic<long> mistakes{0}, failures{0};

// Calls function(begin, end) for each part of a block that lies in one page.
template <typename Function>
void for_parts(int device, void* data, std::size_t bytes, Function function) {
  const auto first = reinterpret_cast<std::uintptr_t>(data);
  for (std::uintptr_t at = first; at < first + bytes;) {
    const std::uintptr_t end = std::min(first + bytes, at / kPage * kPage + kPage);
    std::uintptr_t page = at / kPage;
    if (is_physical) {
      const auto granule = oxytorch_memory_fake_page(&source, device, reinterpret_cast<void*>(at));
      if (!granule) ++mistakes;
      // The page's number, and which part of it; no page has so many.
      page = (granule >> 20) * 64 + (granule & 0xFFFFF);
    }
    const std::uintptr_t begin = page * kPage + at % kPage;
    function(live[page % 256], begin, begin + (end - at));
    at = end;
  }
}

void enter(int device, void* data, std::size_t bytes) {
  for_parts(device, data, bytes, [](Live& part, std::uintptr_t begin, std::uintptr_t end) {
    std::lock_guard lock(part.mutex);
    const auto next = part.ranges.lower_bound(begin);
    if (next != part.ranges.end() && next->first < end) ++mistakes;
    if (next != part.ranges.begin() && std::prev(next)->second > begin) ++mistakes;
    part.ranges[begin] = end;
  });
}

void leave(int device, void* data, std::size_t bytes) {
  for_parts(device, data, bytes, [](Live& part, std::uintptr_t begin, std::uintptr_t) {
    std::lock_guard lock(part.mutex);
    if (!part.ranges.erase(begin)) ++mistakes;
  });
}

struct Block {
  void* data;
  std::size_t bytes;
  int device;
};

void work(oxytorch_memory* memory, int thread, long operations) {
  std::mt19937 random(thread);
  std::vector<Block> blocks;
  const auto free_one = [&](std::size_t at) {
    const Block block = blocks[at];
    leave(block.device, block.data, block.bytes);
    if (oxytorch_memory_free(memory, block.data)) ++mistakes;
    blocks[at] = blocks.back();
    blocks.pop_back();
  };
  for (long i = 0; i < operations; ++i) {
    const auto stream = reinterpret_cast<void*>(std::uintptr_t{8} * (random() % 4));
    if (blocks.size() < 40 && random() % 2) {
      const std::size_t sizes[] = {700, 50'000, kMiB, 3 * kMiB, 12 * kMiB};
      const std::size_t bytes = 1 + sizes[random() % 5] / (1 + random() % 3);
      const int device = int(random() % kDevices);
      void* data = nullptr;
      if (oxytorch_memory_allocate(memory, device, bytes, stream, &data)) {
        ++failures;
        while (blocks.size() > 4) free_one(random() % blocks.size());
        continue;
      }
      enter(device, data, bytes);
      blocks.push_back({data, bytes, device});
    } else if (!blocks.empty()) {
      const std::size_t at = random() % blocks.size();
      if (random() % 8 == 0 && oxytorch_memory_record_stream(memory, blocks[at].data, stream))
        ++mistakes;
      free_one(at);
    }
    if (random() % 50000 == 0) oxytorch_memory_empty_cache(memory, int(random() % kDevices));
    if (random() % 1000 == 0) {
      std::int64_t values[256];
      oxytorch_memory_statistics(memory, int(random() % kDevices), values, 256);
    }
  }
  while (!blocks.empty()) free_one(blocks.size() - 1);
}

// What is counted as in use once all is freed.
std::int64_t left(oxytorch_memory* memory) {
  std::int64_t sum = 0;
  for (int device = 0; device < kDevices; ++device) {
    std::int64_t values[256] = {};
    oxytorch_memory_statistics(memory, device, values, 256);
    // Kinds are 12 counts apart: allocation, segment, active, ...; the first is what is there now.
    for (const int kind : {0, 2, 3, 4, 5, 6, 7, 8}) sum += values[12 * kind];
  }
  return sum;
}

}  // namespace

int main(int count, char** words) {
  if (count != 5) return std::fprintf(stderr, "stress POLICY THREADS OPERATIONS PHYSICAL\n"), 2;
  const oxytorch_memory_fake settings = {kDevices, kPage, 320 * kMiB, 20};
  oxytorch_memory_fake_source(&settings, &source);
  oxytorch_memory* memory = oxytorch_memory_create(&source, std::atoi(words[1]));
  is_physical = std::atoi(words[4]) != 0;
  std::vector<std::thread> threads;
  const int thread_count = std::atoi(words[2]);
  for (int i = 0; i < thread_count; ++i)
    threads.emplace_back(work, memory, i, std::atol(words[3]) / thread_count);
  for (std::thread& thread : threads) thread.join();
  oxytorch_memory_empty_cache(memory, -1);
  const std::int64_t counted = left(memory);
  std::size_t remembered = 0;
  for (const Live& part : live) remembered += part.ranges.size();
  oxytorch_memory_fake_counts counts;
  oxytorch_memory_fake_count(&source, &counts);
  oxytorch_memory_destroy(memory);
  std::printf(
      "overlaps and failed calls %ld, out of memory %ld, still held %lu, still counted %ld, "
      "mistakes %lu %s\n",
      mistakes.load(), failures.load(), counts.held_bytes, long(counted), counts.mistakes,
      oxytorch_memory_fake_mistake(&source));
  oxytorch_memory_fake_end(&source);
  return mistakes || counts.held_bytes || counted || remembered || counts.mistakes;
}
