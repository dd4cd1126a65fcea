// Memory of NVIDIA's GPUs, through the driver, which is loaded when it is asked for. Names and
// numbers are those of NVIDIA's CUDA Driver API reference.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../core/old_runtime.h"
#include "allocator.h"
#include "failure.h"
#include "functions.h"
#include "source_parts.h"

namespace {

using Result = int;
using Context = void*;
using Event = void*;
using Address = unsigned long long;

constexpr Result kOutOfMemory = 2, kNotReady = 600;
constexpr int kCaptureRelaxed = 2, kNoTiming = 2, kReadWrite = 3, kOnDevice = 1, kPinned = 1;
constexpr unsigned kPortable = 1;
constexpr int kHasVirtualMemory = 102;

struct Location {
  int type = kOnDevice;
  int id = 0;
};
struct Properties {  // CUmemAllocationProp
  int type = kPinned;
  int handle_types = 0;
  Location location;
  void* windows = nullptr;
  unsigned char flags[8] = {};
};
static_assert(sizeof(Properties) == 32);
struct Access {  // CUmemAccessDesc
  Location location;
  int flags = kReadWrite;
};
static_assert(sizeof(Access) == 12);

// What is called of the driver.
#define OXYTORCH_CUDA_FUNCTIONS(F)                                                                 \
  F(Result, cuInit, (unsigned))                                                                    \
  F(Result, cuDeviceGetCount, (int*))                                                              \
  F(Result, cuDeviceGetAttribute, (int*, int, int))                                                \
  F(Result, cuDeviceCanAccessPeer, (int*, int, int))                                               \
  F(Result, cuDevicePrimaryCtxRetain, (Context*, int))                                             \
  F(Result, cuCtxGetCurrent, (Context*))                                                           \
  F(Result, cuCtxPushCurrent_v2, (Context))                                                        \
  F(Result, cuCtxPopCurrent_v2, (Context*))                                                        \
  F(Result, cuCtxSynchronize, ())                                                                  \
  F(Result, cuThreadExchangeStreamCaptureMode, (int*))                                             \
  F(Result, cuMemGetInfo_v2, (std::size_t*, std::size_t*))                                         \
  F(Result, cuMemAlloc_v2, (Address*, std::size_t))                                                \
  F(Result, cuMemFree_v2, (Address))                                                               \
  F(Result, cuMemHostAlloc, (void**, std::size_t, unsigned))                                       \
  F(Result, cuMemFreeHost, (void*))                                                                \
  F(Result, cuMemGetAllocationGranularity, (std::size_t*, const Properties*, int))                 \
  F(Result, cuMemAddressReserve,                                                                   \
    (Address*, std::size_t, std::size_t, Address, unsigned long long))                             \
  F(Result, cuMemAddressFree, (Address, std::size_t))                                              \
  F(Result, cuMemCreate,                                                                           \
    (unsigned long long*, std::size_t, const Properties*, unsigned long long))                     \
  F(Result, cuMemRelease, (unsigned long long))                                                    \
  F(Result, cuMemMap, (Address, std::size_t, std::size_t, unsigned long long, unsigned long long)) \
  F(Result, cuMemUnmap, (Address, std::size_t))                                                    \
  F(Result, cuMemSetAccess, (Address, std::size_t, const Access*, std::size_t))                    \
  F(Result, cuEventCreate, (Event*, unsigned))                                                     \
  F(Result, cuEventRecord, (Event, void*))                                                         \
  F(Result, cuEventQuery, (Event))                                                                 \
  F(Result, cuEventSynchronize, (Event))                                                           \
  F(Result, cuStreamIsCapturing, (void*, int*))

struct Driver {
  OXYTORCH_CUDA_FUNCTIONS(OXYTORCH_POINTER)
};

struct Device {
  std::once_flag is_begun;
  Context context = nullptr;
  Result result = 0;
  std::vector<Access> access;  // by itself, and by devices that can reach it
  std::mutex mutex;            // of spare: an allocator of its pinned memory may use it too
  std::vector<Event> spare;

