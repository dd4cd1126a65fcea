#include "core/check.h"
#include "core/parallel.h"
#include "ops/panels/entry.h"
#include "ops/quantize_weight/kernel.h"

namespace oxytorch {

namespace {

constexpr const char* kName = "quantize_weight";

// One element of a search for a scale costs as much as moving this many bytes.
constexpr std::int64_t kSearchBytes = 16;

std::vector<Tensor> quantize_weight(const Tensor& weight, const std::string& format,
                                    std::int64_t group_size, bool symmetric, bool search) {
  check_cpu(kName, "weight", weight);
  QuantizeWeightArgs args{};
  args.dtype = check_dtype(kName, "weight", weight);
  const PanelFormat& parsed = parse_format(kName, "format", format, true);
  if (!parsed.has_middle && !symmetric) fail(kName, "symmetric", "true for " + format, "false");
  args.table = parsed.table;
  args.has_floats = parsed.has_floats;
  args.largest = parsed.has_floats ? kLargestFloat8 : parsed.table ? parsed.table[15] : 0.0f;
  args.middle = static_cast<float>(parsed.middle);
  args.last = static_cast<float>((1 << parsed.bits) - 1);
  if (weight.dim() != 2) {
    fail(kName, "weight", "of shape [out_features, in_features]", describe(weight.sizes()));
  }
  const Rows rows = rows_of(weight);
  args.width = weight.size(1);
  const bool divides = group_size > 0 && args.width % group_size == 0;
  if (!divides && args.width > 0) {
    fail(kName, "group_size", "that divides in_features " + std::to_string(args.width),
         std::to_string(group_size));
  }
  const std::int64_t groups = args.width > 0 ? args.width / group_size : 0;
  const std::int64_t sizes[] = {weight.size(0), groups};
  const std::int32_t uint8 = aoti_torch_dtype_uint8();
  std::vector<Tensor> results;
  results.push_back(empty(weight.sizes(), uint8));
  results.push_back(empty(sizes, 2, aoti_torch_dtype_float32()));
  results.push_back(empty(sizes, 2, uint8));
  args.weight = rows.data;
  args.weight_stride = rows.stride;
  args.codes = static_cast<std::uint8_t*>(results[0].mutable_data());
  args.scales = static_cast<float*>(results[1].mutable_data());
  args.zero_points = static_cast<std::uint8_t*>(results[2].mutable_data());
  args.group_size = group_size;
  args.symmetric = symmetric;
  args.search = search && parsed.searches;
  if (args.width > 0) {
    run(quantize_weight_copies, args, rows.count, args.width * (args.search ? kSearchBytes : 4));
  }
  return results;
}

}  // namespace

OXY_OP(quantize_weight,
       "(Tensor weight, str format, int group_size, bool symmetric, bool search) -> "
       "(Tensor, Tensor, Tensor)",
       quantize_weight)

}  // namespace oxytorch
