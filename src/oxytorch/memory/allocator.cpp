// The C functions.
#include "allocator.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <new>

#include "failure.h"
#include "heap.h"

using oxytorch::memory::Failure;
using oxytorch::memory::Heap;
using oxytorch::memory::PoolId;

struct oxytorch_memory {
  oxytorch_memory_source source;
  std::vector<std::unique_ptr<Heap>> heaps;
  unsigned forks;  // of the process, before it was made
};

namespace {

thread_local std::string error;
std::atomic<unsigned> forks{0};

// A child gets locks that no thread of its own holds, and knows that it is one.
struct Living {
  std::mutex mutex;
  std::set<oxytorch_memory*> memories;

  static Living& get() {
    static Living* living = new Living();
    return *living;
  }
  void lock_all() {
    mutex.lock();
    for (oxytorch_memory* memory : memories)
      for (auto& heap : memory->heaps) heap->mutex().lock();
  }
  void unlock_all() {
    for (oxytorch_memory* memory : memories)
      for (auto& heap : memory->heaps) heap->mutex().unlock();
    mutex.unlock();
  }

 private:
  Living() {
    pthread_atfork([] { get().lock_all(); }, [] { get().unlock_all(); },
                   [] {
                     forks.fetch_add(1);
                     get().unlock_all();
                   });
  }
};

int fail(int result, std::string text) { return oxytorch_memory_fail(result, std::move(text)); }

// No exception leaves a C function.
template <typename Function>
int guarded(Function function) {
  try {
    return function();
  } catch (const Failure& failure) {
    return fail(failure.result, failure.text);
  } catch (const std::bad_alloc&) {
    return fail(OXYTORCH_MEMORY_FAILED, "the process has no memory for the allocator's own lists");
  } catch (const std::exception& other) {
    return fail(OXYTORCH_MEMORY_FAILED, other.what());
  }
}

int expect(const oxytorch_memory* memory) {
  return oxytorch_memory_expect({{memory, "an allocator"}});
}

template <typename Function>
int on_device(oxytorch_memory* memory, int device, Function function) {
  if (const int result = expect(memory)) return result;
  if (device < 0 || std::size_t(device) >= memory->heaps.size())
    return fail(OXYTORCH_MEMORY_INVALID, "expected a device from 0 to " +
                                             std::to_string(int(memory->heaps.size()) - 1) +
                                             ", got " + std::to_string(device));
  return guarded([&] { return function(*memory->heaps[device]); });
}

template <typename Function>
int on_block(oxytorch_memory* memory, const void* data, const char* call, Function function) {
  if (const int result = expect(memory)) return result;
  return guarded([&] {
    for (auto& heap : memory->heaps)
      if (function(*heap)) return int(OXYTORCH_MEMORY_OK);
    char address[32];
    std::snprintf(address, sizeof address, "%p", data);
    return fail(OXYTORCH_MEMORY_INVALID,
                std::string(call) + ": " + address +
                    " is no live block of this allocator; it was freed before, or is another's");
  });
}

int write(const std::string& from, char* text, size_t size, size_t* needed) {
  if (const int result = oxytorch_memory_expect({{needed, "a place for needed"}})) return result;
  *needed = from.size() + 1;
  if (!text || size < *needed) return fail(OXYTORCH_MEMORY_TOO_SMALL, "the buffer is too small");
  std::memcpy(text, from.c_str(), *needed);
  return OXYTORCH_MEMORY_OK;
}

int expect_id(const uint64_t* id) { return oxytorch_memory_expect({{id, "the id of a pool"}}); }

// A device cannot be used in a child of the process that began to use it.
bool is_forked(const oxytorch_memory* memory) {
  return memory && memory->source.record && memory->forks != forks.load(std::memory_order_relaxed);
}

constexpr std::size_t kLargestPage = oxytorch::memory::kGiB;

// What a source lacks that a policy calls; null: nothing.
const char* missing_in(const oxytorch_memory_source& source, int policy) {
  if (!source.name) return "a name";
  if (source.devices < 1 || source.devices > oxytorch::memory::kMostDevices)
    return "at least one device, and at most 1024";
  if (source.record && !(source.query && source.wait && source.forget))
    return "query, wait and forget beside record";
  if (policy == OXYTORCH_MEMORY_NATIVE)
    return source.allocate && source.release ? nullptr : "allocate and release";
  if (source.granularity % oxytorch::memory::kAlignment || source.granularity > kLargestPage)
    return "a granularity of at most 1 GiB, in multiples of 512";
  const bool can_map = source.reserve && source.unreserve && source.create && source.destroy &&
                       source.map && source.unmap && source.grant && source.memory_info;
  return can_map ? nullptr
                 : "reserve, unreserve, create, destroy, map, unmap, grant and memory_info";
}

int tells_nothing(void*, int, std::size_t*, std::size_t*) { return OXYTORCH_MEMORY_FAILED; }

oxytorch_memory* put_together(const oxytorch_memory_source& source, int policy) {
  Living& living = Living::get();
  auto memory = std::make_unique<oxytorch_memory>();
  memory->source = source;
  if (!source.memory_info) memory->source.memory_info = tells_nothing;
  memory->forks = forks.load();
  const auto make = policy == OXYTORCH_MEMORY_NATIVE   ? oxytorch::memory::make_native
                    : policy == OXYTORCH_MEMORY_MAPPED ? oxytorch::memory::make_mapped
                                                       : oxytorch::memory::make_expandable;
  for (int device = 0; device < source.devices; ++device)
    memory->heaps.push_back(make(memory->source, device));
  std::lock_guard lock(living.mutex);
  return *living.memories.insert(memory.release()).first;
}

}  // namespace

