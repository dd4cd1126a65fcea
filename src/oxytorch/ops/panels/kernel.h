#pragma once

#include "ops/panels/gemm_args.h"
#include "ops/panels/gemv_args.h"

OXY_KERNEL(panels, prepare_rows, PrepareRowsArgs)
OXY_KERNEL(panels, gemm, GemmArgs)
OXY_KERNEL(panels, stage_gemv, GemvArgs)
OXY_KERNEL(panels, gemv, GemvArgs)
OXY_KERNEL(panels, gemv_of_each, GemvOfEachArgs)
