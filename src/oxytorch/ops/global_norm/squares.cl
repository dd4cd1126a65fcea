// The sum over the blocks of each group; always the same. Arguments are those of `sum_squares` in
// triton.py.
__attribute__((reqd_work_group_size(GROUP, 1, 1))) kernel void squares(ulong tensors, ulong blocks,
                                                                       int block_count,
                                                                       ulong partials) {
  local number shared[GROUP];
  const int item = (int)get_local_id(0);
  number totals[BINS];
  for (int bin = 0; bin < BINS; ++bin) totals[bin] = number_of(0.0f);
  for (int block = (int)get_group_id(0); block < block_count; block += (int)get_num_groups(0)) {
    const global int* own_block = (const global int*)blocks + 2 * (long)block;
    const global long* row = row_of(tensors, own_block[0]);
    const long start = (long)own_block[1] * BLOCK;
    const int have = (int)clamp(row[COUNT] - start - item * WIDTH, 0l, (long)WIDTH);
    const operand gradient = {(ulong)row[GRADIENT], 0, FORMAT};
    const value x = keep(read(gradient, start + item * WIDTH, have, 0, 0), have);
    const float elements[WIDTH] = {x.s0, x.s1, x.s2, x.s3};
    for (int i = 0; i < WIDTH; ++i) {
      const int own = bin_of(elements[i]);
      const number scaled = number_of(ldexp(elements[i], -shift_of(own)));
      const number square = multiply(scaled, scaled);
      for (int bin = 0; bin < BINS; ++bin) {
        if (bin == own) totals[bin] = add(totals[bin], square);
      }
    }
  }
  argument total = to_argument(number_of(0.0f));
  for (int bin = 0; bin < BINS; ++bin) {
    number sum = sum_over_group(totals[bin], shared);
    const int power = 2 * shift_of(bin);
    if (!is_zero(sum)) {
      sum = add(sum, from_argument_scaled(total, -power));
      total = to_argument_scaled(sum, power);
    }
  }
  if (item == 0) ((global argument*)partials)[get_group_id(0)] = total;
}
