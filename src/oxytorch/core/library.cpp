#include "core/torch_api.h"

STABLE_TORCH_LIBRARY(oxytorch, library) { (void)library; }
