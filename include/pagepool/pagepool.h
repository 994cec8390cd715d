/* pagepool/pagepool.h: includes all public headers. */
#ifndef PAGEPOOL_PAGEPOOL_H
#define PAGEPOOL_PAGEPOOL_H

#include "pagepool/allocator_api.h"
#include "pagepool/attention.h"
#include "pagepool/cpu.h"
#include "pagepool/layout.h"
#include "pagepool/lock.h"
#include "pagepool/status.h"
#include "pagepool/threads.h"
#include "pagepool/version.h"

#endif
