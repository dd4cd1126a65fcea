#include "program/views.h"

#include <algorithm>
#include <array>

namespace oxytorch {

namespace {

struct Named {
  std::string_view target;
  ViewKind kind;
};

constexpr Named kNamed[] = {
    {"aten::view", ViewKind::view},         {"aten::_unsafe_view", ViewKind::view},
    {"aten::reshape", ViewKind::view},      {"aten::transpose.int", ViewKind::transpose},
    {"aten::permute", ViewKind::permute},   {"aten::slice.Tensor", ViewKind::slice},
    {"aten::select.int", ViewKind::select}, {"aten::unsqueeze", ViewKind::unsqueeze},
    {"aten::expand", ViewKind::expand},
};

// How a tensor lies in its memory.
struct Layout {
  std::array<std::int64_t, kMostOfView> sizes{}, strides{};
  std::int64_t dim = 0, offset = 0;

  void add(std::int64_t size, std::int64_t stride) {
    sizes[dim] = size;
    strides[dim++] = stride;
  }
  void remove(std::int64_t at) {
    std::copy(sizes.begin() + at + 1, sizes.begin() + dim, sizes.begin() + at);
    std::copy(strides.begin() + at + 1, strides.begin() + dim, strides.begin() + at);
    --dim;
  }
};

// Counts a negative number from `count`; returns whether it is one from 0 to count - 1.
bool wrap(std::int64_t& number, std::int64_t count) {
  if (number < 0) number += count;
  return number >= 0 && number < count;
}

// Of what lies in torch's own order. A -1 among the sizes is left to torch.
bool view(const Layout& from, Extents sizes, Layout& to) {
  std::int64_t stride = 1, left = 1;
  for (std::int64_t i = from.dim - 1; i >= 0; --i) {
    if (from.strides[i] != stride || from.sizes[i] == 0) return false;
    stride *= from.sizes[i];
  }
  for (std::int64_t size : sizes) {
    if (size < 1 || size > stride / left) return false;
    left *= size;
  }
  if (left != stride) return false;
  for (std::int64_t size : sizes) {
    stride /= size;
    to.add(size, stride);
  }
  return true;
}

bool permute(const Layout& from, Extents order, Layout& to) {
  if (order.count != from.dim) return false;
  unsigned seen = 0;
  for (std::int64_t place : order) {
    if (!wrap(place, from.dim) || (seen >> place & 1) != 0) return false;
    seen |= 1u << place;
    to.add(from.sizes[place], from.strides[place]);
  }
  return true;
}

bool transpose(const Layout& from, Extents numbers, Layout& to) {
  std::int64_t a = numbers[0], b = numbers[1];
  if (!wrap(a, from.dim) || !wrap(b, from.dim)) return false;
  to = from;
  std::swap(to.sizes[a], to.sizes[b]);
  std::swap(to.strides[a], to.strides[b]);
  return true;
}

// Numbers: dimension, start, end, step. Ends past the tensor's are its own.
bool slice(const Layout& from, Extents numbers, Layout& to) {
  std::int64_t dim = numbers[0];
  const std::int64_t step = numbers[3];
  if (!wrap(dim, from.dim) || step < 1) return false;
  const std::int64_t size = from.sizes[dim];
  std::int64_t start = numbers[1] == kNoNumber ? 0 : numbers[1];
  std::int64_t end = numbers[2] == kNoNumber ? size : numbers[2];
  start = std::clamp<std::int64_t>(start < 0 ? start + size : start, 0, size);
  end = std::clamp<std::int64_t>(end < 0 ? end + size : end, start, size);
  to = from;
  to.offset = start * from.strides[dim];
  to.sizes[dim] = (end - start) / step + ((end - start) % step != 0);
  to.strides[dim] *= step;
  return true;
}

bool select(const Layout& from, Extents numbers, Layout& to) {
  std::int64_t dim = numbers[0], index = numbers[1];
  if (!wrap(dim, from.dim) || !wrap(index, from.sizes[dim])) return false;
  to = from;
  to.offset = index * from.strides[dim];
  to.remove(dim);
  return true;
}

bool unsqueeze(const Layout& from, Extents numbers, Layout& to) {
  std::int64_t at = numbers[0];
  if (from.dim == kMostOfView || !wrap(at, from.dim + 1)) return false;
  for (std::int64_t i = 0; i <= from.dim; ++i) {
    if (i == at) to.add(1, i == from.dim ? 1 : from.sizes[i] * from.strides[i]);
    if (i < from.dim) to.add(from.sizes[i], from.strides[i]);
  }
  return true;
}

bool expand(const Layout& from, Extents sizes, Layout& to) {
  const std::int64_t more = sizes.count - from.dim;
  if (more < 0) return false;
  for (std::int64_t i = 0; i < sizes.count; ++i) {
    const std::int64_t own = i < more ? 1 : from.sizes[i - more];
    const std::int64_t size = sizes[i] == -1 && i >= more ? own : sizes[i];
    if (size < 0 || (own != 1 && size != own)) return false;
    if (i < more && size == 1) return false;  // its stride is one of torch's choice
    to.add(size, size == own ? from.strides[i - more] : 0);
  }
  return true;
}

// Returns whether the view is one that is made here.
bool describe(ViewKind kind, const Layout& from, Extents numbers, Layout& to) {
  switch (kind) {
    case ViewKind::view:
      return view(from, numbers, to);
    case ViewKind::transpose:
      return numbers.count == 2 && transpose(from, numbers, to);
    case ViewKind::permute:
      return permute(from, numbers, to);
    case ViewKind::slice:
      return numbers.count == 4 && slice(from, numbers, to);
    case ViewKind::select:
      return numbers.count == 2 && select(from, numbers, to);
    case ViewKind::unsqueeze:
      return numbers.count == 1 && unsqueeze(from, numbers, to);
    case ViewKind::expand:
      return expand(from, numbers, to);
    case ViewKind::none:
      break;
  }
  return false;
}

}  // namespace

ViewKind view_kind(std::string_view target) {
  for (const Named& each : kNamed) {
    if (each.target == target) return each.kind;
  }
  return ViewKind::none;
}

AtenTensorHandle made_view(ViewKind kind, AtenTensorHandle source, Extents numbers) {
  static const std::int32_t strided = aoti_torch_layout_strided();
  std::int64_t dim = 0;
  std::int32_t layout = 0;
  check_call(aoti_torch_get_dim(source, &dim), "get_dim");
  check_call(aoti_torch_get_layout(source, &layout), "get_layout");
  if (dim > static_cast<std::int64_t>(kMostOfView) || layout != strided) return nullptr;
  std::int64_t *sizes = nullptr, *strides = nullptr;
  check_call(aoti_torch_get_sizes(source, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(source, &strides), "get_strides");
  Layout from, to;
  for (std::int64_t i = 0; i < dim; ++i) from.add(sizes[i], strides[i]);
  if (!describe(kind, from, numbers, to)) return nullptr;
  AtenTensorHandle made = nullptr;
  check_call(aoti_torch__reinterpret_tensor(source, to.dim, to.sizes.data(), to.strides.data(),
                                            to.offset, &made),
             "reinterpret_tensor");
  return made;
}

}  // namespace oxytorch
