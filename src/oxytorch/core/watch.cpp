// Notices that tensors have moved or were written, for launches that keep addresses from one step
// to the next.
//
// A step over a thousand tensors has no time to ask each of them in Python. The tensors are handed
// over once (op `watch`); afterwards one call compares addresses and layouts.
#include <cstring>
#include <memory>
#include <vector>

#include "core/export.h"
#include "core/process.h"
#include "core/python.h"
#include "core/torch_api.h"

namespace oxytorch {

namespace {

// What a call of oxytorch_moved found.
enum Answer : int { kSame, kGradientsMoved, kOther };

// Torch's stable ABI has no way to a gradient and to a version. Where these functions are not found
// under their names, or torch is newer than those looked at (NEWEST_TORCH in _library.py), Python
// asks the tensors instead.
using GradientOf = const void* (*)(const void*);
using BumpVersion = void (*)(const void*);

// c10::TensorImpl::grad() const
GradientOf gradient_function() {
  static const auto function = named<GradientOf>("_ZNK3c1010TensorImpl4gradEv");
  return function;
}

// torch::autograd::impl::bump_version(at::Tensor const&)
BumpVersion bump_version_function() {
  static const auto function =
      named<BumpVersion>("_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE");
  return function;
}

// A handle points at a tensor, which is a pointer to its implementation.
const void* implementation(AtenTensorHandle handle) {
  return *reinterpret_cast<const void* const*>(handle);
}

AtenTensorHandle handle_of(const void* const& implementation) {
  return reinterpret_cast<AtenTensorHandle>(const_cast<const void**>(&implementation));
}

// Asks for the cache lines of a tensor that will be looked at.
void prefetch(const void* implementation) {
  constexpr std::size_t kLine = 64;
  const char* first = static_cast<const char*>(implementation);
  for (int i = 0; i < 3; ++i) __builtin_prefetch(first + kLine * i);
}

AtenTensorHandle gradient_of(const Tensor& parameter) {
  return reinterpret_cast<AtenTensorHandle>(
      const_cast<void*>(gradient_function()(implementation(parameter.handle()))));
}

const void* address(AtenTensorHandle handle) {
  const void* pointer = nullptr;
  check_call(torch_get_const_data_ptr(handle, &pointer), "const_data_ptr");
  return pointer;
}

std::int64_t element_count(AtenTensorHandle handle) {
  std::int64_t count = 0;
  check_call(aoti_torch_get_numel(handle, &count), "get_numel");
  return count;
}

// The implementation that all tensors without a value share.
const void* undefined() {
  static const void* const shared = [] {
    AtenTensorHandle handle = nullptr;
    check_call(aoti_torch_new_uninitialized_tensor(&handle), "new_uninitialized_tensor");
    const void* found = implementation(handle);
    aoti_torch_delete_tensor_object(handle);
    return found;
  }();
  return shared;
}

// The dispatch keys of tensors that do not read as they are stored: conjugated, negated, all zeros
// without memory.
std::uint64_t turned = 0;

bool reads_as_stored(const void* implementation) {
  std::uint64_t keys = 0;
  std::memcpy(&keys, static_cast<const char*>(implementation) + offsets().keys, sizeof(keys));
  return (keys & turned) == 0;
}

struct Layout {
  std::int32_t dtype = -1;
  std::vector<std::int64_t> strides;
};

// Whether a gradient lies in memory as `layout` says; its sizes are those of its parameter.
bool has_layout(AtenTensorHandle gradient, const Layout& layout) {
  static const std::int32_t strided = aoti_torch_layout_strided();
  std::int32_t kind = -1, dtype = -1;
  std::int64_t dim = 0;
  check_call(aoti_torch_get_layout(gradient, &kind), "get_layout");
  if (kind != strided) return false;
  check_call(aoti_torch_get_dtype(gradient, &dtype), "get_dtype");
  check_call(aoti_torch_get_dim(gradient, &dim), "get_dim");
  if (dtype != layout.dtype || static_cast<std::size_t>(dim) != layout.strides.size()) return false;
  std::int64_t* strides = nullptr;
  check_call(aoti_torch_get_strides(gradient, &strides), "get_strides");
  return std::memcmp(strides, layout.strides.data(), 8 * layout.strides.size()) == 0;
}

struct Followed {
  Tensor parameter;
  std::int64_t count;
  bool has_gradient;
  Layout layout;  // of the gradient
};

// A parameter that is the upper half of a weight, and the lower half. Steps raise both versions;
// who writes from outside raises that of the upper half only.
struct Pair {
  Tensor upper;
  Tensor low;
  std::int64_t lead;

  std::int64_t lead_now() const {
    return version_function()(upper.handle()) - version_function()(low.handle());
  }
};

struct Watch {
  std::vector<Tensor> kept;
  // Of the kept tensors, close together: a step comes upon cold caches.
  std::vector<const void*> implementations;
  std::vector<const void*> addresses;
  std::vector<Followed> followed;
  std::vector<Pair> pairs;

