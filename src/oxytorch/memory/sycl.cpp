// Memory of SYCL's devices, by unified shared memory, through the C interface of dpctl
// (libDPCTLSyclInterface.so). Names and numbers are those of its headers; a stream is a queue.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../core/old_runtime.h"
#include "allocator.h"
#include "failure.h"
#include "functions.h"
#include "policy.h"
#include "source_parts.h"

namespace {

constexpr int kComplete = 3;  // DPCTL_COMPLETE

#define OXYTORCH_SYCL_FUNCTIONS(F)                             \
  F(void*, DPCTLmalloc_device, (std::size_t, void* queue))     \
  F(void*, DPCTLmalloc_host, (std::size_t, void* queue))       \
  F(void, DPCTLfree_with_queue, (void*, void* queue))          \
  F(void*, DPCTLQueue_SubmitBarrier, (void* queue))            \
  F(void*, DPCTLQueue_GetDevice, (void* queue))                \
  F(void, DPCTLDevice_Delete, (void* device))                  \
  F(std::size_t, DPCTLDevice_GetGlobalMemSize, (void* device)) \
  F(int, DPCTLEvent_GetCommandExecutionStatus, (void* event))  \
  F(void, DPCTLEvent_Wait, (void* event))                      \
  F(void, DPCTLEvent_Delete, (void* event))

struct Sycl {
  OXYTORCH_SYCL_FUNCTIONS(OXYTORCH_POINTER)

  std::vector<void*> queues;             // one of each device, of the context of all its queues
  std::vector<std::size_t> total, held;  // bytes
};

Sycl& sycl_of(void* context) { return *static_cast<Sycl*>(context); }
void* pointer(std::uint64_t number) { return reinterpret_cast<void*>(number); }

int allocate(void* context, int device, std::size_t bytes, void** data) {
  Sycl& sycl = sycl_of(context);
  *data = sycl.DPCTLmalloc_device(bytes, sycl.queues[device]);
  if (*data) sycl.held[device] += bytes;
  return *data ? OXYTORCH_MEMORY_OK : OXYTORCH_MEMORY_OUT;
}

int release(void* context, int device, void* data, std::size_t bytes) {
  Sycl& sycl = sycl_of(context);
  sycl.DPCTLfree_with_queue(data, sycl.queues[device]);
  sycl.held[device] -= bytes;
  return OXYTORCH_MEMORY_OK;
}

int allocate_host(void* context, int device, std::size_t bytes, void** data) {
  Sycl& sycl = sycl_of(context);
  *data = sycl.DPCTLmalloc_host(bytes, sycl.queues[device]);
  return *data ? OXYTORCH_MEMORY_OK : OXYTORCH_MEMORY_OUT;
}

int release_host(void* context, int device, void* data, std::size_t) {
  Sycl& sycl = sycl_of(context);
  sycl.DPCTLfree_with_queue(data, sycl.queues[device]);
  return OXYTORCH_MEMORY_OK;
}

int record(void* context, int device, void* stream, std::uint64_t* event) {
  Sycl& sycl = sycl_of(context);
  void* queue = stream ? stream : sycl.queues[device];
  *event = reinterpret_cast<std::uint64_t>(sycl.DPCTLQueue_SubmitBarrier(queue));
  return *event ? OXYTORCH_MEMORY_OK : OXYTORCH_MEMORY_FAILED;
}

int query(void* context, int, std::uint64_t event) {
  const int status = sycl_of(context).DPCTLEvent_GetCommandExecutionStatus(pointer(event));
  return status == kComplete ? OXYTORCH_MEMORY_OK : OXYTORCH_MEMORY_PENDING;
}

int wait(void* context, int, std::uint64_t event) {
  sycl_of(context).DPCTLEvent_Wait(pointer(event));
  return OXYTORCH_MEMORY_OK;
}

void forget(void* context, int, std::uint64_t event) {
  sycl_of(context).DPCTLEvent_Delete(pointer(event));
}

// SYCL does not say what other programs hold.
int memory_info(void* context, int device, std::size_t* free_bytes, std::size_t* total_bytes) {
  const Sycl& sycl = sycl_of(context);
  *total_bytes = sycl.total[device];
  *free_bytes = *total_bytes - std::min(*total_bytes, sycl.held[device]);
  return OXYTORCH_MEMORY_OK;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int oxytorch_memory_sycl_give(const oxytorch_memory_source* source, int device, void* queue) {
  if (const int result = oxytorch_memory_expect({{source, "a source"}, {queue, "a queue"}}))
    return result;
  if (source->allocate != allocate || !source->context)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, "expected a source of SYCL's devices");
  Sycl& sycl = sycl_of(source->context);
  if (device < 0 || std::size_t(device) >= sycl.queues.size())
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, "there is no such SYCL device");
  void* found = sycl.DPCTLQueue_GetDevice(queue);
  sycl.queues[device] = queue;
  sycl.total[device] = sycl.DPCTLDevice_GetGlobalMemSize(found);
  sycl.DPCTLDevice_Delete(found);
  return OXYTORCH_MEMORY_OK;
}

int oxytorch_memory_sycl_source(const char* path, void* const* queues, int devices,
                                oxytorch_memory_source* source) {
  if (const int result = oxytorch_memory_expect(
          {{path, "the path of dpctl's library"}, {source, "a place for source"}}))
    return result;
  if (devices < 1 || devices > oxytorch::memory::kMostDevices)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "expected 1 to 1024 devices, got " + std::to_string(devices));
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                std::string("dpctl's library cannot be loaded: ") + dlerror());
  auto sycl = std::make_unique<Sycl>();
  std::string missing;
#define OXYTORCH_FIND(result, name, arguments) \
  oxytorch::memory::find(library, #name, sycl->name, missing);
  OXYTORCH_SYCL_FUNCTIONS(OXYTORCH_FIND)
  if (!missing.empty())
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "dpctl's library has no " + missing + "; upgrade dpctl");
  sycl->queues.resize(devices);
  sycl->total.resize(devices);
  sycl->held.resize(devices);
  *source = {};
  source->name = "SYCL";
  source->devices = devices;
  oxytorch::memory::set_segments(*source, allocate, release);
  oxytorch::memory::set_events(*source, record, query, wait, forget);
  source->memory_info = memory_info;
  oxytorch::memory::set_host_memory(*source, allocate_host, release_host);
  // In use until the process ends.
  source->context = sycl.release();
  for (int i = 0; queues && i < devices; ++i)
    if (const int result = oxytorch_memory_sycl_give(source, i, queues[i])) return result;
  return OXYTORCH_MEMORY_OK;
}

}  // extern "C"
#pragma GCC visibility pop
