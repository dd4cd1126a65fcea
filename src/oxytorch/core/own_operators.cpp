#include <set>

#include "core/torch_api.h"

namespace oxytorch {

namespace {

// Filled before main, file by file.
std::set<std::string>& names() {
  static std::set<std::string> names;
  return names;
}

}  // namespace

OwnOperators::OwnOperators(const char* name) { names().insert(name); }

bool OwnOperators::have(const std::string& name) { return names().count(name) > 0; }

}  // namespace oxytorch
