#include "core/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "core/export.h"
#include "core/huge_pages.h"
#include "core/torch_api.h"

// Exists in torch 2.11 and later.
extern "C" __attribute__((weak)) AOTITorchError torch_from_blob(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* made,
    int32_t layout, const uint8_t* opaque_metadata, int64_t opaque_metadata_size,
    void (*deleter)(void* data, void* context), void* context);

namespace oxytorch {

namespace {

constexpr std::size_t kLine = 64;
// Below this, malloc gives the same memory again.
constexpr std::size_t kLeast = 4096;
// Of addresses. Only what is used takes memory.
constexpr std::size_t kFirstChunk = std::size_t{64} << 20;
// Calls upon which memory that none of them needed goes back to the system.
constexpr int kCallsPerLook = 32;

std::atomic<bool> are_used{true};
std::atomic<bool> are_poisoned{false};

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

std::byte* map(std::size_t size) {
  return static_cast<std::byte*>(map_huge(size, PROT_READ | PROT_WRITE));
}

// Moves pages to other addresses, which have none; returns whether the system does it.
bool move(std::byte* from, std::size_t size, std::byte* to) {
  return mremap(from, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

// The whole pages in these bytes go back to the system; they are zeros when they are used again.
void release(std::byte* begin, std::byte* end) {
  const auto first = round_up(reinterpret_cast<std::uintptr_t>(begin), kLeast);
  const auto last = reinterpret_cast<std::uintptr_t>(end) / kLeast * kLeast;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

void poison(std::byte* begin, std::size_t size) {
  if (are_poisoned.load(std::memory_order_relaxed)) std::memset(begin, 0xff, size);
}

}  // namespace

// Arenas that no call has; the one that was used last is taken first.
class IdleArenas {
 public:
  // Never destroyed: tensors may outlive it at the end of the process.
  static IdleArenas& all() {
    static auto* arenas = new IdleArenas;
    return *arenas;
  }

  Arena* take() {
    Arena* found = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        found = idle_.back();
        idle_.pop_back();
      }
    }
    if (!found) found = new Arena;
    found->needed_ = found->asked_ = 0;
    found->reserved_ = 0;
    return found;
  }

  void give(Arena* arena) {
    {
      const std::lock_guard lock(mutex_);
      if (idle_.size() < most_) {
        idle_.push_back(arena);
        return;
      }
    }
    delete arena;
  }

  std::int64_t free() {
    std::vector<Arena*> idle;
    {
      const std::lock_guard lock(mutex_);
      idle.swap(idle_);
    }
    std::int64_t bytes = 0;
    for (Arena* arena : idle) {
      bytes += static_cast<std::int64_t>(arena->touched_);
      delete arena;
    }
    return bytes;
  }

 private:
  std::mutex mutex_;
  std::vector<Arena*> idle_;
  const std::size_t most_ = std::max(1u, std::thread::hardware_concurrency());
};

Arena::Owner Arena::take() {
  if (!torch_from_blob || !are_used.load(std::memory_order_relaxed)) return nullptr;
  return Owner(IdleArenas::all().take());
}

std::int64_t Arena::free_idle() { return IdleArenas::all().free(); }

void Arena::Deleter::operator()(Arena* arena) const {
  if (arena->end_call()) IdleArenas::all().give(arena);
}

Arena::~Arena() {
  for (const Range& chunk : chunks_) munmap(chunk.begin, chunk.size);
}

AtenTensorHandle Arena::empty(const std::int64_t* sizes, const std::int64_t* strides,
                              std::int64_t dim, std::int32_t dtype_code) {
  static const std::int32_t cpu = aoti_torch_device_type_cpu();
  static const std::int32_t strided = aoti_torch_layout_strided();
  std::size_t bytes = aoti_torch_dtype_element_size(dtype_code);
  for (std::int64_t i = 0; i < dim; ++i) {
    // Too much for any machine, or no shape: torch says so.
    if (sizes[i] < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(sizes[i]), &bytes)) {
      return nullptr;
    }
  }
  if (bytes < kLeast || bytes > std::size_t{1} << 46) return nullptr;
  std::byte* data = allocate(bytes);
  if (!data) return nullptr;
  AtenTensorHandle made = nullptr;
  const AOTITorchError error = torch_from_blob(data, dim, sizes, strides, 0, dtype_code, cpu, -1,
                                               &made, strided, nullptr, 0, &free_block, this);
  if (error != AOTI_TORCH_SUCCESS) free_block(data, this);
  check_call(error, "from_blob");
  return made;
}

std::size_t Arena::taken_for(std::size_t bytes) {
  // A line more, so that large blocks side by side do not begin at the same place of a page.
  return bytes < kLeast ? 0 : round_up(bytes, kLine) + kLine;
}

bool Arena::reserve(std::size_t total) {
  const std::lock_guard lock(mutex_);
  if ((chunks_.empty() || chunks_[0].size < total) && !join_chunks(total)) return false;
  reserved_ = total;
  return true;
}

// Takes `size` bytes from `begin` on out of a free range.
void Arena::cut(std::vector<Range>::iterator from, std::byte* begin, std::size_t size) {
  const Range before{from->begin, static_cast<std::size_t>(begin - from->begin)};
  const Range rest{begin + size, static_cast<std::size_t>(from->end() - begin) - size};
  if (before.size > 0) {
    *from = before;
    if (rest.size > 0) free_.insert(from + 1, rest);
  } else if (rest.size > 0) {
    *from = rest;
  } else {
    free_.erase(from);
  }
}

// The place that the plan has for a result of this step, null where it has none, and where somebody
// still holds what lay there: who looks on at the call, say.
std::byte* Arena::take_spot(std::size_t bytes, std::size_t size) {
  const auto spot = std::find_if(spots_.begin(), spots_.end(),
                                 [&](const Spot& each) { return each.bytes == bytes; });
  if (spot == spots_.end()) return nullptr;
  std::byte* begin = chunks_[0].begin + spot->begin;
  spots_.erase(spot);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    if (range->begin > begin || begin + size > range->end()) continue;
    cut(range, begin, size);
    return begin;
  }
  return nullptr;
}

