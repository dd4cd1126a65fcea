// A program as steps, which `read_program` makes of its text and runtime.cpp runs.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "program/plan.h"
#include "program/resampling.h"
#include "program/stack.h"
#include "program/trusted.h"
#include "program/views.h"

namespace oxytorch::runtime {

[[noreturn]] void refuse(const std::string& what);

// An argument as it is written: a constant, a value or a size, or a list or optional of these.
struct Argument {
  enum Kind { kConstant, kTensor, kSize, kText, kNone, kSome, kList };
  Kind kind = kNone;
  StableIValue constant = 0;
  std::int32_t slot = 0;
  std::string text;
  std::vector<Argument> items;
};

enum class Kind { kOperator, kAdd, kResample, kSize, kArithmetic, kRequire };

// How a step works while this thread leads a team: with the team, on this thread alone as ever, or
// as torch's operators, which split no work then.
enum class Threads { kTeam, kOne, kTorchs };

struct Step {
  Kind kind = Kind::kOperator;
  std::string name, overload;
  const OwnOperator* own = nullptr;  // an operator of ours
  ViewKind view = ViewKind::none;
  std::vector<Argument> arguments;
  std::vector<std::int32_t> results;  // slots; -1 for none
  bool returns_list = false;
  TrustedCheck check = nullptr;  // of its arguments, before torch is called
  char arithmetic = 0;
  Threads threads = Threads::kOne;
  bool gathers = false;  // another step for the team follows, and none of torch's before it
  std::vector<std::int32_t> dead;            // slots of tensors that no later step takes
  std::int32_t first_place = 0, places = 0;  // of its results, among those of the plan
  // Of an operator of ours that is lent its arguments: these, but for values of a call, and which
  // of them are tensors and sizes in slots. Empty where they are boxed.
  struct Place {
    std::size_t argument;
    std::int32_t slot;
  };
  std::vector<lending::Argument> lent;
  std::vector<Place> lent_tensors, lent_sizes;
  std::vector<std::vector<std::int64_t>> lists;  // that `lent` refers to
};

template <class Function>
void for_each_tensor(const Argument& argument, const Function& function) {
  if (argument.kind == Argument::kTensor) function(argument.slot);
  for (const Argument& item : argument.items) for_each_tensor(item, function);
}

struct Program {
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  ~Program() {
    if (takes_arena) Arena::free_idle();
  }

  std::int32_t tensor_inputs = 0, size_inputs = 0;
  std::int32_t tensor_slots = 0, size_slots = 0;
  std::vector<TensorOwner> constants;  // in the slots after the inputs
  std::vector<Step> steps;
  // For the first step of each run of ours: whether several kernels of it were split last time.
  mutable std::vector<std::atomic<bool>> is_split;
  // Steps of ours whose results are held after the call, or may be: these are not in its arena.
  mutable std::vector<std::atomic<bool>> leaves;
  // The plan of its memory: places in the order of the steps that make what lies there.
  std::vector<Place> places;
  std::int32_t buffers = 0;
  bool takes_arena = false;  // some step of ours has results that do not leave
  // Of the last call: bytes of its arena, and of all results that were in it.
  mutable std::atomic<std::int64_t> arena_bytes{0}, result_bytes{0};
  std::vector<std::int32_t> outputs, size_outputs;
  std::size_t largest_stack = 1;
};

// Notes what a step's operator is lent, if it can be. The step stays where it is from then on.
void note_lent(Step& step);

// Translates the text of a program, one step a line (program.py describes it), and checks that
// every value exists before it is taken. Throws std::runtime_error where it is no program.
std::unique_ptr<Program> read_program(std::string_view text, std::vector<TensorOwner> constants);

// The op: (program, tensors, sizes, is_unseen) in the stack become (whether all values are those
// that the program requires, tensors, sizes). is_unseen: see program.py.
void run_program(StableIValue* stack, uint64_t arguments, uint64_t results);

}  // namespace oxytorch::runtime
