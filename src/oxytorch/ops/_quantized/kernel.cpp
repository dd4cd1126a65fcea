// The kernels are defined in these files, each of which is compiled once per level.
#include "ops/_quantized/kernel.h"

#include "ops/_quantized/depthwise.h"
#include "ops/_quantized/gemm.h"
#include "ops/_quantized/lines.h"
#include "ops/_quantized/prepare.h"
#include "ops/_quantized/windows.h"
