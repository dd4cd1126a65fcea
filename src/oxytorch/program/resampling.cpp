#include "program/resampling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace oxytorch {

namespace {

constexpr Resampling kKinds[] = {
    {"upsample_nearest1d", 1, false},        {"upsample_nearest2d", 2, false},
    {"upsample_nearest3d", 3, false},        {"_upsample_nearest_exact1d", 1, false},
    {"_upsample_nearest_exact2d", 2, false}, {"_upsample_nearest_exact3d", 3, false},
    {"upsample_linear1d", 1, true},          {"upsample_bilinear2d", 2, true},
    {"upsample_bicubic2d", 2, true},         {"upsample_trilinear3d", 3, true},
};
constexpr std::int64_t kMost = 1 << 20;

// The least number by which `size` becomes `wanted`, and no less.
double factor_of(std::int64_t size, std::int64_t wanted) {
  if (std::min(size, wanted) < 1 || std::max(size, wanted) >= kMost) {
    throw std::runtime_error("resampling takes sizes from 1 to 2^20 - 1");
  }
  const auto from = static_cast<double>(size), to = static_cast<double>(wanted);
  const double factor = to / from;
  return std::fma(factor, from, -to) < 0 ? std::nextafter(factor, INFINITY) : factor;
}

}  // namespace

const Resampling* Resampling::find(std::string_view name) {
  const auto* found = std::find_if(std::begin(kKinds), std::end(kKinds),
                                   [&](const Resampling& each) { return each.name == name; });
  return found == std::end(kKinds) ? nullptr : found;
}

AtenTensorHandle resampled(AtenTensorHandle x, const Resampling& by,
                           const std::vector<std::int64_t>& sizes, bool aligns) {
  std::int64_t dim = 0;
  std::int64_t* shape = nullptr;
  check_call(aoti_torch_get_dim(x, &dim), "get_dim");
  check_call(aoti_torch_get_sizes(x, &shape), "get_sizes");
  if (dim != by.dims + 2) throw std::runtime_error("resampling takes a batch of images");
  StableListHandle factors = nullptr;
  check_call(torch_new_list_reserve_size(sizes.size(), &factors), "new_list");
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    check_call(torch_list_push_back(factors,
                                    torch::stable::detail::from(factor_of(shape[i + 2], sizes[i]))),
               "list_push_back");
  }
  StableIValue stack[4] = {share(x).shared(), torch::stable::detail::from(std::nullopt)};
  int count = 2;
  if (by.aligns) stack[count++] = torch::stable::detail::from(aligns);
  const StableIValue list = torch::stable::detail::from(factors);
  stack[count] = torch::stable::detail::from(std::optional<StableIValue>(list));
  call_operator(("aten::" + std::string(by.name)).c_str(), "vec", stack);
  return reinterpret_cast<AtenTensorHandle>(stack[0]);
}

}  // namespace oxytorch
