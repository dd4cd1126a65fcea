// What liboxytorch_kernels.so has in place of libtorch: entries of ops call these functions of
// torch's stable ABI, which here know plain memory and threads of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace oxytorch::kernels {

// What a handle of a tensor points to. Contiguous.
struct Memory {
  static constexpr std::int64_t kMostDims = 4;

  void* data = nullptr;
  std::int64_t dim = 0;
  std::int64_t sizes[kMostDims] = {};
  std::int64_t strides[kMostDims] = {};
  std::int32_t dtype = 0;
  bool is_owned = false;  // data, which the last handle frees
};

std::int64_t element_size(std::int32_t dtype);

// While one exists, the first tensor that an entry makes on this thread lies in `data`: entries
// make their result before anything else.
class Result {
 public:
  Result(void* data, std::int64_t bytes);
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;
  ~Result();

  // Null once it was taken. Throws if the entry makes another result than the caller has room for.
  static void* take(std::int64_t bytes);

 private:
  void* data_;
  std::int64_t bytes_;
};

void set_threads(int threads);
int threads();

}  // namespace oxytorch::kernels
