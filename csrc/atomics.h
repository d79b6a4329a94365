/* What keeps threads apart: atomic operations, for compilers with and without the GCC builtins, and, where there is no
   GIL, locks. */
#ifndef LENSFAST_ATOMICS_H
#define LENSFAST_ATOMICS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if defined(__GNUC__) || defined(__clang__)
#define LF_LOAD_RELAXED(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define LF_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define LF_STORE_RELAXED(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define LF_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define LF_INCREMENT(p) ((void)__atomic_add_fetch((p), 1, __ATOMIC_RELEASE))
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
#define LF_INCREMENT(p) ((void)++*(p))
#define LF_LIKELY(x) (x)
#define LF_UNLIKELY(x) (x)
#endif

/* An object's own lock, which CPython lets go while its holder waits for another, as it does with the GIL: what was read
   of the object before any call may have changed after it. */
#if PY_VERSION_HEX < 0x030D0000
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }
#define Py_BEGIN_CRITICAL_SECTION2(a, b) {
#define Py_END_CRITICAL_SECTION2() }
#endif

/* A lock that is kept: between the two, no Python code may run and no reference be given back.

   Not a PyMutex, which is handed over to a thread that waits: where the process forks, or the interpreter ends, before
   that one goes on, nobody ever gives it back. Here a thread that waits takes the lock itself, while it is attached. */
#if defined(Py_GIL_DISABLED)
#include <sched.h>
#include <time.h>
typedef char LfMutex;

static inline void
lf_wait_for(LfMutex *mutex)
{
    for (int tries = 0; tries < 40; tries++) {
        if (!__atomic_load_n(mutex, __ATOMIC_RELAXED)) {
            return;
        }
        sched_yield();
    }
    PyThreadState *state = PyEval_SaveThread();
    while (__atomic_load_n(mutex, __ATOMIC_RELAXED)) {
        nanosleep(&(struct timespec){0, 50000}, NULL);
    }
    PyEval_RestoreThread(state);
}

static inline void
lf_lock(LfMutex *mutex)
{
    while (LF_UNLIKELY(__atomic_exchange_n(mutex, 1, __ATOMIC_ACQUIRE))) {
        lf_wait_for(mutex);
    }
}

#define LF_LOCK(mutex) lf_lock(mutex)
#define LF_UNLOCK(mutex) __atomic_store_n((mutex), 0, __ATOMIC_RELEASE)
#define LF_MUTEX_RESET(mutex) LF_UNLOCK(mutex)
#else
typedef char LfMutex;
#define LF_LOCK(mutex) ((void)(mutex))
#define LF_UNLOCK(mutex) ((void)(mutex))
#define LF_MUTEX_RESET(mutex) ((void)(mutex))
#endif

/* dict[key]: a new reference, or NULL, with or without an exception. */
static inline PyObject *
lf_dict_get(PyObject *dict, PyObject *key)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *value;
    PyDict_GetItemRef(dict, key, &value);
    return value;
#else
    return Py_XNewRef(PyDict_GetItemWithError(dict, key));
#endif
}

static inline PyObject *
lf_dict_get_text(PyObject *dict, const char *key)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *value;
    PyDict_GetItemStringRef(dict, key, &value);
    return value;
#else
    return Py_XNewRef(PyDict_GetItemString(dict, key));
#endif
}

#endif
