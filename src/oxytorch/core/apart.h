// Has torch's threads begin on processors of their own.
#pragma once

#include <cstdint>

namespace oxytorch {

// A new thread begins on the processor of the one that made it. Where they wait for each other by
// spinning, the system may move one of them only after a dozen ticks of 4 ms, and lets a parallel
// region end in each. Called by a thread before its first ones: moves those that share a processor,
// once, and leaves each free to run where it did.
void set_apart(std::int64_t threads);

}  // namespace oxytorch
