// Runs a kernel at the active level over all items of a call, on torch's own threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/dispatch.h"
#include "core/levels.h"
#include "core/team.h"
#include "core/torch_api.h"
#include "core/tuning.h"
#include "core/verbose.h"

namespace oxytorch {

// Kernels that this thread had others take pieces of.
inline thread_local std::int64_t kernels_split = 0;

// What a team would have spared this thread: kernels that are worth several threads, and bytes of
// their work that the others do.
struct Spared {
  std::int64_t kernels = 0;
  std::int64_t bytes = 0;
};
inline thread_local Spared spared;

// Of torch's team.
inline std::int64_t available_threads() {
  std::uint32_t threads = 1;
  check_call(torch_get_num_threads(&threads), "get_num_threads");
  return threads;
}

// What a parallel region takes, in bytes of work. All threads of torch's team are woken and waited
// for, whatever few of them have work: 2 to 5 us of two, 6 to 15 us of 16, by steps that double.
inline std::int64_t region_bytes(std::int64_t threads) {
  const auto doublings = std::bit_width(static_cast<std::uint64_t>(threads - 1));
  return tuning.bytes_per_thread / 2 * (doublings + 1);
}

// The threads of a team of `threads` that so many bytes of work are worth; one where a region for
// it takes longer than what it spares. times: that the work is done in one region.
inline std::int64_t threads_for(std::int64_t work, std::int64_t threads, std::int64_t times = 1) {
  constexpr std::int64_t kHandOver = 8;
  const auto worth = [&](std::int64_t least) {
    return std::clamp(work / std::max(least, std::int64_t{1}), std::int64_t{1}, threads);
  };
  const std::int64_t woken = worth(tuning.bytes_per_thread);
  const std::int64_t others = work - work / woken;
  if (woken > 1) {
    ++spared.kernels;
    spared.bytes += others;
  }
  // Threads of a team wait already: handing work over to them takes a fraction of waking them.
  if (Team::of_this_thread()) return worth(tuning.bytes_per_thread / kHandOver);
  return others * times >= region_bytes(threads) ? woken : 1;
}

inline std::int64_t threads_for(std::int64_t work) {
  return threads_for(work, available_threads());
}

// No thread gets fewer than `grain` items, unless there are fewer.
template <class Args>
void run_in_pieces(const Copies<Args>& copies, const Args& args, std::int64_t items,
                   std::int64_t grain) {
  if (items <= 0) return;
  const int level = active_level();
  const Kernel<Args> kernel = copies.at_level[level];
  if (verbose::on()) verbose::note_kernel(copies.name, level);
  if (items <= grain) {
    kernel(args, 0, items);
    return;
  }
  struct Context {
    Kernel<Args> kernel;
    const Args* args;
  } context{kernel, &args};
  const auto piece = [](std::int64_t begin, std::int64_t end, void* data) {
    const auto* call = static_cast<const Context*>(data);
    call->kernel(*call->args, begin, end);
  };
  ++kernels_split;
  if (Team* team = Team::of_this_thread()) {
    team->run(items, grain, piece, &context);
  } else {
    check_call(torch_parallel_for(0, items, grain, piece, &context), "parallel_for");
  }
}

// `bytes_per_item`: memory traffic of one item, or its arithmetic counted in such bytes.
template <class Args>
void run(const Copies<Args>& copies, const Args& args, std::int64_t items,
         std::int64_t bytes_per_item) {
  const std::int64_t threads = threads_for(items * std::max(bytes_per_item, std::int64_t{1}));
  run_in_pieces(copies, args, items, (items + threads - 1) / threads);
}

}  // namespace oxytorch
