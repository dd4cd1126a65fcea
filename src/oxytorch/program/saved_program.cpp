// Opens a file that `oxytorch.save` wrote and runs its program, without Python: what
// include/oxytorch/program.h calls. files.py and model.py do the same; files.py and
// core/described_file.py tell the format.
#include <algorithm>
#include <set>

#include "oxytorch/program_abi.h"
#include "program/conditions.h"
#include "program/program_check.h"
#include "program/saved_file.h"
#include "program/sha256.h"
#include "program/steps.h"

namespace oxytorch {

namespace {

using json::Kind;
using json::Value;

constexpr const char* kFormat = "oxytorch.program";
// Files of version 2 hold no plan of memory, those of version 1 no weights in panels, whose order
// belongs to the version.
constexpr const char* kVersions[] = {"3", "2", "1"};

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

struct Input {
  enum class Kind { tensor, size, fixed };
  Kind kind;
  std::string name;
  std::int32_t dtype = 0;
  std::string dtype_name;
  std::vector<std::int64_t> shape;  // -1 where a size may vary
};

struct Output {
  enum class Kind { tensor, size, input, state, fixed };
  Kind kind;
  std::int64_t place;
};

struct Write {
  bool is_state;
  std::int64_t place, tensor;
};

constexpr const char* kOutputs[] = {"tensor", "size", "input", "state", "fixed"};

const std::vector<Value>& list_in(const Value& entry, std::size_t least, const char* what) {
  const std::vector<Value>& items = entry.expect(Kind::list, what).items;
  if (items.size() < least) fail(std::string("expected more in ") + what);
  return items;
}

std::int64_t below(const Value& value, std::int64_t limit, const char* what) {
  const std::int64_t found = value.expect(Kind::integer, what).integer;
  if (found < 0 || found >= limit) fail(std::string("expected ") + what + " that exists");
  return found;
}

// Keys of a structure, as texts; those of fields are texts, and none is there twice.
void check_keys(const Value& keys, bool are_fields, std::size_t count) {
  std::set<std::string> seen;
  for (const Value& key : keys.expect(Kind::list, "the keys of a structure").items) {
    const bool is_number = key.kind == Kind::integer && !are_fields;
    if (!is_number && key.kind != Kind::text) fail("expected keys that are texts or integers");
    seen.insert(is_number ? std::to_string(key.integer) : '"' + key.text);
  }
  if (keys.items.size() != count || seen.size() != count) fail("expected different keys");
}

// The leaves of a structure.
std::int64_t leaves(const Value& structure, int depth = 0) {
  if (structure.kind == Kind::text && structure.text == "leaf") return 1;
  const std::vector<Value>& items = list_in(structure, 3, "a structure");
  const std::string kind = items[0].kind == Kind::text ? items[0].text : "";
  const bool has_keys = kind == "dict" || kind == "fields";
  if (items.size() != 3 || depth > 50 || !(has_keys || kind == "tuple" || kind == "list")) {
    fail("expected a structure: a tuple, list, dict or fields");
  }
  const std::vector<Value>& parts = items[2].expect(Kind::list, "parts of a structure").items;
  check_keys(items[1], kind == "fields", has_keys ? parts.size() : 0);
  std::int64_t count = 0;
  for (const Value& part : parts) count += leaves(part, depth + 1);
  return count;
}

// Whether a structure is that of a call: positional arguments and named ones.
bool is_call(const Value& structure) {
  const auto is = [](const Value& each, const char* kind) {
    return each.kind == Kind::list && each.items[0].text == kind;
  };
  if (!is(structure, "tuple")) return false;
  const std::vector<Value>& parts = structure.items[2].items;
  return parts.size() == 2 && is(parts[0], "tuple") && is(parts[1], "dict");
}

}  // namespace

class SavedProgram {
 public:
  SavedProgram(const std::string& path, bool verifies, OperatorTypes types) {
    const SavedFile file(path);
    const Value description = described(file.metadata());
    if (verifies) verify(file, description);
    const std::string& text = description.at("program", Kind::text).text;
    const ProgramCounts counts = check_program(text, types);
    std::vector<TensorOwner> constants = tensors_in(file, description, "constants");
    state_ = tensors_in(file, description, "state");
    read_interface(description, counts);
    const auto tensors = static_cast<std::int64_t>(state_.size()) + count(Input::Kind::tensor);
    if (tensors != counts.tensors || count(Input::Kind::size) != counts.sizes ||
        static_cast<std::int64_t>(constants.size()) != counts.constants) {
      fail("the program takes other tensors, sizes or constants than the file has");
    }
    program_ = runtime::read_program(text, std::move(constants));
  }

