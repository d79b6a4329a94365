#include "manager.h"

#include <stddef.h>

#include "callargs.h"
#include "noop.h"
#include "span.h"

#if PY_VERSION_HEX < 0x030C0000
#include <structmember.h>
#define Py_T_OBJECT_EX T_OBJECT_EX
#define _Py_T_OBJECT T_OBJECT
#define Py_T_BOOL T_BOOL
#define Py_READONLY READONLY
#endif

PyTypeObject *lf_gated_span_type = NULL;
PyTypeObject *lf_ungated_span_type = NULL;

enum { INLINE = 6, TRACERS = 4 };

/* One span that was entered. */
typedef struct Entered {
    PyObject *span;    /* NULL: the tracer could not start it */
    PyObject *outer;   /* the Context that was current before */
    PyObject *context; /* that in which the span is current */
    PyObject *token;
    PyObject *watch; /* what ends the span, or NULL */
    struct Entered *before;
} Entered;

typedef struct {
    PyObject_HEAD
    PyObject *name;
    PyObject *tracer; /* NULL or None: that of the scope and the provider that is global */
    PyObject *scope;
    PyObject *group;
    PyObject *kind;
    PyObject *attributes; /* a mapping, or NULL */
    PyObject *kwnames;    /* or they are here: names, and that many of the values */
    PyObject *values[INLINE];
    char record_exception;
    char names_exception_type;
    char is_entered;
    Entered entered; /* the innermost */
} Manager;

static PyObject *spans;  /* the dict of lensfast._spans */
static PyObject *traces; /* that of opentelemetry.trace */
static PyObject *redirected; /* the dict in _spans._redirected */
static PyObject *redact_keys;
static PyObject *redacted;
static PyObject *helpers_scope;
static PyObject *get_tracer, *get_tracer_provider; /* as they were at the start: a patched one is asked each time */
static PyObject *str_tracer_provider, *str_get_tracer, *str_get_tracer_provider, *str_watch, *str_torch, *str_task_id;
static PyObject *kwname_kind;

int
lf_manager_ready(void)
{
    return spans != NULL;
}

/* ---- what is rare is done in Python ---- */

static PyObject *
call_python(const char *name, PyObject *const *args, size_t nargs)
{
    PyObject *function = lf_dict_get_text(spans, name);
    if (function == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "lensfast._spans has no %s", name);
    }
    PyObject *compiler = lf_compiler_off();
    PyObject *result = PyObject_Vectorcall(function, args, nargs, NULL);
    lf_compiler_on(compiler);
    Py_DECREF(function);
    return result;
}

/* Log the exception that is set and go on, unless it is one that telemetry must not stop. */
static int
report_failure(const char *doing, PyObject *name)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    PyObject *what = PyUnicode_FromString(doing);
    PyObject *result = NULL;
    if (what != NULL) {
        PyObject *arguments[] = {what, name, error};
        result = call_python("report_failure", arguments, 3);
    }
    Py_XDECREF(what);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* ---- what is looked up in modules at each span ---- */

static uint64_t names_epoch = 1; /* another one: a name of the two modules has been set since */
static int names_are_watched = 0;
static PyObject *modules = NULL;   /* the dict of sys.modules, if it is watched */
static uint64_t modules_epoch = 1; /* likewise, of torch in there */

#if PY_VERSION_HEX >= 0x030C0000
static int
name_changed(PyDict_WatchEvent Py_UNUSED(event), PyObject *dict, PyObject *Py_UNUSED(key), PyObject *Py_UNUSED(value))
{
    LF_INCREMENT(dict == modules ? &modules_epoch : &names_epoch);
    return 0;
}
#endif

/* Be told of changes, instead of looking each time. There is a limited number of watchers. */
static void
watch_names(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    static int watcher = -1;
    if (watcher < 0) {
        watcher = PyDict_AddWatcher(name_changed);
    }
    /* Each time: the modules may have been imported anew. */
    names_are_watched = watcher >= 0 && PyDict_Watch(watcher, traces) == 0 && PyDict_Watch(watcher, spans) == 0;
    LF_INCREMENT(&names_epoch);
    PyObject *now = PyImport_GetModuleDict(); /* borrowed */
    if (modules == NULL && names_are_watched && PyDict_CheckExact(now) && PyDict_Watch(watcher, now) == 0) {
        modules = Py_NewRef(now);
    }
    PyErr_Clear();
#endif
}

