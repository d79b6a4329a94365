#include "gate.h"

#include "callargs.h"
#include "group.h"
#include "manager.h"
#include "noop.h"

static PyObject *enabled_box = NULL; /* a list of one frozenset: replaced and read as one item */
static PyObject *managed_span_in_full = NULL;

static PyObject *
enabled_ref(void)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyList_GetItemRef(enabled_box, 0);
#else
    return Py_NewRef(PyList_GET_ITEM(enabled_box, 0));
#endif
}

int
lf_gate_set_enabled(PyObject *frozen_set)
{
    return PyList_SetItem(enabled_box, 0, Py_NewRef(frozen_set));
}

int
lf_gate_contains(PyObject *group)
{
    PyObject *enabled = enabled_ref();
    if (enabled == NULL) {
        return -1;
    }
    int found = PySequence_Contains(enabled, group);
    Py_DECREF(enabled);
    return found;
}

/* is_span_group_enabled(group) */
static PyObject *
is_enabled(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *group;
    if (LF_LIKELY(nargs == 1 && kwnames == NULL)) {
        group = args[0];
    }
    else if (nargs == 0 && kwnames != NULL && PyTuple_GET_SIZE(kwnames) == 1 &&
             PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "group") == 0) {
        group = args[0];
    }
    else {
        PyErr_SetString(PyExc_TypeError, "is_span_group_enabled() takes exactly one argument: group");
        return NULL;
    }
    if (LF_LIKELY(PyUnicode_CheckExact(group))) {
        const LfGroup *found = lf_group_find(group);
        if (found != NULL && lf_group_on(found)) {
            Py_RETURN_TRUE;
        }
        Py_RETURN_FALSE;
    }
    int on = lf_gate_contains(group);
    return on < 0 ? NULL : PyBool_FromLong(on);
}

/* managed_span(group, name, tracer=None, **attributes) */
static PyObject *
managed_span(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (LF_LIKELY((nargs == 2 || nargs == 3) && PyUnicode_CheckExact(args[0]))) {
        const LfGroup *group = lf_group_find(args[0]);
        if (LF_LIKELY(group == NULL || !lf_group_on(group))) {
            if (kwnames == NULL || !lf_kwnames_repeat(kwnames, 1, nargs == 3)) {
                return lf_noop_ref();
            }
        }
        else if (lf_manager_ready() && (kwnames == NULL || !lf_kwnames_repeat(kwnames, 1, 1))) {
            return lf_manager_new(args[0], args[1], nargs == 3 ? args[2] : NULL, args + nargs, kwnames);
        }
    }
    return PyObject_Vectorcall(managed_span_in_full, args, (size_t)nargs, kwnames);
}

static PyMethodDef is_enabled_def = {
    "is_span_group_enabled", (PyCFunction)(void (*)(void))is_enabled, METH_FASTCALL | METH_KEYWORDS,
    "is_span_group_enabled(group)\n--\n\n"
    "Whether the span group named `group` is enabled: `group in enabled_span_groups()`.\n\n"
    "Case-sensitive. A name nobody registered is simply not enabled; an unhashable one raises TypeError.\n"
    "Lock-free and safe from any thread."};

static PyMethodDef managed_span_def = {
    "managed_span", (PyCFunction)(void (*)(void))managed_span, METH_FASTCALL | METH_KEYWORDS,
    "managed_span(group, name, tracer=None, **attributes)\n--\n\n"
    "A context manager for one span of `group`: yields the span, or None while the group is disabled.\n\n"
    "See lensfast.helpers for the whole of its behaviour, which is the same on both backends."};

static PyObject *
shared_function(PyMethodDef *def, PyObject *module_name)
{
    PyObject *function = PyCFunction_NewEx(def, NULL, module_name);
#if defined(Py_GIL_DISABLED)
    if (function != NULL) {
        lf_make_immortal(function); /* else all threads would count references in one place */
    }
#endif
    return function;
}

PyObject *
lf_gate_is_enabled_function(PyObject *module_name)
{
    return shared_function(&is_enabled_def, module_name);
}

PyObject *
lf_gate_managed_span_function(PyObject *module_name, PyObject *in_full)
{
    /* Not the builtin's self: pickle and __qualname__ would take it for the owner of a method. */
    Py_XSETREF(managed_span_in_full, Py_NewRef(in_full));
    return shared_function(&managed_span_def, module_name);
}

int
lf_gate_init(void)
{
    if (enabled_box != NULL) {
        return 0;
    }
    PyObject *empty = PyFrozenSet_New(NULL);
    if (empty == NULL) {
        return -1;
    }
    PyObject *box = PyList_New(1);
    if (box == NULL) {
        Py_DECREF(empty);
        return -1;
    }
    PyList_SET_ITEM(box, 0, empty);
    enabled_box = box;
    return 0;
}
