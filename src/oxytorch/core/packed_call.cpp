// A call of a linear layer with a packed weight, from Python's objects to the product, in one
// function of Python's: small layers take less time than the Python around them.
//
// It stands before the same in Python (optimize/passes/packed_layers.py), which runs where anything
// is not as it was when this was made, or is unusual.
#include <optional>

#include "core/export.h"
#include "core/modes.h"
#include "core/own_operators.h"
#include "core/places.h"
#include "core/process.h"
#include "core/python.h"

namespace oxytorch {

namespace {

// torch's `_linear_pointwise` for the weights that oneDNN packed.
using LinearOfOneDnn = AOTITorchError (*)(AtenTensorHandle x, AtenTensorHandle weight,
                                          AtenTensorHandle* bias, const char* post_op,
                                          const double** scalars, std::int64_t count,
                                          const char** algorithm, AtenTensorHandle* result);

LinearOfOneDnn linear_of_onednn() {
  static const auto found = named<LinearOfOneDnn>("aoti_torch_cpu__linear_pointwise");
  return found;
}

// THPVariable_Wrap, of a tensor by reference or, in older torch, by value, which the caller puts
// into memory of its own too, and takes away from there.
using Wrap = PyObject* (*)(AtenTensorHandle);

Wrap wrap_function() {
  static const Wrap found = [] {
    // Python loads it for itself alone.
    void* library = dlopen("libtorch_python.so", RTLD_LAZY | RTLD_NOLOAD);
    void* named = nullptr;
    for (const char* name :
         {"_Z16THPVariable_WrapRKN2at10TensorBaseE", "_Z16THPVariable_WrapN2at10TensorBaseE"}) {
      if (library && !named) named = dlsym(library, name);
    }
    return reinterpret_cast<Wrap>(named);
  }();
  return found;
}

AtenTensorHandle handle_in(PyObject* object) {
  return reinterpret_cast<AtenTensorHandle>(reinterpret_cast<char*>(object) + offsets().tensor);
}

const void* implementation_in(PyObject* object) {
  return *reinterpret_cast<const void* const*>(handle_in(object));
}

Tensor held(AtenTensorHandle handle) {
  AtenTensorHandle own = nullptr;
  check_call(aoti_torch_new_tensor_handle(handle, &own), "new_tensor_handle");
  return Tensor(own);
}

// What a call returns that computes nothing.
enum class Outcome { kProduct, kNotNow, kStale };

}  // namespace

// Addresses of objects are compared only; Python keeps the objects beside this.
class PackedCall {
 public:
  struct Given {
    PyObject *tensor_class, *weight_name, *weight, *bias_name, *bias;  // bias: null for no entry
    PyObject *forward_name, *forward, *functions, *function_name, *function;  // function: or null
    PyObject *clock, *packed;
    PyObject *module_class, *weight_class, *bias_class;  // bias_class: null without a bias
    std::uint64_t plain_keys, inference_keys;
    std::int64_t version, in_features, out_features, least_rows, most_rows;
    const char* format;  // of panels; null for oneDNN's order
  };

  explicit PackedCall(const Given& given)
      : given_(given),
        clock_(held(handle_in(given.clock))),
        packed_(held(handle_in(given.packed))) {
    check_call(aoti_torch_get_dtype(handle_in(given.weight), &dtype_), "get_dtype");
    weight_ = implementation_in(given.weight);
    if (!given.format) return;
    format_ = given.format;
    own_ = OwnOperator::find("oxytorch::linear_panels");
    arguments_.resize(own_->count);
    arguments_[kFormat] = {.text = &format_, .is_there = true};
    arguments_[kPanels] = {.tensor = packed_.handle(), .is_there = true};
    arguments_[kOutFeatures] = {.number = static_cast<StableIValue>(given.out_features),
                                .is_there = true};
    arguments_[kEpilogue] = arguments_[kActivation] = {.text = &none_, .is_there = true};
  }

  Outcome call(PyObject* x, PyObject* module, PyObject* parameters, PyObject*& result) const {
    const Python& api = python();
    if (!is_bare_inference() || verbose::on()) return Outcome::kNotNow;
    if (class_of(api, x) != given_.tensor_class || !fits(handle_in(x))) return Outcome::kNotNow;
    if (!is_current(api, module, parameters)) return Outcome::kStale;
    if (given_.bias_class && !is_plain_bias(api)) return Outcome::kNotNow;
    // Somebody else may take both from their owners meanwhile.
    PyObject* bias = given_.bias == api.none ? nullptr : given_.bias;
    api.hold(x);
    if (bias) api.hold(bias);
    void* state = api.unlock();
    AtenTensorHandle product = computed(handle_in(x), bias ? handle_in(bias) : nullptr);
    api.lock(state);
    if (bias) api.release(bias);
    api.release(x);
    if (!product) return Outcome::kNotNow;
    result = wrap_function()(product);
    aoti_torch_delete_tensor_object(product);
    return Outcome::kProduct;
  }

 private:
  enum Place { kX, kFormat, kPanels, kOutFeatures = 6, kBias, kOther, kEpilogue, kActivation };

  bool is_plain(AtenTensorHandle handle) const {
    const char* object = *reinterpret_cast<const char* const*>(handle);
    const std::uint64_t keys = read_word(object + offsets().keys);
    return keys == given_.plain_keys || keys == given_.inference_keys;
  }

