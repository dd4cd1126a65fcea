// What a device's memory consists of, and what the policies share.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "allocator.h"
#include "nodes.h"
#include "policy.h"
#include "statistics.h"
#include "table.h"

namespace oxytorch::memory {

struct Pool;
struct Segment;

// Work on a stream is counted in epochs; an event closes one.
struct Stream {
  void* handle = nullptr;
  std::uint64_t open = 1, done = 0;
  std::deque<std::pair<std::uint64_t, std::uint64_t>> closing;  // epoch, event
};

enum class State : std::uint8_t {
  kFree,
  kLive,
  kWaiting,  // freed, but another stream may still use it
  kAbsent    // addresses without memory
};

struct Block {
  std::byte* begin = nullptr;
  std::size_t size = 0, requested = 0;
  Pool* pool = nullptr;
  Segment* segment = nullptr;
  Block *previous = nullptr, *next = nullptr;  // neighbours in the segment
  State state = State::kFree;
  int events = 0;
  int site = 0;                                 // where it was asked for
  std::uint64_t epoch = 0;                      // of its stream, when it was freed last
  std::unique_ptr<std::vector<Stream*>> users;  // other streams

  std::byte* end() const { return begin + size; }
};

struct BySize {
  bool operator()(const Block* one, const Block* other) const {
    return one->size != other->size ? one->size < other->size : one->begin < other->begin;
  }
};
using Blocks = std::set<Block*, BySize, Nodes<Block*>>;

using PoolId = std::pair<std::uint64_t, std::uint64_t>;
// Of a graph. General memory has none.
struct PrivatePool {
  PoolId id;
  int users = 0;  // graphs; none: its free memory may serve others
};

// What blocks of one stream and kind are taken from.
struct Pool {
  Pool(Stream* stream, bool is_small, PrivatePool* owner, NodeStore* nodes)
      : stream(stream),
        is_small(is_small),
        owner(owner),
        free(Nodes<Block*>(nodes)),
        absent(Nodes<Block*>(nodes)) {}

  Stream* stream;
  bool is_small;
  PrivatePool* owner;
  Blocks free, absent;
  std::list<std::unique_ptr<Segment>> segments;
};

// A physical page; of the mapping policies.
struct Page {
  std::uint64_t handle = 0;
  std::size_t size = 0;
  std::size_t index = 0;  // among all pages
  bool is_small = false;  // counted as the small pools'
  // Where it is in use, or free; null: nowhere.
  Segment* segment = nullptr;
  std::size_t slot = 0;
  // Everywhere it is mapped.
  std::vector<std::pair<Segment*, std::size_t>> mappings;
  // The last work on it, when it is in use nowhere.
  Stream* stream = nullptr;
  std::uint64_t epoch = 0;
  // In a survey: the free block that has all of it.
  std::uint64_t survey = 0;
  Block* block = nullptr;
};
// Addresses for one page.
struct Slot {
  Page* page = nullptr;    // mapped here
  std::uint64_t left = 0;  // the last work at these addresses, once the page is in use elsewhere
};

struct Segment {
  Pool* pool;
  std::byte* begin;
  std::size_t size;
  Block* first = nullptr;
  std::size_t page_size = 0;  // 0: not mapped
  std::vector<Slot> slots;    // up to the last one that was ever used

  std::byte* end() const { return begin + size; }
  std::size_t slot_of(const std::byte* address) const { return (address - begin) / page_size; }
  std::byte* address(std::size_t slot) const { return begin + slot * page_size; }
  bool has(std::size_t slot) const {
    return slot < slots.size() && slots[slot].page && slots[slot].page->segment == this &&
           slots[slot].page->slot == slot;
  }
};

// Of this thread's allocations; and what a site is called.
int current_site();
std::string site_name(int site);

// Says what failed; thrown inside, and turned into a result by the C functions.
struct Failure {
  int result;
  std::string text;
};

// The memory of one device. Public functions lock.
class Heap {
 public:
  Heap(const oxytorch_memory_source& source, int device);
  virtual ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  void* allocate(std::size_t bytes, void* stream);
  // Whether the pointer was one of this device.
  bool free(void* data);
  bool record_stream(void* data, void* stream);
  bool find(const void* inside, void** data, std::size_t* bytes);
  void empty_cache();
  void set_limit(std::size_t bytes);
  void memory_info(std::size_t* free_bytes, std::size_t* total_bytes);
  void begin_pool(PoolId id, std::function<bool(void*)> takes);
  void end_pool(PoolId id);
  void release_pool(PoolId id);
  int statistics(std::int64_t* values, int count);
  void reset_peaks();
  void reset_accumulated();
  std::string snapshot();
  std::string report(std::size_t asked);
  void listen(oxytorch_memory_listener listener, void* context);
  std::mutex& mutex() { return mutex_; }

