#include "heap.h"

#include <algorithm>

namespace oxytorch::memory {

Heap::Heap(const oxytorch_memory_source& source, int device) : source_(source), device_(device) {}

Heap::~Heap() {
  if (!source_.forget) return;
  for (auto& [handle, stream] : streams_)
    for (auto& [epoch, event] : stream->closing) source_.forget(source_.context, device_, event);
  for (auto& [stream, uses] : uses_)
    for (auto& [event, block] : uses) source_.forget(source_.context, device_, event);
}

bool Heap::check(const char* call, int result) {
  if (result == OXYTORCH_MEMORY_OK) return true;
  if (result == OXYTORCH_MEMORY_OUT) return false;
  const bool is_driver = result >= OXYTORCH_MEMORY_DRIVER;
  const int number = is_driver ? result - OXYTORCH_MEMORY_DRIVER : result;
  failure_ = {OXYTORCH_MEMORY_FAILED, std::string(source_.name) + " device " +
                                          std::to_string(device_) + ": " + call + " failed with " +
                                          (is_driver ? "the driver's error " : "result ") +
                                          std::to_string(number)};
  return false;
}

Stream& Heap::stream_of(void* handle) {
  // Without events all streams are one.
  if (!source_.record) handle = nullptr;
  if (last_stream_ && last_stream_->handle == handle) return *last_stream_;
  std::unique_ptr<Stream>& stream = streams_[handle];
  if (!stream) {
    stream = std::make_unique<Stream>();
    stream->handle = handle;
  }
  last_stream_ = stream.get();
  last_pools_[0] = last_pools_[1] = nullptr;
  return *stream;
}

Pool& Heap::pool_of(Stream& stream, bool is_small, PrivatePool* owner) {
  const bool is_last = &stream == last_stream_ && !owner;
  if (is_last && last_pools_[is_small]) return *last_pools_[is_small];
  Pool* found = nullptr;
  for (auto& pool : pools_)
    if (pool->stream == &stream && pool->is_small == is_small && pool->owner == owner)
      found = pool.get();
  if (!found) {
    pools_.push_back(std::make_unique<Pool>(&stream, is_small, owner, &nodes_));
    found = pools_.back().get();
  }
  if (is_last) last_pools_[is_small] = found;
  return *found;
}

PrivatePool* Heap::private_pool_for(void* stream) {
  for (auto& [pool, takes] : filters_)
    if (takes(stream)) return pool;
  return nullptr;
}

void* Heap::allocate(std::size_t bytes, void* stream_handle) {
  std::lock_guard lock(mutex_);
  if (pending_ || !deferred_.empty()) process_events();
  // A size that cannot be rounded is more than any device has.
  if (bytes > (std::size_t{1} << 62)) {
    ++statistics_.ooms;
    throw Failure{OXYTORCH_MEMORY_OUT, report_locked(bytes)};
  }
  const std::size_t size = round_up(bytes, kAlignment);
  Stream& stream = stream_of(stream_handle);
  PrivatePool* owner = filters_.empty() ? nullptr : private_pool_for(stream_handle);
  Pool& pool = pool_of(stream, size <= kSmall, owner);
  Block* block = best_fit(pool, size);
  failure_.reset();
  if (!block) block = grow_or_make_room(pool, size);
  if (!block && failure_) throw *failure_;
  if (!block) {
    ++statistics_.ooms;
    tell(OXYTORCH_MEMORY_OOM, nullptr, size, &stream);
    throw Failure{OXYTORCH_MEMORY_OUT, report_locked(bytes)};
  }
  block = take(block, size, bytes);
  tell(OXYTORCH_MEMORY_ALLOC, block->begin, block->size, &stream);
  return block->begin;
}

Block* Heap::grow_or_make_room(Pool& pool, std::size_t size) {
  const auto before = statistics_.stats;
  Block* block = grow(pool, size);
  if (!block && !failure_) {
    ++statistics_.retries;
    wait_for_all();
    process_events();
    block = best_fit(pool, size);
    if (!block) {
      make_room();
      block = grow(pool, size);
    }
  }
  if (block) return block;
  // What was taken on the way and given back was of no use to anybody: it makes no peak.
  for (int kind = 0; kind < kKinds; ++kind)
    for (std::size_t i = 0; i < before[kind].size(); ++i) {
      Stat& stat = statistics_.stats[kind][i];
      stat.peak = std::max(before[kind][i].peak, stat.current);
    }
  return nullptr;
}

Block* Heap::best_fit(Pool& pool, std::size_t size) {
  Block key;
  key.size = size;
  const auto smallest = pool.free.lower_bound(&key);
  if (smallest == pool.free.end()) return nullptr;
  const auto found = choose(pool, smallest);
  Block* block = *found;
  statistics_.change(kInactiveSplitBytes, pool.is_small, -std::int64_t(split_bytes(*block)));
  if (split_bytes(*block)) statistics_.change(kInactiveSplit, pool.is_small, -1);
  pool.free.erase(found);
  return block;
}

Block* Heap::take(Block* block, std::size_t size, std::size_t requested) {
  const bool is_small = block->pool->is_small;
  if (block->size > size && should_split(*block->pool, block->size - size)) {
    Block* rest = cut(block, size);
    put_free(rest);
  }
  block->state = State::kLive;
  block->requested = requested;
  block->site = current_site();
  live_.insert(block->begin, block);
  statistics_.change(kAllocation, is_small, 1);
  statistics_.change(kAllocatedBytes, is_small, std::int64_t(block->size));
  statistics_.change(kRequestedBytes, is_small, std::int64_t(requested));
  statistics_.change(kActive, is_small, 1);
  statistics_.change(kActiveBytes, is_small, std::int64_t(block->size));
  return block;
}

Block* Heap::new_block(Segment* segment, std::byte* begin, std::size_t size, State state) {
  Block* block;
  if (spare_.empty()) {
    block = &storage_.emplace_back();
  } else {
    block = spare_.back();
    spare_.pop_back();
    *block = Block();
  }
  block->begin = begin;
  block->size = size;
  block->pool = segment->pool;
  block->segment = segment;
  block->state = state;
  return block;
}

Block* Heap::cut(Block* block, std::size_t size) {
  Block* rest = new_block(block->segment, block->begin + size, block->size - size, block->state);
  rest->epoch = block->epoch;
  rest->previous = block;
  rest->next = block->next;
  if (block->next) block->next->previous = rest;
  block->next = rest;
  block->size = size;
  return rest;
}

void Heap::unlink(Block* block) {
  (block->previous ? block->previous->next : block->segment->first) = block->next;
  if (block->next) block->next->previous = block->previous;
  delete_block(block);
}

void Heap::put_free(Block* block) {
  block->state = State::kFree;
  block->pool->free.insert(block);
  const std::size_t split = split_bytes(*block);
  if (!split) return;
  statistics_.change(kInactiveSplitBytes, block->pool->is_small, std::int64_t(split));
  statistics_.change(kInactiveSplit, block->pool->is_small, 1);
}

void Heap::remove_free(Block* block) {
  block->pool->free.erase(block);
  const std::size_t split = split_bytes(*block);
  if (!split) return;
  statistics_.change(kInactiveSplitBytes, block->pool->is_small, -std::int64_t(split));
  statistics_.change(kInactiveSplit, block->pool->is_small, -1);
}

Block* Heap::merge_free(Block* block) {
  if (Block* next = block->next; next && next->state == State::kFree) {
    remove_free(next);
    block->size += next->size;
    block->epoch = std::max(block->epoch, next->epoch);
    unlink(next);
  }
  if (Block* previous = block->previous; previous && previous->state == State::kFree) {
    remove_free(previous);
    previous->size += block->size;
    previous->epoch = std::max(previous->epoch, block->epoch);
    unlink(block);
    return previous;
  }
  return block;
}

bool Heap::free(void* data) {
  std::lock_guard lock(mutex_);
  Block* block = live_.find(data);
  if (!block) return false;
  live_.erase(data);
  const bool is_small = block->pool->is_small;
  block->epoch = block->pool->stream->open;
  tell(OXYTORCH_MEMORY_FREE_REQUESTED, data, block->size, block->pool->stream);
  statistics_.change(kAllocation, is_small, -1);
  statistics_.change(kAllocatedBytes, is_small, -std::int64_t(block->size));
  statistics_.change(kRequestedBytes, is_small, -std::int64_t(block->requested));
  free_block(block);
  return true;
}

void Heap::free_block(Block* block) {
  if (!block->users) return finish_free(block);
  block->state = State::kWaiting;
  const std::unique_ptr<std::vector<Stream*>> users = std::move(block->users);
  for (Stream* user : *users) {
    ++block->events;
    if (!record_use(*user, block)) deferred_.emplace_back(user, block);
  }
}

bool Heap::record_use(Stream& stream, Block* block) {
  const auto& is_capturing = source_.is_capturing;
  if (is_capturing && is_capturing(source_.context, device_, stream.handle)) return false;
  std::uint64_t event = 0;
  if (source_.record(source_.context, device_, stream.handle, &event)) return false;
  uses_[&stream].emplace_back(event, block);
  ++pending_;
  return true;
}

void Heap::finish_free(Block* block) {
  const bool is_small = block->pool->is_small;
  tell(OXYTORCH_MEMORY_FREE_COMPLETED, block->begin, block->size, block->pool->stream);
  statistics_.change(kActive, is_small, -1);
  statistics_.change(kActiveBytes, is_small, -std::int64_t(block->size));
  block->requested = 0;
  block->state = State::kFree;
  put_free(merge_free(block));
}

void Heap::process_events() {
  if (!deferred_.empty()) {
    std::vector<std::pair<Stream*, Block*>> deferred;
    deferred.swap(deferred_);
    for (auto& [stream, block] : deferred)
      if (!record_use(*stream, block)) deferred_.emplace_back(stream, block);
  }
  for (auto& [stream, uses] : uses_) {
    while (!uses.empty()) {
      const auto [event, block] = uses.front();
      if (source_.query(source_.context, device_, event) != OXYTORCH_MEMORY_OK) break;
      source_.forget(source_.context, device_, event);
      uses.pop_front();
      --pending_;
      if (--block->events == 0) finish_free(block);
    }
  }
}

bool Heap::record_stream(void* data, void* stream_handle) {
  std::lock_guard lock(mutex_);
  Block* block = live_.find(data);
  if (!block) return false;
  Stream* own = block->pool->stream;
  Stream* stream = &stream_of(stream_handle);
  if (stream == own) return true;
  if (!block->users) block->users = std::make_unique<std::vector<Stream*>>();
  if (std::find(block->users->begin(), block->users->end(), stream) == block->users->end())
    block->users->push_back(stream);
  return true;
}

bool Heap::close(Stream& stream) {
  if (!source_.record) return true;
  if (!stream.closing.empty() && stream.closing.size() > 64) harvest(stream);
  if (source_.is_capturing && source_.is_capturing(source_.context, device_, stream.handle))
    return false;
  std::uint64_t event = 0;
  if (source_.record(source_.context, device_, stream.handle, &event)) return false;
  stream.closing.emplace_back(stream.open++, event);
  return true;
}

void Heap::harvest(Stream& stream) {
  while (!stream.closing.empty()) {
    const auto [epoch, event] = stream.closing.front();
    if (source_.query(source_.context, device_, event) != OXYTORCH_MEMORY_OK) return;
    source_.forget(source_.context, device_, event);
    stream.done = epoch;
    stream.closing.pop_front();
  }
}

void Heap::wait_for_all() {
  if (!source_.record) return;
  ++statistics_.synchronizations;
  for (auto& [handle, stream] : streams_) close(*stream);
  // While a graph is recorded a device must not be synchronized.
  const bool can_synchronize =
      source_.synchronize && filters_.empty() && source_.synchronize(source_.context, device_) == 0;
  for (auto& [handle, stream] : streams_) {
    if (stream->closing.empty()) continue;
    if (!can_synchronize) source_.wait(source_.context, device_, stream->closing.back().second);
    harvest(*stream);
  }
  for (auto& [stream, uses] : uses_)
    if (!uses.empty()) source_.wait(source_.context, device_, uses.back().first);
}

bool Heap::may_hold(std::size_t more) const {
  const std::size_t held = std::size_t(statistics_.current(kReservedBytes));
  return !limit_ || (more <= limit_ && held <= limit_ - more);
}

void Heap::note_held(bool is_small, std::int64_t bytes) {
  statistics_.change(kReservedBytes, is_small, bytes);
  ++(bytes > 0 ? statistics_.source_allocations : statistics_.source_frees);
}

bool Heap::find(const void* inside, void** data, std::size_t* bytes) {
  std::lock_guard lock(mutex_);
  bool is_found = false;
  live_.for_each([&](Block* block) {
    if (inside < block->begin || inside >= block->end()) return;
    *data = block->begin;
    *bytes = block->size;
    is_found = true;
  });
  return is_found;
}

void Heap::empty_cache() {
  std::lock_guard lock(mutex_);
  wait_for_all();
  process_events();
  release_free();
}

void Heap::set_limit(std::size_t bytes) {
  std::lock_guard lock(mutex_);
  limit_ = bytes;
}

void Heap::memory_info(std::size_t* free_bytes, std::size_t* total_bytes) {
  std::lock_guard lock(mutex_);
  failure_.reset();
  const int result = source_.memory_info(source_.context, device_, free_bytes, total_bytes);
  if (!check("memory_info", result)) throw *failure_;
}

void Heap::begin_pool(PoolId id, std::function<bool(void*)> takes) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<PrivatePool>& pool = private_pools_[id];
  if (!pool) pool = std::make_unique<PrivatePool>(PrivatePool{id});
  ++pool->users;
  filters_.emplace_back(pool.get(), std::move(takes));
}

void Heap::end_pool(PoolId id) {
  std::lock_guard lock(mutex_);
  const auto is_its = [&](const auto& filter) { return filter.first->id == id; };
  const auto found = std::find_if(filters_.begin(), filters_.end(), is_its);
  if (found == filters_.end())
    throw Failure{OXYTORCH_MEMORY_INVALID, "end_pool: no allocation to this pool has begun"};
  filters_.erase(found);
}

void Heap::release_pool(PoolId id) {
  std::lock_guard lock(mutex_);
  const auto found = private_pools_.find(id);
  if (found == private_pools_.end() || !found->second->users)
    throw Failure{OXYTORCH_MEMORY_INVALID, "release_pool: there is no such pool"};
  // What is in use stays where it is; the rest is free for others.
  --found->second->users;
}

void Heap::listen(oxytorch_memory_listener listener, void* context) {
  std::lock_guard lock(mutex_);
  listener_ = listener;
  listener_context_ = context;
}

}  // namespace oxytorch::memory
