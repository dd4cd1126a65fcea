// A source of numbers in place of memory. It notices what a driver would refuse, and what would
// break a program: pages unmapped or given back while work may still use them.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "allocator.h"
#include "failure.h"
#include "policy.h"
#include "source_parts.h"

namespace {

using oxytorch::memory::round_up;

struct Device {
  std::map<std::uintptr_t, std::size_t> segments, ranges;
  std::map<std::uint64_t, std::size_t> pages;
  struct Mapping {
    std::uint64_t page;
    std::size_t bytes;
    bool is_granted;
  };
  std::map<std::uintptr_t, Mapping> mappings;
  std::size_t held = 0;
};

struct Fake {
  oxytorch_memory_fake settings;
  std::mutex mutex;
  std::vector<Device> devices;
  oxytorch_memory_fake_counts counts = {};
  std::uint64_t every = 0, fallible = 0, calls = 0, events = 0, pages = 0;
  std::map<std::uint64_t, std::uint64_t> happens;  // event: the number of the call at which it does
  std::uintptr_t next = std::uintptr_t{1} << 40, lowest = std::uintptr_t{1} << 46;
  std::string mistake;

  int wrong(const char* text) {
    if (!counts.mistakes++) mistake = text;
    return OXYTORCH_MEMORY_INVALID;
  }
  void count(int call) {
    ++counts.calls[call];
    ++calls;
  }
  bool fails() { return every && ++fallible % every == 0; }
  bool has_room(const Device& device, std::size_t bytes) const {
    return bytes <= settings.total_bytes && device.held <= settings.total_bytes - bytes;
  }
  void hold(Device& device, std::size_t bytes) {
    device.held += bytes;
    counts.held_bytes += bytes;
    counts.peak_bytes = std::max(counts.peak_bytes, counts.held_bytes);
  }
  void give_back(Device& device, std::size_t bytes) {
    device.held -= bytes;
    counts.held_bytes -= bytes;
  }
  void* addresses(std::size_t bytes) {
    const std::uintptr_t begin = next;
    // Neighbours do not touch.
    next += round_up(bytes, std::size_t{2} << 20) + (std::size_t{2} << 20);
    return reinterpret_cast<void*>(begin);
  }

  // Downwards, as those of CUDA: it decides between free blocks of one size.
  void* segment(std::size_t bytes) {
    lowest -= round_up(bytes, std::size_t{2} << 20) + (std::size_t{2} << 20);
    return reinterpret_cast<void*>(lowest);
  }
};

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

bool holds(const std::map<std::uintptr_t, std::size_t>& places, const void* data,
           std::size_t bytes) {
  const auto found = places.find(number(data));
  return found != places.end() && found->second == bytes;
}

// Locks, and counts the call.
struct Call {
  Call(void* context, int device, int call)
      : fake(*static_cast<Fake*>(context)), lock(fake.mutex), device(fake.devices[device]) {
    fake.count(call);
  }
  Fake& fake;
  std::lock_guard<std::mutex> lock;
  Device& device;
};

int allocate(void* context, int device, std::size_t bytes, void** data) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_ALLOCATE);
  if (call.fake.fails() || !call.fake.has_room(call.device, bytes)) return OXYTORCH_MEMORY_OUT;
  *data = call.fake.segment(bytes);
  call.device.segments[number(*data)] = bytes;
  call.fake.hold(call.device, bytes);
  return OXYTORCH_MEMORY_OK;
}

int release(void* context, int device, void* data, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_RELEASE);
  if (!holds(call.device.segments, data, bytes)) return call.fake.wrong("release: no such segment");
  call.device.segments.erase(number(data));
  call.fake.give_back(call.device, bytes);
  return OXYTORCH_MEMORY_OK;
}

int reserve(void* context, int device, std::size_t bytes, void** address) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_RESERVE);
  if (call.fake.fails()) return OXYTORCH_MEMORY_OUT;
  if (!bytes || bytes % call.fake.settings.granularity)
    return call.fake.wrong("reserve: no multiple of a page");
  *address = call.fake.addresses(bytes);
  call.device.ranges[number(*address)] = bytes;
  return OXYTORCH_MEMORY_OK;
}

