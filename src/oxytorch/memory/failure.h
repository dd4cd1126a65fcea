// Between the C functions.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>

struct oxytorch_memory;

// Keeps the text for oxytorch_memory_error(); returns the result.
int oxytorch_memory_fail(int result, std::string text);

// INVALID, with a text that names the first pointer that is null; OK: none is.
int oxytorch_memory_expect(std::initializer_list<std::pair<const void*, const char*>> pointers);

// Notes for this thread where its next allocation comes from, if somebody asks for that.
void oxytorch_memory_ask_site();

// oxytorch_memory_begin_pool for a caller in C++.
int oxytorch_memory_begin(oxytorch_memory* memory, int device, std::uint64_t first,
                          std::uint64_t second, std::function<bool(void*)> takes);
