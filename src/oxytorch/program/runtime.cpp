// Runs a program: a list of operator calls over numbered values, without Python between them.
//
// A program comes as text, one step a line (program.py describes it), is checked and translated
// once (op `load_program`), and then runs for any sizes (op `run_program`). Operators of torch are
// called by name through the stable ABI. Ours are called without it where nobody can tell.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include "core/apart.h"
#include "core/export.h"
#include "core/modes.h"
#include "core/parallel.h"
#include "core/team.h"
#include "program/steps.h"

namespace oxytorch::runtime {

namespace {

// One call of a program, with its own values.
class Run {
 public:
  Run(const Program& program, std::vector<TensorOwner> tensors,
      const std::vector<std::int64_t>& sizes, bool is_unseen)
      : program_(program), is_unseen_(is_unseen), values_(std::move(tensors)), sizes_(sizes) {
    values_.resize(program.tensor_slots);
    sizes_.resize(program.size_slots);
    stack_.resize(program.largest_stack);
    if (program.takes_arena) arena_ = Arena::take();
    if (arena_ && !program.places.empty()) plan();
    const std::int64_t threads = Team::of_this_thread() ? 1 : available_threads();
    while (next_ < program.steps.size() && holds_) {
      const std::int64_t before = kernels_split;
      if (threads > 1 && program.steps[next_].gathers && stays(program.steps[next_])) {
        run_stretch(threads);
      } else {
        holds_ = run(program.steps[next_++]);
      }
      if (kernels_split != before) set_apart(threads);
    }
  }

  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  ~Run() {
    if (!arena_) return;
    values_.clear();
    for (std::size_t step : arena_->held_steps()) program_.leaves[step] = true;
    program_.arena_bytes = arena_->needed();
    program_.result_bytes = arena_->asked();
  }

  // Whether all values were those that the program requires; there are no outputs else.
  bool holds() const { return holds_; }

  std::vector<TensorOwner> outputs() {
    std::vector<TensorOwner> found;
    for (std::int32_t slot : program_.outputs) found.push_back(share(handle(slot)));
    return found;
  }

  std::vector<std::int64_t> size_outputs() const {
    std::vector<std::int64_t> found;
    for (std::int32_t slot : program_.size_outputs) found.push_back(sizes_[slot]);
    return found;
  }

 private:
  // A tensor: an input, a constant, or what a step made.
  AtenTensorHandle handle(std::int32_t slot) const {
    const std::int32_t constant = slot - program_.tensor_inputs;
    const bool is_constant =
        constant >= 0 && constant < static_cast<std::int32_t>(program_.constants.size());
    const TensorOwner& value = is_constant ? program_.constants[constant] : values_[slot];
    if (!value.get()) refuse("a result that is taken does not exist");
    return value.get();
  }

  // Has the arena hold all that is planned; without memory for it nothing is.
  void plan() {
    std::size_t total = 0;
    const bool is_known =
        lay_out(program_.places, program_.buffers, values_, sizes_, spots_, total);
    if (!is_known || total == 0 || !arena_->reserve(total)) spots_.clear();
  }

  // Runs the next steps, up to one that needs torch's own threads. A team pays where it spares more
  // than a region takes, which it does for the same sizes.
  void run_stretch(std::int64_t threads) {
    std::atomic<bool>& is_split = program_.is_split[next_];
    const Spared before = spared;
    const auto lead = [](void* data) {
      auto& run = *static_cast<Run*>(data);
      try {
        do {
          run.holds_ = run.run(run.program_.steps[run.next_++]);
        } while (run.holds_ && run.next_ < run.program_.steps.size() &&
                 run.stays(run.program_.steps[run.next_]));
      } catch (...) {
        run.error_ = std::current_exception();
      }
    };
    if (is_split.load(std::memory_order_relaxed)) {
      Team::gather(threads, lead, this);
    } else {
      lead(this);
    }
    const bool pays =
        spared.kernels - before.kernels > 1 && spared.bytes - before.bytes >= region_bytes(threads);
    is_split.store(pays, std::memory_order_relaxed);
    if (error_) std::rethrow_exception(error_);
  }

