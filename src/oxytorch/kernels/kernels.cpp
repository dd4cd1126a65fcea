// The functions of include/oxytorch/kernels.h: arguments as the entries of ops take them.
#include "oxytorch/kernels.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "core/levels.h"
#include "core/own_operators.h"
#include "kernels/memory.h"
#include "ops/panels/entry.h"

namespace oxytorch::kernels {

namespace {

using lending::Argument;

thread_local std::string last_error;

// No product of sizes overflows below it.
constexpr std::int64_t kMostElements = std::int64_t{1} << 46;

[[noreturn]] void refuse(const char* op, const std::string& what) {
  throw std::runtime_error(std::string(op) + ": expected " + what);
}

std::int32_t code_of(const char* op, OxytorchDtype dtype) {
  switch (dtype) {
    case OXYTORCH_FLOAT32:
      return aoti_torch_dtype_float32();
    case OXYTORCH_BFLOAT16:
      return aoti_torch_dtype_bfloat16();
    case OXYTORCH_FLOAT16:
      return aoti_torch_dtype_float16();
  }
  refuse(op, "a dtype of oxytorch/kernels.h, got number " + std::to_string(dtype));
}

const char* format_of(const char* op, OxytorchDtype dtype) {
  if (dtype == OXYTORCH_FLOAT32) return "fp32";
  if (dtype == OXYTORCH_BFLOAT16) return "bf16";
  refuse(op, "a packed dtype of float32 or bfloat16, got number " + std::to_string(dtype));
}

// Memory that the caller lends for one call.
class Lent {
 public:
  Lent(const char* op, const char* name, const void* data, std::int32_t dtype,
       std::initializer_list<std::int64_t> sizes) {
    std::int64_t elements = 1;
    for (const std::int64_t size : sizes) {
      if (size < 0 || (size > 0 && elements > kMostElements / size)) {
        refuse(op, std::string("sizes of ") + name + " from 0 on, that memory can hold, got " +
                       std::to_string(size));
      }
      memory_.sizes[memory_.dim++] = size;
      elements *= size;
    }
    std::int64_t step = 1;
    for (std::int64_t i = memory_.dim - 1; i >= 0; --i) {
      memory_.strides[i] = step;
      step *= std::max<std::int64_t>(memory_.sizes[i], 1);
    }
    bytes_ = elements * element_size(dtype);
    if (data == nullptr && bytes_ > 0) {
      refuse(op, std::string(name) + " that is not null");
    }
    memory_.data = const_cast<void*>(data);
    memory_.dtype = dtype;
  }

  Argument argument() {
    Argument given;
    given.tensor = reinterpret_cast<AtenTensorHandle>(&memory_);
    given.is_there = true;
    return given;
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  Memory memory_;
  std::int64_t bytes_;
};

// The same for what may be null.
class LentIfAny {
 public:
  LentIfAny(const char* op, const char* name, const void* data, std::int32_t dtype,
            std::initializer_list<std::int64_t> sizes) {
    if (data != nullptr) lent_.emplace(op, name, data, dtype, sizes);
  }

  Argument argument() { return lent_ ? lent_->argument() : Argument{}; }

