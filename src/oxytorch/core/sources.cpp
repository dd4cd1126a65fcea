// Compares what derived values were made from with what it was then (core/sources.py).
//
// A model has thousands of places to look at in each call: entries of the dictionaries that Python
// keeps modules, parameters and hooks in, versions of tensors, and the values of small ones. They
// are handed over once; afterwards one call compares them all.
#include "core/sources.h"

#include <memory>

#include "core/export.h"

namespace oxytorch {

namespace {

// Tensors that are compared by version, by their values, and by form.
void add_tensor(Sources& to, int kind, AtenTensorHandle handle) {
  if (kind == 0) to.versions.push_back(version_of(handle));
  if (kind == 1) to.values.push_back(values_of(handle));
  if (kind == 2) to.forms.push_back(form_of(handle));
}

void sources(StableIValue* stack, uint64_t, uint64_t) {
  auto made = std::make_unique<Sources>();
  for (int kind = 0; kind < 3; ++kind) {
    for (Tensor& tensor : unboxing::Take<std::vector<Tensor>>::from(stack[kind])) {
      add_tensor(*made, kind, tensor.handle());
      made->owned.push_back(std::move(tensor));
    }
  }
  stack[0] = static_cast<StableIValue>(reinterpret_cast<std::uintptr_t>(made.release()));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(oxytorch, library) {
  library.def("sources(Tensor[] versioned, Tensor[] small, Tensor[] formed) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(oxytorch, CompositeExplicitAutograd, library) {
  library.impl("sources", &sources);
}

}  // namespace oxytorch

OXY_EXPORT int oxytorch_can_compare_sources() {
  using namespace oxytorch;
  return python().is_whole() && version_function();
}

// Objects belong to the caller, who keeps them alive.
OXY_EXPORT void oxytorch_add_entries(void* made, void** dicts, void** keys, void** values,
                                     std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    Table& table = static_cast<Sources*>(made)->table_of(static_cast<PyObject*>(dicts[i]));
    table.entries.push_back({static_cast<PyObject*>(keys[i]), static_cast<PyObject*>(values[i])});
  }
}

OXY_EXPORT void oxytorch_add_present(void* made, void** dicts, void** keys, std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    Table& table = static_cast<Sources*>(made)->table_of(static_cast<PyObject*>(dicts[i]));
    table.present.push_back(static_cast<PyObject*>(keys[i]));
  }
}

OXY_EXPORT void oxytorch_add_sizes(void* made, void** dicts, const std::int64_t* counts,
                                   std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    Table& table = static_cast<Sources*>(made)->table_of(static_cast<PyObject*>(dicts[i]));
    const auto size = static_cast<std::intptr_t>(counts[i]);
    table.count = table.count < 0 || table.count == size ? size : kNever;
  }
}

OXY_EXPORT void oxytorch_add_types(void* made, void** objects, void** types, std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    static_cast<Sources*>(made)->types.push_back(
        {static_cast<PyObject*>(objects[i]), static_cast<PyObject*>(types[i])});
  }
}

// places: where each one keeps its dictionary.
OXY_EXPORT void oxytorch_add_bare(void* made, void** objects, const std::int64_t* places,
                                  std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    static_cast<oxytorch::Sources*>(made)->bare.push_back(
        {static_cast<oxytorch::PyObject*>(objects[i]), places[i]});
  }
}

// Tensors as Python's objects, which have them at `place`. Torch swaps only tensors that nothing
// but such an object refers to.
OXY_EXPORT void oxytorch_add_tensors(void* made, void** objects, int kind, std::int64_t place,
                                     std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    auto handle = reinterpret_cast<AtenTensorHandle>(static_cast<char*>(objects[i]) + place);
    try {
      add_tensor(*static_cast<Sources*>(made), kind, handle);
    } catch (const std::exception&) {
      static_cast<Sources*>(made)->is_lost = true;
    }
  }
}

// of_classes: whether all objects are classes.
OXY_EXPORT void oxytorch_add_attributes(void* made, void** objects, void** names, void** values,
                                        int of_classes, std::int64_t count) {
  using namespace oxytorch;
  auto* sources = static_cast<Sources*>(made);
  for (std::int64_t i = 0; i < count; ++i) {
    auto* object = static_cast<PyObject*>(objects[i]);
    auto* name = static_cast<PyObject*>(names[i]);
    auto* value = static_cast<PyObject*>(values[i]);
    if (of_classes) {
      sources->class_named(object).attributes.push_back({name, value, value});
    } else {
      sources->attributes.push_back({object, {name, value}});
    }
  }
}

// Of each function, its code and defaults are to stay what they are now.
OXY_EXPORT void oxytorch_add_functions(void* made, void** functions, std::int64_t count) {
  using namespace oxytorch;
  const Python& api = python();
  for (std::int64_t i = 0; i < count; ++i) {
    auto* function = static_cast<PyObject*>(functions[i]);
    static_cast<Sources*>(made)->functions.push_back({function, api.code_of(function),
                                                      api.defaults_of(function),
                                                      api.keyword_defaults_of(function)});
  }
}

namespace {

oxytorch::Container container_of(void* object, void** items, std::int64_t count) {
  oxytorch::Container made{static_cast<oxytorch::PyObject*>(object), {}};
  for (std::int64_t i = 0; i < count; ++i) {
    made.items.push_back(static_cast<oxytorch::PyObject*>(items[i]));
  }
  return made;
}

}  // namespace

OXY_EXPORT void oxytorch_add_lists(void* made, void* list, void** items, std::int64_t count) {
  static_cast<oxytorch::Sources*>(made)->lists.push_back(container_of(list, items, count));
}

OXY_EXPORT void oxytorch_add_orders(void* made, void* dict, void** keys, std::int64_t count) {
  static_cast<oxytorch::Sources*>(made)->orders.push_back(container_of(dict, keys, count));
}

OXY_EXPORT void oxytorch_add_sets(void* made, void* set, void** items, std::int64_t count) {
  static_cast<oxytorch::Sources*>(made)->sets.push_back(container_of(set, items, count));
}

// Called when all is added.
OXY_EXPORT void oxytorch_close_sources(void* made) {
  static_cast<oxytorch::Sources*>(made)->close();
}

namespace {

constexpr char kCapsule[] = "oxytorch.sources";

// Whether they are current, as a method of Python without arguments.
oxytorch::PyObject* are_current(oxytorch::PyObject* self, oxytorch::PyObject*) {
  const oxytorch::Python& api = oxytorch::python();
  bool found = false;
  try {
    found = static_cast<oxytorch::Sources*>(api.held_by(self, kCapsule))->are_current();
  } catch (const std::exception&) {
    // A tensor that cannot be asked any more is not what it was.
  }
  return api.boolean(found);
}

void forget(oxytorch::PyObject* capsule) {
  delete static_cast<oxytorch::Sources*>(oxytorch::python().held_by(capsule, kCapsule));
}

}  // namespace

// A function of Python that compares them, and keeps them as long as it lives.
OXY_EXPORT oxytorch::PyObject* oxytorch_sources_function(void* made) {
  using namespace oxytorch;
  static MethodDefinition definition = {"are_current", &are_current, kNoArguments, nullptr};
  const Python& api = python();
  PyObject* capsule = api.capsule(made, kCapsule, &forget);
  PyObject* function = capsule ? api.function(&definition, capsule, nullptr) : nullptr;
  if (capsule) api.release(capsule);
  return function;
}
