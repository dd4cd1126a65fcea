// Functions that glibc 2.29 to 2.34 renewed or moved into libc.so.6, and libstdc++ 3.4.30, at the
// versions that those of manylinux_2_28 have too. To be included where one is called; a test names
// what a library needs beyond.
#pragma once

#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)
#define OXY_OLD(name, version) __asm__(".symver " name ", " name "@" version)
OXY_OLD("dlerror", "GLIBC_2.2.5");
OXY_OLD("dlinfo", "GLIBC_2.3.3");
OXY_OLD("dlopen", "GLIBC_2.2.5");
OXY_OLD("dlsym", "GLIBC_2.2.5");
OXY_OLD("pow", "GLIBC_2.2.5");
OXY_OLD("pthread_mutex_trylock", "GLIBC_2.2.5");
OXY_OLD("pthread_once", "GLIBC_2.2.5");
// std::condition_variable::wait(std::unique_lock<std::mutex>&)
OXY_OLD("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE", "GLIBCXX_3.4.11");
#undef OXY_OLD
#endif
