#include "ops/moe/kernel.h"

#include <cstdio>

#include "core/parallel.h"
#include "ops/panels/entry.h"

namespace oxytorch {

static constexpr const char* kMoe = "moe";

// One kind of weight, gate_up or down, of all experts.
struct ExpertTensors {
  const char* name;
  const PanelFormat& format;
  const std::vector<Tensor>& panels;
  const std::vector<Tensor>& channel_scales;
  const std::vector<Tensor>& group_scales;  // empty: none
  const std::vector<Tensor>& zero_points;   // empty: none
};

// Which rows the experts get: each pair of a token and an expert that it chose is a row, in the
// order of the experts and then of the tokens.
struct Routing {
  std::vector<std::int64_t> first_rows;  // of each expert, and the number of rows
  std::vector<std::int64_t> tokens;      // of each row
  std::vector<std::int64_t> places;      // row of each pair

  std::int64_t rows_of_expert(std::size_t i) const { return first_rows[i + 1] - first_rows[i]; }
};

static void check_lists(const ExpertTensors& tensors, std::size_t experts) {
  if (experts == 0) fail(kMoe, "gate_up_panels", "with at least one expert", "none");
  const std::size_t scaled = has_codes(tensors.format) ? experts : 0;
  const auto check = [&](const char* part, std::size_t given, bool fits) {
    if (fits) return;
    const std::string argument = std::string(tensors.name) + "_" + part;
    fail(kMoe, argument.c_str(),
         "with a tensor for each of " + std::to_string(experts) + " experts",
         std::to_string(given));
  };
  const std::size_t group_scales = tensors.group_scales.size();
  const std::size_t zero_points = tensors.zero_points.size();
  check("panels", tensors.panels.size(), tensors.panels.size() == experts);
  check("channel_scales", tensors.channel_scales.size(), tensors.channel_scales.size() == scaled);
  check("group_scales", group_scales, group_scales == 0 || group_scales == scaled);
  check("zero_points", zero_points, zero_points == 0 || zero_points == scaled);
}

static Routing route(const Tensor& indices, std::int64_t tokens, std::int64_t experts) {
  static const std::int32_t wide = aoti_torch_dtype_int64();
  check_cpu(kMoe, "router_indices", indices);
  if (indices.dtype_code() != wide) {
    fail(kMoe, "router_indices", "of dtype " + dtype_name(wide), dtype_name(indices.dtype_code()));
  }
  if (indices.dim() != 2 || indices.size(0) != tokens || indices.size(1) < 1) {
    fail(kMoe, "router_indices", "of shape [" + std::to_string(tokens) + ", chosen experts]",
         describe(indices.sizes()));
  }
  Tensor copy;
  const auto* chosen = static_cast<const std::int64_t*>(contiguous_data(indices, copy));
  const std::int64_t pairs = indices.numel();
  Routing routing;
  routing.first_rows.assign(experts + 1, 0);
  for (std::int64_t i = 0; i < pairs; ++i) {
    if (chosen[i] < 0 || chosen[i] >= experts) {
      fail(kMoe, "router_indices", "in [0, " + std::to_string(experts) + ")",
           std::to_string(chosen[i]));
    }
    ++routing.first_rows[chosen[i] + 1];
  }
  for (std::int64_t i = 0; i < experts; ++i) routing.first_rows[i + 1] += routing.first_rows[i];
  std::vector<std::int64_t> next = routing.first_rows;
  routing.tokens.resize(pairs);
  routing.places.resize(pairs);
  for (std::int64_t i = 0; i < pairs; ++i) {
    const std::int64_t row = next[chosen[i]]++;
    routing.tokens[row] = i / indices.size(1);
    routing.places[i] = row;
  }
  return routing;
}

// The chosen experts' weights with their rows. `result` is that of row 0.
static std::vector<RowsProduct> describe_products(
    const ExpertTensors& tensors, const Routing& routing, const PanelResultArgs& result,
    std::int64_t in_features, std::int64_t out_features, std::vector<PanelCopies>& copies) {
  std::vector<RowsProduct> products;
  for (std::size_t i = 0; i < tensors.panels.size(); ++i) {
    const std::int64_t rows = routing.rows_of_expert(i);
    if (rows == 0) continue;
    char name[48];
    std::snprintf(name, sizeof name, "moe: %s of expert %zu", tensors.name, i);
    PanelTensors one{tensors.panels[i]};
    if (has_codes(tensors.format)) one.channel_scales = &tensors.channel_scales[i];
    if (!tensors.group_scales.empty()) one.group_scales = &tensors.group_scales[i];
    if (!tensors.zero_points.empty()) one.zero_points = &tensors.zero_points[i];
    const std::int64_t first = routing.first_rows[i];
    RowsProduct product{
        .weight = describe_weight(name, tensors.format, one, in_features, out_features,
                                  is_gated(result.epilogue), copies.emplace_back()),
        .result = result,
        .first_row = first,
        .row_count = rows,
    };
    if (!products.empty() && product.weight.groups != products[0].weight.groups) {
      fail(name, "group_scales",
           "with " + std::to_string(products[0].weight.groups) + " groups, as other experts have",
           std::to_string(product.weight.groups));
    }
    product.result.out = static_cast<std::uint8_t*>(result.out) +
                         first * result.out_stride * size_of(result.out_dtype);
    products.push_back(product);
  }
  return products;
}

struct RouterWeights {
  Tensor copy;
  const void* data;
  DType dtype;
};

static RouterWeights describe_router_weights(const Tensor& weights, const Tensor& indices,
                                             DType dtype) {
  check_shape(kMoe, "router_weights", weights, indices.sizes());
  check_cpu(kMoe, "router_weights", weights);
  RouterWeights described{};
  described.dtype = check_weight_dtype(kMoe, "router_weights", weights, dtype);
  described.data = contiguous_data(weights, described.copy);
  return described;
}

static std::int64_t check_width(const Tensor& x, std::int64_t inner_features) {
  const std::int64_t width = x.size(-1);
  if (width < 1) fail(kMoe, "x", "with in_features", describe(x.sizes()));
  if (inner_features < 1) {
    fail(kMoe, "inner_features", "of at least 1", std::to_string(inner_features));
  }
  return width;
}

static PanelEpilogue parse_gated(const std::string& name) {
  const PanelEpilogue epilogue = parse_epilogue(kMoe, name);
  if (!is_gated(epilogue)) fail(kMoe, "epilogue", epilogue_names(kFirstGated), "'" + name + "'");
  return epilogue;
}

// epilogue: of the first products, whose rows have inner_features.
struct Experts {
  const ExpertTensors& gate_up;
  const ExpertTensors& down;
  std::int64_t inner_features;
  PanelEpilogue epilogue;
  bool rounds_to_int8;
};

// Returns float32 rows [chosen experts of all tokens, x.width], those of an expert side by side.
static Tensor multiply_experts(const Experts& experts, const Rows& x, const Routing& routing,
                               DType dtype) {
  const auto pairs = static_cast<std::int64_t>(routing.tokens.size());
  const std::int64_t width = x.width, inner_features = experts.inner_features;
  Tensor inner = scratch(pairs * inner_features * size_of(dtype));
  Tensor results = scratch(pairs * width * size_of(DType::float32));
  std::vector<PanelCopies> copies;
  PanelResultArgs result{};
  result.out = inner.mutable_data();
  result.out_stride = inner_features;
  result.out_dtype = dtype;
  result.epilogue = experts.epilogue;
  const ExpertTensors &gate_up = experts.gate_up, &down = experts.down;
  multiply_rows(x, &routing.tokens, dtype, experts.rounds_to_int8 && gate_up.format.has_middle,
                describe_products(gate_up, routing, result, width, inner_features, copies));
  const Rows inner_rows{Tensor(), result.out, pairs, inner_features, inner_features};
  result.out = results.mutable_data();
  result.out_stride = width;
  result.out_dtype = DType::float32;
  result.epilogue = PanelEpilogue::none;
  multiply_rows(inner_rows, nullptr, dtype, experts.rounds_to_int8 && down.format.has_middle,
                describe_products(down, routing, result, inner_features, width, copies));
  return results;
}

static Tensor moe(const Tensor& x, const Tensor& router_weights, const Tensor& router_indices,
                  const std::string& gate_up_format, const std::vector<Tensor>& gate_up_panels,
                  const std::vector<Tensor>& gate_up_channel_scales,
                  const std::vector<Tensor>& gate_up_group_scales,
                  const std::vector<Tensor>& gate_up_zero_points, const std::string& down_format,
                  const std::vector<Tensor>& down_panels,
                  const std::vector<Tensor>& down_channel_scales,
                  const std::vector<Tensor>& down_group_scales,
                  const std::vector<Tensor>& down_zero_points, std::int64_t inner_features,
                  const std::string& epilogue_name, const std::string& activation) {
  const DType dtype = check_dtype(kMoe, "x", x);
  check_minimum_dim(kMoe, "x", x, 1);
  const PanelFormat& gate_up_kind = parse_format(kMoe, "gate_up_format", gate_up_format);
  const PanelFormat& down_kind = parse_format(kMoe, "down_format", down_format);
  const ExpertTensors gate_up{"gate_up",
                              gate_up_kind,
                              gate_up_panels,
                              gate_up_channel_scales,
                              gate_up_group_scales,
                              gate_up_zero_points};
  const ExpertTensors down{
      "down", down_kind, down_panels, down_channel_scales, down_group_scales, down_zero_points};
  const std::size_t experts = gate_up_panels.size();
  check_lists(gate_up, experts);
  check_lists(down, experts);
  const PanelEpilogue epilogue = parse_gated(epilogue_name);
  const std::int64_t width = check_width(x, inner_features);
  const bool rounds_to_int8 = parse_activation(kMoe, activation);
  const Rows rows = rows_of(x);
  const Routing routing = route(router_indices, rows.count, static_cast<std::int64_t>(experts));
  const RouterWeights weights = describe_router_weights(router_weights, router_indices, dtype);
  Tensor out = empty(x.sizes(), x.dtype_code());
  if (rows.count == 0) return out;
  const Experts all{gate_up, down, inner_features, epilogue, rounds_to_int8};
  const Tensor results = multiply_experts(all, rows, routing, dtype);
  const WeightedRowsArgs args{
      .rows = static_cast<const float*>(results.data()),
      .places = routing.places.data(),
      .weights = weights.data,
      .out = out.mutable_data(),
      .width = width,
      .chosen = router_indices.size(1),
      .weight_dtype = weights.dtype,
      .out_dtype = dtype,
  };
  run(add_weighted_rows_copies, args, rows.count, (args.chosen * 4 + 4) * width);
  return out;
}

OXY_OP(moe,
       "(Tensor x, Tensor router_weights, Tensor router_indices, str gate_up_format, "
       "Tensor[] gate_up_panels, Tensor[] gate_up_channel_scales, Tensor[] gate_up_group_scales, "
       "Tensor[] gate_up_zero_points, str down_format, Tensor[] down_panels, "
       "Tensor[] down_channel_scales, Tensor[] down_group_scales, Tensor[] down_zero_points, "
       "int inner_features, str epilogue=\"silu_mul\", str activation_dtype=\"none\") -> Tensor",
       moe)

}  // namespace oxytorch
