#include "span.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

#include "noop.h"
#include "otlp.h"

LfApi lf_api;
PyTypeObject *lf_plan_type = NULL;
PyTypeObject *lf_span_type = NULL;
PyTypeObject *lf_open_spans_type = NULL;
PyTypeObject *lf_tracer_type = NULL;

static uint64_t epoch = 1; /* a plan of another epoch is outdated */
static uint64_t seed_epoch = 1;
static PyObject *no_arguments; /* an empty tuple */
static PyObject *kwname_parent_context;
static PyObject *str_on_start;
static PyObject *str_on_ending;
static PyObject *str_on_end;
static PyObject *str_make_plan;
static PyObject *str_dict;
static PyObject *str_context;

void
lf_plans_outdate(void)
{
    LF_INCREMENT(&epoch);
}

/* ---- torch.compile ---- */

PyObject *lf_set_eval_frame = NULL;

PyObject *
lf_compiler_off(void)
{
    if (LF_LIKELY(lf_set_eval_frame == NULL)) {
        return NULL;
    }
    PyObject *previous = PyObject_CallOneArg(lf_set_eval_frame, Py_None);
    if (previous == NULL) {
        PyErr_Clear();
    }
    else if (previous == Py_None) {
        Py_CLEAR(previous);
    }
    return previous;
}

void
lf_compiler_on(PyObject *previous)
{
    if (LF_LIKELY(previous == NULL)) {
        return;
    }
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *result = PyObject_CallOneArg(lf_set_eval_frame, previous);
    if (result == NULL) {
        PyErr_Clear();
    }
    Py_XDECREF(result);
    Py_DECREF(previous);
    PyErr_Restore(type, error, traceback);
}

/* ---- ids ---- */

void
lf_ids_reseed(void)
{
    LF_INCREMENT(&seed_epoch);
}

typedef struct {
    uint64_t state[4];
    uint64_t epoch;
} Ids;

#if defined(Py_GIL_DISABLED)
static _Thread_local Ids ids;
#else
static Ids ids;
#endif

static uint64_t
rotated(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

static int
ids_seed(void)
{
    uint64_t seeding = LF_LOAD_ACQUIRE(&seed_epoch);
    PyObject *os = PyImport_ImportModule("os");
    if (os == NULL) {
        return -1;
    }
    PyObject *seed = PyObject_CallMethod(os, "urandom", "i", (int)sizeof(ids.state));
    Py_DECREF(os);
    if (seed == NULL) {
        return -1;
    }
    if (!PyBytes_Check(seed) || PyBytes_GET_SIZE(seed) != sizeof(ids.state)) { /* somebody has patched it */
        Py_DECREF(seed);
        PyErr_SetString(PyExc_TypeError, "os.urandom() did not return the bytes it was asked for");
        return -1;
    }
    memcpy(ids.state, PyBytes_AS_STRING(seed), sizeof(ids.state));
    Py_DECREF(seed);
    ids.state[0] |= 1; /* all zeros would stay so */
    ids.epoch = seeding;
    return 0;
}

/* xoshiro256++ of Blackman and Vigna; 0 is no id. */
static uint64_t
ids_next(void)
{
    uint64_t *s = ids.state, result;
    do {
        result = rotated(s[0] + s[3], 23) + s[0];
        uint64_t t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = rotated(s[3], 45);
    } while (result == 0);
    return result;
}

static PyObject *
id_object(uint64_t high, uint64_t low)
{
    if (high == 0) {
        return PyLong_FromUnsignedLongLong(low);
    }
    unsigned char bytes[16];
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(low >> (8 * i));
        bytes[8 + i] = (unsigned char)(high >> (8 * i));
    }
#if PY_VERSION_HEX >= 0x030D0000
    return PyLong_FromUnsignedNativeBytes(bytes, sizeof(bytes), Py_ASNATIVEBYTES_LITTLE_ENDIAN);
#else
    return _PyLong_FromByteArray(bytes, sizeof(bytes), 1, 0);
#endif
}

/* The two halves of a trace id. An id of more bits is cut to 128, as a negative one is. */
static int
id_halves(PyObject *id, uint64_t *high, uint64_t *low)
{
    if (!PyLong_Check(id)) {
        PyErr_Format(PyExc_TypeError, "an id must be an int, not %.100s", Py_TYPE(id)->tp_name);
        return -1;
    }
    *low = PyLong_AsUnsignedLongLongMask(id);
    PyObject *bits = PyLong_FromLong(64);
    PyObject *upper = bits == NULL ? NULL : PyNumber_Rshift(id, bits);
    Py_XDECREF(bits);
    if (upper == NULL) {
        return -1;
    }
    *high = PyLong_AsUnsignedLongLongMask(upper);
    Py_DECREF(upper);
    return PyErr_Occurred() ? -1 : 0;
}

static int64_t
now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- plans ---- */

static const struct {
    const char *name;
    size_t offset;
} plan_objects[] = {
    {"sampler", offsetof(LfPlan, sampler)},
    {"id_generator", offsetof(LfPlan, id_generator)},
    {"on_start", offsetof(LfPlan, on_start)},
    {"on_ending", offsetof(LfPlan, on_ending)},
    {"on_end", offsetof(LfPlan, on_end)},
    {"scoped", offsetof(LfPlan, scoped)},
    {"scoped_variable", offsetof(LfPlan, scoped_variable)},
    {"open_spans", offsetof(LfPlan, open_spans)},
    {"resource", offsetof(LfPlan, resource)},
    {"scope", offsetof(LfPlan, scope)},
    {"info", offsetof(LfPlan, info)},
    {"limits", offsetof(LfPlan, limits)},
    {"processor", offsetof(LfPlan, processor)},
    {"tracer", offsetof(LfPlan, tracer)},
    {"unset_status", offsetof(LfPlan, unset_status)},
    {"bounded_attributes", offsetof(LfPlan, bounded_attributes)},
    {"bounded_list", offsetof(LfPlan, bounded_list)},
    {"set_links", offsetof(LfPlan, set_links)},
    {"sdk_set_attribute", offsetof(LfPlan, sdk_methods[LF_SDK_SET_ATTRIBUTE])},
    {"sdk_set_attributes", offsetof(LfPlan, sdk_methods[LF_SDK_SET_ATTRIBUTES])},
    {"sdk_end", offsetof(LfPlan, sdk_methods[LF_SDK_END])},
    {"resource_head", offsetof(LfPlan, resource_head)},
    {"resource_tail", offsetof(LfPlan, resource_tail)},
    {"scope_head", offsetof(LfPlan, scope_head)},
    {"scope_tail", offsetof(LfPlan, scope_tail)},
    {"span_type", offsetof(LfPlan, span_type)},
};

enum { PLAN_OBJECTS = sizeof(plan_objects) / sizeof(plan_objects[0]) };

static PyObject **
plan_object(LfPlan *plan, int i)
{
    return (PyObject **)((char *)plan + plan_objects[i].offset);
}

static Py_ssize_t
plan_number(PyObject *source, const char *name)
{
    PyObject *value = PyObject_GetAttrString(source, name);
    if (value == NULL) {
        return -1;
    }
    Py_ssize_t number = value == Py_None ? -1 : PyLong_AsSsize_t(value);
    Py_DECREF(value);
    return number;
}

/* The rules come as a list of (kind, bound). */
static int
plan_rules(LfPlan *plan, PyObject *source)
{
    PyObject *rules = PyObject_GetAttrString(source, "rules");
    if (rules == NULL) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < LF_RULES; i++) {
        PyObject *rule = PySequence_GetItem(rules, i);
        if (rule == NULL || !PyArg_ParseTuple(rule, "iK", &plan->rules[i].kind, &plan->rules[i].bound)) {
            Py_XDECREF(rule);
            Py_DECREF(rules);
            return -1;
        }
        Py_DECREF(rule);
    }
    Py_DECREF(rules);
    return 0;
}