/* dict[key], where a change that has been told has been made: a new reference. */
static PyObject *
look_up(PyObject *dict, PyObject *key)
{
    PyObject *value;
    Py_BEGIN_CRITICAL_SECTION(dict);
    value = lf_dict_get(dict, key);
    Py_END_CRITICAL_SECTION();
    return value;
}

/* Whether there is a _spans.watch. */
static int
spans_are_watched(void)
{
    static uint64_t looked = 0; /* twice the epoch, and whether there is one: one word, for threads */
    uint64_t now = LF_LOAD_ACQUIRE(&names_epoch), known = LF_LOAD_RELAXED(&looked);
    if (LF_UNLIKELY(known >> 1 != now || !names_are_watched)) {
        PyObject *watch = look_up(spans, str_watch);
        known = now << 1 | (watch != NULL && watch != Py_None);
        Py_XDECREF(watch);
        LF_STORE_RELAXED(&looked, known);
    }
    return (int)(known & 1);
}

static struct {
    PyObject *scope, *provider, *tracer;
    uint64_t looked;
} tracers[TRACERS];
static LfMutex tracers_lock;

/* A known tracer of `scope` and `provider`: a new reference. If `provider` is NULL, that which was global when the names
   were as they are now. */
static PyObject *
known_tracer(PyObject *scope, PyObject *provider, uint64_t looking)
{
    PyObject *tracer = NULL;
    LF_LOCK(&tracers_lock);
    for (int i = 0; i < TRACERS; i++) {
        if (tracers[i].scope != scope) {
            continue;
        }
        if (provider == NULL ? tracers[i].looked == looking : tracers[i].provider == provider) {
            tracers[i].looked = looking;
            tracer = Py_NewRef(tracers[i].tracer);
        }
        break;
    }
    LF_UNLOCK(&tracers_lock);
    return tracer;
}

static void
know_tracer(PyObject *scope, PyObject *provider, PyObject *tracer, uint64_t looking)
{
    Py_INCREF(scope);
    Py_INCREF(provider);
    Py_INCREF(tracer);
    int i = 0;
    LF_LOCK(&tracers_lock);
    while (i < TRACERS - 1 && tracers[i].scope != scope && tracers[i].scope != NULL) {
        i++;
    }
    PyObject *const old[] = {tracers[i].scope, tracers[i].provider, tracers[i].tracer};
    tracers[i].scope = scope;
    tracers[i].provider = provider;
    tracers[i].tracer = tracer;
    tracers[i].looked = looking;
    LF_UNLOCK(&tracers_lock);
    for (int j = 0; j < 3; j++) {
        Py_XDECREF(old[j]); /* at last: a finaliser may ask for a tracer */
    }
}

/* Whether traces[name] is no more what it was at the start. */
static int
is_patched(PyObject *name, PyObject *original)
{
    PyObject *now = look_up(traces, name);
    Py_XDECREF(now); /* only compared */
    return now != original;
}

/* The tracer of `scope` of the provider that is global now: a new reference. */
static PyObject *
current_tracer(PyObject *scope)
{
    uint64_t looking = LF_LOAD_ACQUIRE(&names_epoch);
    PyObject *tracer = LF_LIKELY(names_are_watched) ? known_tracer(scope, NULL, looking) : NULL;
    if (LF_LIKELY(tracer != NULL)) {
        return tracer;
    }
    PyObject *provider = look_up(traces, str_tracer_provider);
    int patched = is_patched(str_get_tracer, get_tracer) || is_patched(str_get_tracer_provider, get_tracer_provider);
    if (provider != NULL && !patched) {
        tracer = known_tracer(scope, provider, looking);
    }
    if (tracer == NULL) {
        tracer = call_python("current_tracer", &scope, 1);
        /* If it has been replaced meanwhile, even if it is back, the tracer may be another's. */
        if (tracer != NULL && !patched && provider != NULL && provider != Py_None &&
            (names_are_watched ? LF_LOAD_ACQUIRE(&names_epoch) == looking
                               : !is_patched(str_tracer_provider, provider))) {
            know_tracer(scope, provider, tracer, looking);
        }
    }
    Py_XDECREF(provider);
    return tracer;
}

