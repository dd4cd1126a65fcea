// Sums the squares of a tensor; multiplies its step size by the trust ratio. A group does a tensor.
// Arguments are those of `trust_ratio` in triton.py.
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void trust_ratio(
    ulong tensors, ulong partials, ulong sums, ulong scalars, ulong found_inf, int phase,
    argument hyper_0, argument hyper_1, argument hyper_2, argument hyper_3, argument hyper_4,
    argument hyper_5, argument hyper_6, argument hyper_7) {
  local number shared[GROUP];
  if (optional(found_inf, 0.0f) != 0.0f) return;
  const long tensor = (long)get_group_id(0);
  const global long* row = row_of(tensors, tensor);
  const long count = row[COUNT];
  global argument* own_sums = (global argument*)sums + tensor * SUMS;
  number totals[SUMS];
  for (int i = 0; i < SUMS; ++i) {
    if (phase == 2) {
      totals[i] = from_argument(own_sums[i]);
      continue;
    }
    const global argument* parts = (const global argument*)partials + row[FIRST_BLOCK] * SUMS + i;
    const long blocks = (count + BLOCK - 1) / BLOCK;
    number own = number_of(0.0f);
    for (long block = get_local_id(0); block < blocks; block += GROUP) {
      own = add(own, from_argument(parts[block * SUMS]));
    }
    totals[i] = sum_over_group(own, shared);
    if (get_local_id(0) == 0) own_sums[i] = to_argument(totals[i]);
  }
  if (phase == 1 || get_local_id(0) != 0) return;
  const argument hyper_arguments[HYPER] = {hyper_0, hyper_1, hyper_2, hyper_3,
                                           hyper_4, hyper_5, hyper_6, hyper_7};
  number hyper[HYPER];
  for (int i = 0; i < HYPER; ++i) hyper[i] = from_argument(hyper_arguments[i]);
  // A tensor without elements has no mean; its step changes nothing.
  const number elements = add(number_of((float)(max(count, 1l) >> 24) * 16777216.0f),
                              number_of((float)(max(count, 1l) & 0xffffff)));
  global float* step_size = (global float*)scalars + tensor * SCALAR_FIELDS + STEP_SIZE;
  const number factor = trust_ratio_of(totals[0], totals[1], elements, hyper);
  *step_size = float_of(multiply(number_of(*step_size), factor));
}
