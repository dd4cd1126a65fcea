// The policy of torch's native caching allocator: whole segments, split and merged.
#include "heap.h"

namespace oxytorch::memory {

namespace {

class Native : public Heap {
 public:
  using Heap::Heap;
  ~Native() override { Native::release_all(); }

 protected:
  Block* grow(Pool& pool, std::size_t size) override {
    const std::size_t bytes = size <= kSmall       ? kSmallSegment
                              : size < kLargeAlone ? kLargeSegment
                                                   : round_up(size, kLargeUnit);
    if (!may_hold(bytes)) return nullptr;
    void* data = nullptr;
    if (!check("allocate", source_.allocate(source_.context, device_, bytes, &data)))
      return nullptr;
    auto segment = std::make_unique<Segment>();
    segment->pool = &pool;
    segment->begin = static_cast<std::byte*>(data);
    segment->size = bytes;
    segment->first = new_block(segment.get(), segment->begin, bytes, State::kFree);
    Block* block = segment->first;
    pool.segments.push_back(std::move(segment));
    statistics_.change(kSegment, pool.is_small, 1);
    note_held(pool.is_small, std::int64_t(bytes));
    tell(OXYTORCH_MEMORY_SEGMENT_ALLOC, data, bytes, pool.stream);
    return block;
  }

  bool should_split(const Pool& pool, std::size_t rest) const override {
    return pool.is_small ? rest >= kAlignment : rest > kSmall;
  }

  std::size_t split_bytes(const Block& block) const override {
    return block.previous || block.next ? block.size : 0;
  }

  void release_free() override {
    for (auto& pool : pools_) {
      if (pool->owner && pool->owner->users) continue;
      for (auto at = pool->segments.begin(); at != pool->segments.end();) {
        Block* block = (*at)->first;
        const bool is_free = block->state == State::kFree && !block->next;
        if (!is_free || !is_done(*pool->stream, block->epoch)) {
          ++at;
          continue;
        }
        remove_free(block);
        release(**at);
        unlink(block);
        at = pool->segments.erase(at);
      }
    }
  }

  void release_all() override {
    for (auto& pool : pools_)
      for (auto& segment : pool->segments) release(*segment);
    pools_.clear();
  }

 private:
  void release(Segment& segment) {
    const bool is_small = segment.pool->is_small;
    statistics_.change(kSegment, is_small, -1);
    note_held(is_small, -std::int64_t(segment.size));
    tell(OXYTORCH_MEMORY_SEGMENT_FREE, segment.begin, segment.size, segment.pool->stream);
    // What a driver refuses to take back is lost, and no reason to end a program.
    source_.release(source_.context, device_, segment.begin, segment.size);
  }
};

}  // namespace

std::unique_ptr<Heap> make_native(const oxytorch_memory_source& source, int device) {
  return std::make_unique<Native>(source, device);
}

}  // namespace oxytorch::memory
