// Formats, epilogues and activations by the names that callers give.
#include "ops/panels/entry.h"

namespace oxytorch {

std::string any_of(const std::vector<std::string>& names) {
  std::string text = names[0];
  for (std::size_t i = 1; i < names.size(); ++i) {
    text += (i + 1 < names.size() ? ", " : " or ") + names[i];
  }
  return text;
}

std::string epilogue_names(PanelEpilogue first) {
  std::vector<std::string> names;
  for (auto i = static_cast<std::size_t>(first); i < std::size(kPanelEpilogues); ++i) {
    names.push_back(quoted(kPanelEpilogues[i]));
  }
  return any_of(names);
}

PanelEpilogue parse_epilogue(const char* op, const std::string& name) {
  for (std::size_t i = 0; i < std::size(kPanelEpilogues); ++i) {
    if (name == kPanelEpilogues[i]) return static_cast<PanelEpilogue>(i);
  }
  fail(op, "epilogue", epilogue_names(PanelEpilogue::none), quoted(name));
}

const PanelFormat& parse_format(const char* op, const char* argument, const std::string& name,
                                bool coded) {
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

PanelCodec codec_of(const PanelFormat& format) {
  if (!has_codes(format)) return format.bits == 32 ? PanelCodec::fp32 : PanelCodec::bf16;
  if (format.table) return PanelCodec::table;
  if (format.has_floats) return PanelCodec::float8;
  return format.stored_bits == 8 ? PanelCodec::bytes : PanelCodec::nibbles;
}

void check_parts(const char* op, const PanelFormat& format, const PanelTensors& tensors) {
  const auto with = [&] { return "with format " + quoted(format.name); };
  if (has_codes(format) && !tensors.channel_scales.tensor) {
    fail(op, "channel_scales", "a tensor " + with(), "None");
  }
  const auto check_none = [&](const char* argument, const TensorIfAny& given) {
    if (given.tensor) fail(op, argument, "None " + with(), describe(given.tensor->sizes()));
  };
  if (!has_codes(format)) {
    check_none("channel_scales", tensors.channel_scales);
    check_none("group_scales", tensors.group_scales);
  }
  if (!format.has_middle) check_none("zero_points", tensors.zero_points);
}

bool parse_activation(const char* op, const std::string& name) {
  if (name != "none" && name != "int8")
    fail(op, "activation_dtype", "'none' or 'int8'", quoted(name));
  return name == "int8";
}

}  // namespace oxytorch
