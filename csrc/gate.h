/* The module-level functions of the gate and the published set of enabled names. */
#ifndef LENSFAST_GATE_H
#define LENSFAST_GATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

int lf_gate_init(void);

/* Replaces the set that odd (non-str, or str subclass) group arguments are looked up in. */
int lf_gate_set_enabled(PyObject *frozen_set);

/* `group in enabled` for any object: 1, 0, or -1 with an exception. */
int lf_gate_contains(PyObject *group);

/* A builtin `is_span_group_enabled` whose __module__ is `module_name`. */
PyObject *lf_gate_is_enabled_function(PyObject *module_name);

/* A builtin `managed_span` that answers a site itself and hands an odd call to `in_full`. */
PyObject *lf_gate_managed_span_function(PyObject *module_name, PyObject *in_full);

#endif
