/* The few atomic operations the gate needs, for compilers with and without the GCC builtins. */
#ifndef LENSFAST_ATOMICS_H
#define LENSFAST_ATOMICS_H

#if defined(__GNUC__) || defined(__clang__)
#define LF_LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define LF_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define LF_STORE_RELAXED(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define LF_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define LF_LIKELY(x) __builtin_expect(!!(x), 1)
#define LF_UNLIKELY(x) __builtin_expect(!!(x), 0)
#elif defined(Py_GIL_DISABLED)
#error "lensfast needs a compiler with the GCC atomic builtins for a free-threaded CPython"
#else
/* Under the GIL an aligned word is read and written whole. */
#define LF_LOAD_RELAXED(p) (*(p))
#define LF_LOAD_ACQUIRE(p) (*(p))
#define LF_STORE_RELAXED(p, v) (*(p) = (v))
#define LF_STORE_RELEASE(p, v) (*(p) = (v))
#define LF_LIKELY(x) (x)
#define LF_UNLIKELY(x) (x)
#endif

#endif
