// The table of rules, generated from optim/rules.py.
#pragma once

#include <algorithm>
#include <cmath>

namespace oxytorch {

struct Rule {
  const char* name;
  // 'f' or 'b' for each hyper-parameter.
  const char* kinds;
  int states;
  // Whether the constants depend on the number of the step.
  bool has_step;
  void (*constants)(double step, const double* hyper, float* scalars, unsigned* flags);
  // Loop of the update, and of the measure before it, by flags; the latter may be null.
  const int* variants;
  const int* measures;
};

#include "oxytorch_rules.h"

}  // namespace oxytorch
