/* Spans in C: what an enabled site makes, and what it is made by. */
#ifndef LENSFAST_SPAN_H
#define LENSFAST_SPAN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "atomics.h"

enum { LF_KINDS = 5, LF_SAMPLED = 1, LF_RANDOM_ID = 2, LF_KNOWN_FLAGS = 4 };

/* Objects of opentelemetry-api and -sdk and our own Python functions, handed over once by lf_span_set_up. */
typedef struct {
    PyObject *context_variable; /* the ContextVar of the current Context */
    PyTypeObject *context_type;
    PyObject *span_key; /* under which a Context holds the current span */
    PyObject *api_span;
    PyObject *invalid_span;
    PyTypeObject *non_recording_span;
    PyTypeObject *span_context;
    PyObject *default_trace_state;
    PyObject *trace_flags[LF_KNOWN_FLAGS];
    PyObject *kinds[LF_KINDS];
} LfApi;

extern LfApi lf_api;

/* One rule of a sampler. The sampler is called where a rule is not one of the known ones. */
enum { LF_ASK, LF_ON, LF_OFF, LF_RATIO };
typedef struct {
    int kind;
    uint64_t bound; /* of LF_RATIO: sampled if the low half of the trace id is below it */
} LfRule;

/* By what there is above the new span. */
enum { LF_ROOT, LF_REMOTE_SAMPLED, LF_REMOTE_NOT_SAMPLED, LF_LOCAL_SAMPLED, LF_LOCAL_NOT_SAMPLED, LF_RULES };

/* All that the spans of one tracer have in common. Never changed once it is in use: a tracer gets a new one. */
typedef struct {
    PyObject_HEAD
    PyTypeObject *span_type;
    LfRule rules[LF_RULES];
    PyObject *sampler;
    PyObject *id_generator;
    int own_ids;        /* ids are drawn here; otherwise by the id generator */
    int inherited_flags; /* those that a child has from its parent; 0 with an SDK that does not know the random flag */
    int calls_on_ending; /* whether the SDK does */
    int freezes;         /* whether the SDK makes the attributes of an ended span immutable */
    uint64_t epoch;      /* in which it was made */
    Py_ssize_t max_attributes; /* -1: no limit */
    Py_ssize_t max_length;     /* of a str value; -1: no limit */
    PyObject *on_start;        /* tuples of the processors whose method of that name has something to do */
    PyObject *on_ending;
    PyObject *on_end; /* a Sink among them encodes */
    PyObject *scoped; /* the one of on_start that has nothing to do while scoped_variable is empty; or NULL */
    PyObject *scoped_variable;
    PyObject *open_spans; /* an LfOpenSpans, or NULL */
    PyObject *resource;
    PyObject *scope;
    PyObject *info;
    PyObject *limits;
    PyObject *processor;
    PyObject *tracer;
    PyObject *unset_status;
    PyObject *bounded_attributes; /* called as (limits, dict, immutable) */
    PyObject *bounded_list;       /* called as (limits, name of the limit) */
    PyObject *set_links;          /* called as (span, links) */
    PyObject *sdk_methods[3];     /* those of the SDK's span, by LF_SDK_... */
    PyObject *resource_head; /* bytes: ResourceSpans without its scope_spans, in two parts */
    PyObject *resource_tail;
    PyObject *scope_head; /* bytes: ScopeSpans without its spans, in two parts */
    PyObject *scope_tail;
} LfPlan;

enum { LF_SDK_SET_ATTRIBUTE, LF_SDK_SET_ATTRIBUTES, LF_SDK_END };

typedef struct LfSpan {
    PyObject_HEAD
    LfPlan *plan;
    PyObject *name;
    PyObject *attributes; /* an exact dict of clean values, or NULL: none, or what is in bounded is no dict */
    PyObject *bounded;    /* the BoundedAttributes around it, once somebody has asked for it; or NULL */
    PyObject *events;     /* as attributes: NULL until there are any or somebody asks */
    PyObject *links;
    PyObject *status;
    PyObject *lock;
    PyObject *kind;        /* NULL: internal */
    PyObject *trace_state; /* NULL: the default */
    PyObject *context;     /* the SpanContext, once somebody has asked for it */
    PyObject *parent;      /* likewise */
    PyObject *replaced;    /* a dict of private attributes that somebody has set; or NULL */
    struct LfSpan *older;  /* in the list of open spans, which owns a reference */
    struct LfSpan *newer;
    uint64_t trace_high;
    uint64_t trace_low;
    uint64_t id;
    uint64_t parent_id;
    int64_t start; /* nanoseconds of the epoch */
    int64_t end;
    uint8_t flags;
    uint8_t parent_flags;
    uint8_t has_parent;
    uint8_t parent_is_remote;
    uint8_t started;
    uint8_t ended;
    uint8_t is_open; /* in the list of open spans, of that generation; or 0 */
    uint8_t record_exception;
    uint8_t set_status_on_exception;
    uint8_t sdk_sets_attributes; /* and not C: attributes are not under the plan's limits, or frozen */
} LfSpan;

/* The spans of a provider that have started and not ended. */
typedef struct {
    PyObject_HEAD
    LfMutex lock;
    LfSpan *oldest;
    LfSpan *newest;
    int closed;
    uint8_t forgotten; /* how often: what was in the list before is of another generation */
} LfOpenSpans;

/* The base of a tracer. */
typedef struct {
    PyObject_HEAD
    LfMutex lock; /* of the two */
    LfPlan *plan; /* NULL where the SDK's code is to start the spans */
    uint64_t epoch;
} LfTracer;

extern PyTypeObject *lf_plan_type;
extern PyTypeObject *lf_span_type;
extern PyTypeObject *lf_open_spans_type;
extern PyTypeObject *lf_tracer_type;

int lf_span_init(void);

/* Every tracer makes its plan anew before its next span. */
void lf_plans_outdate(void);

/* From now on, ids are drawn from a new seed. */
void lf_ids_reseed(void);

/* The plan of a tracer: a new reference; NULL without an error where there is none. */
LfPlan *lf_tracer_plan(LfTracer *tracer);

/* What start_span was asked for; NULL is not given. */
typedef struct {
    PyObject *name;
    PyObject *current;   /* the current Context, borrowed; read if it is not given */
    PyObject *context;   /* the argument */
    PyObject *kind;
    PyObject *attributes;
    PyObject *links;
    PyObject *start_time;
    int record_exception;
    int set_status_on_exception;
} LfStart;

/* A new span by that plan, recording or not. */
PyObject *lf_span_start(LfPlan *plan, const LfStart *start);

/* Find the dict of span->bounded, which is not NULL. The caller holds the span's lock. */
void lf_span_follow_bounded(LfSpan *span);

/* span.set_attribute(key, value) */
int lf_span_set_attribute(LfSpan *span, PyObject *key, PyObject *value);

/* span.end(end_time); end_time may be NULL */
int lf_span_end(LfSpan *span, PyObject *end_time);

static inline int
lf_is_span(PyObject *object)
{
    return PyObject_TypeCheck(object, lf_span_type);
}

/* torch's set_eval_frame, once torch.compile is there; or NULL. */
extern PyObject *lf_set_eval_frame;

/* Between these two, where C calls Python code that nobody has meant to be compiled, torch.compile keeps out of it: it
   would look at each function by itself, and raise its own errors there. Exceptions stay as they are. */
PyObject *lf_compiler_off(void);
void lf_compiler_on(PyObject *previous);

/* A new Context like `outer`, in which `span` is the current one. */
PyObject *lf_context_with(PyObject *outer, PyObject *span);

#endif
