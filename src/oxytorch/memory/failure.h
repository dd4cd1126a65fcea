// Between the C functions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

struct oxytorch_memory;

// Keeps the text for oxytorch_memory_error(); returns the result.
int oxytorch_memory_fail(int result, std::string text);

// oxytorch_memory_begin_pool for a caller in C++.
int oxytorch_memory_begin(oxytorch_memory* memory, int device, std::uint64_t first,
                          std::uint64_t second, std::function<bool(void*)> takes);
