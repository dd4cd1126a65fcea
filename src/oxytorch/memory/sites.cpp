// Where allocations come from: numbers with names, for reports.
#include <deque>
#include <mutex>
#include <string>

#include "heap.h"

namespace {

thread_local int site = 0;

std::mutex mutex;
std::deque<std::string> names;

}  // namespace

namespace oxytorch::memory {

int current_site() { return site; }

std::string site_name(int number) {
  std::lock_guard lock(mutex);
  return number > 0 && std::size_t(number) <= names.size() ? names[number - 1] : "unknown code";
}

}  // namespace oxytorch::memory

#pragma GCC visibility push(default)
extern "C" {

void oxytorch_memory_set_site(int number) { site = number; }

int oxytorch_memory_name_site(int number, const char* name) {
  constexpr int kMost = 1 << 20;
  if (number < 1 || number > kMost || !name) return OXYTORCH_MEMORY_INVALID;
  std::lock_guard lock(mutex);
  if (names.size() < std::size_t(number)) names.resize(number);
  names[number - 1] = name;
  return OXYTORCH_MEMORY_OK;
}

}  // extern "C"
#pragma GCC visibility pop
