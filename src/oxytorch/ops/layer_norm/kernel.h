#pragma once

#include "ops/_norm/args.h"

OXY_KERNEL(layer_norm, layer_norm, NormArgs)