  bool kept_is_same() const {
    constexpr std::size_t kAhead = 12;
    const std::size_t count = implementations.size();
    for (std::size_t i = 0; i < count; ++i) {
      if (i + kAhead < count) prefetch(implementations[i + kAhead]);
      if (address(handle_of(implementations[i])) != addresses[i]) return false;
    }
    return true;
  }

  // Addresses of gradients go to every `stride`-th number of `out`, those without left out.
  Answer compare(std::int64_t* out, std::int64_t stride) {
    if (!kept_is_same()) return kOther;
    for (const Pair& pair : pairs) {
      if (pair.lead_now() != pair.lead) return kOther;
    }
    bool is_same = true;
    for (const Followed& own : followed) {
      const AtenTensorHandle gradient = gradient_of(own.parameter);
      if ((implementation(gradient) != undefined()) != own.has_gradient) return kOther;
      if (element_count(own.parameter.handle()) != own.count) return kOther;
      if (!own.has_gradient) continue;
      if (!has_layout(gradient, own.layout)) return kOther;
      if (!reads_as_stored(implementation(gradient))) return kOther;
      const void* found = address(gradient);
      const auto number = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(found));
      is_same &= *out == number;
      *out = number;
      out += stride;
    }
    return is_same ? kSame : kGradientsMoved;
  }

  // Tells autograd that the parameters that have gradients are written to.
  void bump_versions() const {
    for (const Followed& own : followed) {
      if (own.has_gradient) bump_version_function()(own.parameter.handle());
    }
    for (const Pair& pair : pairs) bump_version_function()(pair.low.handle());
  }
};

void watch(StableIValue* stack, uint64_t, uint64_t) {
  using Tensors = std::vector<Tensor>;
  Tensors kept = unboxing::Take<Tensors>::from(stack[0]);
  Tensors parameters = unboxing::Take<Tensors>::from(stack[1]);
  Tensors uppers = unboxing::Take<Tensors>::from(stack[2]);
  Tensors lows = unboxing::Take<Tensors>::from(stack[3]);
  auto watch = std::make_unique<Watch>();
  for (std::size_t i = 0; i < uppers.size(); ++i) {
    Pair pair{std::move(uppers[i]), std::move(lows.at(i)), 0};
    pair.lead = pair.lead_now();
    watch->pairs.push_back(std::move(pair));
  }
  for (Tensor& tensor : kept) {
    watch->implementations.push_back(implementation(tensor.handle()));
    watch->addresses.push_back(address(tensor.handle()));
    watch->kept.push_back(std::move(tensor));
  }
  for (Tensor& parameter : parameters) {
    const AtenTensorHandle gradient = gradient_of(parameter);
    Followed own{{}, parameter.numel(), implementation(gradient) != undefined(), {}};
    if (own.has_gradient) {
      std::int64_t* strides = nullptr;
      std::int64_t dim = 0;
      check_call(aoti_torch_get_dtype(gradient, &own.layout.dtype), "get_dtype");
      check_call(aoti_torch_get_dim(gradient, &dim), "get_dim");
      check_call(aoti_torch_get_strides(gradient, &strides), "get_strides");
      own.layout.strides.assign(strides, strides + dim);
    }
    own.parameter = std::move(parameter);
    watch->followed.push_back(std::move(own));
  }
  stack[0] = static_cast<StableIValue>(reinterpret_cast<std::uintptr_t>(watch.release()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("watch(Tensor[] kept, Tensor[] parameters, Tensor[] uppers, Tensor[] lows) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(oxytorch, CompositeExplicitAutograd, library) {
  library.impl("watch", &watch);
}

}  // namespace oxytorch

// Called with the keys of tensors that do not read as they are stored.
OXY_EXPORT void oxytorch_learn_turned(std::uint64_t keys) { oxytorch::turned = keys; }

OXY_EXPORT int oxytorch_can_watch() {
  return oxytorch::gradient_function() && oxytorch::bump_version_function() &&
         oxytorch::version_function() && oxytorch::offsets().keys;
}

OXY_EXPORT int oxytorch_moved(void* watch, std::int64_t* gradients, std::int64_t stride) {
  try {
    return static_cast<oxytorch::Watch*>(watch)->compare(gradients, stride);
  } catch (const std::exception&) {
    // Whoever asks looks at the tensors again then, and meets the error.
    return oxytorch::kOther;
  }
}

OXY_EXPORT void oxytorch_bump_versions(const void* watch) {
  static_cast<const oxytorch::Watch*>(watch)->bump_versions();
}

OXY_EXPORT void oxytorch_unwatch(void* watch) { delete static_cast<oxytorch::Watch*>(watch); }
