// The tables of layout.py.

static const global long* row_of(ulong tensors, long tensor) {
  return (const global long*)tensors + tensor * TENSOR_FIELDS;
}

// The float32 at an address, or `otherwise` if the address is 0.
static float optional(ulong address, float otherwise) {
  return address ? *(const global float*)address : otherwise;
}

// The sum over the work items of a group, in an order that is always the same; all get it.
static number sum_over_group(number own, local number* shared) {
  const uint item = get_local_id(0);
  shared[item] = own;
  barrier(CLK_LOCAL_MEM_FENCE);
  for (uint half_size = GROUP / 2; half_size > 0; half_size /= 2) {
    if (item < half_size) shared[item] = add(shared[item], shared[item + half_size]);
    barrier(CLK_LOCAL_MEM_FENCE);
  }
  const number total = shared[0];
  barrier(CLK_LOCAL_MEM_FENCE);
  return total;
}
