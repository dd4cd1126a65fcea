// Prints the best level that this machine runs; cmake/isa.cmake builds and runs it.
#include <cstdio>
#include <cstring>

#include "core/levels.h"
#include "oxytorch_levels.h"

int main() {
#define OXY_NAME(level, ...) #level,
  const char* names[] = {OXY_FOR_EACH_LEVEL(OXY_NAME, 0)};
#undef OXY_NAME
  const std::uint32_t supported = oxytorch::probe::supported_levels();
  int level = OXY_LEVEL_COUNT - 1;
  const auto runs = [&] {
    const bool is_refused =
        std::strcmp(names[level], "amx") == 0 && !oxytorch::probe::request_tiles();
    return (supported >> level & 1) && !is_refused;
  };
  while (level > 0 && !runs()) --level;
  std::fputs(names[level], stdout);
  return 0;
}