  // `torch.utils.swap_tensors` leaves the object, and gives it another class and tensor.
  bool is_plain_bias(const Python& api) const {
    if (class_of(api, given_.bias) != given_.bias_class) return false;
    const AtenTensorHandle bias = handle_in(given_.bias);
    if (!is_plain(bias)) return false;
    std::int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    check_call(aoti_torch_get_dim(bias, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(bias, &sizes), "get_sizes");
    check_call(aoti_torch_get_strides(bias, &strides), "get_strides");
    return dim == 1 && sizes[0] == given_.out_features && strides[0] == 1;
  }

  bool fits(AtenTensorHandle x) const {
    if (!is_plain(x)) return false;
    std::int32_t dtype = 0;
    std::int64_t dim = 0, *sizes = nullptr;
    check_call(aoti_torch_get_dtype(x, &dtype), "get_dtype");
    check_call(aoti_torch_get_dim(x, &dim), "get_dim");
    check_call(aoti_torch_get_sizes(x, &sizes), "get_sizes");
    if (dtype != dtype_ || dim == 0 || sizes[dim - 1] != given_.in_features) return false;
    std::int64_t rows = 1;
    for (std::int64_t i = 0; i < dim - 1; ++i) rows *= sizes[i];
    return rows >= given_.least_rows && rows <= given_.most_rows;
  }

  bool is_current(const Python& api, PyObject* module, PyObject* parameters) const {
    return api.dict_get(parameters, given_.weight_name) == given_.weight &&
           api.dict_get(parameters, given_.bias_name) == given_.bias &&
           version_function()(clock_.handle()) == given_.version &&
           class_of(api, given_.weight) == given_.weight_class &&
           implementation_in(given_.weight) == weight_ &&
           class_of(api, module) == given_.module_class &&
           api.in_class(given_.module_class, given_.forward_name) == given_.forward &&
           (!given_.function ||
            api.dict_get(given_.functions, given_.function_name) == given_.function);
  }

  // Null where the product is for others to compute: what is wrong they say.
  AtenTensorHandle computed(AtenTensorHandle x, AtenTensorHandle bias) const {
    AtenTensorHandle product = nullptr;
    if (!own_) {
      const char* algorithm = "";
      const auto failed = linear_of_onednn()(x, packed_.handle(), bias ? &bias : nullptr, "none",
                                             nullptr, 0, &algorithm, &product);
      return failed == AOTI_TORCH_SUCCESS ? product : nullptr;
    }
    lending::Argument arguments[kActivation + 1];
    std::copy(arguments_.begin(), arguments_.end(), arguments);
    arguments[kX] = {.tensor = x, .is_there = true};
    if (bias) arguments[kBias] = {.tensor = bias, .is_there = true};
    try {
      return own_->lent(arguments, &product) ? product : nullptr;
    } catch (const std::exception&) {
      return nullptr;
    }
  }

  Given given_;
  Tensor clock_, packed_;
  const void* weight_ = nullptr;
  std::int32_t dtype_ = 0;
  std::string format_, none_ = "none";
  const OwnOperator* own_ = nullptr;
  std::vector<lending::Argument> arguments_;
};

namespace {

constexpr char kCapsule[] = "oxytorch.packed_call";

void forget(PyObject* capsule) {
  delete static_cast<PackedCall*>(python().held_by(capsule, kCapsule));
}

// (x, module, its parameters): the layer's result; None where it is for others to compute; False
// where this will never compute one again.
PyObject* call(PyObject* self, PyObject* const* arguments, std::intptr_t count) {
  const Python& api = python();
  PyObject* result = nullptr;
  Outcome outcome = Outcome::kStale;
  if (count == 3) {
    void* own = api.held_by(api.tuple_get(self, 0), kCapsule);
    outcome = static_cast<PackedCall*>(own)->call(arguments[0], arguments[1], arguments[2], result);
  }
  if (outcome == Outcome::kProduct) return result;  // null: with the error of Python
  if (outcome == Outcome::kStale) return api.boolean(0);
  api.hold(api.none);
  return api.none;
}

}  // namespace

}  // namespace oxytorch

OXY_EXPORT int oxytorch_can_call_packed(int in_panels) {
  using namespace oxytorch;
  const Python& api = python();
  const Offsets& in = offsets();
  const bool has_python = api.is_whole() && api.quick_function && api.tuple_of && api.unlock &&
                          api.lock && api.in_class;
  return has_python && in.kind && in.keys && in.tensor && version_function() && wrap_function() &&
         (in_panels ? OwnOperator::find("oxytorch::linear_panels") != nullptr
                    : linear_of_onednn() != nullptr);
}

// kept: a tuple of the objects whose addresses are given, which the function keeps.
OXY_EXPORT oxytorch::PyObject* oxytorch_packed_call(const oxytorch::PackedCall::Given* given,
                                                    oxytorch::PyObject* kept) {
  using namespace oxytorch;
  static QuickDefinition definition = {"packed_call", &call, kPositionalArguments, nullptr};
  const Python& api = python();
  PyObject* capsule = api.capsule(new PackedCall(*given), kCapsule, &forget);
  PyObject* self = capsule ? api.tuple_of(2, capsule, kept) : nullptr;
  PyObject* function = self ? api.quick_function(&definition, self, nullptr) : nullptr;
  if (capsule) api.release(capsule);
  if (self) api.release(self);
  return function;
}
