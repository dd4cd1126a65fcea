#include "core/levels.h"

#include <atomic>
#include <iterator>

#include "core/dispatch.h"
#include "core/export.h"

namespace oxytorch {

int last_level = -1;

namespace {

#define OXY_NAME(level, ...) #level,
constexpr const char* kNames[] = {OXY_FOR_EACH_ROW(OXY_NAME, OXY_NAME, 0)};
#undef OXY_NAME

#define OXY_FEATURE(feature)
#define OXY_IMPLIED(level, implied, has, features) implied,
constexpr std::uint32_t kImplied[] = {OXY_LEVEL_TABLE(OXY_IMPLIED, OXY_FEATURE)};
#undef OXY_IMPLIED

#define OXY_HAS(level, implied, has, features) has,
constexpr std::uint32_t kHas[] = {OXY_LEVEL_TABLE(OXY_HAS, OXY_FEATURE)};
#undef OXY_HAS
#undef OXY_FEATURE

#define OXY_NAME(name) #name,
constexpr const char* kCapabilities[] = {OXY_CAPABILITIES(OXY_NAME)};
#undef OXY_NAME

bool has(int level, Capability capability) {
  return kHas[level] >> static_cast<int>(capability) & 1;
}

std::atomic<int> active{-1};

bool activate(int level) {
  if (level < 0 || level >= OXY_LEVEL_COUNT || !(supported_levels() >> level & 1)) return false;
  if (has(level, Capability::tiles) && !probe::request_tiles()) return false;
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

bool level_has(Capability capability) { return has(active_level(), capability); }

}  // namespace oxytorch

OXY_EXPORT int oxytorch_level_count() { return OXY_LEVEL_COUNT; }
OXY_EXPORT const char* oxytorch_level_name(int level) { return oxytorch::kNames[level]; }
OXY_EXPORT std::uint32_t oxytorch_level_implies(int level) { return oxytorch::kImplied[level]; }
OXY_EXPORT int oxytorch_capability_count() {
  return static_cast<int>(std::size(oxytorch::kCapabilities));
}
OXY_EXPORT const char* oxytorch_capability_name(int capability) {
  return oxytorch::kCapabilities[capability];
}
OXY_EXPORT std::uint32_t oxytorch_level_capabilities(int level) { return oxytorch::kHas[level]; }
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
