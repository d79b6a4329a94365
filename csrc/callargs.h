/* A check on a vectorcall's keyword names, shared by managed_span and handle.span. */
#ifndef LENSFAST_CALLARGS_H
#define LENSFAST_CALLARGS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

enum { LF_NAME = 4, LF_GROUP = 5, LF_TRACER = 6 }; /* each word's length tells it apart */

static inline int
lf_is_word(PyObject *key, const char *word, size_t length)
{
    return PyUnicode_IS_COMPACT_ASCII(key) && memcmp(PyUnicode_DATA(key), word, length) == 0;
}

/* True when a keyword repeats a parameter that `group` and `tracer` say was given by position; `name` always was. */
static inline int
lf_kwnames_repeat(PyObject *kwnames, int group, int tracer)
{
    Py_ssize_t n = PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i);
        Py_ssize_t length = PyUnicode_GET_LENGTH(key);
        if ((length == LF_NAME && lf_is_word(key, "name", LF_NAME)) ||
            (group && length == LF_GROUP && lf_is_word(key, "group", LF_GROUP)) ||
            (tracer && length == LF_TRACER && lf_is_word(key, "tracer", LF_TRACER))) {
            return 1;
        }
    }
    return 0;
}

/* True when `word` is among the keywords. */
static inline int
lf_kwnames_have(PyObject *kwnames, const char *word, size_t length)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i);
        if ((size_t)PyUnicode_GET_LENGTH(key) == length && lf_is_word(key, word, length)) {
            return 1;
        }
    }
    return 0;
}

#endif
