// How operands are kept in memory: the formats of formats.h, bit for bit. An item has WIDTH
// elements from `index` on, of which the first `have` exist; items of a group follow each other.

enum {
  FLOAT32,
  BFLOAT16,
  FLOAT16,
  SPLIT,
  STOCHASTIC,
  SIGNED_CODES,
  UNSIGNED_CODES,
  FACTORED,
};

#define ITEMS_PER_BOUND (CODE_BLOCK / WIDTH)
#define BOUNDS (BLOCK / CODE_BLOCK)

typedef struct {
  ulong data;
  ulong extra;
  int format;
} operand;

#define DEFINE_ACCESS(element, vector)                                            \
  static vector load_##element(ulong address, long index, int have) {             \
    const global element* from = (const global element*)address + index;          \
    if (have == WIDTH) return vload4(0, from);                                    \
    vector result = 0;                                                            \
    if (have > 0) result.s0 = from[0];                                            \
    if (have > 1) result.s1 = from[1];                                            \
    if (have > 2) result.s2 = from[2];                                            \
    return result;                                                                \
  }                                                                               \
  static void store_##element(ulong address, long index, int have, vector what) { \
    global element* to = (global element*)address + index;                        \
    if (have == WIDTH) vstore4(what, 0, to);                                      \
    if (have == WIDTH) return;                                                    \
    if (have > 0) to[0] = what.s0;                                                \
    if (have > 1) to[1] = what.s1;                                                \
    if (have > 2) to[2] = what.s2;                                                \
  }
DEFINE_ACCESS(float, float4)
DEFINE_ACCESS(ushort, ushort4)
DEFINE_ACCESS(uchar, uchar4)

static float float_of_half(ushort x) { return vload_half(0, (const half*)&x); }
static ushort half_of_float(float x) {
  ushort result;
  vstore_half_rte(x, 0, (half*)&result);
  return result;
}

// Numbers that are spread evenly over 32 bits: a Weyl sequence.
static bits noise(long index, uint key) {
  const uint golden = 0x9e3779b9u;  // 2^32 divided by the golden ratio
  return (bits)(0, 1, 2, 3) * golden + ((uint)index * golden + key);
}

static value decode(operand own, long index, int have, int has_sign) {
  const uint shift = has_sign ? 20 : 19;
  const uint last = has_sign ? 127 : 255;
  const bits code = convert_uint4(load_uchar(own.data, index, have));
  const uint bound = have > 0 ? ((const global uint*)own.extra)[index / CODE_BLOCK] : 0;
  const uint zero = (bound >> shift) - last;
  if (!has_sign) return as_float4((code + zero) << shift);
  const bits magnitude = code & last;
  const bits found = ((magnitude + zero) << shift);
  return as_float4((magnitude != 0 ? found : (bits)(0)) | (code & 128u) << 24);
}

// largest: of the items that share a bound, 0 before.
static void encode(operand own, long index, int have, value x, uint key, int has_sign,
                   local uint* largest) {
  const uint shift = has_sign ? 20 : 19;
  const int first = has_sign ? 0 : 1;
  const int last = has_sign ? 127 : 255;
  const uint round_up = (1u << shift) - 1;
  const bits kept = as_uint4(keep(x, have));
  const bits sizes = kept & 0x7fffffffu;
  const uint size = max(max(sizes.s0, sizes.s1), max(sizes.s2, sizes.s3));
  local uint* shared = largest + get_local_id(0) / ITEMS_PER_BOUND;
  atomic_max(shared, size);
  barrier(CLK_LOCAL_MEM_FENCE);
  // The bound of a NaN has to be one.
  const uint bound = (min(*shared, 0x7fc00000u) + round_up) & ~round_up;
  if (have > 0 && get_local_id(0) % ITEMS_PER_BOUND == 0) {
    ((global uint*)own.extra)[index / CODE_BLOCK] = bound;
  }
  // Of values that are never negative a NaN may have the sign.
  const bits noisy = sizes + (noise(index, key) >> (32 - shift));
  const int4 codes = convert_int4_sat(noisy >> shift) - ((int)(bound >> shift) - last);
  bits result = as_uint4(clamp(codes, first, last));
  if (has_sign) result |= kept >> 31 << 7;
  store_uchar(own.data, index, have, convert_uchar4(result));
}

