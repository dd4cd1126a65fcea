// Limits at which entries change their way of working. Tests lower them to reach every path with
// small tensors.
#pragma once

#include <cstdint>

namespace oxytorch {

struct Tuning {
  // Outputs of at least this many bytes are streamed past the caches: they would not stay there.
  std::int64_t stream_bytes;
  // Work that moves fewer bytes stays on one thread: waking the others costs as long.
  std::int64_t bytes_per_thread;
  // Elements before and after each output that are filled with 0xff, which is NaN; 0 in use.
  std::int64_t guard_elements;
};

extern Tuning tuning;

// Of the second level, which each core has for itself.
std::int64_t core_cache_bytes();

inline bool should_stream(std::int64_t output_bytes) { return output_bytes >= tuning.stream_bytes; }

}  // namespace oxytorch

extern "C" {
// Replaces the limits; a negative value restores that limit's own.
void oxytorch_set_tuning(std::int64_t stream_bytes, std::int64_t bytes_per_thread,
                         std::int64_t guard_elements);
}
