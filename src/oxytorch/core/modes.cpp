// Tells whether operators called on this thread do what they say and nothing more.
//
// Autocast, tracing, functional transforms and tensor modes all show in the thread's local sets of
// dispatch keys. Torch's stable ABI has no way to those; where the names below are not found, or
// torch is newer than those looked at (NEWEST_TORCH in core/modes.py), Python asks torch instead.
#include <dlfcn.h>

#include <cstdint>

#include "core/torch_api.h"

namespace oxytorch {

namespace {

// The numbers of core/modes.py.
enum Mode : int { kPlain, kGradients, kOther };

struct KeySets {
  std::uint64_t included, excluded;
};

// c10::impl::raw_local_dispatch_key_set, kept so that it is zero where nothing is active.
const KeySets* local_keys() {
  static thread_local const auto found =
      static_cast<const KeySets*>(dlsym(RTLD_DEFAULT, "_ZN3c104impl26raw_local_dispatch_key_setE"));
  return found;
}

using Asks = bool (*)();

// c10::GradMode::is_enabled()
Asks gradients_enabled() {
  static const auto found =
      reinterpret_cast<Asks>(dlsym(RTLD_DEFAULT, "_ZN3c108GradMode10is_enabledEv"));
  return found;
}

// at::impl::PythonTorchFunctionTLS::stack_len()
using Counts = std::int64_t (*)();

Counts function_modes() {
  static const auto found = reinterpret_cast<Counts>(
      dlsym(RTLD_DEFAULT, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv"));
  return found;
}

// Function modes of ours that are active on this thread: they leave derived values as they are.
thread_local std::int64_t own_modes = 0;

// Recordings of ours that are active on this thread: they want to see the derived values.
thread_local std::int64_t recordings = 0;

KeySets inference_mode{0, 0};

}  // namespace

}  // namespace oxytorch

#define OXY_EXPORT extern "C" __attribute__((visibility("default")))

// Called once, in inference mode, to learn how that looks. Returns whether modes can be told.
OXY_EXPORT int oxytorch_learn_inference_mode() {
  using namespace oxytorch;
  if (!local_keys() || !gradients_enabled() || !function_modes()) return 0;
  inference_mode = *local_keys();
  return 1;
}

OXY_EXPORT int oxytorch_mode() {
  using namespace oxytorch;
  if (recordings > 0) return gradients_enabled()() ? kGradients : kPlain;
  const KeySets keys = *local_keys();
  if (keys.included != 0 || keys.excluded != 0) {
    const bool is_inference =
        keys.included == inference_mode.included && keys.excluded == inference_mode.excluded;
    if (!is_inference) return kOther;
  }
  if (function_modes()() != own_modes) return kOther;
  return gradients_enabled()() ? kGradients : kPlain;
}

OXY_EXPORT void oxytorch_enter_own_mode(int count) { oxytorch::own_modes += count; }

OXY_EXPORT void oxytorch_record(int count) { oxytorch::recordings += count; }
