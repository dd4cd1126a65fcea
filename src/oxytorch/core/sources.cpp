// Compares what derived values were made from with what it was then (core/sources.py).
//
// A model has thousands of places to look at in each call: entries of the dictionaries that Python
// keeps modules, parameters and hooks in, versions of tensors, and the values of small ones. They
// are handed over once; afterwards one call compares them all.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/export.h"
#include "core/process.h"
#include "core/python.h"
#include "core/torch_api.h"

namespace oxytorch {

namespace {

constexpr std::size_t kLine = 64;

struct Entry {
  PyObject *dict, *key, *value;  // value null: no such entry
};

struct Size {
  PyObject* dict;
  std::intptr_t count;
};

// What is asked of one dictionary: its size, unless -1, and entries from one number to another.
struct Table {
  PyObject* dict;
  const void* tag;  // when all this held
  std::intptr_t count;
  std::size_t begin, end;
  std::vector<PyObject*> keys;  // in order; none where the order does not matter
};

struct Function {
  PyObject *function, *code, *defaults, *keyword_defaults;
};

struct Type {
  PyObject *object, *type;
};

struct Container {
  PyObject* object;
  std::vector<PyObject*> items;
};

struct Version {
  Tensor tensor;
  std::int64_t number;
  const void* address;
};

// Contiguous, on the CPU.
struct Values {
  Tensor tensor;
  std::int64_t count;
  std::vector<char> bytes;
};

struct Form {
  Tensor tensor;
  std::int32_t dtype;
  std::vector<std::int64_t> sizes, strides;
};

// Asked of torch, since a tensor may have been given other memory.
Form form_of(Tensor tensor) {
  AtenTensorHandle handle = tensor.handle();
  std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
  check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  return {std::move(tensor), dtype, {sizes, sizes + dim}, {strides, strides + dim}};
}

bool has_form(const Form& own) {
  AtenTensorHandle handle = own.tensor.handle();
  const std::size_t bytes = own.sizes.size() * sizeof(std::int64_t);
  std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t dtype = 0;
  check_call(aoti_torch_get_dim(handle, &dim), "get_dim");
  check_call(aoti_torch_get_dtype(handle, &dtype), "get_dtype");
  if (dim != static_cast<std::int64_t>(own.sizes.size()) || dtype != own.dtype) return false;
  check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
  check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
  return bytes == 0 || (std::memcmp(sizes, own.sizes.data(), bytes) == 0 &&
                        std::memcmp(strides, own.strides.data(), bytes) == 0);
}

std::int64_t element_count(AtenTensorHandle handle) {
  std::int64_t count = 0;
  check_call(aoti_torch_get_numel(handle, &count), "get_numel");
  return count;
}

struct Sources {
  std::vector<Entry> entries;
  mutable std::vector<Table> tables;  // which all entries are of; changed under Python's lock
  std::vector<Entry> present;         // that are there, and are not `value`
  std::vector<Size> sizes;            // of dictionaries without a table
  std::vector<Type> types;
  std::vector<Entry> attributes;  // of objects that keep no dictionary
  std::vector<Entry> in_classes;  // attributes that lie in a class, or in one that it comes from
  std::vector<Function> functions;
  std::vector<Container> orders;  // of dictionaries: their keys; those with a table have them there
  std::vector<Container> lists;
  std::vector<Container> sets;
  std::vector<Form> forms;
  std::vector<Version> versions;
  std::vector<Values> values;
  std::vector<const char*> lines;  // of memory that a look reads: a model's weights push them out

  void note_object(const void* object) { lines.push_back(static_cast<const char*>(object)); }

  void note_dict(PyObject* dict) {
    const Words& words = words_of(dict);
    note_object(dict);
    for (const char* part : {words.word[4], words.word[5]}) {
      for (std::size_t offset = 0; part && offset < 3 * kLine; offset += kLine) {
        note_object(part + offset);
      }
    }
  }

  // Called once everything is added.
  void close() {
    find_tables();
    find_class_attributes(python());
    note_lines(python().has_dict_tags);
  }

  bool are_current() const {
    for (const char* line : lines) __builtin_prefetch(line);
    return are_objects_same(python()) && are_containers_same(python()) && are_tensors_same();
  }

