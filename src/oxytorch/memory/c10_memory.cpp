// Large CPU tensors out of our memory. torch's allocator for the CPU is a C++ object, and replacing
// it would tie this library to a version of torch. What that object calls is C: posix_memalign and
// free, through a table of addresses that the loader has filled for the library libc10.so. Two
// entries of that table are replaced. No other library's calls change.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../core/old_runtime.h"
#include "allocator.h"
#include "failure.h"
#include "host.h"

namespace {

std::atomic<oxytorch_memory*> owner{nullptr};
std::atomic<bool> is_on{false};
std::atomic<std::size_t> least{0};

int aligned(void** data, std::size_t alignment, std::size_t size) {
  if (is_on && size >= least && alignment <= 512) {
    oxytorch_memory_ask_site();
    if (oxytorch_memory_allocate(owner, 0, size, nullptr, data) == OXYTORCH_MEMORY_OK) return 0;
  }
  return posix_memalign(data, alignment, size);
}

void release(void* data) {
  if (oxytorch::memory::may_be_host_memory(data) &&
      oxytorch_memory_free(owner, data) == OXYTORCH_MEMORY_OK)
    return;
  std::free(data);
}

// The entries for a function in a library's tables.
std::vector<void**> entries_of(const link_map* library, const char* name) {
  const auto value_of = [&](auto tag) {
    const ElfW(Dyn)* entry = library->l_ld;
    while (entry->d_tag != DT_NULL && entry->d_tag != tag) ++entry;
    return entry->d_tag == DT_NULL ? 0 : entry->d_un.d_ptr;
  };
  const auto* strings = reinterpret_cast<const char*>(value_of(DT_STRTAB));
  const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(value_of(DT_SYMTAB));
  const std::pair<int, int> tables[] = {{DT_JMPREL, DT_PLTRELSZ}, {DT_RELA, DT_RELASZ}};
  std::vector<void**> found;
  for (const auto& [begin, bytes] : tables) {
    const auto* table = reinterpret_cast<const ElfW(Rela)*>(value_of(begin));
    const std::size_t count = table ? value_of(bytes) / sizeof *table : 0;
    for (std::size_t i = 0; i < count; ++i) {
      const ElfW(Rela) & relocation = table[i];
      const auto symbol = ELF64_R_SYM(relocation.r_info);
      // Entries for addresses that data holds have an addend of their own.
      if (symbol && !relocation.r_addend &&
          std::strcmp(strings + symbols[symbol].st_name, name) == 0)
        found.push_back(reinterpret_cast<void**>(library->l_addr + relocation.r_offset));
    }
  }
  return found;
}

// glibc learns from the blocks that are freed up to which size to keep memory, and from this much
// on no more (M_MMAP_THRESHOLD). The large ones of tensors it does not see any more, and tensors
// below `least` would fault at each call.
void teach_malloc() {
  constexpr std::size_t kMostLearnt = (std::size_t{32} << 20) - (std::size_t{64} << 10);
  void* volatile block = std::malloc(kMostLearnt);
  std::free(block);
}

bool replace(void** entry, void* function) {
  const auto page = std::uintptr_t(sysconf(_SC_PAGESIZE));
  void* begin = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(entry) / page * page);
  // The loader has made the table read-only; it stays writable where it may be written to.
  if (mprotect(begin, page, PROT_READ | PROT_WRITE)) return false;
  __atomic_store_n(entry, function, __ATOMIC_RELEASE);
  return true;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// From now on CPU tensors of at least so many bytes are allocated of `memory`, which must live as
// long as the process. INVALID: this torch is put together in another way.
int oxytorch_memory_host_begin(oxytorch_memory* memory, size_t at_least) {
  void* handle = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  link_map* library = nullptr;
  if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &library))
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, "torch's library libc10.so is not loaded");
  const std::vector<void**> takes = entries_of(library, "posix_memalign");
  const std::vector<void**> gives = entries_of(library, "free");
  if (takes.empty() || gives.empty())
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "this torch does not allocate through posix_memalign and free");
  owner = memory;
  least = at_least;
  // What is given back has to be known before anything is taken.
  bool is_made = true;
  for (void** entry : gives) is_made &= replace(entry, reinterpret_cast<void*>(release));
  if (is_made)
    for (void** entry : takes) is_made &= replace(entry, reinterpret_cast<void*>(aligned));
  if (!is_made)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "the system does not let libc10.so's table be written to");
  teach_malloc();
  is_on = true;
  return OXYTORCH_MEMORY_OK;
}

// New tensors come from malloc again; those that are there stay where they are.
void oxytorch_memory_host_end(void) { is_on = false; }

}  // extern "C"
#pragma GCC visibility pop