  // Hands over the results, each an own reference.
  void run(const std::vector<AtenTensorHandle>& given, const std::vector<std::int64_t>& sizes,
           OxytorchTake take, void* into) const {
    check_call_of(given, sizes);
    std::vector<TensorOwner> tensors;
    for (const TensorOwner& each : state_) tensors.push_back(share(each.get()));
    for (AtenTensorHandle each : given) tensors.push_back(share(each));
    StableIValue stack[4] = {
        static_cast<StableIValue>(reinterpret_cast<std::uintptr_t>(program_.get())),
        list_of(std::move(tensors)), list_of(sizes), torch::stable::detail::from(false)};
    // Not through torch_call_dispatcher: torch 2.13 mixes up the types of several results there.
    runtime::run_program(stack, 4, 3);
    if (!torch::stable::detail::to<bool>(stack[0])) fail("a value is not the one that it requires");
    const auto numbers = unboxing::Take<std::vector<std::int64_t>>::from(stack[2]);
    std::vector<Tensor> made = unboxing::Take<std::vector<Tensor>>::from(stack[1]);
    for (const Write& each : writes_) {
      StableIValue copy[3] = {
          torch::stable::detail::from(
              share(each.is_state ? state_[each.place].get() : given[places_[each.place]])
                  .release()),
          torch::stable::detail::from(share(made[each.tensor].handle()).release()),
          torch::stable::detail::from(false)};
      call_operator("aten::copy_", "", copy);
      const TensorOwner written(reinterpret_cast<AtenTensorHandle>(copy[0]));
    }
    for (const Output& each : outputs_) {
      switch (each.kind) {
        case Output::Kind::tensor:
          take(into, share(made[each.place].handle()).release(), 0);
          break;
        case Output::Kind::size:
          take(into, nullptr, numbers[each.place]);
          break;
        case Output::Kind::input:
          if (inputs_[each.place].kind == Input::Kind::tensor) {
            take(into, share(given[places_[each.place]]).release(), 0);
          } else if (inputs_[each.place].kind == Input::Kind::size) {
            take(into, nullptr, sizes[places_[each.place]]);
          }
          break;
        case Output::Kind::state:
          take(into, share(state_[each.place].get()).release(), 0);
          break;
        case Output::Kind::fixed:
          break;
      }
    }
  }

  // One line for each input: what it is, and its name.
  const char* inputs() const { return shown_inputs_.c_str(); }

 private:
  std::int64_t count(Input::Kind kind) const {
    return std::ranges::count_if(inputs_, [&](const Input& each) { return each.kind == kind; });
  }

  static Value described(const Value& metadata) {
    const Value* format = metadata.find("format");
    if (!format || format->text != kFormat) {
      fail(
          "expected a program that oxytorch.save wrote, got another safetensors file (those of "
          "language "
          "models are read by Python alone)");
    }
    const std::string& version = metadata.at("version", Kind::text).text;
    if (std::ranges::find(kVersions, version) == std::end(kVersions)) {
      fail(std::string("expected version ") + kVersions[0] + " or 2 or 1, got '" +
           version.substr(0, 50) + "'; a newer oxytorch may read it");
    }
    const std::string& content = metadata.at("description", Kind::text).text;
    if (sha256(content.data(), content.size()) != metadata.at("sha256", Kind::text).text) {
      fail("expected a description with the sha256 beside it, got another; the file was altered");
    }
    Value made = json::read(content);
    made.expect(Kind::object, "the description");
    return made;
  }

  static void verify(const SavedFile& file, const Value& description) {
    const Value& hashes = description.at("sha256", Kind::object);
    for (const auto& [name, place] : file.places()) {
      const std::string found =
          sha256(file.bytes(place), static_cast<std::size_t>(place.end - place.begin));
      if (found != hashes.at(name, Kind::text).text) {
        fail("expected tensor '" + name + "' to have the sha256 that was written, got another");
      }
    }
  }

  static std::vector<TensorOwner> tensors_in(const SavedFile& file, const Value& description,
                                             const char* key) {
    std::vector<TensorOwner> found;
    for (const Value& entry : description.at(key, Kind::list).items) {
      const std::string& name = entry.at("tensor", Kind::text).text;
      const auto place = file.places().find(name);
      if (place == file.places().end()) fail("expected a tensor '" + name + "', got none");
      const std::vector<Value>& shape = entry.at("shape", Kind::list).items;
      std::vector<std::int64_t> order;
      std::vector<bool> seen(shape.size());
      bool is_right = entry.at("dtype", Kind::text).text == place->second.dtype &&
                      shape.size() == place->second.shape.size();
      for (const Value& dim : entry.at("order", Kind::list).items) {
        const std::int64_t at = below(dim, static_cast<std::int64_t>(shape.size()), "a dimension");
        is_right = is_right && !seen[at] && order.size() < shape.size() &&
                   shape[at].kind == Kind::integer &&
                   shape[at].integer == place->second.shape[order.size()];
        seen[at] = true;
        order.push_back(at);
      }
      if (!is_right || order.size() != shape.size()) {
        fail("tensor '" + name + "' is of another dtype or shape than the description says");
      }
      found.push_back(file.tensor(place->second, order));
    }
    return found;
  }

