#include "noop.h"

#include "atomics.h"

PyObject *lf_noop = NULL;

void
lf_make_immortal(PyObject *object)
{
#if defined(Py_GIL_DISABLED)
    object->ob_tid = _Py_UNOWNED_TID;
    object->ob_ref_local = _Py_IMMORTAL_REFCNT_LOCAL;
    object->ob_ref_shared = 0;
#elif PY_VERSION_HEX >= 0x030E0000
    Py_SET_REFCNT(object, _Py_IMMORTAL_INITIAL_REFCNT);
#elif PY_VERSION_HEX >= 0x030C0000
    Py_SET_REFCNT(object, _Py_IMMORTAL_REFCNT);
#else
    Py_INCREF(object); /* 3.11 has no immortal objects: one reference is never given back */
#endif
}

/* Called as enter() by `with` and as enter(manager) by ExitStack: builtins do not bind. */
static PyObject *
noop_enter(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t nargs)
{
    if (LF_UNLIKELY(nargs > 1)) {
        return PyErr_Format(PyExc_TypeError, "__enter__() takes no arguments (%zd given)", nargs - 1);
    }
    Py_RETURN_NONE;
}

/* Called as exit(type, value, traceback) by `with` and as exit(manager, type, value, traceback) by ExitStack. */
static PyObject *
noop_exit(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t nargs)
{
    if (LF_UNLIKELY(nargs != 3 && nargs != 4)) {
        return PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments (%zd given)", nargs);
    }
    Py_RETURN_NONE;
}

static PyMethodDef noop_functions[] = {
    {"__enter__", (PyCFunction)(void (*)(void))noop_enter, METH_FASTCALL, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))noop_exit, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyObject *
noop_call(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError,
                    "a managed span can't be used as a decorator: the group may be switched later, "
                    "and this object would not notice; decorate with trace_fn(group, name) instead");
    return NULL;
}

static PyObject *
noop_repr(PyObject *Py_UNUSED(self))
{
    return PyUnicode_FromString("<disabled span>");
}

static PyObject *
noop_reduce(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
    return PyUnicode_FromString("NOOP");
}

static PyMethodDef noop_methods[] = {
    {"__reduce__", noop_reduce, METH_NOARGS, "Pickle and copy by reference: there is one disabled span."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot noop_slots[] = {
    {Py_tp_doc, "The shared context manager of disabled spans: enters as None, does nothing."},
    {Py_tp_call, noop_call},
    {Py_tp_repr, noop_repr},
    {Py_tp_methods, noop_methods},
    {0, NULL},
};

static PyType_Spec noop_spec = {
    .name = "lensfast._gate.NoopSpan",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = noop_slots,
};

int
lf_noop_init(void)
{
    if (lf_noop != NULL) {
        return 0;
    }
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&noop_spec);
    if (type == NULL) {
        return -1;
    }
    /* Builtin functions in the type's dict are not descriptors, so `with` binds and allocates nothing. */
    for (PyMethodDef *def = noop_functions; def->ml_name != NULL; def++) {
        PyObject *function = PyCFunction_NewEx(def, NULL, NULL);
        if (function == NULL || PyObject_SetAttrString((PyObject *)type, def->ml_name, function) < 0) {
            Py_XDECREF(function);
            Py_DECREF(type);
            return -1;
        }
        lf_make_immortal(function);
        Py_DECREF(function);
    }
    lf_noop = type->tp_alloc(type, 0);
    if (lf_noop == NULL) {
        Py_DECREF(type);
        return -1;
    }
    lf_make_immortal(lf_noop);
    Py_DECREF(type);
    return 0;
}