int oxytorch_memory_fail(int result, std::string text) {
  error = std::move(text);
  return result;
}

int oxytorch_memory_expect(std::initializer_list<std::pair<const void*, const char*>> pointers) {
  for (const auto& [pointer, name] : pointers)
    if (!pointer)
      return fail(OXYTORCH_MEMORY_INVALID, std::string("expected ") + name + ", got null");
  return OXYTORCH_MEMORY_OK;
}

int oxytorch_memory_begin(oxytorch_memory* memory, int device, std::uint64_t first,
                          std::uint64_t second, std::function<bool(void*)> takes) {
  return on_device(memory, device, [&](Heap& heap) {
    heap.begin_pool(PoolId(first, second), std::move(takes));
    return 0;
  });
}

#pragma GCC visibility push(default)
extern "C" {

const char* oxytorch_memory_error(void) { return error.c_str(); }

oxytorch_memory* oxytorch_memory_create(const oxytorch_memory_source* source, int policy) {
  if (oxytorch_memory_expect({{source, "a source"}})) return nullptr;
  if (policy < OXYTORCH_MEMORY_NATIVE || policy > OXYTORCH_MEMORY_EXPANDABLE) {
    fail(OXYTORCH_MEMORY_INVALID, "expected a policy from 0 to 2, got " + std::to_string(policy));
    return nullptr;
  }
  if (source->name && policy != OXYTORCH_MEMORY_NATIVE && !source->granularity) {
    fail(OXYTORCH_MEMORY_INVALID,
         std::string(source->name) + " cannot map memory; use the native policy");
    return nullptr;
  }
  if (const char* missing = missing_in(*source, policy)) {
    fail(OXYTORCH_MEMORY_INVALID, std::string("expected a source with ") + missing);
    return nullptr;
  }
  oxytorch_memory* made = nullptr;
  guarded([&] { return made = put_together(*source, policy), 0; });
  return made;
}

void oxytorch_memory_destroy(oxytorch_memory* memory) {
  Living& living = Living::get();
  {
    std::lock_guard lock(living.mutex);
    living.memories.erase(memory);
  }
  delete memory;
}

int oxytorch_memory_allocate(oxytorch_memory* memory, int device, size_t bytes, void* stream,
                             void** data) {
  if (const int result = oxytorch_memory_expect({{data, "a place for data"}})) return result;
  *data = nullptr;
  if (is_forked(memory))
    return fail(OXYTORCH_MEMORY_FAILED,
                std::string(memory->source.name) +
                    " memory cannot be used after fork; start processes with spawn");
  return on_device(memory, device, [&](Heap& heap) {
    if (bytes) *data = heap.allocate(bytes, stream);
    return OXYTORCH_MEMORY_OK;
  });
}

int oxytorch_memory_free(oxytorch_memory* memory, void* data) {
  if (!data || is_forked(memory)) return OXYTORCH_MEMORY_OK;
  return on_block(memory, data, "free", [&](Heap& heap) { return heap.free(data); });
}

int oxytorch_memory_record_stream(oxytorch_memory* memory, void* data, void* stream) {
  if (!data) return OXYTORCH_MEMORY_OK;
  return on_block(memory, data, "record_stream",
                  [&](Heap& heap) { return heap.record_stream(data, stream); });
}

int oxytorch_memory_find(oxytorch_memory* memory, const void* inside, void** data, size_t* bytes) {
  if (const int result =
          oxytorch_memory_expect({{data, "a place for data"}, {bytes, "a place for bytes"}}))
    return result;
  return on_block(memory, inside, "find",
                  [&](Heap& heap) { return heap.find(inside, data, bytes); });
}

int oxytorch_memory_empty_cache(oxytorch_memory* memory, int device) {
  if (device != -1 || !memory)
    return on_device(memory, device, [](Heap& heap) { return heap.empty_cache(), 0; });
  return guarded([&] {
    for (auto& heap : memory->heaps) heap->empty_cache();
    return OXYTORCH_MEMORY_OK;
  });
}

int oxytorch_memory_set_limit(oxytorch_memory* memory, int device, size_t bytes) {
  return on_device(memory, device, [&](Heap& heap) { return heap.set_limit(bytes), 0; });
}

int oxytorch_memory_info(oxytorch_memory* memory, int device, size_t* free_bytes,
                         size_t* total_bytes) {
  if (const int result = oxytorch_memory_expect(
          {{free_bytes, "a place for free_bytes"}, {total_bytes, "a place for total_bytes"}}))
    return result;
  return on_device(memory, device,
                   [&](Heap& heap) { return heap.memory_info(free_bytes, total_bytes), 0; });
}

int oxytorch_memory_begin_pool(oxytorch_memory* memory, int device, const uint64_t id[2],
                               int (*takes)(void* argument, void* stream), void* argument) {
  if (const int result = expect_id(id)) return result;
  if (!takes) return fail(OXYTORCH_MEMORY_INVALID, "begin_pool: expected takes, got null");
  return oxytorch_memory_begin(memory, device, id[0], id[1],
                               [=](void* stream) { return takes(argument, stream) != 0; });
}

int oxytorch_memory_end_pool(oxytorch_memory* memory, int device, const uint64_t id[2]) {
  if (const int result = expect_id(id)) return result;
  return on_device(memory, device,
                   [&](Heap& heap) { return heap.end_pool(PoolId(id[0], id[1])), 0; });
}

int oxytorch_memory_release_pool(oxytorch_memory* memory, int device, const uint64_t id[2]) {
  if (const int result = expect_id(id)) return result;
  return on_device(memory, device,
                   [&](Heap& heap) { return heap.release_pool(PoolId(id[0], id[1])), 0; });
}

int oxytorch_memory_statistics(oxytorch_memory* memory, int device, int64_t* values, int count) {
  int found = 0;
  if (!values) count = 0;
  on_device(memory, device, [&](Heap& heap) { return found = heap.statistics(values, count), 0; });
  return found;
}

int oxytorch_memory_reset_peaks(oxytorch_memory* memory, int device) {
  return on_device(memory, device, [](Heap& heap) { return heap.reset_peaks(), 0; });
}

int oxytorch_memory_reset_accumulated(oxytorch_memory* memory, int device) {
  return on_device(memory, device, [](Heap& heap) { return heap.reset_accumulated(), 0; });
}

int oxytorch_memory_snapshot(oxytorch_memory* memory, int device, char* text, size_t size,
                             size_t* needed) {
  return on_device(memory, device,
                   [&](Heap& heap) { return write(heap.snapshot(), text, size, needed); });
}

int oxytorch_memory_report(oxytorch_memory* memory, int device, size_t asked, char* text,
                           size_t size, size_t* needed) {
  return on_device(memory, device,
                   [&](Heap& heap) { return write(heap.report(asked), text, size, needed); });
}

int oxytorch_memory_listen(oxytorch_memory* memory, oxytorch_memory_listener listener,
                           void* context) {
  if (const int result = expect(memory)) return result;
  for (auto& heap : memory->heaps) heap->listen(listener, context);
  return OXYTORCH_MEMORY_OK;
}

int oxytorch_memory_run(oxytorch_memory* memory, int device, const oxytorch_memory_step* steps,
                        size_t count, void** blocks, size_t block_count, size_t* done,
                        uint64_t* nanoseconds) {
  using Clock = std::chrono::steady_clock;
  if (const int result = oxytorch_memory_expect({{done, "a place for done"}})) return result;
  *done = 0;
  if (count && (!steps || !blocks))
    return oxytorch_memory_expect({{steps, "steps"}, {blocks, "blocks"}});
  for (; *done < count; ++*done) {
    const oxytorch_memory_step& step = steps[*done];
    if (step.what != OXYTORCH_MEMORY_DO_EMPTY_CACHE && step.block >= block_count)
      return fail(OXYTORCH_MEMORY_INVALID, "a step names a block beyond the array of blocks");
    void* const stream = reinterpret_cast<void*>(step.stream);
    const Clock::time_point begin = nanoseconds ? Clock::now() : Clock::time_point();
    int result = OXYTORCH_MEMORY_INVALID;
    switch (step.what) {
      case OXYTORCH_MEMORY_DO_ALLOCATE:
        result = oxytorch_memory_allocate(memory, device, step.bytes, stream, &blocks[step.block]);
        break;
      case OXYTORCH_MEMORY_DO_FREE:
        result = oxytorch_memory_free(memory, blocks[step.block]);
        break;
      case OXYTORCH_MEMORY_DO_RECORD_STREAM:
        result = oxytorch_memory_record_stream(memory, blocks[step.block], stream);
        break;
      case OXYTORCH_MEMORY_DO_EMPTY_CACHE:
        result = oxytorch_memory_empty_cache(memory, device);
        break;
      default:
        fail(result, "a step of an unknown kind");
    }
    if (nanoseconds) nanoseconds[*done] = std::chrono::nanoseconds(Clock::now() - begin).count();
    if (result) return result;
  }
  return OXYTORCH_MEMORY_OK;
}

}  // extern "C"
#pragma GCC visibility pop
