// What derived values were made from, as it was then: places to look at, and the look at all of
// them.
//
// What lies in a dictionary, what is found in a class and the form of a tensor are groups that
// words tell of (core/words.h); the rest is asked for.
#pragma once

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "core/forms.h"
#include "core/places.h"
#include "core/process.h"
#include "core/python.h"
#include "core/torch_api.h"
#include "core/words.h"

namespace oxytorch {

class Sources {
  // First, and close together: what most looks are content with.
  Words words_;
  bool has_more_ = true;

 public:
  using Found = Words::Found;

  Sources() = default;
  Sources(const Sources&) = delete;
  Sources& operator=(const Sources&) = delete;
  ~Sources() {
    for (PyObject* object : held_) python().release(object);
  }

  std::vector<Attribute> attributes;  // of what is no class
  std::vector<Function> functions;
  std::vector<Type> types;
  std::vector<Container> orders, lists, sets;  // orders: of dictionaries, their keys
  std::vector<Form> forms;
  std::vector<Bare> bare;
  std::vector<Version> versions;
  std::vector<Values> values;
  std::vector<Tensor> owned;
  bool is_lost = false;  // a tensor cannot be asked

  Table& table_of(PyObject* dict) {
    const auto [place, is_new] = table_numbers_.try_emplace(dict, tables_.size());
    if (is_new) tables_.push_back({dict});
    return tables_[place->second];
  }

  Class& class_named(PyObject* kind) {
    const auto [place, is_new] = class_numbers_.try_emplace(kind, classes_.size());
    if (is_new) classes_.push_back({kind});
    return classes_[place->second];
  }

  // Called once everything is added.
  void close() {
    const Python& api = python();
    // Other dictionaries than those of the class itself may keep an order that no tag tells of.
    take(orders, [&](Container& own) {
      if (class_of(api, own.object) != api.class_of_dicts) return false;
      table_of(own.object).keys = std::move(own.items);
      return true;
    });
    take(types, [this](const Type& own) { return add_word(own); });
    take(functions, [this](const Function& own) { return add_words(own); });
    take(attributes, [&](const Attribute& own) { return add_word(api, own); });
    for (const Table& own : tables_) add_group(add_word(api, own));
    for (Class& own : classes_) add_group(add_words(api, own));
    for (const Form& own : forms) add_group(add_words(own));
    for (const Bare& own : bare) {
      words_.add(at(own.object, own.place), groups_);
      add_group(true);
    }
    words_.close(groups_, [this](Words::Group group) { return compared(group); });
    for (const Form& own : forms) note_object(own.tensor);
    for (const Version& own : versions) note_tensor(own.tensor);
    for (const Values& own : values) note_tensor(own.tensor);
    for (const std::vector<Container>* found : {&lists, &sets, &orders}) {
      for (const Container& own : *found) note(own.object);
    }
    std::sort(lines_.begin(), lines_.end());
    lines_.erase(std::unique(lines_.begin(), lines_.end()), lines_.end());
    std::sort(objects_.begin(), objects_.end());
    objects_.erase(std::unique(objects_.begin(), objects_.end()), objects_.end());
    const bool only_words = types.empty() && functions.empty() && attributes.empty() &&
                            orders.empty() && lists.empty() && sets.empty() && versions.empty() &&
                            values.empty() && untold_.empty();
    has_more_ = !only_words;
  }

  bool are_current() {
    if (has_more_) {
      for (const char* line : lines_) __builtin_prefetch(line);
    }
    return !is_lost && are_objects_of_tensors_same() &&
           words_.are_same([this](Words::Group group) { return compared(group); }) &&
           (!has_more_ || is_rest_same());
  }

 private:
  bool is_rest_same() const {
    return std::all_of(untold_.begin(), untold_.end(),
                       [this](Words::Group own) { return compared(own) != Found::kOther; }) &&
           are_objects_same(python()) && are_containers_same(python()) && are_tensors_same();
  }

