// Reads JSON, for files of programs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oxytorch::json {

enum class Kind { null, boolean, integer, number, text, list, object };

constexpr const char* name_of(Kind kind) {
  constexpr const char* names[] = {"null",   "a boolean", "an integer", "a number",
                                   "a text", "a list",    "an object"};
  return names[static_cast<int>(kind)];
}

struct Value {
  Kind kind = Kind::null;
  std::int64_t integer = 0;  // also of a boolean
  double number = 0;
  std::string text;
  std::vector<Value> items;
  std::vector<std::pair<std::string, Value>> members;

  // The last member of that name, null if there is none.
  const Value* find(std::string_view name) const;
  // The same; throws std::runtime_error where there is none of that kind.
  const Value& at(std::string_view name, Kind wanted) const;
  // The value; throws std::runtime_error, which says what was expected, if it is of another kind.
  const Value& expect(Kind wanted, const char* what) const;
};

// Throws std::runtime_error if the text is no JSON, or nested too deep.
Value read(std::string_view text);

}  // namespace oxytorch::json
