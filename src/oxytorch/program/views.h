// Views of tensors by sizes and strides alone: torch's dispatcher takes longer to be asked.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/torch_api.h"

namespace oxytorch {

enum class ViewKind : char { none, view, transpose, permute, slice, select, unsqueeze, expand };

// The kind that an operator of torch makes, as programs write it, with its overload.
ViewKind view_kind(std::string_view target);

// What stands for an argument that is not given.
inline constexpr std::int64_t kNoNumber = INT64_MIN;

// Most dimensions of a tensor whose views are made here, and most numbers of a view.
inline constexpr std::size_t kMostOfView = 8;

// A new view. numbers: the operator's list, or its other arguments. Null where torch has to make
// it, or has to say what is wrong.
AtenTensorHandle made_view(ViewKind kind, AtenTensorHandle source, Extents numbers);

}  // namespace oxytorch
