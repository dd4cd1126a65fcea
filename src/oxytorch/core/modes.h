// What operators that are called on this thread see of their arguments.
#pragma once

#include <cstdint>

namespace oxytorch {

// While it lives, tensors whose signs are turned when they are read (Tensor.is_conj, is_neg) are
// read so. The operators that a dispatch mode calls skip what torch does for them: it was done
// for the arguments of the operator that the mode was told of, but not for what this makes of them.
class SignsAreRead {
 public:
  SignsAreRead();
  ~SignsAreRead();
  SignsAreRead(const SignsAreRead&) = delete;
  SignsAreRead& operator=(const SignsAreRead&) = delete;

 private:
  std::uint64_t skipped_ = 0;
};

// Whether this thread is in plain inference, without a mode but ours, and nobody is told of calls
// of operators.
bool is_bare_inference();

}  // namespace oxytorch
