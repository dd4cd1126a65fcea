// A caching allocator behind a plain C interface: no torch and no Python in it. What memory is
// made of comes from a source, a table of functions; how it is kept and split, from a policy.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// What functions return. The text of the last failure in this thread: oxytorch_memory_error().
enum {
  OXYTORCH_MEMORY_OK = 0,
  OXYTORCH_MEMORY_OUT = 1,        // the source or the limit has no more
  OXYTORCH_MEMORY_PENDING = 2,    // query: the event has not happened yet
  OXYTORCH_MEMORY_INVALID = 3,    // a wrong argument: a pointer that is not live, an unknown device
  OXYTORCH_MEMORY_FAILED = 4,     // the source failed in another way
  OXYTORCH_MEMORY_TOO_SMALL = 5,  // the caller's buffer
  OXYTORCH_MEMORY_DRIVER = 1000   // and the number of a driver's error; of sources alone
};

// The policies.
enum {
  // The constants of torch's native caching allocator: segments of 2 MiB for what is at most 1 MiB,
  // of 20 MiB up to 10 MiB, and one of its own, rounded to 2 MiB, for each larger request.
  OXYTORCH_MEMORY_NATIVE = 0,
  // Ours: physical pages behind virtual addresses. A block that fits nowhere is put together of
  // free pages from anywhere before the source is asked for more. Needs a source that maps.
  OXYTORCH_MEMORY_MAPPED = 1,
  // torch's expandable segments: one growing range per stream and pool. Needs a source that maps.
  OXYTORCH_MEMORY_EXPANDABLE = 2
};

// Where memory comes from. Functions return one of the results above, may be called from any
// thread, one at a time for a device by each allocator. Those that a policy does not need may be
// null.
typedef struct oxytorch_memory_source {
  const char* name;    // of the kind of device, for messages: "CUDA"
  void* context;       // the first argument of each function
  size_t granularity;  // bytes of the smallest physical page; 0: it cannot map
  int devices;         // are numbered from 0

  // Whole segments.
  int (*allocate)(void* context, int device, size_t bytes, void** data);
  int (*release)(void* context, int device, void* data, size_t bytes);

  // Virtual addresses and physical pages. One page may be mapped at several addresses.
  int (*reserve)(void* context, int device, size_t bytes, void** address);
  int (*unreserve)(void* context, int device, void* address, size_t bytes);
  int (*create)(void* context, int device, size_t bytes, uint64_t* page);
  int (*destroy)(void* context, int device, uint64_t page, size_t bytes);
  int (*map)(void* context, int device, void* address, uint64_t page, size_t bytes);
  int (*unmap)(void* context, int device, void* address, size_t bytes);
  // After map, for one or more neighbouring pages: they can be read and written.
  int (*grant)(void* context, int device, void* address, size_t bytes);

  // The order of work. Null: streams are in step with the caller (a processor).
  int (*record)(void* context, int device, void* stream, uint64_t* event);
  int (*query)(void* context, int device, uint64_t event);
  int (*wait)(void* context, int device, uint64_t event);
  void (*forget)(void* context, int device, uint64_t event);
  // Whether work on the stream is recorded in a graph in place of being run. Null: never.
  int (*is_capturing)(void* context, int device, void* stream);

  int (*memory_info)(void* context, int device, size_t* free_bytes, size_t* total_bytes);
  // Waits for all work of the device. Null: as for record.
  int (*synchronize)(void* context, int device);

  // Memory of the host that the device reads and writes itself, page-locked. Null: it has none.
  int (*allocate_host)(void* context, int device, size_t bytes, void** data);
  int (*release_host)(void* context, int device, void* data, size_t bytes);
} oxytorch_memory_source;

typedef struct oxytorch_memory oxytorch_memory;

const char* oxytorch_memory_error(void);

// The table is copied; its context has to outlive the allocator. Null on failure.
oxytorch_memory* oxytorch_memory_create(const oxytorch_memory_source* source, int policy);
// Gives everything back to the source, live blocks too. No other thread may use it any more.
void oxytorch_memory_destroy(oxytorch_memory* memory);

// Zero bytes give a null pointer. Other results are multiples of 512.
int oxytorch_memory_allocate(oxytorch_memory* memory, int device, size_t bytes, void* stream,
                             void** data);
