// Memory of the host, in huge pages where the system has them. A range of addresses is reserved
// once; a page of it takes memory from its first use until it is unmapped.
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "../core/huge_pages.h"
#include "allocator.h"
#include "failure.h"
#include "host.h"
#include "source_parts.h"

namespace {

using oxytorch::kHugePage;

std::atomic<std::uintptr_t> lowest{UINTPTR_MAX}, highest{0};

std::size_t total_bytes() {
  return std::size_t(sysconf(_SC_PHYS_PAGES)) * std::size_t(sysconf(_SC_PAGESIZE));
}

int reserve(void*, int, std::size_t bytes, void** address) {
  *address = oxytorch::map_huge(bytes, PROT_NONE);
  if (!*address) return OXYTORCH_MEMORY_OUT;
  const auto begin = reinterpret_cast<std::uintptr_t>(*address);
  const std::uintptr_t end = begin + bytes;
  for (std::uintptr_t seen = lowest; begin < seen && !lowest.compare_exchange_weak(seen, begin);) {
  }
  for (std::uintptr_t seen = highest; end > seen && !highest.compare_exchange_weak(seen, end);) {
  }
  return OXYTORCH_MEMORY_OK;
}

int unreserve(void*, int, void* address, std::size_t bytes) {
  return munmap(address, bytes) ? OXYTORCH_MEMORY_FAILED : OXYTORCH_MEMORY_OK;
}

// The system makes pages when they are written to; here they are counted, since what is not written
// to is not refused by it either. More than there is goes to the C library, which asks it.
std::atomic<std::size_t> held{0};

int take(std::size_t bytes) {
  const std::size_t before = held.fetch_add(bytes);
  if (bytes <= total_bytes() && before <= total_bytes() - bytes) return OXYTORCH_MEMORY_OK;
  held.fetch_sub(bytes);
  return OXYTORCH_MEMORY_OUT;
}

int create(void*, int, std::size_t bytes, std::uint64_t* page) {
  *page = 1;
  return take(bytes);
}
int destroy(void*, int, std::uint64_t, std::size_t bytes) {
  held.fetch_sub(bytes);
  return OXYTORCH_MEMORY_OK;
}
int map(void*, int, void*, std::uint64_t, std::size_t) { return OXYTORCH_MEMORY_OK; }

int grant(void*, int, void* address, std::size_t bytes) {
  return mprotect(address, bytes, PROT_READ | PROT_WRITE) ? OXYTORCH_MEMORY_OUT
                                                          : OXYTORCH_MEMORY_OK;
}

int unmap(void*, int, void* address, std::size_t bytes) {
  if (madvise(address, bytes, MADV_DONTNEED)) return OXYTORCH_MEMORY_FAILED;
  return mprotect(address, bytes, PROT_NONE) ? OXYTORCH_MEMORY_FAILED : OXYTORCH_MEMORY_OK;
}

int allocate(void*, int, std::size_t bytes, void** data) {
  if (bytes > total_bytes()) return OXYTORCH_MEMORY_OUT;
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (const int result = take(whole)) return result;
  int result = reserve(nullptr, 0, whole, data);
  if (!result) {
    result = grant(nullptr, 0, *data, bytes);
    if (result) unreserve(nullptr, 0, *data, whole);
  }
  if (result) held.fetch_sub(whole);
  return result;
}
int release(void*, int, void* data, std::size_t bytes) {
  const std::size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  held.fetch_sub(whole);
  return unreserve(nullptr, 0, data, whole);
}

}  // namespace

namespace oxytorch::memory {

int host_memory_info(void*, int, std::size_t* free_bytes, std::size_t* total) {
  *total = total_bytes();
  *free_bytes = std::size_t(sysconf(_SC_AVPHYS_PAGES)) * std::size_t(sysconf(_SC_PAGESIZE));
  return OXYTORCH_MEMORY_OK;
}

bool may_be_host_memory(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  return address >= lowest.load(std::memory_order_relaxed) &&
         address < highest.load(std::memory_order_relaxed);
}

}  // namespace oxytorch::memory

#pragma GCC visibility push(default)
extern "C" int oxytorch_memory_host_source(oxytorch_memory_source* source) {
  if (const int result = oxytorch_memory_expect({{source, "a place for source"}})) return result;
  *source = {};
  source->name = "host";
  source->devices = 1;
  oxytorch::memory::set_segments(*source, allocate, release);
  oxytorch::memory::set_pages(*source, kHugePage, reserve, unreserve, create, destroy, map, unmap,
                              grant);
  source->memory_info = oxytorch::memory::host_memory_info;
  return OXYTORCH_MEMORY_OK;
}
#pragma GCC visibility pop
