// Few rows of x times a weight in panels, at the bandwidth of memory: each is
// read once, from its begin to its end, and asked for ahead of its use.
#pragma once

#include "ops/panels/finish.h"
#include "ops/panels/stage_gemv.h"

namespace oxytorch::OXY_LEVEL {

// Rows that are multiplied at once; the others find the panel in the nearest caches. A panel that
// takes long to decode is decoded for more of them.
inline constexpr int kMostRows = 4;
template <class Codec>
inline constexpr int kChunkRows =
    OXY_HAS_VECTORS_512 || __is_same(Codec, Float8Codec) ? kMostRows : 2;
// Sums that registers hold. With 128 bits it is more than they do: 4 vectors fill a row of a panel.
inline constexpr int kRegisterSums = kVectorBytes == 16 ? 32 : OXY_HAS_VECTORS_512 ? 16 : 8;

// Bytes between what is read and what is asked for; panels follow each other, so that it is the
// thread's next panel at the end of one.
inline constexpr std::int64_t kAhead = 4096;

OXY_INLINE void ask_ahead(const std::uint8_t* row) { __builtin_prefetch(row + kAhead); }

// Independent sums for each row and part: additions need not wait for each other, and err less.
template <int rows>
inline constexpr int kChains = rows * kParts * 4 <= kRegisterSums   ? 4
                               : rows * kParts * 2 <= kRegisterSums ? 2
                                                                    : 1;

// A block of in_features of one panel and some rows.
struct Block {
  const std::uint8_t* panel;
  std::int64_t length;
  std::int64_t begin = 0;  // of in_features
  std::int64_t index = 0;
  std::int64_t row;                           // the first
  const std::uint8_t* zero_points = nullptr;  // of 16 outputs; null: `middle`
  std::int32_t middle;
};

OXY_INLINE i32v zero_point_of(const Block& block, int part) {
  if (!block.zero_points) return i32v{} + block.middle;
  u8v values;
  std::memcpy(&values, block.zero_points + part * kLanes, sizeof values);
  return reinterpret_cast<i32v>(zero_extend(values));
}

// `multiply` gives sums of products of staged x and a block of the weight, without its scales.

template <int rows, class Codec>
OXY_INLINE void multiply(Float32Path, Codec codec, const GemvArgs& args, const Block& block,
                         f32v (&products)[rows][kParts]) {
  constexpr int kSums = kChains<rows> < Codec::kMostChains ? kChains<rows> : Codec::kMostChains;
  f32v sums[kSums][rows][kParts] = {};
  i32v zero_points[kParts];
  for (int part = 0; part < kParts; ++part) {
    zero_points[part] = zero_point_of(block, part);
  }
  const float* x = row_of_floats(args, block.row) + block.begin;
  const std::uint8_t* row = block.panel;
  constexpr int kRows = kSums > Codec::kNumbers ? kSums / Codec::kNumbers : 1;
  for (std::int64_t k = 0; k < block.length; k += kRows * Codec::kNumbers) {
    for (int n = 0; n < kRows; ++n, row += 64) {
      ask_ahead(row);
      for (int part = 0; part < kParts; ++part) {
        const u32v words = load_as<u32v>(row + part * sizeof(u32v));
        for (int i = 0; i < Codec::kNumbers; ++i) {
          const f32v value = codec.value(words, i, zero_points[part]);
          for (int r = 0; r < rows; ++r) {
            sums[(n * Codec::kNumbers + i) % kSums][r][part] +=
                x[r * args.depth + k + n * Codec::kNumbers + i] * value;
          }
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      f32v sum = sums[0][r][part];
      for (int chain = 1; chain < kSums; ++chain) sum += sums[chain][r][part];
      products[r][part] = sum;
    }
  }
}

#if OXY_HAS_FAST_BF16_DOT

// Values of a table as pairs of bfloat16: of each word of a row, once shifted, a table gives the
// number of the lowest 4 bits. So 8 neighbours of in_features come in the order 0 2 4 6 1 3 5 7.
// The table is there twice, because it is asked with 5 bits; `lost` is what bfloat16 loses of the
// numbers.
struct PairTables {
  __m512i main, lost;

  OXY_MEMBER explicit PairTables(f32v values) {
    const u16v half = narrow(values, bf16{});
    const u16v rest = narrow(values - widen(half, bf16{}), bf16{});
    main = _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(half));
    lost = _mm512_broadcast_i64x4(reinterpret_cast<__m256i>(rest));
  }

  OXY_INLINE u32v find(__m512i table, u32v row, int shift) {
    const __m512i words = _mm512_srli_epi16(reinterpret_cast<__m512i>(row), shift);
    return reinterpret_cast<u32v>(_mm512_permutexvar_epi16(words, table));
  }
};

template <int rows, class Codec>
OXY_INLINE void multiply(Bf16PairPath, Codec codec, const GemvArgs& args, const Block& block,
                         f32v (&products)[rows][kParts]) {
  f32v sums[4][rows] = {};
  const std::uint32_t* x = Bf16PairPath::row_of_pairs(args, block.row) + block.begin / 2;
  const std::uint8_t* row = block.panel;
  const auto add = [&](int chain, u32v numbers) {
    for (int r = 0; r < rows; ++r) {
      sums[chain][r] =
          Bf16Pair::multiply(sums[chain][r], from_bits(numbers), x[r * args.depth / 2 + chain]);
    }
  };
  if constexpr (__is_same(Codec, Bf16Codec)) {
    for (std::int64_t k = 0; k < block.length; k += 8, x += 4) {
      for (int i = 0; i < 4; ++i, row += kPanelRowBytes) {
        ask_ahead(row);
        add(i, load_as<u32v>(row));
      }
    }
  } else if constexpr (__is_same(Codec, Float8Codec)) {
    for (std::int64_t k = 0; k < block.length; k += 8, x += 4) {
      for (int i = 0; i < 4; i += 2, row += kPanelRowBytes) {
        ask_ahead(row);
        const Float8Pairs pairs = float8_pairs(load_as<u32v>(row));
        add(i, pairs.first);
        add(i + 1, pairs.last);
      }
    }
  } else {
    const PairTables tables(codec.values);
    for (std::int64_t k = 0; k < block.length; k += 8, x += 4, row += kPanelRowBytes) {
      ask_ahead(row);
      const u32v words = load_as<u32v>(row);
      for (int i = 0; i < 4; ++i) {
        add(i, PairTables::find(tables.main, words, 4 * i));
        add(i, PairTables::find(tables.lost, words, 4 * i));
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    products[r][0] = (sums[0][r] + sums[1][r]) + (sums[2][r] + sums[3][r]);
  }
}

#endif

#if OXY_HAS_VECTORS_256

// Bytes of the weight that belong to a digit.
OXY_INLINE u32v operand(u32v quads, int digit) {
  return Digit::kDepth == 4 ? quads : (digit == 0 ? quads : quads >> 8) & 0x00ff00ff;
}

// A row's sums of products with both digits, as sums of products with what they stand for.
template <class Path, int count, int digit_count, int rows>
OXY_INLINE i32v whole_of_digits(const i32v (&sums)[count][digit_count][rows][kParts], int row,
                                int part) {
  i32v digits[2] = {};
  for (int digit = 0; digit < digit_count; ++digit) {
    for (int i = 0; i < count; ++i) digits[digit] += sums[i][digit][row][part];
  }
  return Path::kBytes && digit_count == 2 ? (digits[0] << 7) + digits[1] : digits[0] + digits[1];
}

template <int rows, class Codec, bool narrow_numbers>
OXY_INLINE void multiply(Int8DotPath<narrow_numbers>, Codec codec, const GemvArgs& args,
                         const Block& block, f32v (&products)[rows][kParts]) {
  using Path = Int8DotPath<narrow_numbers>;
  constexpr int kDigits = Path::kDigits;
  constexpr bool kHalves = __is_same(Codec, NibbleCodec);
  // Two quads of neighbours a turn; each has sums of its own where registers allow.
  constexpr int kSums = rows * kParts * kDigits * 2 <= kRegisterSums ? 2 : 1;
  i32v sums[kSums][kDigits][rows][kParts] = {};
  const std::uint32_t* x = Path::row_of_digits(args, block.row) + block.begin / 4 * kDigits;
  const std::uint8_t* row = block.panel;
  for (std::int64_t k = 0; k < block.length; k += 8, x += 2 * kDigits) {
    ask_ahead(row);
    if (!kHalves) ask_ahead(row + 64);
    for (int part = 0; part < kParts; ++part) {
      const std::uint8_t* at = row + part * sizeof(u32v);
      const u32v first = load_as<u32v>(at);
      const u32v second = kHalves ? first >> 4 : load_as<u32v>(at + 64);
      const u32v mask = u32v{} + (kHalves ? 0x0f0f0f0fu : 0xffffffffu);
      const u32v quads[2] = {first & mask, second & mask};
      for (int i = 0; i < 2; ++i) {
        for (int digit = 0; digit < kDigits; ++digit) {
          const auto numbers = reinterpret_cast<i32v>(operand(quads[i], digit));
          for (int r = 0; r < rows; ++r) {
            i32v& sum = sums[i % kSums][digit][r][part];
            sum = Digit::multiply(sum, numbers, x[r * args.depth + i * kDigits + digit]);
          }
        }
      }
    }
    row += kHalves ? 64 : 128;
  }
  for (int part = 0; part < kParts; ++part) {
    for (int r = 0; r < rows; ++r) {
      i32v whole = whole_of_digits<Path>(sums, r, part);
      const std::int64_t at = (block.row + r) * args.staged.blocks + block.index;
      const std::int32_t sum = args.staged.sums[at];
      if (block.zero_points) {
        whole -= zero_point_of(block, part) * sum;
      } else {
        whole -= block.middle * sum;
      }
      products[r][part] = __builtin_convertvector(whole, f32v);
      // A scale of the whole row comes last, as in a gemm: any number of rows is rounded alike.
      if (!narrow_numbers) products[r][part] *= args.staged.scales[at];
    }
  }
}

#endif

template <class Path, int rows, class Codec>
static void multiply_panel(Codec codec, const GemvArgs& args, std::int64_t panel,
                           std::int64_t first_row, float* sums) {
  const PanelsArgs& weight = args.weight;
  const std::uint8_t* begin = weight.panels + panel * weight.panel_bytes;
  // What is padded for others is left out where numbers are read one by one.
  const std::int64_t last = Codec::kNumbers == 1 ? (args.in_features + 3) / 4 * 4 : args.depth;
  const std::int64_t end = weight.group_scales ? args.in_features : last;
  const std::int64_t in_group = group_length(args);
  const std::int64_t length = block_length<Path>(args);
  f32v totals[rows][kParts] = {};
  Block block{.panel = begin, .length = length, .row = first_row, .middle = weight.middle};
  for (std::int64_t group = panel * weight.groups; block.begin < end; ++group) {
    const std::int64_t group_end = block.begin + in_group;
    const std::uint8_t* zero_points = weight.zero_points;
    if (zero_points) block.zero_points = zero_points + group * kPanelOutputs;
    for (; block.begin < group_end; block.begin += length, ++block.index) {
      if (block.begin + length > end) block.length = end - block.begin;
      f32v products[rows][kParts];
      multiply(Path{}, codec, args, block, products);
      for (int part = 0; part < kParts; ++part) {
        f32v scale = splat(1.0f);
        if (weight.group_scales) {
          scale = group_scales_of(weight, group * kPanelOutputs + part * kLanes);
        }
        for (int r = 0; r < rows; ++r) {
          totals[r][part] = multiply_add(products[r][part], scale, totals[r][part]);
        }
      }
      block.panel += length * (kPanelRowBytes / Codec::kNumbers);
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int part = 0; part < kParts; ++part) {
      store(sums + r * kPanelOutputs + part * kLanes, totals[r][part]);
    }
  }
}

// Rows of one item from their sums; `sums` has the up's after the gate's kMostRows rows.
template <class Path, class T>
static void finish_item(const GemvArgs& args, std::int64_t item, std::int64_t first_row,
                        std::int64_t rows, const float* sums) {
  const std::int64_t panel = is_gated(args.result.epilogue) ? 2 * item : item;
  const std::int64_t output = item * kPanelOutputs;
  const std::int64_t left = args.weight.out_features - output;
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * kPanelOutputs;
    float row_scale = 1.0f;
    if constexpr (Path::kScalesRows)
      row_scale = args.staged.scales[(first_row + r) * args.staged.blocks];
    sweep(0, left < kPanelOutputs ? left : kPanelOutputs, [&](std::int64_t i, auto count) {
      finish_outputs<T>(args.weight, args.result, first_row + r, row_scale,
                        panel * kPanelOutputs + i, output + i, from + i,
                        from + i + kMostRows * kPanelOutputs, count);
    });
  }
}

template <class Path, int rows, class Codec>
static void multiply_item(Codec codec, const GemvArgs& args, std::int64_t item,
                          std::int64_t first_row, float* sums) {
  if (!is_gated(args.result.epilogue)) {
    multiply_panel<Path, rows>(codec, args, item, first_row, sums);
    return;
  }
  multiply_panel<Path, rows>(codec, args, 2 * item, first_row, sums);
  multiply_panel<Path, rows>(codec, args, 2 * item + 1, first_row,
                             sums + kMostRows * kPanelOutputs);
}

template <class Path, class Codec>
static void multiply_items(Codec codec, const GemvArgs& args, std::int64_t begin,
                           std::int64_t end) {
  alignas(64) float sums[2 * kMostRows * kPanelOutputs];
  constexpr int kRows = kChunkRows<Codec>;
  const std::int64_t panels = is_gated(args.result.epilogue) ? 2 : 1;
  const std::int64_t bytes = panels * args.weight.panel_bytes;
  const std::uint8_t* first = args.weight.panels + begin * bytes;
  const std::int64_t all = (end - begin) * bytes;
  for (std::int64_t at = 0; at < (all < kAhead ? all : kAhead); at += kPanelRowBytes) {
    __builtin_prefetch(first + at);
  }
  for (std::int64_t item = begin; item < end; ++item) {
    std::int64_t row = 0;
    while (row < args.rows) {
      const std::int64_t left = args.rows - row;
      const std::int64_t rows = left >= kRows ? kRows : left >= 2 ? 2 : 1;
      if (rows == kRows) {
        multiply_item<Path, kRows>(codec, args, item, row, sums);
      } else if (rows == 2) {
        multiply_item<Path, 2>(codec, args, item, row, sums);
      } else {
        multiply_item<Path, 1>(codec, args, item, row, sums);
      }
      with_type(args.result.out_dtype, [&](auto element) {
        finish_item<Path, decltype(element)>(args, item, row, rows, sums);
      });
      row += rows;
    }
  }
}

static void gemv(const GemvArgs& args, std::int64_t begin, std::int64_t end) {
  with_path(args, [&](auto path) {
    using Path = decltype(path);
    with_codec(args.weight, [&](auto codec) {
      if constexpr (Path::template kTakes<decltype(codec)>) {
        multiply_items<Path>(codec, args, begin, end);
      }
    });
  });
}

static void gemv_of_each(const GemvOfEachArgs& args, std::int64_t begin, std::int64_t end) {
  std::int64_t product = 0, first = 0;
  while (begin < end) {
    for (; begin >= args.ends[product]; ++product) first = args.ends[product];
    const std::int64_t most = end < args.ends[product] ? end : args.ends[product];
    gemv(args.products[product], begin - first, most - first);
    begin = most;
  }
}

}  // namespace oxytorch::OXY_LEVEL
