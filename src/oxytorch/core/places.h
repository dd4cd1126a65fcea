// What is asked of Python's dictionaries and classes, compared with what it is to be.
#pragma once

#include <cstdint>
#include <vector>

#include "core/python.h"
#include "core/words.h"

namespace oxytorch {

constexpr std::intptr_t kNever = INTPTR_MAX;  // no dictionary has so many entries

struct Item {
  PyObject *key, *value;  // value null: no such entry
};

struct InClass {
  PyObject *key, *value, *raw;  // raw: what lies in the class, `value` or a static method of it
};

// What is asked of a dictionary.
struct Table {
  PyObject* dict;
  std::intptr_t count = -1;          // -1: may have any size
  std::vector<Item> entries;         // that are there
  std::vector<PyObject*> present;    // keys of what is there, and not `None`
  std::vector<PyObject*> keys = {};  // in order; none where the order does not matter
};

// What is asked of a class: its attributes. They depend on its own class too, and on the
// dictionaries of the classes that both come from.
struct Class {
  PyObject* kind;
  std::vector<InClass> attributes;
  PyObject *meta = nullptr, *order = nullptr, *meta_order = nullptr;  // as words tell of them
};

struct Function {
  PyObject *function, *code, *defaults, *keyword_defaults;
};

struct Type {
  PyObject *object, *type;
};

// An object without attributes of its own, and where it keeps their dictionary once it is asked
// for.
struct Bare {
  PyObject* object;
  std::int64_t place;
};

struct Container {
  PyObject* object;
  std::vector<PyObject*> items;
};

struct Attribute {
  PyObject* object;
  Item item;
};

inline const char* at(const void* object, std::int64_t offset) {
  return static_cast<const char*>(object) + offset;
}

inline PyObject* pointer_at(const void* object, std::int64_t offset) {
  return reinterpret_cast<PyObject*>(read_word(at(object, offset)));
}

inline std::uint64_t word(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

// The class of an object, which keeps it alive.
inline PyObject* class_of(const Python& api, PyObject* object) {
  if (offsets().kind) return pointer_at(object, offsets().kind);
  PyObject* found = api.type_of(object);
  api.release(found);
  return found;
}

constexpr unsigned long kImmutable = 1 << 8, kOnHeap = 1 << 9;  // flags of classes: Py_TPFLAGS_...

inline bool is_immutable(const Python& api, PyObject* kind) {
  return api.flags_of_class(kind) & kImmutable;
}

inline bool has_name(const Python& api, PyObject* kind) {
  return api.flags_of_class(kind) & kOnHeap;
}

// Names, as Python keeps them.
struct Names {
  PyObject* get_attribute = python().interned("__getattribute__");
  PyObject* get = python().interned("__get__");
  PyObject* set = python().interned("__set__");
  PyObject* remove = python().interned("__delete__");
  PyObject* order = python().interned("__mro__");
  PyObject* name = python().interned("__name__");
  PyObject* content = python().interned("cell_contents");
};

inline const Names& names() {
  static const Names found;
  return found;
}

inline bool holds(const Python& api, PyObject* dict, const Item& each) {
  PyObject* found = api.dict_get(dict, each.key);
  if (!found && api.error()) {  // of a key's own comparison
    api.clear_error();
    return false;
  }
  return found == each.value;
}

inline Words::Found compared(const Python& api, const Table& own) {
  if (own.count >= 0 && api.dict_size(own.dict) != own.count) return Words::Found::kOther;
  for (const Item& each : own.entries) {
    if (!holds(api, own.dict, each)) return Words::Found::kOther;
  }
  for (PyObject* key : own.present) {
    PyObject* found = api.dict_get(own.dict, key);
    if (!found) api.clear_error();
    if (!found || found == api.none) return Words::Found::kOther;
  }
  std::intptr_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (PyObject* wanted : own.keys) {
    if (!api.dict_next(own.dict, &position, &key, &value) || key != wanted)
      return Words::Found::kOther;
  }
  return Words::Found::kSame;
}

inline Words::Found compared(const Python& api, const Bare& own) {
  PyObject* table = pointer_at(own.object, own.place);
  if (!table) return Words::Found::kSame;
  return api.dict_size(table) == 0 ? Words::Found::kSameUntold : Words::Found::kOther;
}

// Whether the class of a class has taken something from `type`.
inline bool is_as_in_type(const Python& api, PyObject* kind, PyObject* key) {
  PyObject* meta = class_of(api, kind);
  return meta == api.class_of_classes ||
         api.in_class(meta, key) == api.in_class(api.class_of_classes, key);
}

// Whether `type` gives an attribute of a class as it lies in the class's dictionary, or in that
// of one that it comes from.
inline bool lies_in_class(const Python& api, PyObject* kind, const InClass& each) {
  if (api.in_class(kind, each.key) != each.raw) return false;
  PyObject* of_meta = api.in_class(class_of(api, kind), each.key);
  if (of_meta) {
    PyObject* descriptor = class_of(api, of_meta);
    const bool may_go_first = api.in_class(descriptor, names().set) ||
                              api.in_class(descriptor, names().remove) ||
                              !is_immutable(api, descriptor);
    if (may_go_first) return false;
  }
  if (each.raw != each.value) return pointer_at(each.raw, offsets().function) == each.value;
  PyObject* of_value = class_of(api, each.value);
  return is_immutable(api, of_value) || !api.in_class(of_value, names().get);
}

// Whether an attribute of a class that has it is in its object itself.
inline bool lies_in_object(const Python& api, PyObject* kind, const InClass& each) {
  const bool is_order = each.key == names().order;
  if (!is_order && each.key != names().name) return false;
  if (!is_order && !has_name(api, kind)) return false;
  const std::int64_t place = is_order ? offsets().order : offsets().name;
  return is_as_in_type(api, kind, each.key) && pointer_at(kind, place) == each.value;
}

inline bool has_attribute(const Python& api, PyObject* object, const Item& each) {
  PyObject* found = api.get_attribute(object, each.key);
  if (found) {
    api.release(found);
  } else {
    api.clear_error();
  }
  return found == each.value;
}

inline Words::Found compared(const Python& api, const Class& own) {
  const Offsets& in = offsets();
  const bool is_plain = api.in_class && is_as_in_type(api, own.kind, names().get_attribute);
  bool is_told = is_plain && own.order && own.meta_order && class_of(api, own.kind) == own.meta &&
                 pointer_at(own.kind, in.order) == own.order &&
                 pointer_at(own.meta, in.order) == own.meta_order;
  for (const InClass& each : own.attributes) {
    if (is_plain && lies_in_class(api, own.kind, each)) continue;
    if (!has_attribute(api, own.kind, {each.key, each.value})) return Words::Found::kOther;
    is_told = is_told && lies_in_object(api, own.kind, each);
  }
  return is_told ? Words::Found::kSame : Words::Found::kSameUntold;
}

}  // namespace oxytorch
