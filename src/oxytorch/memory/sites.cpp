// Where allocations come from: numbers with names, for reports.
#include <dlfcn.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>

#include "../core/old_runtime.h"
#include "failure.h"
#include "heap.h"

namespace {

thread_local int site = 0;

std::mutex mutex;
std::deque<std::string> names;

std::atomic<int (*)()> asked{nullptr};
std::atomic<int> elsewhere{0};

// Threads that Python knows nothing of run none of its code, and must not wait for its lock: who
// holds that may wait for them.
bool runs_python() {
  static const auto state =
      reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  return !state || state();
}

}  // namespace

namespace oxytorch::memory {

int current_site() { return site; }

std::string site_name(int number) {
  std::lock_guard lock(mutex);
  return number > 0 && std::size_t(number) <= names.size() ? names[number - 1] : "unknown code";
}

}  // namespace oxytorch::memory

void oxytorch_memory_ask_site() {
  int (*const ask)() = asked.load(std::memory_order_acquire);
  site = !ask ? 0 : runs_python() ? ask() : elsewhere.load(std::memory_order_relaxed);
}

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

// Asks `ask` where each of torch's allocations comes from, before any lock is taken; null: nobody
// is asked. `other`: the site of threads that Python knows nothing of.
void oxytorch_memory_torch_sites(int (*ask)(), int other) {
  elsewhere = other;
  asked = ask;
}

}  // extern "C"
#pragma GCC visibility pop