 private:
  std::optional<Lent> lent_;
};

Argument number(double value) {
  Argument given;
  given.number = torch::stable::detail::from(value);
  given.is_there = true;
  return given;
}

Argument number(std::int64_t value) {
  Argument given;
  given.number = static_cast<StableIValue>(value);
  given.is_there = true;
  return given;
}

Argument flag(bool value) {
  Argument given;
  given.number = torch::stable::detail::from(value);
  given.is_there = true;
  return given;
}

Argument text(const std::string& value) {
  Argument given;
  given.text = &value;
  given.is_there = true;
  return given;
}

// Calls the entry of an op, whose result is `out`.
void call(const char* op, std::initializer_list<Argument> arguments, const Lent& out, void* data) {
  const OwnOperator* found = OwnOperator::find(std::string("oxytorch::") + op);
  if (found == nullptr || found->lent == nullptr) refuse(op, "a kernel in this library, got none");
  const Result result(data, out.bytes());
  AtenTensorHandle made = nullptr;
  if (!found->lent(arguments.begin(), &made)) refuse(op, "another dtype than float64");
  aoti_torch_delete_tensor_object(made);
}

// 1, or 0 with the error kept.
template <class Run>
int succeeds(const Run& run) {
  try {
    run();
    return 1;
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "an unknown error";
  }
  return 0;
}

}  // namespace

}  // namespace oxytorch::kernels

using namespace oxytorch::kernels;

#define OXY_KERNELS extern "C" __attribute__((visibility("default")))

OXY_KERNELS int oxytorch_kernels_abi(void) { return OXYTORCH_KERNELS_ABI; }

OXY_KERNELS const char* oxytorch_kernels_error(void) { return last_error.c_str(); }

OXY_KERNELS const char* oxytorch_kernels_level(void) {
  return oxytorch_level_name(oxytorch::active_level());
}

OXY_KERNELS int oxytorch_kernels_threads(void) { return threads(); }

OXY_KERNELS int oxytorch_kernels_set_threads(int threads) {
  return succeeds([&] {
    constexpr int kMost = 4096;
    if (threads < 1 || threads > kMost) {
      refuse("set_threads", "threads from 1 to 4096, got " + std::to_string(threads));
    }
    set_threads(threads);
  });
}

OXY_KERNELS int64_t oxytorch_kernels_packed_bytes(OxytorchDtype dtype, int64_t out_features,
                                                  int64_t in_features) {
  int64_t bytes = 0;
  succeeds([&] {
    constexpr const char* kOp = "packed_bytes";
    const auto& format = oxytorch::parse_format(kOp, "dtype", format_of(kOp, dtype));
    if (out_features < 1 || in_features < 1) {
      refuse(kOp, "out_features and in_features of at least 1, got " +
                      std::to_string(out_features) + " and " + std::to_string(in_features));
    }
    oxytorch::check_features(kOp, in_features, out_features);
    bytes = oxytorch::panels_of(out_features, false) * oxytorch::panel_bytes(format, in_features);
  });
  return bytes;
}

OXY_KERNELS int oxytorch_kernels_pack(OxytorchDtype dtype, const void* weight, int64_t out_features,
                                      int64_t in_features, void* packed) {
  return succeeds([&] {
    constexpr const char* kOp = "pack_panels";
    const int64_t bytes = oxytorch_kernels_packed_bytes(dtype, out_features, in_features);
    if (bytes == 0) throw std::runtime_error(last_error);
    const std::string format = format_of(kOp, dtype);
    Lent values(kOp, "weight", weight, code_of(kOp, dtype), {out_features, in_features});
    Lent out(kOp, "packed", packed, aoti_torch_dtype_uint8(), {bytes});
    if (reinterpret_cast<std::uintptr_t>(packed) % 64 != 0) {
      refuse(kOp, "packed at a multiple of 64 bytes");
    }
    call(kOp, {values.argument(), text(format), flag(false)}, out, packed);
  });
}

OXY_KERNELS int oxytorch_kernels_linear(OxytorchDtype dtype, const void* x, int64_t rows,
                                        int64_t in_features, OxytorchDtype packed_dtype,
                                        const void* packed, int64_t out_features, const void* bias,
                                        const char* epilogue, const void* other, void* out) {
  return succeeds([&] {
    constexpr const char* kOp = "linear_panels";
    const int64_t bytes = oxytorch_kernels_packed_bytes(packed_dtype, out_features, in_features);
    if (bytes == 0) throw std::runtime_error(last_error);
    const std::int32_t code = code_of(kOp, dtype);
    const std::string format = format_of(kOp, packed_dtype), none = "none";
    const std::string name = epilogue == nullptr ? none : epilogue;
    if (oxytorch::is_gated(oxytorch::parse_epilogue(kOp, name))) {
      refuse(kOp, "an epilogue of one product, got '" + name + "'");
    }
    if (reinterpret_cast<std::uintptr_t>(packed) % 64 != 0) {
      refuse(kOp, "packed at a multiple of 64 bytes");
    }
    Lent rows_of_x(kOp, "x", x, code, {rows, in_features});
    Lent panels(kOp, "packed", packed, aoti_torch_dtype_uint8(), {bytes});
    LentIfAny added(kOp, "bias", bias, code, {out_features});
    LentIfAny others(kOp, "other", other, code, {rows, out_features});
    const Lent result(kOp, "out", out, code, {rows, out_features});
    if (rows == 0) return;  // memory of which may be null
    call(kOp,
         {rows_of_x.argument(),
          text(format),
          panels.argument(),
          {},
          {},
          {},
          number(out_features),
          added.argument(),
          others.argument(),
          text(name),
          text(none)},
         result, out);
  });
}

OXY_KERNELS int oxytorch_kernels_layer_norm(OxytorchDtype dtype, const void* x, int64_t rows,
                                            int64_t width, const void* weight, const void* bias,
                                            double eps, void* out) {
  return succeeds([&] {
    constexpr const char* kOp = "layer_norm";
    const std::int32_t code = code_of(kOp, dtype);
    Lent given(kOp, "x", x, code, {rows, width});
    LentIfAny scale(kOp, "weight", weight, code, {width});
    LentIfAny added(kOp, "bias", bias, code, {width});
    const Lent result(kOp, "out", out, code, {rows, width});
    call(kOp, {given.argument(), scale.argument(), added.argument(), number(eps)}, result, out);
  });
}

OXY_KERNELS int oxytorch_kernels_rms_norm(OxytorchDtype dtype, const void* x, int64_t rows,
                                          int64_t width, const void* weight, double eps,
                                          void* out) {
  return succeeds([&] {
    constexpr const char* kOp = "rms_norm";
    const std::int32_t code = code_of(kOp, dtype);
    Lent given(kOp, "x", x, code, {rows, width});
    LentIfAny scale(kOp, "weight", weight, code, {width});
    const Lent result(kOp, "out", out, code, {rows, width});
    call(kOp, {given.argument(), scale.argument(), number(eps)}, result, out);
  });
}

OXY_KERNELS int oxytorch_kernels_softmax(OxytorchDtype dtype, const void* x, int64_t rows,
                                         int64_t width, double scale, void* out) {
  return succeeds([&] {
    constexpr const char* kOp = "softmax";
    const std::int32_t code = code_of(kOp, dtype);
    Lent given(kOp, "x", x, code, {rows, width});
    const Lent result(kOp, "out", out, code, {rows, width});
    call(kOp, {given.argument(), number(scale), {}}, result, out);
  });
}

OXY_KERNELS int oxytorch_kernels_attention(OxytorchDtype dtype, const void* query, const void* key,
                                           const void* value, int64_t batch, int64_t heads,
                                           int64_t queries, int64_t keys, int64_t width,
                                           double scale, int is_causal, void* out) {
  return succeeds([&] {
    constexpr const char* kOp = "attention";
    const std::int32_t code = code_of(kOp, dtype);
    Lent q(kOp, "query", query, code, {batch, heads, queries, width});
    Lent k(kOp, "key", key, code, {batch, heads, keys, width});
    Lent v(kOp, "value", value, code, {batch, heads, keys, width});
    const Lent result(kOp, "out", out, code, {batch, queries, heads, width});
    call(kOp,
         {q.argument(),
          k.argument(),
          v.argument(),
          {},
          number(scale),
          flag(is_causal != 0),
          flag(false)},
         result, out);
  });
}