/* ---- starting ---- */

static PyObject *
start_span(Manager *self, PyObject *current)
{
    PyObject *tracer = self->tracer == NULL || self->tracer == Py_None ? current_tracer(self->scope)
                                                                        : Py_NewRef(self->tracer);
    if (tracer == NULL) {
        return NULL;
    }
    PyObject *span = NULL;
    if (LF_LIKELY(PyObject_TypeCheck(tracer, lf_tracer_type))) {
        LfPlan *plan = lf_tracer_plan((LfTracer *)tracer);
        if (plan != NULL) {
            LfStart start = {.name = self->name, .current = current, .kind = self->kind, .record_exception = 1,
                             .set_status_on_exception = 1};
            span = lf_span_start(plan, &start);
            Py_DECREF(plan);
            Py_DECREF(tracer);
            return span;
        }
        if (PyErr_Occurred()) {
            Py_DECREF(tracer);
            return NULL;
        }
    }
    PyObject *method = PyObject_GetAttrString(tracer, "start_span");
    Py_DECREF(tracer);
    if (method == NULL) {
        return NULL;
    }
    PyObject *arguments[] = {self->name, self->kind};
    PyObject *compiler = lf_compiler_off();
    span = PyObject_Vectorcall(method, arguments, 1, self->kind == NULL ? NULL : kwname_kind);
    lf_compiler_on(compiler);
    Py_DECREF(method);
    return span;
}

/* The attributes as a mapping: a new reference. */
static PyObject *
attribute_mapping(const Manager *self)
{
    if (self->kwnames == NULL) {
        return Py_NewRef(self->attributes == NULL ? Py_None : self->attributes);
    }
    PyObject *mapping = PyDict_New();
    for (Py_ssize_t i = 0; mapping != NULL && i < PyTuple_GET_SIZE(self->kwnames); i++) {
        if (PyDict_SetItem(mapping, PyTuple_GET_ITEM(self->kwnames, i), self->values[i]) < 0) {
            Py_CLEAR(mapping);
        }
    }
    return mapping;
}

