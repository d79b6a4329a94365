/* What managed_span, handle.span and span_cm give while the group is on: a context manager for one span. */
#ifndef LENSFAST_MANAGER_H
#define LENSFAST_MANAGER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyTypeObject *lf_gated_span_type;
extern PyTypeObject *lf_ungated_span_type;

int lf_manager_init(void);

/* The functions and variables of lensfast._spans that managers use, from its dict. */
int lf_manager_set_up(PyObject *spans, PyObject *trace);

/* True once managers can be made. */
int lf_manager_ready(void);

/* managed_span(group, name, tracer, **attributes) for a group that is on. `tracer` may be NULL. */
PyObject *lf_manager_new(PyObject *group, PyObject *name, PyObject *tracer, PyObject *const *values, PyObject *kwnames);

#endif
