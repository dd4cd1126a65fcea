#include "core/python.h"

#include <cstring>

#include "core/export.h"

namespace oxytorch {

const Python& python() {
  static const Python found;
  return found;
}

Offsets& offsets() {
  static Offsets found{};
  return found;
}

}  // namespace oxytorch

// offsets: in the order of `Offsets`, as many as there are.
OXY_EXPORT void oxytorch_set_offsets(const std::int64_t* offsets) {
  std::memcpy(&oxytorch::offsets(), offsets, sizeof(oxytorch::Offsets));
}
