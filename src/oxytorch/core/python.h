// What the library asks Python's objects, though it is built for no Python.
#pragma once

#include "core/process.h"

namespace oxytorch {

struct PyObject;

// PyMethodDef, and the flag of one that takes no arguments.
struct MethodDefinition {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject*);
  int flags;
  const char* text;
};
constexpr int kNoArguments = 4;

// The same of a function that takes positional arguments only, and its flag.
struct QuickDefinition {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject* const*, std::intptr_t);
  int flags;
  const char* text;
};
constexpr int kPositionalArguments = 0x80;

// Python's stable ABI, found in the process: the library itself is of no Python.
struct Python {
  using Count = std::intptr_t (*)(PyObject*);
  using Get = PyObject* (*)(PyObject*, PyObject*);
  using At = PyObject* (*)(PyObject*, std::intptr_t);
  using Do = void (*)(PyObject*);

  Get dict_get = named<Get>("PyDict_GetItemWithError");
  Count dict_size = named<Count>("PyDict_Size");
  Count list_size = named<Count>("PyList_Size");
  At list_get = named<At>("PyList_GetItem");
  Count tuple_size = named<Count>("PyTuple_Size");
  At tuple_get = named<At>("PyTuple_GetItem");
  int (*dict_next)(PyObject*, std::intptr_t*, PyObject**, PyObject**) =
      named<int (*)(PyObject*, std::intptr_t*, PyObject**, PyObject**)>("PyDict_Next");
  PyObject* (*type_of)(PyObject*) = named<PyObject* (*)(PyObject*)>("PyObject_Type");
  int (*is_subclass)(const void*,
                     const void*) = named<int (*)(const void*, const void*)>("PyType_IsSubtype");
  unsigned long (*flags_of_class)(PyObject*) =
      named<unsigned long (*)(PyObject*)>("PyType_GetFlags");
  Get get_attribute = named<Get>("PyObject_GetAttr");
  PyObject* (*interned)(const char*) =
      named<PyObject* (*)(const char*)>("PyUnicode_InternFromString");
  PyObject* (*error)() = named<PyObject* (*)()>("PyErr_Occurred");
  void (*clear_error)() = named<void (*)()>("PyErr_Clear");
  PyObject* (*boolean)(long) = named<PyObject* (*)(long)>("PyBool_FromLong");
  PyObject* (*capsule)(void*, const char*,
                       Do) = named<PyObject* (*)(void*, const char*, Do)>("PyCapsule_New");
  void* (*held_by)(PyObject*,
                   const char*) = named<void* (*)(PyObject*, const char*)>("PyCapsule_GetPointer");
  PyObject* (*function)(MethodDefinition*, PyObject*, PyObject*) =
      named<PyObject* (*)(MethodDefinition*, PyObject*, PyObject*)>("PyCFunction_NewEx");
  PyObject* (*quick_function)(QuickDefinition*, PyObject*, PyObject*) =
      named<PyObject* (*)(QuickDefinition*, PyObject*, PyObject*)>("PyCFunction_NewEx");
  PyObject* (*tuple_of)(std::intptr_t,
                        ...) = named<PyObject* (*)(std::intptr_t, ...)>("PyTuple_Pack");
  void* (*unlock)() = named<void* (*)()>("PyEval_SaveThread");
  void (*lock)(void*) = named<void (*)(void*)>("PyEval_RestoreThread");
  Do hold = named<Do>("Py_IncRef");
  Do release = named<Do>("Py_DecRef");

  using Of = PyObject* (*)(PyObject*);
  Of code_of = named<Of>("PyFunction_GetCode");
  Of defaults_of = named<Of>("PyFunction_GetDefaults");
  Of keyword_defaults_of = named<Of>("PyFunction_GetKwDefaults");
  Of listed = named<Of>("PySequence_List");
  Count set_size = named<Count>("PySet_Size");
  PyObject* none = named<PyObject*>("_Py_NoneStruct");
  const void* class_of_dicts = named<const void*>("PyDict_Type");
  const void* class_of_modules = named<const void*>("PyModule_Type");
  const void* class_of_tuples = named<const void*>("PyTuple_Type");
  const void* class_of_cells = named<const void*>("PyCell_Type");
  const void* class_of_static_methods = named<const void*>("PyStaticMethod_Type");
  // A quicker way, which not every Python has.
  Get in_class = named<Get>("_PyType_Lookup");
  PyObject* class_of_classes = named<PyObject*>("PyType_Type");

  bool is_whole() const {
    return dict_get && dict_size && list_size && list_get && tuple_size && tuple_get && dict_next &&
           listed && set_size && is_subclass && flags_of_class && class_of_dicts &&
           class_of_modules && none && type_of && get_attribute && interned && error &&
           clear_error && boolean && capsule && held_by && function && hold && release && code_of &&
           defaults_of && keyword_defaults_of;
  }
};

const Python& python();

// Where objects keep what else is asked by functions, in bytes from their addresses, as
// core/words.py has found out; 0 where that is not known.
struct Offsets {
  std::int64_t kind;    // of any object: its class
  std::int64_t tag;     // of a dictionary: what is another number after each change
  std::int64_t values;  // of a dictionary: not null where a change of an object's attribute may
                        // leave the tag
  std::int64_t order, table, name;                // of a class: __mro__, its dictionary, __name__
  std::int64_t code, defaults, keyword_defaults;  // of a function
  std::int64_t content;                           // of a cell
  std::int64_t function;                          // of a static method
  std::int64_t dtype;             // of a tensor of torch: what is another number for each dtype
  std::int64_t storage, counter;  // of a tensor of torch: addresses, for reading ahead only
  std::int64_t keys;              // of a tensor of torch: its dispatch keys
  std::int64_t tensor;            // of a tensor of Python: the tensor of torch
};

Offsets& offsets();

}  // namespace oxytorch
