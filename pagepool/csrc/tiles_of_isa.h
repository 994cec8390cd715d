/* tiles_of_isa.h: products of tiles by vectors, as pp_tiles_<PP_ISA>. Included once per ISA, inside its target region
 * and after its vector functions. */
#include "convert_rows.h"
#include "softmax_math.h"
#include "unit_rows.h"

#include "tiles_vectors.h"
#include "tiles_panel.h"
#include "tiles_run.h"
