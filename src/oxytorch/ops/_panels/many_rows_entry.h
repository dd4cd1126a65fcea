// The call of the kernels for many rows.
#pragma once

#include "core/check.h"
#include "ops/_panels/many_rows_args.h"

namespace oxytorch {

// result = epilogue(x weight^T + bias) for all rows of x, on torch's threads. x may be misaligned;
// its in_features are those of the weight.
void multiply_many_rows(const Rows& x, DType x_dtype, RowForm form, const PanelsArgs& weight,
                        const PanelResultArgs& result);

}  // namespace oxytorch