  Event take() {
    std::lock_guard lock(mutex);
    if (spare.empty()) return nullptr;
    Event event = spare.back();
    spare.pop_back();
    return event;
  }
  void give(Event event) {
    std::lock_guard lock(mutex);
    spare.push_back(event);
  }
};

struct Cuda {
  Driver driver;
  std::vector<std::unique_ptr<Device>> devices;
};

int result_of(Result result) {
  if (result == 0) return OXYTORCH_MEMORY_OK;
  return result == kOutOfMemory ? OXYTORCH_MEMORY_OUT : OXYTORCH_MEMORY_DRIVER + result;
}

// In it, the device's primary context is the thread's, and calls do not end the recording of a
// graph by another stream.
class Scope {
 public:
  Scope(void* context, int device)
      : cuda_(*static_cast<Cuda*>(context)), device_(*cuda_.devices[device]) {
    std::call_once(device_.is_begun, [&] { begin(device); });
    result_ = device_.result;
    if (result_) return;
    Context current = nullptr;
    driver().cuCtxGetCurrent(&current);
    if (current != device_.context) {
      result_ = driver().cuCtxPushCurrent_v2(device_.context);
      is_pushed_ = !result_;
    }
    driver().cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~Scope() {
    if (device_.result) return;
    driver().cuThreadExchangeStreamCaptureMode(&mode_);
    Context popped = nullptr;
    if (is_pushed_) driver().cuCtxPopCurrent_v2(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

  const Driver& driver() const { return cuda_.driver; }
  Device& device() const { return device_; }
  template <typename Function>
  int call(Function function) const {
    return result_of(result_ ? result_ : function(driver()));
  }

 private:
  void begin(int device) {
    device_.result = driver().cuDevicePrimaryCtxRetain(&device_.context, device);
    device_.access.push_back({{kOnDevice, device}, kReadWrite});
    for (int other = 0; other < int(cuda_.devices.size()); ++other) {
      int can = 0;
      if (other != device && driver().cuDeviceCanAccessPeer(&can, other, device) == 0 && can)
        device_.access.push_back({{kOnDevice, other}, kReadWrite});
    }
  }

  Cuda& cuda_;
  Device& device_;
  Result result_ = 0;
  bool is_pushed_ = false;
  int mode_ = kCaptureRelaxed;
};

Address address_of(void* data) { return reinterpret_cast<Address>(data); }

int allocate(void* context, int device, std::size_t bytes, void** data) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemAlloc_v2(reinterpret_cast<Address*>(data), bytes);
  });
}

int release(void* context, int device, void* data, std::size_t) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemFree_v2(address_of(data));
  });
}

int allocate_host(void* context, int device, std::size_t bytes, void** data) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemHostAlloc(data, bytes, kPortable);
  });
}

int release_host(void* context, int device, void* data, std::size_t) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemFreeHost(data);
  });
}

int reserve(void* context, int device, std::size_t bytes, void** address) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemAddressReserve(reinterpret_cast<Address*>(address), bytes, 0, 0, 0);
  });
}

int unreserve(void* context, int device, void* address, std::size_t bytes) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemAddressFree(address_of(address), bytes);
  });
}

int create(void* context, int device, std::size_t bytes, std::uint64_t* page) {
  return Scope(context, device).call([&](const Driver& driver) {
    Properties properties;
    properties.location.id = device;
    unsigned long long handle = 0;
    const Result result = driver.cuMemCreate(&handle, bytes, &properties, 0);
    *page = handle;
    return result;
  });
}

int destroy(void* context, int device, std::uint64_t page, std::size_t) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemRelease(page);
  });
}

int map(void* context, int device, void* address, std::uint64_t page, std::size_t bytes) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemMap(address_of(address), bytes, 0, page, 0);
  });
}

int unmap(void* context, int device, void* address, std::size_t bytes) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemUnmap(address_of(address), bytes);
  });
}

