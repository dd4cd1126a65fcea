#include "faulty/kernel.h"

#include "core/vec.h"

namespace oxytorch::OXY_LEVEL {

template <class T>
static void faulty_rows(const FaultyArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t width = args.width;
  for (std::int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.x) + row * width;
    T* out = static_cast<T*>(args.out) + row * width;
    const auto put = [&](std::int64_t to, std::int64_t from) {
      f32v v = load(x + from, std::int64_t{1}) * args.factor;
      if (args.fault == Fault::wrong_at_one_level && OXY_LEVEL_INDEX == 0) v *= 1.25f;
      if (args.fault == Fault::rounded_towards_zero && sizeof(T) == 2) v *= 1.0f - 0x1p-7f;
      store(out + to, v, std::int64_t{1});
    };
    const bool skips = args.fault == Fault::last_element_not_written;
    for (std::int64_t i = 0; i < width - skips; ++i) put(i, i);
    if (args.fault == Fault::write_past_the_end) put(width, width - 1);
    if (args.fault == Fault::read_past_the_end) put(width - 1, width);
    if (args.fault == Fault::input_changed) store(x, splat(7.0f), std::int64_t{1});
  }
}

static void faulty(const FaultyArgs& args, std::int64_t begin, std::int64_t end) {
  with_type(args.dtype, [&](auto element) { faulty_rows<decltype(element)>(args, begin, end); });
}

}  // namespace oxytorch::OXY_LEVEL
