#include "kernels/memory.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstdlib>
#include <new>
#include <stdexcept>

#include "core/arena.h"

namespace oxytorch {

// Programs have arenas; here every call takes its memory from malloc.
AtenTensorHandle Arena::empty(const std::int64_t*, const std::int64_t*, std::int64_t,
                              std::int32_t) {
  return nullptr;
}

namespace kernels {

namespace {

thread_local Result* result = nullptr;
thread_local std::string last_failure;

constexpr std::size_t kLine = 64;

Memory& of(AtenTensorHandle handle) { return *reinterpret_cast<Memory*>(handle); }

AOTITorchError failed(const char* what) {
  last_failure = what;
  return AOTI_TORCH_FAILURE;
}

}  // namespace

// torch's numbers of dtypes.
enum Code : std::int32_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBfloat16 = 15,
};

std::int64_t element_size(std::int32_t dtype) {
  switch (dtype) {
    case kUint8:
    case kInt8:
    case kBool:
      return 1;
    case kInt16:
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kFloat32:
      return 4;
    default:
      return 8;
  }
}

Result::Result(void* data, std::int64_t bytes) : data_(data), bytes_(bytes) { result = this; }
Result::~Result() { result = nullptr; }

void* Result::take(std::int64_t bytes) {
  if (result == nullptr || result->data_ == nullptr) return nullptr;
  if (bytes != result->bytes_) throw std::logic_error("a result of another size than expected");
  void* taken = result->data_;
  result->data_ = nullptr;
  return taken;
}

}  // namespace kernels

}  // namespace oxytorch

using oxytorch::kernels::Memory;
using oxytorch::kernels::of;
using oxytorch::kernels::Result;

extern "C" {

#define OXY_NUMBER(function, value) \
  int32_t function() { return value; }
OXY_NUMBER(aoti_torch_device_type_cpu, 0)
OXY_NUMBER(aoti_torch_layout_strided, 0)
OXY_NUMBER(aoti_torch_memory_format_contiguous_format, 0)
OXY_NUMBER(aoti_torch_dtype_uint8, oxytorch::kernels::kUint8)
OXY_NUMBER(aoti_torch_dtype_int8, oxytorch::kernels::kInt8)
OXY_NUMBER(aoti_torch_dtype_int16, oxytorch::kernels::kInt16)
OXY_NUMBER(aoti_torch_dtype_int32, oxytorch::kernels::kInt32)
OXY_NUMBER(aoti_torch_dtype_int64, oxytorch::kernels::kInt64)
OXY_NUMBER(aoti_torch_dtype_float16, oxytorch::kernels::kFloat16)
OXY_NUMBER(aoti_torch_dtype_float32, oxytorch::kernels::kFloat32)
OXY_NUMBER(aoti_torch_dtype_float64, oxytorch::kernels::kFloat64)
OXY_NUMBER(aoti_torch_dtype_complex64, oxytorch::kernels::kComplex64)
OXY_NUMBER(aoti_torch_dtype_complex128, oxytorch::kernels::kComplex128)
OXY_NUMBER(aoti_torch_dtype_bool, oxytorch::kernels::kBool)
OXY_NUMBER(aoti_torch_dtype_bfloat16, oxytorch::kernels::kBfloat16)

uint64_t aoti_torch_abi_version() { return 0; }
size_t aoti_torch_dtype_element_size(int32_t dtype) {
  return static_cast<size_t>(oxytorch::kernels::element_size(dtype));
}

const char* torch_exception_get_what_without_backtrace() {
  return oxytorch::kernels::last_failure.c_str();
}

AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* found) {
  *found = of(tensor).dim;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** found) {
  *found = of(tensor).sizes;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** found) {
  *found = of(tensor).strides;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* found) {
  *found = of(tensor).dtype;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t* found) {
  *found = 0;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_get_const_data_ptr(AtenTensorHandle tensor, const void** found) {
  *found = of(tensor).data;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError torch_get_mutable_data_ptr(AtenTensorHandle tensor, void** found) {
  *found = of(tensor).data;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides,
                                        int32_t dtype, int32_t, int32_t, AtenTensorHandle* made) {
  if (dim > Memory::kMostDims) return oxytorch::kernels::failed("more than 4 dimensions");
  auto* memory = new (std::nothrow) Memory;
  if (memory == nullptr) return oxytorch::kernels::failed("no memory");
  int64_t bytes = oxytorch::kernels::element_size(dtype);
  for (int64_t i = 0; i < dim; ++i) {
    memory->sizes[i] = sizes[i];
    memory->strides[i] = strides[i];
    bytes *= sizes[i];
  }
  memory->dim = dim;
  memory->dtype = dtype;
  try {
    memory->data = Result::take(bytes);
  } catch (const std::exception& error) {
    delete memory;
    return oxytorch::kernels::failed(error.what());
  }
  if (memory->data == nullptr) {
    constexpr size_t kLine = oxytorch::kernels::kLine;
    const size_t lines = (static_cast<size_t>(bytes) + kLine - 1) / kLine + 1;
    memory->data = std::aligned_alloc(kLine, lines * kLine);
    memory->is_owned = true;
  }
  if (memory->data == nullptr) {
    delete memory;
    return oxytorch::kernels::failed("no memory");
  }
  *made = reinterpret_cast<AtenTensorHandle>(memory);
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor) {
  Memory& memory = of(tensor);
  if (memory.is_owned) std::free(memory.data);
  delete &memory;
  return AOTI_TORCH_SUCCESS;
}

// What only other layouts of tensors, tests and torch's dispatcher ask for.
#define OXY_WITHOUT_TORCH                              \
  {                                                    \
    return oxytorch::kernels::failed("needs PyTorch"); \
  }
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle,
                                            AtenTensorHandle*) OXY_WITHOUT_TORCH AOTITorchError
    aoti_torch__reinterpret_tensor(AtenTensorHandle, int64_t, const int64_t*, const int64_t*,
                                   int64_t, AtenTensorHandle*) OXY_WITHOUT_TORCH AOTITorchError
    torch_call_dispatcher(const char*, const char*, StableIValue*,
                          uint64_t) OXY_WITHOUT_TORCH AOTITorchError
    torch_string_length(StringHandle, size_t*) OXY_WITHOUT_TORCH AOTITorchError
    torch_string_c_str(StringHandle, const char**) OXY_WITHOUT_TORCH AOTITorchError
    torch_delete_string(StringHandle) OXY_WITHOUT_TORCH

// Operators are registered with nobody.
#define OXY_NOTHING            \
  {                            \
    return AOTI_TORCH_SUCCESS; \
  }
    AOTITorchError aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                                TorchLibraryHandle*) OXY_NOTHING AOTITorchError
    aoti_torch_library_init_fragment(const char*, const char*, uint32_t,
                                     TorchLibraryHandle*) OXY_NOTHING AOTITorchError
    aoti_torch_library_def(TorchLibraryHandle, const char*) OXY_NOTHING AOTITorchError
    torch_library_impl(TorchLibraryHandle, const char*, void (*)(StableIValue*, uint64_t, uint64_t),
                       uint64_t) OXY_NOTHING AOTITorchError
    aoti_torch_delete_library_object(TorchLibraryHandle) OXY_NOTHING

}  // extern "C"
