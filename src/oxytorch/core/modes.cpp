// Tells whether operators called on this thread do what they say and nothing more.
//
// Autocast, tracing, functional transforms and tensor modes all show in the thread's local sets of
// dispatch keys. Torch's stable ABI has no way to those; where the names below are not found, or
// torch is newer than those looked at (NEWEST_TORCH in _library.py), Python asks torch instead.
#include "core/modes.h"

#include <cstdint>

#include "core/export.h"
#include "core/process.h"
#include "core/torch_api.h"

namespace oxytorch {

namespace {

// The numbers of core/modes.py.
enum Mode : int { kPlain, kGradients, kOther, kLayers };

struct KeySets {
  std::uint64_t included, excluded;
};

// c10::impl::raw_local_dispatch_key_set, kept so that it is zero where nothing is active.
KeySets* local_keys() {
  static thread_local const auto found =
      named<KeySets*>("_ZN3c104impl26raw_local_dispatch_key_setE");
  return found;
}

using Asks = bool (*)();

// c10::GradMode::is_enabled()
Asks gradients_enabled() {
  static const auto found = named<Asks>("_ZN3c108GradMode10is_enabledEv");
  return found;
}

// at::impl::PythonTorchFunctionTLS::stack_len()
using Counts = std::int64_t (*)();

Counts function_modes() {
  static const auto found = named<Counts>("_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
  return found;
}

// at::hasCallbacks()
Asks has_callbacks() {
  static const auto found = named<Asks>("_ZN2at12hasCallbacksEv");
  return found;
}

// Function modes of ours that are active on this thread: they leave derived values as they are.
thread_local std::int64_t own_modes = 0;

// Recordings of ours that are active on this thread: they want to see the derived values.
thread_local std::int64_t recordings = 0;

// Times that this thread was asked for the own code of all but single layers.
thread_local std::int64_t own_code = 0;

KeySets inference_mode{0, 0};

// The keys under which torch turns signs.
std::uint64_t signs = 0;

// What a dispatch mode, under which recordings run, adds.
KeySets dispatch_mode{0, 0};

bool is_nothing_but(const KeySets& keys, const KeySets& known) {
  return keys.included == known.included && keys.excluded == known.excluded;
}

KeySets without(const KeySets& keys, const KeySets& known) {
  return {keys.included & ~known.included, keys.excluded & ~known.excluded};
}

}  // namespace

SignsAreRead::SignsAreRead() {
  if (signs == 0) return;
  skipped_ = local_keys()->excluded & signs;
  local_keys()->excluded &= ~skipped_;
}

SignsAreRead::~SignsAreRead() {
  if (skipped_ != 0) local_keys()->excluded |= skipped_;
}

bool is_bare_inference() {
  static const bool can_ask =
      local_keys() && gradients_enabled() && function_modes() && has_callbacks();
  if (!can_ask) return false;
  const KeySets& keys = *local_keys();
  const bool is_plain =
      (keys.included == 0 && keys.excluded == 0) || is_nothing_but(keys, inference_mode);
  return is_plain && recordings == 0 && own_code == 0 && !gradients_enabled()() &&
         function_modes()() == own_modes && !has_callbacks()();
}

}  // namespace oxytorch

// Called once, in inference mode, to learn how that looks. Returns whether modes can be told.
OXY_EXPORT int oxytorch_learn_inference_mode() {
  using namespace oxytorch;
  if (!local_keys() || !gradients_enabled() || !function_modes()) return 0;
  inference_mode = *local_keys();
  return 1;
}

// Called with the keys under which torch turns signs.
OXY_EXPORT void oxytorch_learn_signs(std::uint64_t keys) {
  if (oxytorch::local_keys()) oxytorch::signs = keys;
}

// Called with 0, and with 1 once a dispatch mode is entered, to learn how that looks.
OXY_EXPORT void oxytorch_learn_dispatch_mode(int is_entered) {
  using namespace oxytorch;
  static thread_local KeySets before{0, 0};
  if (is_entered) {
    dispatch_mode = without(*local_keys(), before);
  } else {
    before = *local_keys();
  }
}

OXY_EXPORT int oxytorch_mode() {
  using namespace oxytorch;
  KeySets keys = *local_keys();
  if (recordings > 0) keys = without(keys, dispatch_mode);
  if (keys.included != 0 || keys.excluded != 0) {
    if (!is_nothing_but(keys, inference_mode)) return kOther;
  }
  if (recordings == 0 && function_modes()() != own_modes) return kOther;
  if (gradients_enabled()()) return kGradients;
  return own_code > 0 ? kLayers : kPlain;
}

OXY_EXPORT void oxytorch_enter_own_mode(int count) { oxytorch::own_modes += count; }

OXY_EXPORT void oxytorch_ask_for_own_code(int count) { oxytorch::own_code += count; }

OXY_EXPORT void oxytorch_record(int count) { oxytorch::recordings += count; }

// Whether a profiler, or somebody else, is told of each call of an operator.
OXY_EXPORT int oxytorch_calls_are_noted() {
  const auto asks = oxytorch::has_callbacks();
  return !asks || asks();
}