  void read_interface(const Value& description, const ProgramCounts& counts) {
    for (const Value& entry : description.at("inputs", Kind::list).items) read_input(entry);
    const auto inputs = static_cast<std::int64_t>(inputs_.size());
    const Value* arguments = description.find("arguments");
    const Value* results = description.find("results");
    if (!arguments || leaves(*arguments) != inputs || !is_call(*arguments)) {
      fail("expected arguments with a leaf for each input");
    }
    const std::int64_t limits[] = {counts.tensor_results, counts.size_results, inputs,
                                   static_cast<std::int64_t>(state_.size())};
    for (const Value& entry : description.at("outputs", Kind::list).items) {
      const std::vector<Value>& items = list_in(entry, 2, "an output");
      const auto kind = std::ranges::find(kOutputs, items[0].expect(Kind::text, "a kind").text);
      if (kind == std::end(kOutputs)) fail("expected an output of a known kind");
      const auto at = kind - std::begin(kOutputs);
      outputs_.push_back(
          {static_cast<Output::Kind>(at), at < 4 ? below(items[1], limits[at], "an output") : 0});
    }
    if (!results || leaves(*results) != static_cast<std::int64_t>(outputs_.size())) {
      fail("expected a result with a leaf for each output");
    }
    for (const Value& entry : description.at("writes", Kind::list).items) {
      const std::vector<Value>& items = list_in(entry, 3, "a write");
      const std::string& kind = items[0].expect(Kind::text, "a kind").text;
      if (kind != "state" && kind != "input") fail("expected a write to input or state");
      const bool is_state = kind == "state";
      const std::int64_t place = below(items[1], limits[is_state ? 3 : 2], "a tensor");
      if (!is_state && inputs_[place].kind != Input::Kind::tensor) fail("expected a tensor");
      writes_.push_back({is_state, place, below(items[2], limits[0], "a tensor")});
    }
    conditions_ = description.at("conditions", Kind::list).items;
    const std::vector<InputSizes> kinds = sizes_of(nullptr, nullptr);
    for (const Value& each : conditions_) check_condition(each, kinds);
  }

  void read_input(const Value& entry) {
    const std::vector<Value>& items = list_in(entry, 2, "an input");
    const std::string& kind = items[0].expect(Kind::text, "a kind").text;
    Input made{Input::Kind::fixed, items[1].expect(Kind::text, "a name").text, 0, "", {}};
    if (kind == "tensor") {
      made.kind = Input::Kind::tensor;
      list_in(entry, 4, "an input");
      made.dtype_name = items[2].expect(Kind::text, "a dtype").text;
      made.dtype = dtype_code(made.dtype_name);
      for (const Value& size : items[3].expect(Kind::list, "a shape").items) {
        const bool varies = size.kind == Kind::null;
        made.shape.push_back(varies ? -1 : below(size, std::int64_t{1} << 62, "a size"));
      }
    } else if (kind == "size") {
      made.kind = Input::Kind::size;
    } else if (kind != "fixed") {
      fail("expected an input that is a tensor, a size or fixed");
    }
    places_.push_back(made.kind == Input::Kind::fixed ? -1 : count(made.kind));
    shown_inputs_ += kind + " " + made.name + "\n";
    inputs_.push_back(std::move(made));
  }

  static std::int32_t dtype_code(const std::string& name) {
    const std::int32_t code = dtype_of(name);
    if (code < 0) fail("expected a dtype of torch, got '" + name.substr(0, 50) + "'");
    return code;
  }

  // Shapes and numbers of a call; without one, only their kinds.
  std::vector<InputSizes> sizes_of(const std::vector<std::vector<std::int64_t>>* shapes,
                                   const std::vector<std::int64_t>* sizes) const {
    std::vector<InputSizes> found;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      InputSizes each;
      each.is_tensor = inputs_[i].kind == Input::Kind::tensor;
      if (each.is_tensor) each.shape = shapes ? (*shapes)[places_[i]] : inputs_[i].shape;
      if (inputs_[i].kind == Input::Kind::size && sizes) each.value = (*sizes)[places_[i]];
      found.push_back(std::move(each));
    }
    return found;
  }

