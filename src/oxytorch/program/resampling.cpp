#include "program/resampling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "oxytorch_allowed.h"

namespace oxytorch {

namespace {

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

std::optional<Resampling> Resampling::find(std::string_view name) {
  const auto* found = std::find(std::begin(kResampled), std::end(kResampled), name);
  if (found == std::end(kResampled)) return std::nullopt;
  return Resampling{*found, found->at(found->size() - 2) - '0',
                    found->find("nearest") == std::string_view::npos};
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
