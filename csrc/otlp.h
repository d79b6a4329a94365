/* Ended spans as OTLP, in bounded buffers that wait for the thread which sends them. */
#ifndef LENSFAST_OTLP_H
#define LENSFAST_OTLP_H

#include "span.h"

extern PyTypeObject *lf_sink_type;

int lf_otlp_init(void);

/* Take an ended span in, ours or another one, or count it as dropped. Fails with an exception only if `wake` does. */
int lf_sink_add(PyObject *sink, PyObject *span);

#endif
