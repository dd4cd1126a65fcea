// Our policy. A request that fits no free block takes the whole pages that are free anywhere, and
// has them mapped where there are enough addresses. They stay mapped where they were: a page whose
// old addresses are wanted again goes back there without a call of the driver.
#include <algorithm>
#include <functional>

#include "pages.h"

namespace oxytorch::memory {

namespace {

// What it costs to bring a page to a slot, in units of moving one that is mapped there.
constexpr std::size_t kMove = 1, kMap = 16, kUnmap = 32;
// From so many new pages on, the device is asked first whether it has them.
constexpr std::size_t kManyPages = 64;
constexpr std::size_t kNever = std::size_t{1} << 40;

// Slots that would have pages, so that a request has its place.
struct Window {
  Segment* segment = nullptr;
  Block* before = nullptr;  // the live block before it; null: there is none
  std::size_t first = 0, last = 0;
  std::size_t created = kNever, cost = kNever;

  bool is_better_than(const Window& other) const {
    return created != other.created ? created < other.created : cost < other.cost;
  }
};

class Mapped : public PagedHeap {
 public:
  using PagedHeap::PagedHeap;
  ~Mapped() override { release_all(); }

 protected:
  Block* grow(Pool& pool, std::size_t size) override {
    // A survey looks at every free page. It is left out where no page can come of it: programs
    // whose small blocks all lie in parts of large pages come here for each of them.
    if (pool.segments.empty())
      if (Block* part = part_of_page(pool, size)) return part;
    survey(pool);
    if (!supplied_)
      if (Block* part = part_of_page(pool, size)) return part;
    Window window = find_window(pool, size);
    if (window.created > 0)
      if (Block* part = part_of_page(pool, size)) return part;
    Block* block = window.segment ? assemble(pool, window) : nullptr;
    if (block || failure_) return block;
    survey(pool);
    window = tail_window(pool, size);
    return window.segment ? assemble(pool, window) : nullptr;
  }

  // It has used all free pages already.
  void make_room() override { release(true); }

 private:
  struct Supply {
    Block* block;
    std::size_t first, last;
  };

  // A block of the other pool of the stream, before memory grows; null: there is none.
  Block* part_of_page(const Pool& pool, std::size_t size) {
    return pool.owner ? nullptr : best_fit(pool_of(*pool.stream, !pool.is_small, nullptr), size);
  }

  // Finds the pages that this pool may use.
  void survey(const Pool& pool) {
    ++survey_;
    supply_.clear();
    supplied_ = 0;
    for (auto& [handle, stream] : streams_) harvest(*stream);
    for (auto& other : pools_) {
      // A graph may use all of its pool at any time.
      if (other->owner) continue;
      const bool is_in_order = other->stream == pool.stream && !pool.owner;
      bool has_busy = false;
      Block least;
      least.size = page_size_;
      for (auto at = other->free.lower_bound(&least); at != other->free.end(); ++at) {
        Block* block = *at;
        const auto [first, last] = whole_slots(*block);
        if (first == last) continue;
        if (!is_in_order && !is_done(*other->stream, block->epoch)) {
          has_busy = true;
          continue;
        }
        supply_.push_back({block, first, last});
        supplied_ += last - first;
        for (std::size_t slot = first; slot < last; ++slot) {
          Page* page = block->segment->slots[slot].page;
          page->survey = survey_;
          page->block = block;
        }
      }
      // At the next try it may be done.
      if (has_busy) close_if_open(*other->stream);
    }
    for (Page* page : loose_) supplied_ += may_use(pool, *page);
    // The smallest blocks first: large ones serve large requests as they are.
    std::stable_sort(supply_.begin(), supply_.end(), [](const Supply& one, const Supply& other) {
      return one.block->size < other.block->size;
    });
  }

  void close_if_open(Stream& stream) {
    if (stream.closing.empty()) close(stream);
  }

  bool may_use(const Pool& pool, const Page& page) const {
    return !page.stream || (page.stream == pool.stream && !pool.owner) ||
           is_done(*page.stream, page.epoch);
  }

  Window find_window(Pool& pool, std::size_t size) {
    Window best;
    for (auto& segment : pool.segments) {
      Block* before = nullptr;
      for (Block* block = segment->first; block;) {
        if (block->state == State::kLive || block->state == State::kWaiting) {
          before = block;
          block = block->next;
          continue;
        }
        std::byte* begin = block->begin;
        std::byte* end = begin;
        for (; block && (block->state == State::kFree || block->state == State::kAbsent);
             block = block->next)
          end = block->end();
        if (std::size_t(end - begin) >= size) look_at_gap(*segment, before, begin, end, size, best);
      }
    }
    return best;
  }