  template <class Own, class Taken>
  static void take(std::vector<Own>& from, const Taken& is_taken) {
    from.erase(std::remove_if(from.begin(), from.end(), is_taken), from.end());
  }

  void hold(PyObject* object) {
    python().hold(object);
    held_.push_back(object);
  }

  // The groups are the tables, then the classes, then the forms, then what is bare.
  void add_group(bool is_told) {
    if (!is_told) untold_.push_back(groups_);
    ++groups_;
  }

  bool add_word(const Type& own) {
    const std::int64_t kind = offsets().kind;
    const Python& api = python();
    // Only an object of a class that is itself an object, and a module, can be given another class.
    if (is_immutable(api, own.type) && !api.is_subclass(own.type, api.class_of_modules))
      return true;
    if (kind) words_.require(at(own.object, kind), word(own.type));
    return kind;
  }

  bool add_words(const Function& own) {
    const Offsets& in = offsets();
    if (!in.code || !in.defaults || !in.keyword_defaults) return false;
    words_.require(at(own.function, in.code), word(own.code));
    words_.require(at(own.function, in.defaults), word(own.defaults));
    words_.require(at(own.function, in.keyword_defaults), word(own.keyword_defaults));
    return true;
  }

  bool add_word(const Python& api, const Attribute& own) {
    const std::int64_t content = offsets().content;
    if (!content || class_of(api, own.object) != api.class_of_cells) return false;
    if (own.item.key != names().content) return false;
    words_.require(at(own.object, content), word(own.item.value));
    return true;
  }

  bool add_word(const Python& api, const Table& own) {
    const Offsets& in = offsets();
    if (!in.tag || !api.is_subclass(class_of(api, own.dict), api.class_of_dicts)) return false;
    if (in.values && pointer_at(own.dict, in.values)) return false;
    words_.add_growing(at(own.dict, in.tag), groups_);
    return true;
  }

  bool add_words(const Python& api, Class& own) {
    const Offsets& in = offsets();
    if (!in.kind || !in.tag || !in.order || !in.table || !in.name || !api.in_class) return false;
    own.meta = class_of(api, own.kind);
    hold(own.meta);
    own.order = watched_order(api, own.kind);
    own.meta_order = watched_order(api, own.meta);
    for (InClass& each : own.attributes) {
      PyObject* raw = in.function ? api.in_class(own.kind, each.key) : nullptr;
      if (!raw || raw == each.value || class_of(api, raw) != api.class_of_static_methods) continue;
      hold(each.raw = raw);
      words_.add(at(raw, in.function), groups_);
    }
    words_.add(at(own.kind, in.kind), groups_);
    if (has_name(api, own.kind)) words_.add(at(own.kind, in.name), groups_);
    return own.order && own.meta_order;
  }

  // The classes that a class comes from, whose dictionaries are watched; null where some cannot be.
  PyObject* watched_order(const Python& api, PyObject* kind) {
    const Offsets& in = offsets();
    PyObject* order = pointer_at(kind, in.order);
    if (!order || class_of(api, order) != api.class_of_tuples) return nullptr;
    hold(order);
    words_.add(at(kind, in.order), groups_);
    for (std::intptr_t i = 0; i < api.tuple_size(order); ++i) {
      PyObject* owner = api.tuple_get(order, i);
      if (is_immutable(api, owner)) continue;
      PyObject* table = pointer_at(owner, in.table);
      if (!table || class_of(api, table) != api.class_of_dicts) return nullptr;
      words_.add_growing(at(table, in.tag), groups_);
    }
    return order;
  }

  // A tensor that was swapped is another object, and this one may be gone, words of its form with
  // it.
  bool are_objects_of_tensors_same() const {
    return std::all_of(objects_.begin(), objects_.end(),
                       [](const auto& own) { return read_word(own.first) == word(own.second); });
  }

  static const char* object_of(AtenTensorHandle handle) {
    return *reinterpret_cast<const char* const*>(handle);
  }

