#include "core/levels.h"

#include <atomic>
#include <cstring>

#include "core/dispatch.h"

namespace oxytorch {

int last_level = -1;

namespace {

#define OXY_NAME(level, ...) #level,
constexpr const char* kNames[] = {OXY_FOR_EACH_ROW(OXY_NAME, OXY_NAME, 0)};
#undef OXY_NAME

#define OXY_FEATURE(feature)
#define OXY_IMPLIED(level, implied, features) implied,
constexpr std::uint32_t kImplied[] = {OXY_LEVEL_TABLE(OXY_IMPLIED, OXY_FEATURE)};
#undef OXY_IMPLIED
#undef OXY_FEATURE

std::atomic<int> active{-1};

bool activate(int level) {
  if (level < 0 || level >= OXY_LEVEL_COUNT || !(supported_levels() >> level & 1)) return false;
  if (std::strcmp(kNames[level], "amx") == 0 && !probe::request_tiles()) return false;
  active.store(level, std::memory_order_relaxed);
  return true;
}

int choose_level() {
  for (int level = OXY_LEVEL_COUNT - 1; level > 0; --level) {
    if (activate(level)) return level;
  }
  active.store(0, std::memory_order_relaxed);
  return 0;
}

}  // namespace

std::uint32_t supported_levels() {
  static const std::uint32_t levels = probe::supported_levels() & OXY_LEVELS_BUILT;
  return levels;
}

int active_level() {
  const int level = active.load(std::memory_order_relaxed);
  return level >= 0 ? level : choose_level();
}

}  // namespace oxytorch

#define OXY_EXPORT extern "C" __attribute__((visibility("default")))

OXY_EXPORT int oxytorch_level_count() { return OXY_LEVEL_COUNT; }
OXY_EXPORT const char* oxytorch_level_name(int level) { return oxytorch::kNames[level]; }
OXY_EXPORT std::uint32_t oxytorch_level_implies(int level) { return oxytorch::kImplied[level]; }
OXY_EXPORT std::uint32_t oxytorch_built_levels() { return OXY_LEVELS_BUILT; }
OXY_EXPORT std::uint32_t oxytorch_supported_levels() { return oxytorch::supported_levels(); }
OXY_EXPORT int oxytorch_active_level() { return oxytorch::active_level(); }
OXY_EXPORT int oxytorch_activate_level(int level) { return oxytorch::activate(level) ? 0 : -1; }
OXY_EXPORT int oxytorch_last_level() {
  return __atomic_load_n(&oxytorch::last_level, __ATOMIC_RELAXED);
}
OXY_EXPORT void oxytorch_forget_last_level() {
  __atomic_store_n(&oxytorch::last_level, -1, __ATOMIC_RELAXED);
}
