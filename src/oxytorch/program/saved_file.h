// A file of tensors in the safetensors format, mapped into memory; core/tensor_file.py writes it.
#pragma once

#include <map>
#include <string>

#include "program/json.h"
#include "program/stack.h"

namespace oxytorch {

struct TensorPlace {
  std::string dtype;  // torch's name
  std::int32_t dtype_code;
  std::int64_t item_size;
  std::vector<std::int64_t> shape;
  std::int64_t begin, end;  // bytes of the file
};

// torch's number of a dtype by its name, -1 where a file holds none of it.
std::int32_t dtype_of(const std::string& name);

class SavedFile {
 public:
  // Throws std::runtime_error if the file is none, truncated, or its header does not fit it.
  explicit SavedFile(const std::string& path);

  const json::Value& metadata() const { return metadata_; }
  const std::map<std::string, TensorPlace>& places() const { return places_; }
  // The bytes of a tensor.
  const std::uint8_t* bytes(const TensorPlace& place) const { return data_ + place.begin; }
  // Over the file's memory, with dimension `order[i]` of the result as the i-th in memory.
  TensorOwner tensor(const TensorPlace& place, const std::vector<std::int64_t>& order) const;

 private:
  void read_header(const std::uint8_t* text, std::int64_t length);

  std::int64_t size_ = 0;
  TensorOwner all_;  // uint8 [size], which keeps the mapping
  const std::uint8_t* data_ = nullptr;
  std::map<std::string, TensorPlace> places_;
  json::Value metadata_;
};

}  // namespace oxytorch
