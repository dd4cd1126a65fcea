// Checks, allocation and the choice of kernels that the linear ops over panels share.
#pragma once

#include "ops/panels/few_rows_entry.h"
#include "ops/panels/many_rows_entry.h"

namespace oxytorch {

// Null, or a tensor of the caller's.
struct TensorIfAny {
  const Tensor* tensor = nullptr;

  TensorIfAny() = default;
  TensorIfAny(const Tensor* given) : tensor(given) {}
  TensorIfAny(const std::optional<Tensor>* given) : tensor(*given ? &**given : nullptr) {}
};

// The tensors of a weight as the ops take them; only panels are there for bfloat16.
struct PanelTensors {
  const Tensor& panels;
  TensorIfAny channel_scales;
  TensorIfAny group_scales;
  TensorIfAny zero_points;
};

// Copies of what was not contiguous.
struct PanelCopies {
  Tensor panels, channel_scales, group_scales, zero_points, bias;
};

inline PanelEpilogue parse_epilogue(const char* op, const std::string& name) {
  constexpr const char* kNames[] = {"none", "gelu",     "gelu_tanh", "silu",         "relu",
                                    "add",  "silu_mul", "gelu_mul",  "gelu_tanh_mul"};
  for (std::int32_t i = 0; i < 9; ++i) {
    if (name == kNames[i]) return static_cast<PanelEpilogue>(i);
  }
  fail(op, "epilogue",
       "'none', 'gelu', 'gelu_tanh', 'silu', 'relu', 'add', 'silu_mul', 'gelu_mul' or "
       "'gelu_tanh_mul'",
       "'" + name + "'");
}

inline PanelFormat parse_format(const char* op, const char* argument, const std::string& name) {
  constexpr const char* kNames[] = {"bf16", "int8", "int4", "nf4"};
  for (std::int32_t i = 0; i < 4; ++i) {
    if (name == kNames[i]) return static_cast<PanelFormat>(i);
  }
  fail(op, argument, "'bf16', 'int8', 'int4' or 'nf4'", "'" + name + "'");
}

inline bool has_zero_points(PanelFormat format) {
  return format == PanelFormat::int8 || format == PanelFormat::int4;
}

// A weight has the tensors that its format wants, and no others.
inline void check_parts(const char* op, PanelFormat format, const std::string& name,
                        const PanelTensors& tensors) {
  const bool has_scales = format != PanelFormat::bf16;
  const std::string with = "with format '" + name + "'";
  if (has_scales && !tensors.channel_scales.tensor) {
    fail(op, "channel_scales", "a tensor " + with, "None");
  }
  const auto check_none = [&](const char* argument, const TensorIfAny& given) {
    if (given.tensor) fail(op, argument, "None " + with, describe(given.tensor->sizes()));
  };
  if (!has_scales) {
    check_none("channel_scales", tensors.channel_scales);
    check_none("group_scales", tensors.group_scales);
  }
  if (!has_zero_points(format)) check_none("zero_points", tensors.zero_points);
}

inline bool parse_activation(const char* op, const std::string& name) {
  if (name != "none" && name != "int8") {
    fail(op, "activation_dtype", "'none' or 'int8'", "'" + name + "'");
  }
  return name == "int8";
}

inline void check_panel_tensor(const char* op, const char* argument, const Tensor& tensor,
                               std::int32_t dtype, std::int64_t elements) {
  check_cpu(op, argument, tensor);
  if (tensor.dtype_code() != dtype) {
    fail(op, argument, "of dtype " + dtype_name(dtype), dtype_name(tensor.dtype_code()));
  }
  if (tensor.numel() != elements) {
    fail(op, argument, "with " + std::to_string(elements) + " elements", describe(tensor.sizes()));
  }
}

// A tensor [panels, groups, 16], contiguous.
inline const void* grouped_data(const char* op, const char* argument, const Tensor& tensor,
                                std::int32_t dtype, std::int64_t panels, std::int64_t groups,
                                Tensor& copy) {
  const std::int64_t wanted[] = {panels, groups, kPanelOutputs};
  check_shape(op, argument, tensor, Extents{wanted, 3});
  check_panel_tensor(op, argument, tensor, dtype, panels * groups * kPanelOutputs);
  return contiguous_data(tensor, copy);
}

inline void check_groups(const char* op, std::int64_t in_features, std::int64_t groups) {
  const std::int64_t size = groups > 0 && in_features % groups == 0 ? in_features / groups : 0;
  if (size != 32 && size != 64 && size != 128 && size != 256) {
    fail(op, "group_scales",
         "with groups of 32, 64, 128 or 256 of " + std::to_string(in_features) + " in_features",
         std::to_string(groups) + " groups");
  }
}

inline PanelsArgs describe_weight(const char* op, PanelFormat format, const PanelTensors& tensors,
                                  std::int64_t in_features, std::int64_t out_features, bool gated,
                                  PanelCopies& copies) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  static const std::int32_t half = aoti_torch_dtype_float16();
  static const std::int32_t single = aoti_torch_dtype_float32();
  const std::int64_t panels = (out_features + kPanelOutputs - 1) / kPanelOutputs * (gated ? 2 : 1);
  const std::int64_t depth = (in_features + kPanelDepth - 1) / kPanelDepth * kPanelDepth;
  PanelsArgs weight{
      .panels = nullptr,
      .channel_scales = nullptr,
      .group_scales = nullptr,
      .zero_points = nullptr,
      .panel_count = panels,
      .groups = 1,
      .out_features = out_features,
      .format = format,
  };
  check_panel_tensor(op, "panels", tensors.panels, byte, panels * panel_bytes(format, depth));
  weight.panels = static_cast<const std::uint8_t*>(contiguous_data(tensors.panels, copies.panels));
  const Tensor* channel_scales = tensors.channel_scales.tensor;
  if (!channel_scales) return weight;
  check_panel_tensor(op, "channel_scales", *channel_scales, single, panels * kPanelOutputs);
  weight.channel_scales =
      static_cast<const float*>(contiguous_data(*channel_scales, copies.channel_scales));
  if (const Tensor* scales = tensors.group_scales.tensor) {
    check_minimum_dim(op, "group_scales", *scales, 3);
    weight.groups = scales->size(1);
    check_groups(op, in_features, weight.groups);
    weight.group_scales = static_cast<const f16*>(grouped_data(
        op, "group_scales", *scales, half, panels, weight.groups, copies.group_scales));
  }
  if (const Tensor* zero_points = tensors.zero_points.tensor) {
    weight.zero_points = static_cast<const std::uint8_t*>(grouped_data(
        op, "zero_points", *zero_points, byte, panels, weight.groups, copies.zero_points));
  }
  return weight;
}

