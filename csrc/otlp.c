#include "otlp.h"

#include <stddef.h>
#include <string.h>

/* Tags of opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto: field number * 8 + wire type. */
enum {
    REQUEST_RESOURCE_SPANS = 0x0a,
    RESOURCE_SPANS_SCOPE_SPANS = 0x12,
    SCOPE_SPANS_SPAN = 0x12,
    SPAN_TRACE_ID = 0x0a,
    SPAN_ID = 0x12,
    SPAN_TRACE_STATE = 0x1a,
    SPAN_PARENT_ID = 0x22,
    SPAN_NAME = 0x2a,
    SPAN_KIND = 0x30,
    SPAN_START = 0x39,
    SPAN_END = 0x41,
    SPAN_ATTRIBUTE = 0x4a,
    SPAN_DROPPED_ATTRIBUTES = 0x50,
    SPAN_STATUS = 0x7a,
    SPAN_FLAGS = 0x85, /* and 0x01 */
    STATUS_MESSAGE = 0x12,
    STATUS_CODE = 0x18,
    KEY_VALUE_KEY = 0x0a,
    KEY_VALUE_VALUE = 0x12,
    VALUE_STRING = 0x0a,
    VALUE_BOOL = 0x10,
    VALUE_INT = 0x18,
    VALUE_DOUBLE = 0x21,
    VALUE_ARRAY = 0x2a,
    ARRAY_VALUE = 0x0a,
    FLAGS_HAS_IS_REMOTE = 0x100,
    FLAGS_IS_REMOTE = 0x200,
};

enum { DEEPEST = 4, FIRST_SIZE = 512, FIRST_RUNS = 4, RUN_SIZE = 2048, ODD_SIZE = 4096, MOST_SPARE = 1 << 20 };

PyTypeObject *lf_sink_type = NULL;

/* ---- a growing buffer ---- */

typedef struct {
    char *data;
    size_t length;
    size_t capacity;
} Buffer;

/* 1: encoded; 0: this is for the stock encoder; -1: no memory, without an exception */
enum { NO_MEMORY = -1, ODD = 0, ENCODED = 1 };

static int
reserve(Buffer *buffer, size_t more)
{
    if (LF_LIKELY(buffer->capacity - buffer->length >= more)) {
        return 1;
    }
    size_t capacity = buffer->capacity == 0 ? FIRST_SIZE : buffer->capacity;
    while (capacity - buffer->length < more) {
        capacity *= 2;
    }
    char *data = PyMem_RawRealloc(buffer->data, capacity);
    if (data == NULL) {
        return 0;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return 1;
}

/* The put_...() write into what was reserved. */

static void
put_byte(Buffer *buffer, int byte)
{
    buffer->data[buffer->length++] = (char)byte;
}

static void
put_varint(Buffer *buffer, uint64_t value)
{
    while (value >= 0x80) {
        put_byte(buffer, (int)(value | 0x80) & 0xff);
        value >>= 7;
    }
    put_byte(buffer, (int)value);
}

static void
put_bytes(Buffer *buffer, const char *data, size_t length)
{
    memcpy(buffer->data + buffer->length, data, length);
    buffer->length += length;
}

static void
put_big_endian(Buffer *buffer, uint64_t value)
{
    unsigned char bytes[8] = {
        (unsigned char)(value >> 56), (unsigned char)(value >> 48), (unsigned char)(value >> 40),
        (unsigned char)(value >> 32), (unsigned char)(value >> 24), (unsigned char)(value >> 16),
        (unsigned char)(value >> 8),  (unsigned char)value,
    }; /* compilers make one instruction of it */
    put_bytes(buffer, (const char *)bytes, sizeof(bytes));
}

static void
put_fixed64(Buffer *buffer, uint64_t value)
{
    unsigned char bytes[8] = {
        (unsigned char)value,         (unsigned char)(value >> 8),  (unsigned char)(value >> 16),
        (unsigned char)(value >> 24), (unsigned char)(value >> 32), (unsigned char)(value >> 40),
        (unsigned char)(value >> 48), (unsigned char)(value >> 56),
    };
    put_bytes(buffer, (const char *)bytes, sizeof(bytes));
}

static size_t
varint_size(uint64_t value)
{
    size_t size = 1;
    while (value >= 0x80) {
        value >>= 7;
        size++;
    }
    return size;
}

/* A message whose length is known at its end: `guess` bytes are kept for it. */
static size_t
begin(Buffer *buffer, size_t guess)
{
    buffer->length += guess;
    return buffer->length;
}

static int
finish(Buffer *buffer, size_t start, size_t guess)
{
    size_t length = buffer->length - start, size = varint_size(length);
    if (LF_UNLIKELY(size != guess)) {
        if (!reserve(buffer, size)) {
            return NO_MEMORY;
        }
        memmove(buffer->data + start - guess + size, buffer->data + start, length);
    }
    buffer->length = start - guess;
    put_varint(buffer, length);
    buffer->length += length;
    return ENCODED;
}

/* ---- encoding ---- */

static int
encode_text(Buffer *buffer, int tag, PyObject *text)
{
    const char *data;
    Py_ssize_t length;
    if (LF_LIKELY(PyUnicode_IS_COMPACT_ASCII(text))) {
        data = (const char *)PyUnicode_1BYTE_DATA(text);
        length = PyUnicode_GET_LENGTH(text);
    }
    else {
        data = PyUnicode_AsUTF8AndSize(text, &length);
        if (data == NULL) { /* a lone surrogate */
            PyErr_Clear();
            return ODD;
        }
    }
    if (!reserve(buffer, (size_t)length + 11)) {
        return NO_MEMORY;
    }
    put_byte(buffer, tag);
    put_varint(buffer, (uint64_t)length);
    put_bytes(buffer, data, (size_t)length);
    return ENCODED;
}

static int
encode_value(Buffer *buffer, PyObject *value, int depth)
{
    if (PyUnicode_CheckExact(value)) {
        return encode_text(buffer, VALUE_STRING, value);
    }
    if (!reserve(buffer, 24)) {
        return NO_MEMORY;
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow != 0) {
            return ODD;
        }
        put_byte(buffer, VALUE_INT);
        put_varint(buffer, (uint64_t)number);
        return ENCODED;
    }
    if (PyBool_Check(value)) {
        put_byte(buffer, VALUE_BOOL);
        put_byte(buffer, value == Py_True);
        return ENCODED;
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AS_DOUBLE(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof(bits));
        put_byte(buffer, VALUE_DOUBLE);
        put_fixed64(buffer, bits);
        return ENCODED;
    }
    if (!PyTuple_CheckExact(value) || depth == DEEPEST) {
        return ODD;
    }
    put_byte(buffer, VALUE_ARRAY);
    size_t array = begin(buffer, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++) {
        if (!reserve(buffer, 2)) {
            return NO_MEMORY;
        }
        put_byte(buffer, ARRAY_VALUE);
        size_t item = begin(buffer, 1);
        int done = encode_value(buffer, PyTuple_GET_ITEM(value, i), depth + 1);
        if (done == ENCODED) {
            done = finish(buffer, item, 1);
        }
        if (done != ENCODED) {
            return done;
        }
    }
    return finish(buffer, array, 1);
}

