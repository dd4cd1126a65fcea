// Which levels are built and supported, and which one is active.
#pragma once

#include <cstdint>

#include "oxytorch_levels.h"

namespace oxytorch {

// What kernels ask of a level; cmake/isa.cmake says what each is and which level has it.
#define OXY_ENUMERATOR(name) name,
enum class Capability : int { OXY_CAPABILITIES(OXY_ENUMERATOR) };
#undef OXY_ENUMERATOR

// Bit i is set if level i is built and this processor and its operating system run it.
std::uint32_t supported_levels();

// Index of the level that kernels run at; chosen at the first call.
int active_level();

// Whether that level has the capability.
bool level_has(Capability capability);

namespace probe {

// Bit i is set if the processor has the features of level i and the system saves its registers.
std::uint32_t supported_levels();

// Asks Linux to let this process use the AMX tile registers; false if it refuses.
bool request_tiles();

}  // namespace probe

}  // namespace oxytorch

// The same for programs without C++ (the Python package calls these through ctypes).
extern "C" {
int oxytorch_level_count();
const char* oxytorch_level_name(int level);
std::uint32_t oxytorch_level_implies(int level);
int oxytorch_capability_count();
const char* oxytorch_capability_name(int capability);
// Bit i is set if the level has capability i.
std::uint32_t oxytorch_level_capabilities(int level);
std::uint32_t oxytorch_built_levels();
std::uint32_t oxytorch_supported_levels();
int oxytorch_active_level();
// Makes `level` the active one; returns 0, or -1 if it is not supported.
int oxytorch_activate_level(int level);
// Index of the level whose code ran last, -1 since `oxytorch_forget_last_level`.
int oxytorch_last_level();
void oxytorch_forget_last_level();
}
