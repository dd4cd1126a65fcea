#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "core/parallel.h"
#include "ops/pack_panels/kernel.h"
#include "ops/panels/entry.h"

namespace oxytorch {

static PackPanelsArgs describe_packing(const char* op, const std::string& format,
                                       std::int64_t out_features, std::int64_t in_features,
                                       bool gated) {
  const PanelFormat& parsed = parse_format(op, "format", format);
  if (out_features < 1 || (gated && out_features % 2 != 0)) {
    fail(op, "out_features", gated ? "even and of at least 2" : "of at least 1",
         std::to_string(out_features));
  }
  if (in_features < 1) fail(op, "in_features", "of at least 1", std::to_string(in_features));
  check_features(op, in_features, out_features);
  return {
      .values = nullptr,
      .panels = nullptr,
      .out_features = out_features,
      .in_features = in_features,
      .panel_count = panels_of(gated ? out_features / 2 : out_features, gated),
      .panel_bytes = panel_bytes(parsed, in_features),
      .codec = codec_of(parsed),
      .gated = gated,
  };
}

static std::int32_t dtype_of_values(PanelCodec codec) {
  if (codec == PanelCodec::fp32) return aoti_torch_dtype_float32();
  return codec == PanelCodec::bf16 ? aoti_torch_dtype_bfloat16() : aoti_torch_dtype_uint8();
}

// Asks for huge pages in place of those that lie within new memory, where the system has them: the
// panels of a model are more pages than a processor knows the places of.
static void ask_for_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] std::int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  const std::uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t end = (address + static_cast<std::uintptr_t>(bytes)) / kHugePage * kHugePage;
  // It is a wish, which fails where the system has none.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

static Tensor pack_panels(const Tensor& values, const std::string& format, bool gated) {
  constexpr const char* kOp = "pack_panels";
  if (values.dim() != 2) {
    fail(kOp, "values", "of shape [out_features, in_features]", describe(values.sizes()));
  }
  PackPanelsArgs args = describe_packing(kOp, format, values.size(0), values.size(1), gated);
  check_panel_tensor(kOp, "values", values, dtype_of_values(args.codec), values.numel());
  Tensor copy;
  // Read only, though unpacking writes them.
  args.values = static_cast<std::uint8_t*>(const_cast<void*>(contiguous_data(values, copy)));
  const std::int64_t sizes[] = {args.panel_count, args.panel_bytes};
  Tensor panels = empty(Extents{sizes, 2}, aoti_torch_dtype_uint8());
  args.panels = static_cast<std::uint8_t*>(panels.mutable_data());
  ask_for_huge_pages(args.panels, args.panel_count * args.panel_bytes);
  run(pack_panels_copies, args, args.panel_count, 3 * args.panel_bytes);
  return panels;
}

static Tensor unpack_panels(const Tensor& panels, const std::string& format,
                            std::int64_t out_features, std::int64_t in_features, bool gated) {
  constexpr const char* kOp = "unpack_panels";
  PackPanelsArgs args = describe_packing(kOp, format, out_features, in_features, gated);
  check_panel_tensor(kOp, "panels", panels, aoti_torch_dtype_uint8(),
                     args.panel_count * args.panel_bytes);
  Tensor copy;
  args.panels = static_cast<std::uint8_t*>(const_cast<void*>(contiguous_data(panels, copy)));
  const std::int64_t sizes[] = {out_features, in_features};
  Tensor values = empty(Extents{sizes, 2}, dtype_of_values(args.codec));
  args.values = static_cast<std::uint8_t*>(values.mutable_data());
  run(unpack_panels_copies, args, args.panel_count, 3 * args.panel_bytes);
  return values;
}

OXY_OP(pack_panels, "(Tensor values, str format, bool gated=False) -> Tensor", pack_panels)
OXY_OP(unpack_panels,
       "(Tensor panels, str format, int out_features, int in_features, bool gated=False) -> Tensor",
       unpack_panels)

}  // namespace oxytorch
