#pragma once

namespace oxytorch::memory {

// Whether an address may lie in memory of the host source; false: it does not.
bool may_be_host_memory(const void* data);

}  // namespace oxytorch::memory
