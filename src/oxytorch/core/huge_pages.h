// Memory of the host in huge pages: the one way in which this package takes it from the system.
// Both libraries include this, so that neither needs the other.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace oxytorch {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Addresses that begin at a huge page; null: there are none. `protection` is mmap's. The system
// gives memory where it is written to, in huge pages where it has them. munmap gives it back.
inline void* map_huge(std::size_t size, int protection) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (size > SIZE_MAX - kHugePage) return nullptr;
  void* found = mmap(nullptr, size + kHugePage, protection, kFlags, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  // What is before the first huge page, and behind the end, goes back.
  auto* begin = static_cast<std::byte*>(found);
  const auto into = reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  const std::size_t before = into ? kHugePage - into : 0;
  if (before > 0) munmap(begin, before);
  std::byte* end = begin + before + size;
  const auto page = std::uintptr_t{4096};
  auto* rest = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(end) + page - 1) /
                                            page * page);
  if (rest < begin + size + kHugePage) munmap(rest, std::size_t(begin + size + kHugePage - rest));
#ifdef MADV_HUGEPAGE
  // Where the system has no huge pages this fails, and pages are small.
  madvise(begin + before, size, MADV_HUGEPAGE);
#endif
  return begin + before;
}

}  // namespace oxytorch
