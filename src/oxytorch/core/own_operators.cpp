#include <unordered_map>

#include "core/own_operators.h"

namespace oxytorch {

namespace {

// Filled before main, file by file.
std::unordered_map<std::string, OwnOperator>& operators() {
  static std::unordered_map<std::string, OwnOperator> operators;
  return operators;
}

}  // namespace

OwnOperators::OwnOperators(const char* name, OwnOperator operator_) {
  operators().emplace(name, operator_);
}

const OwnOperator* OwnOperator::find(const std::string& name) {
  const auto found = operators().find(name);
  return found == operators().end() ? nullptr : &found->second;
}

}  // namespace oxytorch