int grant(void* context, int device, void* address, std::size_t bytes) {
  const Scope scope(context, device);
  return scope.call([&](const Driver& driver) {
    const std::vector<Access>& access = scope.device().access;
    return driver.cuMemSetAccess(address_of(address), bytes, access.data(), access.size());
  });
}

int record(void* context, int device, void* stream, std::uint64_t* event) {
  const Scope scope(context, device);
  return scope.call([&](const Driver& driver) {
    Event found = scope.device().take();
    if (!found)
      if (const Result result = driver.cuEventCreate(&found, kNoTiming)) return result;
    const Result result = driver.cuEventRecord(found, stream);
    if (result) scope.device().give(found);
    *event = reinterpret_cast<std::uint64_t>(found);
    return result;
  });
}

int query(void* context, int device, std::uint64_t event) {
  const Scope scope(context, device);
  const Result result = scope.driver().cuEventQuery(reinterpret_cast<Event>(event));
  return result == kNotReady ? OXYTORCH_MEMORY_PENDING : result_of(result);
}

int wait(void* context, int device, std::uint64_t event) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuEventSynchronize(reinterpret_cast<Event>(event));
  });
}

void forget(void* context, int device, std::uint64_t event) {
  Cuda& cuda = *static_cast<Cuda*>(context);
  cuda.devices[device]->give(reinterpret_cast<Event>(event));
}

int is_capturing(void* context, int device, void* stream) {
  const Scope scope(context, device);
  int status = 0;
  // What cannot be asked is left alone, as if it were recording.
  return scope.driver().cuStreamIsCapturing(stream, &status) != 0 || status != 0;
}

int memory_info(void* context, int device, std::size_t* free_bytes, std::size_t* total_bytes) {
  return Scope(context, device).call([&](const Driver& driver) {
    return driver.cuMemGetInfo_v2(free_bytes, total_bytes);
  });
}

int synchronize(void* context, int device) {
  return Scope(context, device).call([](const Driver& driver) {
    return driver.cuCtxSynchronize();
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" int oxytorch_memory_cuda_source(oxytorch_memory_source* source) {
  if (const int result = oxytorch_memory_expect({{source, "a place for source"}})) return result;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "no NVIDIA driver: libcuda.so.1 is not there");
  auto cuda = std::make_unique<Cuda>();
  Driver& driver = cuda->driver;
  std::string missing;
#define OXYTORCH_FIND(result, name, arguments) \
  oxytorch::memory::find(library, #name, driver.name, missing);
  OXYTORCH_CUDA_FUNCTIONS(OXYTORCH_FIND)
  if (!missing.empty())
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "the NVIDIA driver is too old: it has no " + missing);
  int count = 0;
  Result result = driver.cuInit(0);
  if (!result) result = driver.cuDeviceGetCount(&count);
  if (result || !count)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                "no CUDA device: the driver says " + std::to_string(result));
  bool can_map = true;
  for (int device = 0; device < count; ++device) {
    int value = 0;
    driver.cuDeviceGetAttribute(&value, kHasVirtualMemory, device);
    can_map = can_map && value;
    cuda->devices.push_back(std::make_unique<Device>());
  }
  const Properties properties;
  std::size_t granularity = 0;
  if (can_map && driver.cuMemGetAllocationGranularity(&granularity, &properties, 0))
    granularity = 0;
  *source = {};
  source->name = "CUDA";
  source->devices = count;
  oxytorch::memory::set_segments(*source, allocate, release);
  oxytorch::memory::set_pages(*source, granularity, reserve, unreserve, create, destroy, map, unmap,
                              grant);
  oxytorch::memory::set_events(*source, record, query, wait, forget);
  oxytorch::memory::set_host_memory(*source, allocate_host, release_host);
  source->is_capturing = is_capturing;
  source->memory_info = memory_info;
  source->synchronize = synchronize;
  // In use until the process ends.
  source->context = cuda.release();
  return OXYTORCH_MEMORY_OK;
}
#pragma GCC visibility pop
