#pragma once

#include "ops/_panels/many_rows_args.h"

OXY_KERNEL(prepare_rows, PrepareRowsArgs)
OXY_KERNEL(multiply_panels, MultiplyPanelsArgs)
