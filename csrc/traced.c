#include "traced.h"

#include <stddef.h>

#include "gate.h"
#include "group.h"

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_PYSSIZET T_PYSSIZET
#define Py_READONLY READONLY
#endif

PyTypeObject *lf_traced_type = NULL;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *group;    /* an LfGroup, or an odd object that is looked up at each call */
    PyObject *function; /* what the user decorated */
    PyObject *runner;   /* takes the same arguments and runs the function in a span */
    PyObject *shown;    /* a Python function that does the same as this object: what it looks like */
    PyObject *dict;
    PyObject *weakrefs;
} LfTraced;

static PyObject *
traced_vectorcall(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const LfTraced *traced = (LfTraced *)self;
    if (LF_LIKELY(!lf_group_on((LfGroup *)traced->group))) {
        return PyObject_Vectorcall(traced->function, args, nargsf, kwnames);
    }
    return PyObject_Vectorcall(traced->runner, args, nargsf, kwnames);
}

static PyObject *
traced_vectorcall_odd_group(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    const LfTraced *traced = (LfTraced *)self;
    int on = lf_gate_contains(traced->group);
    if (on < 0) {
        return NULL;
    }
    return PyObject_Vectorcall(on ? traced->runner : traced->function, args, nargsf, kwnames);
}

PyObject *
lf_traced_new(PyObject *function, PyObject *group, PyObject *runner, PyObject *shown)
{
    LfTraced *traced = (LfTraced *)lf_traced_type->tp_alloc(lf_traced_type, 0);
    if (traced == NULL) {
        return NULL;
    }
    traced->vectorcall = Py_IS_TYPE(group, lf_group_type) ? traced_vectorcall : traced_vectorcall_odd_group;
    traced->group = Py_NewRef(group);
    traced->function = Py_NewRef(function);
    traced->runner = Py_NewRef(runner);
    traced->shown = Py_NewRef(shown);
    return (PyObject *)traced;
}

static int
traced_traverse(PyObject *self, visitproc visit, void *arg)
{
    LfTraced *traced = (LfTraced *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(traced->group);
    Py_VISIT(traced->function);
    Py_VISIT(traced->runner);
    Py_VISIT(traced->shown);
    Py_VISIT(traced->dict);
    return 0;
}

static int
traced_clear(PyObject *self)
{
    LfTraced *traced = (LfTraced *)self;
    /* A call from a finaliser after this finds no function: make it an error, not a crash. */
    traced->vectorcall = NULL;
    Py_CLEAR(traced->group);
    Py_CLEAR(traced->function);
    Py_CLEAR(traced->runner);
    Py_CLEAR(traced->shown);
    Py_CLEAR(traced->dict);
    return 0;
}

static void
traced_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (((LfTraced *)self)->weakrefs != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    traced_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Python's own functions bind by a fresh method object; so do we. */
static PyObject *
traced_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(owner))
{
    if (instance == NULL || instance == Py_None) {
        return Py_NewRef(self);
    }
    return PyMethod_New(self, instance);
}

/* What the object itself lacks (__code__, __closure__, ...) is the shown function's: inspect then sees its kind, and a
   pickler that copies functions by value, as Ray's does with the methods of actors, copies one that still traces. */
static PyObject *
traced_getattro(PyObject *self, PyObject *name)
{
    PyObject *value = PyObject_GenericGetAttr(self, name);
    if (value != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return value;
    }
    PyObject *shown = ((LfTraced *)self)->shown;
    if (shown == NULL) {
        return NULL;
    }
    PyErr_Clear();
    return PyObject_GetAttr(shown, name);
}

static PyObject *
traced_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<traced %R>", ((LfTraced *)self)->function);
}

/* A string makes pickle and copy treat the object as the global of that name. */
static PyObject *
traced_reduce(PyObject *self, PyObject *Py_UNUSED(unused))
{
    return PyObject_GetAttrString(self, "__qualname__");
}

/* As for wrapt's proxies: what asks for a function, such as torch or mock, is to find one. */
static PyObject *
traced_class(PyObject *Py_UNUSED(self), void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)&PyFunction_Type);
}

static PyMethodDef traced_methods[] = {
    {"__reduce__", traced_reduce, METH_NOARGS, "Pickle and copy by reference, as functions do."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef traced_members[] = {
    {"__vectorcalloffset__", Py_T_PYSSIZET, offsetof(LfTraced, vectorcall), Py_READONLY, NULL},
    {"__dictoffset__", Py_T_PYSSIZET, offsetof(LfTraced, dict), Py_READONLY, NULL},
    {"__weaklistoffset__", Py_T_PYSSIZET, offsetof(LfTraced, weakrefs), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef traced_getset[] = {
    {"__class__", traced_class, NULL, NULL, NULL},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot traced_slots[] = {
    {Py_tp_doc, "A function whose calls are spans of a group while that group is enabled."},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, traced_get},
    {Py_tp_getattro, traced_getattro},
    {Py_tp_repr, traced_repr},
    {Py_tp_traverse, traced_traverse},
    {Py_tp_clear, traced_clear},
    {Py_tp_dealloc, traced_dealloc},
    {Py_tp_methods, traced_methods},
    {Py_tp_members, traced_members},
    {Py_tp_getset, traced_getset},
    {0, NULL},
};

static PyType_Spec traced_spec = {
    .name = "lensfast._gate.TracedFunction",
    .basicsize = sizeof(LfTraced),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
             Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = traced_slots,
};

int
lf_traced_init(void)
{
    if (lf_traced_type != NULL) {
        return 0;
    }
    lf_traced_type = (PyTypeObject *)PyType_FromSpec(&traced_spec);
    return lf_traced_type == NULL ? -1 : 0;
}
