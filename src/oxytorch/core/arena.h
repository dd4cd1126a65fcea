// Memory for what a program makes and uses up again within a call. It is kept from call to call:
// glibc gives large blocks back to the system, and who takes them again waits for their pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace oxytorch {

// Of one call at a time. Blocks are tensors that own their part of it: whoever still holds one
// after the call keeps what it holds, and the arena is not used again.
class Arena {
 public:
  struct Deleter {
    void operator()(Arena* arena) const;
  };
  using Owner = std::unique_ptr<Arena, Deleter>;

  // One that no other call has; null where they are switched off, or torch is too old for them.
  static Owner take();
  // Gives the system what no call has; returns how many bytes that are.
  static std::int64_t free_idle();

  // Where the plan of a call has a result: bytes from the beginning of the arena, and how many.
  struct Spot {
    std::size_t begin = 0, bytes = 0;
  };
  // What a result of so many bytes takes. None is as large as malloc does as well.
  static std::size_t taken_for(std::size_t bytes);
  // Before the first result of a call: has memory for spots in its first `total` bytes, which
  // other results are kept out of. Returns whether the system gives it.
  bool reserve(std::size_t total);

  // The one that `empty` takes memory of on this thread, or null.
  static Arena* of_this_thread() { return current_; }
  // Makes it the one of this thread, for what step `step` makes, until the end of the scope.
  // spots: those of the step's results, in any order.
  class Use {
   public:
    Use(Arena* arena, std::size_t step, const Spot* spots = nullptr, std::size_t count = 0)
        : before_(current_) {
      current_ = arena;
      if (!arena) return;
      arena->step_ = step;
      arena->spots_.assign(spots, spots + count);
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { current_ = before_; }

   private:
    Arena* before_;
  };

  // A new uninitialized tensor; null for a small one, which malloc is as good for, and where the
  // system has no memory.
  AtenTensorHandle empty(const std::int64_t* sizes, const std::int64_t* strides, std::int64_t dim,
                         std::int32_t dtype_code);

  // Since it was taken: the bytes that it needed, and those of all its tensors.
  std::int64_t needed() const { return needed_; }
  std::int64_t asked() const { return asked_; }
  // The steps whose tensors somebody still holds.
  std::vector<std::size_t> held_steps();

 private:
  // Bytes from `begin` on.
  struct Range {
    std::byte* begin;
    std::size_t size;

    std::byte* end() const { return begin + size; }
  };
  struct Block : Range {
    std::size_t step;
  };
  friend class IdleArenas;

  Arena() = default;
  ~Arena();
  static void free_block(void* data, void* arena);

  std::byte* allocate(std::size_t size);
  std::byte* take_spot(std::size_t bytes, std::size_t size);
  void cut(std::vector<Range>::iterator from, std::byte* begin, std::size_t size);
  bool grow(std::size_t least);
  void put_back(Range range);
  bool end_call();
  bool join_chunks(std::size_t least);
  void shrink();

  inline static thread_local Arena* current_ = nullptr;

  std::mutex mutex_;           // of all below: the last holder of a block may be in any thread
  std::vector<Range> chunks_;  // as the system gave them; one, once a call has shown what it needs
  std::vector<Range> free_;    // in the order of their addresses
  std::vector<Block> blocks_;  // in use
  bool is_abandoned_ = false;  // no call has it, but blocks are held
  std::size_t step_ = 0;
  std::vector<Spot> spots_;   // of this step, not taken yet
  std::size_t reserved_ = 0;  // bytes from the start that are for spots alone
  std::int64_t needed_ = 0, asked_ = 0;
  // Bytes from the start that were in use ever, and in the last calls.
  std::size_t touched_ = 0, lately_ = 0;
  int calls_ = 0;
};

}  // namespace oxytorch
