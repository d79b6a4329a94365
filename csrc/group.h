/* Group handles and the table that finds them by name. */
#ifndef LENSFAST_GROUP_H
#define LENSFAST_GROUP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#include "atomics.h"

/* One span group. A handle lives as long as the process: call sites keep bare pointers to it. */
typedef struct {
    PyObject_HEAD
    PyObject *name;   /* exact str, interned */
    Py_hash_t hash;   /* of name, so a probe need not read the string */
    uint8_t enabled;  /* written by lf_group_set, read with relaxed loads */
} LfGroup;

/* Open addressing with linear probing; at most a quarter full, so a probe rarely misses. */
typedef struct {
    size_t mask;
    LfGroup *slots[1];
} LfTable;

extern PyTypeObject *lf_group_type;
extern LfTable *lf_table;

int lf_group_init(void);

/* The handle of `name` (exact str), made if new: a new reference. Callers serialise. */
PyObject *lf_group_intern(PyObject *name);

/* A new list of all handles. Callers serialise. */
PyObject *lf_group_all(void);

void lf_group_set(PyObject *handle, int enabled);

/* The Python function that serves handle.span() when the group is on or the call is odd. */
void lf_group_set_span_hook(PyObject *function);

int lf_group_same_name(PyObject *a, PyObject *b);

static inline int
lf_group_on(const LfGroup *group)
{
    return LF_LOAD_RELAXED(&group->enabled);
}

/* The handle of an exact str, or NULL: a borrowed reference, no lock, no error. */
static inline LfGroup *
lf_group_find(PyObject *name)
{
    Py_hash_t hash = LF_LOAD_RELAXED(&((PyASCIIObject *)name)->hash);
    if (LF_UNLIKELY(hash == -1)) {
        hash = PyObject_Hash(name); /* cannot fail for an exact str */
    }
    const LfTable *table = LF_LOAD_ACQUIRE(&lf_table);
    size_t i = (size_t)hash & table->mask;
    for (;;) {
        LfGroup *group = LF_LOAD_ACQUIRE(&table->slots[i]);
        if (group == NULL) {
            return NULL;
        }
        if (LF_LIKELY(group->name == name)) {
            return group;
        }
        if (group->hash == hash && lf_group_same_name(group->name, name)) {
            return group;
        }
        i = (i + 1) & table->mask;
    }
}

#endif
