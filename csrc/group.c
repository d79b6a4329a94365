#include "group.h"

#include "callargs.h"
#include "manager.h"
#include "noop.h"

PyTypeObject *lf_group_type = NULL;
LfTable *lf_table = NULL;

static size_t table_used = 0;
static PyObject *span_hook = NULL;

enum { FIRST_CAPACITY = 64, SLOTS_PER_GROUP = 4 };

int
lf_group_same_name(PyObject *a, PyObject *b)
{
    return PyUnicode_Compare(a, b) == 0;
}

static LfTable *
table_new(size_t capacity)
{
    LfTable *table = PyMem_RawCalloc(1, offsetof(LfTable, slots) + capacity * sizeof(LfGroup *));
    if (table == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    table->mask = capacity - 1;
    return table;
}

static void
table_put(LfTable *table, LfGroup *group)
{
    size_t i = (size_t)group->hash & table->mask;
    while (table->slots[i] != NULL) {
        i = (i + 1) & table->mask;
    }
    LF_STORE_RELEASE(&table->slots[i], group);
}

static int
table_reserve_one(void)
{
    size_t capacity = lf_table->mask + 1;
    if ((table_used + 1) * SLOTS_PER_GROUP <= capacity) {
        return 0;
    }
    LfTable *bigger = table_new(capacity * 2);
    if (bigger == NULL) {
        return -1;
    }
    for (size_t i = 0; i < capacity; i++) {
        if (lf_table->slots[i] != NULL) {
            table_put(bigger, lf_table->slots[i]);
        }
    }
#if defined(Py_GIL_DISABLED)
    /* A reader may still probe the old table: it is left behind, all of them together smaller than the new one. */
    LF_STORE_RELEASE(&lf_table, bigger);
#else
    LfTable *old = lf_table;
    lf_table = bigger;
    PyMem_RawFree(old);
#endif
    return 0;
}

PyObject *
lf_group_intern(PyObject *name)
{
    LfGroup *group = lf_group_find(name);
    if (group != NULL) {
        return Py_NewRef((PyObject *)group);
    }
    if (table_reserve_one() < 0) {
        return NULL;
    }
    group = (LfGroup *)lf_group_type->tp_alloc(lf_group_type, 0);
    if (group == NULL) {
        return NULL;
    }
    group->name = Py_NewRef(name);
    PyUnicode_InternInPlace(&group->name); /* so a literal at a call site is found by its pointer */
    group->hash = PyObject_Hash(group->name);
#if defined(Py_GIL_DISABLED)
    lf_make_immortal((PyObject *)group); /* it is, and all threads would count references in one place */
#endif
    table_put(lf_table, group); /* the table owns this reference for ever */
    table_used++;
    return Py_NewRef((PyObject *)group);
}

PyObject *
lf_group_all(void)
{
    PyObject *list = PyList_New(0);
    if (list == NULL) {
        return NULL;
    }
    for (size_t i = 0; i <= lf_table->mask; i++) {
        LfGroup *group = lf_table->slots[i];
        if (group != NULL && PyList_Append(list, (PyObject *)group) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

void
lf_group_set(PyObject *handle, int enabled)
{
    LF_STORE_RELAXED(&((LfGroup *)handle)->enabled, (uint8_t)(enabled != 0));
}

void
lf_group_set_span_hook(PyObject *function)
{
    Py_XSETREF(span_hook, Py_NewRef(function));
}

static int
group_bool(PyObject *self)
{
    return lf_group_on((LfGroup *)self);
}

static PyObject *
group_enabled(PyObject *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(lf_group_on((LfGroup *)self));
}

static PyObject *
group_name(PyObject *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(((LfGroup *)self)->name);
}

static PyObject *
group_repr(PyObject *self)
{
    const LfGroup *group = (LfGroup *)self;
    return PyUnicode_FromFormat("<span group %R: %s>", group->name, lf_group_on(group) ? "enabled" : "disabled");
}

/* handle.span(name, tracer=None, *, span_kind=None, **attributes) */
static PyObject *
group_span(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs == 1 || nargs == 2) {
        if (LF_LIKELY(!lf_group_on((LfGroup *)self))) {
            if (kwnames == NULL || !lf_kwnames_repeat(kwnames, 0, nargs == 2)) {
                return lf_noop_ref();
            }
        }
        else if (lf_manager_ready() && (kwnames == NULL || (!lf_kwnames_repeat(kwnames, 0, 1) &&
                                                            !lf_kwnames_have(kwnames, "span_kind", 9)))) {
            return lf_manager_new(((LfGroup *)self)->name, args[0], nargs == 2 ? args[1] : NULL, args + nargs, kwnames);
        }
    }
    if (span_hook == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "lensfast is not fully imported");
        return NULL;
    }
    /* The hook takes the handle first and binds the rest as Python does. */
    Py_ssize_t nkw = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    PyObject **stack = PyMem_Malloc((size_t)(1 + nargs + nkw) * sizeof(PyObject *));
    if (stack == NULL) {
        return PyErr_NoMemory();
    }
    stack[0] = self;
    for (Py_ssize_t i = 0; i < nargs + nkw; i++) {
        stack[1 + i] = args[i];
    }
    PyObject *hook = Py_NewRef(span_hook);
    PyObject *result = PyObject_Vectorcall(hook, stack, (size_t)(1 + nargs), kwnames);
    Py_DECREF(hook);
    PyMem_Free(stack);
    return result;
}

static PyObject *
group_reduce(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyObject *module = PyImport_ImportModule("lensfast._backend");
    if (module == NULL) {
        return NULL;
    }
    PyObject *function = PyObject_GetAttrString(module, "span_group");
    Py_DECREF(module);
    if (function == NULL) {
        return NULL;
    }
    return Py_BuildValue("N(O)", function, ((LfGroup *)self)->name);
}

static PyObject *
group_copy(PyObject *self, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(self);
}

static PyMethodDef group_methods[] = {
    {"span", (PyCFunction)(void (*)(void))group_span, METH_FASTCALL | METH_KEYWORDS,
     "span($self, name, tracer=None, *, span_kind=None, **attributes)\n--\n\n"
     "A context manager for one span of this group: yields the span, or None while the group is disabled."},
    {"__reduce__", group_reduce, METH_NOARGS, "Pickle by name."},
    {"__copy__", group_copy, METH_NOARGS, "There is one handle per group."},
    {"__deepcopy__", group_copy, METH_O, "There is one handle per group."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef group_getset[] = {
    {"name", group_name, NULL, "The group's name (str).", NULL},
    {"enabled", group_enabled, NULL, "Whether the group is enabled now (bool).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_doc, "The one handle of a span group, made by span_group(name): truthy while the group is enabled."},
    {Py_nb_bool, group_bool},
    {Py_tp_repr, group_repr},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_getset},
    {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "lensfast._gate.GroupHandle",
    .basicsize = sizeof(LfGroup),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = group_slots,
};

int
lf_group_init(void)
{
    if (lf_table != NULL) {
        return 0;
    }
    lf_group_type = (PyTypeObject *)PyType_FromSpec(&group_spec);
    if (lf_group_type == NULL) {
        return -1;
    }
    lf_table = table_new(FIRST_CAPACITY);
    return lf_table == NULL ? -1 : 0;
}