/* The commonest: a short ASCII key, and a value whose size is known before it is written. */
static int
encode_simple_attribute(Buffer *buffer, PyObject *key, PyObject *value)
{
    if (!PyUnicode_CheckExact(key) || !PyUnicode_IS_COMPACT_ASCII(key)) {
        return ODD;
    }
    size_t key_length = (size_t)PyUnicode_GET_LENGTH(key), size;
    uint64_t number = 0;
    if (PyUnicode_CheckExact(value)) {
        if (!PyUnicode_IS_COMPACT_ASCII(value)) {
            return ODD;
        }
        size = (size_t)PyUnicode_GET_LENGTH(value) + 2;
    }
    else if (PyLong_CheckExact(value)) {
        int overflow;
        number = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow != 0) {
            return ODD;
        }
        size = 1 + varint_size(number);
    }
    else if (PyFloat_CheckExact(value)) {
        size = 9;
    }
    else if (PyBool_Check(value)) {
        size = 2;
    }
    else {
        return ODD;
    }
    if (key_length + size + 4 >= 0x80) { /* so that each length is one byte */
        return ODD;
    }
    if (!reserve(buffer, key_length + size + 6)) {
        return NO_MEMORY;
    }
    put_byte(buffer, SPAN_ATTRIBUTE);
    put_byte(buffer, (int)(key_length + size + 4));
    put_byte(buffer, KEY_VALUE_KEY);
    put_byte(buffer, (int)key_length);
    put_bytes(buffer, (const char *)PyUnicode_1BYTE_DATA(key), key_length);
    put_byte(buffer, KEY_VALUE_VALUE);
    put_byte(buffer, (int)size);
    if (PyUnicode_CheckExact(value)) {
        put_byte(buffer, VALUE_STRING);
        put_byte(buffer, (int)(size - 2));
        put_bytes(buffer, (const char *)PyUnicode_1BYTE_DATA(value), size - 2);
    }
    else if (PyLong_CheckExact(value)) {
        put_byte(buffer, VALUE_INT);
        put_varint(buffer, number);
    }
    else if (PyBool_Check(value)) {
        put_byte(buffer, VALUE_BOOL);
        put_byte(buffer, value == Py_True);
    }
    else {
        double real = PyFloat_AS_DOUBLE(value);
        memcpy(&number, &real, sizeof(number));
        put_byte(buffer, VALUE_DOUBLE);
        put_fixed64(buffer, number);
    }
    return ENCODED;
}

