// SHA-256. Source: FIPS 180-4, section 6.2.
#pragma once

#include <cstddef>
#include <string>

namespace oxytorch {

// In hexadecimal digits.
std::string sha256(const void* data, std::size_t size);

}  // namespace oxytorch
