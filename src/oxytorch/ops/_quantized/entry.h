// What the ops on bytes share: checks, and products.
#pragma once

#include <optional>

#include "core/check.h"
#include "ops/_quantized/args.h"
#include "ops/windows/args.h"

namespace oxytorch {

Number parse_number(const char* op, const char* argument, const std::string& name);

// float32, bfloat16, float16, int8 or uint8.
Number check_number(const char* op, const char* argument, const Tensor& tensor);

std::int32_t dtype_code_of(Number number);

// A scale and a zero point are there for bytes, in their range, and for no other numbers. `scale`
// and `zero_point`: the names of the arguments.
struct ByteScale {
  const char* scale_name;
  std::optional<double> scale;
  const char* zero_point_name;
  std::int64_t zero_point;
};
void check_scale(const char* op, const ByteScale& given, Number number);

struct BytePanelCopies {
  Tensor panels, scales, sums, bias;
};

// Of arguments.
struct BytePanelNames {
  const char* panels = "panels";
  const char* scales = "channel_scales";
  const char* sums = "channel_sums";
};

// A weight [out_features, in_features]; `sums` int32 of its values.
BytePanels describe_byte_panels(const char* op, const Tensor& panels, const Tensor& scales,
                                const Tensor& sums, std::int64_t in_features,
                                std::int64_t out_features, BytePanelCopies& copies,
                                const BytePanelNames& names = {});

// x of bytes with a scale and a zero point; of other numbers each row gets its own.
struct ByteOperand {
  Number number;
  float scale;
  std::int32_t zero_point;
};

// Whether so many rows are multiplied in tiles of AMX.
bool fits_tiles(std::int64_t rows, std::int64_t products);

// What bytes of x become.
Bytes bytes_of(bool in_tiles);

// Of x as it is multiplied.
std::int32_t zero_point_of(const ByteOperand& operand, Bytes bytes);

// Rows of x before they are multiplied, for those who prepare them themselves: `args` for
// `prepare_bytes`, and what becomes of them.
struct Preparing {
  PrepareBytesArgs args;
  ByteRows rows;

  // values: room_for(rows) of rows.row_bytes each; scales: of numbers that are no bytes.
  void use(std::uint8_t* values, float* scales) {
    rows.values = args.values = values;
    rows.scales = args.scales = scales;
  }
};

Preparing preparing_of(const Rows& x, const ByteOperand& operand);

// Rows that prepared memory has room for: tiles are loaded whole.
std::int64_t room_for(std::int64_t rows);

// What a product costs, in bytes that memory moves meanwhile.
std::int64_t work_of_products(std::int64_t rows, std::int64_t width, std::int64_t weight_bytes);

// result = epilogue(rows weight^T + bias) on torch's threads; x may be misaligned.
void multiply_rows_of_bytes(const Rows& x, const ByteOperand& operand, const BytePanels& weight,
                            const ByteResult& result);

// The convolution of bytes, whose weight is that of the first group.
struct ByteWindows {
  WindowArgs windows;
  BytePanels weight;
  ByteResult result;
  std::int64_t in_features;  // lines of a kernel times columns and channels, up to a multiple of 4
  std::int64_t rows;         // results of a channel
  std::int64_t groups;
};

// The product of the rows that a part of a convolution writes, so many bytes from each other.
inline ByteGemmArgs product_of_windows(const ByteWindows& call, const ByteOperand& operand,
                                       bool in_tiles, std::int64_t row_bytes, std::int64_t depth) {
  const ByteRows rows{
      .values = nullptr,
      .row_bytes = row_bytes,
      .count = 0,
      .depth = depth,
      .scales = nullptr,
      .scale = operand.scale,
      .zero_point = zero_point_of(operand, bytes_of(in_tiles)),
      .is_signed = operand.number == Number::int8,
      .in_tiles = in_tiles,
  };
  return {.x = rows, .weight = call.weight, .result = call.result, .chunk_rows = 0};
}

// result = epilogue(windows weight^T + bias) on torch's threads, likewise; zeros around images are
// the operand's zero point.
void multiply_windows_of_bytes(const ByteWindows& call, const ByteOperand& operand);

// The same without tiles, for kernels whose columns are neighbours. The few channels of images may
// lie in planes of their own.
void multiply_lines_of_bytes(const ByteWindows& call, const ByteOperand& operand);

// The convolution of bytes, of each channel for itself.
struct ByteChannels {
  WindowArgs windows;
  BytePanels weight;
  ByteResult result;
  std::int64_t in_features;  // of a result: columns times lines up to a multiple of 4
  std::int64_t rows;         // results of a channel
};

// result = epilogue(convolution(x, weight) + bias) on torch's threads, likewise.
void convolve_channels_of_bytes(const ByteChannels& call, const ByteOperand& operand);

}  // namespace oxytorch
