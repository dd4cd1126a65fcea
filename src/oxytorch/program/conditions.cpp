#include "program/conditions.h"

#include <algorithm>
#include <stdexcept>

namespace oxytorch {

namespace {

using json::Kind;
using json::Value;

constexpr int kDeepest = 50;
constexpr std::int64_t kLargest = std::int64_t{1} << 62;
constexpr const char* kOperators[] = {
    "+", "-", "*", "//", "%", "min", "max", "==", "!=", "<", "<=", ">", ">=", "not", "and", "or"};

struct NoValue {};

bool takes_any_number(const std::string& name) {
  return name == "and" || name == "or" || name == "min" || name == "max";
}

void check(const Value& condition, const std::vector<InputSizes>& inputs, int depth) {
  const auto refuse = [](const char* what) { throw std::runtime_error(what); };
  if (condition.kind == Kind::integer) {
    if (condition.integer > kLargest || condition.integer < -kLargest) refuse("a number too large");
    return;
  }
  const std::vector<Value>& items = condition.items;
  if (condition.kind != Kind::list || items.size() < 2 || depth > kDeepest ||
      items[0].kind != Kind::text) {
    refuse("expected a condition");
  }
  const std::string& name = items[0].text;
  if (name == "size" || name == "value") {
    for (std::size_t i = 1; i < items.size(); ++i) {
      if (items[i].kind != Kind::integer || items[i].integer < 0) refuse("expected a place");
    }
    const bool is_size = name == "size";
    const auto place = static_cast<std::size_t>(items[1].integer);
    if (items.size() != (is_size ? 3u : 2u) || place >= inputs.size() ||
        inputs[place].is_tensor != is_size ||
        (is_size && items[2].integer >= static_cast<std::int64_t>(inputs[place].shape.size()))) {
      refuse("expected the place of a size");
    }
    return;
  }
  if (std::ranges::find(kOperators, name) == std::end(kOperators)) {
    refuse("expected an operator of sizes");
  }
  if (!takes_any_number(name) && items.size() != (name == "not" ? 2u : 3u)) {
    refuse("expected two operands");
  }
  for (std::size_t i = 1; i < items.size(); ++i) check(items[i], inputs, depth + 1);
}

// Rounds down, as Python does.
std::int64_t divided(std::int64_t a, std::int64_t b) {
  if (b == 0 || (b == -1 && a == INT64_MIN)) throw NoValue();
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

std::int64_t value_of(const Value& condition, const std::vector<InputSizes>& inputs);

std::int64_t arithmetic(const std::string& name, std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  if (name == "+"   ? __builtin_add_overflow(a, b, &result)
      : name == "-" ? __builtin_sub_overflow(a, b, &result)
      : name == "*" ? __builtin_mul_overflow(a, b, &result)
                    : false) {
    throw NoValue();
  }
  if (name == "//") return divided(a, b);
  if (name == "%") return b == -1 ? 0 : a - divided(a, b) * b;
  if (name == "==") return a == b;
  if (name == "!=") return a != b;
  if (name == "<") return a < b;
  if (name == "<=") return a <= b;
  if (name == ">") return a > b;
  if (name == ">=") return a >= b;
  return result;
}

std::int64_t value_of(const Value& condition, const std::vector<InputSizes>& inputs) {
  if (condition.kind == Kind::integer) return condition.integer;
  const std::vector<Value>& items = condition.items;
  const std::string& name = items[0].text;
  if (name == "size") return inputs[items[1].integer].shape[items[2].integer];
  if (name == "value") return inputs[items[1].integer].value;
  std::vector<std::int64_t> values;
  for (std::size_t i = 1; i < items.size(); ++i) values.push_back(value_of(items[i], inputs));
  const auto is_true = [](std::int64_t value) { return value != 0; };
  if (name == "not") return !values[0];
  if (name == "and") return std::ranges::all_of(values, is_true);
  if (name == "or") return std::ranges::any_of(values, is_true);
  if (name == "min") return std::ranges::min(values);
  if (name == "max") return std::ranges::max(values);
  return arithmetic(name, values[0], values[1]);
}

}  // namespace

void check_condition(const Value& condition, const std::vector<InputSizes>& inputs) {
  check(condition, inputs, 0);
}

bool holds(const Value& condition, const std::vector<InputSizes>& inputs) {
  try {
    return value_of(condition, inputs) != 0;
  } catch (const NoValue&) {
    return false;
  }
}

std::string shown(const Value& condition, const std::vector<std::string>& names) {
  if (condition.kind == Kind::integer) return std::to_string(condition.integer);
  const std::vector<Value>& items = condition.items;
  const std::string& name = items[0].text;
  if (name == "value") return names[items[1].integer];
  if (name == "size") {
    return names[items[1].integer] + ".shape[" + std::to_string(items[2].integer) + "]";
  }
  if (name == "not") return "not (" + shown(items[1], names) + ")";
  std::string text;
  for (std::size_t i = 1; i < items.size(); ++i) {
    const std::string inner = shown(items[i], names);
    const bool is_call = items[i].kind == Kind::list && items[i].items[0].text != "size" &&
                         items[i].items[0].text != "value";
    if (i > 1) text += " " + name + " ";
    text += is_call ? "(" + inner + ")" : inner;
  }
  return text;
}

}  // namespace oxytorch
