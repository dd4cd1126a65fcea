#pragma once

#include <cstddef>

namespace oxytorch::memory {

// Whether an address may lie in memory of the host source; false: it does not.
bool may_be_host_memory(const void* data);

// Bytes of the machine's memory, as a source tells them.
int host_memory_info(void*, int, std::size_t* free_bytes, std::size_t* total_bytes);

}  // namespace oxytorch::memory
