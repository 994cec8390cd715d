/* base_2.h: logits in base 2.  Between the queries and the log of a sum all are multiplied by log2 e: 2^x of them takes
 * fewer operations than exp. */
#ifndef PP_BASE_2_H
#define PP_BASE_2_H

#include <float.h>
#include <math.h>

#define PP_LOG2_E 1.4426950408889634
#define PP_LN_2 0.6931471805599453

/* A logit, or what multiplies logits, in base 2.  What would be too large is the largest float, and no infinity, which
 * times 0 would be NaN. */
static inline float pp_in_base_2(float x) {
    const double scaled = x * PP_LOG2_E;
    return isfinite(x) && fabs(scaled) > FLT_MAX ? copysignf(FLT_MAX, x) : (float)scaled;
}

/* log(2^shift * total), in base e. */
static inline float pp_lse(float shift, float total) { return (float)(shift * PP_LN_2 + log(total)); }

#endif
