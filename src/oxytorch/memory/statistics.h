// Counts under torch's keys.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace oxytorch::memory {

struct Stat {
  std::int64_t current = 0, peak = 0, allocated = 0, freed = 0;

  void change(std::int64_t delta) {
    current += delta;
    peak = std::max(peak, current);
    (delta >= 0 ? allocated : freed) += delta >= 0 ? delta : -delta;
  }
};

enum Kind {
  kAllocation,
  kSegment,
  kActive,
  kInactiveSplit,
  kAllocatedBytes,
  kReservedBytes,
  kActiveBytes,
  kInactiveSplitBytes,
  kRequestedBytes,
  kKinds
};

struct Statistics {
  // Of all blocks, the small pools' and the large pools'.
  std::array<std::array<Stat, 3>, kKinds> stats;
  std::int64_t retries = 0, ooms = 0, synchronizations = 0, source_allocations = 0,
               source_frees = 0;

  void change(Kind kind, bool is_small, std::int64_t delta) {
    stats[kind][0].change(delta);
    stats[kind][is_small ? 1 : 2].change(delta);
  }
  std::int64_t current(Kind kind) const { return stats[kind][0].current; }
};

}  // namespace oxytorch::memory
