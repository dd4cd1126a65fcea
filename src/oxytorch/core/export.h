// Functions that Python calls by name, through ctypes.
#pragma once

#define OXY_EXPORT extern "C" __attribute__((visibility("default")))
