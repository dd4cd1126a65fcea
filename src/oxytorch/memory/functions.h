// Functions of a library that is opened at run time. A list of them is a macro of another one, F,
// which it gives the result's type, the name and the arguments' types of each.
#pragma once

#include <dlfcn.h>

#include <cstring>
#include <string>

#define OXYTORCH_POINTER(result, name, arguments) result(*name) arguments;

namespace oxytorch::memory {

// missing: the first name that was not found.
template <class Function>
void find(void* library, const char* name, Function& function, std::string& missing) {
  void* symbol = dlsym(library, name);
  if (!symbol && missing.empty()) missing = name;
  std::memcpy(&function, &symbol, sizeof symbol);
}

}  // namespace oxytorch::memory
