#include "ops/pack_panels/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

// 4 bytes of a panel are one output's: `kBytes` neighbouring bytes of its values.

struct PlainUnit {
  static constexpr std::int64_t kBytes = 4;
  OXY_INLINE std::uint32_t pack(std::uint64_t values) { return static_cast<std::uint32_t>(values); }
  OXY_INLINE std::uint64_t unpack(std::uint32_t unit) { return unit; }
};

struct NibbleUnit {
  static constexpr std::int64_t kBytes = 8;
  OXY_INLINE std::uint32_t pack(std::uint64_t values) {
    return static_cast<std::uint32_t>(values | values >> 32 << 4);
  }
  OXY_INLINE std::uint64_t unpack(std::uint32_t unit) {
    return (unit & 0x0f0f0f0f) | std::uint64_t{unit >> 4 & 0x0f0f0f0f} << 32;
  }
};

static std::int64_t bytes_of_value(PanelCodec codec) {
  return codec == PanelCodec::fp32 ? 4 : codec == PanelCodec::bf16 ? 2 : 1;
}

// Calls body(values, bytes, units) for each output of a panel: its values, how many bytes they
// have, and its first unit in the panel. `values` is null for outputs that are not there.
template <class Body>
static void each_output(const PackPanelsArgs& args, std::int64_t panel, Body body) {
  const std::int64_t half = args.gated ? args.out_features / 2 : args.out_features;
  const std::int64_t side = args.gated ? panel % 2 : 0;
  const std::int64_t first = (args.gated ? panel / 2 : panel) * kPanelOutputs;
  const std::int64_t bytes = args.in_features * bytes_of_value(args.codec);
  std::uint8_t* units = args.panels + panel * args.panel_bytes;
  for (std::int64_t i = 0; i < kPanelOutputs; ++i) {
    const bool there = first + i < half;
    std::uint8_t* values = args.values + (side * half + first + i) * bytes;
    body(there ? values : nullptr, bytes, units + 4 * i);
  }
}

template <class Unit>
static void pack_panel(const PackPanelsArgs& args, std::int64_t panel) {
  const std::int64_t rows = args.panel_bytes / kPanelRowBytes;
  each_output(args, panel, [&](const std::uint8_t* values, std::int64_t bytes, std::uint8_t* to) {
    for (std::int64_t row = 0; row < rows; ++row, to += kPanelRowBytes) {
      const std::int64_t left = values ? bytes - row * Unit::kBytes : 0;
      std::uint64_t some = 0;
      if (left >= Unit::kBytes) {
        std::memcpy(&some, values + row * Unit::kBytes, Unit::kBytes);
      } else if (left > 0) {
        std::memcpy(&some, values + row * Unit::kBytes, left);
      }
      const std::uint32_t unit = Unit::pack(some);
      std::memcpy(to, &unit, sizeof unit);
    }
  });
}

template <class Unit>
static void unpack_panel(const PackPanelsArgs& args, std::int64_t panel) {
  each_output(args, panel, [&](std::uint8_t* values, std::int64_t bytes, const std::uint8_t* from) {
    if (!values) return;
    for (std::int64_t at = 0; at < bytes; at += Unit::kBytes, from += kPanelRowBytes) {
      std::uint32_t unit;
      std::memcpy(&unit, from, sizeof unit);
      const std::uint64_t some = Unit::unpack(unit);
      std::memcpy(values + at, &some, bytes - at < Unit::kBytes ? bytes - at : Unit::kBytes);
    }
  });
}

static bool has_nibbles(PanelCodec codec) {
  return codec == PanelCodec::nibbles || codec == PanelCodec::table;
}

static void pack_panels(const PackPanelsArgs& args, std::int64_t begin, std::int64_t end) {
  const auto pack = has_nibbles(args.codec) ? pack_panel<NibbleUnit> : pack_panel<PlainUnit>;
  for (std::int64_t panel = begin; panel < end; ++panel) pack(args, panel);
}

static void unpack_panels(const PackPanelsArgs& args, std::int64_t begin, std::int64_t end) {
  const auto unpack = has_nibbles(args.codec) ? unpack_panel<NibbleUnit> : unpack_panel<PlainUnit>;
  for (std::int64_t panel = begin; panel < end; ++panel) unpack(args, panel);
}

}  // namespace oxytorch::OXY_LEVEL
