#pragma once

#include "ops/_norm/args.h"

OXY_KERNEL(rms_norm, NormArgs)
