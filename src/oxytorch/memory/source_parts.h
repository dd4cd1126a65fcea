#pragma once

#include "allocator.h"

// Fills the parts of a source that belong together, in the order in which allocator.h describes
// them.
namespace oxytorch::memory {

using Source = oxytorch_memory_source;

inline void set_segments(Source& source, decltype(Source::allocate) allocate,
                         decltype(Source::release) release) {
  source.allocate = allocate;
  source.release = release;
}

inline void set_pages(Source& source, std::size_t granularity, decltype(Source::reserve) reserve,
                      decltype(Source::unreserve) unreserve, decltype(Source::create) create,
                      decltype(Source::destroy) destroy, decltype(Source::map) map,
                      decltype(Source::unmap) unmap, decltype(Source::grant) grant) {
  source.granularity = granularity;
  source.reserve = reserve;
  source.unreserve = unreserve;
  source.create = create;
  source.destroy = destroy;
  source.map = map;
  source.unmap = unmap;
  source.grant = grant;
}

inline void set_events(Source& source, decltype(Source::record) record,
                       decltype(Source::query) query, decltype(Source::wait) wait,
                       decltype(Source::forget) forget) {
  source.record = record;
  source.query = query;
  source.wait = wait;
  source.forget = forget;
}

inline void set_host_memory(Source& source, decltype(Source::allocate_host) allocate_host,
                            decltype(Source::release_host) release_host) {
  source.allocate_host = allocate_host;
  source.release_host = release_host;
}

}  // namespace oxytorch::memory