static int
encode_attribute(Buffer *buffer, PyObject *key, PyObject *value)
{
    int done = encode_simple_attribute(buffer, key, value);
    if (LF_LIKELY(done != ODD) || !PyUnicode_CheckExact(key)) {
        return done;
    }
    if (!reserve(buffer, 2)) {
        return NO_MEMORY;
    }
    put_byte(buffer, SPAN_ATTRIBUTE);
    size_t attribute = begin(buffer, 1);
    done = encode_text(buffer, KEY_VALUE_KEY, key);
    if (done != ENCODED) {
        return done;
    }
    if (!reserve(buffer, 2)) {
        return NO_MEMORY;
    }
    put_byte(buffer, KEY_VALUE_VALUE);
    size_t start = begin(buffer, 1);
    done = encode_value(buffer, value, 0);
    if (done == ENCODED) {
        done = finish(buffer, start, 1);
    }
    return done == ENCODED ? finish(buffer, attribute, 1) : done;
}

/* By name, of an object of the SDK's; an error means that it is odd. */
static PyObject *
attribute_of(PyObject *object, const char *name)
{
    PyObject *value = object == NULL ? NULL : PyObject_GetAttrString(object, name);
    if (value == NULL) {
        PyErr_Clear();
    }
    return value;
}

/* What has to be asked of Python objects, before the first byte is written: meanwhile another thread may run. */
typedef struct {
    int kind;
    uint64_t dropped;   /* attributes */
    int status;         /* its code */
    PyObject *message;  /* of the status: an exact str, owned; or NULL */
    PyObject *state;    /* the trace state as text, likewise */
    PyObject *name;       /* of the span, owned: it may be given another while this thread waits */
    PyObject *attributes; /* likewise; or NULL */
} Facts;

static void
forget(Facts *facts)
{
    Py_CLEAR(facts->message);
    Py_CLEAR(facts->state);
    Py_CLEAR(facts->name);
    Py_CLEAR(facts->attributes);
}

/* All spans of a trace have one state, which never changes: its text is kept. */
static int
ask_trace_state(Facts *facts, PyObject *state)
{
    static PyObject *last_state = NULL, *last_text = NULL;
    static LfMutex lock;
    if (!Py_IS_TYPE(state, Py_TYPE(lf_api.default_trace_state))) {
        return ODD;
    }
    LF_LOCK(&lock);
    facts->state = state == last_state ? Py_NewRef(last_text) : NULL;
    LF_UNLOCK(&lock);
    if (LF_UNLIKELY(facts->state == NULL)) {
        PyObject *text = PyObject_CallMethod(state, "to_header", NULL);
        if (text == NULL || !PyUnicode_CheckExact(text)) {
            Py_XDECREF(text);
            PyErr_Clear();
            return ODD;
        }
        facts->state = Py_NewRef(text);
        Py_INCREF(state);
        LF_LOCK(&lock);
        PyObject *const old[] = {last_state, last_text};
        last_state = state;
        last_text = text;
        LF_UNLOCK(&lock);
        Py_XDECREF(old[0]);
        Py_XDECREF(old[1]);
    }
    return ENCODED;
}

static int
ask_status(Facts *facts, PyObject *status)
{
    Py_INCREF(status); /* as above */
    PyObject *code = attribute_of(status, "status_code");
    PyObject *number = attribute_of(code, "value");
    PyObject *message = attribute_of(status, "description");
    long value = number != NULL && PyLong_CheckExact(number) ? PyLong_AsLong(number) : -1;
    int done = ODD;
    if (value >= 0 && value < 0x80 && message != NULL && (message == Py_None || PyUnicode_CheckExact(message))) {
        done = ENCODED;
        facts->status = (int)value;
        facts->message = message == Py_None || PyUnicode_GET_LENGTH(message) == 0 ? NULL : Py_NewRef(message);
    }
    PyErr_Clear();
    Py_XDECREF(code);
    Py_XDECREF(number);
    Py_XDECREF(message);
    Py_DECREF(status);
    return done;
}

static int
is_empty(PyObject *list)
{
    if (list == NULL) {
        return 1;
    }
    Py_INCREF(list); /* the span may be given another meanwhile */
    Py_ssize_t size = PyObject_Size(list);
    /* Of none there are, some may have been dropped: the limit may be 0. */
    PyObject *dropped = size == 0 ? attribute_of(list, "dropped") : NULL;
    int is = dropped != NULL && PyObject_IsTrue(dropped) == 0;
    Py_XDECREF(dropped);
    Py_DECREF(list);
    PyErr_Clear();
    return is;
}

/* ENCODED if C can encode the span. What the facts have is the caller's to forget. The caller holds the span's lock. */
static int
ask(Facts *facts, LfSpan *span)
{
    memset(facts, 0, sizeof(*facts));
    while (span->kind != NULL && facts->kind < LF_KINDS && span->kind != lf_api.kinds[facts->kind]) {
        facts->kind++;
    }
    if (span->replaced != NULL || facts->kind == LF_KINDS || !PyUnicode_CheckExact(span->name) || !is_empty(span->events) || !is_empty(span->links)) {
        return ODD;
    }
    if (span->bounded != NULL) {
        PyObject *bounded = Py_NewRef(span->bounded);
        PyObject *count = attribute_of(bounded, "dropped");
        Py_DECREF(bounded);
        long number = count != NULL && PyLong_CheckExact(count) ? PyLong_AsLong(count) : -1;
        Py_XDECREF(count);
        PyErr_Clear();
        lf_span_follow_bounded(span);
        if (span->attributes == NULL || number < 0 || number > UINT32_MAX) {
            return ODD;
        }
        facts->dropped = (uint64_t)number;
    }
    if (span->trace_state != NULL && ask_trace_state(facts, span->trace_state) == ODD) {
        return ODD;
    }
    int done = span->status == NULL ? ENCODED : ask_status(facts, span->status);
    facts->name = Py_NewRef(span->name);
    facts->attributes = Py_XNewRef(span->attributes);
    return done;
}