 protected:
  // A free block (in no set any more) of at least `size` bytes; null: there is no memory.
  virtual Block* grow(Pool& pool, std::size_t size) = 0;
  // Gives the source what is free and safe to give. Other streams' work was waited for.
  virtual void release_free() = 0;
  // Before the second try of a request for which there was no memory.
  virtual void make_room() { release_free(); }
  // Bytes of what remains if `size` is taken of a block that are kept in the block.
  virtual bool should_split(const Pool& pool, std::size_t rest) const = 0;
  // Bytes of a free block that serve smaller requests alone.
  virtual std::size_t split_bytes(const Block& block) const = 0;
  // Everything back to the source, live blocks too.
  virtual void release_all() = 0;

  Pool& pool_of(Stream& stream, bool is_small, PrivatePool* owner);
  // Where no free block fits; null: there is no memory, and nothing is counted that was tried.
  Block* grow_or_make_room(Pool& pool, std::size_t size);
  Block* best_fit(Pool& pool, std::size_t size);
  // Which of the free blocks from the smallest that fits on serves a request.
  virtual Blocks::iterator choose(const Pool&, Blocks::iterator smallest) const { return smallest; }
  Block* take(Block* block, std::size_t size, std::size_t requested);
  void put_free(Block* block);
  void remove_free(Block* block);
  Block* merge_free(Block* block);
  // Cuts what is after `size` off; the rest has the block's state and is in no set.
  Block* cut(Block* block, std::size_t size);
  Block* new_block(Segment* segment, std::byte* begin, std::size_t size, State state);
  void unlink(Block* block);
  void delete_block(Block* block) { spare_.push_back(block); }

  // Epochs. close() marks the work so far; harvest() looks what has been done.
  bool close(Stream& stream);
  void harvest(Stream& stream);
  bool is_done(const Stream& stream, std::uint64_t epoch) const {
    return !source_.record || epoch <= stream.done;
  }
  // Waits for all work so far, but for that of streams which record graphs.
  void wait_for_all();
  bool may_hold(std::size_t more) const;
  void note_held(bool is_small, std::int64_t bytes);
  void tell(int event, void* data, std::size_t bytes, const Stream* stream) {
    if (listener_)
      listener_(listener_context_, event, device_, data, bytes, stream ? stream->handle : nullptr);
  }
  // Whether a call of the source succeeded. That it failed otherwise than for want of memory is
  // kept for the error.
  bool check(const char* call, int result);

  const oxytorch_memory_source source_;
  const int device_;
  Statistics statistics_;
  NodeStore nodes_;
  std::map<void*, std::unique_ptr<Stream>> streams_;
  std::list<std::unique_ptr<Pool>> pools_;
  std::optional<Failure> failure_;  // of the source, in this call
  std::map<PoolId, std::unique_ptr<PrivatePool>> private_pools_;

 private:
  Stream& stream_of(void* handle);
  PrivatePool* private_pool_for(void* stream);
  void free_block(Block* block);
  void finish_free(Block* block);
  void process_events();
  bool record_use(Stream& stream, Block* block);
  std::string report_locked(std::size_t asked) const;
  std::size_t largest_free() const;
  std::string holders() const;

  std::mutex mutex_;
  Table<Block> live_;
  std::deque<Block> storage_;
  std::vector<Block*> spare_;
  std::size_t limit_ = 0;
  Stream* last_stream_ = nullptr;
  Pool* last_pools_[2] = {nullptr, nullptr};
  // Uses of freed blocks by other streams, in the order of each stream's events.
  std::map<Stream*, std::deque<std::pair<std::uint64_t, Block*>>> uses_;
  std::size_t pending_ = 0;
  std::vector<std::pair<Stream*, Block*>> deferred_;  // the stream was recording a graph
  std::list<std::pair<PrivatePool*, std::function<bool(void*)>>> filters_;
  oxytorch_memory_listener listener_ = nullptr;
  void* listener_context_ = nullptr;
};

std::unique_ptr<Heap> make_native(const oxytorch_memory_source& source, int device);
std::unique_ptr<Heap> make_mapped(const oxytorch_memory_source& source, int device);
std::unique_ptr<Heap> make_expandable(const oxytorch_memory_source& source, int device);

}  // namespace oxytorch::memory
