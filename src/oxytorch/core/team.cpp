#include "core/team.h"

#include <algorithm>
#include <thread>

#include "core/torch_api.h"

namespace oxytorch {

namespace {

constexpr int kPieceBits = 16;
constexpr std::uint64_t kEnd = ~std::uint64_t{0};
// About 50 us, after which a waiting thread lets others run in its place.
constexpr int kSpins = 1000;

thread_local Team* team_of_this_thread = nullptr;

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

template <class Condition>
void wait_until(const Condition& holds) {
  for (int spins = 0; !holds(); ++spins) {
    if (spins < kSpins) {
      __builtin_ia32_pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

Team* Team::of_this_thread() { return team_of_this_thread; }

void Team::gather(std::int64_t threads, Lead lead, void* context) {
  struct Call {
    Team team;
    Lead lead;
    void* context;
  } call{Team(std::min(threads, (std::int64_t{1} << kPieceBits) - 1)), lead, context};
  // Torch may give fewer threads: each then has several members, of which the first one is enough.
  const auto join = [](std::int64_t member, std::int64_t, void* data) {
    auto& call = *static_cast<Call*>(data);
    if (member > 0) return call.team.follow(member);
    team_of_this_thread = &call.team;
    call.lead(call.context);
    team_of_this_thread = nullptr;
    call.team.posted_.store(kEnd, std::memory_order_release);
  };
  const auto members = static_cast<std::int64_t>(call.team.members_.size());
  check_call(torch_parallel_for(0, members, 1, join, &call), "parallel_for");
}

void Team::run(std::int64_t items, std::int64_t grain, Piece piece, void* context) {
  const auto members = static_cast<std::int64_t>(members_.size());
  const std::int64_t most = std::min(members, divide_up(items, std::max(grain, std::int64_t{1})));
  items_ = items;
  items_per_piece_ = divide_up(items, most);
  piece_ = piece;
  context_ = context;
  const std::int64_t pieces = divide_up(items, items_per_piece_);
  const std::uint64_t job = (posted_.load(std::memory_order_relaxed) >> kPieceBits) + 1;
  posted_.store(job << kPieceBits | static_cast<std::uint64_t>(pieces), std::memory_order_release);
  work(0);
  for (std::int64_t member = 1; member < pieces; ++member) {
    // A thread that has not begun by now is late, or does not exist.
    if (takes(member, job)) {
      work(member);
    } else {
      const std::atomic<std::uint64_t>& finished = members_[member].finished;
      wait_until([&] { return finished.load(std::memory_order_acquire) == job; });
    }
  }
}

void Team::follow(std::int64_t member) {
  std::uint64_t seen = 0;
  while (true) {
    std::uint64_t posted = 0;
    wait_until([&] { return (posted = posted_.load(std::memory_order_acquire)) != seen; });
    if (posted == kEnd) return;
    seen = posted;
    const std::uint64_t job = posted >> kPieceBits;
    const auto pieces = static_cast<std::int64_t>(posted & ((1u << kPieceBits) - 1));
    // The leader posts no other job while a piece of this one is open: who takes a piece finds it.
    if (member >= pieces || !takes(member, job)) continue;
    work(member);
    members_[member].finished.store(job, std::memory_order_release);
  }
}

bool Team::takes(std::int64_t member, std::uint64_t job) {
  std::atomic<std::uint64_t>& taken = members_[member].taken;
  std::uint64_t last = taken.load(std::memory_order_relaxed);
  return last < job && taken.compare_exchange_strong(last, job, std::memory_order_acq_rel);
}

void Team::work(std::int64_t member) {
  const std::int64_t begin = member * items_per_piece_;
  piece_(begin, std::min(begin + items_per_piece_, items_), context_);
}

}  // namespace oxytorch