int unreserve(void* context, int device, void* address, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_UNRESERVE);
  if (!holds(call.device.ranges, address, bytes))
    return call.fake.wrong("unreserve: no such range");
  const auto mapping = call.device.mappings.lower_bound(number(address));
  if (mapping != call.device.mappings.end() && mapping->first < number(address) + bytes)
    return call.fake.wrong("unreserve: it is mapped");
  call.device.ranges.erase(number(address));
  return OXYTORCH_MEMORY_OK;
}

int create(void* context, int device, std::size_t bytes, std::uint64_t* page) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_CREATE);
  if (!bytes || bytes % call.fake.settings.granularity)
    return call.fake.wrong("create: no multiple of a page");
  if (call.fake.fails() || !call.fake.has_room(call.device, bytes)) return OXYTORCH_MEMORY_OUT;
  *page = ++call.fake.pages;
  call.device.pages[*page] = bytes;
  call.fake.hold(call.device, bytes);
  return OXYTORCH_MEMORY_OK;
}

int destroy(void* context, int device, std::uint64_t page, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_DESTROY);
  const auto found = call.device.pages.find(page);
  if (found == call.device.pages.end() || found->second != bytes)
    return call.fake.wrong("destroy: no such page");
  call.device.pages.erase(found);
  call.fake.give_back(call.device, bytes);
  return OXYTORCH_MEMORY_OK;
}

int map(void* context, int device, void* address, std::uint64_t page, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_MAP);
  if (call.fake.fails()) return OXYTORCH_MEMORY_OUT;
  const auto found = call.device.pages.find(page);
  if (found == call.device.pages.end() || found->second != bytes)
    return call.fake.wrong("map: no such page");
  auto range = call.device.ranges.upper_bound(number(address));
  if (range == call.device.ranges.begin()) return call.fake.wrong("map: not reserved");
  --range;
  if (number(address) + bytes > range->first + range->second)
    return call.fake.wrong("map: not reserved");
  auto& mappings = call.device.mappings;
  auto next = mappings.lower_bound(number(address));
  if (next != mappings.end() && next->first < number(address) + bytes)
    return call.fake.wrong("map: mapped already");
  if (next != mappings.begin() &&
      std::prev(next)->first + std::prev(next)->second.bytes > number(address))
    return call.fake.wrong("map: mapped already");
  mappings[number(address)] = {page, bytes, false};
  call.fake.counts.mapped_bytes += bytes;
  return OXYTORCH_MEMORY_OK;
}

int unmap(void* context, int device, void* address, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_UNMAP);
  const auto found = call.device.mappings.find(number(address));
  if (found == call.device.mappings.end() || found->second.bytes != bytes)
    return call.fake.wrong("unmap: not mapped");
  call.device.mappings.erase(found);
  call.fake.counts.mapped_bytes -= bytes;
  return OXYTORCH_MEMORY_OK;
}

int grant(void* context, int device, void* address, std::size_t bytes) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_GRANT);
  if (call.fake.fails()) return OXYTORCH_MEMORY_OUT;
  std::uintptr_t at = number(address);
  const std::uintptr_t end = at + bytes;
  while (at < end) {
    const auto found = call.device.mappings.find(at);
    if (found == call.device.mappings.end()) return call.fake.wrong("grant: not mapped");
    found->second.is_granted = true;
    at += found->second.bytes;
  }
  return OXYTORCH_MEMORY_OK;
}

int record(void* context, int device, void*, std::uint64_t* event) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_RECORD);
  Fake& fake = call.fake;
  *event = ++fake.events;
  const std::int64_t delay = fake.settings.event_delay;
  fake.happens[*event] = delay < 0 ? ~std::uint64_t{0} : fake.calls + std::uint64_t(delay);
  return OXYTORCH_MEMORY_OK;
}

int query(void* context, int device, std::uint64_t event) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_QUERY);
  const auto found = call.fake.happens.find(event);
  if (found == call.fake.happens.end()) return call.fake.wrong("query: no such event");
  const bool has_happened = call.fake.settings.event_delay == 0 || found->second <= call.fake.calls;
  return has_happened ? OXYTORCH_MEMORY_OK : OXYTORCH_MEMORY_PENDING;
}

