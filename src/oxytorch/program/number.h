// Reads a floating-point number. std::from_chars does so too, but not in the libstdc++ of
// manylinux_2_28.
#pragma once

#include <clocale>
#include <cstdlib>
#include <string>
#include <string_view>

namespace oxytorch {

// Whether the whole word is a decimal number, and its value: infinity or zero beyond the range.
inline bool read_number(std::string_view word, double& value) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", nullptr);  // in others "." is no point
  if (word.starts_with('+') || word.find_first_not_of("0123456789+-.eE") != word.npos) return false;
  const std::string text(word);
  char* end = nullptr;
  value = strtod_l(text.c_str(), &end, c);
  return !text.empty() && end == text.c_str() + text.size();
}

}  // namespace oxytorch
