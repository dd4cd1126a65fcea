#pragma once

#include "ops/_quantized/args.h"

OXY_KERNEL_OF(_quantized, prepare_bytes, PrepareBytesArgs)
OXY_KERNEL_OF(_quantized, byte_gemm, ByteGemmArgs)
OXY_KERNEL_OF(_quantized, quantize_stretches, QuantizeArgs)
OXY_KERNEL_OF(_quantized, byte_windows, ByteWindowsArgs)
OXY_KERNEL_OF(_quantized, byte_depthwise, ByteDepthwiseArgs)
OXY_KERNEL_OF(_quantized, byte_lines, ByteLinesArgs)
