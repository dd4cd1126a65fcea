#include "core/huge_pages.h"

#include "core/export.h"

// For placement.py. Null: the system has no more.
OXY_EXPORT void* oxytorch_map_huge(std::size_t size) {
  return oxytorch::map_huge(size, PROT_READ | PROT_WRITE);
}

OXY_EXPORT void oxytorch_unmap_huge(void* data, std::size_t size) { munmap(data, size); }
