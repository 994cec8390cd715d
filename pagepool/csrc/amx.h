/* amx.h: whether this process may use AMX. */
#ifndef PP_AMX_H
#define PP_AMX_H

/* PP_AMX_REFUSED: the CPU has AMX with bf16, but the system does not let the process use it. */
enum { PP_AMX_MISSING, PP_AMX_REFUSED, PP_AMX_PERMITTED };

/* Asks the system at the first call, for all threads of the process and its children.  It has its own source file, so
 * that tests that emulate AMX can replace it. */
int pp_amx_state(void);

#endif
