#pragma once

#include "ops/_gated/args.h"

OXY_KERNEL(silu_mul, silu_mul, GatedArgs)
