// Pinned memory of the host: a source over that of a device. Its own stream is the processor, whose
// work is done when the call returns; others are the device's.
#include <memory>
#include <string>

#include "allocator.h"
#include "failure.h"
#include "host.h"
#include "source_parts.h"

namespace {

constexpr std::uint64_t kDone = 0;  // the event of the processor's work

struct Pinned {
  oxytorch_memory_source device;
  std::string name;
};

const oxytorch_memory_source& device_of(void* context) {
  return static_cast<Pinned*>(context)->device;
}

int allocate(void* context, int device, std::size_t bytes, void** data) {
  const oxytorch_memory_source& of = device_of(context);
  return of.allocate_host(of.context, device, bytes, data);
}

int release(void* context, int device, void* data, std::size_t bytes) {
  const oxytorch_memory_source& of = device_of(context);
  return of.release_host(of.context, device, data, bytes);
}

int record(void* context, int device, void* stream, std::uint64_t* event) {
  *event = kDone;
  if (stream == OXYTORCH_MEMORY_HOST_STREAM) return OXYTORCH_MEMORY_OK;
  const oxytorch_memory_source& of = device_of(context);
  return of.record(of.context, device, stream, event);
}

int query(void* context, int device, std::uint64_t event) {
  const oxytorch_memory_source& of = device_of(context);
  return event == kDone ? OXYTORCH_MEMORY_OK : of.query(of.context, device, event);
}

int wait(void* context, int device, std::uint64_t event) {
  const oxytorch_memory_source& of = device_of(context);
  return event == kDone ? OXYTORCH_MEMORY_OK : of.wait(of.context, device, event);
}

void forget(void* context, int device, std::uint64_t event) {
  const oxytorch_memory_source& of = device_of(context);
  if (event != kDone) of.forget(of.context, device, event);
}

int is_capturing(void* context, int device, void* stream) {
  const oxytorch_memory_source& of = device_of(context);
  return stream != OXYTORCH_MEMORY_HOST_STREAM && of.is_capturing &&
         of.is_capturing(of.context, device, stream);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" int oxytorch_memory_pinned_source(const oxytorch_memory_source* device,
                                             oxytorch_memory_source* source) {
  if (const int result = oxytorch_memory_expect(
          {{device, "the source of a device"}, {source, "a place for source"}}))
    return result;
  const std::string name = device->name ? device->name : "the source";
  if (!device->allocate_host || !device->release_host)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID, name + " has no pinned memory");
  if (!device->record || !device->query || !device->wait || !device->forget)
    return oxytorch_memory_fail(OXYTORCH_MEMORY_INVALID,
                                name + " lacks record, query, wait or forget");
  auto pinned = std::make_unique<Pinned>(Pinned{*device, "pinned " + name});
  *source = {};
  source->name = pinned->name.c_str();
  source->devices = device->devices;
  oxytorch::memory::set_segments(*source, allocate, release);
  oxytorch::memory::set_events(*source, record, query, wait, forget);
  source->is_capturing = is_capturing;
  source->memory_info = oxytorch::memory::host_memory_info;
  // In use until the process ends.
  source->context = pinned.release();
  return OXYTORCH_MEMORY_OK;
}
#pragma GCC visibility pop