  void check_call_of(const std::vector<AtenTensorHandle>& given,
                     const std::vector<std::int64_t>& sizes) const {
    if (static_cast<std::int64_t>(given.size()) != count(Input::Kind::tensor) ||
        static_cast<std::int64_t>(sizes.size()) != count(Input::Kind::size)) {
      fail("expected " + std::to_string(count(Input::Kind::tensor)) + " tensors and " +
           std::to_string(count(Input::Kind::size)) + " sizes, got " +
           std::to_string(given.size()) + " and " + std::to_string(sizes.size()));
    }
    std::vector<std::vector<std::int64_t>> shapes;
    std::vector<std::string> names;
    for (const Input& each : inputs_) {
      names.push_back(each.name);
      if (each.kind == Input::Kind::tensor) shapes.push_back(checked(each, given[shapes.size()]));
    }
    const std::vector<InputSizes> found = sizes_of(&shapes, &sizes);
    for (const Value& each : conditions_) {
      if (!holds(each, found)) {
        fail("expected sizes with " + shown(each, names) + ", as the model was exported");
      }
    }
  }

  // The shape of a tensor. It has to be a dense one on the CPU, of the dtype and the fixed sizes.
  static std::vector<std::int64_t> checked(const Input& input, AtenTensorHandle handle) {
    std::int32_t device = 0, layout = 0, dtype = 0;
    std::int64_t dim = 0;
    std::int64_t* sizes = nullptr;
    check_call(aoti_torch_get_device_type(handle, &device), "get_device_type");
    check_call(aoti_torch_get_layout(handle, &layout), "get_layout");
    check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
    if (device != aoti_torch_device_type_cpu() || layout != aoti_torch_layout_strided() ||
        dtype != input.dtype) {
      fail("expected " + input.name + " to be a strided " + input.dtype_name +
           " tensor on the CPU, got another");
    }
    check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
    bool fits = dim == static_cast<std::int64_t>(input.shape.size());
    for (std::int64_t i = 0; fits && i < dim; ++i) {
      fits = input.shape[i] < 0 || input.shape[i] == sizes[i];
    }
    if (!fits) {
      std::string wanted, got;
      for (std::int64_t size : input.shape)
        wanted += (size < 0 ? "any" : std::to_string(size)) + " ";
      for (std::int64_t i = 0; i < dim; ++i) got += std::to_string(sizes[i]) + " ";
      fail("expected " + input.name + " of shape [ " + wanted + "], got [ " + got +
           "]; export or save the model with dynamic_shapes to have other sizes");
    }
    return {sizes, sizes + dim};
  }

  std::unique_ptr<const runtime::Program> program_;
  std::vector<TensorOwner> state_;
  std::vector<Input> inputs_;
  std::vector<std::int64_t> places_;  // of each input, among those of its kind
  std::vector<Output> outputs_;
  std::vector<Write> writes_;
  std::vector<Value> conditions_;
  std::string shown_inputs_;
};

namespace {

thread_local std::string last_error;

// Whether `run` returns; else its error is kept for this thread.
template <class Run>
bool succeeds(const Run& run) {
  try {
    run();
    return true;
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return false;
}

}  // namespace

}  // namespace oxytorch

using oxytorch::SavedProgram;

OXY_PROGRAM_ABI OxytorchProgram* oxytorch_program_open(const char* path, int verifies,
                                                       OxytorchOperatorTypes types) {
  SavedProgram* made = nullptr;
  const auto open = [&] { made = new SavedProgram(path, verifies != 0, types); };
  if (!oxytorch::succeeds(open)) {
    oxytorch::last_error = std::string(path) + ": " + oxytorch::last_error;
  }
  return reinterpret_cast<OxytorchProgram*>(made);
}

OXY_PROGRAM_ABI int oxytorch_program_run(const OxytorchProgram* program, void* const* tensors,
                                         size_t tensor_count, const int64_t* sizes,
                                         size_t size_count, OxytorchTake take, void* into) {
  return oxytorch::succeeds([&] {
    std::vector<AtenTensorHandle> given;
    for (size_t i = 0; i < tensor_count; ++i) {
      given.push_back(static_cast<AtenTensorHandle>(tensors[i]));
    }
    reinterpret_cast<const SavedProgram*>(program)->run(given, {sizes, sizes + size_count}, take,
                                                        into);
  });
}

OXY_PROGRAM_ABI const char* oxytorch_program_inputs(const OxytorchProgram* program) {
  return reinterpret_cast<const SavedProgram*>(program)->inputs();
}

OXY_PROGRAM_ABI void oxytorch_program_close(OxytorchProgram* program) {
  delete reinterpret_cast<SavedProgram*>(program);
}

OXY_PROGRAM_ABI const char* oxytorch_program_error() { return oxytorch::last_error.c_str(); }
