#include "core/tuning.h"

#include "core/export.h"

#include <unistd.h>

namespace oxytorch {

namespace {

constexpr std::int64_t kBytesPerThread = 64 << 10;

// Half of the last cache: the inputs need room too.
std::int64_t half_of_last_cache() {
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const long l2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  const long largest = l3 > l2 ? l3 : l2;
  return (largest > 0 ? std::int64_t{largest} : std::int64_t{32} << 20) / 2;
}

}  // namespace

std::int64_t core_cache_bytes() {
  static const long found = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return found > 0 ? std::int64_t{found} : std::int64_t{1} << 20;
}

Tuning tuning{half_of_last_cache(), kBytesPerThread, 0};

}  // namespace oxytorch

OXY_EXPORT void oxytorch_set_tuning(std::int64_t stream_bytes, std::int64_t bytes_per_thread,
                                    std::int64_t guard_elements) {
  oxytorch::tuning = {
      stream_bytes >= 0 ? stream_bytes : oxytorch::half_of_last_cache(),
      bytes_per_thread >= 0 ? bytes_per_thread : oxytorch::kBytesPerThread,
      guard_elements >= 0 ? guard_elements : 0,
  };
}
