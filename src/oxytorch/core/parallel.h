// Runs a kernel at the active level over all items of a call, on torch's own threads.
#pragma once

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

// Bytes of work that a thread is worth. Threads of a team wait already: handing work over to them
// takes a fraction of waking them.
inline std::int64_t least_of_thread() {
  constexpr std::int64_t kHandOver = 8;
  return Team::of_this_thread() ? tuning.bytes_per_thread / kHandOver : tuning.bytes_per_thread;
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
  const std::int64_t least = least_of_thread() / (bytes_per_item > 0 ? bytes_per_item : 1);
  run_in_pieces(copies, args, items, least > 1 ? least : 1);
}

}  // namespace oxytorch