/* Plan(source): `source` has the attributes that are described in lensfast._native. */
static PyObject *
plan_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *source;
    if (!PyArg_ParseTuple(args, "O", &source)) {
        return NULL;
    }
    LfPlan *plan = (LfPlan *)type->tp_alloc(type, 0);
    if (plan == NULL) {
        return NULL;
    }
    for (int i = 0; i < PLAN_OBJECTS; i++) {
        PyObject *value = PyObject_GetAttrString(source, plan_objects[i].name);
        if (value == NULL) {
            Py_DECREF(plan);
            return NULL;
        }
        if (value == Py_None) {
            Py_CLEAR(value);
        }
        *plan_object(plan, i) = value;
    }
    plan->epoch = LF_LOAD_ACQUIRE(&epoch);
    plan->calls_on_ending = plan_number(source, "calls_on_ending") > 0;
    plan->freezes = plan_number(source, "freezes") > 0;
    plan->own_ids = plan_number(source, "own_ids") > 0;
    plan->inherited_flags = (int)plan_number(source, "inherited_flags");
    plan->max_attributes = plan_number(source, "max_attributes");
    plan->max_length = plan_number(source, "max_length");
    int wrong = PyErr_Occurred() || plan_rules(plan, source) < 0;
    if (!wrong && !(plan->span_type != NULL && PyType_Check((PyObject *)plan->span_type) &&
                    PyType_IsSubtype(plan->span_type, lf_span_type))) {
        PyErr_SetString(PyExc_TypeError, "span_type must be a class of spans");
        wrong = 1;
    }
    PyObject *const processors[] = {plan->on_start, plan->on_ending, plan->on_end};
    for (int i = 0; !wrong && i < 3; i++) {
        if (processors[i] == NULL || !PyTuple_CheckExact(processors[i])) {
            PyErr_SetString(PyExc_TypeError, "the processors must be in tuples");
            wrong = 1;
        }
    }
    PyObject *const parts[] = {plan->resource_head, plan->resource_tail, plan->scope_head, plan->scope_tail};
    for (int i = 0; !wrong && i < 4; i++) {
        if (parts[i] == NULL || !PyBytes_CheckExact(parts[i])) {
            PyErr_SetString(PyExc_TypeError, "the encoded parts must be bytes");
            wrong = 1;
        }
    }
    if (!wrong && plan->open_spans != NULL && !Py_IS_TYPE(plan->open_spans, lf_open_spans_type)) {
        PyErr_SetString(PyExc_TypeError, "open_spans must be an OpenSpans");
        wrong = 1;
    }
    if (!wrong && (plan->tracer == NULL || !PyObject_TypeCheck(plan->tracer, lf_tracer_type))) {
        PyErr_SetString(PyExc_TypeError, "tracer must be a tracer");
        wrong = 1;
    }
    if (wrong) {
        Py_DECREF(plan);
        return NULL;
    }
    return (PyObject *)plan;
}

static int
plan_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < PLAN_OBJECTS; i++) {
        Py_VISIT(*plan_object((LfPlan *)self, i));
    }
    return 0;
}

/* No tp_clear: spans rely on what is in their plan. A cycle through a plan is broken at the tracer that holds it. */
static void
plan_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (int i = 0; i < PLAN_OBJECTS; i++) {
        Py_CLEAR(*plan_object((LfPlan *)self, i));
    }
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "What the spans of one tracer have in common."},
    {Py_tp_new, plan_new},
    {Py_tp_traverse, plan_traverse},
    {Py_tp_dealloc, plan_dealloc},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "lensfast._gate.Plan",
    .basicsize = sizeof(LfPlan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = plan_slots,
};

/* ---- open spans ---- */

/* What `is_open` is for those in the list now. */
static uint8_t
open_now(const LfOpenSpans *spans)
{
    return (uint8_t)(1 + spans->forgotten % UINT8_MAX);
}

/* Unless they are closed. */
static void
open_spans_add(LfOpenSpans *spans, LfSpan *span)
{
    Py_INCREF(span);
    LF_LOCK(&spans->lock);
    if (spans->closed) {
        LF_UNLOCK(&spans->lock);
        Py_DECREF(span);
        return;
    }
    span->older = spans->newest;
    span->newer = NULL;
    if (spans->newest != NULL) {
        spans->newest->newer = span;
    }
    else {
        spans->oldest = span;
    }
    spans->newest = span;
    span->is_open = open_now(spans);
    LF_UNLOCK(&spans->lock);
}

/* Take a span out, the newest if it is NULL, and return it, if it was in: the reference of the list becomes the
   caller's. */
static LfSpan *
open_spans_take(LfOpenSpans *spans, LfSpan *span)
{
    LF_LOCK(&spans->lock);
    if (span == NULL) {
        span = spans->newest;
    }
    if (span == NULL || span->is_open != open_now(spans)) {
        LF_UNLOCK(&spans->lock);
        return NULL;
    }
    if (span->older != NULL) {
        span->older->newer = span->newer;
    }
    else {
        spans->oldest = span->newer;
    }
    if (span->newer != NULL) {
        span->newer->older = span->older;
    }
    else {
        spans->newest = span->older;
    }
    span->older = span->newer = NULL;
    span->is_open = 0;
    LF_UNLOCK(&spans->lock);
    return span;
}

/* Forget all of them. */
static int
open_spans_clear(PyObject *self)
{
    LfSpan *span;
    while ((span = open_spans_take((LfOpenSpans *)self, NULL)) != NULL) {
        Py_DECREF(span);
    }
    return 0;
}

static PyObject *
open_spans_forget(PyObject *self, PyObject *Py_UNUSED(unused))
{
#if defined(Py_GIL_DISABLED)
    /* Another thread of the parent may have been in the middle of it: the references are left behind. */
    LfOpenSpans *spans = (LfOpenSpans *)self;
    LF_MUTEX_RESET(&spans->lock);
    spans->oldest = spans->newest = NULL;
    spans->forgotten++;
#else
    open_spans_clear(self);
#endif
    Py_RETURN_NONE;
}

/* A list of them, the newest first; from now on none is taken in. */
static PyObject *
open_spans_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    LfOpenSpans *spans = (LfOpenSpans *)self;
    LF_LOCK(&spans->lock);
    spans->closed = 1;
    LF_UNLOCK(&spans->lock);
    PyObject *list = PyList_New(0);
    LfSpan *span;
    while (list != NULL && (span = open_spans_take(spans, NULL)) != NULL) {
        int failed = PyList_Append(list, (PyObject *)span) < 0;
        Py_DECREF(span);
        if (failed) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
open_spans_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return type->tp_alloc(type, 0);
}

static int
open_spans_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (LfSpan *span = ((LfOpenSpans *)self)->oldest; span != NULL; span = span->newer) {
        Py_VISIT(span);
    }
    return 0;
}

