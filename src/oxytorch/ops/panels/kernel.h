#pragma once

#include "ops/panels/gemm_args.h"
#include "ops/panels/gemv_args.h"
#include "ops/panels/window_args.h"

OXY_KERNEL_OF(panels, prepare_rows, PrepareRowsArgs)
OXY_KERNEL_OF(panels, gemm, GemmArgs)
OXY_KERNEL_OF(panels, float_gemm, FloatGemmArgs)
OXY_KERNEL_OF(panels, line_gemm, LineGemmArgs)
OXY_KERNEL_OF(panels, stage_gemv, GemvArgs)
OXY_KERNEL_OF(panels, gemv, GemvArgs)
OXY_KERNEL_OF(panels, gemv_of_each, GemvOfEachArgs)
