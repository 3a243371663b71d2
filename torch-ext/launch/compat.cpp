// What the string streams in torch's headers need from libstdc++, compiled into this library, so that it stays within
// manylinux_2_28 (GLIBCXX 3.4.24) and binds no C++ runtime symbol to libc10 by accident. Compile with the same -std as
// the rest.
#include <sstream>

// A newer libstdc++ reads this glibc 2.32 variable in its inlined reference counts; 0 selects the atomic path.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