 private:
  void find_tables() {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const Entry& a, const Entry& b) { return a.dict < b.dict; });
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (tables.empty() || tables.back().dict != entries[i].dict) {
        tables.push_back({entries[i].dict, nullptr, -1, i, i, {}});
      }
      tables.back().end = i + 1;
    }
    const auto rest = std::remove_if(sizes.begin(), sizes.end(), [this](const Size& own) {
      Table* table = table_of(own.dict);
      if (!table || table->count >= 0) return false;
      table->count = own.count;
      return true;
    });
    sizes.erase(rest, sizes.end());
    // Other dictionaries than those of the class itself may keep an order that no tag tells of.
    const auto others = std::remove_if(orders.begin(), orders.end(), [this](Container& own) {
      Table* table = table_of(own.object);
      if (!table || class_of(own.object) != python().class_of_dicts) return false;
      table->keys = std::move(own.items);
      return true;
    });
    orders.erase(others, orders.end());
  }

  Table* table_of(const PyObject* dict) {
    const auto found = std::lower_bound(
        tables.begin(), tables.end(), dict,
        [](const Table& each, const PyObject* other) { return each.dict < other; });
    return found == tables.end() || found->dict != dict ? nullptr : &*found;
  }

  static bool has_order(const Python& api, PyObject* dict, const std::vector<PyObject*>& keys) {
    std::intptr_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    for (PyObject* wanted : keys) {
      if (!api.dict_next(dict, &position, &key, &value) || key != wanted) return false;
    }
    return true;
  }

  // Asking a class for an attribute looks into the class of the class first, which `type` is here.
  void find_class_attributes(const Python& api) {
    if (!api.in_class || !api.class_of_classes) return;
    const auto lies_elsewhere = [&api](const Entry& own) {
      return class_of(own.dict) != api.class_of_classes ||
             api.in_class(own.dict, own.key) != own.value;
    };
    const auto rest = std::stable_partition(attributes.begin(), attributes.end(), lies_elsewhere);
    in_classes.assign(rest, attributes.end());
    attributes.erase(rest, attributes.end());
  }

  void note_lines(bool has_dict_tags) {
    for (const Size& own : sizes) note_object(own.dict);
    for (const Table& own : tables) note_object(own.dict);
    for (const Entry& own : has_dict_tags ? std::vector<Entry>() : entries) {
      note_dict(own.dict);
      note_object(own.key);
    }
    for (const Entry& own : present) {
      note_dict(own.dict);
      note_object(own.key);
    }
    for (const Type& own : types) note_object(own.object);
    for (const Function& own : functions) {
      note_object(own.function);
      note_object(reinterpret_cast<const char*>(own.function) + kLine);
    }
    for (const Entry& own : attributes) {
      for (std::size_t offset = 0; offset < 8 * kLine; offset += kLine) {
        note_object(reinterpret_cast<const char*>(own.dict) + offset);
      }
      note_object(own.key);
      note_object(own.value);
    }
    for (const Version& own : versions) note_object(own.tensor.handle());
    for (const Form& own : forms) note_object(own.tensor.handle());
    for (const char*& line : lines) {
      line = reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(line) / kLine * kLine);
    }
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  }

  bool are_objects_same(const Python& api) const {
    for (const Size& own : sizes) {
      if (api.dict_size(own.dict) != own.count) return false;
    }
    for (Table& own : tables) {
      const void* tag = api.has_dict_tags ? tag_of(own.dict) : nullptr;
      if (tag && tag == own.tag) continue;
      if (own.count >= 0 && api.dict_size(own.dict) != own.count) return false;
      for (std::size_t i = own.begin; i < own.end; ++i) {
        if (api.dict_get(own.dict, entries[i].key) != entries[i].value) return false;
      }
      if (!has_order(api, own.dict, own.keys)) return false;
      own.tag = tag;
    }
    for (const Entry& own : present) {
      PyObject* found = api.dict_get(own.dict, own.key);
      if (!found || found == own.value) return false;
    }
    for (const Type& own : types) {
      PyObject* found = api.type_of(own.object);
      api.release(found);
      if (found != own.type) return false;
    }
    for (const Function& own : functions) {
      if (api.code_of(own.function) != own.code || api.defaults_of(own.function) != own.defaults ||
          api.keyword_defaults_of(own.function) != own.keyword_defaults) {
        return false;
      }
    }
    for (const Entry& own : in_classes) {
      if (api.in_class(own.dict, own.key) != own.value) return false;
    }
    for (const Entry& own : attributes) {
      PyObject* found = api.get_attribute(own.dict, own.key);
      if (!found) {
        api.clear_error();
        return false;
      }
      api.release(found);
      if (found != own.value) return false;
    }
    return true;
  }

  bool are_containers_same(const Python& api) const {
    for (const Container& own : lists) {
      if (!holds(api, own.object, own.items)) return false;
    }
    for (const std::vector<Container>* found : {&sets, &orders}) {
      for (const Container& own : *found) {
        PyObject* now = api.listed(own.object);
        const bool is_same = now && holds(api, now, own.items);
        if (now) {
          api.release(now);
        } else {
          api.clear_error();
        }
        if (!is_same) return false;
      }
    }
    return true;
  }

  static bool holds(const Python& api, PyObject* list, const std::vector<PyObject*>& items) {
    const auto count = static_cast<std::intptr_t>(items.size());
    if (api.list_size(list) != count) return false;
    for (std::intptr_t i = 0; i < count; ++i) {
      if (api.list_get(list, i) != items[i]) return false;
    }
    return true;
  }

  bool are_tensors_same() const {
    if (!std::all_of(forms.begin(), forms.end(), has_form)) return false;
    for (const Version& own : versions) {
      if (version_function()(own.tensor.handle()) != own.number) return false;
      if (own.tensor.data() != own.address) return false;
    }
    for (const Values& own : values) {
      if (element_count(own.tensor.handle()) != own.count) return false;
      if (std::memcmp(own.tensor.data(), own.bytes.data(), own.bytes.size()) != 0) return false;
    }
    return true;
  }
};

