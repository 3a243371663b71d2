// Included before every source file: glibc 2.34 moved dlopen and its kin into libc under a new version. Asking for the
// version that libdl always had keeps the library loadable on glibc 2.28. (kernel-builder's own glibc is old.)
#if defined(__x86_64__)
#define M3_OLDEST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define M3_OLDEST_GLIBC "GLIBC_2.17"
#endif

#ifdef M3_OLDEST_GLIBC
__asm__(".symver dlopen, dlopen@" M3_OLDEST_GLIBC);
__asm__(".symver dlsym, dlsym@" M3_OLDEST_GLIBC);
__asm__(".symver dlclose, dlclose@" M3_OLDEST_GLIBC);
__asm__(".symver dlerror, dlerror@" M3_OLDEST_GLIBC);
#endif
