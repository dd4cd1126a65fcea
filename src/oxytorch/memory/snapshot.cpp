// Statistics, snapshots and reports of a device's memory.
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "heap.h"

namespace oxytorch::memory {

namespace {

constexpr const char* kKindNames[kKinds] = {
    "allocation",      "segment",        "active",       "inactive_split",
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes",
    "requested_bytes"};
constexpr const char* kPoolNames[] = {"all", "small_pool", "large_pool"};
constexpr const char* kCountNames[] = {"current", "peak", "allocated", "freed"};
// Of what torch counts beyond max_split_size, which no policy here has.
constexpr const char* kOversizeNames[] = {"oversize_allocations", "oversize_segments"};
constexpr std::int64_t kNoSplitLimit = -1;  // as torch says it

std::string bytes_text(std::size_t bytes) {
  const double values[] = {bytes / double(kGiB), bytes / double(kMiB), bytes / double(kKiB)};
  const char* units[] = {"GiB", "MiB", "KiB"};
  char text[64];
  for (int i = 0; i < 3; ++i) {
    if (values[i] < 1) continue;
    std::snprintf(text, sizeof text, "%.2f %s", values[i], units[i]);
    return text;
  }
  std::snprintf(text, sizeof text, "%zu bytes", bytes);
  return text;
}

void field(std::string& text, const char* name, std::uint64_t value) {
  text += std::string("\"") + name + "\": " + std::to_string(value) + ", ";
}

const char* state_name(State state) {
  return state == State::kLive      ? "active_allocated"
         : state == State::kWaiting ? "active_pending_free"
                                    : "inactive";
}

// Neighbouring blocks with memory, up to the next gap: a segment to torch.
void write_segment(std::string& text, const Block* first, const Block* end, int device) {
  const Pool& pool = *first->pool;
  std::size_t total = 0, allocated = 0, active = 0, requested = 0;
  std::string blocks;
  for (const Block* block = first; block != end; block = block->next) {
    total += block->size;
    if (block->state == State::kLive) allocated += block->size;
    if (block->state != State::kFree) active += block->size;
    requested += block->requested;
    blocks += blocks.empty() ? "{" : ", {";
    field(blocks, "address", reinterpret_cast<std::uintptr_t>(block->begin));
    field(blocks, "size", block->size);
    field(blocks, "requested_size", block->requested);
    blocks += std::string("\"state\": \"") + state_name(block->state) + "\", \"frames\": []}";
  }
  text += "{";
  field(text, "device", device);
  field(text, "address", reinterpret_cast<std::uintptr_t>(first->begin));
  field(text, "total_size", total);
  field(text, "allocated_size", allocated);
  field(text, "active_size", active);
  field(text, "requested_size", requested);
  field(text, "stream", reinterpret_cast<std::uintptr_t>(pool.stream->handle));
  text += std::string("\"segment_type\": \"") + (pool.is_small ? "small" : "large") + "\", ";
  const PoolId id = pool.owner ? pool.owner->id : PoolId();
  text += "\"segment_pool_id\": [" + std::to_string(id.first) + ", " + std::to_string(id.second) +
          "], \"is_expandable\": " + (first->segment->page_size ? "true" : "false") +
          ", \"frames\": [], \"blocks\": [" + blocks + "]}";
}

std::string names() {
  std::string text;
  for (const char* kind : kKindNames)
    for (const char* pool : kPoolNames)
      for (const char* count : kCountNames)
        text += std::string(kind) + "." + pool + "." + count + "\n";
  for (const char* kind : kOversizeNames)
    for (const char* count : kCountNames) text += std::string(kind) + "." + count + "\n";
  return text + "num_alloc_retries\nnum_ooms\nnum_sync_all_streams\nnum_device_alloc\n" +
         "num_device_free\nnum_oom_rejections\nmax_split_size";
}

}  // namespace

int Heap::statistics(std::int64_t* values, int count) {
  std::lock_guard lock(mutex_);
  int at = 0;
  const auto put = [&](std::int64_t value) {
    if (at < count) values[at] = value;
    ++at;
  };
  for (const auto& kind : statistics_.stats) {
    for (const Stat& stat : kind) {
      put(stat.current);
      put(stat.peak);
      put(stat.allocated);
      put(stat.freed);
    }
  }
  for (std::size_t i = 0; i < std::size(kOversizeNames) * std::size(kCountNames); ++i) put(0);
  put(statistics_.retries);
  put(statistics_.ooms);
  put(statistics_.synchronizations);
  put(statistics_.source_allocations);
  put(statistics_.source_frees);
  put(0);
  put(kNoSplitLimit);
  return at;
}

void Heap::reset_peaks() {
  std::lock_guard lock(mutex_);
  for (auto& kind : statistics_.stats)
    for (Stat& stat : kind) stat.peak = stat.current;
}

void Heap::reset_accumulated() {
  std::lock_guard lock(mutex_);
  for (auto& kind : statistics_.stats)
    for (Stat& stat : kind) stat.allocated = stat.freed = 0;
  statistics_.retries = statistics_.ooms = statistics_.synchronizations = 0;
  statistics_.source_allocations = statistics_.source_frees = 0;
}

std::string Heap::snapshot() {
  std::lock_guard lock(mutex_);
  std::string text = "[";
  for (const auto& pool : pools_) {
    for (const auto& segment : pool->segments) {
      for (const Block* block = segment->first; block;) {
        if (block->state == State::kAbsent) {
          block = block->next;
          continue;
        }
        const Block* end = block;
        while (end && end->state != State::kAbsent) end = end->next;
        if (text.size() > 1) text += ", ";
        write_segment(text, block, end, device_);
        block = end;
      }
    }
  }
  return text + "]";
}

std::string Heap::report(std::size_t asked) {
  std::lock_guard lock(mutex_);
  return report_locked(asked);
}

std::size_t Heap::largest_free() const {
  std::size_t largest = 0;
  for (const auto& pool : pools_)
    if (!pool->free.empty()) largest = std::max(largest, (*pool->free.rbegin())->size);
  return largest;
}

// Who holds most of what is live; empty where no allocation has a site.
std::string Heap::holders() const {
  constexpr std::size_t kMost = 5;
  struct Held {
    std::size_t bytes = 0, blocks = 0;
    int site = 0;
  };
  std::map<int, Held> by_site;
  live_.for_each([&](const Block* block) {
    Held& held = by_site[block->site];
    held.bytes += block->size;
    ++held.blocks;
    held.site = block->site;
  });
  if (by_site.empty() || by_site.rbegin()->first == 0) return "";
  std::vector<Held> sorted;
  for (const auto& [site, held] : by_site) sorted.push_back(held);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Held& one, const Held& other) { return one.bytes > other.bytes; });
  std::string text = "\nMost is held by";
  for (std::size_t i = 0; i < std::min(kMost, sorted.size()); ++i)
    text += "\n  " + bytes_text(sorted[i].bytes) + " in " + std::to_string(sorted[i].blocks) +
            (sorted[i].blocks == 1 ? " block: " : " blocks: ") +
            (sorted[i].site ? site_name(sorted[i].site) : "what was there before the recording");
  return text;
}

