// torch's expandable segments: a range of addresses per stream and pool, which grows by pages of
// 2 or 20 MiB from its lowest gap on, and gives back pages that are free as a whole.
#include <algorithm>
#include <iterator>

#include "pages.h"

namespace oxytorch::memory {

namespace {

class Expandable : public PagedHeap {
 public:
  using PagedHeap::PagedHeap;
  ~Expandable() override { release_all(); }

 protected:
  Block* grow(Pool& pool, std::size_t size) override {
    const std::size_t page_size =
        round_up(pool.is_small ? kSmallExpansion : kLargeExpansion, source_.granularity);
    Block* block = find_place(pool, size);
    if (!block) {
      Segment* segment = add_segment(pool, page_size, size);
      if (!segment) return nullptr;
      block = segment->first;
    }
    if (block->state == State::kAbsent) block = map_block(block, std::min(size, block->size));
    while (block && block->size < size)
      block = map_block(block->next, std::min(size - block->size, block->next->size));
    if (block) remove_free(block);
    return block;
  }

  // A block before addresses that have no memory yet counts as large as it can grow.
  Blocks::iterator choose(const Pool& pool, Blocks::iterator smallest) const override {
    const auto room = [](const Block* block) {
      const Block* next = block->next;
      return block->size + (next && next->state == State::kAbsent ? next->size : 0);
    };
    auto found = smallest;
    for (auto next = std::next(found); next != pool.free.end() && room(*next) < room(*found);)
      found = next++;
    return found;
  }

 private:
  static bool is_available(const Block* block) {
    return block && (block->state == State::kFree || block->state == State::kAbsent);
  }

  // The first of neighbours, free or absent, that have `size` addresses; at the lowest address.
  Block* find_place(Pool& pool, std::size_t size) {
    for (auto& segment : pool.segments) {
      for (Block* block = segment->first; block; block = block->next) {
        if (block->state != State::kAbsent) continue;
        Block* first = is_available(block->previous) ? block->previous : block;
        std::size_t found = 0;
        for (Block* at = first; found < size && is_available(at); at = at->next) found += at->size;
        if (found >= size) return first;
      }
    }
    return nullptr;
  }

  // Maps the beginning of an absent block; returns the free block that it has become part of.
  Block* map_block(Block* block, std::size_t size) {
    Segment& segment = *block->segment;
    Pool& pool = *segment.pool;
    std::byte* begin = block->begin;
    const std::size_t first = segment.slot_of(begin);
    const std::size_t last =
        segment.slot_of(begin + round_up(size, segment.page_size) - segment.page_size) + 1;
    std::vector<Page*> pages;
    bool is_made = true;
    for (std::size_t slot = first; slot < last && is_made; ++slot) {
      Page* page = create_page(pool, segment.page_size);
      if (page) pages.push_back(page);
      is_made = page && map(segment, slot, page);
    }
    if (!is_made || !grant(segment, first, last)) {
      for (Page* page : pages) destroy_page(page);
      return nullptr;
    }
    for (std::size_t slot = first; slot < last; ++slot)
      put_page(segment, slot, pages[slot - first]);
    Block* before = block->previous;
    const bool joins = before && before->state == State::kFree;
    fill(block, begin, segment.address(last));
    if (joins) return before;
    return before ? before->next : segment.first;
  }
};

}  // namespace

std::unique_ptr<Heap> make_expandable(const oxytorch_memory_source& source, int device) {
  return std::make_unique<Expandable>(source, device);
}

}  // namespace oxytorch::memory
