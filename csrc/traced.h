/* What trace_fn returns: a callable that is its function while the group is off and its runner while it is on. */
#ifndef LENSFAST_TRACED_H
#define LENSFAST_TRACED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyTypeObject *lf_traced_type;

int lf_traced_init(void);

/* A new traced function. `group` is a GroupHandle, or whatever odd object the caller named as group. `shown` is a
   Python function of the same behaviour, whose attributes it shows. */
PyObject *lf_traced_new(PyObject *function, PyObject *group, PyObject *runner, PyObject *shown);

#endif
