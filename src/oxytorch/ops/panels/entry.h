// Checks of weights in panels, and what the ops with them are asked for.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "ops/panels/args.h"

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

inline bool has_codes(const PanelFormat& format) { return format.bits < 16; }

inline std::int64_t panel_bytes(const PanelFormat& format, std::int64_t in_features) {
  return round_up(in_features, kPanelDepth) * kPanelOutputs * format.stored_bits / 8;
}

// Panels of so many outputs of a result.
inline std::int64_t panels_of(std::int64_t out_features, bool gated) {
  return divide_up(out_features, kPanelOutputs) * (gated ? 2 : 1);
}

// a, b or c.
inline std::string any_of(const std::vector<std::string>& names) {
  std::string text = names[0];
  for (std::size_t i = 1; i < names.size(); ++i) {
    text += (i + 1 < names.size() ? ", " : " or ") + names[i];
  }
  return text;
}

inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

// Those from `first` on.
inline std::string epilogue_names(PanelEpilogue first) {
  std::vector<std::string> names;
  for (auto i = static_cast<std::size_t>(first); i < std::size(kPanelEpilogues); ++i) {
    names.push_back(quoted(kPanelEpilogues[i]));
  }
  return any_of(names);
}

inline PanelEpilogue parse_epilogue(const char* op, const std::string& name) {
  for (std::size_t i = 0; i < std::size(kPanelEpilogues); ++i) {
    if (name == kPanelEpilogues[i]) return static_cast<PanelEpilogue>(i);
  }
  fail(op, "epilogue", epilogue_names(PanelEpilogue::none), quoted(name));
}

// `coded`: only those with codes.
inline const PanelFormat& parse_format(const char* op, const char* argument,
                                       const std::string& name, bool coded = false) {
  const auto fits = [&](const PanelFormat& format) { return has_codes(format) || !coded; };
  for (const PanelFormat& format : kPanelFormats) {
    if (name == format.name && fits(format)) return format;
  }
  std::vector<std::string> names;
  for (const PanelFormat& format : kPanelFormats) {
    if (fits(format)) names.push_back(quoted(format.name));
  }
  fail(op, argument, any_of(names), quoted(name));
}

inline PanelCodec codec_of(const PanelFormat& format) {
  if (!has_codes(format)) return PanelCodec::bf16;
  if (format.table) return PanelCodec::table;
  return format.stored_bits == 8 ? PanelCodec::bytes : PanelCodec::nibbles;
}

// A weight has the tensors that its format wants, and no others.
inline void check_parts(const char* op, const PanelFormat& format, const PanelTensors& tensors) {
  const std::string with = std::string("with format '") + format.name + "'";
  if (has_codes(format) && !tensors.channel_scales.tensor) {
    fail(op, "channel_scales", "a tensor " + with, "None");
  }
  const auto check_none = [&](const char* argument, const TensorIfAny& given) {
    if (given.tensor) fail(op, argument, "None " + with, describe(given.tensor->sizes()));
  };
  if (!has_codes(format)) {
    check_none("channel_scales", tensors.channel_scales);
    check_none("group_scales", tensors.group_scales);
  }
  if (!format.has_middle) check_none("zero_points", tensors.zero_points);
}

// Whether x is rounded to 255 steps a row.
inline bool parse_activation(const char* op, const std::string& name) {
  if (name != "none" && name != "int8") fail(op, "activation", "'none' or 'int8'", quoted(name));
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
  for (const std::int64_t size : kGroupSizes) {
    if (groups * size == in_features) return;
  }
  std::vector<std::string> sizes;
  for (const std::int64_t size : kGroupSizes) sizes.push_back(std::to_string(size));
  fail(op, "group_scales",
       "with groups of " + any_of(sizes) + " of " + std::to_string(in_features) + " in_features",
       std::to_string(groups) + " groups");
}

inline PanelsArgs describe_weight(const char* op, const PanelFormat& format,
                                  const PanelTensors& tensors, std::int64_t in_features,
                                  std::int64_t out_features, bool gated, PanelCopies& copies) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  static const std::int32_t half = aoti_torch_dtype_float16();
  static const std::int32_t single = aoti_torch_dtype_float32();
  const std::int64_t panels = panels_of(out_features, gated);
  PanelsArgs weight{
      .panels = nullptr,
      .channel_scales = nullptr,
      .group_scales = nullptr,
      .zero_points = nullptr,
      .table = format.table,
      .panel_count = panels,
      .panel_bytes = panel_bytes(format, in_features),
      .groups = 1,
      .out_features = out_features,
      .middle = format.middle,
      .codec = codec_of(format),
  };
  check_panel_tensor(op, "panels", tensors.panels, byte, panels * weight.panel_bytes);
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

}  // namespace oxytorch
