// Physical pages behind virtual addresses: what the mapping policies share.
#pragma once

#include "heap.h"

namespace oxytorch::memory {

class PagedHeap : public Heap {
 public:
  using Heap::Heap;

 protected:
  bool should_split(const Pool&, std::size_t rest) const override { return rest >= kAlignment; }
  std::size_t split_bytes(const Block& block) const override;
  void release_free() override { release(false); }
  void release_all() override;
  // Of all pools, or of private pools that no graph uses.
  void release(bool only_private);

  // New addresses for a pool, all absent; null: there are none.
  Segment* add_segment(Pool& pool, std::size_t page_size, std::size_t least);
  // Pages that lie in a block as a whole: the first slot, and the one behind the last.
  static std::pair<std::size_t, std::size_t> whole_slots(const Block& block);
  // A new page, in use nowhere; null: the source or the limit has no more.
  Page* create_page(const Pool& pool, std::size_t page_size);
  void destroy_page(Page* page);
  bool map(Segment& segment, std::size_t slot, Page* page);
  // Addresses of pages that were mapped may be used from now on; false: the source refuses.
  bool grant(Segment& segment, std::size_t first, std::size_t last);
  void unmap(Segment& segment, std::size_t slot);
  // The page is in use, or free, at this slot, where it is mapped.
  void put_page(Segment& segment, std::size_t slot, Page* page);

  // Slots of a free block (that is in its set) become absent; their pages are in use nowhere.
  void carve(Block* block, std::size_t first, std::size_t last);
  // Absent addresses of slots that have their pages become free. `from`: a block before them.
  void fill(Block* from, std::byte* begin, std::byte* end);
  void put_absent(Block* block);
  // Segments are counted as snapshots show them: neighbours with memory behind them are one.
  void count_segments(const Block& block, int change);
  // Whether nothing can still use the page, nor any address at which it is mapped.
  bool is_idle(const Page& page) const;

  std::vector<Page*> loose_;  // in use nowhere

 private:
  void release_pool_pages(Pool& pool);

  std::vector<std::unique_ptr<Page>> pages_;
};

}  // namespace oxytorch::memory
