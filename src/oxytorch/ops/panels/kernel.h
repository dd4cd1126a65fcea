#pragma once

#include "ops/panels/gemm_args.h"
#include "ops/panels/gemv_args.h"

OXY_KERNEL(prepare_rows, PrepareRowsArgs)
OXY_KERNEL(gemm, GemmArgs)
OXY_KERNEL(stage_gemv, GemvArgs)
OXY_KERNEL(gemv, GemvArgs)
OXY_KERNEL(gemv_of_each, GemvOfEachArgs)