/* 1: set. 0: they are for Python. */
static int
set_inline_attributes(const Manager *self, PyObject *span)
{
    if (!lf_is_span(span)) {
        return 0;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(self->kwnames);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = self->values[i];
        if (!PyUnicode_CheckExact(value) && !PyLong_CheckExact(value) && !PyFloat_CheckExact(value) &&
            !PyBool_Check(value)) {
            return 0;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyTuple_GET_ITEM(self->kwnames, i), *value = self->values[i];
        if (PyUnicode_CheckExact(value)) {
            int secret = PySet_Contains(redact_keys, key);
            if (secret < 0) {
                return -1;
            }
            if (secret) {
                value = redacted;
            }
        }
        if (lf_span_set_attribute((LfSpan *)span, key, value) < 0) {
            return -1;
        }
    }
    return 1;
}

static int
set_attributes(Manager *self, PyObject *span)
{
    if (self->kwnames != NULL) {
        int done = set_inline_attributes(self, span);
        if (done < 0) {
            return report_failure("set the attributes of span", self->name);
        }
        if (done) {
            return 0;
        }
    }
    PyObject *mapping = attribute_mapping(self);
    if (mapping == NULL) {
        return -1;
    }
    PyObject *arguments[] = {span, self->name, mapping};
    PyObject *result = call_python("set_attributes", arguments, 3);
    Py_DECREF(mapping);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Whether torch is in a backward pass here, or can't be asked: then Python code finds out more. */
static int
may_be_recomputing(void)
{
    static PyObject *task_id = NULL, *of_module = NULL;
    static uint64_t asked = 0;   /* the epoch of sys.modules in which task_id was torch's */
    static uint64_t without = 0; /* one in which there was no torch */
    static LfMutex lock;
    PyObject *all = PyImport_GetModuleDict(); /* borrowed */
    uint64_t looking = all == modules ? LF_LOAD_ACQUIRE(&modules_epoch) : 0;
    /* Not looked up each time: threads may have to wait for each other there. */
    if (LF_LIKELY(looking != 0 && LF_LOAD_RELAXED(&without) == looking)) {
        return 0;
    }
    LF_LOCK(&lock);
    PyObject *function = looking != 0 && asked == looking ? Py_NewRef(task_id) : NULL;
    LF_UNLOCK(&lock);
    if (LF_UNLIKELY(function == NULL)) {
        PyObject *torch = PyDict_CheckExact(all) ? look_up(all, str_torch) : NULL;
        if (torch == NULL) {
            if (!PyErr_Occurred() && looking != 0) {
                LF_STORE_RELAXED(&without, looking);
            }
            PyErr_Clear();
            return 0;
        }
        LF_LOCK(&lock);
        function = torch == of_module ? Py_NewRef(task_id) : NULL;
        if (function != NULL) {
            asked = looking;
        }
        LF_UNLOCK(&lock);
        if (function == NULL) {
            PyObject *inner = PyObject_GetAttrString(torch, "_C");
            function = inner == NULL ? NULL : PyObject_GetAttr(inner, str_task_id);
            Py_XDECREF(inner);
            if (function == NULL) {
                PyErr_Clear();
                Py_DECREF(torch);
                return 1;
            }
            Py_INCREF(function);
            Py_INCREF(torch);
            LF_LOCK(&lock);
            PyObject *const old[] = {task_id, of_module};
            task_id = function;
            of_module = torch;
            asked = looking;
            LF_UNLOCK(&lock);
            Py_XDECREF(old[0]);
            Py_XDECREF(old[1]);
        }
        Py_DECREF(torch);
    }
    PyObject *id = PyObject_CallNoArgs(function);
    Py_DECREF(function);
    int idle = id != NULL && PyLong_Check(id) && PyLong_AsLong(id) == -1 && !PyErr_Occurred();
    Py_XDECREF(id);
    PyErr_Clear();
    return !idle;
}

/* A started span: a new reference. Py_None where the tracer failed, which is logged. */
static PyObject *
start(Manager *self, PyObject *current)
{
    PyObject *span = start_span(self, current);
    if (LF_UNLIKELY(span == NULL)) {
        return report_failure("start span", self->name) < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (Py_IS_TYPE(span, lf_api.non_recording_span)) {
        return span; /* it takes no attributes */
    }
    if ((self->kwnames != NULL || (self->attributes != NULL && self->attributes != Py_None)) &&
        set_attributes(self, span) < 0) {
        Py_DECREF(span);
        return NULL;
    }
    if (LF_UNLIKELY(may_be_recomputing())) {
        PyObject *arguments[] = {span, self->name};
        PyObject *result = call_python("mark_recomputation", arguments, 2);
        if (result == NULL) {
            Py_DECREF(span);
            return NULL;
        }
        Py_DECREF(result);
    }
    return span;
}

static void
clear_entered(Entered *entered)
{
    Py_CLEAR(entered->span);
    Py_CLEAR(entered->outer);
    Py_CLEAR(entered->context);
    Py_CLEAR(entered->token);
    Py_CLEAR(entered->watch);
}

static PyObject *
enter(Manager *self)
{
    Entered entered = {NULL, NULL, NULL, NULL, NULL, NULL};
    Entered *before = NULL;
    if (LF_UNLIKELY(self->is_entered)) {
        /* The disabled span may be entered while it is entered, so this may be, too. */
        before = PyMem_Malloc(sizeof(Entered));
        if (before == NULL) {
            return PyErr_NoMemory();
        }
    }
    if (PyContextVar_Get(lf_api.context_variable, NULL, &entered.outer) < 0) {
        goto failed;
    }
    PyObject *span = start(self, entered.outer);
    if (span == NULL) {
        goto failed;
    }
    if (LF_UNLIKELY(span == Py_None)) {
        Py_DECREF(span);
        Py_CLEAR(entered.outer);
    }
    else {
        entered.span = span;
        if (LF_UNLIKELY(spans_are_watched())) {
            PyObject *arguments[] = {self->group == NULL ? Py_None : self->group, self->name};
            entered.watch = call_python("start_watch", arguments, 2);
            if (entered.watch == NULL) {
                goto failed;
            }
            if (entered.watch == Py_None) {
                Py_CLEAR(entered.watch);
            }
        }
        entered.context = lf_context_with(entered.outer, span);
        if (entered.context == NULL) {
            goto failed;
        }
        entered.token = PyContextVar_Set(lf_api.context_variable, entered.context);
        if (entered.token == NULL) {
            goto failed;
        }
    }
    if (LF_UNLIKELY(self->is_entered)) {
        if (before == NULL && (before = PyMem_Malloc(sizeof(Entered))) == NULL) { /* entered by a hook, just now */
            PyErr_NoMemory();
            goto failed;
        }
        *before = self->entered;
        entered.before = before;
    }
    else {
        PyMem_Free(before);
    }
    self->entered = entered;
    self->is_entered = 1;
    return Py_NewRef(entered.span == NULL ? lf_api.invalid_span : entered.span);
failed:
    PyMem_Free(before);
    clear_entered(&entered);
    return NULL;
}

static PyObject *
manager_enter(PyObject *self, PyObject *Py_UNUSED(unused))
{
    PyObject *span;
    Py_BEGIN_CRITICAL_SECTION(self);
    span = enter((Manager *)self);
    Py_END_CRITICAL_SECTION();
    return span;
}

/* ---- leaving ---- */

/* Make current again what was before, wherever and in whatever order that is asked for. */
static int
detach(Manager *self, const Entered *entered)
{
    PyObject *current;
    if (PyContextVar_Get(lf_api.context_variable, NULL, &current) < 0) {
        return -1;
    }
    int in_order = current == entered->context;
    Py_DECREF(current);
    if (PyContextVar_Reset(lf_api.context_variable, entered->token) < 0) {
        PyErr_Clear(); /* another context, or another thread */
        in_order = 0;
    }
    if (LF_LIKELY(in_order && PyDict_GET_SIZE(redirected) == 0)) {
        return 0;
    }
    PyObject *arguments[] = {entered->span, self->name, entered->outer, entered->context,
                             in_order ? Py_True : Py_False};
    PyObject *result = call_python("restore", arguments, 5);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int
end(Manager *self, const Entered *entered, PyObject *error)
{
    /* A BaseException such as KeyboardInterrupt or GeneratorExit is a way to leave, not a failure of the work. */
    if (LF_UNLIKELY(error != Py_None) && PyObject_TypeCheck(error, (PyTypeObject *)PyExc_Exception)) {
        PyObject *arguments[] = {(PyObject *)self, entered->span, error};
        PyObject *result = call_python("record_error", arguments, 3);
        if (result == NULL) {
            return -1;
        }
        Py_DECREF(result);
    }
    int failed = 0;
    if (LF_LIKELY(entered->watch == NULL && lf_is_span(entered->span))) {
        failed = lf_span_end((LfSpan *)entered->span, NULL) < 0;
    }
    else if (entered->watch != NULL || !Py_IS_TYPE(entered->span, lf_api.non_recording_span)) { /* whose end() is empty */
        PyObject *compiler = lf_compiler_off();
        PyObject *result = entered->watch == NULL ? PyObject_CallMethod(entered->span, "end", NULL)
                                                  : PyObject_CallMethod(entered->watch, "end", "O", entered->span);
        lf_compiler_on(compiler);
        failed = result == NULL;
        Py_XDECREF(result);
    }
    return failed ? report_failure("end span", self->name) : 0;
}

static PyObject *
leave(Manager *self, PyObject *error)
{
    if (LF_UNLIKELY(!self->is_entered)) {
        return PyErr_Format(PyExc_RuntimeError, "the manager of span %R was left without being entered", self->name);
    }
    Entered entered = self->entered;
    if (LF_UNLIKELY(entered.before != NULL)) {
        self->entered = *entered.before;
        PyMem_Free(entered.before);
    }
    else {
        self->is_entered = 0;
        memset(&self->entered, 0, sizeof(Entered));
    }
    int failed = 0;
    if (entered.span != NULL) {
        Py_INCREF(self);
        /* In this order, so that an on_end processor sees the parent as current. */
        failed = detach(self, &entered) < 0 || end(self, &entered, error) < 0;
        Py_DECREF(self);
    }
    clear_entered(&entered);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
manager_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (LF_UNLIKELY(nargs != 3)) {
        return PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments (%zd given)", nargs);
    }
    PyObject *result;
    Py_BEGIN_CRITICAL_SECTION(self);
    result = leave((Manager *)self, args[1]);
    Py_END_CRITICAL_SECTION();
    return result;
}

/* start(): a Python OpenSpan, for those who attach and end it themselves. */
static PyObject *
manager_start(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PyObject *current;
    if (PyContextVar_Get(lf_api.context_variable, NULL, &current) < 0) {
        return NULL;
    }
    PyObject *span = start((Manager *)object, current);
    Py_DECREF(current);
    if (span == NULL) {
        return NULL;
    }
    PyObject *result;
    if (span == Py_None) {
        result = lf_dict_get_text(spans, "UNSTARTED");
    }
    else {
        PyObject *arguments[] = {object, span};
        result = call_python("OpenSpan", arguments, 2);
    }
    Py_DECREF(span);
    return result;
}

/* ---- the object ---- */

static PyObject *
gated_call(PyObject *Py_UNUSED(self), PyObject *args, PyObject *kwargs)
{
    return PyObject_Call(lf_noop, args, kwargs); /* refuses to decorate, as the disabled span does */
}

static PyObject *
ungated_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *function;
    static char *names[] = {"function", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:UngatedSpan", names, &function)) {
        return NULL;
    }
    PyObject *arguments[] = {self, function};
    return call_python("decorated", arguments, 2);
}

static PyObject *
manager_repr(PyObject *self)
{
    return PyUnicode_FromFormat("<span %R>", ((Manager *)self)->name);
}

static PyObject *
manager_attributes(PyObject *self, void *Py_UNUSED(closure))
{
    return attribute_mapping((Manager *)self);
}

/* Managers live as long as their block, so a few are made again and again. */
#if defined(Py_GIL_DISABLED)
enum { MOST_SPARE = 0 };
#else
enum { MOST_SPARE = 32 };
#endif
static Manager *spare[MOST_SPARE + 1];
static int spares = 0;

static Manager *
manager_alloc(PyTypeObject *type)
{
    if (LF_LIKELY(MOST_SPARE > 0 && spares > 0)) {
        Manager *self = spare[--spares];
        PyObject_Init((PyObject *)self, type);
        PyObject_GC_Track(self);
        return self;
    }
    return (Manager *)type->tp_alloc(type, 0);
}

static PyObject *
manager_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"name", "tracer", "scope", "group", "attributes", "kind", "record_exception",
                            "names_exception_type", NULL};
    PyObject *name, *tracer, *scope = NULL, *group = Py_None, *attributes = Py_None, *kind = Py_None;
    int record_exception = 1, names_exception_type = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OOOOpp", names, &name, &tracer, &scope, &group, &attributes,
                                     &kind, &record_exception, &names_exception_type)) {
        return NULL;
    }
    if (spans == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "lensfast is not fully imported");
        return NULL;
    }
    Manager *self = manager_alloc(type);
    if (self == NULL) {
        return NULL;
    }
    self->name = Py_NewRef(name);
    self->tracer = Py_NewRef(tracer);
    self->scope = Py_NewRef(scope == NULL ? helpers_scope : scope);
    self->group = Py_NewRef(group);
    self->attributes = attributes == Py_None ? NULL : Py_NewRef(attributes);
    self->kind = kind == Py_None ? NULL : Py_NewRef(kind);
    self->record_exception = (char)record_exception;
    self->names_exception_type = (char)names_exception_type;
    return (PyObject *)self;
}