inline Tensor linear_entry(const char* op, PanelFormat format, const Tensor& x,
                           const PanelTensors& tensors, std::int64_t out_features,
                           const std::optional<Tensor>& bias, const std::optional<Tensor>& other,
                           const std::string& epilogue_name, bool rounds_to_int8) {
  const DType dtype = check_dtype(op, "x", x);
  check_minimum_dim(op, "x", x, 1);
  const std::int64_t in_features = x.size(-1);
  if (in_features < 1) fail(op, "x", "with in_features", describe(x.sizes()));
  if (out_features < 1) fail(op, "out_features", "of at least 1", std::to_string(out_features));
  const PanelEpilogue epilogue = parse_epilogue(op, epilogue_name);
  const bool gated = is_gated(epilogue);
  PanelCopies copies;
  const PanelsArgs weight =
      describe_weight(op, format, tensors, in_features, out_features, gated, copies);
  Shape shape(x.sizes().begin(), x.sizes().end());
  shape.back() = out_features;
  const Extents sizes{shape.data(), static_cast<std::int64_t>(shape.size())};
  PanelResultArgs result{};
  result.out_dtype = dtype;
  result.bias_dtype = dtype;
  result.epilogue = epilogue;
  result.out_stride = out_features;
  if (bias) {
    check_vector(op, "bias", *bias, gated ? 2 * out_features : out_features);
    check_cpu(op, "bias", *bias);
    result.bias_dtype = check_weight_dtype(op, "bias", *bias, dtype);
    result.bias = contiguous_data(*bias, copies.bias);
  }
  Rows other_rows{};
  if ((epilogue == PanelEpilogue::add) != other.has_value()) {
    fail(op, "other", other ? "None with epilogue '" + epilogue_name + "'" : "with epilogue 'add'",
         other ? describe(other->sizes()) : "None");
  }
  if (other) {
    check_shape(op, "other", *other, sizes);
    check_same_dtype(op, "other", *other, x);
    check_cpu(op, "other", *other);
    other_rows = rows_of(*other);
    result.other = other_rows.data;
    result.other_stride = other_rows.stride;
  }
  Tensor out = empty(sizes, x.dtype_code());
  result.out = out.mutable_data();
  const Rows rows = rows_of(x);
  if (rows.count == 0) return out;
  const RowForm form = row_form(dtype, rounds_to_int8);
  if (rows.count <= few_rows_limit(format, form)) {
    multiply_few(rows, dtype, rounds_to_int8, weight, result);
  } else {
    multiply_many_rows(rows, dtype, form, weight, result);
  }
  return out;
}

}  // namespace oxytorch
