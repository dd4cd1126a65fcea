// Prints the best level that this machine runs; cmake/isa.cmake builds and runs it.
#include <cstdio>

#include "core/levels.h"
#include "oxytorch_levels.h"

int main() {
#define OXY_FEATURE(feature)
#define OXY_NAME(level, implied, has, features) #level,
  const char* names[] = {OXY_LEVEL_TABLE(OXY_NAME, OXY_FEATURE)};
#undef OXY_NAME
#define OXY_HAS(level, implied, has, features) has,
  const std::uint32_t has[] = {OXY_LEVEL_TABLE(OXY_HAS, OXY_FEATURE)};
#undef OXY_HAS
#undef OXY_FEATURE
  const std::uint32_t supported = oxytorch::probe::supported_levels();
  int level = OXY_LEVEL_COUNT - 1;
  const auto runs = [&] {
    const bool has_tiles = has[level] >> static_cast<int>(oxytorch::Capability::tiles) & 1;
    return (supported >> level & 1) && !(has_tiles && !oxytorch::probe::request_tiles());
  };
  while (level > 0 && !runs()) --level;
  std::fputs(names[level], stdout);
  return 0;
}