static void
open_spans_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    open_spans_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef open_spans_methods[] = {
    {"forget", open_spans_forget, METH_NOARGS, "Forget all of them, in a child that was forked off."},
    {"close", open_spans_close, METH_NOARGS, "Give them up, the newest first, and take in no other."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot open_spans_slots[] = {
    {Py_tp_doc, "The spans of a provider that have started and not ended."},
    {Py_tp_new, open_spans_new},
    {Py_tp_traverse, open_spans_traverse},
    {Py_tp_clear, open_spans_clear},
    {Py_tp_dealloc, open_spans_dealloc},
    {Py_tp_methods, open_spans_methods},
    {0, NULL},
};

static PyType_Spec open_spans_spec = {
    .name = "lensfast._gate.OpenSpans",
    .basicsize = sizeof(LfOpenSpans),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = open_spans_slots,
};

/* ---- the private attributes of the SDK's span, as the code that span inherits from it reads and writes them ---- */

enum {
    P_NAME, P_CONTEXT, P_KIND, P_PARENT, P_START, P_END, P_STATUS, P_ATTRIBUTES, P_EVENTS, P_LINKS, P_RESOURCE,
    P_SCOPE, P_INFO, P_LIMITS, P_PROCESSOR, P_SAMPLER, P_TRACE_CONFIG, P_RECORD_EXCEPTION, P_SET_STATUS,
    P_END_METRICS, P_LOCK, PRIVATES,
};

static const char *const private_names[PRIVATES] = {
    "_name", "_context", "_kind", "_parent", "_start_time", "_end_time", "_status", "_attributes", "_events",
    "_links", "_resource", "_instrumentation_scope", "_instrumentation_info", "_limits", "_span_processor",
    "_sampler", "_trace_config", "_record_exception", "_set_status_on_exception", "_record_end_metrics", "_lock",
};

static PyObject *privates[PRIVATES]; /* the same, interned */

/* Allocating may collect garbage, whose finalisers may have been faster. */
static int
make_dict(PyObject **where)
{
    if (*where == NULL) {
        PyObject *made = PyDict_New();
        if (made == NULL) {
            return -1;
        }
        if (*where == NULL) {
            LF_STORE_RELEASE(where, made);
        }
        else {
            Py_DECREF(made);
        }
    }
    return 0;
}

static PyObject *
or_none(PyObject *object)
{
    return Py_NewRef(object == NULL ? Py_None : object);
}

static PyObject *
make_span_context(LfSpan *span, uint64_t id, uint8_t flags)
{
    PyTypeObject *type = lf_api.span_context;
    PyObject *context = type->tp_alloc(type, 6);
    if (context == NULL) {
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030E0000
    ((PyTupleObject *)context)->ob_hash = -1; /* not computed yet */
#endif
    PyObject *trace_id = id_object(span->trace_high, span->trace_low);
    PyObject *span_id = id_object(0, id);
    if (trace_id == NULL || span_id == NULL) {
        Py_XDECREF(trace_id);
        Py_XDECREF(span_id);
        Py_DECREF(context);
        return NULL;
    }
    PyObject *state = span->trace_state == NULL ? lf_api.default_trace_state : span->trace_state;
    PyTuple_SET_ITEM(context, 0, trace_id);
    PyTuple_SET_ITEM(context, 1, span_id);
    PyTuple_SET_ITEM(context, 2, Py_NewRef(Py_False));
    PyTuple_SET_ITEM(context, 3, Py_NewRef(lf_api.trace_flags[flags % LF_KNOWN_FLAGS]));
    PyTuple_SET_ITEM(context, 4, Py_NewRef(state));
    int valid = (span->trace_high | span->trace_low) != 0 && id != 0;
    PyTuple_SET_ITEM(context, 5, PyBool_FromLong(valid));
    return context;
}

static PyObject *
keep_span_context(LfSpan *span, PyObject **kept, uint64_t id, uint8_t flags)
{
    if (*kept == NULL) {
        PyObject *made = make_span_context(span, id, flags);
        if (made == NULL) {
            return NULL;
        }
        /* Meanwhile garbage may have been collected, and a finaliser have asked for it. */
        if (*kept == NULL) {
            *kept = made;
        }
        else {
            Py_DECREF(made);
        }
    }
    return Py_NewRef(*kept);
}

/* Newer SDKs make the attributes of an ended span immutable. */
static int
freeze(LfSpan *span)
{
    if (span->bounded == NULL || !span->plan->freezes) {
        return 0;
    }
    PyObject *bounded = Py_NewRef(span->bounded); /* meanwhile the span may be given another */
    int result = PyObject_SetAttrString(bounded, "_immutable", Py_True);
    Py_DECREF(bounded);
    return result;
}

static PyObject *
make_bounded(LfSpan *span)
{
    if (span->bounded == NULL) {
        if (make_dict(&span->attributes) < 0) {
            return NULL;
        }
        /* While Python makes it, another thread may set attributes in the same dict, or be faster. */
        PyObject *compiler = lf_compiler_off();
        PyObject *bounded =
            PyObject_CallFunctionObjArgs(span->plan->bounded_attributes, span->plan->limits, span->attributes,
                                         span->sdk_sets_attributes && span->plan->freezes ? Py_True : Py_False, NULL);
        lf_compiler_on(compiler);
        if (bounded == NULL) {
            return NULL;
        }
        if (span->bounded == NULL) {
            span->bounded = bounded;
            if (span->ended && freeze(span) < 0) { /* meanwhile */
                return NULL;
            }
        }
        else {
            Py_DECREF(bounded);
        }
    }
    return Py_NewRef(span->bounded);
}

/* The SDK's code, or somebody, may have given the BoundedAttributes another dict. */
void
lf_span_follow_bounded(LfSpan *span)
{
    PyObject *bounded = Py_NewRef(span->bounded); /* a property may replace it */
    PyObject *attributes = PyObject_GetAttr(bounded, str_dict);
    Py_DECREF(bounded);
    if (attributes == NULL) {
        PyErr_Clear();
    }
    else if (!PyDict_CheckExact(attributes)) {
        Py_CLEAR(attributes);
    }
    Py_XSETREF(span->attributes, attributes);
}

static PyObject *
make_list(LfSpan *span, PyObject **list, const char *limit)
{
    if (*list == NULL) {
        PyObject *made = PyObject_CallFunction(span->plan->bounded_list, "Os", span->plan->limits, limit);
        if (made == NULL) {
            return NULL;
        }
        if (*list == NULL) {
            *list = made;
        }
        else {
            Py_DECREF(made);
        }
    }
    return Py_NewRef(*list);
}

static PyObject *
make_lock(LfSpan *span)
{
    if (span->lock == NULL) {
        PyObject *threading = PyImport_ImportModule("threading");
        PyObject *lock = threading == NULL ? NULL : PyObject_CallMethod(threading, "Lock", NULL);
        Py_XDECREF(threading);
        if (lock == NULL) {
            return NULL;
        }
        if (span->lock == NULL) {
            span->lock = lock;
        }
        else {
            Py_DECREF(lock);
        }
    }
    return Py_NewRef(span->lock);
}

static PyObject *
get_private(LfSpan *span, int what)
{
    const LfPlan *plan = span->plan;
    if (LF_UNLIKELY(span->replaced != NULL)) {
        PyObject *value = lf_dict_get(span->replaced, privates[what]);
        if (value != NULL || PyErr_Occurred()) {
            return value;
        }
    }
    switch (what) {
    case P_NAME:
        return Py_NewRef(span->name);
    case P_CONTEXT:
        return keep_span_context(span, &span->context, span->id, span->flags);
    case P_PARENT:
        return span->has_parent ? keep_span_context(span, &span->parent, span->parent_id, span->parent_flags)
                                : or_none(span->parent);
    case P_KIND:
        return Py_NewRef(span->kind == NULL ? lf_api.kinds[0] : span->kind);
    case P_START:
        return span->started ? PyLong_FromLongLong(span->start) : Py_NewRef(Py_None);
    case P_END:
        return span->ended ? PyLong_FromLongLong(span->end) : Py_NewRef(Py_None);
    case P_STATUS:
        return Py_NewRef(span->status == NULL ? plan->unset_status : span->status);
    case P_ATTRIBUTES:
        return make_bounded(span);
    case P_EVENTS:
        return make_list(span, &span->events, "max_events");
    case P_LINKS:
        return make_list(span, &span->links, "max_links");
    case P_RESOURCE:
        return or_none(plan->resource);
    case P_SCOPE:
        return or_none(plan->scope);
    case P_INFO:
        return or_none(plan->info);
    case P_LIMITS:
        return or_none(plan->limits);
    case P_PROCESSOR:
        return or_none(plan->processor);
    case P_SAMPLER:
        return or_none(plan->sampler);
    case P_RECORD_EXCEPTION:
        return PyBool_FromLong(span->record_exception);
    case P_SET_STATUS:
        return PyBool_FromLong(span->set_status_on_exception);
    case P_LOCK:
        return make_lock(span);
    default:
        Py_RETURN_NONE;
    }
}

static int
replace(LfSpan *span, int what, PyObject *value)
{
    if (make_dict(&span->replaced) < 0) {
        return -1;
    }
    return PyDict_SetItem(span->replaced, privates[what], value);
}

/* True, and the time, if `value` is a time that C can hold. */
static int
as_time(PyObject *value, int64_t *time)
{
    if (!PyLong_CheckExact(value)) {
        return 0;
    }
    int overflow;
    long long nanoseconds = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0 || nanoseconds < 0) {
        return 0;
    }
    *time = nanoseconds;
    return 1;
}

static int
set_time(LfSpan *span, int what, PyObject *value)
{
    uint8_t *known = what == P_START ? &span->started : &span->ended;
    LF_STORE_RELAXED(known, value != Py_None);
    if (value == Py_None || as_time(value, what == P_START ? &span->start : &span->end)) {
        return span->replaced == NULL || !PyDict_Contains(span->replaced, privates[what])
                   ? 0
                   : PyDict_DelItem(span->replaced, privates[what]);
    }
    return replace(span, what, value);
}

static int
set_private(LfSpan *span, int what, PyObject *value)
{
    if (value == NULL) {
        PyErr_Format(PyExc_AttributeError, "%U can't be deleted", privates[what]);
        return -1;
    }
    switch (what) {
    case P_NAME:
        Py_SETREF(span->name, Py_NewRef(value));
        return 0;
    case P_START:
    case P_END:
        return set_time(span, what, value);
    case P_STATUS:
        Py_XSETREF(span->status, Py_NewRef(value));
        return 0;
    case P_ATTRIBUTES:
        Py_XSETREF(span->bounded, Py_NewRef(value));
        span->sdk_sets_attributes = 1; /* it may have limits of its own */
        lf_span_follow_bounded(span);
        return 0;
    case P_EVENTS:
        Py_XSETREF(span->events, Py_NewRef(value));
        return 0;
    case P_LINKS:
        Py_XSETREF(span->links, Py_NewRef(value));
        return 0;
    case P_LOCK:
        Py_XSETREF(span->lock, Py_NewRef(value));
        return 0;
    default:
        return replace(span, what, value);
    }
}

static PyObject *
span_get(PyObject *self, void *closure)
{
    PyObject *value;
    Py_BEGIN_CRITICAL_SECTION(self);
    value = get_private((LfSpan *)self, (int)(intptr_t)closure);
    Py_END_CRITICAL_SECTION();
    return value;
}

static int
span_set(PyObject *self, PyObject *value, void *closure)
{
    int result;
    Py_BEGIN_CRITICAL_SECTION(self);
    result = set_private((LfSpan *)self, (int)(intptr_t)closure, value);
    Py_END_CRITICAL_SECTION();
    return result;
}

/* The public ones, which can't be set. */
static PyObject *
span_get_tuple(PyObject *self, void *closure)
{
    LfSpan *span = (LfSpan *)self;
    PyObject *list;
    Py_BEGIN_CRITICAL_SECTION(self);
    list = Py_XNewRef((int)(intptr_t)closure == P_EVENTS ? span->events : span->links);
    Py_END_CRITICAL_SECTION();
    if (list == NULL) {
        return PyTuple_New(0);
    }
    PyObject *tuple = PySequence_Tuple(list);
    Py_DECREF(list);
    return tuple;
}

/* ---- changing a span ---- */

static int
is_clean(const LfPlan *plan, PyObject *value)
{
    if (PyUnicode_CheckExact(value)) {
        return plan->max_length < 0 || PyUnicode_GET_LENGTH(value) <= plan->max_length;
    }
    return PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value);
}

/* dict.pop(key, None) */
static int
take_out(PyObject *dict, PyObject *key)
{
#if PY_VERSION_HEX >= 0x030D0000
    return PyDict_Pop(dict, key, NULL); /* another thread may be faster */
#else
    int present = PyDict_Contains(dict, key);
    return present <= 0 ? present : PyDict_DelItem(dict, key);
#endif
}

/* 1 if that attribute was set, 0 if the SDK's code is to do it, with its warnings. */
static int
set_clean_attribute(LfSpan *span, PyObject *key, PyObject *value)
{
    const LfPlan *plan = span->plan;
    if (!PyUnicode_CheckExact(key) || PyUnicode_GET_LENGTH(key) == 0 || !is_clean(plan, value) || span->ended ||
        span->sdk_sets_attributes || plan->max_attributes == 0) {
        return 0;
    }
    if (LF_UNLIKELY(span->bounded != NULL)) {
        lf_span_follow_bounded(span);
    }
    if (span->attributes == NULL) {
        if (span->bounded != NULL) {
            return 0;
        }
        if (make_dict(&span->attributes) < 0) {
            return -1;
        }
    }
    PyObject *attributes = Py_NewRef(span->attributes); /* an odd key's __eq__ may have it replaced */
    int done = 1;
    if (PyDict_GET_SIZE(attributes) != 0) {
        /* In BoundedAttributes, what is set again moves to the end. */
        if (take_out(attributes, key) < 0) {
            done = -1;
        }
        else if (plan->max_attributes >= 0 && PyDict_GET_SIZE(attributes) >= plan->max_attributes) {
            done = 0;
        }
    }
    if (done == 1 && PyDict_SetItem(attributes, key, value) < 0) {
        done = -1;
    }
    Py_DECREF(attributes);
    return done;
}

/* The SDK's method of that name, for what C does not do, and for wrong arguments. */
static PyObject *
call_sdk(LfSpan *span, int method, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Py_ssize_t all = nargs + (kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject **stack = PyMem_Malloc((size_t)(1 + all) * sizeof(PyObject *));
    if (stack == NULL) {
        return PyErr_NoMemory();
    }
    stack[0] = (PyObject *)span;
    for (Py_ssize_t i = 0; i < all; i++) {
        stack[1 + i] = args[i];
    }
    PyObject *compiler = lf_compiler_off();
    PyObject *result = PyObject_Vectorcall(span->plan->sdk_methods[method], stack, (size_t)(1 + nargs), kwnames);
    lf_compiler_on(compiler);
    PyMem_Free(stack);
    return result;
}

int
lf_span_set_attribute(LfSpan *span, PyObject *key, PyObject *value)
{
    int done;
    Py_BEGIN_CRITICAL_SECTION(span);
    done = set_clean_attribute(span, key, value);
    Py_END_CRITICAL_SECTION();
    if (LF_LIKELY(done != 0)) {
        return done < 0 ? -1 : 0;
    }
    PyObject *const arguments[] = {key, value};
    PyObject *result = call_sdk(span, LF_SDK_SET_ATTRIBUTE, arguments, 2, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The arguments of a call as parameters `first` and `second`; 0 if they are not so simple. */
static int
two_arguments(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, const char *first, const char *second,
              PyObject *found[2])
{
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (nargs + keywords > 2) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        found[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        int which = PyUnicode_CompareWithASCIIString(name, first) == 0 ? 0
                    : PyUnicode_CompareWithASCIIString(name, second) == 0 ? 1 : -1;
        if (which < 0 || found[which] != NULL) {
            return 0;
        }
        found[which] = args[nargs + i];
    }
    return 1;
}

static PyObject *
span_set_attribute(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *found[2] = {NULL, NULL};
    if (!two_arguments(args, nargs, kwnames, "key", "value", found) || found[0] == NULL || found[1] == NULL) {
        return call_sdk((LfSpan *)self, LF_SDK_SET_ATTRIBUTE, args, nargs, kwnames);
    }
    if (lf_span_set_attribute((LfSpan *)self, found[0], found[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* All of a dict: 1 if they were set, 0 if the SDK's code is to do it. */
static int
set_clean_attributes(LfSpan *span, PyObject *given)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(given, &position, &key, &value)) {
        if (!PyUnicode_CheckExact(key) || PyUnicode_GET_LENGTH(key) == 0 || !is_clean(span->plan, value)) {
            return 0;
        }
    }
    Py_ssize_t present = span->attributes == NULL ? 0 : PyDict_GET_SIZE(span->attributes);
    Py_ssize_t most = span->plan->max_attributes;
    if (span->ended || span->sdk_sets_attributes || most == 0 || (span->attributes == NULL && span->bounded != NULL) ||
        (most >= 0 && present + PyDict_GET_SIZE(given) > most)) {
        return 0;
    }
    position = 0;
    while (PyDict_Next(given, &position, &key, &value)) {
        Py_INCREF(key); /* a garbage collection may change the dict */
        Py_INCREF(value);
        int done = set_clean_attribute(span, key, value);
        Py_DECREF(key);
        Py_DECREF(value);
        if (done < 0) {
            return -1;
        }
    }
    return 1;
}

static PyObject *
span_set_attributes(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs == 1 && kwnames == NULL && PyDict_CheckExact(args[0])) {
        int done;
        Py_BEGIN_CRITICAL_SECTION2(self, args[0]);
        done = set_clean_attributes((LfSpan *)self, args[0]);
        Py_END_CRITICAL_SECTION2();
        if (done < 0) {
            return NULL;
        }
        if (done) {
            Py_RETURN_NONE;
        }
    }
    return call_sdk((LfSpan *)self, LF_SDK_SET_ATTRIBUTES, args, nargs, kwnames);
}

static PyObject *
span_get_span_context(PyObject *self, PyObject *Py_UNUSED(unused))
{
    return span_get(self, (void *)(intptr_t)P_CONTEXT);
}

static PyObject *
span_is_recording(PyObject *self, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(!LF_LOAD_RELAXED(&((LfSpan *)self)->ended));
}

static int
call_processors(PyObject *processors, PyObject *method, PyObject *span)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(processors); i++) {
        PyObject *processor = PyTuple_GET_ITEM(processors, i);
        if (Py_IS_TYPE(processor, lf_sink_type)) {
            if (lf_sink_add(processor, span) < 0) {
                return -1;
            }
            continue;
        }
        PyObject *compiler = lf_compiler_off();
        PyObject *result = PyObject_CallMethodOneArg(processor, method, span);
        lf_compiler_on(compiler);
        if (result == NULL) {
            return -1;
        }
        Py_DECREF(result);
    }
    return 0;
}

/* Code of the SDK that changes a span holds its lock meanwhile: wait until it is done. */
static int
lock_span(LfSpan *span, PyObject **lock)
{
    *lock = Py_XNewRef(span->lock);
    if (LF_LIKELY(*lock == NULL)) {
        return 0;
    }
    PyObject *result = PyObject_CallMethod(*lock, "acquire", NULL);
    if (result == NULL) {
        Py_CLEAR(*lock);
        return -1;
    }
    Py_DECREF(result);
    return 0;
}

static int
unlock_span(PyObject *lock)
{
    if (LF_LIKELY(lock == NULL)) {
        return 0;
    }
    PyObject *type, *error, *traceback; /* there may be one already, which is to stay */
    PyErr_Fetch(&type, &error, &traceback);
    PyObject *result = PyObject_CallMethod(lock, "release", NULL);
    Py_DECREF(lock);
    if (type != NULL) {
        PyErr_Clear();
        PyErr_Restore(type, error, traceback);
    }
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Call the processors that there are now: some may have been added since the span began. */
static int
tell_ended(LfSpan *span)
{
    PyObject *replaced = LF_LOAD_ACQUIRE(&span->replaced); /* once it is there, it stays */
    replaced = replaced == NULL ? NULL : lf_dict_get(replaced, privates[P_PROCESSOR]);
    if (LF_UNLIKELY(replaced != NULL || PyErr_Occurred())) {
        PyObject *processors = replaced == NULL ? NULL : PyTuple_Pack(1, replaced);
        Py_XDECREF(replaced);
        int failed = processors == NULL || (span->plan->calls_on_ending &&
                                            call_processors(processors, str_on_ending, (PyObject *)span) < 0) ||
                     call_processors(processors, str_on_end, (PyObject *)span) < 0;
        Py_XDECREF(processors);
        return failed ? -1 : 0;
    }
    LfPlan *plan = span->plan;
    if (LF_LIKELY(plan->epoch == LF_LOAD_ACQUIRE(&epoch))) {
        Py_INCREF(plan);
    }
    else {
        plan = lf_tracer_plan((LfTracer *)plan->tracer);
        if (plan == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (plan == NULL || plan->processor != span->plan->processor) {
            Py_XDECREF(plan);
            plan = (LfPlan *)Py_NewRef(span->plan); /* the tracer has been disabled */
        }
    }
    int result = call_processors(plan->on_ending, str_on_ending, (PyObject *)span);
    if (result == 0) {
        result = call_processors(plan->on_end, str_on_end, (PyObject *)span);
    }
    Py_DECREF(plan);
    return result;
}

/* 1: it has ended now. 0: that is for the SDK's code to say. */
static int
set_ended(LfSpan *span, PyObject *end_time)
{
    PyObject *lock;
    if (lock_span(span, &lock) < 0) {
        return -1;
    }
    if (LF_UNLIKELY(span->ended || !span->started)) {
        return unlock_span(lock) < 0 ? -1 : 0;
    }
    if (end_time == NULL || end_time == Py_None) {
        span->end = now();
        LF_STORE_RELAXED(&span->ended, 1);
    }
    else if (set_time(span, P_END, end_time) < 0) {
        unlock_span(lock);
        return -1;
    }
    span->sdk_sets_attributes = 1; /* and refuses to, whatever is done to the end time */
    int failed = freeze(span) < 0;
    return unlock_span(lock) < 0 || failed ? -1 : 1;
}

int
lf_span_end(LfSpan *span, PyObject *end_time)
{
    int ended;
    Py_BEGIN_CRITICAL_SECTION(span);
    ended = set_ended(span, end_time);
    Py_END_CRITICAL_SECTION();
    if (LF_UNLIKELY(ended <= 0)) {
        if (ended < 0) {
            return -1;
        }
        PyObject *result = call_sdk(span, LF_SDK_END, &end_time, end_time != NULL, NULL);
        Py_XDECREF(result);
        return result == NULL ? -1 : 0;
    }
    Py_INCREF(span);
    if (span->plan->open_spans != NULL && open_spans_take((LfOpenSpans *)span->plan->open_spans, span) != NULL) {
        Py_DECREF(span);
    }
    int result = tell_ended(span);
    Py_DECREF(span);
    return result;
}

static PyObject *
span_end(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *found[2] = {NULL, NULL};
    if (!two_arguments(args, nargs, kwnames, "end_time", "end_time", found) || found[1] != NULL) {
        return call_sdk((LfSpan *)self, LF_SDK_END, args, nargs, kwnames);
    }
    if (lf_span_end((LfSpan *)self, found[0]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
span_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyErr_SetString(PyExc_TypeError, "Span must be instantiated via a tracer.");
    return NULL;
}

static int
span_traverse(PyObject *self, visitproc visit, void *arg)
{
    LfSpan *span = (LfSpan *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(span->plan);
    Py_VISIT(span->name);
    Py_VISIT(span->attributes);
    Py_VISIT(span->bounded);
    Py_VISIT(span->events);
    Py_VISIT(span->links);
    Py_VISIT(span->status);
    Py_VISIT(span->lock);
    Py_VISIT(span->kind);
    Py_VISIT(span->trace_state);
    Py_VISIT(span->context);
    Py_VISIT(span->parent);
    Py_VISIT(span->replaced);
    return 0;
}

/* Not of the plan and the name, without which a span can't be used by a finaliser. */
static int
span_clear(PyObject *self)
{
    LfSpan *span = (LfSpan *)self;
    Py_CLEAR(span->attributes);
    Py_CLEAR(span->bounded);
    Py_CLEAR(span->events);
    Py_CLEAR(span->links);
    Py_CLEAR(span->status);
    Py_CLEAR(span->lock);
    Py_CLEAR(span->kind);
    Py_CLEAR(span->trace_state);
    Py_CLEAR(span->context);
    Py_CLEAR(span->parent);
    Py_CLEAR(span->replaced);
    return 0;
}

static void
span_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    span_clear(self);
    Py_CLEAR(((LfSpan *)self)->name);
    Py_CLEAR(((LfSpan *)self)->plan);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef span_methods[] = {
    {"get_span_context", span_get_span_context, METH_NOARGS, NULL},
    {"is_recording", span_is_recording, METH_NOARGS, NULL},
    {"set_attribute", (PyCFunction)(void (*)(void))span_set_attribute, METH_FASTCALL | METH_KEYWORDS,
     "set_attribute($self, key, value)\n--\n\n"},
    {"set_attributes", (PyCFunction)(void (*)(void))span_set_attributes, METH_FASTCALL | METH_KEYWORDS,
     "set_attributes($self, attributes)\n--\n\n"},
    {"end", (PyCFunction)(void (*)(void))span_end, METH_FASTCALL | METH_KEYWORDS,
     "end($self, end_time=None)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

#define PRIVATE(what) {NULL, span_get, span_set, NULL, (void *)(intptr_t)(what)}
#define PUBLIC(name, what) {name, span_get, NULL, NULL, (void *)(intptr_t)(what)}

static PyGetSetDef span_getset[PRIVATES + 12] = {
    PUBLIC("name", P_NAME),
    PUBLIC("context", P_CONTEXT),
    PUBLIC("kind", P_KIND),
    PUBLIC("parent", P_PARENT),
    PUBLIC("start_time", P_START),
    PUBLIC("end_time", P_END),
    PUBLIC("status", P_STATUS),
    PUBLIC("resource", P_RESOURCE),
    PUBLIC("instrumentation_scope", P_SCOPE),
    {"events", span_get_tuple, NULL, NULL, (void *)(intptr_t)P_EVENTS},
    {"links", span_get_tuple, NULL, NULL, (void *)(intptr_t)P_LINKS},
    /* and the private ones, which lf_span_init adds */
};

static PyType_Slot span_slots[] = {
    {Py_tp_doc, "The base of a span: what is fast of it. The rest is inherited from the SDK's span."},
    {Py_tp_new, span_new},
    {Py_tp_traverse, span_traverse},
    {Py_tp_clear, span_clear},
    {Py_tp_dealloc, span_dealloc},
    {Py_tp_methods, span_methods},
    {Py_tp_getset, span_getset},
    {0, NULL},
};

static PyType_Spec span_spec = {
    .name = "lensfast._gate.SpanBase",
    .basicsize = sizeof(LfSpan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = span_slots,
};

/* ---- starting a span ---- */

PyObject *
lf_context_with(PyObject *outer, PyObject *span)
{
    /* Its methods refuse to change it; those of dict do not. */
    PyObject *context = PyDict_Type.tp_new(lf_api.context_type, no_arguments, NULL);
    if (context == NULL) {
        return NULL;
    }
    Py_ssize_t others = LF_LIKELY(PyDict_Check(outer)) ? PyDict_GET_SIZE(outer) : PY_SSIZE_T_MAX;
    int failed = 0;
    if (LF_UNLIKELY(others > 1)) {
        failed = PyDict_Update(context, outer) < 0;
    }
    else if (others == 1) {
        int replaces = PyDict_Contains(outer, lf_api.span_key);
        failed = replaces < 0 || (replaces == 0 && PyDict_Update(context, outer) < 0);
    }
    if (failed || PyDict_SetItem(context, lf_api.span_key, span) < 0) {
        Py_DECREF(context);
        return NULL;
    }
    return context;
}

/* What is known of the parent. */
typedef struct {
    int there;
    int remote;
    uint64_t trace_high, trace_low, id;
    int flags;
    PyObject *trace_state; /* owned; NULL: the default */
    PyObject *context;     /* owned: its SpanContext, unless the parent is a span of ours */
} Parent;

static int
parent_from_context(Parent *parent, PyObject *context)
{
    if (context == Py_None) {
        Py_DECREF(context);
        return 0;
    }
    if (!PyObject_TypeCheck(context, lf_api.span_context) || PyTuple_GET_SIZE(context) < 6) {
        Py_DECREF(context);
        PyErr_SetString(PyExc_TypeError, "parent_span_context must be a SpanContext or None.");
        return -1;
    }
    int valid = PyObject_IsTrue(PyTuple_GET_ITEM(context, 5));
    if (valid <= 0) {
        Py_DECREF(context);
        return valid;
    }
    uint64_t unused;
    long flags = PyLong_AsLong(PyTuple_GET_ITEM(context, 3));
    if (id_halves(PyTuple_GET_ITEM(context, 0), &parent->trace_high, &parent->trace_low) < 0 ||
        id_halves(PyTuple_GET_ITEM(context, 1), &unused, &parent->id) < 0 || PyErr_Occurred()) {
        Py_DECREF(context);
        return -1;
    }
    int remote = PyObject_IsTrue(PyTuple_GET_ITEM(context, 2));
    if (remote < 0) {
        Py_DECREF(context);
        return -1;
    }
    parent->there = 1;
    parent->flags = (int)(flags & 0xff);
    parent->remote = remote;
    PyObject *state = PyTuple_GET_ITEM(context, 4);
    parent->trace_state = state == lf_api.default_trace_state ? NULL : Py_NewRef(state);
    parent->context = context;
    return 0;
}

static int
find_parent(Parent *parent, PyObject *context, PyTypeObject *ours_type)
{
    memset(parent, 0, sizeof(*parent));
    PyObject *span = NULL;
    if (LF_LIKELY(PyDict_Check(context))) {
        span = lf_dict_get(context, lf_api.span_key);
    }
    else { /* somebody has attached something else */
        span = PyObject_CallMethod(context, "get", "O", lf_api.span_key);
    }
    if (span == NULL || span == Py_None) {
        Py_XDECREF(span);
        return PyErr_Occurred() ? -1 : 0;
    }
    if ((Py_IS_TYPE(span, ours_type) || lf_is_span(span)) && LF_LOAD_ACQUIRE(&((LfSpan *)span)->replaced) == NULL) {
        const LfSpan *ours = (LfSpan *)span;
        parent->there = (ours->trace_high | ours->trace_low) != 0 && ours->id != 0;
        if (!parent->there) {
            Py_DECREF(span);
            return 0;
        }
        parent->trace_high = ours->trace_high;
        parent->trace_low = ours->trace_low;
        parent->id = ours->id;
        parent->flags = ours->flags;
        parent->trace_state = Py_XNewRef(ours->trace_state);
        Py_DECREF(span);
        return 0;
    }
    PyObject *span_context;
    if (Py_IS_TYPE(span, lf_api.non_recording_span)) {
        span_context = PyObject_GetAttr(span, str_context);
    }
    else {
        int is_span = PyObject_IsInstance(span, lf_api.api_span);
        if (is_span <= 0) {
            Py_DECREF(span);
            return is_span;
        }
        PyObject *compiler = lf_compiler_off();
        span_context = PyObject_CallMethod(span, "get_span_context", NULL);
        lf_compiler_on(compiler);
    }
    Py_DECREF(span);
    return span_context == NULL ? -1 : parent_from_context(parent, span_context);
}

static PyObject *
ask_id_generator(const LfPlan *plan, const char *method)
{
    PyObject *compiler = lf_compiler_off();
    PyObject *answer = PyObject_CallMethod(plan->id_generator, method, NULL);
    lf_compiler_on(compiler);
    return answer;
}

static int
draw_trace_id(const LfPlan *plan, Parent *root)
{
    if (plan->own_ids) {
        if (LF_UNLIKELY(ids.epoch != LF_LOAD_ACQUIRE(&seed_epoch)) && ids_seed() < 0) {
            return -1;
        }
        root->trace_high = ids_next();
        root->trace_low = ids_next();
        return 0;
    }
    PyObject *id = ask_id_generator(plan, "generate_trace_id");
    int failed = id == NULL || id_halves(id, &root->trace_high, &root->trace_low) < 0;
    Py_XDECREF(id);
    return failed ? -1 : 0;
}

static int
draw_span_id(const LfPlan *plan, uint64_t *span_id)
{
    uint64_t unused;
    if (plan->own_ids) {
        if (LF_UNLIKELY(ids.epoch != LF_LOAD_ACQUIRE(&seed_epoch)) && ids_seed() < 0) {
            return -1;
        }
        *span_id = ids_next();
        return 0;
    }
    PyObject *id = ask_id_generator(plan, "generate_span_id");
    int failed = id == NULL || id_halves(id, &unused, span_id) < 0;
    Py_XDECREF(id);
    return failed ? -1 : 0;
}

/* The flags of a root span, beside LF_SAMPLED; -1 with an exception. */
static int
new_flags(const LfPlan *plan)
{
    if (plan->own_ids || plan->inherited_flags == 0) {
        return plan->inherited_flags; /* our own ids are random */
    }
    PyObject *answer = ask_id_generator(plan, "is_trace_id_random");
    int random = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return random <= 0 ? random : LF_RANDOM_ID;
}

typedef struct {
    int recording;
    int sampled;
    PyObject *attributes;  /* owned, or NULL */
    PyObject *trace_state; /* owned, or NULL: the default */
} Decision;

/* Ask the sampler itself. */
static int
ask_sampler(const LfPlan *plan, const LfStart *start, const Parent *parent, Decision *decision)
{
    PyObject *trace_id = id_object(parent->trace_high, parent->trace_low);
    PyObject *links = start->links == NULL ? PyTuple_New(0) : Py_NewRef(start->links);
    PyObject *result = NULL, *made = NULL, *answer = NULL, *state = NULL;
    int failed = -1;
    if (trace_id == NULL || links == NULL) {
        goto done;
    }
    result = PyObject_CallMethod(plan->sampler, "should_sample", "OOOOOO",
                                 start->context == NULL ? Py_None : start->context, trace_id, start->name,
                                 start->kind == NULL ? lf_api.kinds[0] : start->kind,
                                 start->attributes == NULL ? Py_None : start->attributes, links);
    if (result == NULL || (made = PyObject_GetAttrString(result, "decision")) == NULL) {
        goto done;
    }
    int *const where[] = {&decision->recording, &decision->sampled};
    const char *const questions[] = {"is_recording", "is_sampled"};
    for (int i = 0; i < 2; i++) {
        answer = PyObject_CallMethod(made, questions[i], NULL);
        if (answer == NULL || (*where[i] = PyObject_IsTrue(answer)) < 0) {
            goto done;
        }
        Py_CLEAR(answer);
    }
    decision->attributes = PyObject_GetAttrString(result, "attributes");
    state = PyObject_GetAttrString(result, "trace_state");
    if (decision->attributes == NULL || state == NULL) {
        goto done;
    }
    if (state != Py_None && state != lf_api.default_trace_state) {
        decision->trace_state = Py_NewRef(state);
    }
    failed = 0;
done:
    Py_XDECREF(trace_id);
    Py_XDECREF(links);
    Py_XDECREF(result);
    Py_XDECREF(made);
    Py_XDECREF(answer);
    Py_XDECREF(state);
    return failed;
}

static int
decide(const LfPlan *plan, const LfStart *start, const Parent *parent, Decision *decision)
{
    memset(decision, 0, sizeof(*decision));
    int which = LF_ROOT;
    if (parent->there) {
        which = parent->remote ? LF_REMOTE_SAMPLED : LF_LOCAL_SAMPLED;
        which += (parent->flags & LF_SAMPLED) == 0;
    }
    const LfRule *rule = &plan->rules[which];
    if (rule->kind == LF_ASK) {
        PyObject *compiler = lf_compiler_off();
        int failed = ask_sampler(plan, start, parent, decision);
        lf_compiler_on(compiler);
        return failed;
    }
    decision->sampled = rule->kind == LF_ON || (rule->kind == LF_RATIO && parent->trace_low < rule->bound);
    decision->recording = decision->sampled;
    decision->attributes = Py_XNewRef(start->attributes);
    decision->trace_state = Py_XNewRef(parent->trace_state);
    return 0;
}

/* The attributes given at the start, as BoundedAttributes takes them: those the SDK's code makes of it if they are odd. */
static int
first_attributes(LfSpan *span, PyObject *attributes)
{
    if (attributes == NULL || attributes == Py_None) {
        return 0;
    }
    /* As in the SDK, what is no mapping is an error. */
    PyObject *mapping = PyDict_CheckExact(attributes) ? Py_NewRef(attributes) : PyDictProxy_New(attributes);
    int given = mapping == NULL ? -1 : PyObject_IsTrue(mapping);
    if (given > 0) {
        PyObject *result = span_set_attributes((PyObject *)span, &mapping, 1, NULL);
        given = result == NULL ? -1 : 0;
        Py_XDECREF(result);
    }
    Py_XDECREF(mapping);
    return given;
}

static int
call_on_start(const LfPlan *plan, PyObject *span, PyObject *context)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan->on_start); i++) {
        PyObject *processor = PyTuple_GET_ITEM(plan->on_start, i);
        if (processor == plan->scoped) {
            PyObject *scoped;
            if (PyContextVar_Get(plan->scoped_variable, NULL, &scoped) < 0) {
                return -1;
            }
            int nothing = scoped != NULL && PyDict_CheckExact(scoped) && PyDict_GET_SIZE(scoped) == 0;
            Py_XDECREF(scoped);
            if (nothing) {
                continue;
            }
        }
        PyObject *arguments[] = {processor, span, context == NULL ? Py_None : context};
        PyObject *compiler = lf_compiler_off();
        PyObject *result = PyObject_VectorcallMethod(str_on_start, arguments, 2, kwname_parent_context);
        lf_compiler_on(compiler);
        if (result == NULL) {
            return -1;
        }
        Py_DECREF(result);
    }
    return 0;
}

static PyObject *
non_recording(const Parent *parent, uint64_t id, int flags, PyObject *trace_state)
{
    LfSpan stand_in; /* only what make_span_context reads */
    stand_in.trace_high = parent->trace_high;
    stand_in.trace_low = parent->trace_low;
    stand_in.trace_state = trace_state;
    PyObject *context = make_span_context(&stand_in, id, (uint8_t)flags);
    if (context == NULL) {
        return NULL;
    }
    PyObject *span = lf_api.non_recording_span->tp_alloc(lf_api.non_recording_span, 0);
    if (span != NULL && PyObject_SetAttr(span, str_context, context) < 0) {
        Py_CLEAR(span);
    }
    Py_DECREF(context);
    return span;
}

PyObject *
lf_span_start(LfPlan *plan, const LfStart *start)
{
    Parent parent;
    Decision decision;
    LfSpan *span = NULL;
    PyObject *context = start->context, *current = NULL;
    if (context == NULL || context == Py_None) {
        context = start->current;
        if (context == NULL) {
            if (PyContextVar_Get(lf_api.context_variable, NULL, &current) < 0) {
                return NULL;
            }
            context = current;
        }
    }
    int failed = find_parent(&parent, context, plan->span_type);
    Py_XDECREF(current);
    if (failed < 0) {
        return NULL;
    }
    memset(&decision, 0, sizeof(decision));
    uint64_t id;
    if ((!parent.there && draw_trace_id(plan, &parent) < 0) || decide(plan, start, &parent, &decision) < 0 ||
        draw_span_id(plan, &id) < 0) {
        goto done;
    }
    int flags = (decision.sampled ? LF_SAMPLED : 0) |
                (parent.there ? parent.flags & plan->inherited_flags : new_flags(plan));
    if (flags < 0) {
        goto done;
    }
    if (!decision.recording) {
        span = (LfSpan *)non_recording(&parent, id, flags, decision.trace_state);
        goto done;
    }
    span = (LfSpan *)plan->span_type->tp_alloc(plan->span_type, 0);
    if (span == NULL) {
        goto done;
    }
    span->plan = (LfPlan *)Py_NewRef(plan);
    span->name = Py_NewRef(start->name);
    span->trace_high = parent.trace_high;
    span->trace_low = parent.trace_low;
    span->id = id;
    span->flags = (uint8_t)flags;
    span->has_parent = (uint8_t)parent.there;
    span->parent_id = parent.id;
    span->parent_flags = (uint8_t)parent.flags;
    span->parent_is_remote = (uint8_t)parent.remote;
    span->parent = Py_XNewRef(parent.context);
    span->trace_state = Py_XNewRef(decision.trace_state);
    if (parent.there && parent.context == NULL && parent.trace_state != decision.trace_state) {
        /* A sampler has changed it, so the parent's can't be told from the span's own. */
        LfSpan above;
        above.trace_high = parent.trace_high;
        above.trace_low = parent.trace_low;
        above.trace_state = parent.trace_state;
        span->parent = make_span_context(&above, parent.id, span->parent_flags);
        if (span->parent == NULL) {
            goto failed;
        }
    }
    span->record_exception = (uint8_t)start->record_exception;
    span->set_status_on_exception = (uint8_t)start->set_status_on_exception;
    if (start->kind != NULL && start->kind != lf_api.kinds[0]) {
        span->kind = Py_NewRef(start->kind);
    }
    if (first_attributes(span, decision.attributes) < 0) {
        goto failed;
    }
    if (start->links != NULL) {
        PyObject *compiler = lf_compiler_off();
        PyObject *result = PyObject_CallFunctionObjArgs(plan->set_links, (PyObject *)span, start->links, NULL);
        lf_compiler_on(compiler);
        Py_XDECREF(result);
        if (result == NULL) {
            goto failed;
        }
    }
    if (start->start_time == NULL || start->start_time == Py_None) {
        span->start = now();
        span->started = 1;
    }
    else if (set_time(span, P_START, start->start_time) < 0) {
        goto failed;
    }
    if (plan->open_spans != NULL) {
        open_spans_add((LfOpenSpans *)plan->open_spans, span);
    }
    if (PyTuple_GET_SIZE(plan->on_start) == 0 || call_on_start(plan, (PyObject *)span, start->context) == 0) {
        goto done;
    }
failed:
    Py_CLEAR(span);
done:
    Py_XDECREF(parent.trace_state);
    Py_XDECREF(parent.context);
    Py_XDECREF(decision.attributes);
    Py_XDECREF(decision.trace_state);
    return (PyObject *)span;
}

/* ---- tracers ---- */

LfPlan *
lf_tracer_plan(LfTracer *tracer)
{
    LfPlan *known = NULL;
    int is_known;
    uint64_t making = LF_LOAD_ACQUIRE(&epoch);
    LF_LOCK(&tracer->lock);
    is_known = tracer->epoch == making;
    if (LF_LIKELY(is_known)) {
        known = (LfPlan *)Py_XNewRef(tracer->plan);
    }
    LF_UNLOCK(&tracer->lock);
    if (LF_LIKELY(is_known)) {
        return known;
    }
    if (lf_api.context_variable == NULL) { /* the context is kept in another way */
        return NULL;
    }
    PyObject *compiler = lf_compiler_off();
    PyObject *plan = PyObject_CallMethodNoArgs((PyObject *)tracer, str_make_plan);
    lf_compiler_on(compiler);
    if (plan == NULL) {
        return NULL;
    }
    if (plan != Py_None && !Py_IS_TYPE(plan, lf_plan_type)) {
        Py_DECREF(plan);
        PyErr_SetString(PyExc_TypeError, "_make_plan() must return a Plan or None");
        return NULL;
    }
    if (plan == Py_None) {
        Py_CLEAR(plan);
    }
    else {
        ((LfPlan *)plan)->epoch = making; /* what has changed since it began to be made is not in it */
    }
    PyObject *old;
    Py_XINCREF(plan);
    LF_LOCK(&tracer->lock);
    old = (PyObject *)tracer->plan;
    tracer->plan = (LfPlan *)plan;
    tracer->epoch = making;
    LF_UNLOCK(&tracer->lock);
    Py_XDECREF(old);
    return (LfPlan *)plan;
}

static const char *const start_names[] = {
    "name", "context", "kind", "attributes", "links", "start_time", "record_exception", "set_status_on_exception",
};

enum { START_NAMES = sizeof(start_names) / sizeof(start_names[0]) };

/* start_span() of the SDK, for its own spans and for wrong arguments. */
static PyObject *
sdk_start_span(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *method = PyObject_GetAttrString(self, "_start_sdk_span");
    if (method == NULL) {
        return NULL;
    }
    PyObject *compiler = lf_compiler_off();
    PyObject *span = PyObject_Vectorcall(method, args, (size_t)nargs, kwnames);
    lf_compiler_on(compiler);
    Py_DECREF(method);
    return span;
}

static PyObject *
start_by_plan(PyObject *self, LfPlan *plan, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *given[START_NAMES] = {NULL};
    Py_ssize_t keywords = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    if (nargs > START_NAMES) {
        return sdk_start_span(self, args, nargs, kwnames);
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        given[i] = args[i];
    }
    for (Py_ssize_t i = 0; i < keywords; i++) {
        int which = 0;
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        while (which < START_NAMES && PyUnicode_CompareWithASCIIString(name, start_names[which]) != 0) {
            which++;
        }
        if (which == START_NAMES || given[which] != NULL) {
            return sdk_start_span(self, args, nargs, kwnames);
        }
        given[which] = args[nargs + i];
    }
    if (given[0] == NULL || (given[1] != NULL && given[1] != Py_None && !PyDict_Check(given[1]))) {
        return sdk_start_span(self, args, nargs, kwnames);
    }
    LfStart start = {.name = given[0], .context = given[1], .kind = given[2], .attributes = given[3],
                     .start_time = given[5], .record_exception = 1, .set_status_on_exception = 1};
    int linked = given[4] == NULL ? 0 : PyObject_IsTrue(given[4]);
    start.links = linked > 0 ? given[4] : NULL;
    if (given[6] != NULL) {
        start.record_exception = PyObject_IsTrue(given[6]);
    }
    if (given[7] != NULL) {
        start.set_status_on_exception = PyObject_IsTrue(given[7]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    return lf_span_start(plan, &start);
}

static PyObject *
tracer_start_span(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    LfPlan *plan = lf_tracer_plan((LfTracer *)self);
    if (plan == NULL) {
        return PyErr_Occurred() ? NULL : sdk_start_span(self, args, nargs, kwnames);
    }
    PyObject *span = start_by_plan(self, plan, args, nargs, kwnames);
    Py_DECREF(plan);
    return span;
}

static PyObject *
tracer_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    return type->tp_alloc(type, 0);
}

static int
tracer_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((LfTracer *)self)->plan);
    return 0;
}

static int
tracer_clear(PyObject *self)
{
    ((LfTracer *)self)->epoch = 0;
    Py_CLEAR(((LfTracer *)self)->plan);
    return 0;
}

static void
tracer_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    tracer_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef tracer_methods[] = {
    {"start_span", (PyCFunction)(void (*)(void))tracer_start_span, METH_FASTCALL | METH_KEYWORDS,
     "start_span($self, name, context=None, kind=SpanKind.INTERNAL, attributes=None, links=(), start_time=None,\n"
     "           record_exception=True, set_status_on_exception=True)\n--\n\n"
     "A new span, as by the SDK's tracer."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tracer_slots[] = {
    {Py_tp_doc, "The base of a tracer: start_span in C. The rest is inherited from the SDK's tracer."},
    {Py_tp_new, tracer_new},
    {Py_tp_traverse, tracer_traverse},
    {Py_tp_clear, tracer_clear},
    {Py_tp_dealloc, tracer_dealloc},
    {Py_tp_methods, tracer_methods},
    {0, NULL},
};

static PyType_Spec tracer_spec = {
    .name = "lensfast._gate.TracerBase",
    .basicsize = sizeof(LfTracer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .slots = tracer_slots,
};

static PyTypeObject *
make_type(PyType_Spec *spec)
{
    return (PyTypeObject *)PyType_FromSpec(spec);
}

int
lf_span_init(void)
{
    if (lf_span_type != NULL) {
        return 0;
    }
    PyGetSetDef *end = span_getset;
    while (end->name != NULL) {
        end++;
    }
    for (int i = 0; i < PRIVATES; i++) {
        privates[i] = PyUnicode_InternFromString(private_names[i]);
        if (privates[i] == NULL) {
            return -1;
        }
        end[i] = (PyGetSetDef){private_names[i], span_get, span_set, NULL, (void *)(intptr_t)i};
    }
    no_arguments = PyTuple_New(0);
    kwname_parent_context = Py_BuildValue("(s)", "parent_context");
    const struct {
        PyObject **where;
        const char *text;
    } words[] = {
        {&str_make_plan, "_make_plan"}, {&str_dict, "_dict"}, {&str_context, "_context"},
        {&str_on_start, "on_start"}, {&str_on_ending, "_on_ending"}, {&str_on_end, "on_end"},
    };
    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        *words[i].where = PyUnicode_InternFromString(words[i].text);
        if (no_arguments == NULL || kwname_parent_context == NULL || *words[i].where == NULL) {
            return -1;
        }
    }
    lf_plan_type = make_type(&plan_spec);
    lf_open_spans_type = make_type(&open_spans_spec);
    lf_tracer_type = make_type(&tracer_spec);
    lf_span_type = make_type(&span_spec);
    return lf_plan_type && lf_open_spans_type && lf_tracer_type && lf_span_type ? 0 : -1;
}