static int
encode_status(Buffer *buffer, const Facts *facts)
{
    if (!reserve(buffer, 2)) {
        return NO_MEMORY;
    }
    put_byte(buffer, SPAN_STATUS);
    size_t start = begin(buffer, 1);
    if (facts->message != NULL) {
        int done = encode_text(buffer, STATUS_MESSAGE, facts->message);
        if (done != ENCODED) {
            return done;
        }
    }
    if (facts->status != 0) {
        if (!reserve(buffer, 2)) {
            return NO_MEMORY;
        }
        put_byte(buffer, STATUS_CODE);
        put_byte(buffer, facts->status);
    }
    return finish(buffer, start, 1);
}

/* Nobody else changes the dict meanwhile, unless a thread without the GIL waits for another that reads the same text. */
static int
encode_attributes(Buffer *buffer, PyObject *attributes)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    int done = ENCODED;
    Py_BEGIN_CRITICAL_SECTION(attributes);
    while (done == ENCODED && PyDict_Next(attributes, &position, &key, &value)) {
#if defined(Py_GIL_DISABLED)
        Py_INCREF(key);
        Py_INCREF(value);
#endif
        done = encode_attribute(buffer, key, value);
#if defined(Py_GIL_DISABLED)
        Py_DECREF(key);
        Py_DECREF(value);
#endif
    }
    Py_END_CRITICAL_SECTION();
    return done;
}

/* Runs no Python code, and so without an interruption. The caller holds the span's lock. */
static int
encode_span(Buffer *buffer, const LfSpan *span, const Facts *facts)
{
    if (!PyUnicode_CheckExact(facts->name)) { /* it has been replaced since it was asked for */
        return ODD;
    }
    if (!reserve(buffer, 96)) {
        return NO_MEMORY;
    }
    put_byte(buffer, SCOPE_SPANS_SPAN);
    size_t start = begin(buffer, 2);
    put_byte(buffer, SPAN_TRACE_ID);
    put_byte(buffer, 16);
    put_big_endian(buffer, span->trace_high);
    put_big_endian(buffer, span->trace_low);
    put_byte(buffer, SPAN_ID);
    put_byte(buffer, 8);
    put_big_endian(buffer, span->id);
    if (facts->state != NULL && PyUnicode_GET_LENGTH(facts->state) > 0) {
        int done = encode_text(buffer, SPAN_TRACE_STATE, facts->state);
        if (done != ENCODED) {
            return done;
        }
        if (!reserve(buffer, 16)) {
            return NO_MEMORY;
        }
    }
    if (span->has_parent) {
        put_byte(buffer, SPAN_PARENT_ID);
        put_byte(buffer, 8);
        put_big_endian(buffer, span->parent_id);
    }
    if (PyUnicode_GET_LENGTH(facts->name) > 0) {
        int done = encode_text(buffer, SPAN_NAME, facts->name);
        if (done != ENCODED) {
            return done;
        }
    }
    if (!reserve(buffer, 32)) {
        return NO_MEMORY;
    }
    put_byte(buffer, SPAN_KIND);
    put_byte(buffer, facts->kind + 1);
    if (span->start != 0) {
        put_byte(buffer, SPAN_START);
        put_fixed64(buffer, (uint64_t)span->start);
    }
    if (span->end != 0) {
        put_byte(buffer, SPAN_END);
        put_fixed64(buffer, (uint64_t)span->end);
    }
    if (facts->attributes != NULL) {
        int done = encode_attributes(buffer, facts->attributes);
        if (done != ENCODED) {
            return done;
        }
    }
    if (facts->dropped != 0) {
        if (!reserve(buffer, 12)) {
            return NO_MEMORY;
        }
        put_byte(buffer, SPAN_DROPPED_ATTRIBUTES);
        put_varint(buffer, facts->dropped);
    }
    int done = encode_status(buffer, facts);
    if (done != ENCODED) {
        return done;
    }
    if (!reserve(buffer, 8)) {
        return NO_MEMORY;
    }
    uint32_t flags = FLAGS_HAS_IS_REMOTE | (span->parent_is_remote ? FLAGS_IS_REMOTE : 0);
    put_byte(buffer, SPAN_FLAGS);
    put_byte(buffer, 0x01);
    for (int shift = 0; shift < 32; shift += 8) {
        put_byte(buffer, (int)(flags >> shift) & 0xff);
    }
    return finish(buffer, start, 2);
}

