// What calls through torch's stack of values pass: owned tensors, lists and texts.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/own_operators.h"

namespace oxytorch {

// Owns a reference to a tensor, whose metadata nobody asks for.
class TensorOwner {
 public:
  TensorOwner() = default;
  explicit TensorOwner(AtenTensorHandle handle) : handle_(handle) {}
  TensorOwner(TensorOwner&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TensorOwner& operator=(TensorOwner&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  TensorOwner(const TensorOwner&) = delete;
  TensorOwner& operator=(const TensorOwner&) = delete;
  ~TensorOwner() { clear(); }

  void clear() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
    handle_ = nullptr;
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  // Another reference to the same tensor, as the stack of a call takes it.
  StableIValue shared() const;

 private:
  AtenTensorHandle handle_ = nullptr;
};

// Another reference to a tensor.
inline TensorOwner share(AtenTensorHandle handle) {
  AtenTensorHandle copy = nullptr;
  check_call(aoti_torch_new_tensor_handle(handle, &copy), "new_tensor_handle");
  return TensorOwner(copy);
}

inline StableIValue TensorOwner::shared() const {
  return torch::stable::detail::from(share(handle_).release());
}

inline StableIValue list_of(const std::vector<std::int64_t>& values) {
  StableListHandle list = nullptr;
  check_call(torch_new_list_reserve_size(values.size(), &list), "new_list");
  for (std::int64_t value : values) {
    check_call(torch_list_push_back(list, torch::stable::detail::from(value)), "list_push_back");
  }
  return torch::stable::detail::from(list);
}

inline StableIValue list_of(std::vector<TensorOwner>&& tensors) {
  StableListHandle list = nullptr;
  check_call(torch_new_list_reserve_size(tensors.size(), &list), "new_list");
  for (TensorOwner& each : tensors) {
    check_call(torch_list_push_back(list, torch::stable::detail::from(each.release())),
               "list_push_back");
  }
  return torch::stable::detail::from(list);
}

inline StableIValue text_of(std::string_view text) {
  StringHandle handle = nullptr;
  check_call(torch_new_string_handle(text.data(), text.size(), &handle), "new_string_handle");
  return torch::stable::detail::from(handle);
}

}  // namespace oxytorch