PyObject *
lf_manager_new(PyObject *group, PyObject *name, PyObject *tracer, PyObject *const *values, PyObject *kwnames)
{
    Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    PyObject *mapping = NULL;
    if (LF_UNLIKELY(count > INLINE)) {
        mapping = PyDict_New();
        for (Py_ssize_t i = 0; mapping != NULL && i < count; i++) {
            if (PyDict_SetItem(mapping, PyTuple_GET_ITEM(kwnames, i), values[i]) < 0) {
                Py_CLEAR(mapping);
            }
        }
        if (mapping == NULL) {
            return NULL;
        }
    }
    Manager *self = manager_alloc(lf_gated_span_type);
    if (self == NULL) {
        Py_XDECREF(mapping);
        return NULL;
    }
    self->name = Py_NewRef(name);
    self->tracer = Py_XNewRef(tracer);
    self->scope = Py_NewRef(helpers_scope);
    self->group = Py_NewRef(group);
    self->record_exception = 1;
    self->names_exception_type = 0; /* this may be a spare one */
    self->attributes = mapping;
    if (mapping == NULL && count > 0) {
        self->kwnames = Py_NewRef(kwnames);
        for (Py_ssize_t i = 0; i < count; i++) {
            self->values[i] = Py_NewRef(values[i]);
        }
    }
    return (PyObject *)self;
}

