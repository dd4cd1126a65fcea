#include "program/saved_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>

namespace oxytorch {

namespace {

using json::Kind;
using json::Value;
namespace stable = torch::stable::detail;

constexpr std::int64_t kLargestHeader = 100 << 20;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

struct Dtype {
  const char* name;
  const char* in_torch;
  std::int32_t (*code)();
};

constexpr Dtype kDtypes[] = {
    {"BOOL", "bool", aoti_torch_dtype_bool},
    {"U8", "uint8", aoti_torch_dtype_uint8},
    {"I8", "int8", aoti_torch_dtype_int8},
    {"I16", "int16", aoti_torch_dtype_int16},
    {"I32", "int32", aoti_torch_dtype_int32},
    {"I64", "int64", aoti_torch_dtype_int64},
    {"F16", "float16", aoti_torch_dtype_float16},
    {"BF16", "bfloat16", aoti_torch_dtype_bfloat16},
    {"F32", "float32", aoti_torch_dtype_float32},
    {"F64", "float64", aoti_torch_dtype_float64},
    {"F8_E4M3", "float8_e4m3fn", aoti_torch_dtype_float8_e4m3fn},
    {"F8_E5M2", "float8_e5m2", aoti_torch_dtype_float8_e5m2},
    {"C64", "complex64", aoti_torch_dtype_complex64},
};

std::vector<std::int64_t> wholes(const Value& list) {
  std::vector<std::int64_t> found;
  for (const Value& each : list.items) {
    if (each.expect(Kind::integer, "a number of a shape or place").integer < 0) {
      fail("expected shapes and places of 0 or more");
    }
    found.push_back(each.integer);
  }
  return found;
}

TensorPlace place_of(const std::string& name, const Value& entry, std::int64_t data,
                     std::int64_t size) {
  TensorPlace place;
  const std::string& dtype = entry.at("dtype", Kind::text).text;
  const auto known = std::ranges::find_if(kDtypes, [&](const Dtype& d) { return dtype == d.name; });
  if (known == std::end(kDtypes)) fail("tensor '" + name + "' has the unknown dtype " + dtype);
  place.dtype = known->in_torch;
  place.dtype_code = known->code();
  place.item_size = static_cast<std::int64_t>(aoti_torch_dtype_element_size(place.dtype_code));
  place.shape = wholes(entry.at("shape", Kind::list));
  const std::vector<std::int64_t> offsets = wholes(entry.at("data_offsets", Kind::list));
  std::int64_t bytes = place.item_size;
  bool is_sound = offsets.size() == 2;
  for (std::int64_t extent : place.shape)
    is_sound &= !__builtin_mul_overflow(bytes, extent, &bytes);
  is_sound = is_sound && offsets[0] <= offsets[1] && offsets[1] <= size - data &&
             offsets[1] - offsets[0] == bytes;
  if (!is_sound) {
    fail("tensor '" + name +
         "' does not lie within the file, or is not as long as its shape says: "
         "the file is truncated or was altered");
  }
  place.begin = data + offsets[0];
  place.end = data + offsets[1];
  return place;
}

AtenTensorHandle called(const char* name, const char* overload, StableIValue* stack) {
  call_operator(name, overload, stack);
  return reinterpret_cast<AtenTensorHandle>(stack[0]);
}

// The bytes of a file as a tensor; private to this process where it writes to them.
AtenTensorHandle mapped(const std::string& path, std::int64_t size) {
  const auto some = [](StableIValue value) {
    return stable::from(std::optional<StableIValue>(value));
  };
  StableIValue stack[7] = {text_of(path),
                           some(stable::from(false)),
                           some(stable::from(size)),
                           some(stable::from(aoti_torch_dtype_uint8())),
                           stable::from(std::nullopt),
                           stable::from(std::nullopt),
                           stable::from(std::nullopt)};
  return called("aten::from_file", "", stack);
}

}  // namespace

std::int32_t dtype_of(const std::string& name) {
  const auto known =
      std::ranges::find_if(kDtypes, [&](const Dtype& d) { return name == d.in_torch; });
  return known == std::end(kDtypes) ? -1 : known->code();
}

SavedFile::SavedFile(const std::string& path) {
  struct statx found{};  // stat of a newer glibc is a symbol that older ones lack
  if (statx(AT_FDCWD, path.c_str(), 0, STATX_TYPE | STATX_SIZE, &found) != 0 ||
      !S_ISREG(found.stx_mode))
    fail("expected a file, found none");
  size_ = static_cast<std::int64_t>(found.stx_size);
  if (size_ < 10) fail("expected a safetensors file, got " + std::to_string(size_) + " bytes");
  all_ = TensorOwner(mapped(path, size_));
  const void* data = nullptr;
  check_call(torch_get_const_data_ptr(all_.get(), &data), "const_data_ptr");
  data_ = static_cast<const std::uint8_t*>(data);
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | data_[i];
  if (length < 2 || length > static_cast<std::uint64_t>(std::min(kLargestHeader, size_ - 8))) {
    fail("expected a safetensors file, got one that announces a header of " +
         std::to_string(length) + " bytes; it is truncated or of another kind");
  }
  read_header(data_ + 8, static_cast<std::int64_t>(length));
}

void SavedFile::read_header(const std::uint8_t* text, std::int64_t length) {
  const Value header =
      json::read({reinterpret_cast<const char*>(text), static_cast<std::size_t>(length)});
  header.expect(Kind::object, "the header");
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const auto& [name, entry] : header.members) {
    if (name == "__metadata__") {
      metadata_ = entry;
      continue;
    }
    const auto [place, is_new] = places_.emplace(name, place_of(name, entry, 8 + length, size_));
    if (!is_new) fail("tensor '" + name + "' is there twice: the file was altered");
    spans.emplace_back(place->second.begin, place->second.end);
  }
  std::ranges::sort(spans);
  std::int64_t end = 8 + length;
  for (const auto& span : spans) {
    if (span.first != end) fail("tensors leave gaps or overlap: the file was altered");
    end = span.second;
  }
  if (end != size_) fail("the last tensor does not end where the file does: it was altered");
}

TensorOwner SavedFile::tensor(const TensorPlace& place,
                              const std::vector<std::int64_t>& order) const {
  StableIValue stack[5] = {all_.shared(), stable::from(std::int64_t{0}),
                           stable::from(std::optional<StableIValue>(stable::from(place.begin))),
                           stable::from(std::optional<StableIValue>(stable::from(place.end))),
                           stable::from(std::int64_t{1})};
  TensorOwner made(called("aten::slice", "Tensor", stack));
  if (place.begin % place.item_size) {  // another writer's: it cannot be read at this address
    StableIValue copied[2] = {made.shared(), stable::from(std::nullopt)};
    made = TensorOwner(called("aten::clone", "", copied));
  }
  StableIValue viewed[2] = {made.shared(), stable::from(place.dtype_code)};
  made = TensorOwner(called("aten::view", "dtype", viewed));
  StableIValue shaped[2] = {made.shared(), list_of(place.shape)};
  made = TensorOwner(called("aten::reshape", "", shaped));
  std::vector<std::int64_t> inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) inverse[order[i]] = static_cast<std::int64_t>(i);
  StableIValue turned[2] = {made.shared(), list_of(inverse)};
  return TensorOwner(called("aten::permute", "", turned));
}

}  // namespace oxytorch