namespace {

// What shows who holds a device's memory.
std::string tool_of(const std::string& source) {
  if (source == "CUDA") return ": see nvidia-smi.";
  return source == "SYCL" ? ": see xpu-smi." : ".";
}

}  // namespace

std::string Heap::report_locked(std::size_t asked) const {
  std::size_t free_bytes = 0, total = 0;
  const bool is_known =
      source_.memory_info(source_.context, device_, &free_bytes, &total) == OXYTORCH_MEMORY_OK;
  const auto now = [&](Kind kind) { return std::size_t(statistics_.current(kind)); };
  const std::size_t held = now(kReservedBytes), live = now(kAllocatedBytes);
  const std::size_t waiting = now(kActiveBytes) - live, cached = held - now(kActiveBytes);
  const std::size_t split = now(kInactiveSplitBytes);
  std::size_t in_graphs = 0;
  for (const auto& pool : pools_)
    if (pool->owner && pool->owner->users)
      for (const Block* block : pool->free) in_graphs += block->size;
  const std::string name = source_.name, device = " device " + std::to_string(device_);
  std::string text =
      asked ? name + " out of memory. Tried to allocate " + bytes_text(asked) + " on" + device + "."
            : name + device + ".";
  if (is_known)
    text += " It has " + bytes_text(total) + ", of which " + bytes_text(free_bytes) + " is free.";
  if (limit_) text += " This process may hold " + bytes_text(limit_) + " (its limit).";
  text += "\nHeld " + bytes_text(held) + ": live " + bytes_text(live) + " (asked for " +
          bytes_text(now(kRequestedBytes)) + "), waiting for other streams " + bytes_text(waiting) +
          ", cached " + bytes_text(cached) + ". Of what is cached, " + bytes_text(split) +
          " lies between live blocks and serves smaller requests alone";
  if (in_graphs) text += ", " + bytes_text(in_graphs) + " belongs to private pools (CUDA graphs)";
  text += ". The largest free block has " + bytes_text(largest_free()) + "." + holders();
  const std::size_t held_elsewhere =
      is_known && total > free_bytes + held ? total - free_bytes - held : 0;
  if ((limit_ && asked > limit_) || (is_known && asked > total)) {
    text += "\nNo allocator can serve this: it is more than there is in all.";
  } else if (asked && limit_ && asked <= free_bytes && held + asked > limit_) {
    text += "\nThe limit ends this, not the device: raise it with set_per_process_memory_fraction.";
  } else if (held_elsewhere > total / 4) {
    text += "\n" + bytes_text(held_elsewhere) +
            " is held by other programs and by libraries, outside this allocator" + tool_of(name);
  } else if (split > held / 10) {
    text += "\nMuch is lost between live blocks";
    text += name == "CUDA" ? ": oxytorch.memory.record() shows which they are." : ".";
  } else if (asked) {
    text +=
        "\nWhat is not cached is in use: a smaller batch, shorter sequences, activation "
        "checkpointing or a smaller dtype would help; another allocator would not.";
  }
  return text;
}

}  // namespace oxytorch::memory

extern "C" __attribute__((visibility("default"))) const char* oxytorch_memory_statistic_names(
    void) {
  static const std::string text = oxytorch::memory::names();
  return text.c_str();
}