  void note_object(AtenTensorHandle handle) { objects_.push_back({handle, object_of(handle)}); }

  // Has memory read ahead that a look at a tensor reads.
  void note_tensor(AtenTensorHandle handle) {
    const Offsets& in = offsets();
    const char* object = object_of(handle);
    note_object(handle);
    note(handle);
    for (std::uintptr_t line = 0; line < 3; ++line) note(object + line * kLine);
    if (!in.storage || !in.counter) return;
    note(pointer_at(object, in.storage));
    note(pointer_at(object, in.counter));
  }

  void note(const void* at) {
    lines_.push_back(
        reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(at) / kLine * kLine));
  }

  // Sizes and strides lie in the tensor's own object where they are few; the number before them
  // says how many.
  bool add_words(const Form& own) {
    const std::int64_t dtype = offsets().dtype;
    AtenTensorHandle handle = own.tensor;
    const char* object = object_of(handle);
    std::int64_t *sizes = nullptr, *strides = nullptr;
    check_call(aoti_torch_get_sizes(handle, &sizes), "get_sizes");
    check_call(aoti_torch_get_strides(handle, &strides), "get_strides");
    const auto count = static_cast<std::int64_t>(own.sizes.size());
    const auto from = reinterpret_cast<const char*>(sizes) - object;
    if (!dtype || from <= 0 || from >= kObject || strides - sizes != kInline) return false;
    if (count > kInline || sizes[-1] != count) return false;
    words_.require(sizes - 1, count);
    for (std::int64_t i = 0; i < count; ++i) {
      words_.require(sizes + i, own.sizes[i]);
      words_.require(strides + i, own.strides[i]);
    }
    words_.add(object + dtype, groups_);
    return true;
  }

  Found compared(Words::Group group) const {
    if (group < tables_.size()) return oxytorch::compared(python(), tables_[group]);
    group -= tables_.size();
    if (group < classes_.size()) return oxytorch::compared(python(), classes_[group]);
    group -= classes_.size();
    if (group < forms.size()) return has_form(forms[group]) ? Found::kSame : Found::kOther;
    return oxytorch::compared(python(), bare[group - forms.size()]);
  }

  bool are_objects_same(const Python& api) const {
    for (const Type& own : types) {
      if (class_of(api, own.object) != own.type) return false;
    }
    for (const Function& own : functions) {
      if (api.code_of(own.function) != own.code || api.defaults_of(own.function) != own.defaults ||
          api.keyword_defaults_of(own.function) != own.keyword_defaults) {
        return false;
      }
    }
    for (const Attribute& own : attributes) {
      if (!has_attribute(api, own.object, own.item)) return false;
    }
    return true;
  }

  bool are_containers_same(const Python& api) const {
    for (const Container& own : lists) {
      if (!holds(api, own.object, own.items)) return false;
    }
    for (const std::vector<Container>* found : {&sets, &orders}) {
      for (const Container& own : *found) {
        if (found == &sets && own.items.empty()) {
          if (api.set_size(own.object) != 0) return false;
          continue;
        }
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
    for (const Version& own : versions) {
      if (version_function()(own.tensor) != own.number) return false;
      if (data_of(own.tensor) != own.address) return false;
    }
    for (const Values& own : values) {
      if (element_count(own.tensor) != own.count) return false;
      if (std::memcmp(data_of(own.tensor), own.bytes.data(), own.bytes.size()) != 0) return false;
    }
    return true;
  }

  std::vector<Table> tables_;
  std::vector<Class> classes_;
  std::unordered_map<PyObject*, std::size_t> table_numbers_, class_numbers_;
  Words::Group groups_ = 0;
  std::vector<Words::Group> untold_;
  std::vector<PyObject*> held_;     // what words lie in that the caller does not keep alive
  std::vector<const char*> lines_;  // of memory that a look at tensors reads
  std::vector<std::pair<const void*, const void*>> objects_;  // of tensors: where they are, which
};

}  // namespace oxytorch