  void look_at_gap(Segment& segment, Block* before, std::byte* begin, std::byte* end,
                   std::size_t size, Window& best) {
    const std::size_t page = page_size_;
    const std::size_t from = begin - segment.begin, to = end - segment.begin;
    const std::size_t first = round_up(from, page) / page, last = to / page;
    const std::size_t head = first * page - from, tail = to - last * page;
    const auto pages_for = [&](std::size_t bytes) { return (bytes + page - 1) / page; };
    const auto consider = [&](std::size_t at, std::size_t count, std::size_t cost) {
      const bool grows = !segment.pool->owner && count > supplied_;
      const std::size_t created = grows ? count - supplied_ : 0;
      const Window window{&segment, before, at, at + count, created, cost};
      if (count && cost < kNever && window.is_better_than(best)) best = window;
    };
    if (first > last) return;
    const auto cost_of = [&](std::size_t at, std::size_t count) {
      std::size_t cost = 0;
      for (std::size_t slot = at; slot < at + count; ++slot)
        cost += cost_of_slot(segment, slot, first, last);
      return cost;
    };
    // From the part of a page on that is free at the beginning, up to the one at the end.
    if (head + (last - first) * page + tail >= size) {
      const std::size_t count = std::min(pages_for(size - std::min(size, head)), last - first);
      consider(first, count, cost_of(first, count));
    }
    if (tail) {
      const std::size_t count = pages_for(size - std::min(size, tail));
      if (count <= last - first) consider(last - count, count, cost_of(last - count, count));
    }
    const std::size_t count = pages_for(size);
    if (last - first < count) return;
    // Behind the last slot that was ever used all windows are alike.
    const std::size_t stop = std::min(last - count, std::max(first, segment.slots.size()));
    std::size_t cost = cost_of(first, count);
    for (std::size_t at = first;; ++at) {
      consider(at, count, cost);
      if (at >= stop) return;
      cost += cost_of_slot(segment, at + count, first, last);
      cost -= cost_of_slot(segment, at, first, last);
    }
  }

  std::size_t cost_of_slot(const Segment& segment, std::size_t at, std::size_t first,
                           std::size_t last) const {
    if (at >= segment.slots.size()) return kMap;
    const Slot& slot = segment.slots[at];
    const Page* page = slot.page;
    if (!page) return kMap;
    const bool is_in_gap = page->segment == &segment && page->slot >= first && page->slot < last;
    if (is_in_gap && page->slot == at) return 0;
    if (page->survey == survey_ && !is_in_gap) return kMove;
    return may_unmap(segment, at) ? kUnmap + kMap : kNever;
  }

  // Whether nothing uses the addresses of a slot whose page is in use elsewhere.
  bool may_unmap(const Segment& segment, std::size_t at) const {
    // A graph may use all of its pool at any time.
    return !segment.pool->owner && is_done(*segment.pool->stream, segment.slots[at].left);
  }

  // Behind all slots that were ever used; new addresses, if there is no room. Null: there are none.
  Window tail_window(Pool& pool, std::size_t size) {
    const std::size_t count = round_up(size, page_size_) / page_size_;
    for (auto& segment : pool.segments) {
      const std::size_t first = segment->slots.size();
      if (first + count <= segment->size / page_size_)
        return {segment.get(), nullptr, first, first + count, 0, 0};
    }
    Segment* segment = add_segment(pool, page_size_, size);
    if (!segment) return {};
    return {segment, nullptr, 0, count, 0, 0};
  }

  // Fills a window with pages; returns the free block that it has become, or null.
  Block* assemble(Pool& pool, const Window& window) {
    Segment& segment = *window.segment;
    if (segment.slots.size() < window.last) segment.slots.resize(window.last);
    std::vector<std::size_t> moving, wanting;
    // What lies in the window stays there.
    for (std::size_t at = window.first; at < window.last; ++at)
      if (segment.has(at)) segment.slots[at].page->survey = 0;
    for (std::size_t at = window.first; at < window.last; ++at) {
      Page* page = segment.slots[at].page;
      if (segment.has(at)) continue;
      if (page && page->survey == survey_ && page->segment) {
        page->survey = 0;
        moving.push_back(at);
      } else if (page && !may_unmap(segment, at)) {
        // Two of its slots are mapped to one page.
        return nullptr;
      } else {
        wanting.push_back(at);
      }
    }
    std::vector<Page*> taken;
    if (!take_pages(pool, wanting.size(), taken)) return nullptr;
    std::vector<Page*> leaving = taken;
    for (std::size_t at : moving) leaving.push_back(segment.slots[at].page);
    carve_out(leaving);
    if (!map_pages(segment, wanting, taken)) {
      loose_.insert(loose_.end(), leaving.begin(), leaving.end());
      return nullptr;
    }
    for (std::size_t at = window.first; at < window.last; ++at)
      if (!segment.has(at)) put_page(segment, at, segment.slots[at].page);
    std::byte* begin = segment.address(window.first);
    fill(window.before ? window.before : segment.first, begin, segment.address(window.last));
    Block* block = window.before ? window.before : segment.first;
    while (block->end() <= begin) block = block->next;
    remove_free(block);
    return block;
  }

