#include "core/python.h"

#include <algorithm>
#include <cstdio>
#include <vector>

namespace oxytorch {

namespace {

// Whether this Python is older than 3.13, where an attribute that is set on an object may change
// the object's dictionary and not the number in it.
bool are_attributes_counted() {
  const auto version = named<const char* (*)()>("Py_GetVersion");
  int major = 0, minor = 0;
  return version && std::sscanf(version(), "%d.%d", &major, &minor) == 2 && major == 3 &&
         minor < 13;
}

// Whether a dictionary's fourth word is another one after each kind of change.
bool dict_tags_work() {
  if (!are_attributes_counted()) return false;
  const auto make = named<PyObject* (*)()>("PyDict_New");
  const auto set = named<int (*)(PyObject*, PyObject*, PyObject*)>("PyDict_SetItem");
  const auto remove = named<int (*)(PyObject*, PyObject*)>("PyDict_DelItem");
  const auto clear = named<void (*)(PyObject*)>("PyDict_Clear");
  const auto number = named<PyObject* (*)(long)>("PyLong_FromLong");
  const auto release = named<void (*)(PyObject*)>("Py_DecRef");
  if (!make || !set || !remove || !clear || !number || !release) return false;
  PyObject *dict = make(), *first = number(1000001), *second = number(1000002);
  bool works = dict && first && second;
  if (works) {
    std::vector<const void*> tags = {tag_of(dict)};
    const auto note = [&](bool is_done) {
      works = works && is_done && std::find(tags.begin(), tags.end(), tag_of(dict)) == tags.end();
      tags.push_back(tag_of(dict));
    };
    note(set(dict, first, first) == 0);
    note(set(dict, first, second) == 0);
    note(set(dict, second, first) == 0);
    note(remove(dict, first) == 0);
    clear(dict);
    note(true);
  }
  for (PyObject* made : {dict, first, second}) {
    if (made) release(made);
  }
  return works;
}

}  // namespace

Python::Python() : has_dict_tags(dict_tags_work()) {}

const Python& python() {
  static const Python found;
  return found;
}

}  // namespace oxytorch
