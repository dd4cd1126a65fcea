#pragma once

#include "ops/_norm/args.h"

OXY_KERNEL(rms_norm, rms_norm, NormArgs)
