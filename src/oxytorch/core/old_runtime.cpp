// What headers of a newer libstdc++ call and that of GCC 8, in manylinux_2_28, lacks.
#include <new>
#include <sstream>

#ifdef __GLIBCXX__
namespace std {

[[noreturn]] void __throw_bad_array_new_length() { throw bad_array_new_length(); }

template basic_stringstream<char>::basic_stringstream();
#if __cplusplus >= 202002L && defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
template string basic_stringbuf<char>::str() &&;
#endif

}  // namespace std
#endif