/* ---- the queue ---- */

/* The spans of one tracer in a batch. */
typedef struct {
    LfPlan *plan;
    Buffer buffer;
} Run;

/* What becomes one request. */
typedef struct Batch {
    struct Batch *next;
    Py_ssize_t spans;
    size_t size;   /* bytes; the odd ones are guessed */
    PyObject *odd; /* a list: the spans for the stock encoder */
    int runs;
    int room; /* for that many runs */
    Run *run;
} Batch;

typedef struct {
    PyObject_HEAD
    LfMutex lock;
    PyObject *wake; /* called with a word when there is something to do */
    Py_ssize_t max_spans;
    size_t max_bytes;
    Py_ssize_t batch_spans;
    size_t batch_bytes;
    Batch *oldest; /* the batches that are full; then the one that is being filled */
    Batch *newest;
    Py_ssize_t waiting;  /* spans */
    size_t waiting_size; /* bytes */
    unsigned long long accepted;
    unsigned long long dropped;
    int announced; /* that there is something, since there was nothing */
    int full;     /* a full batch has been announced, and none been taken since */
    int told;     /* that spans are dropped */
    Buffer spare; /* of a batch that is gone, for the next one */
    int closed;
} Sink;

static void
batch_free(Sink *sink, Batch *batch)
{
    for (int i = 0; i < batch->runs; i++) {
        Buffer *buffer = &batch->run[i].buffer;
        LF_LOCK(&sink->lock);
        if (buffer->capacity > sink->spare.capacity && buffer->capacity <= MOST_SPARE) {
            Buffer old = sink->spare;
            sink->spare = *buffer;
            *buffer = old;
        }
        LF_UNLOCK(&sink->lock);
        PyMem_RawFree(buffer->data);
        Py_DECREF(batch->run[i].plan);
    }
    Py_DECREF(batch->odd);
    PyMem_RawFree(batch->run);
    PyMem_RawFree(batch);
}

/* A new batch at the end of the queue; NULL, without an exception, if there is no memory. */
static Batch *
new_batch(Sink *sink)
{
    PyObject *odd = PyList_New(0); /* first: it may collect garbage, whose finalisers end spans */
    Batch *batch = odd == NULL ? NULL : PyMem_RawCalloc(1, sizeof(Batch));
    if (batch == NULL) {
        Py_XDECREF(odd);
        PyErr_Clear();
        return NULL;
    }
    batch->odd = odd;
    if (sink->newest != NULL) {
        sink->newest->next = batch;
    }
    else {
        sink->oldest = batch;
    }
    sink->newest = batch;
    return batch;
}