static int
manager_traverse(PyObject *object, visitproc visit, void *arg)
{
    Manager *self = (Manager *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->name);
    Py_VISIT(self->tracer);
    Py_VISIT(self->scope);
    Py_VISIT(self->group);
    Py_VISIT(self->kind);
    Py_VISIT(self->attributes);
    Py_VISIT(self->kwnames);
    for (int i = 0; i < INLINE; i++) {
        Py_VISIT(self->values[i]);
    }
    for (Entered *entered = &self->entered; entered != NULL; entered = entered->before) {
        Py_VISIT(entered->span);
        Py_VISIT(entered->outer);
        Py_VISIT(entered->context);
        Py_VISIT(entered->token);
        Py_VISIT(entered->watch);
    }
    return 0;
}

static int
manager_clear(PyObject *object)
{
    Manager *self = (Manager *)object;
    Py_CLEAR(self->tracer);
    Py_CLEAR(self->kind);
    Py_CLEAR(self->attributes);
    Py_ssize_t inlined = self->kwnames == NULL ? 0 : PyTuple_GET_SIZE(self->kwnames);
    for (Py_ssize_t i = 0; i < inlined; i++) {
        Py_CLEAR(self->values[i]);
    }
    Py_CLEAR(self->kwnames);
    while (LF_UNLIKELY(self->is_entered)) {
        Entered entered = self->entered;
        memset(&self->entered, 0, sizeof(Entered));
        self->is_entered = entered.before != NULL;
        if (self->is_entered) {
            self->entered = *entered.before;
            PyMem_Free(entered.before);
        }
        clear_entered(&entered);
    }
    return 0;
}

