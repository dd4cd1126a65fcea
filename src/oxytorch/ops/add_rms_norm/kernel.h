#pragma once

#include "ops/_norm/args.h"

OXY_KERNEL(add_rms_norm, add_rms_norm, NormArgs)