int wait(void* context, int device, std::uint64_t event) {
  Call call(context, device, OXYTORCH_MEMORY_CALL_WAIT);
  const auto found = call.fake.happens.find(event);
  if (found == call.fake.happens.end()) return call.fake.wrong("wait: no such event");
  // What was recorded before on another stream may be open still; here it is not.
  for (auto& [other, at] : call.fake.happens)
    if (other <= event) at = std::min(at, call.fake.calls);
  return OXYTORCH_MEMORY_OK;
}

void forget(void* context, int, std::uint64_t event) {
  Fake& fake = *static_cast<Fake*>(context);
  std::lock_guard lock(fake.mutex);
  if (!fake.happens.erase(event)) fake.wrong("forget: no such event");
}

int memory_info(void* context, int device, std::size_t* free_bytes, std::size_t* total_bytes) {
  Fake& fake = *static_cast<Fake*>(context);
  std::lock_guard lock(fake.mutex);
  *total_bytes = fake.settings.total_bytes;
  *free_bytes = *total_bytes - fake.devices[device].held;
  return OXYTORCH_MEMORY_OK;
}

// Null, with an error, for what is no source of this kind (any more).
Fake* fake_of(const oxytorch_memory_source* source) {
  if (source && source->allocate == allocate && source->context)
    return static_cast<Fake*>(source->context);
  oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, "expected a fake source that has not ended");
  return nullptr;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int oxytorch_memory_fake_source(const oxytorch_memory_fake* settings,
                                oxytorch_memory_source* source) {
  if (const int result =
          oxytorch_memory_expect({{settings, "settings"}, {source, "a place for source"}}))
    return result;
  if (settings->devices < 1 || settings->devices > oxytorch::memory::kMostDevices)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, "expected 1 to 1024 devices, got " +
                                                             std::to_string(settings->devices));
  Fake* fake = new Fake();
  fake->settings = *settings;
  fake->devices.resize(settings->devices);
  *source = {};
  source->name = "fake";
  source->context = fake;
  source->devices = settings->devices;
  oxytorch::memory::set_segments(*source, allocate, release);
  oxytorch::memory::set_pages(*source, settings->granularity, reserve, unreserve, create, destroy,
                              map, unmap, grant);
  oxytorch::memory::set_events(*source, record, query, wait, forget);
  oxytorch::memory::set_host_memory(*source, allocate, release);
  source->memory_info = memory_info;
  return OXYTORCH_MEMORY_OK;
}

void oxytorch_memory_fake_end(oxytorch_memory_source* source) {
  Fake* fake = fake_of(source);
  if (!fake) return;
  delete fake;
  *source = {};
}

int oxytorch_memory_fake_count(const oxytorch_memory_source* source,
                               oxytorch_memory_fake_counts* counts) {
  Fake* fake = fake_of(source);
  if (!fake) return OXYTORCH_MEMORY_INVALID;
  if (const int result = oxytorch_memory_expect({{counts, "a place for counts"}})) return result;
  std::lock_guard lock(fake->mutex);
  *counts = fake->counts;
  return OXYTORCH_MEMORY_OK;
}

int oxytorch_memory_fake_fail(const oxytorch_memory_source* source, uint64_t every) {
  Fake* fake = fake_of(source);
  if (!fake) return OXYTORCH_MEMORY_INVALID;
  std::lock_guard lock(fake->mutex);
  fake->every = every;
  fake->fallible = 0;
  return OXYTORCH_MEMORY_OK;
}

uint64_t oxytorch_memory_fake_page(const oxytorch_memory_source* source, int device,
                                   const void* address) {
  Fake* fake = fake_of(source);
  if (!fake || device < 0 || device >= fake->settings.devices) return 0;
  std::lock_guard lock(fake->mutex);
  const auto& mappings = fake->devices[device].mappings;
  auto found = mappings.upper_bound(number(address));
  if (found == mappings.begin()) return 0;
  --found;
  const std::size_t inside = number(address) - found->first;
  if (inside >= found->second.bytes || !found->second.is_granted) return 0;
  return (found->second.page << 20) + inside / fake->settings.granularity;
}

const char* oxytorch_memory_fake_mistake(const oxytorch_memory_source* source) {
  Fake* fake = fake_of(source);
  return fake ? fake->mistake.c_str() : "";
}

}  // extern "C"
#pragma GCC visibility pop