static int
wake(Sink *sink, const char *word)
{
    PyObject *compiler = lf_compiler_off();
    PyObject *result = PyObject_CallFunction(sink->wake, "s", word);
    lf_compiler_on(compiler);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* The run for the spans of that plan; NULL if there is no memory. */
static Run *
run_of(Batch *batch, LfPlan *plan, Buffer *spare)
{
    for (int i = 0; i < batch->runs; i++) {
        if (batch->run[i].plan == plan) {
            return &batch->run[i];
        }
    }
    if (batch->runs == batch->room) {
        int room = batch->room == 0 ? FIRST_RUNS : 2 * batch->room;
        Run *more = PyMem_RawRealloc(batch->run, (size_t)room * sizeof(Run));
        if (more == NULL) {
            return NULL;
        }
        memset(more + batch->room, 0, (size_t)(room - batch->room) * sizeof(Run));
        batch->run = more;
        batch->room = room;
    }
    Run *run = &batch->run[batch->runs++];
    run->plan = (LfPlan *)Py_NewRef(plan);
    if (spare != NULL) {
        run->buffer = *spare;
        run->buffer.length = 0;
        memset(spare, 0, sizeof(*spare));
    }
    return run;
}

/* What `wake` is to be called with, once the lock is given back. */
enum { SAY_FIRST = 1, SAY_FULL = 2, SAY_DROPPED = 4 };

static int
drop(Sink *sink)
{
    sink->dropped++;
    if (sink->told || sink->closed) {
        return 0;
    }
    sink->told = 1;
    return SAY_DROPPED;
}

static int
count_added(Sink *sink, Batch *batch, size_t size)
{
    int say = 0;
    batch->spans++;
    batch->size += size;
    sink->accepted++;
    sink->waiting++;
    sink->waiting_size += size;
    if (LF_UNLIKELY(!sink->announced)) {
        sink->announced = 1;
        say = SAY_FIRST;
    }
    if (LF_UNLIKELY(!sink->full && (sink->waiting >= sink->batch_spans || sink->waiting_size >= sink->batch_bytes))) {
        sink->full = 1;
        say |= SAY_FULL;
    }
    return say;
}

static int
say_words(Sink *sink, int words)
{
    if (words & SAY_FIRST && wake(sink, "first") < 0) {
        LF_LOCK(&sink->lock);
        sink->announced = 0; /* interrupted: the next span does it */
        if (words & SAY_FULL) {
            sink->full = 0;
        }
        LF_UNLOCK(&sink->lock);
        return -1;
    }
    if (words & SAY_FULL && wake(sink, "full") < 0) {
        return -1;
    }
    return words & SAY_DROPPED ? wake(sink, "dropped") : 0;
}

/* What C does not encode waits as it is. */
static int
add_odd(Sink *sink, Batch *batch, PyObject *span)
{
    if (PyList_Append(batch->odd, span) < 0) {
        PyErr_Clear();
        return drop(sink);
    }
    return count_added(sink, batch, ODD_SIZE);
}

static int
is_full(const Sink *sink, const Batch *batch)
{
    return batch->spans >= sink->batch_spans || batch->size >= sink->batch_bytes;
}

/* Put a span into the queue, as ENCODED or ODD; returns what to say. The caller holds the locks of both. */
static int
put_span(Sink *sink, PyObject *object, int done, const Facts *facts)
{
    LfSpan *span = (LfSpan *)object; /* if it is to be ENCODED */
    if (LF_UNLIKELY(sink->closed || sink->waiting >= sink->max_spans || sink->waiting_size >= sink->max_bytes)) {
        return drop(sink);
    }
    Batch *batch = sink->newest;
    if (batch == NULL || is_full(sink, batch)) {
        batch = new_batch(sink);
        if (batch == NULL) {
            return drop(sink);
        }
    }
    if (LF_UNLIKELY(done == ODD)) {
        return add_odd(sink, batch, object);
    }
    int runs = batch->runs;
    Run *run = run_of(batch, span->plan, &sink->spare);
    if (batch->runs != runs && runs != 0) { /* many tracers are not to make the queue larger than it looks */
        batch->size += RUN_SIZE;
        sink->waiting_size += RUN_SIZE;
    }
    if (run == NULL) {
        return drop(sink);
    }
    size_t before = run->buffer.length;
    done = encode_span(&run->buffer, span, facts);
    if (LF_LIKELY(done == ENCODED)) {
        return count_added(sink, batch, run->buffer.length - before);
    }
    run->buffer.length = before;
    return done == ODD ? add_odd(sink, batch, object) : drop(sink);
}

int
lf_sink_add(PyObject *self, PyObject *object)
{
    Sink *sink = (Sink *)self;
    LfSpan *span = lf_is_span(object) ? (LfSpan *)object : NULL;
    Facts facts = {0, 0, 0, NULL, NULL, NULL, NULL};
    if (span != NULL && !(span->flags & LF_SAMPLED)) {
        return 0;
    }
    int words;
    Py_BEGIN_CRITICAL_SECTION(object);
    int done = ODD;
    if (span != NULL) {
        int asks_python = span->status || span->bounded || span->events || span->links || span->trace_state;
        PyObject *compiler = LF_UNLIKELY(asks_python) ? lf_compiler_off() : NULL;
        done = ask(&facts, span);
        lf_compiler_on(compiler);
        if (PyBytes_GET_SIZE(span->plan->resource_head) == 0) {
            done = ODD; /* its tracer does not know of this sink: somebody has put a processor around it */
        }
    }
    LF_LOCK(&sink->lock);
    words = put_span(sink, object, done, &facts);
    LF_UNLOCK(&sink->lock);
    Py_END_CRITICAL_SECTION();
    forget(&facts);
    return LF_LIKELY(words == 0) ? 0 : say_words(sink, words);
}

/* Write what the batch has of one resource; with a NULL buffer only its length is found. */
static size_t
write_resource(const Batch *batch, int first, Buffer *buffer, size_t length)
{
    const LfPlan *of = batch->run[first].plan;
    if (buffer != NULL) {
        put_byte(buffer, REQUEST_RESOURCE_SPANS);
        put_varint(buffer, length);
        put_bytes(buffer, PyBytes_AS_STRING(of->resource_head), (size_t)PyBytes_GET_SIZE(of->resource_head));
    }
    length = (size_t)(PyBytes_GET_SIZE(of->resource_head) + PyBytes_GET_SIZE(of->resource_tail));
    for (int i = first; i < batch->runs; i++) {
        const LfPlan *plan = batch->run[i].plan;
        const Buffer *spans = &batch->run[i].buffer;
        if (plan->resource != of->resource || spans->length == 0) {
            continue;
        }
        size_t head = (size_t)PyBytes_GET_SIZE(plan->scope_head), tail = (size_t)PyBytes_GET_SIZE(plan->scope_tail);
        size_t whole = head + spans->length + tail;
        length += 1 + varint_size(whole) + whole;
        if (buffer != NULL) {
            put_byte(buffer, RESOURCE_SPANS_SCOPE_SPANS);
            put_varint(buffer, whole);
            put_bytes(buffer, PyBytes_AS_STRING(plan->scope_head), head);
            put_bytes(buffer, spans->data, spans->length);
            put_bytes(buffer, PyBytes_AS_STRING(plan->scope_tail), tail);
        }
    }
    if (buffer != NULL) {
        put_bytes(buffer, PyBytes_AS_STRING(of->resource_tail), (size_t)PyBytes_GET_SIZE(of->resource_tail));
    }
    return length;
}

/* Whether the resource of that run is written by an earlier one. */
static int
is_written(const Batch *batch, int i)
{
    if (batch->run[i].buffer.length == 0) {
        return 1;
    }
    for (int earlier = 0; earlier < i; earlier++) {
        if (batch->run[earlier].buffer.length != 0 && batch->run[earlier].plan->resource == batch->run[i].plan->resource) {
            return 1;
        }
    }
    return 0;
}

/* The batch as an ExportTraceServiceRequest, without what is odd in it. */
static PyObject *
batch_request(const Batch *batch)
{
    size_t whole = 0;
    for (int i = 0; i < batch->runs; i++) {
        if (!is_written(batch, i)) {
            size_t length = write_resource(batch, i, NULL, 0);
            whole += 1 + varint_size(length) + length;
        }
    }
    PyObject *request = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)whole);
    if (request == NULL) {
        return NULL;
    }
    Buffer buffer = {PyBytes_AS_STRING(request), 0, whole};
    for (int i = 0; i < batch->runs; i++) {
        if (!is_written(batch, i)) {
            write_resource(batch, i, &buffer, write_resource(batch, i, NULL, 0));
        }
    }
    return request;
}

