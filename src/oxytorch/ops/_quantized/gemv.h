// A few rows of x times panels that are read one after the other: a stream at a time is what caches
// and memory give fastest, and where rows are few, reading is what takes the time.
#pragma once

#include "ops/_quantized/blocks.h"

namespace oxytorch::OXY_LEVEL {

// Rows up to which that is faster than blocks, whose weights are read for more rows at once.
inline constexpr std::int64_t kGemvRows = 2;

// Bytes of a weight that the second cache holds: nothing is asked for ahead there.
inline constexpr std::int64_t kNearWeight = 1 << 20;

struct GemvCall {
  const std::uint8_t* rows;
  std::int64_t row_bytes;
  const std::uint8_t* panel;
  std::int64_t depth;          // elements of a row, a multiple of 4
  const std::int32_t* starts;  // what sums begin with
  std::int32_t* sums;
  std::int64_t stride;  // of the sums of rows
};

#if OXY_HAS_INT8_DOT

// Sums that do not wait for each other.
template <int rows>
inline constexpr int kChains = 8 / kParts / rows;

template <int rows, int chains, bool asks>
OXY_INLINE void add_units(const GemvCall& call, std::int64_t unit,
                          i32v (&sums)[rows][kChains<rows>][kParts]) {
#pragma GCC unroll 8
  for (int c = 0; c < chains; ++c) {
    const std::uint8_t* at = call.panel + (unit + c) * 64;
    if (asks) __builtin_prefetch(at + kAhead);
    i32v weights[kParts];
#pragma GCC unroll 4
    for (int v = 0; v < kParts; ++v) weights[v] = load_as<i32v>(at + v * sizeof(i32v));
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const auto x = load_as<std::uint32_t>(call.rows + r * call.row_bytes + (unit + c) * 4);
#pragma GCC unroll 4
      for (int v = 0; v < kParts; ++v) {
        sums[r][c][v] = ByteUnit::multiply(sums[r][c][v], weights[v], x);
      }
    }
  }
}

template <int rows, bool asks>
static void multiply_panel(const GemvCall& given) {
  constexpr int kChain = kChains<rows>;
  // A copy, because what is stored below could otherwise be the call.
  const GemvCall call = given;
  i32v sums[rows][kChain][kParts];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kChain; ++c) {
#pragma GCC unroll 4
      for (int v = 0; v < kParts; ++v) {
        sums[r][c][v] = c == 0 ? load_as<i32v>(call.starts + v * kLanes) : i32v{};
      }
    }
  }
  const std::int64_t units = call.depth / 4;
  std::int64_t k = 0;
  for (; k + kChain <= units; k += kChain) add_units<rows, kChain, asks>(call, k, sums);
  for (; k < units; ++k) add_units<rows, 1, asks>(call, k, sums);
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kParts; ++v) {
      i32v total = sums[r][0][v];
#pragma GCC unroll 8
      for (int c = 1; c < kChain; ++c) total += sums[r][c][v];
      std::memcpy(call.sums + r * call.stride + v * kLanes, &total, sizeof total);
    }
  }
}

#else

typedef std::int16_t s16v __attribute__((vector_size(kVectorBytes)));

// Neighbouring signed bytes as integers of 16 bits.
OXY_INLINE i32v load_wide(const std::uint8_t* p) {
#if defined(__AVX512F__)
  const auto bytes = load_as<__m256i>(p);
  return reinterpret_cast<i32v>(_mm512_cvtepi8_epi16(bytes));
#elif defined(__AVX2__)
  const auto bytes = load_as<__m128i>(p);
  return reinterpret_cast<i32v>(_mm256_cvtepi8_epi16(bytes));
#elif defined(__SSE4_1__)
  const __m128i bytes = _mm_cvtsi64_si128(load_as<long long>(p));
  return reinterpret_cast<i32v>(_mm_cvtepi8_epi16(bytes));
#else
  typedef std::int8_t Bytes __attribute__((vector_size(kVectorBytes / 2)));
  return reinterpret_cast<i32v>(__builtin_convertvector(load_as<Bytes>(p), s16v));
#endif
}

// Vectors of a row of a panel: of the four products of an output, two lie in each of two lanes.
template <int rows, bool asks>
static void multiply_panel(const GemvCall& given) {
  constexpr int kVectors = 2 * kParts;
  const GemvCall call = given;
  i32v sums[rows][kVectors] = {};
  const std::uint8_t* at = call.panel;
  for (std::int64_t k = 0; k < call.depth; k += 4, at += 64) {
    if (asks) __builtin_prefetch(at + kAhead);
    i32v x[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      typedef std::int64_t Pairs __attribute__((vector_size(kVectorBytes)));
      const auto four = load_as<std::int64_t>(call.rows + r * call.row_bytes + k * 2);
      x[r] = reinterpret_cast<i32v>(Pairs{} + four);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const i32v weights = load_wide(at + v * (kVectorBytes / 2));
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) sums[r][v] = Int16Pair::multiply(sums[r][v], weights, x[r]);
    }
  }
  for (int r = 0; r < rows; ++r) {
    std::int32_t halves[2 * kPanelOutputs];
    std::memcpy(halves, sums[r], sizeof halves);
    for (int i = 0; i < kPanelOutputs; ++i) {
      call.sums[r * call.stride + i] = call.starts[i] + halves[2 * i] + halves[2 * i + 1];
    }
  }
}

#endif

// `sums`: of the outputs of an item, for each row.
template <int rows = kGemvRows>
static void byte_gemv(const ByteGemmArgs& args, const ByteChunk& item, const ByteOutputs& outputs,
                      std::int32_t* sums) {
  if constexpr (rows > 1) {
    if (item.rows < rows) return byte_gemv<rows - 1>(args, item, outputs, sums);
  }
  const BytePanels& weight = args.weight;
  const bool is_near = weight.panel_count * weight.panel_bytes <= kNearWeight;
  for (std::int64_t p = 0; p < item.panels; ++p) {
    const GemvCall call{
        .rows = args.x.values + item.row * args.x.row_bytes,
        .row_bytes = args.x.row_bytes,
        .panel = weight.panels + (item.panel + p) * weight.panel_bytes,
        .depth = args.x.depth,
        .starts = outputs.starts + p * kPanelOutputs,
        .sums = sums + p * kPanelOutputs,
        .stride = kItemOutputs,
    };
    if (is_near) {
      multiply_panel<rows, false>(call);
    } else {
      multiply_panel<rows, true>(call);
    }
  }
}

}  // namespace oxytorch::OXY_LEVEL
