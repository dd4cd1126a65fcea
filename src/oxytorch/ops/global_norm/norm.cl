// The norm of gradients without the scale, and what they are to be multiplied by. One group.
// Arguments are those of `finish` in triton.py.
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void norm(ulong partials, int count,
                                                                    ulong gradient_scale,
                                                                    argument max_norm, ulong norm,
                                                                    ulong clip_factor) {
  local number shared[GROUP];
  local int largest;
  const global argument* parts = (const global argument*)partials;
  if (get_local_id(0) == 0) largest = 0;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int i = (int)get_local_id(0); i < count; i += GROUP) {
    atomic_max(&largest, (int)(bits_of(parts[i]) >> 52 & 0x7ff));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  // An even power of 2 that brings the largest sum near 1.
  const int power = (largest - 1023) / 2 * 2;
  number total = number_of(0.0f);
  for (int i = (int)get_local_id(0); i < count; i += GROUP) {
    total = add(total, from_argument_scaled(parts[i], -power));
  }
  total = root(sum_over_group(total, shared));
  if (get_local_id(0) != 0) return;
  const float found = ldexp(float_of(total), power / 2) / optional(gradient_scale, 1.0f);
  *(global float*)norm = found;
  const float factor = 1.0f / (found + 1e-6f) * float_of(from_argument(max_norm));
  // A norm that is NaN makes the factor NaN.
  if (clip_factor) *(global float*)clip_factor = factor > 1.0f ? 1.0f : factor;
}