// The product of a column in `data` and a row in `extra`, of matrices [height, width].
static value multiply_factors(operand own, long index, int have, long height, long width) {
  float found[WIDTH];
  for (int i = 0; i < WIDTH; ++i) {
    found[i] = 0.0f;
    if (i < have) {
      const long row = (index + i) / width;
      const long column = (index + i) - row * width;
      found[i] = ((const global float*)own.extra)[row] *
                 ((const global float*)own.data)[row / height * width + column];
    }
  }
  return vload4(0, found);
}

static value read(operand own, long index, int have, long height, long width) {
  switch (own.format) {
    case FLOAT32:
      return load_float(own.data, index, have);
    case FLOAT16: {
      const ushort4 x = load_ushort(own.data, index, have);
      return (value)(float_of_half(x.s0), float_of_half(x.s1), float_of_half(x.s2),
                     float_of_half(x.s3));
    }
    case SPLIT: {
      const bits upper = convert_uint4(load_ushort(own.data, index, have));
      // The lower half is signed.
      const bits low = convert_uint4(load_ushort(own.extra, index, have));
      return as_float4((upper << 16) + ((low ^ 0x8000u) - 0x8000u));
    }
    case SIGNED_CODES:
      return decode(own, index, have, 1);
    case UNSIGNED_CODES:
      return decode(own, index, have, 0);
    case FACTORED:
      return multiply_factors(own, index, have, height, width);
    default:
      return as_float4(convert_uint4(load_ushort(own.data, index, have)) << 16);
  }
}

// To the nearest bfloat16, to even between two; NaN stays NaN.
static bits round_to_bfloat16(value x) {
  const bits own = as_uint4(x);
  return x == x ? (own + 0x7fffu + (own >> 16 & 1u)) >> 16 : own >> 16 | 0x40u;
}

static void write(operand own, long index, int have, value x, uint key, local uint* largest) {
  const bits own_bits = as_uint4(x);
  switch (own.format) {
    case FLOAT32:
      store_float(own.data, index, have, x);
      break;
    case FLOAT16:
      store_ushort(own.data, index, have,
                   (ushort4)(half_of_float(x.s0), half_of_float(x.s1), half_of_float(x.s2),
                             half_of_float(x.s3)));
      break;
    case BFLOAT16:
      store_ushort(own.data, index, have, convert_ushort4(round_to_bfloat16(x)));
      break;
    case SPLIT: {
      // A NaN stays one whatever its lower bits are.
      const bits nearest = x == x ? own_bits + 0x8000u : own_bits | 0x400000u;
      store_ushort(own.data, index, have, convert_ushort4(nearest >> 16));
      store_ushort(own.extra, index, have, convert_ushort4(own_bits & 0xffffu));
      break;
    }
    case STOCHASTIC: {
      const bits noisy = own_bits + (noise(index, key) >> 16);
      // A NaN stays one whatever its lower bits are.
      const bits result = x == x ? noisy : own_bits | 0x400000u;
      store_ushort(own.data, index, have, convert_ushort4(result >> 16));
      break;
    }
    case SIGNED_CODES:
      encode(own, index, have, x, key, 1, largest);
      break;
    case UNSIGNED_CODES:
      encode(own, index, have, x, key, 0, largest);
      break;
    default:
      break;
  }
}

// The sum of the elements that exist.
static number sum_of(value x, int have) {
  const value kept = keep(x, have);
  const number first = add(number_of(kept.s0), number_of(kept.s1));
  return add(first, add(number_of(kept.s2), number_of(kept.s3)));
}