void sources(StableIValue* stack, uint64_t, uint64_t) {
  using Tensors = std::vector<Tensor>;
  Tensors versioned = unboxing::Take<Tensors>::from(stack[0]);
  Tensors small = unboxing::Take<Tensors>::from(stack[1]);
  Tensors formed = unboxing::Take<Tensors>::from(stack[2]);
  auto made = std::make_unique<Sources>();
  for (Tensor& tensor : formed) made->forms.push_back(form_of(std::move(tensor)));
  for (Tensor& tensor : versioned) {
    const std::int64_t number = version_function()(tensor.handle());
    const void* address = tensor.data();
    made->versions.push_back({std::move(tensor), number, address});
  }
  for (Tensor& tensor : small) {
    const std::size_t bytes = tensor.numel() * aoti_torch_dtype_element_size(tensor.dtype_code());
    const char* begin = static_cast<const char*>(tensor.data());
    std::vector<char> copy(begin, begin + bytes);
    const std::int64_t count = tensor.numel();
    made->values.push_back({std::move(tensor), count, std::move(copy)});
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

namespace {

// values: one for each entry, or null for `value`.
void add_entries(std::vector<oxytorch::Entry>& to, void** dicts, void** keys, void** values,
                 void* value, std::int64_t count) {
  using oxytorch::PyObject;
  for (std::int64_t i = 0; i < count; ++i) {
    to.push_back({static_cast<PyObject*>(dicts[i]), static_cast<PyObject*>(keys[i]),
                  static_cast<PyObject*>(values ? values[i] : value)});
  }
}

}  // namespace

// Objects belong to the caller, who keeps them alive.
OXY_EXPORT void oxytorch_add_entries(void* made, void** dicts, void** keys, void** values,
                                     std::int64_t count) {
  add_entries(static_cast<oxytorch::Sources*>(made)->entries, dicts, keys, values, nullptr, count);
}

OXY_EXPORT void oxytorch_add_present(void* made, void** dicts, void** keys, void* none,
                                     std::int64_t count) {
  add_entries(static_cast<oxytorch::Sources*>(made)->present, dicts, keys, nullptr, none, count);
}

OXY_EXPORT void oxytorch_add_sizes(void* made, void** dicts, const std::int64_t* counts,
                                   std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    static_cast<Sources*>(made)->sizes.push_back(
        {static_cast<PyObject*>(dicts[i]), static_cast<std::intptr_t>(counts[i])});
  }
}

OXY_EXPORT void oxytorch_add_types(void* made, void** objects, void** types, std::int64_t count) {
  using namespace oxytorch;
  for (std::int64_t i = 0; i < count; ++i) {
    static_cast<Sources*>(made)->types.push_back(
        {static_cast<PyObject*>(objects[i]), static_cast<PyObject*>(types[i])});
  }
}

OXY_EXPORT void oxytorch_add_attributes(void* made, void** objects, void** names, void** values,
                                        std::int64_t count) {
  add_entries(static_cast<oxytorch::Sources*>(made)->attributes, objects, names, values, nullptr,
              count);
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

OXY_EXPORT int oxytorch_sources_are_current(const void* made) {
  try {
    return static_cast<const oxytorch::Sources*>(made)->are_current();
  } catch (const std::exception&) {
    // A tensor that cannot be asked any more is not what it was.
    return 0;
  }
}

OXY_EXPORT void oxytorch_forget_sources(void* made) {
  delete static_cast<oxytorch::Sources*>(made);
}