// The block is free for its stream's later work, and for other streams that used it once they have
// passed what they have been given so far. A null pointer is allowed.
int oxytorch_memory_free(oxytorch_memory* memory, void* data);
// `stream` uses the block too.
int oxytorch_memory_record_stream(oxytorch_memory* memory, void* data, void* stream);
// The start and the bytes of the block in which a pointer lies.
int oxytorch_memory_find(oxytorch_memory* memory, const void* inside, void** data, size_t* bytes);

// Waits for the device's work and gives the source what no live block needs. device -1: all.
int oxytorch_memory_empty_cache(oxytorch_memory* memory, int device);
// The most that is taken from the source; 0: no limit.
int oxytorch_memory_set_limit(oxytorch_memory* memory, int device, size_t bytes);
int oxytorch_memory_info(oxytorch_memory* memory, int device, size_t* free_bytes,
                         size_t* total_bytes);

// Private pools (of CUDA graphs). From begin to end, requests on streams for which `takes` says 1
// are served from the pool `id` alone, in which blocks keep their addresses until release.
int oxytorch_memory_begin_pool(oxytorch_memory* memory, int device, const uint64_t id[2],
                               int (*takes)(void* argument, void* stream), void* argument);
int oxytorch_memory_end_pool(oxytorch_memory* memory, int device, const uint64_t id[2]);
int oxytorch_memory_release_pool(oxytorch_memory* memory, int device, const uint64_t id[2]);

// Statistics under torch's keys ("allocated_bytes.all.peak"), one to a line, and their values in
// the same order. `count` values are written at most; returns how many there are.
const char* oxytorch_memory_statistic_names(void);
int oxytorch_memory_statistics(oxytorch_memory* memory, int device, int64_t* values, int count);
int oxytorch_memory_reset_peaks(oxytorch_memory* memory, int device);
int oxytorch_memory_reset_accumulated(oxytorch_memory* memory, int device);

// Texts. They are written with a final zero if they fit; `needed` is their size with it.
// A snapshot: JSON in the schema of torch.cuda.memory_snapshot(), a list of segments with blocks.
int oxytorch_memory_snapshot(oxytorch_memory* memory, int device, char* text, size_t size,
                             size_t* needed);
// What is asked, held, cached, split, unusable, and what to do, for a request that failed.
int oxytorch_memory_report(oxytorch_memory* memory, int device, size_t asked, char* text,
                           size_t size, size_t* needed);

// Where this thread's allocations come from, until it is said again; 0: nobody knows. A report
// names those that hold most.
void oxytorch_memory_set_site(int site);
// What reports call a site (from 1 on): a line of code.
int oxytorch_memory_name_site(int site, const char* name);

// What a listener is told, named as torch's traces are.
enum {
  OXYTORCH_MEMORY_ALLOC = 0,
  OXYTORCH_MEMORY_FREE_REQUESTED = 1,
  OXYTORCH_MEMORY_FREE_COMPLETED = 2,
  OXYTORCH_MEMORY_SEGMENT_ALLOC = 3,  // also of physical pages
  OXYTORCH_MEMORY_SEGMENT_FREE = 4,
  OXYTORCH_MEMORY_SEGMENT_MAP = 5,
  OXYTORCH_MEMORY_SEGMENT_UNMAP = 6,
  OXYTORCH_MEMORY_OOM = 7
};
typedef void (*oxytorch_memory_listener)(void* context, int event, int device, void* data,
                                         size_t bytes, void* stream);
// Called with the allocator locked: it must not call it. Null: nobody listens.
int oxytorch_memory_listen(oxytorch_memory* memory, oxytorch_memory_listener listener,
                           void* context);

