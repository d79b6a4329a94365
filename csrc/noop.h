/* The span of a disabled site: one shared, stateless context manager. */
#ifndef LENSFAST_NOOP_H
#define LENSFAST_NOOP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyObject *lf_noop;

int lf_noop_init(void);

/* Takes `object` out of reference counting where the interpreter can, so threads do not fight over it. */
void lf_make_immortal(PyObject *object);

static inline PyObject *
lf_noop_ref(void)
{
    return Py_NewRef(lf_noop);
}

#endif
