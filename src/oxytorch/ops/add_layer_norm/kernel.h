#pragma once

#include "ops/_norm/args.h"

OXY_KERNEL(add_layer_norm, add_layer_norm, NormArgs)
