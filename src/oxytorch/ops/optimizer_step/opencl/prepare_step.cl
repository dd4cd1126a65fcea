// Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
static ulong scramble(ulong x) {
  x += 0x9e3779b97f4a7c15ul;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ul;
  x = (x ^ x >> 27) * 0x94d049bb133111ebul;
  return x ^ x >> 31;
}

// Counts the step; writes scalars and keys. A work item does a tensor. Arguments are those of
// `prepare_step` in triton.py.
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void prepare_step(
    ulong tensors, ulong scalars, ulong keys, int count, ulong found_inf, ulong gradient_scale,
    ulong clip_factor, ulong learning_rate, ulong seed, argument factor, argument hyper_0,
    argument hyper_1, argument hyper_2, argument hyper_3, argument hyper_4, argument hyper_5,
    argument hyper_6, argument hyper_7) {
  const long tensor = (long)get_global_id(0);
  if (tensor >= count || optional(found_inf, 0.0f) != 0.0f) return;
  const global long* row = row_of(tensors, tensor);
  const argument hyper_arguments[HYPER] = {hyper_0, hyper_1, hyper_2, hyper_3,
                                           hyper_4, hyper_5, hyper_6, hyper_7};
  number hyper[HYPER];
  for (int i = 0; i < HYPER; ++i) hyper[i] = from_argument(hyper_arguments[i]);
  if (learning_rate) hyper[0] = number_of(*(const global float*)learning_rate);
  global float* steps = (global float*)row[STEP];
  number steps_done = number_of(0.0f);
  if (steps) {
    steps_done = add(number_of(*steps), number_of(1.0f));
    *steps = float_of(steps_done);
  }
  global float* target = (global float*)scalars + tensor * SCALAR_FIELDS;
  write_constants(steps_done, hyper, target);
  const number clip = number_of(optional(clip_factor, 1.0f));
  const number scale = number_of(optional(gradient_scale, 1.0f));
  target[FACTOR] = float_of(quotient(multiply(clip, from_argument(factor)), scale));
  ulong key = scramble(scramble(seed) ^ (ulong)row[RNG_STREAM]);
  key = scramble(key ^ (ulong)whole_of(steps_done));
  global uint* own_keys = (global uint*)keys + tensor * KEY_FIELDS;
  for (int i = 0; i < STATES; ++i) own_keys[i] = (uint)scramble(key ^ i);
}