/* take(everything): the oldest batch as (request, list of odd spans, number of spans), or None. */
static PyObject *
sink_take(PyObject *self, PyObject *everything)
{
    Sink *sink = (Sink *)self;
    int all = PyObject_IsTrue(everything);
    if (all < 0) {
        return NULL;
    }
    LF_LOCK(&sink->lock);
    Batch *batch = sink->oldest;
    sink->full = 0;
    if (batch == NULL || (!all && batch == sink->newest && !is_full(sink, batch))) {
        LF_UNLOCK(&sink->lock);
        Py_RETURN_NONE;
    }
    sink->oldest = batch->next;
    if (sink->oldest == NULL) {
        sink->newest = NULL;
    }
    sink->waiting -= batch->spans;
    sink->waiting_size -= batch->size;
    if (sink->waiting == 0) {
        sink->announced = 0;
    }
    LF_UNLOCK(&sink->lock);
    PyObject *request = batch_request(batch);
    PyObject *result = request == NULL ? NULL : Py_BuildValue("(OOn)", request, batch->odd, batch->spans);
    Py_XDECREF(request);
    if (result == NULL) {
        LF_LOCK(&sink->lock);
        sink->accepted -= (unsigned long long)batch->spans;
        sink->dropped += (unsigned long long)batch->spans;
        LF_UNLOCK(&sink->lock);
    }
    batch_free(sink, batch);
    return result;
}

/* Take all that waits out. */
static Batch *
take_all(Sink *sink)
{
    Batch *batch = sink->oldest;
    sink->oldest = sink->newest = NULL;
    sink->waiting = 0;
    sink->waiting_size = 0;
    sink->full = sink->announced = 0;
    return batch;
}

static void
free_all(Sink *sink, Batch *batch)
{
    while (batch != NULL) {
        Batch *next = batch->next;
        batch_free(sink, batch);
        batch = next;
    }
    LF_LOCK(&sink->lock);
    PyMem_RawFree(sink->spare.data);
    memset(&sink->spare, 0, sizeof(sink->spare));
    LF_UNLOCK(&sink->lock);
}

/* In a child that was forked off, what waits is the parent's to send. */
static PyObject *
sink_forget(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Sink *sink = (Sink *)self;
    LF_MUTEX_RESET(&sink->lock);
    sink->accepted = sink->dropped = 0;
    sink->told = 0;
    Batch *batch = take_all(sink); /* first: what is freed may have finalisers, which end spans */
#if defined(Py_GIL_DISABLED)
    (void)batch; /* another thread of the parent may have been in the middle of it: it is left behind */
    memset(&sink->spare, 0, sizeof(sink->spare));
#else
    free_all(sink, batch);
#endif
    Py_RETURN_NONE;
}

/* At the end, what could not be sent is dropped. */
static PyObject *
sink_discard(PyObject *self, PyObject *Py_UNUSED(unused))
{
    Sink *sink = (Sink *)self;
    LF_LOCK(&sink->lock);
    sink->accepted -= (unsigned long long)sink->waiting;
    sink->dropped += (unsigned long long)sink->waiting;
    Batch *batch = take_all(sink);
    LF_UNLOCK(&sink->lock);
    free_all(sink, batch);
    Py_RETURN_NONE;
}

static PyObject *
sink_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    LF_LOCK(&((Sink *)self)->lock);
    ((Sink *)self)->closed = 1;
    LF_UNLOCK(&((Sink *)self)->lock);
    Py_RETURN_NONE;
}

