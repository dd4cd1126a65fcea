// The table of rules, generated from rules.py.
#pragma once

#include <algorithm>
#include <cmath>

namespace oxytorch {

struct Rule {
  const char* name;
  // How many hyper-parameters there are, and their names.
  int hyper;
  const char* hyper_names;
  int states;
  // Whether the constants depend on the number of the step.
  bool has_step;
  void (*constants)(double step, const double* hyper, float* scalars, unsigned* flags);
  // Loops by flags: of the update, and of the reduction before it, null where there is none.
  const int* variants;
  const int* reductions;
  // Factor of the scalar `step_size` after the sums of a reduction over `count` elements.
  double (*trust_ratio)(const double* sums, double count, const double* hyper);
  int step_size;
};

#include "oxytorch_rules.h"

}  // namespace oxytorch
