// What the ops with weights in panels share: checks, and products.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/check.h"
#include "ops/panels/gemm_args.h"

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

// Features of a weight, below which the sizes of panels do not overflow.
inline constexpr std::int64_t kMostFeatures = std::int64_t{1} << 29;

// Numbers of features may come from a file.
void check_features(const char* op, std::int64_t in_features, std::int64_t out_features);

// The sizes of a linear layer's result for x of at least one dimension and feature.
Shape linear_shape(const char* op, const Tensor& x, std::int64_t out_features);

// Of one panel.
std::int64_t panel_bytes(const PanelFormat& format, std::int64_t in_features);

// Panels of so many outputs of a result.
inline std::int64_t panels_of(std::int64_t out_features, bool gated) {
  return divide_up(out_features, kPanelOutputs) * (gated ? 2 : 1);
}

inline std::string quoted(const std::string& name) { return "'" + name + "'"; }

// a, b or c: for a message.
std::string any_of(const std::vector<std::string>& names);

// Of the epilogues from `first` on, for a message.
std::string epilogue_names(PanelEpilogue first);

PanelEpilogue parse_epilogue(const char* op, const std::string& name);

// `other` is there with an epilogue that adds it, and with no other one.
void check_other(const char* op, const std::string& epilogue, const std::optional<Tensor>& other);

// `coded`: only those with codes.
const PanelFormat& parse_format(const char* op, const char* argument, const std::string& name,
                                bool coded = false);

PanelCodec codec_of(const PanelFormat& format);

// A weight has the tensors that its format wants, and no others.
void check_parts(const char* op, const PanelFormat& format, const PanelTensors& tensors);

// Whether x is rounded to 255 steps a row.
bool parse_activation(const char* op, const std::string& name);

void check_panel_tensor(const char* op, const char* argument, const Tensor& tensor,
                        std::int32_t dtype, std::int64_t elements);

PanelsArgs describe_weight(const char* op, const PanelFormat& format, const PanelTensors& tensors,
                           std::int64_t in_features, std::int64_t out_features, bool gated,
                           PanelCopies& copies);

// Some neighbouring rows times a weight; rows count from the first of the call's rows.
struct RowsProduct {
  PanelsArgs weight;
  PanelResultArgs result;  // its first row is `first_row`
  std::int64_t first_row;
  std::int64_t row_count;
};

// result = epilogue(rows weight^T + bias) for each product, on torch's threads. Row i of the call
// is row `order[i]` of x, or row i where `order` is null; x may be misaligned. `rounds_to_int8`: x
// to 255 steps a row; for codecs with integers. All weights have x's width, one codec and as many
// groups. There is at least one product, and a row.
void multiply_rows(const Rows& x, const std::vector<std::int64_t>* order, DType x_dtype,
                   bool rounds_to_int8, std::span<const RowsProduct> products);

// What x becomes for a product. `rounds_to_int8`: as above.
RowType row_type(DType dtype, bool rounds_to_int8, PanelCodec codec);

// Whether tiles of AMX are best loaded from x itself, the last one too.
bool holds_tiles(const Rows& x, DType dtype);

inline Tensor scratch(std::int64_t bytes) {
  static const std::int32_t byte = aoti_torch_dtype_uint8();
  return empty(Extents{&bytes, 1}, byte);
}

// Memory for the scratch of each part; `first` becomes that of the first one.
inline Tensor scratch_of_parts(std::int64_t parts, std::int64_t bytes, std::uint8_t*& first) {
  Tensor memory = scratch(parts * bytes + 64);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.mutable_data());
  first = reinterpret_cast<std::uint8_t*>((address + 63) & ~std::uintptr_t{63});
  return memory;
}

}  // namespace oxytorch