static PyObject *
sink_add(PyObject *self, PyObject *span)
{
    if (lf_sink_add(self, span) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* encode(span): a request with that one span, or None if it is for the stock encoder. */
static PyObject *
sink_encode(PyObject *Py_UNUSED(self), PyObject *span)
{
    if (!lf_is_span(span)) {
        return PyErr_Format(PyExc_TypeError, "not a span of lensfast: %.100s", Py_TYPE(span)->tp_name);
    }
    Facts facts;
    Batch batch;
    memset(&batch, 0, sizeof(batch));
    Run run = {((LfSpan *)span)->plan, {NULL, 0, 0}};
    batch.run = &run;
    batch.runs = 1;
    int done;
    Py_BEGIN_CRITICAL_SECTION(span);
    done = ask(&facts, (LfSpan *)span);
    if (done == ENCODED) {
        done = encode_span(&run.buffer, (LfSpan *)span, &facts);
    }
    Py_END_CRITICAL_SECTION();
    PyObject *request = done == ENCODED ? batch_request(&batch) : done == ODD ? Py_NewRef(Py_None) : PyErr_NoMemory();
    forget(&facts);
    PyMem_RawFree(run.buffer.data);
    return request;
}

static PyObject *
sink_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"wake", "max_spans", "max_bytes", "batch_spans", "batch_bytes", NULL};
    PyObject *function;
    Py_ssize_t max_spans, max_bytes, batch_spans, batch_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnn", names, &function, &max_spans, &max_bytes, &batch_spans,
                                     &batch_bytes)) {
        return NULL;
    }
    Sink *sink = (Sink *)type->tp_alloc(type, 0);
    if (sink == NULL) {
        return NULL;
    }
    sink->wake = Py_NewRef(function);
    sink->max_spans = max_spans;
    sink->max_bytes = (size_t)max_bytes;
    sink->batch_spans = batch_spans;
    sink->batch_bytes = (size_t)batch_bytes;
    return (PyObject *)sink;
}

static int
sink_traverse(PyObject *self, visitproc visit, void *arg)
{
    Sink *sink = (Sink *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(sink->wake);
    for (Batch *batch = sink->oldest; batch != NULL; batch = batch->next) {
        Py_VISIT(batch->odd);
        for (int i = 0; i < batch->runs; i++) {
            Py_VISIT(batch->run[i].plan);
        }
    }
    return 0;
}

static int
sink_clear(PyObject *self)
{
    Sink *sink = (Sink *)self;
    sink->closed = 1;
    free_all(sink, take_all(sink));
    Py_CLEAR(sink->wake);
    return 0;
}

static void
sink_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    sink_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#define COUNT(name, field)                                                                                            \
    static PyObject *sink_##name(PyObject *self, void *Py_UNUSED(closure))                                            \
    {                                                                                                                 \
        LF_LOCK(&((Sink *)self)->lock);                                                                               \
        unsigned long long count = (unsigned long long)((Sink *)self)->field;                                         \
        LF_UNLOCK(&((Sink *)self)->lock);                                                                             \
        return PyLong_FromUnsignedLongLong(count);                                                                    \
    }

COUNT(accepted, accepted)
COUNT(dropped, dropped)
COUNT(waiting, waiting)
COUNT(waiting_bytes, waiting_size)

static PyMethodDef sink_methods[] = {
    {"add", sink_add, METH_O, "add(span): take a sampled span in, or count it as dropped."},
    {"take", sink_take, METH_O, "take(everything): (request, odd spans, number of spans) of the oldest batch, or None."},
    {"forget", sink_forget, METH_NOARGS, "Empty the queue and begin to count again."},
    {"discard", sink_discard, METH_NOARGS, "Empty the queue: what waits counts as dropped."},
    {"close", sink_close, METH_NOARGS, "From now on, every span is dropped."},
    {"encode", sink_encode, METH_O, "encode(span): a request with one span; None if C leaves it to the stock encoder."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef sink_getset[] = {
    {"accepted", sink_accepted, NULL, "Spans that were taken in.", NULL},
    {"dropped", sink_dropped, NULL, "Spans that were not: the queue was full or closed.", NULL},
    {"waiting", sink_waiting, NULL, "Spans that have been taken in and not out.", NULL},
    {"waiting_bytes", sink_waiting_bytes, NULL, "Their size (a span for the stock encoder counts as 4096).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot sink_slots[] = {
    {Py_tp_doc, "A bounded queue of encoded spans."},
    {Py_tp_new, sink_new},
    {Py_tp_traverse, sink_traverse},
    {Py_tp_clear, sink_clear},
    {Py_tp_dealloc, sink_dealloc},
    {Py_tp_methods, sink_methods},
    {Py_tp_getset, sink_getset},
    {0, NULL},
};

static PyType_Spec sink_spec = {
    .name = "lensfast._gate.Sink",
    .basicsize = sizeof(Sink),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = sink_slots,
};

int
lf_otlp_init(void)
{
    if (lf_sink_type == NULL) {
        lf_sink_type = (PyTypeObject *)PyType_FromSpec(&sink_spec);
    }
    return lf_sink_type == NULL ? -1 : 0;
}