  // So many pages that may leave where they are; they do not yet.
  bool take_pages(Pool& pool, std::size_t count, std::vector<Page*>& taken) {
    std::vector<Page*> loose;
    for (Page* page : loose_) {
      const bool is_taken = taken.size() < count && may_use(pool, *page);
      (is_taken ? taken : loose).push_back(page);
    }
    for (const Supply& supply : supply_) {
      for (std::size_t at = supply.last; at > supply.first && taken.size() < count; --at) {
        Page* page = supply.block->segment->slots[at - 1].page;
        if (page->survey != survey_) continue;
        page->survey = 0;
        taken.push_back(page);
      }
    }
    if (create_pages(pool, count - taken.size(), taken)) {
      loose_.swap(loose);
      return true;
    }
    return false;
  }

  // All or none: a request that cannot be met must not take what others need.
  bool create_pages(const Pool& pool, std::size_t count, std::vector<Page*>& pages) {
    const std::size_t before = pages.size();
    if (!may_hold(count * page_size_) || (count > kManyPages && !has_room(count))) return false;
    while (pages.size() < before + count) {
      Page* page = create_page(pool, page_size_);
      if (!page) {
        for (; pages.size() > before; pages.pop_back()) destroy_page(pages.back());
        return false;
      }
      pages.push_back(page);
    }
    return true;
  }

  bool has_room(std::size_t count) {
    std::size_t free_bytes = 0, total = 0;
    return check("memory_info",
                 source_.memory_info(source_.context, device_, &free_bytes, &total)) &&
           count <= free_bytes / page_size_;
  }

  // Pages leave the free blocks that they are parts of.
  void carve_out(const std::vector<Page*>& pages) {
    std::vector<Page*> sorted;
    for (Page* page : pages)
      if (page->segment) sorted.push_back(page);
    // From the end on: what is before a run stays the block that the survey found.
    std::sort(sorted.begin(), sorted.end(), [](const Page* one, const Page* other) {
      if (one->segment != other->segment) return std::less<>()(one->segment, other->segment);
      return one->slot > other->slot;
    });
    for (std::size_t i = 0; i < sorted.size();) {
      Block* block = sorted[i]->block;
      const std::size_t last = sorted[i]->slot + 1;
      std::size_t first = sorted[i]->slot;
      for (++i; i < sorted.size() && sorted[i]->block == block && sorted[i]->slot + 1 == first; ++i)
        --first;
      carve(block, first, last);
    }
  }

  // All or none.
  bool map_pages(Segment& segment, const std::vector<std::size_t>& slots,
                 const std::vector<Page*>& pages) {
    std::size_t mapped = 0;
    bool is_made = true;
    for (; mapped < slots.size() && is_made; mapped += is_made) {
      if (segment.slots[slots[mapped]].page) unmap(segment, slots[mapped]);
      is_made = map(segment, slots[mapped], pages[mapped]);
    }
    for (std::size_t i = 0; i < slots.size() && is_made;) {
      const std::size_t begin = i;
      for (++i; i < slots.size() && slots[i] == slots[i - 1] + 1;) ++i;
      is_made = grant(segment, slots[begin], slots[i - 1] + 1);
    }
    if (!is_made)
      while (mapped) unmap(segment, slots[--mapped]);
    return is_made;
  }

  const std::size_t page_size_ = round_up(kMappedPage, source_.granularity);
  std::uint64_t survey_ = 0;
  std::vector<Supply> supply_;
  std::size_t supplied_ = 0;  // pages
};

}  // namespace

std::unique_ptr<Heap> make_mapped(const oxytorch_memory_source& source, int device) {
  return std::make_unique<Mapped>(source, device);
}

}  // namespace oxytorch::memory
