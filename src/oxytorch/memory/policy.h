// The numbers of the policies.
#pragma once

#include <cstddef>

namespace oxytorch::memory {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

// More than a table of functions can mean.
constexpr int kMostDevices = 1024;

// Every block is a multiple of this, and begins at one.
constexpr std::size_t kAlignment = 512;
// Requests up to this are served from the small pool.
constexpr std::size_t kSmall = kMiB;
constexpr std::size_t kSmallSegment = 2 * kMiB;
// Segments of requests below kLargeAlone; others get one of their own, in units of kLargeUnit.
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kLargeAlone = 10 * kMiB;
constexpr std::size_t kLargeUnit = 2 * kMiB;
// Pages of torch's expandable segments.
constexpr std::size_t kSmallExpansion = 2 * kMiB, kLargeExpansion = 20 * kMiB;

// Pages of our own policy. A driver takes as long for a page of 4 MiB as for one of 2.
constexpr std::size_t kMappedPage = 4 * kMiB;

// Addresses that a pool of the mapping policies reserves, in multiples of the device's memory.
constexpr std::size_t kAddressesPerByte = 4;

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}
constexpr std::size_t round_down(std::size_t value, std::size_t unit) {
  return value / unit * unit;
}

}  // namespace oxytorch::memory
