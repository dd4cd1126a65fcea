// Functions of the process that the library is loaded into, by their names: those that torch's
// stable ABI has no way to, and Python's.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "core/old_runtime.h"

namespace oxytorch {

// A function of the process, by its name.
template <class Function>
Function named(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// at::TensorBase::_version() const
using VersionOf = std::int64_t (*)(const void*);

inline VersionOf version_function() {
  static const auto found = named<VersionOf>("_ZNK2at10TensorBase8_versionEv");
  return found;
}

}  // namespace oxytorch
