// Checks, allocation and the parallel loop that the two embedding bag ops share.
#pragma once

#include "core/check.h"
#include "core/parallel.h"
#include "ops/embedding_bag/args.h"

namespace oxytorch {

// One table's tensors; copies are owned where a tensor was not dense.
struct BagInput {
  const Tensor& weight;
  const Tensor& indices;
  const Tensor* offsets;
  const Tensor* scales;
};

struct BagCopies {
  Tensor weight, indices, offsets, scales;
};

inline bool check_integers(const char* op, const char* argument, const Tensor& tensor) {
  const bool wide = tensor.dtype_code() == aoti_torch_dtype_int64();
  if (!wide && tensor.dtype_code() != aoti_torch_dtype_int32()) {
    fail(op, argument, "of dtype int32 or int64", dtype_name(tensor.dtype_code()));
  }
  check_cpu(op, argument, tensor);
  return wide;
}

// Fills in `table`; returns the number of bags.
inline std::int64_t describe_table(const char* op, const BagInput& input, bool last_offset,
                                   EmbeddingTable& table, BagCopies& copies) {
  if (input.weight.dim() != 2) {
    fail(op, "weight", "of shape [rows, dim]", describe(input.weight.sizes()));
  }
  check_cpu(op, "weight", input.weight);
  table.rows = input.weight.size(0);
  const bool dense = input.weight.size(1) <= 1 || input.weight.stride(1) == 1;
  table.weight = dense ? input.weight.data() : contiguous_data(input.weight, copies.weight);
  table.row_stride = dense ? input.weight.stride(0) : input.weight.size(1);
  table.wide_indices = check_integers(op, "indices", input.indices);
  table.indices = contiguous_data(input.indices, copies.indices);
  table.index_count = input.indices.numel();
  table.last_offset = last_offset;
  if (input.scales) {
    check_shape(op, "per_sample_weights", *input.scales, input.indices.sizes());
    if (input.weight.dtype_code() != aoti_torch_dtype_uint8()) {
      check_same_dtype(op, "per_sample_weights", *input.scales, input.weight);
    }
    check_cpu(op, "per_sample_weights", *input.scales);
    table.scales = contiguous_data(*input.scales, copies.scales);
  }
  if (input.indices.dim() == 2) {
    if (input.offsets)
      fail(op, "offsets", "None with 2-D indices", describe(input.offsets->sizes()));
    table.bag_length = input.indices.size(1);
    return input.indices.size(0);
  }
  if (input.indices.dim() != 1) {
    fail(op, "indices", "with 1 or 2 dimensions", "shape " + describe(input.indices.sizes()));
  }
  if (!input.offsets) fail(op, "offsets", "with 1-D indices", "None");
  if (input.offsets->dim() != 1) {
    fail(op, "offsets", "with 1 dimension", "shape " + describe(input.offsets->sizes()));
  }
  table.wide_offsets = check_integers(op, "offsets", *input.offsets);
  table.offsets = contiguous_data(*input.offsets, copies.offsets);
  const std::int64_t count = input.offsets->size(0);
  if (last_offset && count == 0) {
    fail(op, "offsets", "with at least one element under include_last_offset", "none");
  }
  if (count > 0 && read_index(table.offsets, table.wide_offsets, 0) != 0) {
    fail(op, "offsets", "that begin with 0",
         std::to_string(read_index(table.offsets, table.wide_offsets, 0)));
  }
  return count - last_offset;
}

// Fills in a table for each weight; `check` looks at a weight that is to be like the first one.
// Returns the number of bags, which all tables share.
template <class Check>
std::int64_t describe_tables(const char* op, const std::vector<Tensor>& weights,
                             const std::vector<Tensor>& indices, const std::vector<Tensor>& offsets,
                             std::vector<EmbeddingTable>& tables, std::vector<BagCopies>& copies,
                             Check check) {
  const std::size_t count = weights.size();
  if (count == 0) fail(op, "weights", "with at least one table", "none");
  for (const auto& [argument, list] : {std::pair{"indices", &indices}, {"offsets", &offsets}}) {
    if (list->size() != count) {
      fail(op, argument, "with " + std::to_string(count) + " tensors, one per table",
           std::to_string(list->size()));
    }
  }
  tables.resize(count);
  copies.resize(count);
  std::int64_t bags = 0;
  for (std::size_t i = 0; i < count; ++i) {
    check(weights[i]);
    const BagInput input{weights[i], indices[i], &offsets[i], nullptr};
    const std::int64_t found = describe_table(op, input, false, tables[i], copies[i]);
    if (i == 0) bags = found;
    if (found != bags) {
      fail(op, "offsets", "with " + std::to_string(bags) + " bags in every table",
           std::to_string(found));
    }
    if (weights[i].size(1) != weights[0].size(1)) {
      fail(op, "weights", "with " + std::to_string(weights[0].size(1)) + " columns in every table",
           std::to_string(weights[i].size(1)));
    }
    if (tables[i].wide_indices != tables[0].wide_indices) {
      fail(op, "indices", "of dtype " + dtype_name(indices[0].dtype_code()) + " in every table",
           dtype_name(indices[i].dtype_code()));
    }
  }
  return bags;
}

inline bool check_mode(const char* op, const std::string& mode) {
  if (mode != "sum" && mode != "mean") fail(op, "mode", "'sum' or 'mean'", "'" + mode + "'");
  return mode == "mean";
}

// Names what is wrong with a bag that the kernel rejected.
[[noreturn]] inline void fail_bag(const char* op, const EmbeddingBagArgs& args) {
  const EmbeddingTable& table = args.tables[*args.bad_bag / args.bags];
  const std::int64_t bag = *args.bad_bag % args.bags;
  const BagSpan span = bag_span(table, bag, args.bags);
  if (!span_fits(table, span)) {
    fail(op, "offsets", "to ascend from 0 to at most " + std::to_string(table.index_count),
         "a bag from " + std::to_string(span.begin) + " to " + std::to_string(span.end));
  }
  for (std::int64_t i = span.begin; i < span.end; ++i) {
    const std::int64_t index = read_index(table.indices, table.wide_indices, i);
    if (index < 0 || index >= table.rows) {
      fail(op, "indices", "in [0, " + std::to_string(table.rows) + ")", std::to_string(index));
    }
  }
  fail(op, "indices", "that do not change during the call", "indices that did");
}

// Of results, and of the rows that they are made of.
struct BagRows {
  DType dtype;
  std::int32_t dtype_code;
  std::int64_t dim;
  std::int64_t bytes;  // that are read of a row
};

// Runs over all tables; the result is [bags, tables * dim].
inline Tensor embedding_entry(const char* op, const Copies<EmbeddingBagArgs>& copies,
                              const BagRows& rows, const std::vector<EmbeddingTable>& tables,
                              std::int64_t bags, bool mean) {
  const auto count = static_cast<std::int64_t>(tables.size());
  const std::int64_t sizes[] = {bags, count * rows.dim};
  Tensor out = empty(sizes, 2, rows.dtype_code);
  std::int64_t bad_bag = -1;
  std::int64_t indices = 0;
  for (const EmbeddingTable& table : tables) indices += table.index_count;
  const std::int64_t written = rows.dim * size_of(rows.dtype);
  const EmbeddingBagArgs args{
      .tables = tables.data(),
      .table_count = count,
      .bags = bags,
      .dim = rows.dim,
      .out = out.mutable_data(),
      .bad_bag = &bad_bag,
      .dtype = rows.dtype,
      .mean = mean,
      .stream = should_stream(bags * count * written),
  };
  const std::int64_t items = (bags + kBagsPerItem - 1) / kBagsPerItem * count;
  const std::int64_t moved = indices * rows.bytes + bags * count * written;
  run(copies, args, items, items > 0 ? moved / items : 0);
  if (bad_bag >= 0) fail_bag(op, args);
  return out;
}

// Rows of numbers, as they are.
inline BagRows rows_of_numbers(const char* op, const Tensor& weight) {
  const DType dtype = check_dtype(op, "weight", weight);
  return {dtype, weight.dtype_code(), weight.size(1), weight.size(1) * size_of(dtype)};
}

}  // namespace oxytorch
