/* Norms and activations. */

#ifndef TOKENBUS_LAYERS_H
#define TOKENBUS_LAYERS_H

#include <math.h>

#include "decoder.h"

static void normalize(const Norm *norm, const float *x, float *y) {
    int64_t size = norm->size;
    float factor = 1.0f / sqrtf(dot(x, x, size) / (float)size + norm->eps);
    for (int64_t i = 0; i < size; i++)
        y[i] = x[i] * factor * norm->gain[i];
}

/* tanh(v), by the exponential function. */
INLINE Vector hyperbolic(Vector v) {
    return 1.0f - 2.0f / (exponential(v + v) + 1.0f);
}

/* Applies an activation to values, in place. */
static void activate(int64_t activation, float *values, int64_t count) {
    if (activation == SILU)
        FOR_EACH(values, count, v, v / (exponential(-v) + 1.0f));
    else
        FOR_EACH(values, count, v,
                 v / (exponential(FUSED(v * v * v, all(0.044715f), v) * -1.5957691216f) + 1.0f));
}

#endif
