#include "pages.h"

#include <algorithm>

namespace oxytorch::memory {

std::pair<std::size_t, std::size_t> PagedHeap::whole_slots(const Block& block) {
  const Segment& segment = *block.segment;
  const std::size_t first = round_up(block.begin - segment.begin, segment.page_size);
  const std::size_t last = round_down(block.end() - segment.begin, segment.page_size);
  if (last <= first) return {0, 0};
  return {first / segment.page_size, last / segment.page_size};
}

std::size_t PagedHeap::split_bytes(const Block& block) const {
  const auto [first, last] = whole_slots(block);
  return block.size - (last - first) * block.segment->page_size;
}

Segment* PagedHeap::add_segment(Pool& pool, std::size_t page_size, std::size_t least) {
  std::size_t free_bytes = 0, total = 0;
  if (!check("memory_info", source_.memory_info(source_.context, device_, &free_bytes, &total)))
    return nullptr;
  std::size_t size = round_up(std::max(total * kAddressesPerByte, least), page_size);
  void* address = nullptr;
  int result = source_.reserve(source_.context, device_, size, &address);
  // Fewer addresses will do where a process may not have so many (`ulimit -v`).
  while (result == OXYTORCH_MEMORY_OUT && size / 2 >= least && size / 2 >= page_size) {
    size = round_up(size / 2, page_size);
    result = source_.reserve(source_.context, device_, size, &address);
  }
  if (!check("reserve", result)) return nullptr;
  auto segment = std::make_unique<Segment>();
  segment->pool = &pool;
  segment->begin = static_cast<std::byte*>(address);
  segment->size = size;
  segment->page_size = page_size;
  segment->first = new_block(segment.get(), segment->begin, size, State::kAbsent);
  pool.absent.insert(segment->first);
  pool.segments.push_back(std::move(segment));
  return pool.segments.back().get();
}

Page* PagedHeap::create_page(const Pool& pool, std::size_t page_size) {
  if (!may_hold(page_size)) return nullptr;
  std::uint64_t handle = 0;
  if (!check("create", source_.create(source_.context, device_, page_size, &handle)))
    return nullptr;
  pages_.push_back(std::make_unique<Page>());
  Page* page = pages_.back().get();
  page->handle = handle;
  page->size = page_size;
  page->index = pages_.size() - 1;
  page->is_small = pool.is_small;
  note_held(pool.is_small, std::int64_t(page_size));
  tell(OXYTORCH_MEMORY_SEGMENT_ALLOC, nullptr, page_size, pool.stream);
  return page;
}

void PagedHeap::destroy_page(Page* page) {
  while (!page->mappings.empty()) {
    const auto [segment, slot] = page->mappings.back();
    unmap(*segment, slot);
  }
  // What a driver refuses to take back is lost, and no reason to end a program.
  source_.destroy(source_.context, device_, page->handle, page->size);
  note_held(page->is_small, -std::int64_t(page->size));
  tell(OXYTORCH_MEMORY_SEGMENT_FREE, nullptr, page->size, nullptr);
  const std::size_t index = page->index;
  std::swap(pages_[index], pages_.back());
  pages_[index]->index = index;
  pages_.pop_back();
}

bool PagedHeap::map(Segment& segment, std::size_t slot, Page* page) {
  const std::size_t size = segment.page_size;
  std::byte* address = segment.address(slot);
  if (!check("map", source_.map(source_.context, device_, address, page->handle, size)))
    return false;
  if (segment.slots.size() <= slot) segment.slots.resize(slot + 1);
  segment.slots[slot].page = page;
  page->mappings.emplace_back(&segment, slot);
  tell(OXYTORCH_MEMORY_SEGMENT_MAP, address, size, segment.pool->stream);
  return true;
}

bool PagedHeap::grant(Segment& segment, std::size_t first, std::size_t last) {
  std::byte* begin = segment.address(first);
  const std::size_t size = (last - first) * segment.page_size;
  return check("grant", source_.grant(source_.context, device_, begin, size));
}

void PagedHeap::unmap(Segment& segment, std::size_t slot) {
  Page* page = segment.slots[slot].page;
  std::byte* address = segment.address(slot);
  source_.unmap(source_.context, device_, address, segment.page_size);
  tell(OXYTORCH_MEMORY_SEGMENT_UNMAP, address, segment.page_size, segment.pool->stream);
  segment.slots[slot] = {};
  auto& mappings = page->mappings;
  mappings.erase(std::find(mappings.begin(), mappings.end(), std::pair(&segment, slot)));
}

void PagedHeap::put_page(Segment& segment, std::size_t slot, Page* page) {
  page->segment = &segment;
  page->slot = slot;
  const bool is_small = segment.pool->is_small;
  if (page->is_small == is_small) return;
  page->is_small = is_small;
  const std::int64_t bytes = std::int64_t(segment.page_size);
  statistics_.stats[kReservedBytes][is_small ? 2 : 1].change(-bytes);
  statistics_.stats[kReservedBytes][is_small ? 1 : 2].change(bytes);
}

void PagedHeap::count_segments(const Block& block, int change) {
  const auto is_there = [](const Block* other) { return other && other->state != State::kAbsent; };
  change *= 1 - is_there(block.previous) - is_there(block.next);
  if (change) statistics_.change(kSegment, block.pool->is_small, change);
}

void PagedHeap::put_absent(Block* block) {
  count_segments(*block, -1);
  block->state = State::kAbsent;
  Blocks& absent = block->pool->absent;
  if (Block* next = block->next; next && next->state == State::kAbsent) {
    absent.erase(next);
    block->size += next->size;
    unlink(next);
  }
  if (Block* previous = block->previous; previous && previous->state == State::kAbsent) {
    absent.erase(previous);
    previous->size += block->size;
    unlink(block);
    block = previous;
  }
  absent.insert(block);
}

void PagedHeap::carve(Block* block, std::size_t first, std::size_t last) {
  Segment& segment = *block->segment;
  std::byte *begin = segment.address(first), *end = segment.address(last);
  remove_free(block);
  if (block->end() > end) put_free(cut(block, end - block->begin));
  Block* middle = block;
  if (block->begin < begin) {
    middle = cut(block, begin - block->begin);
    put_free(block);
  }
  for (std::size_t slot = first; slot < last; ++slot) {
    Page* page = segment.slots[slot].page;
    segment.slots[slot].left = middle->epoch;
    page->segment = nullptr;
    page->stream = segment.pool->stream;
    page->epoch = middle->epoch;
  }
  put_absent(middle);
}

void PagedHeap::fill(Block* from, std::byte* begin, std::byte* end) {
  Block* block = from;
  while (block && block->begin < end) {
    if (block->state == State::kAbsent && block->end() > begin) {
      Blocks& absent = block->pool->absent;
      absent.erase(block);
      if (block->begin < begin) {
        Block* rest = cut(block, begin - block->begin);
        absent.insert(block);
        block = rest;
      }
      if (block->end() > end) absent.insert(cut(block, end - block->begin));
      count_segments(*block, 1);
      block->state = State::kFree;
      block->epoch = block->pool->stream->open;
      block = merge_free(block);
      put_free(block);
    }
    block = block->next;
  }
}

bool PagedHeap::is_idle(const Page& page) const {
  if (page.stream && !is_done(*page.stream, page.epoch)) return false;
  for (const auto& [segment, slot] : page.mappings)
    if (!is_done(*segment->pool->stream, segment->slots[slot].left)) return false;
  return true;
}

void PagedHeap::release_pool_pages(Pool& pool) {
  const std::vector<Block*> blocks(pool.free.begin(), pool.free.end());
  for (Block* block : blocks) {
    const auto [first, last] = whole_slots(*block);
    if (first == last || !is_done(*pool.stream, block->epoch)) continue;
    for (std::size_t slot = first; slot < last; ++slot)
      loose_.push_back(block->segment->slots[slot].page);
    carve(block, first, last);
  }
}

void PagedHeap::release(bool only_private) {
  for (auto& pool : pools_) {
    const bool is_used = pool->owner && pool->owner->users;
    if (!is_used && (pool->owner || !only_private)) release_pool_pages(*pool);
  }
  std::vector<Page*> kept;
  for (Page* page : loose_) {
    if (is_idle(*page)) {
      destroy_page(page);
    } else {
      kept.push_back(page);
    }
  }
  loose_.swap(kept);
  for (auto& pool : pools_) {
    for (auto at = pool->segments.begin(); at != pool->segments.end();) {
      Segment& segment = **at;
      Block* block = segment.first;
      const auto is_mapped = [](const Slot& slot) { return slot.page != nullptr; };
      if (block->state != State::kAbsent || block->next ||
          std::any_of(segment.slots.begin(), segment.slots.end(), is_mapped)) {
        ++at;
        continue;
      }
      pool->absent.erase(block);
      unlink(block);
      source_.unreserve(source_.context, device_, segment.begin, segment.size);
      at = pool->segments.erase(at);
    }
  }
}

void PagedHeap::release_all() {
  while (!pages_.empty()) destroy_page(pages_.back().get());
  for (auto& pool : pools_)
    for (auto& segment : pool->segments)
      source_.unreserve(source_.context, device_, segment->begin, segment->size);
  pools_.clear();
}

}  // namespace oxytorch::memory
