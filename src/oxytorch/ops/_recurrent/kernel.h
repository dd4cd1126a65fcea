#pragma once

#include "ops/_recurrent/args.h"

OXY_KERNEL_OF(_recurrent, lstm_step, RecurrentStepArgs)
OXY_KERNEL_OF(_recurrent, gru_step, RecurrentStepArgs)
