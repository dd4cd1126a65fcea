// What the library asks Python's objects, though it is built for no Python.
#pragma once

#include "core/process.h"

namespace oxytorch {

struct PyObject;

// Python's stable ABI, found in the process: the library itself is of no Python.
struct Python {
  using Count = std::intptr_t (*)(PyObject*);
  using Get = PyObject* (*)(PyObject*, PyObject*);

  Get dict_get = named<Get>("PyDict_GetItemWithError");
  Count dict_size = named<Count>("PyDict_Size");
  Count list_size = named<Count>("PyList_Size");
  PyObject* (*list_get)(PyObject*, std::intptr_t) =
      named<PyObject* (*)(PyObject*, std::intptr_t)>("PyList_GetItem");
  int (*dict_next)(PyObject*, std::intptr_t*, PyObject**, PyObject**) =
      named<int (*)(PyObject*, std::intptr_t*, PyObject**, PyObject**)>("PyDict_Next");
  PyObject* (*type_of)(PyObject*) = named<PyObject* (*)(PyObject*)>("PyObject_Type");
  Get get_attribute = named<Get>("PyObject_GetAttr");
  void (*clear_error)() = named<void (*)()>("PyErr_Clear");
  void (*release)(PyObject*) = named<void (*)(PyObject*)>("Py_DecRef");

  using Of = PyObject* (*)(PyObject*);
  Of code_of = named<Of>("PyFunction_GetCode");
  Of defaults_of = named<Of>("PyFunction_GetDefaults");
  Of keyword_defaults_of = named<Of>("PyFunction_GetKwDefaults");
  Of listed = named<Of>("PySequence_List");
  const void* class_of_dicts = named<const void*>("PyDict_Type");
  // Quicker ways, which not every Python has.
  Get in_class = named<Get>("_PyType_Lookup");
  const void* class_of_classes = named<const void*>("PyType_Type");
  bool has_dict_tags = false;

  Python();

  bool is_whole() const {
    return dict_get && dict_size && list_size && list_get && dict_next && listed &&
           class_of_dicts && type_of && get_attribute && clear_error && release && code_of &&
           defaults_of && keyword_defaults_of;
  }
};

// What lies at an object's address. The second word of any object is its class, which is a part of
// the stable ABI. Of a dictionary of CPython on 64 bits, the fourth is another number after each
// change up to Python 3.12 (`dict_tags_work` looks), and the last two point to its keys and values,
// which are but hints for a look ahead.
struct Words {
  const char* word[6];
};

inline const Words& words_of(const PyObject* object) {
  return *reinterpret_cast<const Words*>(object);
}

inline const void* class_of(const PyObject* object) { return words_of(object).word[1]; }

// Read anew each time.
inline const void* tag_of(const PyObject* dict) {
  return *static_cast<const char* const volatile*>(&words_of(dict).word[3]);
}

const Python& python();

}  // namespace oxytorch
