// The functions of the library behind oxytorch/program.h, which is what to include.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define OXY_PROGRAM_ABI extern "C" __attribute__((visibility("default")))

struct OxytorchProgram;

// What an operator takes and returns, as program.h writes it; null where torch has none.
typedef const char* (*OxytorchOperatorTypes)(const char* name, const char* overload);

// Takes a result: a tensor that it owns from then on, or a number where that is null.
typedef void (*OxytorchTake)(void* into, void* tensor, int64_t number);

// Null where it fails; oxytorch_program_error tells why, to the thread that called.
OXY_PROGRAM_ABI OxytorchProgram* oxytorch_program_open(const char* path, int verifies,
                                                       OxytorchOperatorTypes types);
// 0 where it fails. tensors: pointers to at::Tensor, which stay the caller's.
OXY_PROGRAM_ABI int oxytorch_program_run(const OxytorchProgram* program, void* const* tensors,
                                         size_t tensor_count, const int64_t* sizes,
                                         size_t size_count, OxytorchTake take, void* into);
OXY_PROGRAM_ABI const char* oxytorch_program_inputs(const OxytorchProgram* program);
OXY_PROGRAM_ABI void oxytorch_program_close(OxytorchProgram* program);
OXY_PROGRAM_ABI const char* oxytorch_program_error();
