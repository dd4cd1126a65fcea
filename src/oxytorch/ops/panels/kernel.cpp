// The kernels are defined in these files, each of which is compiled once per level.
#include "ops/panels/kernel.h"

#include "ops/panels/float_gemm.h"
#include "ops/panels/gemm.h"
#include "ops/panels/gemv.h"
#include "ops/panels/lines.h"
