#pragma once

#include "ops/embedding_bag/args.h"

OXY_KERNEL(embedding_bag, EmbeddingBagArgs)