// Many calls in one, for replaying traces: `blocks` is the caller's array of live blocks.
enum {
  OXYTORCH_MEMORY_DO_ALLOCATE = 0,
  OXYTORCH_MEMORY_DO_FREE,
  OXYTORCH_MEMORY_DO_RECORD_STREAM,
  OXYTORCH_MEMORY_DO_EMPTY_CACHE
};
typedef struct oxytorch_memory_step {
  int32_t what;
  uint32_t block;   // index into `blocks`
  uint64_t bytes;   // DO_ALLOCATE
  uint64_t stream;  // DO_ALLOCATE, DO_RECORD_STREAM
} oxytorch_memory_step;
// Returns the result of the first step that failed, or OK; `done` is how many steps were made.
// `nanoseconds`, of `count` entries, may be null: the time of each step.
int oxytorch_memory_run(oxytorch_memory* memory, int device, const oxytorch_memory_step* steps,
                        size_t count, void** blocks, size_t block_count, size_t* done,
                        uint64_t* nanoseconds);

// The fake source: numbers in place of memory, for tests and for replaying traces anywhere.
typedef struct oxytorch_memory_fake {
  int devices;
  size_t granularity;  // 0: it does not map
  size_t total_bytes;  // of each device
  // How many calls of the source an event takes until it has happened; 0: none; negative: until
  // it is waited for.
  int64_t event_delay;
} oxytorch_memory_fake;
enum {
  OXYTORCH_MEMORY_CALL_ALLOCATE = 0,
  OXYTORCH_MEMORY_CALL_RELEASE,
  OXYTORCH_MEMORY_CALL_RESERVE,
  OXYTORCH_MEMORY_CALL_UNRESERVE,
  OXYTORCH_MEMORY_CALL_CREATE,
  OXYTORCH_MEMORY_CALL_DESTROY,
  OXYTORCH_MEMORY_CALL_MAP,
  OXYTORCH_MEMORY_CALL_UNMAP,
  OXYTORCH_MEMORY_CALL_GRANT,
  OXYTORCH_MEMORY_CALL_RECORD,
  OXYTORCH_MEMORY_CALL_QUERY,
  OXYTORCH_MEMORY_CALL_WAIT,
  OXYTORCH_MEMORY_CALLS
};
typedef struct oxytorch_memory_fake_counts {
  uint64_t calls[OXYTORCH_MEMORY_CALLS];
  uint64_t held_bytes, peak_bytes;  // allocated or created and not given back
  uint64_t mapped_bytes;            // of addresses
  uint64_t mistakes;                // calls that a driver would refuse or that break a program
} oxytorch_memory_fake_counts;
// Fills the table. Its context belongs to it: oxytorch_memory_fake_end, after the allocator.
int oxytorch_memory_fake_source(const oxytorch_memory_fake* fake, oxytorch_memory_source* source);
void oxytorch_memory_fake_end(oxytorch_memory_source* source);
int oxytorch_memory_fake_count(const oxytorch_memory_source* source,
                               oxytorch_memory_fake_counts* counts);
// From now on each `every`-th call that can fail does; 0: none.
int oxytorch_memory_fake_fail(const oxytorch_memory_source* source, uint64_t every);
// A number of the physical granule that is mapped at an address and may be used; 0: none.
uint64_t oxytorch_memory_fake_page(const oxytorch_memory_source* source, int device,
                                   const void* address);
// The first mistake, or an empty text.
const char* oxytorch_memory_fake_mistake(const oxytorch_memory_source* source);

// The real sources. What the machine lacks is an error.
int oxytorch_memory_cuda_source(oxytorch_memory_source* source);
int oxytorch_memory_host_source(oxytorch_memory_source* source);
// `library`: the path of dpctl's libDPCTLSyclInterface.so; a queue (DPCTLSyclQueueRef, which is a
// sycl::queue*) of each device, or null: they are given before the first use. Streams are queues
// of the same contexts. It cannot map.
int oxytorch_memory_sycl_source(const char* library, void* const* queues, int devices,
                                oxytorch_memory_source* source);
int oxytorch_memory_sycl_give(const oxytorch_memory_source* source, int device, void* queue);

// Pinned memory of the host, of another source's device, for the native policy. Processors run
// ahead of streams, so blocks are allocated on OXYTORCH_MEMORY_HOST_STREAM, and streams that read
// or write one are told of by record_stream: it is used again once they have passed. The table of
// `device` is copied.
#define OXYTORCH_MEMORY_HOST_STREAM ((void*)~(uintptr_t)0)
int oxytorch_memory_pinned_source(const oxytorch_memory_source* device,
                                  oxytorch_memory_source* source);

#ifdef __cplusplus
}
#endif
