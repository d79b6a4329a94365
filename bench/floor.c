/* The floor of a `with` statement: a C object made beforehand whose __enter__ and __exit__ are plain builtin functions.

   Built by floor.py, apart from lensfast, so that the no-op span is measured against something it does not share. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *
nothing(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self, (void)args, (void)nargs;
    Py_RETURN_NONE;
}

static PyMethodDef enter = {"__enter__", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL, NULL};
static PyMethodDef leave = {"__exit__", (PyCFunction)(void (*)(void))nothing, METH_FASTCALL, NULL};

static PyTypeObject floor_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "floor.Floor",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "floor", .m_size = -1};

PyMODINIT_FUNC
PyInit_floor(void)
{
    PyObject *m = PyModule_Create(&module);
    if (m == NULL || PyType_Ready(&floor_type) < 0 ||
        PyDict_SetItemString(floor_type.tp_dict, "__enter__", PyCFunction_New(&enter, NULL)) < 0 ||
        PyDict_SetItemString(floor_type.tp_dict, "__exit__", PyCFunction_New(&leave, NULL)) < 0) {
        return NULL;
    }
    PyType_Modified(&floor_type);
    return PyModule_AddObjectRef(m, "Floor", (PyObject *)&floor_type) < 0 ? NULL : m;
}
