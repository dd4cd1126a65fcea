// Arguments of our own operators as a program holds them, so that a call boxes none.
#include <algorithm>

#include "program/steps.h"

namespace oxytorch::runtime {

namespace {

// Writes an argument of a kind; returns false if it is none.
class Writer {
 public:
  Writer(Step& step, std::size_t place) : step_(step), place_(place), to_(step.lent[place]) {}

  bool write(const Argument& argument, const lending::Kind& kind) {
    if (!kind.is_optional) return write(argument, kind.of);
    if (argument.kind == Argument::kNone) return true;
    return argument.kind == Argument::kSome && write(argument.items[0], kind.of);
  }

 private:
  bool write(const Argument& argument, lending::Kind::Of kind) {
    to_.is_there = true;
    switch (argument.kind) {
      case Argument::kTensor:
        step_.lent_tensors.push_back({place_, argument.slot});
        return kind == lending::Kind::tensor;
      case Argument::kSize:
        step_.lent_sizes.push_back({place_, argument.slot});
        return kind == lending::Kind::number;
      case Argument::kConstant:
        to_.number = argument.constant;
        return kind == lending::Kind::number;
      case Argument::kText:
        to_.text = &argument.text;
        return kind == lending::Kind::text;
      case Argument::kList:
        return kind == lending::Kind::list && write_list(argument.items);
      default:
        return false;
    }
  }

  // Lists with sizes of a call are boxed.
  bool write_list(const std::vector<Argument>& items) {
    std::vector<std::int64_t>& numbers = step_.lists.emplace_back();
    for (const Argument& item : items) {
      if (item.kind != Argument::kConstant) return false;
      numbers.push_back(static_cast<std::int64_t>(item.constant));
    }
    to_.list = &numbers;
    return true;
  }

  Step& step_;
  const std::size_t place_;
  lending::Argument& to_;
};

}  // namespace

void note_lent(Step& step) {
  const OwnOperator* own = step.own;
  const std::size_t count = step.arguments.size();
  if (!own || !own->lent || own->count != count || step.returns_list || step.results.size() != 1) {
    return;
  }
  step.lent.resize(count);
  step.lists.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (Writer(step, i).write(step.arguments[i], own->kinds[i])) continue;
    step.lent.clear();
    return;
  }
}

}  // namespace oxytorch::runtime
