#pragma once

#include "ops/panels/few_rows_args.h"
#include "ops/panels/many_rows_args.h"

OXY_KERNEL(prepare_rows, PrepareRowsArgs)
OXY_KERNEL(multiply_panels, MultiplyPanelsArgs)
OXY_KERNEL(stage_few_rows, FewRowsArgs)
OXY_KERNEL(multiply_few_rows, FewRowsArgs)
OXY_KERNEL(multiply_few_rows_of_each, FewRowsOfEachArgs)
