#pragma once

#include "ops/_gated/args.h"

OXY_KERNEL(gelu_mul, gelu_mul, GatedArgs)