std::byte* Arena::allocate(std::size_t bytes) {
  const std::size_t size = taken_for(bytes);
  const std::lock_guard lock(mutex_);
  std::byte* begin = take_spot(bytes, size);
  // Where a range begins that is not for spots, and how much is left there.
  const auto beyond = [&](const Range& range) {
    std::byte* from = range.begin;
    const bool is_first = reserved_ > 0 && from >= chunks_[0].begin && from < chunks_[0].end();
    if (is_first) from = std::max(from, chunks_[0].begin + reserved_);
    return Range{from, from < range.end() ? static_cast<std::size_t>(range.end() - from) : 0};
  };
  const auto smallest = [&] {
    auto best = free_.end();
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const std::size_t room = beyond(*range).size;
      if (room >= size && (best == free_.end() || room < beyond(*best).size)) best = range;
    }
    return best;
  };
  if (!begin) {
    auto from = smallest();
    if (from == free_.end()) {
      if (!grow(size)) return nullptr;
      from = smallest();
    }
    begin = beyond(*from).begin;
    cut(from, begin, size);
  }
  blocks_.push_back({{begin, size}, step_});
  poison(begin, size);
  asked_ += static_cast<std::int64_t>(bytes);
  std::size_t before = 0;  // of the chunks before this one, which are in use as a whole
  for (const Range& chunk : chunks_) {
    if (begin >= chunk.begin && begin < chunk.end()) {
      before += static_cast<std::size_t>(begin + size - chunk.begin);
      break;
    }
    before += chunk.size;
  }
  needed_ = std::max(needed_, static_cast<std::int64_t>(before));
  return begin;
}

