// Products of bytes with weights of bytes in panels: what entries tell kernels.
//
// A panel is that of ops/panels/layout.py for codes of 8 bits, here with signed ones, whose zero is
// 0. x is unsigned or signed; what its zero point adds to the sums of an output is the zero point
// times the sum of the output's weights, which comes with the weight.
#pragma once

#include "core/dispatch.h"
#include "ops/panels/args.h"
#include "ops/windows/args.h"

namespace oxytorch {

// The numbers of tensors.
// The first ones are those of DType.
enum class Number : std::int32_t { float32, bfloat16, float16, int8, uint8 };

constexpr bool is_byte(Number number) { return number == Number::int8 || number == Number::uint8; }

constexpr std::int64_t size_of(Number number) {
  return is_byte(number) ? 1 : number == Number::float32 ? 4 : 2;
}

// The most products of a sum: of 255 times 128 each, they do not overflow 32 bits.
inline constexpr std::int64_t kMostProducts = 65536;

// What x is multiplied as: tiles of AMX take bytes as they are, other instructions for bytes want
// unsigned ones, and a level without any of them takes integers of 16 bits.
enum class Bytes : std::int32_t { as_they_are, unsigned_bytes, pairs };

// x with a scale and a zero point; of numbers that are no bytes each row gets 255 steps.
struct PrepareBytesArgs {
  const void* x;
  std::int64_t x_stride;  // elements between rows
  std::int64_t in_features;
  Number number;
  std::int32_t zero_point;  // is subtracted from bytes that become integers of 16 bits
  Bytes bytes;
  std::uint8_t* values;
  std::int64_t row_bytes;  // is filled with zeros behind in_features
  float* scales;           // [rows]; of numbers that are no bytes
};

struct BytePanels {
  const std::uint8_t* panels;
  const float* scales;       // [padded out_features]
  const std::int32_t* sums;  // [padded out_features]
  std::int64_t panel_count;
  std::int64_t panel_bytes;
  std::int64_t out_features;
};

// out[row * out_stride + output], of bias[output] and other[row, output].
struct ByteResult {
  void* out;
  const float* bias;  // or null
  const void* other;  // null unless the epilogue adds it
  std::int64_t out_stride;
  std::int64_t other_stride;
  Number number;
  Number other_number;
  // Of bytes: a number is scale * (byte - zero point).
  float inverse_scale;
  std::int32_t zero_point;
  float other_scale;
  std::int32_t other_zero_point;
  PanelEpilogue epilogue;
};

// Rows of x as they are multiplied.
struct ByteRows {
  const std::uint8_t* values;
  std::int64_t row_bytes;
  std::int64_t count;
  std::int64_t depth;   // elements of a row that are multiplied
  const float* scales;  // [count], or null
  float scale;
  std::int32_t zero_point;  // of what is multiplied
  bool is_signed;
  bool in_tiles;  // of which there are at least kTileHeight rows to be read
  // Where rows begin, if not row_bytes apart; they are multiplied without tiles. A row is `planes`
  // times `lines` of equal depth, which lie so many bytes apart.
  const std::uint8_t* const* starts = nullptr;
  std::int64_t planes = 1, lines = 1, plane_step = 0, line_step = 0;
};

// Items are groups of kItemPanels panels times chunks of `chunk_rows` rows; all groups of a chunk
// follow each other.
struct ByteGemmArgs {
  ByteRows x;
  BytePanels weight;
  ByteResult result;
  std::int64_t chunk_rows;
};

// The windows of x, a number of which is scale * (byte - zero point).
struct WindowsOfBytes {
  WindowArgs args;  // whose dtype is not read
  Number number;
  std::int32_t zero_point;
};

// Items are parts of the work, one for a thread. A part takes neighbouring ones of groups times
// chunks of results times ranges of panels, ranges of a chunk first: it writes the windows of the
// chunk side by side into its own scratch, and multiplies them.
struct ByteWindowsArgs {
  WindowsOfBytes windows;
  Bytes bytes;
  std::uint8_t* scratch;  // of the first part
  std::int64_t scratch_bytes;
  ByteGemmArgs product;  // of the first group; its rows are those of a chunk
  std::int64_t rows;     // of a group
  std::int64_t groups;
  std::int64_t chunk_rows;
  std::int64_t range_panels;  // of a group
  std::int64_t parts;
};

// The same where windows overlap in lines, with all columns of a kernel side by side. A chunk is
// `chunk_lines` lines of the result, or one of `line_parts` parts of a line; ranges of a chunk
// follow each other. A part writes the lines that a chunk reads into its own scratch, with what
// lies outside of images, unless they lie well. Sums are of [planes, lines, columns, channels], the
// last two up to a multiple of 4.
struct ByteLinesArgs {
  WindowsOfBytes windows;
  Bytes bytes;
  bool lie_well;
  std::uint8_t* scratch;  // of the first part
  std::int64_t scratch_bytes;
  std::int64_t line_bytes;   // in scratch
  std::int64_t plane_bytes;  // likewise
  ByteGemmArgs product;      // of the first group; its rows are those of a chunk
  std::int64_t lines;        // of the result
  std::int64_t groups;
  std::int64_t chunk_lines;
  std::int64_t line_parts;
  std::int64_t ranges;
  std::int64_t parts;
};

// Of a convolution of each channel for itself: channels of a block; the most lines of a kernel, all
// dimensions but the last taken together; the most neighbouring results whose sums are kept.
inline constexpr std::int64_t kBlockChannels = 64, kMostByteLines = 64, kMostResults = 48;

// A convolution of each channel for itself. Its weight is [channels, columns, lines], lines being
// all of a kernel's dimensions but the last, up to a multiple of 4. Items are parts of the work,
// one for a thread: neighbouring ones of lines of the result times channels, lines of a block of
// kBlockChannels first. A part writes a block's weights, and what `results` neighbours read, into
// its own scratch.
struct ByteDepthwiseArgs {
  WindowsOfBytes windows;  // of all channels, which lie side by side
  float scale;             // of x
  BytePanels weight;
  ByteResult result;
  std::int64_t lines;
  std::int64_t shared_lines;  // neighbours that read four lines each time, or a multiple of them
  std::int64_t results;       // at most kMostResults
  std::uint8_t* scratch;      // of the first part
  std::int64_t scratch_bytes;
  std::int64_t weight_bytes;  // of a block's weights, which come first there
  std::int64_t parts;
  bool by_lines;
};

// Items are stretches of so many elements; the last one may be shorter.
struct QuantizeArgs {
  const void* x;
  void* out;
  std::int64_t count;
  std::int64_t stretch;
  Number x_number;
  Number out_number;
  float scale;  // its inverse where `out` is bytes
  std::int32_t zero_point;
};

}  // namespace oxytorch
