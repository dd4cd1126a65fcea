// Adafactor's rows and columns, as in triton.py; a group does a tile of tiling.py.

static float load_gradient(ulong gradient, long index) {
#if FORMAT == 0
  return ((const global float*)gradient)[index];
#elif FORMAT == 1
  return as_float((uint)((const global ushort*)gradient)[index] << 16);
#else
  return vload_half(index, (const global half*)gradient);
#endif
}

// Moves a mean that is kept towards that of this step.
static void move(ulong state, long index, float total, long count, float factor, float weight) {
  global float* kept = (global float*)state + index;
  *kept = lerp(*kept, total / (float)count * (factor * factor), weight);
}

// A strip of a matrix: its rows, and the sums over its columns.
static void strip(const global long* row, long number, float factor, float weight,
                  local float* shared) {
  const long height = row[HEIGHT], width = row[WIDTH_FIELD];
  const long strips = (height + STRIP - 1) / STRIP;
  const long matrix = number / strips;
  const long first = number % strips * STRIP;
  const ulong gradient = (ulong)row[GRADIENT];
  const long begin = matrix * height + first;
  const int rows = (int)min((long)STRIP, height - first);
  const int item = (int)get_local_id(0);
  global float* sums = (global float*)row[STRIPS] + number * width;
  for (long column = item; column < width; column += GROUP) {
    float total = 0.0f;
    for (int i = 0; i < rows; ++i) {
      const float x = load_gradient(gradient, (begin + i) * width + column);
      total += x * x;
    }
    sums[column] = total;
  }
  // GROUP / STRIP items do a row.
  const int own = item / (GROUP / STRIP), part = item % (GROUP / STRIP);
  float total = 0.0f;
  if (own < rows) {
    for (long column = part; column < width; column += GROUP / STRIP) {
      const float x = load_gradient(gradient, (begin + own) * width + column);
      total += x * x;
    }
  }
  shared[item] = total;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (part == 0 && own < rows) {
    for (int i = 1; i < GROUP / STRIP; ++i) total += shared[item + i];
    move((ulong)row[ROWS], begin + own, total, width, factor, weight);
  }
}

// A row, or a column, of matrices that may be many, for each item.
static void small(const global long* row, long number, float factor, float weight) {
  const long height = row[HEIGHT], width = row[WIDTH_FIELD], count = row[COUNT];
  const ulong gradient = (ulong)row[GRADIENT];
  const long rows = count / max(width, 1l);
  const long row_tiles = (rows + LANES - 1) / LANES;
  const int is_row = number < row_tiles;
  const long index = (is_row ? number : number - row_tiles) * LANES + (long)get_local_id(0);
  if (index >= (is_row ? rows : count / max(height, 1l))) return;
  const long begin = is_row ? index * width : index / width * (height * width) + index % width;
  const long length = is_row ? width : height;
  float total = 0.0f;
  for (long i = 0; i < length; ++i) {
    const float x = load_gradient(gradient, begin + (is_row ? i : i * width));
    total += x * x;
  }
  move((ulong)row[is_row ? ROWS : COLUMNS], index, total, length, factor, weight);
}

static float at_least(float mean, float least) { return mean < least ? least : mean; }

// The factors of the rows of a matrix for each item.
static void small_factors(const global long* row, long number, float least) {
  const long height = row[HEIGHT];
  const long index = number * LANES + (long)get_local_id(0);
  if (index >= row[COUNT] / max(height * row[WIDTH_FIELD], 1l)) return;
  const global float* from = (const global float*)row[ROWS] + index * height;
  global float* to = (global float*)row[ROW_FACTORS] + index * height;
  float total = 0.0f;
  for (long i = 0; i < height; ++i) total += from[i];
  const float mean = at_least(total / (float)height, least);
  for (long i = 0; i < height; ++i) to[i] = from[i] / mean;
}

// The factors of the rows of a matrix.
static void row_factors(const global long* row, long matrix, float least, local float* shared) {
  const long height = row[HEIGHT];
  const int item = (int)get_local_id(0);
  const global float* from = (const global float*)row[ROWS] + matrix * height;
  global float* to = (global float*)row[ROW_FACTORS] + matrix * height;
  float total = 0.0f;
  for (long i = item; i < height; i += GROUP) total += from[i];
  shared[item] = total;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int half_size = GROUP / 2; half_size > 0; half_size /= 2) {
    if (item < half_size) shared[item] += shared[item + half_size];
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const float mean = at_least(shared[0] / (float)height, least);
  for (long i = item; i < height; i += GROUP) to[i] = from[i] / mean;
}

// STRIPE columns of a matrix, from the sums of its strips; GROUP / STRIPE items do a column.
static void columns(const global long* row, long number, float factor, float weight,
                    local float* shared) {
  const long height = row[HEIGHT], width = row[WIDTH_FIELD];
  const long stripes = (width + STRIPE - 1) / STRIPE;
  const long matrix = number / stripes;
  const int item = (int)get_local_id(0);
  const int part = item / STRIPE;
  const long column = number % stripes * STRIPE + item % STRIPE;
  const long strips = (height + STRIP - 1) / STRIP;
  const global float* sums = (const global float*)row[STRIPS] + matrix * strips * width;
  float total = 0.0f;
  if (column < width) {
    for (long i = part; i < strips; i += GROUP / STRIPE) total += sums[i * width + column];
  }
  shared[item] = total;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (part != 0 || column >= width) return;
  for (int i = 1; i < GROUP / STRIPE; ++i) total += shared[item + i * STRIPE];
  move((ulong)row[COLUMNS], matrix * width + column, total, height, factor, weight);
}

#if IS_SUMS
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void factor_sums(ulong tensors,
                                                                           ulong tiles,
                                                                           ulong scalars,
                                                                           ulong found_inf) {
#else
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void factors(ulong tensors, ulong tiles,
                                                                       ulong scalars,
                                                                       ulong found_inf,
                                                                       argument least) {
#endif
  local float shared[GROUP];
  if (optional(found_inf, 0.0f) != 0.0f) return;
  const global int* tile = (const global int*)tiles + 2 * (long)get_group_id(0);
  const global long* row = row_of(tensors, tile[0]);
  const global float* own = (const global float*)scalars + tile[0] * (long)SCALAR_FIELDS;
  const long number = tile[1], size = row[HEIGHT] * row[WIDTH_FIELD];
#if IS_SUMS
  if (size > SMALL) {
    strip(row, number, own[FACTOR], own[WEIGHT], shared);
  } else {
    small(row, number, own[FACTOR], own[WEIGHT]);
  }
#else
  const float bound = float_of(from_argument(least));
  const long matrices = row[COUNT] / max(size, 1l);
  if (size <= SMALL) {
    small_factors(row, number, bound);
  } else if (number < matrices) {
    row_factors(row, number, bound, shared);
  } else {
    columns(row, number - matrices, own[FACTOR], own[WEIGHT], shared);
  }
#endif
}