bool Arena::grow(std::size_t least) {
  std::size_t size = kFirstChunk;
  for (const Range& chunk : chunks_) size += chunk.size;
  size = std::max(size, round_up(least, kHugePage));
  std::byte* begin = map(size);
  if (!begin) begin = map(size = round_up(least, kHugePage));
  if (!begin) return false;
  chunks_.push_back({begin, size});
  put_back({begin, size});
  return true;
}

void Arena::put_back(Range range) {
  const auto is_before = [](const Range& a, const std::byte* at) { return a.begin < at; };
  auto next = std::lower_bound(free_.begin(), free_.end(), range.begin, is_before);
  if (next != free_.end() && next->begin == range.end()) {
    next->begin = range.begin;
    next->size += range.size;
  } else {
    next = free_.insert(next, range);
  }
  if (next == free_.begin()) return;
  const auto previous = next - 1;
  if (previous->end() != next->begin) return;
  previous->size += next->size;
  free_.erase(next);
}

void Arena::free_block(void* data, void* context) {
  auto* arena = static_cast<Arena*>(context);
  bool is_over = false;
  {
    const std::lock_guard lock(arena->mutex_);
    auto block = arena->blocks_.end();
    do {
      --block;  // it is one of these, and most often one of the last
    } while (block->begin != data);
    const Range range = *block;
    arena->blocks_.erase(block);
    poison(range.begin, range.size);
    arena->put_back(range);
    if (arena->is_abandoned_) release(range.begin, range.end());
    is_over = arena->is_abandoned_ && arena->blocks_.empty();
  }
  if (is_over) delete arena;
}

std::vector<std::size_t> Arena::held_steps() {
  const std::lock_guard lock(mutex_);
  std::vector<std::size_t> steps;
  for (const Block& block : blocks_) steps.push_back(block.step);
  return steps;
}

// Returns whether another call may take it.
bool Arena::end_call() {
  const std::lock_guard lock(mutex_);
  if (!blocks_.empty()) {
    is_abandoned_ = true;
    for (const Range& range : free_) release(range.begin, range.end());
    return false;
  }
  const auto needed = static_cast<std::size_t>(needed_);
  touched_ = std::max(touched_, needed);
  lately_ = std::max(lately_, needed);
  if (chunks_.size() > 1) join_chunks(0);
  if (++calls_ == kCallsPerLook) shrink();
  return true;
}

// One chunk as large as all, and as `least`. What lay in them lies there one behind the other:
// pages that calls have waited for are moved. Nobody may hold a block.
bool Arena::join_chunks(std::size_t least) {
  std::size_t size = chunks_.empty() ? kFirstChunk : 0;
  for (const Range& chunk : chunks_) size += chunk.size;
  if (size < least) size = round_up(std::max(least, 2 * size), kHugePage);
  std::byte* begin = map(size);
  if (!begin) begin = map(size = round_up(least, kHugePage));
  bool moves = begin != nullptr;
  std::size_t moved = 0;
  for (const Range& chunk : chunks_) {
    moves = moves && moved + chunk.size <= size && move(chunk.begin, chunk.size, begin + moved);
    if (moves) {
      moved += chunk.size;
    } else {
      munmap(chunk.begin, chunk.size);
    }
  }
  touched_ = std::min(touched_, moved);
  chunks_.clear();
  free_.clear();
  if (!begin) return false;
  chunks_.push_back({begin, size});
  free_.push_back({begin, size});
  return true;
}

// Gives back what the last calls needed less than half of.
void Arena::shrink() {
  if (touched_ > 2 * lately_ && chunks_.size() == 1) {
    release(chunks_[0].begin + round_up(lately_, kHugePage), chunks_[0].end());
    touched_ = lately_;
  }
  lately_ = 0;
  calls_ = 0;
}

}  // namespace oxytorch

OXY_EXPORT std::int64_t oxytorch_free_arenas() { return oxytorch::Arena::free_idle(); }

// For tests. poisoned: what nothing was written to yet, or no more, holds 0xff bytes, which are
// NaN.
OXY_EXPORT void oxytorch_set_arenas(bool used, bool poisoned) {
  oxytorch::are_used = used;
  oxytorch::are_poisoned = poisoned;
}
