// The functions that torch's pluggable allocators call: torch.cuda.memory.CUDAPluggableAllocator
// and its setters, torch.xpu.memory.XPUPluggableAllocator.
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>

#include "../core/old_runtime.h"
#include "allocator.h"
#include "failure.h"

namespace {

std::atomic<oxytorch_memory*> installed{nullptr};

std::atomic<bool> is_torch_known{false};

// Raises torch.OutOfMemoryError. Its C++ class is looked up in torch, in versions where it is known
// to be as here; in others this returns, and the error becomes a RuntimeError with the same text.
void raise_out_of_memory(const char* text) {
  struct Location {  // c10::SourceLocation
    const char* function;
    const char* file;
    std::uint32_t line;
  };
  constexpr std::size_t kMoreThanItsSize = 1024;
  // In which library the class is depends on the version.
  void *constructor = nullptr, *type = nullptr, *table = nullptr;
  for (const char* name : {"libc10.so", "libc10_cuda.so", "libc10_xpu.so", "libtorch_cpu.so"}) {
    void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (!library) continue;
    const auto look = [library](void*& found, const char* symbol) {
      if (!found) found = dlsym(library, symbol);
    };
    look(constructor,
         "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11"
         "char_traitsIcESaIcEEE");
    look(constructor,
         "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11"
         "char_traitsIcESaIcEEE");
    look(type, "_ZTIN3c1016OutOfMemoryErrorE");
    look(table, "_ZTVN3c1016OutOfMemoryErrorE");
  }
  if (!constructor || !type || !table) return;
  // Behind the two words that describe the class are its virtual functions; destructors come first.
  void** const functions = static_cast<void**>(table) + 2;
  void* error = abi::__cxa_allocate_exception(kMoreThanItsSize);
  reinterpret_cast<void (*)(void*, Location, std::string)>(constructor)(
      error, Location{"malloc", "oxytorch/memory", 0}, text);
  *static_cast<void***>(error) = functions;
  abi::__cxa_throw(error, static_cast<std::type_info*>(type),
                   reinterpret_cast<void (*)(void*)>(functions[0]));
}

// What leaves these functions as an exception is an error in Python.
void check(int result) {
  if (!result) return;
  if (result == OXYTORCH_MEMORY_OUT && is_torch_known) raise_out_of_memory(oxytorch_memory_error());
  throw std::runtime_error(oxytorch_memory_error());
}

using Id = std::pair<unsigned long long, unsigned long long>;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The allocator that the functions below use from now on, and whether this torch's C++ class of
// errors for want of memory was looked at.
void oxytorch_memory_install(oxytorch_memory* memory, int knows_torch) {
  installed = memory;
  is_torch_known = knows_torch != 0;
}

void* oxytorch_memory_torch_malloc(ssize_t size, int device, void* stream) {
  void* data = nullptr;
  oxytorch_memory_ask_site();
  check(oxytorch_memory_allocate(installed, device, std::size_t(size), stream, &data));
  return data;
}

// Runs in destructors, so it cannot raise: what is not live stays as it is.
void oxytorch_memory_torch_free(void* data, ssize_t, int, void*) {
  oxytorch_memory_free(installed, data);
}

void oxytorch_memory_torch_record_stream(void* data, void* stream) {
  check(oxytorch_memory_record_stream(installed, data, stream));
}

void oxytorch_memory_torch_empty_cache() { check(oxytorch_memory_empty_cache(installed, -1)); }

void oxytorch_memory_torch_set_fraction(double fraction, int device) {
  std::size_t free_bytes = 0, total = 0;
  check(oxytorch_memory_info(installed, device, &free_bytes, &total));
  // Not 0, which would be no limit.
  const auto limit = std::max(std::size_t{1}, std::size_t(fraction * double(total)));
  check(oxytorch_memory_set_limit(installed, device, limit));
}

void* oxytorch_memory_torch_base(void* inside, std::size_t* size) {
  void* data = nullptr;
  std::size_t bytes = 0;
  check(oxytorch_memory_find(installed, inside, &data, &bytes));
  if (size) *size = bytes;
  return data;
}

void oxytorch_memory_torch_init(int) {}

// Its arguments are torch's: a pair by value and a std::function, of libstdc++.
void oxytorch_memory_torch_begin_pool(int device, Id id, std::function<bool(void*)> takes) {
  check(oxytorch_memory_begin(installed, device, id.first, id.second, std::move(takes)));
}

void oxytorch_memory_torch_end_pool(int device, Id id) {
  const std::uint64_t pair[2] = {id.first, id.second};
  check(oxytorch_memory_end_pool(installed, device, pair));
}

void oxytorch_memory_torch_release_pool(int device, Id id) {
  const std::uint64_t pair[2] = {id.first, id.second};
  check(oxytorch_memory_release_pool(installed, device, pair));
}

}  // extern "C"
#pragma GCC visibility pop
