#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "ops/_attention/entry.h"
#include "ops/cached_attention/kernel.h"

namespace oxytorch {

static constexpr const char* kCached = "cached_attention";

// Splits of few query rows: enough for all threads, few enough that joining them stays cheap.
static constexpr std::int64_t kMostItems = 128;

// Numbers of all sequences: of one element, or [batch].
static const std::int64_t* check_numbers(const char* argument, const Tensor& tensor,
                                         std::int64_t batch, bool may_be_one, Tensor& copy) {
  check_cpu(kCached, argument, tensor);
  const bool fits =
      (may_be_one && tensor.numel() == 1) || (tensor.dim() == 1 && tensor.size(0) == batch);
  if (tensor.dtype_code() != aoti_torch_dtype_int64() || !fits) {
    fail(kCached, argument,
         std::string(may_be_one ? "of one int64, or" : "of int64 and") + " of shape [" +
             std::to_string(batch) + "]",
         dtype_name(tensor.dtype_code()) + " of shape " + describe(tensor.sizes()));
  }
  return static_cast<const std::int64_t*>(contiguous_data(tensor, copy));
}

// Where the sequences of a call stand, and in which rows of the cache.
struct Sequences {
  std::vector<CachedSequence> each;
  std::int64_t longest = 0;  // start of the longest
  bool have_own_starts = false;
};

static Sequences describe_sequences(std::int64_t batch, std::int64_t start,
                                    const std::optional<Tensor>& starts,
                                    const std::optional<Tensor>& cache_rows, std::int64_t length,
                                    const Tensor& cache) {
  Sequences found;
  Tensor copies[2];
  const std::int64_t *added = nullptr, *rows = nullptr;
  if (starts) {
    added = check_numbers("start_tensor", *starts, batch, true, copies[0]);
    found.have_own_starts = starts->numel() > 1 || cache_rows;
  }
  if (cache_rows) rows = check_numbers("cache_rows", *cache_rows, batch, false, copies[1]);
  const bool have_own = starts && starts->numel() > 1;
  const std::int64_t capacity = cache.size(2), all = cache.size(0);
  std::vector<bool> taken(rows ? all : 0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t own = start + (added ? added[have_own ? b : 0] : 0);
    if (own < 0 || own + length > capacity) {
      fail(kCached, "start",
           "and length that fit the cache of " + std::to_string(capacity) + " positions",
           "start " + std::to_string(own) + " and length " + std::to_string(length) +
               "; make a larger cache");
    }
    const std::int64_t row = rows ? rows[b] : b;
    if (rows) {
      if (row < 0 || row >= all || taken[row]) {
        fail(kCached, "cache_rows",
             "with different rows of the cache, 0 to " + std::to_string(all - 1),
             std::to_string(row) + (row < 0 || row >= all ? "" : " twice"));
      }
      taken[row] = true;
    }
    found.longest = std::max(found.longest, own);
    found.each.push_back({.row = row, .start = own, .first_key = 0, .split_keys = 0, .splits = 1});
  }
  return found;
}

static void check_rows(const Tensor& query, const Tensor& key, const Tensor& value) {
  if (query.dim() != 4 || query.size(3) == 0 || query.size(3) > kCachedMostDim) {
    fail(kCached, "query",
         "of shape [batch, heads, length, head_dim] with head_dim 1 to " +
             std::to_string(kCachedMostDim),
         describe(query.sizes()));
  }
  const bool fits = key.dim() == 4 && key.size(0) == query.size(0) &&
                    key.size(2) == query.size(2) && key.size(3) == query.size(3);
  if (!fits) {
    fail(kCached, "key",
         "of shape [" + std::to_string(query.size(0)) + ", kv_heads, " +
             std::to_string(query.size(2)) + ", " + std::to_string(query.size(3)) + "]",
         describe(key.sizes()));
  }
  if (key.size(1) == 0 ? query.size(1) != 0 : query.size(1) % key.size(1) != 0) {
    fail(kCached, "key",
         "with a number of heads that divides the query's " + std::to_string(query.size(1)),
         std::to_string(key.size(1)));
  }
  check_cpu(kCached, "key", key);
  check_cpu(kCached, "value", value);
  check_same_dtype(kCached, "key", key, query);
  check_same_dtype(kCached, "value", value, query);
  check_shape(kCached, "value", value, key.sizes());
}

static CacheType cache_type(const Tensor& cache) {
  const std::int32_t code = cache.dtype_code();
  if (code == aoti_torch_dtype_float32()) return CacheType::float32;
  if (code == aoti_torch_dtype_bfloat16()) return CacheType::bfloat16;
  if (code == aoti_torch_dtype_int8()) return CacheType::int8;
  fail(kCached, "key_cache", "of dtype float32, bfloat16 or int8", dtype_name(code));
}

static void describe_cache(const char* argument, const Tensor& cache, const Tensor& rows,
                           bool has_rows, CachedTensor& to) {
  check_cpu(kCached, argument, cache);
  const bool fits = cache.dim() == 4 && (has_rows || cache.size(0) == rows.size(0)) &&
                    cache.size(1) == rows.size(1) && cache.size(3) == rows.size(3);
  if (!fits) {
    fail(kCached, argument,
         "of shape [" + (has_rows ? "rows" : std::to_string(rows.size(0))) + ", " +
             std::to_string(rows.size(1)) + ", capacity, " + std::to_string(rows.size(3)) + "]",
         describe(cache.sizes()));
  }
  if (cache.size(3) > 1 && cache.stride(3) != 1) {
    fail(kCached, argument, "with dense head_dim", "strides " + describe(cache.strides()));
  }
  to.cache = cache.mutable_data();
  to.cache_strides = strides_of(cache);
}

static void describe_scales(const char* argument, const std::optional<Tensor>& scales,
                            const Tensor& cache, CachedTensor& to) {
  const bool wanted = cache.dtype_code() == aoti_torch_dtype_int8();
  if (wanted != scales.has_value()) {
    fail(kCached, argument, wanted ? "beside a cache of int8" : "only beside a cache of int8",
         wanted ? "none" : "a cache of " + dtype_name(cache.dtype_code()));
  }
  if (!wanted) return;
  check_cpu(kCached, argument, *scales);
  check_shape(kCached, argument, *scales, {cache.sizes().values, 3});
  if (scales->dtype_code() != aoti_torch_dtype_float32()) {
    fail(kCached, argument, "of dtype float32", dtype_name(scales->dtype_code()));
  }
  if (scales->size(2) > 1 && scales->stride(2) != 1) {
    fail(kCached, argument, "with dense positions", "strides " + describe(scales->strides()));
  }
  to.scales = static_cast<float*>(scales->mutable_data());
  to.scale_strides[0] = scales->stride(0);
  to.scale_strides[1] = scales->stride(1);
}

// cos or sin: [length, rotary_dim] or [batch, length, rotary_dim]; `copy` owns a dense copy.
static CachedFactor describe_angles(const char* argument, const Tensor& angles, const Tensor& query,
                                    DType dtype, std::int64_t rotary_dim, Tensor& copy) {
  check_cpu(kCached, argument, angles);
  const std::int64_t shape[] = {angles.dim() == 3 && angles.size(0) == 1 ? 1 : query.size(0),
                                query.size(2), rotary_dim};
  check_shape(kCached, argument, angles,
              angles.dim() == 3 ? Extents{shape, 3} : Extents{shape + 1, 2});
  const Tensor& dense = dense_rows(angles, copy);
  const bool per_sequence = dense.dim() == 3 && dense.size(0) > 1;
  return {dense.data(),
          {per_sequence ? dense.stride(0) : 0, dense.stride(-2)},
          check_weight_dtype(kCached, argument, angles, dtype)};
}

static CachedFactor describe_vector(const char* argument, const std::optional<Tensor>& vector,
                                    std::int64_t length, DType dtype, Tensor& copy) {
  if (!vector) return {};
  check_cpu(kCached, argument, *vector);
  check_vector(kCached, argument, *vector, length);
  return {
      contiguous_data(*vector, copy), {}, check_weight_dtype(kCached, argument, *vector, dtype)};
}

template <class Index>
static void check_rows(const Tensor& beams, std::int64_t sequences, std::int64_t positions) {
  for (std::int64_t b = 0; b < sequences; ++b) {
    const Index* row = static_cast<const Index*>(beams.data()) + b * beams.stride(0);
    Index least = 0, most = 0;
    for (std::int64_t t = 0; t < positions; ++t) {
      least = std::min(least, row[t]);
      most = std::max(most, row[t]);
    }
    if (least < 0 || most >= sequences) {
      fail(kCached, "beams", "with rows of the cache, 0 to " + std::to_string(sequences - 1),
           std::to_string(least < 0 ? least : most));
    }
  }
}

static void describe_beams(const Tensor& beams, std::int64_t batch, std::int64_t start,
                           CachedAttentionArgs& args) {
  check_cpu(kCached, "beams", beams);
  args.beams_are_wide = beams.dtype_code() == aoti_torch_dtype_int64();
  if (!args.beams_are_wide && beams.dtype_code() != aoti_torch_dtype_int32()) {
    fail(kCached, "beams", "of dtype int32 or int64", dtype_name(beams.dtype_code()));
  }
  if (beams.dim() != 2 || beams.size(0) != batch || beams.size(1) < start) {
    fail(kCached, "beams",
         "of shape [" + std::to_string(batch) + ", at least " + std::to_string(start) + "]",
         describe(beams.sizes()));
  }
  if (beams.size(1) > 1 && beams.stride(1) != 1) {
    fail(kCached, "beams", "with dense positions", "strides " + describe(beams.strides()));
  }
  if (args.beams_are_wide) {
    check_rows<std::int64_t>(beams, batch, start);
  } else {
    check_rows<std::int32_t>(beams, batch, start);
  }
  args.beams = beams.data();
  args.beams_stride = beams.stride(0);
}

// Few query rows share one item per split of the keys, which then also writes what lies in it; many
// are cut into items of their own, large ones while there are enough for all threads.
static void split_work(CachedAttentionArgs& args, Sequences& sequences) {
  const std::int64_t batch = static_cast<std::int64_t>(sequences.each.size());
  const std::int64_t pairs = std::max<std::int64_t>(batch * args.kv_heads, 1);
  const std::int64_t all = args.length * args.group;
  args.splits = args.row_blocks = 1;
  for (CachedSequence& each : sequences.each) each.split_keys = each.start + args.length;
  if (all > kCachedRows) {
    std::uint32_t threads = 1;
    check_call(torch_get_num_threads(&threads), "get_num_threads");
    constexpr std::int64_t kLeast = 32;
    args.rows = kCachedRows;
    while (args.rows > kLeast && pairs * all / args.rows < 4 * threads) args.rows /= 2;
    args.row_blocks = (all + args.rows - 1) / args.rows;
    return;
  }
  args.rows = all;
  args.write_in_attend = true;
  // Sequences of their own lengths are split as each is alone.
  const std::int64_t together = sequences.have_own_starts ? args.kv_heads : pairs;
  for (CachedSequence& each : sequences.each) {
    if (args.window > 0 && each.start >= args.window) {
      each.first_key = (each.start - args.window + 1) / kCachedSplit * kCachedSplit;
    }
    const std::int64_t keys = each.start + args.length - each.first_key;
    each.split_keys = kCachedSplit;
    const auto splits = [&] { return (keys + each.split_keys - 1) / each.split_keys; };
    while (together * splits() > std::max(kMostItems, together)) each.split_keys *= 2;
    each.splits = splits();
    args.splits = std::max(args.splits, each.splits);
  }
}

static void describe_caches(const Tensor& key, const Tensor& key_cache, const Tensor& value_cache,
                            bool have_rows, CachedAttentionArgs& args) {
  check_same_dtype(kCached, "value_cache", value_cache, key_cache);
  describe_cache("key_cache", key_cache, key, have_rows, args.key);
  check_shape(kCached, "value_cache", value_cache, key_cache.sizes());
  describe_cache("value_cache", value_cache, key, have_rows, args.value);
}

// copies: of the three, where they are made.
static void describe_rows(const Tensor& query, const Tensor& key, const Tensor& value,
                          Tensor* copies, CachedAttentionArgs& args) {
  args.length = query.size(2);
  args.dim = query.size(3);
  args.kv_heads = key.size(1);
  args.group = args.kv_heads > 0 ? query.size(1) / args.kv_heads : 1;
  const Tensor& q = dense_rows(query, copies[0]);
  const Tensor& k = dense_rows(key, copies[1]);
  const Tensor& v = dense_rows(value, copies[2]);
  args.query = q.data();
  args.query_strides = strides_of(q);
  args.key.rows = k.data();
  args.key.strides = strides_of(k);
  args.value.rows = v.data();
  args.value.strides = strides_of(v);
}

// copies: of cos and sin, where they are made.
static void describe_rotation(const Tensor& query, const std::optional<Tensor>& cos,
                              const std::optional<Tensor>& sin, Tensor* copies,
                              CachedAttentionArgs& args) {
  if (cos.has_value() != sin.has_value()) {
    fail(kCached, "sin", "and cos together", sin ? "sin without cos" : "cos without sin");
  }
  if (!cos) return;
  check_minimum_dim(kCached, "cos", *cos, 2);
  check_same_dtype(kCached, "sin", *sin, *cos);
  args.rotary_dim = cos->size(-1);
  if (args.rotary_dim % 2 != 0 || args.rotary_dim > args.dim) {
    fail(kCached, "cos", "with an even last dimension of at most " + std::to_string(args.dim),
         describe(cos->sizes()));
  }
  args.cos = describe_angles("cos", *cos, query, args.dtype, args.rotary_dim, copies[0]);
  args.sin = describe_angles("sin", *sin, query, args.dtype, args.rotary_dim, copies[1]);
}

static void describe_scores(const std::optional<std::int64_t>& window,
                            const std::optional<double>& softcap,
                            const std::optional<double>& scale, CachedAttentionArgs& args) {
  if (window && *window < 1) fail(kCached, "window", "of at least 1", std::to_string(*window));
  if (softcap && !(*softcap > 0)) {
    fail(kCached, "softcap", "above 0", std::to_string(*softcap));
  }
  args.window = window.value_or(0);
  args.softcap = static_cast<float>(softcap.value_or(0.0));
  args.scale = static_cast<float>(scale ? *scale : 1.0 / std::sqrt(static_cast<double>(args.dim)));
}

static void run_phases(CachedAttentionArgs& args, std::int64_t batch, std::int64_t end) {
  const std::int64_t pairs = batch * args.kv_heads;
  const std::int64_t bytes = 2 * args.dim * (args.cache_type == CacheType::int8 ? 1 : 2);
  Tensor partials;
  if (args.splits > 1) {
    const std::int64_t count = pairs * args.splits * args.rows * (args.dim + 2);
    partials = empty(&count, 1, aoti_torch_dtype_float32());
    args.partials = static_cast<float*>(partials.mutable_data());
  }
  if (!args.write_in_attend) {
    args.phase = CachedPhase::write;
    run(cached_attention_copies, args, pairs * args.length, 4 * bytes);
  }
  args.phase = CachedPhase::attend;
  const std::int64_t keys = (end + args.splits - 1) / args.splits;
  run(cached_attention_copies, args, pairs * args.row_blocks * args.splits,
      keys * bytes * (8 + args.rows) / 8);
  if (args.splits == 1) return;
  args.phase = CachedPhase::combine;
  run(cached_attention_copies, args, pairs * args.rows, args.splits * args.dim * 4);
}

static Tensor cached_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
    const Tensor& value_cache, std::int64_t start, const std::optional<Tensor>& key_scales,
    const std::optional<Tensor>& value_scales, const std::optional<Tensor>& cos,
    const std::optional<Tensor>& sin, bool interleaved, const std::optional<Tensor>& query_norm,
    const std::optional<Tensor>& key_norm, double eps, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& beams, const std::optional<std::int64_t>& window,
    const std::optional<double>& softcap, const std::optional<Tensor>& sinks,
    const std::optional<double>& scale, bool causal, const std::optional<Tensor>& start_tensor,
    const std::optional<Tensor>& cache_rows) {
  CachedAttentionArgs args{};
  args.dtype = check_dtype(kCached, "query", query);
  check_rows(query, key, value);
  const std::int64_t batch = query.size(0), heads = query.size(1), length = query.size(2);
  args.cache_type = cache_type(key_cache);
  describe_caches(key, key_cache, value_cache, cache_rows.has_value(), args);
  describe_scales("key_scales", key_scales, key_cache, args.key);
  describe_scales("value_scales", value_scales, value_cache, args.value);
  Sequences sequences =
      describe_sequences(batch, start, start_tensor, cache_rows, length, key_cache);
  args.sequences = sequences.each.data();
  const std::int64_t end = sequences.longest + length;

  Tensor copies[8];
  describe_rows(query, key, value, copies, args);
  describe_rotation(query, cos, sin, copies + 3, args);
  args.query_norm = describe_vector("query_norm", query_norm, args.dim, args.dtype, copies[5]);
  args.key_norm = describe_vector("key_norm", key_norm, args.dim, args.dtype, copies[6]);
  const CachedFactor sink = describe_vector("sinks", sinks, heads, args.dtype, copies[7]);
  args.sinks = sink.data;
  args.sinks_dtype = sink.dtype;
  const std::int64_t scores[] = {batch, heads, length, end};
  if (mask) args.mask = describe_mask(kCached, *mask, args.dtype, scores, true);
  if (beams && cache_rows) fail(kCached, "beams", "without cache_rows", "both");
  if (beams) describe_beams(*beams, batch, sequences.longest, args);
  describe_scores(window, softcap, scale, args);
  args.eps = static_cast<float>(eps);
  args.interleaved = interleaved;
  args.causal = causal;

  const std::int64_t sizes[] = {batch, length, heads * args.dim};
  Tensor out = empty(sizes, 3, query.dtype_code());
  args.out = out.mutable_data();
  if (batch * heads * length == 0) return out;
  split_work(args, sequences);
  run_phases(args, batch, end);
  return out;
}

OXY_OP(cached_attention,
       "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
       "int start, Tensor(c!)? key_scales=None, Tensor(d!)? value_scales=None, Tensor? cos=None, "
       "Tensor? sin=None, bool interleaved=False, Tensor? query_norm=None, "
       "Tensor? key_norm=None, float eps=1e-06, Tensor? mask=None, Tensor? beams=None, "
       "int? window=None, float? softcap=None, Tensor? sinks=None, float? scale=None, "
       "bool causal=True, Tensor? start_tensor=None, Tensor? cache_rows=None) -> Tensor",
       cached_attention)

}  // namespace oxytorch