  // Whether a step is as fast while this thread leads a team: torch's operators on so little that
  // they split no work are, and ours where they do not call torch's (for float64).
  bool stays(const Step& step) {
    static const std::int32_t float64 = aoti_torch_dtype_float64();
    if (step.threads == Threads::kOne) return true;
    bool does = true;
    const auto look = [&](std::int32_t slot) {
      const AtenTensorHandle tensor = handle(slot);
      std::int64_t count = 0;
      std::int32_t dtype = 0;
      if (step.threads == Threads::kTeam) {
        check_call(aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
        does = does && dtype != float64;
      } else {
        check_call(aoti_torch_get_numel(tensor, &count), "get_numel");
        does = does && count <= kLittle;
      }
    };
    for (const Argument& each : step.arguments) for_each_tensor(each, look);
    return does;
  }

  // Returns whether the program goes on.
  bool run(const Step& step) {
    switch (step.kind) {
      case Kind::kRequire:
        if (!is_same(handle(step.arguments[0].slot), handle(step.arguments[1].slot))) return false;
        break;
      case Kind::kSize:
        sizes_[step.results[0]] = extent(step);
        break;
      case Kind::kArithmetic:
        sizes_[step.results[0]] = arithmetic(step);
        break;
      case Kind::kAdd:
        add(step);
        break;
      case Kind::kResample:
        resample(step);
        break;
      case Kind::kOperator:
        call(step);
        break;
    }
    for (std::int32_t slot : step.dead) values_[slot].clear();
    return true;
  }

  // Whether two tensors hold the same bits, as contiguous ones of one dtype.
  static bool is_same(AtenTensorHandle value, AtenTensorHandle wanted) {
    std::array<std::int64_t, 2> bytes{};
    std::array<std::int32_t, 2> dtypes{};
    std::array<void*, 2> data{};
    const std::array<AtenTensorHandle, 2> both{value, wanted};
    for (std::size_t i = 0; i < 2; ++i) {
      bool is_contiguous = false;
      check_call(aoti_torch_is_contiguous(both[i], &is_contiguous), "is_contiguous");
      check_call(aoti_torch_get_numel(both[i], &bytes[i]), "get_numel");
      check_call(aoti_torch_get_dtype(both[i], &dtypes[i]), "get_dtype");
      check_call(aoti_torch_get_data_ptr(both[i], &data[i]), "get_data_ptr");
      if (!is_contiguous) return false;
      bytes[i] *= static_cast<std::int64_t>(aoti_torch_dtype_element_size(dtypes[i]));
    }
    return bytes[0] == bytes[1] && dtypes[0] == dtypes[1] &&
           std::memcmp(data[0], data[1], bytes[0]) == 0;
  }

  void call(const Step& step) {
    if (is_unseen_ && step.view != ViewKind::none && view(step)) return;
    const std::size_t place = &step - program_.steps.data();
    const bool stays =
        step.own && arena_ && !program_.leaves[place].load(std::memory_order_relaxed);
    const bool is_planned = !spots_.empty() && step.places > 0;
    const Arena::Use memory(stays ? arena_.get() : nullptr, place,
                            is_planned ? spots_.data() + step.first_place : nullptr,
                            is_planned ? step.places : 0);
    try {
      if (is_unseen_ && !step.lent.empty() && lend(step)) return;
      if (step.check) step.check(given_to(step));
      for (std::size_t i = 0; i < step.arguments.size(); ++i) stack_[i] = boxed(step.arguments[i]);
      if (is_unseen_ && step.own) {
        step.own->boxed(stack_.data(), stack_.size(), step.results.size());
      } else {
        call_operator(step.name.c_str(), step.overload.c_str(), stack_.data());
      }
    } catch (const std::exception& error) {
      refuse(step.name + " fails: " + reason(error));
    }
    if (step.returns_list) {
      std::vector<Tensor> parts = unboxing::Take<std::vector<Tensor>>::from(stack_[0]);
      if (parts.size() != step.results.size()) refuse(step.name + " returns another count");
      for (std::size_t i = 0; i < parts.size(); ++i) keep(step.results[i], parts[i].release());
      return;
    }
    for (std::size_t i = 0; i < step.results.size(); ++i) {
      keep(step.results[i], reinterpret_cast<AtenTensorHandle>(stack_[i]));
    }
  }

  // Calls our operator with what is here; returns whether it does it like that.
  bool lend(const Step& step) {
    lent_.assign(step.lent.begin(), step.lent.end());
    for (const Step::Place& each : step.lent_tensors)
      lent_[each.argument].tensor = handle(each.slot);
    for (const Step::Place& each : step.lent_sizes) {
      lent_[each.argument].number = torch::stable::detail::from(sizes_[each.slot]);
    }
    AtenTensorHandle result = nullptr;
    if (!step.own->lent(lent_.data(), &result)) return false;
    keep(step.results[0], result);
    return true;
  }

  // Returns whether the view is made; else torch has to.
  bool view(const Step& step) {
    std::array<std::int64_t, kMostOfView> numbers{};
    std::size_t count = 0;
    const bool is_list = step.arguments.size() > 1 && step.arguments[1].kind == Argument::kList;
    const std::vector<Argument>& given = is_list ? step.arguments[1].items : step.arguments;
    for (std::size_t i = is_list ? 0 : 1; i < given.size(); ++i) {
      const Argument& each = given[i].kind == Argument::kSome ? given[i].items[0] : given[i];
      if (count == numbers.size()) return false;
      numbers[count++] = each.kind == Argument::kNone ? kNoNumber : size(each);
    }
    const AtenTensorHandle made = made_view(step.view, handle(step.arguments[0].slot),
                                            {numbers.data(), static_cast<std::int64_t>(count)});
    if (made) keep(step.results[0], made);
    return made != nullptr;
  }

  // What torch says of an error; through this way in it says nothing of some.
  static std::string reason(const std::exception& error) {
    const std::string text = error.what();
    return text.empty() ? "the same call without torch.compile tells why" : text;
  }

  void keep(std::int32_t slot, AtenTensorHandle handle) {
    TensorOwner value(handle);
    if (slot >= 0) values_[slot] = std::move(value);
  }

  // a + alpha b: the stable ABI passes no `Scalar`, but has this function.
  void add(const Step& step) {
    AtenTensorHandle sum = nullptr;
    const double alpha = torch::stable::detail::to<double>(step.arguments[2].constant);
    check_call(aoti_torch_aten_subtract_Tensor(handle(step.arguments[0].slot),
                                               handle(step.arguments[1].slot), -alpha, &sum),
               "add");
    keep(step.results[0], sum);
  }

  void resample(const Step& step) {
    std::vector<std::int64_t> sizes;
    for (const Argument& each : step.arguments[2].items) sizes.push_back(size(each));
    const Argument& align = step.arguments[3];
    const bool aligns =
        align.kind == Argument::kConstant && torch::stable::detail::to<bool>(align.constant);
    try {
      keep(step.results[0], resampled(handle(step.arguments[0].slot),
                                      *Resampling::find(step.arguments[1].text), sizes, aligns));
    } catch (const std::exception& error) {
      refuse("resample fails: " + reason(error));
    }
  }

  std::int64_t extent(const Step& step) {
    const AtenTensorHandle tensor = handle(step.arguments[0].slot);
    std::int64_t dim = 0, at = static_cast<std::int64_t>(step.arguments[1].constant);
    std::int64_t* sizes = nullptr;
    check_call(aoti_torch_get_dim(tensor, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
    if (at < -dim || at >= dim) refuse("a tensor has no such dimension");
    return sizes[at < 0 ? at + dim : at];
  }

  static std::int64_t negative(std::int64_t value) {
    return static_cast<std::int64_t>(0 - static_cast<std::uint64_t>(value));
  }

  std::int64_t arithmetic(const Step& step) const {
    const std::int64_t a = size(step.arguments[0]), b = size(step.arguments[1]);
    const bool divides = step.arithmetic == '/' || step.arithmetic == '%';
    if (divides && b == 0) refuse("division by zero");
    // The processor traps where a quotient is out of range.
    if (divides && b == -1) return step.arithmetic == '/' ? negative(a) : 0;
    switch (step.arithmetic) {
      case '+':
        return a + b;
      case '-':
        return a - b;
      case '*':
        return a * b;
      case '/':  // rounds down, as Python does
        return a / b - (a % b != 0 && (a < 0) != (b < 0));
      case '%':
        return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
      case '<':
        return std::min(a, b);
      default:
        return std::max(a, b);
    }
  }

  std::int64_t size(const Argument& argument) const {
    return argument.kind == Argument::kSize ? sizes_[argument.slot]
                                            : static_cast<std::int64_t>(argument.constant);
  }

  // The arguments of a step, as its check takes them.
  std::vector<Given> given_to(const Step& step) const {
    std::vector<Given> found(step.arguments.size());
    for (std::size_t i = 0; i < found.size(); ++i) add(step.arguments[i], found[i]);
    return found;
  }

  void add(const Argument& argument, Given& to) const {
    if (argument.kind == Argument::kTensor) {
      std::int64_t dim = 0;
      std::int64_t* sizes = nullptr;
      const AtenTensorHandle tensor = handle(argument.slot);
      check_call(aoti_torch_get_dim(tensor, &dim), "get_dim");
      check_call(aoti_torch_get_sizes(tensor, &sizes), "get_sizes");
      to.tensors.push_back(tensor);
      to.shapes.emplace_back(sizes, sizes + dim);
    } else if (argument.kind == Argument::kConstant) {
      to.numbers.push_back(argument.constant);
    } else if (argument.kind == Argument::kSize) {
      to.numbers.push_back(torch::stable::detail::from(sizes_[argument.slot]));
    }
    for (const Argument& item : argument.items) add(item, to);
  }

  // What the stack of a call holds for an argument; the callee owns it.
  StableIValue boxed(const Argument& argument) {
    switch (argument.kind) {
      case Argument::kConstant:
        return argument.constant;
      case Argument::kTensor:
        return torch::stable::detail::from(share(handle(argument.slot)).release());
      case Argument::kSize:
        return torch::stable::detail::from(sizes_[argument.slot]);
      case Argument::kText:
        return text_of(argument.text);
      case Argument::kNone:
        return torch::stable::detail::from(std::nullopt);
      case Argument::kSome:
        return torch::stable::detail::from(std::optional<StableIValue>(boxed(argument.items[0])));
      case Argument::kList:
        break;
    }
    StableListHandle list = nullptr;
    check_call(torch_new_list_reserve_size(argument.items.size(), &list), "new_list");
    for (const Argument& item : argument.items) {
      check_call(torch_list_push_back(list, boxed(item)), "list_push_back");
    }
    return torch::stable::detail::from(list);
  }

  // Elements up to which torch's operators work on one thread.
  static constexpr std::int64_t kLittle = 2048;

  const Program& program_;
  const bool is_unseen_;
  bool holds_ = true;
  std::size_t next_ = 0;
  std::exception_ptr error_;
  Arena::Owner arena_;
  std::vector<Arena::Spot> spots_;  // of the plan's places
  std::vector<TensorOwner> values_;
  std::vector<std::int64_t> sizes_;
  std::vector<StableIValue> stack_;
  std::vector<lending::Argument> lent_;
};

std::vector<TensorOwner> values_of(StableIValue list) {
  std::vector<Tensor> tensors = unboxing::Take<std::vector<Tensor>>::from(list);
  std::vector<TensorOwner> values;
  values.reserve(tensors.size());
  for (Tensor& tensor : tensors) values.emplace_back(tensor.release());
  return values;
}

void load_program(StableIValue* stack, uint64_t, uint64_t) {
  const std::string text = unboxing::Take<std::string>::from(stack[0]);
  Program* program = read_program(text, values_of(stack[1])).release();
  stack[0] = static_cast<StableIValue>(reinterpret_cast<std::uintptr_t>(program));
}

}  // namespace

void run_program(StableIValue* stack, uint64_t, uint64_t) {
  const auto* program = reinterpret_cast<const Program*>(static_cast<std::uintptr_t>(stack[0]));
  std::vector<TensorOwner> tensors = values_of(stack[1]);
  const auto sizes = unboxing::Take<std::vector<std::int64_t>>::from(stack[2]);
  const bool is_unseen = torch::stable::detail::to<bool>(stack[3]);
  if (static_cast<std::int32_t>(tensors.size()) != program->tensor_inputs ||
      static_cast<std::int32_t>(sizes.size()) != program->size_inputs) {
    refuse("expected " + std::to_string(program->tensor_inputs) + " tensors and " +
           std::to_string(program->size_inputs) + " sizes, got " + std::to_string(tensors.size()) +
           " and " + std::to_string(sizes.size()));
  }
  const SignsAreRead signs_are_read;
  Run run(*program, std::move(tensors), sizes, is_unseen);
  stack[0] = torch::stable::detail::from(run.holds());
  stack[1] = list_of(run.holds() ? run.outputs() : std::vector<TensorOwner>());
  stack[2] = list_of(run.holds() ? run.size_outputs() : std::vector<std::int64_t>());
}

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("load_program(str text, Tensor[] constants) -> int");
  // Its results may be views of its inputs and of each other.
  library.def(
      "run_program(int program, Tensor(a -> *)[] tensors, int[] sizes, bool is_unseen=False) -> "
      "(bool, Tensor(a)[], int[])");
}

// Implicit: autograd asks of a kernel that it does not know that no result is a view.
STABLE_TORCH_LIBRARY_IMPL(oxytorch, CompositeImplicitAutograd, library) {
  library.impl("load_program", &load_program);
  library.impl("run_program", &run_program);
}

}  // namespace oxytorch::runtime

OXY_EXPORT void oxytorch_forget_program(void* program) {
  delete static_cast<oxytorch::runtime::Program*>(program);
}

OXY_EXPORT void oxytorch_program_memory(const void* program, std::int64_t* found) {
  const auto* which = static_cast<const oxytorch::runtime::Program*>(program);
  found[0] = which->arena_bytes;
  found[1] = which->result_bytes;
}