static void
manager_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_TRASHCAN_BEGIN(object, manager_dealloc) /* a manager may hold another, and so on */
    manager_clear(object);
    Py_CLEAR(((Manager *)object)->name);
    Py_CLEAR(((Manager *)object)->scope);
    Py_CLEAR(((Manager *)object)->group);
    if (spares < MOST_SPARE) {
        spare[spares++] = (Manager *)object; /* all of it is cleared */
    }
    else {
        type->tp_free(object);
    }
    Py_DECREF(type);
    Py_TRASHCAN_END
}

static PyMethodDef manager_methods[] = {
    {"__enter__", manager_enter, METH_NOARGS, "Start the span and make it current; returns it."},
    {"__exit__", (PyCFunction)(void (*)(void))manager_exit, METH_FASTCALL,
     "Make current again what was before, and end the span."},
    {"start", manager_start, METH_NOARGS, "Start the span. A tracer that fails is logged and does not reach the caller."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef manager_members[] = {
    {"name", _Py_T_OBJECT, offsetof(Manager, name), Py_READONLY, NULL},
    {"tracer", _Py_T_OBJECT, offsetof(Manager, tracer), Py_READONLY, NULL},
    {"scope", _Py_T_OBJECT, offsetof(Manager, scope), Py_READONLY, NULL},
    {"group", _Py_T_OBJECT, offsetof(Manager, group), Py_READONLY, NULL},
    {"kind", _Py_T_OBJECT, offsetof(Manager, kind), Py_READONLY, NULL},
    {"record_exception", Py_T_BOOL, offsetof(Manager, record_exception), Py_READONLY, NULL},
    {"names_exception_type", Py_T_BOOL, offsetof(Manager, names_exception_type), Py_READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef manager_getset[] = {
    {"attributes", manager_attributes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define SLOTS(doc, call)                                                                                              \
    {                                                                                                                 \
        {Py_tp_doc, doc}, {Py_tp_new, manager_new}, {Py_tp_call, call}, {Py_tp_repr, manager_repr},                   \
            {Py_tp_traverse, manager_traverse}, {Py_tp_clear, manager_clear}, {Py_tp_dealloc, manager_dealloc},       \
            {Py_tp_methods, manager_methods}, {Py_tp_members, manager_members}, {Py_tp_getset, manager_getset},       \
        {                                                                                                             \
            0, NULL                                                                                                   \
        }                                                                                                             \
    }

static PyType_Slot gated_slots[] = SLOTS("What managed_span and handle.span give while the group is on.", gated_call);
static PyType_Slot ungated_slots[] =
    SLOTS("What span_cm gives: also a decorator, each call of the function in a span of its own.", ungated_call);

static PyType_Spec gated_spec = {
    .name = "lensfast._gate.GatedSpan",
    .basicsize = sizeof(Manager),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = gated_slots,
};

static PyType_Spec ungated_spec = {
    .name = "lensfast._gate.UngatedSpan",
    .basicsize = sizeof(Manager),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = ungated_slots,
};

static int
take(PyObject *dict, const char *name, PyObject **where)
{
    PyObject *value = lf_dict_get_text(dict, name);
    if (value == NULL) {
        PyErr_Format(PyExc_RuntimeError, "managers of spans need %s", name);
        return -1;
    }
    Py_XSETREF(*where, value);
    return 0;
}

int
lf_manager_set_up(PyObject *spans_dict, PyObject *trace_dict)
{
    PyObject *weak = NULL;
    if (take(spans_dict, "_redirected", &weak) < 0) {
        return -1;
    }
    Py_XSETREF(redirected, PyObject_GetAttrString(weak, "data"));
    Py_DECREF(weak);
    if (redirected == NULL || !PyDict_Check(redirected) || take(spans_dict, "DEFAULT_REDACT_KEYS", &redact_keys) < 0 ||
        take(spans_dict, "REDACTED", &redacted) < 0 || take(spans_dict, "HELPERS_SCOPE", &helpers_scope) < 0 ||
        take(spans_dict, "_GET_TRACER", &get_tracer) < 0 ||
        take(spans_dict, "_GET_TRACER_PROVIDER", &get_tracer_provider) < 0) {
        return -1;
    }
    Py_XSETREF(traces, Py_NewRef(trace_dict));
    Py_XSETREF(spans, Py_NewRef(spans_dict));
    watch_names();
    return 0;
}

int
lf_manager_init(void)
{
    if (lf_gated_span_type != NULL) {
        return 0;
    }
    static const struct {
        PyObject **where;
        const char *text;
    } words[] = {
        {&str_tracer_provider, "_TRACER_PROVIDER"}, {&str_get_tracer, "get_tracer"},
        {&str_get_tracer_provider, "get_tracer_provider"}, {&str_watch, "watch"}, {&str_torch, "torch"},
        {&str_task_id, "_current_graph_task_id"},
    };
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        *words[i].where = PyUnicode_InternFromString(words[i].text);
        if (*words[i].where == NULL) {
            return -1;
        }
    }
    kwname_kind = Py_BuildValue("(s)", "kind");
    lf_gated_span_type = (PyTypeObject *)PyType_FromSpec(&gated_spec);
    lf_ungated_span_type = (PyTypeObject *)PyType_FromSpec(&ungated_spec);
    if (kwname_kind == NULL || lf_gated_span_type == NULL || lf_ungated_span_type == NULL) {
        return -1;
    }
#if defined(Py_GIL_DISABLED)
    lf_make_immortal((PyObject *)lf_gated_span_type); /* they are, and all managers would count references in one place */
    lf_make_immortal((PyObject *)lf_ungated_span_type);
#endif
    return 0;
}
