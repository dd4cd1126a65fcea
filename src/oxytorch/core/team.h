// Keeps torch's threads together over several kernels: each then costs a hand-over, not a parallel
// region with its waking and ending.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

namespace oxytorch {

class Team {
 public:
  using Lead = void (*)(void* context);
  using Piece = void (*)(std::int64_t begin, std::int64_t end, void* context);

  // The team that this thread leads, or null.
  static Team* of_this_thread();

  // Calls `lead`, which must not throw, on this thread, while the others of torch's threads wait
  // for pieces. Meanwhile torch's own operators, called by `lead`, run on one thread.
  static void gather(std::int64_t threads, Lead lead, void* context);

  // Calls `piece`, which must not throw, for all of [0, items): in the same pieces, of at least
  // `grain` items, as torch's `parallel_for`. Returns after the last one.
  void run(std::int64_t items, std::int64_t grain, Piece piece, void* context);

 private:
  // Of one thread: the last job whose piece was taken, by it or by the leader, and was finished.
  struct alignas(64) Member {
    std::atomic<std::uint64_t> taken{0}, finished{0};
  };

  explicit Team(std::int64_t threads) : members_(threads) {}

  void follow(std::int64_t member);
  bool takes(std::int64_t member, std::uint64_t job);
  void work(std::int64_t member);

  std::vector<Member> members_;
  // The number of the current job, and in the lower bits that of its pieces.
  alignas(64) std::atomic<std::uint64_t> posted_{0};
  // The current job. It stays while a piece of it is not finished.
  alignas(64) std::int64_t items_ = 0;
  std::int64_t items_per_piece_ = 1;
  Piece piece_ = nullptr;
  void* context_ = nullptr;
};

}  // namespace oxytorch
